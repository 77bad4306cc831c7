"""Laws of every run of the simulator, for any cluster, trace and policy."""

from __future__ import annotations

import json
import tempfile
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvroute.control import ControlSpec, LogHeader, decisions_equal, replay
from kvroute.control.log import EventLog, read_log
from kvroute.policies import DECODE_POLICIES, PREFILL_POLICIES
from kvroute.sim.metrics import FINISHED, IN_FLIGHT, NOT_ARRIVED, REJECTED
from kvroute.sim.run import Run, simulate
from kvroute.sim.settings import Background, SimSpec
from kvroute.sim.workload import Trace, TracedRequest
from kvroute.topology import Cluster, parse
from kvroute.types import TIER_COUNT

CLUSTER = """
name: law
pods: [{name: pod0, uplinks: {count: 2, capacity: 25 Gbps}}, {name: pod1, uplinks: {count: 2, capacity: 25 Gbps}}]
racks:
  - {name: rack0, pod: pod0, uplinks: {count: 2, capacity: 50 Gbps}}
  - {name: rack1, pod: pod0, uplinks: {count: 2, capacity: 50 Gbps}}
  - {name: rack2, pod: pod1, uplinks: {count: 2, capacity: 50 Gbps}}
nodes:
  - {name: node0, rack: rack0, gpus: 8, nics: {compute: {count: 8, capacity: 100 Gbps}}}
  - {name: node1, rack: rack1, gpus: 8, nics: {compute: {count: 8, capacity: 100 Gbps}}}
  - {name: node2, rack: rack2, gpus: 8, nics: {compute: {count: 8, capacity: 100 Gbps}}}
network: {latency: {node: 1 us, rack: 3 us, pod: 8 us, datacenter: 15 us}, ecmp: ECMP}
timing:
  default:
    prefill: {kind: linear, per_token: 90 us, base: 20 ms}
    decode: {base: 12.5 ms, per_request: 0.1 ms, per_context_token: CONTEXT}
defaults: {model: llama-3-70b, tp: 4, batch_max: BATCH, kv_capacity: MEMORY, timing: default}
instances:
  - {name: p0, role: prefill, gpus: "node0:0-3"}
  - {name: p1, role: prefill, gpus: "node1:0-3"}
  - {name: d0, role: decode, gpus: "node0:4-7"}
  - {name: d1, role: decode, gpus: "node1:4-7"}
  - {name: d2, role: decode, gpus: "node2:0-3"}
  - {name: d3, role: decode, gpus: "node2:4-7"}
"""


def cluster(*, batch_max: int = 64, memory: str = "180 GB", ecmp: str = "flow", context: str = "0 s") -> Cluster:
    """Return six instances on three racks; batches and memories are so small that every limit is reached."""
    text = CLUSTER.replace("BATCH", str(batch_max)).replace("MEMORY", memory)
    return parse(text.replace("ECMP", ecmp).replace("CONTEXT", context))


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Draw bursts of requests that share prefixes by group, some with zero-length outputs."""
    count = draw(st.integers(0, 40))
    gaps = draw(st.lists(st.sampled_from([0.0, 0.0, 0.1, 3.0]), min_size=count, max_size=count))
    at_s, requests = 0.0, []
    for number, gap in enumerate(gaps):
        at_s += gap
        tokens = draw(st.integers(1, 30_000))
        group, shared = draw(st.integers(0, 2)), draw(st.integers(0, 60))
        full = tokens // 512
        chain = tuple(
            group * 1_000 + depth if depth < shared else 10_000 + number * 100 + depth for depth in range(full)
        )
        requests.append(
            TracedRequest(
                at_s=at_s,
                input_tokens=tokens,
                output_tokens=draw(st.sampled_from([0, 1, 2, 50, 400])),
                blocks=chain,
                block_tokens=512,
            )
        )
    return Trace(name="law", requests=tuple(requests))


clusters = st.builds(
    cluster,
    batch_max=st.sampled_from([1, 2, 64]),
    memory=st.sampled_from(["2 GB", "12 GB", "180 GB"]),
    ecmp=st.sampled_from(["flow", "transfer"]),
    context=st.sampled_from(["0 s", "20 ns"]),
)
specs = st.builds(
    ControlSpec,
    decode=st.sampled_from(sorted(DECODE_POLICIES)),
    prefill=st.sampled_from(sorted(PREFILL_POLICIES)),
    constraint=st.sampled_from(["", "pod:fail", "rack:fallback", "pod:preferred:0.5"]),
    prefill_cache=st.booleans(),
)
assumptions = st.builds(
    SimSpec,
    prefill_queueing=st.booleans(),
    decode_cache=st.booleans(),
    background=st.sampled_from(
        [Background(), Background.uniform(0.4), Background(burst_per_tier=(0, 0, 0.5, 0.5, 0), burst_every_s=2.0)]
    ),
    separates_own_traffic=st.booleans(),
    telemetry=st.sampled_from(["tier", "link", "none"]),
    until_s=st.sampled_from([None, None, 5.0]),
)
many = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@many
@given(clusters, traces(), specs, assumptions, st.integers(0, 5))
def test_every_request_ends_exactly_once(
    cluster: Cluster, trace: Trace, spec: ControlSpec, assumed: SimSpec, seed: int
) -> None:
    """Each one is finished, rejected or in flight; a run to the end leaves nothing in flight."""
    run = simulate(cluster, trace, spec, assumed, seed=seed)
    counts = run.summary.requests
    assert counts.arrived == counts.finished + counts.rejected + counts.in_flight
    states = run.outcomes.state
    assert np.isin(states, (IN_FLIGHT, FINISHED, REJECTED, NOT_ARRIVED)).all()
    if assumed.until_s is None:
        assert counts.arrived == len(trace.requests)
        assert counts.in_flight == 0
    done = states == FINISHED
    assert np.isfinite(run.outcomes.finished_s[done]).all()
    assert np.isnan(run.outcomes.finished_s[~done]).all()


@many
@given(clusters, traces(), specs, assumptions)
def test_times_are_in_order_and_parts_add_up(
    cluster: Cluster, trace: Trace, spec: ControlSpec, assumed: SimSpec
) -> None:
    """Arrival <= prefill start <= prefill end <= transfer end <= admission < first token <= finish. A request that
    stays on its prefill instance has its first token when the prompt ends; without a queue of prompts it may wait for a
    slot after that."""
    rows = simulate(cluster, trace, spec, assumed, seed=1).outcomes
    before = [rows.arrived_s, rows.prefill_started_s, rows.prefill_finished_s, rows.landed_s]
    prefills = np.array([instance.role == "prefill" for instance in cluster.instances])
    stays = (rows.source == rows.target) & (rows.source >= 0) & prefills[rows.source]
    marks = [*before, rows.admitted_s, np.where(stays, np.nan, rows.first_token_s)]
    for earlier, later in [*pairwise(marks), (rows.prefill_finished_s, rows.first_token_s)]:
        known = np.isfinite(earlier) & np.isfinite(later)
        assert (later[known] >= earlier[known]).all()
    ended = np.isfinite(rows.finished_s) & np.isfinite(rows.first_token_s)
    assert (rows.finished_s[ended] >= rows.first_token_s[ended] - 1e-9).all()


@many
@given(clusters, traces(), specs, assumptions)
def test_bytes_sent_are_bytes_received(cluster: Cluster, trace: Trace, spec: ControlSpec, assumed: SimSpec) -> None:
    """The network carried each transfer over each of its hops exactly once."""
    run = simulate(cluster, trace, spec, msgspec.structs.replace(assumed, until_s=None), seed=2)
    rows = run.outcomes
    sent = np.isfinite(rows.landed_s)
    hops = [len(cluster.hops(int(a), int(b), 0)) for a, b in zip(rows.source[sent], rows.target[sent], strict=True)]
    assert run.network_bytes == pytest.approx(float((rows.kv_bytes[sent] * hops).sum()), rel=1e-9, abs=1.0)
    assert (run.link_bytes <= cluster.capacity_bytes_per_s * run.end_s * (1 + 1e-9) + 1.0).all()
    for shares in run.timeline.tier.values():
        assert max(shares, default=0.0) <= 1 + 1e-9
    # Means of intervals add up to the bytes that were sent until the last refresh: no short transfer is missed.
    at_s = np.array((0.0, *run.timeline.at_s))
    all_landed = at_s[-1] >= rows.landed_s[sent].max(initial=0.0)
    for tier in range(TIER_COUNT):
        links = np.asarray(cluster.links_of_tier(tier), dtype=np.int64)
        whole = float(cluster.capacity_bytes_per_s[links].sum())
        moved = float((np.array(run.timeline.tier[str(tier)]) * np.diff(at_s)).sum()) * whole
        carried = float(run.link_bytes[links].sum())
        assert moved <= carried * (1 + 1e-6) + 1.0
        if all_landed:
            assert moved == pytest.approx(carried, rel=1e-6, abs=1.0)


@many
@given(clusters, traces(), specs, assumptions)
def test_batches_and_memory_stay_within_limits(
    cluster: Cluster, trace: Trace, spec: ControlSpec, assumed: SimSpec
) -> None:
    """An instance never decodes more than batch_max requests and never holds more KV than it has memory for."""
    rows = simulate(cluster, trace, spec, assumed, seed=3).outcomes
    token_bytes = 327_680.0
    for index, instance in enumerate(cluster.instances):
        mine = (rows.target == index) & np.isfinite(rows.admitted_s)
        assert (
            _most_at_once(rows.admitted_s[mine], rows.finished_s[mine], np.ones(int(mine.sum()))) <= instance.batch_max
        )
        held = (rows.target == index) & np.isfinite(rows.landed_s)
        own_tokens = (rows.input_tokens + rows.output_tokens - rows.hit_tokens)[held]
        most = _most_at_once(rows.prefill_finished_s[held], rows.finished_s[held], own_tokens * token_bytes)
        assert most <= instance.kv_capacity_bytes * (1 + 1e-9)


@pytest.mark.parametrize("queueing", [True, False])
def test_a_request_that_stays_on_a_busy_prefill_instance_waits_for_a_slot(queueing: bool) -> None:
    """The end of its prompt gives the first token. It is admitted when a slot is free, as the batch limit demands: its
    prompt waits for the slot, or the prompt of an engine without a queue has none."""
    requests = tuple(TracedRequest(0.1 * (number // 4), 3_000, 50, (), 512) for number in range(12))
    spec, assumed = ControlSpec(decode="foresight-joint"), SimSpec(prefill_queueing=queueing)
    run = simulate(cluster(batch_max=1), Trace("stay", requests), spec, assumed, seed=3)
    rows = run.outcomes
    stays = (rows.source == rows.target) & np.isin(rows.source, (4, 5))
    assert stays.any()
    assert (rows.admitted_s[stays] > rows.first_token_s[stays]).any() != queueing
    for index in range(6):
        mine = rows.target == index
        assert _most_at_once(rows.admitted_s[mine], rows.finished_s[mine], np.ones(int(mine.sum()))) <= 1
    parts = msgspec.structs.astuple(run.summary.ttft_parts_s)
    assert all(mean is not None and mean >= 0.0 for mean in parts)


def _most_at_once(begin_s: np.ndarray, end_s: np.ndarray, amount: np.ndarray) -> float:
    """Return the largest sum of `amount` over intervals [begin, end); a missing end counts as infinite."""
    end_s = np.where(np.isnan(end_s), np.inf, end_s)
    at = np.concatenate([end_s, begin_s])
    change = np.concatenate([-amount, amount])
    order = np.lexsort((np.arange(len(at)), at))
    return float(max(change[order].cumsum(), default=0.0))


@many
@given(clusters, traces(), specs, assumptions, st.integers(0, 3))
def test_the_same_seed_gives_the_same_log_and_it_replays(
    cluster: Cluster, trace: Trace, spec: ControlSpec, assumed: SimSpec, seed: int
) -> None:
    """Two runs write the same bytes; a new core with the log's events makes the same decisions."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("first.log", "second.log")]
        for path in paths:
            with EventLog(path, LogHeader(cluster="", spec=spec)) as log:
                simulate(cluster, trace, spec, assumed, seed=seed, log=log)
        assert paths[0].read_bytes() == paths[1].read_bytes()
        header, records = read_log(paths[0])
        for record, again in replay(header.spec.build(cluster), records):
            assert decisions_equal(record.decisions, again)


@many
@given(clusters, traces(), specs, assumptions)
def test_the_routers_view_of_caches_is_correct(
    cluster: Cluster, trace: Trace, spec: ControlSpec, assumed: SimSpec
) -> None:
    """Every cached prefix that a decision relied on was there: no transfer was smaller than what the target lacked."""
    rows = simulate(cluster, trace, spec, msgspec.structs.replace(assumed, until_s=None), seed=4).outcomes
    landed, aggregated = np.isfinite(rows.landed_s), rows.source == rows.target
    assert not rows.kv_bytes[landed & aggregated].any()
    sent = landed & ~aggregated
    expected = (rows.input_tokens - rows.hit_tokens)[sent] * 327_680.0
    assert rows.kv_bytes[sent] == pytest.approx(expected)


def test_an_empty_trace_gives_an_empty_run() -> None:
    """There are no requests, no times and no NaN in the output."""
    run = simulate(cluster(), Trace(name="empty", requests=()), ControlSpec(), SimSpec())
    assert run.summary.requests.arrived == 0
    assert run.summary.ttft_s.mean is None
    assert "NaN" not in json.dumps(msgspec.to_builtins(run.summary))


def _one(at_s: float = 0.0, tokens: int = 1_000, answer: int = 10) -> TracedRequest:
    return TracedRequest(at_s=at_s, input_tokens=tokens, output_tokens=answer, blocks=(), block_tokens=16)


def test_ttft_of_a_lone_request_by_hand() -> None:
    """By hand: 0.02 + 1000 * 90 us, 327.68 MB in four flows over the 25 Gbps pod uplinks, 15 us, 12.6 ms."""
    text_cluster = cluster(ecmp="transfer")
    spec = ControlSpec(decode="round-robin", prefill="round-robin", constraint="")
    trace = Trace(name="one", requests=tuple(_one(at_s=100.0 * k) for k in range(3)))
    run: Run = simulate(text_cluster, trace, spec, SimSpec())
    rows = run.outcomes
    third = 2  # turn 2: prefill p0 in rack0, decode d2 in pod1
    assert [text_cluster.instances[i].name for i in (rows.source[third], rows.target[third])] == ["p0", "d2"]
    transfer_s = 1_000 * 327_680 / (25e9 / 8) + 15e-6
    assert rows.ttft_s[third] == pytest.approx(0.02 + 1_000 * 90e-6 + transfer_s + 12.6e-3, rel=1e-9)
    assert rows.finished_s[third] - rows.first_token_s[third] == pytest.approx(9 * 12.6e-3)


def test_more_bandwidth_never_slows_a_single_transfer() -> None:
    """On a cluster with faster uplinks, the transfer of the same request ends no later."""
    trace = Trace(name="one", requests=(_one(tokens=20_000),))
    spec = ControlSpec(decode="round-robin", prefill="round-robin")
    slow = simulate(parse(_text("25 Gbps")), trace, spec, SimSpec())
    fast = simulate(parse(_text("50 Gbps")), trace, spec, SimSpec())
    assert fast.outcomes.landed_s[0] <= slow.outcomes.landed_s[0]


def _text(uplink: str) -> str:
    text = CLUSTER.replace("BATCH", "64").replace("MEMORY", "180 GB").replace("ECMP", "flow").replace("CONTEXT", "0 s")
    return text.replace("25 Gbps", uplink)


def test_a_prompt_too_large_for_memory_is_rejected_with_the_reason(tmp_path: Path) -> None:
    """Memory holds 6,000 tokens and the prompt has 20,000: the decision states how much is missing."""
    path = tmp_path / "run.log"
    spec = ControlSpec()
    with EventLog(path, LogHeader(cluster="", spec=spec)) as log:
        run = simulate(
            cluster(memory="2 GB"), Trace(name="big", requests=(_one(tokens=20_000),)), spec, SimSpec(), log=log
        )
    assert run.summary.requests.rejected == 1
    assert "room for the KV cache" in path.read_text()
