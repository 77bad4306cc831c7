"""Runs with instances of role `both`: the engine with joint steps serves their requests from arrival to end."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute import llm
from kvroute.control import ControlSpec
from kvroute.sim.engine.clients import run_engine
from kvroute.sim.engine.scheduler import EngineRequest, EngineSpec
from kvroute.sim.metrics import FINISHED
from kvroute.sim.run import Run, simulate
from kvroute.sim.settings import SimSpec
from kvroute.sim.workload import Trace, TracedRequest
from kvroute.timing.steps import timing_steps
from kvroute.topology import parse
from kvroute.types import InputError

ONE = """
name: both
racks: [{name: rack0}]
nodes: [{name: node0, rack: rack0, gpus: 8, nvlink: 450 GB/s, nics: {compute: {count: 8, capacity: 100 Gbps}}}]
timing:
  default:
    prefill: {kind: quadratic, base: 12 ms, per_token: 90 us, per_token2: 5 ns}
    decode: {base: 12 ms, per_request: 0.1 ms, per_context_token: 20 ns}
    scheduler: {request: 6 ms, streaming_request: 50 us}
defaults: {model: llama-3-8b, tp: 2, kv_capacity: 1 GB, batch_max: 8, chunk_tokens: 512}
instances:
  - {name: e0, role: both, gpus: "node0:0-1"}
"""
MORE = """
  - {name: e1, role: both, gpus: "node0:2-3"}
  - {name: p0, role: prefill, gpus: "node0:4-5"}
  - {name: d0, role: decode, gpus: "node0:6-7"}
"""
BLOCKS = int(1e9 // llm.model("llama-3-8b").block_bytes(16))

lines = st.lists(
    st.tuples(st.integers(0, 3000), st.integers(1, 2500), st.integers(1, 200), st.integers(0, 2), st.integers(0, 5)),
    min_size=1,
    max_size=12,
)


def trace_of(drawn: list[tuple[int, ...]]) -> Trace:
    """Return requests whose first blocks of 256 tokens are those of their family."""
    requests = []
    for number, (at, input_tokens, output_tokens, family, common) in enumerate(sorted(drawn)):
        count = -(-input_tokens // 256)
        blocks = tuple(
            100 * family + place if place < min(common, input_tokens // 256) else 10_000 * (number + 1) + place
            for place in range(count)
        )
        requests.append(TracedRequest(at / 1e3, input_tokens, output_tokens, blocks, 256))
    return Trace(name="drawn", requests=tuple(requests))


def plain(at_s: float, input_tokens: int, output_tokens: int) -> TracedRequest:
    """Return a request that shares nothing."""
    return TracedRequest(at_s, input_tokens, output_tokens, (), 16)


def run_on(text: str, trace: Trace, **settings: object) -> Run:
    return simulate(parse(text), trace, ControlSpec(), SimSpec(**settings))  # type: ignore[arg-type]


@given(lines)
def test_one_instance_has_the_times_of_its_engine(drawn: list[tuple[int, ...]]) -> None:
    """The router has no choice, so each request has the times that the engine gives it; blocks of 256 tokens are found
    as 16 of the engine's."""
    trace, cluster = trace_of(drawn), parse(ONE)
    run = simulate(cluster, trace, ControlSpec(), SimSpec())
    requests = [
        EngineRequest(
            number,
            traced.at_s,
            traced.input_tokens,
            traced.output_tokens,
            tuple((traced.blocks[position // 16], position) for position in range(traced.input_tokens // 16)),
        )
        for number, traced in enumerate(trace.requests)
    ]
    steps = timing_steps(cluster.timing["default"])
    spec = EngineSpec(step_tokens=512, requests_max=8, blocks=BLOCKS, request_s=6e-3, streaming_request_s=50e-6)
    run_engine(spec, lambda works: steps(works[0]), requests)
    rows = run.outcomes
    assert (rows.state == FINISHED).all()
    assert rows.first_token_s.tolist() == [request.first_token_s for request in requests]
    assert rows.finished_s.tolist() == [request.ended_s for request in requests]
    assert rows.cached_tokens.tolist() == [request.cached_tokens for request in requests]


@given(lines)
def test_every_request_ends_beside_other_instances(drawn: list[tuple[int, ...]]) -> None:
    """With a pair of prefill and decode beside two engines of both roles; times are in their order."""
    run = run_on(ONE + MORE, trace_of(drawn))
    rows = run.outcomes
    assert (rows.state == FINISHED).all()
    order = (rows.arrived_s, rows.prefill_started_s, rows.prefill_finished_s, rows.first_token_s, rows.finished_s)
    assert (np.diff(np.stack(order), axis=0) >= -1e-9).all()
    assert run.summary.requests.in_flight == 0


def test_prompts_share_steps_with_requests_that_decode() -> None:
    """The first request decodes alone from 12 + 9 ms on. At 100 ms a prompt of 600 tokens arrives; it takes two steps,
    which also decode the first request, and each of these is as much longer as its tokens take."""
    text = ONE.replace("per_token2: 5 ns", "per_token2: 0 ns").replace(
        "per_context_token: 20 ns", "per_context_token: 0 ns"
    )
    text = text.replace("scheduler: {request: 6 ms, streaming_request: 50 us}", "scheduler: {asynchronous: false}")
    requests = (plain(0.0, 100, 100), plain(0.1, 600, 1))
    rows = run_on(text, Trace(name="two", requests=requests)).outcomes
    first_s, step_s = 0.012 + 100 * 90e-6, 0.012 + 0.1e-3
    begin_s = first_s + step_s * np.ceil((0.1 - first_s) / step_s)
    assert rows.first_token_s[0] == pytest.approx(first_s)
    assert rows.prefill_started_s[1] == pytest.approx(begin_s)
    assert rows.first_token_s[1] == pytest.approx(begin_s + 2 * step_s + 600 * 90e-6)
    assert rows.finished_s[0] == pytest.approx(first_s + 99 * step_s + 600 * 90e-6)


def test_a_request_without_output_tokens_ends_with_its_prompt() -> None:
    run = run_on(ONE, Trace(name="one", requests=(plain(0.0, 100, 0), plain(1.0, 100, 5))))
    assert (run.outcomes.state == FINISHED).all()
    assert np.isnan(run.outcomes.first_token_s[0])


def test_a_request_larger_than_the_memory_is_named() -> None:
    requests = (plain(0.0, 100, 5), plain(1.0, 16 * BLOCKS, 20))
    with pytest.raises(
        InputError, match=f"request 1 of {16 * BLOCKS:,} . 20 tokens is larger than the KV memory of .* e0"
    ):
        run_on(ONE, Trace(name="large", requests=requests))


@pytest.mark.parametrize(
    ("text", "settings", "feature"),
    [
        (ONE.replace('gpus: "node0:0-1"', 'pp: 2, gpus: "node0:0-3"'), {}, "2 pipeline stages"),
        (ONE, {"lock_step": True}, "iterations in lock-step"),
    ],
)
def test_what_is_not_modelled_beside_role_both_is_named(text: str, settings: dict[str, bool], feature: str) -> None:
    trace = Trace(name="one", requests=(plain(0.0, 100, 5),))
    spec = ControlSpec(decode="foresight")
    with pytest.raises(InputError, match=f"instance e0 has role 'both', .* beside {feature}"):
        simulate(parse(text), trace, spec, SimSpec(**settings))  # type: ignore[arg-type]


def test_the_scheduler_of_a_cluster_file() -> None:
    scheduler = parse(ONE).timing["default"].scheduler
    assert (scheduler.asynchronous, scheduler.request_s, scheduler.streaming_request_s) == (True, 6e-3, 50e-6)
    assert msgspec.to_builtins(scheduler)["transfers"] == "at-once"
