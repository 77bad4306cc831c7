"""Laws of every run over a WAN: for any cuts, slow links and early transfers, nothing is lost or counted twice."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvroute.control import ControlSpec, LogHeader, LogRecord, decisions_equal, replay
from kvroute.control.log import EventLog, read_log
from kvroute.policies.fleet.offload import OffloadSpec
from kvroute.policies.fleet.role_switch import LongTerm
from kvroute.sim.metrics import FINISHED, REJECTED
from kvroute.sim.run import simulate
from kvroute.sim.settings import CapacityChange, Fluctuation, SimSpec, WanTransport
from kvroute.sim.workload import Trace, TracedRequest
from kvroute.topology import Cluster, parse
from kvroute.types import CROSS_DATACENTER, Decode, DecodeFailed, KvCleared, Prefill, RoleSwitched, SwitchRole

TEXT = """
name: sites
datacenters: [{name: away}, {name: home}]
racks:
  - {name: rack0, datacenter: away, uplinks: {capacity: 400 Gbps}}
  - {name: rack1, datacenter: home, uplinks: {capacity: 400 Gbps}}
nodes:
  - {name: node0, rack: rack0, gpus: 4, nics: {compute: {count: 4, capacity: 100 Gbps}}}
  - {name: node1, rack: rack1, gpus: 12, nics: {compute: {count: 12, capacity: 100 Gbps}}}
wan: [{from: away, to: home, count: COUNT, capacity: WAN, latency: 5 ms}]
timing:
  default:
    prefill: {kind: linear, per_token: 90 us, base: 20 ms}
    decode: {base: 12.5 ms, per_request: 0.1 ms}
defaults: {model: prfaas-1t-hybrid, tp: 4, batch_max: 8, kv_capacity: MEMORY, timing: default}
instances:
  - {name: fast0, role: prefill, gpus: "node0:0-3", ENDPOINT}
  - {name: p0, role: prefill, gpus: "node1:0-3", ENDPOINT}
  - {name: d0, role: decode, gpus: "node1:4-7", ENDPOINT}
  - {name: d1, role: decode, gpus: "node1:8-11", ENDPOINT}
"""
LAYERS = 60
STATE_BYTES, TOKEN_BYTES = 173.9 * 2**20, 17_280


ALL_REDUCE = "all_reduce: {scheme: ring, per_iteration: 120, token_bytes: 14 KB}"


def sites(
    *, protocol: str = "sglang", wan: str = "10 Gbps", count: int = 2, memory: str = "20 GB", reduces: bool = False
) -> Cluster:
    """Return a prefill-only site and one with both roles; with `sglang` the target is known before the prefill. With
    `reduces`, all-reduces at the second site share NVLink with KV transfers."""
    endpoint = f'endpoint: {{url: "http://10.0.0.1:1", protocol: {protocol}, bootstrap: "10.0.0.1:2"}}'
    endpoint += f", {ALL_REDUCE}" if reduces else ""
    text = TEXT.replace("ENDPOINT", endpoint).replace("WAN", wan).replace("COUNT", str(count))
    return parse(text.replace("MEMORY", memory))


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Draw bursts of prompts that share prefixes; some request no output."""
    at_s, requests = 0.0, []
    for number in range(draw(st.integers(0, 25))):
        at_s += draw(st.sampled_from([0.0, 0.1, 2.0]))
        tokens, group = draw(st.integers(1, 20_000)), draw(st.integers(0, 2))
        shared = draw(st.integers(0, 40))
        chain = tuple(
            group * 1_000 + depth if depth < shared else 10_000 + number * 100 + depth for depth in range(tokens // 512)
        )
        answer = draw(st.sampled_from([0, 1, 20, 200]))
        requests.append(
            TracedRequest(at_s=at_s, input_tokens=tokens, output_tokens=answer, blocks=chain, block_tokens=512)
        )
    return Trace(name="law", requests=tuple(requests))


SWITCHING = OffloadSpec(
    threshold_tokens=2_000.0, long_term=LongTerm(review_s=0.5, requests_min=3, gain_min=0.01, busy_above=0.05)
)
cuts = st.lists(
    st.builds(
        CapacityChange,
        at_s=st.floats(0.0, 40.0),
        link=st.sampled_from(["wan", "away to home", "home to away", "away to home #0 up", "node1 nic0 down"]),
        share=st.sampled_from([0.0, 0.0, 0.3, 1.0]),
    ),
    max_size=6,
).map(
    lambda changes: (
        *changes,
        CapacityChange(at_s=45.0, link="wan", share=1.0),
        CapacityChange(at_s=45.0, link="node1 nic0 down", share=0.5),
    )
)
transports = st.none() | st.builds(
    WanTransport, connections=st.sampled_from([1, 3, 8]), loss=st.sampled_from([0.0, 1e-4])
)
assumptions = st.builds(
    SimSpec,
    prefill_queueing=st.booleans(),
    decode_cache=st.booleans(),
    transfer=st.sampled_from(["serial", "layerwise"]),
    wan=transports,
    changes=cuts,
    fluctuations=st.sampled_from([(), (Fluctuation(link="wan", every_s=1.0, share_min=0.05),)]),
    stall_s=st.sampled_from([None, 0.5, 3.0]),
    telemetry=st.sampled_from(["tier", "link", "none"]),
    separates_own_traffic=st.booleans(),
    measures_transfers=st.booleans(),
    role_switch_s=st.sampled_from([0.0, 2.0]),
    review_s=st.sampled_from([None, 1.0]),
)
clusters = st.builds(
    sites,
    protocol=st.sampled_from(["sglang", "vllm"]),
    memory=st.sampled_from(["1 GB", "20 GB"]),
    reduces=st.booleans(),
)
specs = st.builds(
    ControlSpec,
    decode=st.sampled_from(["netkv", "round-robin"]),
    prefill=st.sampled_from(["least-loaded", "round-robin"]),
    prefill_cache=st.booleans(),
    offload=st.none()
    | st.builds(
        OffloadSpec,
        threshold_tokens=st.sampled_from([None, 2_000.0]),
        rule=st.sampled_from(["scarce", "abundant"]),
        layerwise=st.booleans(),
        long_term=st.just(SWITCHING.long_term),
    ),
)
many = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@many
@given(clusters, traces(), specs, assumptions, st.integers(0, 3))
def test_every_request_ends_exactly_once_under_temporary_cuts(
    cluster: Cluster, trace: Trace, spec: ControlSpec, assumed: SimSpec, seed: int
) -> None:
    """Nothing is lost, and times are in order; a replay of the log makes the same decisions."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.log"
        with EventLog(path, LogHeader(cluster="", spec=spec)) as log:
            run = simulate(cluster, trace, spec, assumed, seed=seed, log=log)
        header, records = read_log(path)
        for record, again in replay(header.spec.build(cluster), records):
            assert decisions_equal(record.decisions, again)
    counts, rows = run.summary.requests, run.outcomes
    assert counts.arrived == len(trace.requests) == counts.finished + counts.rejected
    assert np.isin(rows.state, (FINISHED, REJECTED)).all()
    assert np.isfinite(rows.finished_s[rows.state == FINISHED]).all()
    marks = (
        rows.arrived_s,
        rows.prefill_started_s,
        rows.prefill_finished_s,
        rows.landed_s,
        rows.admitted_s,
        rows.first_token_s,
    )
    for earlier, later in pairwise(marks):
        known = np.isfinite(earlier) & np.isfinite(later)
        assert (later[known] >= earlier[known]).all()


@many
@given(clusters, traces(), specs, assumptions)
def test_bytes_sent_are_bytes_received_or_accounted_as_failed(
    cluster: Cluster, trace: Trace, spec: ControlSpec, assumed: SimSpec
) -> None:
    """The bytes of all hops add up. Copies of prefixes are counted separately, and so are the bytes of a failed
    transfer, where transfers can fail."""
    run = simulate(cluster, trace, spec, assumed, seed=2)
    rows, failed, copied = run.outcomes, run.summary.failed_transfers, run.summary.copied_prefixes
    sent = np.isfinite(rows.landed_s)
    hops = [len(cluster.hops(int(a), int(b), 0)) for a, b in zip(rows.source[sent], rows.target[sent], strict=True)]
    landed_bytes = float((rows.kv_bytes[sent] * hops).sum())
    apart_bytes = failed.network_bytes + copied.network_bytes
    apart_bytes += sum(cost.network_bytes for cost in run.summary.all_reduces.values())
    assert run.network_bytes == pytest.approx(landed_bytes + apart_bytes, rel=1e-9, abs=1.0)
    assert (run.link_bytes <= cluster.capacity_bytes_per_s * run.end_s * (1 + 1e-9) + 1.0).all()
    assert assumed.stall_s is not None or failed.transfers == 0
    assert np.isnan(rows.kv_bytes[~sent]).all()


@many
@given(clusters, traces(), specs, assumptions)
def test_the_state_of_a_hybrid_model_is_transferred_whole(
    cluster: Cluster, trace: Trace, spec: ControlSpec, assumed: SimSpec
) -> None:
    """The bytes of a transfer are the request-level state plus the tokens that the target lacked."""
    rows = simulate(cluster, trace, spec, assumed, seed=1).outcomes
    sent = np.isfinite(rows.landed_s)
    expected = STATE_BYTES + TOKEN_BYTES * (rows.input_tokens - rows.hit_tokens)[sent]
    assert rows.kv_bytes[sent] == pytest.approx(expected)


def _log_of(cluster: Cluster, trace: Trace, spec: ControlSpec, assumed: SimSpec) -> list[LogRecord]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.log"
        with EventLog(path, LogHeader(cluster="", spec=spec)) as log:
            simulate(cluster, trace, spec, assumed, log=log)
        return list(read_log(path)[1])


def _check_role_switches(records: list[LogRecord], role_switch_s: float) -> int:
    """Check that each role switch is ordered once and reported once, in time and with an empty cache, and that the
    instance gets no work in between; return their number."""
    draining: dict[str, SwitchRole] = {}
    asked_s: dict[str, float] = {}
    cleared: str | None = None
    done = 0
    for record in records:
        event = record.event
        if isinstance(event, RoleSwitched):
            assert cleared == event.instance
            assert event.at >= asked_s.pop(event.instance) + role_switch_s
            assert draining.pop(event.instance).role == event.role
            done += 1
        cleared = event.instance if isinstance(event, KvCleared) else None
        for decision in record.decisions:
            if isinstance(decision, SwitchRole):
                assert decision.instance not in draining
                draining[decision.instance], asked_s[decision.instance] = decision, event.at
            elif isinstance(decision, Prefill):
                assert decision.instance not in draining
            elif isinstance(decision, Decode):
                assert decision.target not in draining
    return done


@many
@given(clusters, traces(), assumptions, st.sampled_from([0.0, 2.0]))
def test_an_instance_is_drained_before_its_role_switch(
    cluster: Cluster, trace: Trace, assumed: SimSpec, role_switch_s: float
) -> None:
    """The work that has started on it is finished: see the first law."""
    assumed = msgspec.structs.replace(assumed, review_s=0.5, role_switch_s=role_switch_s)
    _check_role_switches(_log_of(cluster, trace, ControlSpec(offload=SWITCHING), assumed), role_switch_s)


@pytest.mark.parametrize("troubled", [False, True], ids=["quiet", "after failures"])
def test_a_queue_of_prompts_switches_a_decode_instance_to_prefill(troubled: bool) -> None:
    """There are a hundred long prompts that may not be offloaded, with short outputs: one of two decode instances
    switches to prefill, even if both have waited for failed transfers."""
    far = [one(30_000, at_s=0.01 * number) for number in range(4 if troubled else 0)]
    near = [one(8_000, at_s=40.0 + 0.05 * number) for number in range(100)]
    cut = (CapacityChange(at_s=0.5, link="wan", share=0.0), CapacityChange(at_s=20.0, link="wan", share=1.0))
    assumed = SimSpec(review_s=0.5, role_switch_s=3.0, stall_s=1.0, changes=cut, telemetry="none")
    spec = ControlSpec(offload=msgspec.structs.replace(SWITCHING, threshold_tokens=20_000.0), decode="round-robin")
    trace = Trace(name="long", requests=(*far, *near))
    records = _log_of(sites(protocol="vllm"), trace, spec, assumed)
    failed = [record.event.request_id for record in records if isinstance(record.event, DecodeFailed)]
    decodes = [decision for record in records for decision in record.decisions if isinstance(decision, Decode)]
    waited = {decision.target for decision in decodes if decision.request_id in failed}
    assert waited == ({"d0", "d1"} if troubled else set())
    assert _check_role_switches(records, 3.0) >= 1
    switched = next(record.event for record in records if isinstance(record.event, RoleSwitched))
    assert switched.role == "prefill"
    later = [decision.instance for r in records for decision in r.decisions if isinstance(decision, Prefill)]
    assert switched.instance in later


def one(tokens: int, answer: int = 4, at_s: float = 0.0) -> TracedRequest:
    """Return a single prompt."""
    return TracedRequest(at_s=at_s, input_tokens=tokens, output_tokens=answer, blocks=(), block_tokens=512)


def single_transfer(
    trace: Trace, cluster: Cluster, assumed: SimSpec, log: EventLog | None = None
) -> tuple[float, float, float]:
    """Return start and end of the only request's prefill, which is at the remote site, and the end of its transfer."""
    rows = simulate(cluster, trace, ControlSpec(decode="round-robin", prefill="round-robin"), assumed, log=log).outcomes
    assert cluster.instances[int(rows.source[0])].name == "fast0"
    return float(rows.prefill_started_s[0]), float(rows.prefill_finished_s[0]), float(rows.landed_s[0])


def layer_by_layer(begin_s: float, end_s: float, kv_bytes: float, rates: list[tuple[float, float]]) -> float:
    """A simple model: each layer is sent when it is computed and the previous one is complete. `rates` is a sequence of
    (from, bytes per second) in order."""
    free_s = begin_s
    for layer in range(1, LAYERS + 1):
        now = max(free_s, begin_s + (end_s - begin_s) * layer / LAYERS)
        left = kv_bytes / LAYERS
        for number, (_, rate) in enumerate(rates):
            until_s = rates[number + 1][0] if number + 1 < len(rates) else float("inf")
            step = min(left, max(until_s - now, 0.0) * rate)
            now, left = now + step / rate, left - step
            if left <= 0:
                break
        free_s = now
    return free_s


@many
@given(
    st.integers(1, 100_000),
    st.sampled_from(["100 Mbps", "1 Gbps", "4 Gbps", "50 Gbps"]),
    st.integers(1, 16),
    st.none() | st.tuples(st.floats(0.0, 12.0), st.floats(0.05, 1.0)),
)
def test_the_layerwise_transfer_model_equals_layer_by_layer_transfers(
    tokens: int, wan: str, connections: int, slower: tuple[float, float] | None
) -> None:
    """On a steady link the end is exact, at the rate of the slower of both. If the link becomes slower, it is within
    the time of one layer. It is never later than with a transfer after the prefill."""
    cluster = sites(wan=wan, count=1)
    changes = () if slower is None else (CapacityChange(at_s=slower[0], link="wan", share=slower[1]),)
    trace = Trace(name="one", requests=(one(tokens),))
    transport = WanTransport(connections=connections)
    assumed = SimSpec(transfer="layerwise", wan=transport, changes=changes)
    begin_s, end_s, landed_s = single_transfer(trace, cluster, assumed)
    latency_s = cluster.latency_s(cluster.index("fast0"), cluster.index("d0"))
    by_connections = connections * transport.ceiling_bytes_per_s(latency_s)
    link = next(link.bytes_per_s for link in cluster.links if link.tier == CROSS_DATACENTER)
    rates = [(at_s, min(link * share, by_connections)) for at_s, share in ((0.0, 1.0), *([slower] if slower else []))]
    kv_bytes = STATE_BYTES + TOKEN_BYTES * tokens
    expected_s = layer_by_layer(begin_s, end_s, kv_bytes, rates) + latency_s
    slack_s = kv_bytes / LAYERS / rates[-1][1] if slower else 0.0
    assert landed_s == pytest.approx(expected_s, rel=1e-9, abs=slack_s)
    assert landed_s >= end_s + latency_s
    assert landed_s <= single_transfer(trace, cluster, msgspec.structs.replace(assumed, transfer="serial"))[2] * (
        1 + 1e-9
    )
