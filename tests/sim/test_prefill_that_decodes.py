"""A prefill instance that goes on to decode: chunks of its prompts beside the steps of its batch, times by hand."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.control import ControlSpec
from kvroute.sim.metrics import Outcomes
from kvroute.sim.run import simulate
from kvroute.sim.settings import SimSpec
from kvroute.sim.workload import Trace, TracedRequest
from kvroute.topology import Cluster, parse

CLUSTER = """
name: alone
timing:
  default:
    prefill: {kind: linear, per_token: 0.1 ms, base: 20 ms}
    decode: {base: 12 ms, per_request: 1 ms}
network: {latency: {node: 1 us, rack: 3 us, pod: 8 us, datacenter: 15 us}}
racks: [{name: rack0}]
nodes:
  - {name: node0, rack: rack0, gpus: 8, nics: {compute: {count: 8, capacity: 100 Gbps}}}
defaults: {model: llama-3-70b, tp: 4, batch_max: 8, chunk_tokens: 1001, timing: default}
instances:
  - {name: p0, role: prefill, gpus: "node0:0-3", kv_capacity: 180 GB}
  - {name: d0, role: decode, gpus: "node0:4-7", kv_capacity: KV_CAPACITY}
"""


def cluster(decode_kv: str = "1 MB") -> Cluster:
    """Return a prefill and a decode instance, whose memory by default holds no request: p0 serves all of them."""
    return parse(CLUSTER.replace("KV_CAPACITY", decode_kv))


def run(*requests: tuple[float, int, int], assumed: SimSpec | None = None, decode_kv: str = "1 MB") -> Outcomes:
    """Simulate requests of (arrival, prompt tokens, output tokens)."""
    rows = tuple(TracedRequest(at, tokens, output, (), 16) for at, tokens, output in requests)
    spec = ControlSpec(decode="foresight-joint")
    return simulate(cluster(decode_kv), Trace("alone", rows), spec, assumed or SimSpec(), seed=0).outcomes


def test_decodes_advance_beside_the_chunks_of_a_later_prompt() -> None:
    """The first prompt ends at 0.02 + 0.1 s and has 13 ms per token. The second arrives in the seventh step and begins
    at its end, 0.12 + 7 * 0.013 = 0.211. Its 2,500 tokens take chunks of 1,000, 1,000 and 500, each beside one token;
    the base of a prefill is in the step. From then on a step takes 14 ms."""
    found = run((0.0, 1_000, 51), (0.2, 2_500, 11))
    assert found.source.tolist() == found.target.tolist() == [1, 1]
    assert found.first_token_s[0] == pytest.approx(0.12)
    assert found.prefill_started_s[1] == pytest.approx(0.211)
    assert found.first_token_s[1] == pytest.approx(0.211 + 3 * 0.013 + 0.25)
    assert found.finished_s[1] == pytest.approx(0.5 + 10 * 0.014)
    # 50 tokens after the first: 7 before the prompt, 3 beside it, 10 beside the other response and 30 alone.
    assert found.finished_s[0] == pytest.approx(0.64 + 30 * 0.013)
    assert found.admitted_s == pytest.approx(found.first_token_s)


def test_a_prompt_of_the_queue_waits_for_the_prompt_that_is_computed_alone() -> None:
    """Nothing decodes before the first prompt ends, so it is not divided; those behind it then share a step."""
    found = run((0.0, 3_000, 3), (0.1, 200, 1), (0.1, 300, 1))
    assert found.first_token_s == pytest.approx([0.32, 0.32 + 0.013 + 0.05, 0.32 + 0.013 + 0.05])
    assert found.finished_s == pytest.approx([0.383 + 0.013, 0.383, 0.383])


def test_without_a_queue_the_batch_waits_for_whole_prompts() -> None:
    """A prompt that starts at once, whatever else is computed, has no place between chunks."""
    found = run((0.0, 1_000, 51), (0.2, 2_500, 1), assumed=SimSpec(prefill_queueing=False))
    assert found.first_token_s[1] == pytest.approx(0.2 + 0.27)
    assert found.finished_s[0] == pytest.approx(0.12 + 50 * 0.013 + 0.27)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(
        st.tuples(st.sampled_from((0.0, 0.05, 0.4, 1.0)), st.integers(1, 6_000), st.integers(0, 60)), max_size=20
    ),
    transfer=st.sampled_from(("serial", "layerwise")),
    decode_kv=st.sampled_from(("1 MB", "4 GB", "180 GB")),
)
def test_every_request_ends_no_sooner_than_alone(
    sizes: list[tuple[float, int, int]], transfer: Literal["serial", "layerwise"], decode_kv: str
) -> None:
    """However prompts and responses meet, on the prefill instance, on the decode instance or on both."""
    at_s = np.cumsum([gap for gap, _, _ in sizes]).tolist()
    requests = ((at, tokens, output) for at, (_, tokens, output) in zip(at_s, sizes, strict=True))
    found = run(*requests, assumed=SimSpec(transfer=transfer), decode_kv=decode_kv)
    for number, (_, tokens, output) in enumerate(sizes):
        if output:
            assert found.prefill_started_s[number] >= found.arrived_s[number] - 1e-9
            assert found.first_token_s[number] - found.prefill_started_s[number] >= tokens * 1e-4 - 1e-9
            assert found.finished_s[number] >= found.first_token_s[number] + (output - 1) * 0.013 - 1e-9
        assert np.isfinite(found.finished_s[number])
