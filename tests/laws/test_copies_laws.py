"""Laws of every run in which cached prefixes move: between sites, from siblings, and ahead of demand."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from functools import lru_cache
from itertools import groupby
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvroute.control import ControlSpec, LogHeader, LogRecord, decisions_equal, replay
from kvroute.control.log import EventLog, read_log
from kvroute.control.state.hotspots import CopySpec, HotspotSpec
from kvroute.policies.fleet.offload import OffloadSpec
from kvroute.policies.fleet.role_switch import LongTerm
from kvroute.prefix import PrefixIndex
from kvroute.sim.metrics import FINISHED, REJECTED, Summary
from kvroute.sim.network.capacity import LinkCapacities
from kvroute.sim.network.transfers import Fabric
from kvroute.sim.run import Run, simulate
from kvroute.sim.settings import Background, CapacityChange, SimSpec, WanTransport
from kvroute.sim.workload import Trace, TracedRequest
from kvroute.topology import Cluster, parse
from kvroute.types import (
    Admitted,
    Arrived,
    CopyFinished,
    CopyPrefix,
    Decode,
    Event,
    Finished,
    KvCleared,
    KvEvicted,
    KvStored,
    Prefill,
    PrefillFinished,
    Request,
    TransferFinished,
)

TEXT = """
name: law
datacenters: [{name: away}, {name: home}]
racks:
  - {name: rack0, datacenter: away, uplinks: {capacity: 400 Gbps}}
  - {name: rack1, datacenter: home, uplinks: {capacity: 400 Gbps}}
nodes:
  - {name: node0, rack: rack0, gpus: 8, nics: {compute: {count: 8, capacity: 100 Gbps}}}
  - {name: node1, rack: rack1, gpus: 8, nics: {compute: {count: 8, capacity: 100 Gbps}}}
  - {name: node2, rack: rack1, gpus: 8, nics: {compute: {count: 8, capacity: 100 Gbps}}}
wan: [{from: away, to: home, capacity: 10 Gbps, latency: 5 ms}]
timing:
  default:
    prefill: {kind: linear, per_token: 90 us, base: 20 ms}
    decode: {base: 12.5 ms, per_request: 0.1 ms}
defaults: {model: MODEL, tp: 4, batch_max: 8, kv_capacity: MEMORY, timing: default}
instances:
  - {name: f0, role: prefill, gpus: "node0:0-3"}
  - {name: f1, role: prefill, gpus: "node0:4-7"}
  - {name: p0, role: prefill, gpus: "node1:0-3"}
  - {name: p1, role: prefill, gpus: "node1:4-7"}
  - {name: d0, role: decode, gpus: "node2:0-3"}
  - {name: d1, role: decode, gpus: "node2:4-7"}
"""
BLOCK = 512
CAPACITY = {
    (model, memory): int(nbytes // (token_bytes * BLOCK))
    for model, token_bytes in (("prfaas-1t-hybrid", 17_280), ("llama-3-8b", 131_072))
    for memory, nbytes in (("1 GB", 1e9), ("20 GB", 20e9))
}


SPANNING = {
    '"node1:0-3"': '"node1:0-1,node2:0-1"',
    '"node1:4-7"': '"node1:2-3,node2:2-3"',
    '"node2:0-3"': '"node2:4-5,node1:4-5"',
    '"node2:4-7"': '"node2:6-7,node1:6-7"',
}
ALL_REDUCE = ", all_reduce: {scheme: hierarchical-ring, per_iteration: 120, token_bytes: 14 KB}"


@lru_cache
def sites(model: str = "prfaas-1t-hybrid", memory: str = "20 GB", reduces: bool = False) -> Cluster:
    """Return two prefill instances at either site; with the smaller memory, copies and prompts compete for it. With
    `reduces`, groups span servers and their all-reduces share NICs with KV transfers and copies."""
    text = TEXT.replace("MODEL", model).replace("MEMORY", memory)
    for here, spanning in SPANNING.items() if reduces else ():
        text = text.replace(here, spanning + ALL_REDUCE)
    return parse(text)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Draw prompts that end where a document does, and others that continue from there."""
    at_s, requests = 0.0, []
    documents = [draw(st.integers(1, 30)) for _ in range(draw(st.integers(1, 3)))]
    for number in range(draw(st.integers(0, 20))):
        at_s += draw(st.sampled_from([0.0, 0.1, 1.0, 4.0]))
        document = draw(st.integers(0, len(documents) - 1))
        extra = draw(st.sampled_from([0, 0, 100, 700, 9_000]))
        tokens = documents[document] * BLOCK + extra
        own = tokens // BLOCK - documents[document]
        chain = tuple(document * 1_000 + depth for depth in range(documents[document]))
        chain += tuple(10_000 + number * 100 + depth for depth in range(own))
        answer = draw(st.sampled_from([0, 1, 20]))
        requests.append(
            TracedRequest(at_s=at_s, input_tokens=tokens, output_tokens=answer, blocks=chain, block_tokens=BLOCK)
        )
    return Trace(name="law", requests=tuple(requests))


EAGER = CopySpec(
    review_s=0.5, hotspots=HotspotSpec(window_reads=8, factor=1.05, reads_min=1), abundant_below=1.0, budget_s=60.0
)
copies = st.sampled_from([None, EAGER, msgspec.structs.replace(EAGER, across=False, budget_s=1.0)])
offloads = st.none() | st.builds(
    OffloadSpec,
    threshold_tokens=st.just(2_000.0),
    rule=st.sampled_from(["scarce", "abundant", "auto"]),
    layerwise=st.booleans(),
    copy_queues=st.booleans(),
    long_term=st.builds(LongTerm, role_switches=st.booleans(), review_s=st.just(1.0), requests_min=st.just(3)),
)
specs = st.builds(
    ControlSpec,
    decode=st.sampled_from(["foresight", "foresight-joint"]),
    prefill=st.sampled_from(["least-loaded", "cache-aware"]),
    offload=offloads,
    prefix_pool=st.booleans(),
    copies=copies,
)
RECOVERIES = (
    CapacityChange(at_s=90.0, link="wan", share=1.0),
    CapacityChange(at_s=90.0, link="node1 nic0 down", share=1.0),
)
cuts = st.lists(
    st.builds(
        CapacityChange,
        at_s=st.floats(0.0, 40.0),
        link=st.sampled_from(["wan", "home to away", "node1 nic0 down"]),
        share=st.sampled_from([0.0, 0.3]),
    ),
    max_size=3,
).map(lambda changes: (*changes, *RECOVERIES))
assumptions = st.builds(
    SimSpec,
    transfer=st.sampled_from(["serial", "layerwise"]),
    wan=st.sampled_from([None, WanTransport(connections=3)]),
    changes=cuts,
    stall_s=st.sampled_from([None, 1.0]),
    separates_own_traffic=st.booleans(),
    role_switch_s=st.just(1.0),
    review_s=st.just(0.5),
)
models = st.sampled_from(sorted(CAPACITY))
many = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def _warm(number: int) -> TracedRequest:
    tokens = 20 * BLOCK + (100 if number else 0)
    return TracedRequest(
        at_s=0.7 * number, input_tokens=tokens, output_tokens=4, blocks=tuple(range(20)), block_tokens=BLOCK
    )


WARM = Trace(name="warm", requests=tuple(_warm(number) for number in range(30)))
"""A document, then one question to it after the other."""
POOLED = ControlSpec(decode="foresight", prefill="cache-aware", prefix_pool=True, copies=EAGER)
WITH_REVIEWS = SimSpec(review_s=0.5)


def logged(cluster: Cluster, trace: Trace, spec: ControlSpec, assumed: SimSpec) -> tuple[Run, bytes]:
    """Return a run and its log."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.log"
        with EventLog(path, LogHeader(cluster="", spec=spec)) as log:
            run = simulate(cluster, trace, spec, assumed, log=log)
        return run, path.read_bytes()


def records_of(log: bytes) -> list[LogRecord]:
    """Read the log's records as any reader does."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.log"
        path.write_bytes(log)
        return list(read_log(path)[1])


@many
@example(("llama-3-8b", "20 GB"), WARM, POOLED, WITH_REVIEWS, False)
@given(models, traces(), specs, assumptions, st.booleans())
def test_every_request_ends_and_the_log_replays(
    model: tuple[str, str], trace: Trace, spec: ControlSpec, assumed: SimSpec, reduces: bool
) -> None:
    """For any failure of copies nothing is lost, the same run gives the same log, and a replay makes the same
    decisions."""
    run, log = logged(sites(*model, reduces), trace, spec, assumed)
    assert logged(sites(*model, reduces), trace, spec, assumed)[1] == log
    assert np.isin(run.outcomes.state, (FINISHED, REJECTED)).all()
    records = records_of(log)
    for record, again in replay(spec.build(sites(*model, reduces)), records):
        assert decisions_equal(record.decisions, again)


@many
@example(("llama-3-8b", "20 GB"), WARM, POOLED, WITH_REVIEWS, False)
@given(models, traces(), specs, assumptions, st.booleans())
def test_bytes_sent_are_bytes_received_or_accounted_for(
    model: tuple[str, str], trace: Trace, spec: ControlSpec, assumed: SimSpec, reduces: bool
) -> None:
    """The bytes of all hops are those of KV caches, failed transfers, copies for requests, and copies ahead of
    demand."""
    cluster = sites(*model, reduces)
    run = simulate(cluster, trace, spec, assumed)
    rows, summary = run.outcomes, run.summary
    sent = np.isfinite(rows.landed_s)
    hops = [len(cluster.hops(int(a), int(b), 0)) for a, b in zip(rows.source[sent], rows.target[sent], strict=True)]
    accounts = (summary.failed_transfers, summary.copied_prefixes, summary.copied_ahead)
    apart_bytes = sum(account.network_bytes for account in accounts)
    apart_bytes += sum(cost.network_bytes for cost in summary.all_reduces.values())
    landed_bytes = float((rows.kv_bytes[sent] * hops).sum())
    assert run.network_bytes == pytest.approx(landed_bytes + apart_bytes, rel=1e-9, abs=1.0)
    assert (run.link_bytes <= cluster.capacity_bytes_per_s * run.end_s * (1 + 1e-9) + 1.0).all()


class Audit:
    """Checks a log independently: every cached block has a cause and room."""

    def __init__(self, cluster: Cluster, capacity_blocks: int, hybrid: bool) -> None:
        self._cluster, self._capacity, self._hybrid = cluster, capacity_blocks, hybrid
        self.cached = PrefixIndex(len(cluster.instances))
        self._requests: dict[int, Request] = {}
        self._at: dict[tuple[int, str], str] = {}
        self._ends: set[int] = set()
        self._copies: dict[int, tuple[float, CopyPrefix | Prefill]] = {}
        self._room: dict[int, int] = {}
        self.landed = 0

    def instant(self, at: float, records: list[LogRecord]) -> None:
        """Process all records of one time."""
        causes: defaultdict[str, list[tuple[int, ...]]] = defaultdict(list)
        for record in records:
            self._note(at, record.event, causes)
        for record in records:
            self._check(record.event, causes)
            for decision in record.decisions:
                self._decided(at, decision)
        for index, instance in enumerate(self._cluster.instances):
            rooms = {
                (isinstance(copy, CopyPrefix), self._chain(copy)): self._room[number]
                for number, (_, copy) in self._copies.items()
                if _target(copy) == instance.name and instance.role == "prefill"
            }
            assert self.cached.used_blocks(index) + sum(rooms.values()) <= self._capacity

    def _note(self, at: float, event: Event, causes: defaultdict[str, list[tuple[int, ...]]]) -> None:
        match event:
            case Arrived(request=request):
                self._requests[request.id] = request
            case PrefillFinished(request_id=number) | Finished(request_id=number):
                self._cause(causes, number, "prefill")
            case TransferFinished(request_id=number):
                self._cause(causes, number, "decode")
            case Admitted(request_id=number):
                self._cause(causes, number, "aggregated")
            case CopyFinished(copy_id=number, landed=True):
                started_at, copy = self._copies[number]
                causes[_target(copy)].append(self._chain(copy))
                assert at >= started_at + self._fastest_s(copy)
                self.landed += 1

    def _cause(self, causes: defaultdict[str, list[tuple[int, ...]]], number: int, leg: str) -> None:
        """Record that a request's prompt is now where it was prefilled or decoded."""
        blocks = self._requests[number].blocks
        causes[self._at.get((number, leg), "")].append(blocks)
        full = self._requests[number].input_tokens // BLOCK
        self._ends |= {*blocks[full - 1 : full], *blocks[-1:]}

    def _check(self, event: Event, causes: dict[str, list[tuple[int, ...]]]) -> None:
        match event:
            case KvStored(instance=name, blocks=blocks):
                assert any(chain[: len(blocks)] == blocks for chain in causes.get(name, ())), "nothing brought it there"
                self.cached.store(self._cluster.index(name), blocks)
            case KvEvicted(instance=name, blocks=blocks, keep=keep):
                self.cached.evict(self._cluster.index(name), blocks, keep)
            case KvCleared(instance=name):
                self.cached.clear(self._cluster.index(name))
            case CopyFinished(copy_id=number):
                del self._copies[number], self._room[number]

    def _decided(self, at: float, decision: object) -> None:
        match decision:
            case Prefill(request_id=number, instance=name, cached_tokens=tokens):
                self._at[number, "prefill"] = name
                depth = min(tokens // BLOCK, len(self._requests[number].blocks))
                chain = self._requests[number].blocks[:depth]
                holder = self._cluster.index(decision.copy_from or name)
                assert self.cached.match_one(holder, chain) == depth, "more is counted on than is there"
                assert not (self._hybrid and depth) or chain[-1] in self._ends
                assert 0 <= decision.copy_tokens <= tokens
            case Decode(request_id=number, source=source, target=name):
                self._at[number, "aggregated" if source == name else "decode"] = name
        if isinstance(decision, CopyPrefix) or (isinstance(decision, Prefill) and decision.copy_id):
            assert decision.copy_id not in self._copies
            target = self._cluster.index(_target(decision))
            chain = self._chain(decision)
            self._room[decision.copy_id] = len(chain) - self.cached.match_one(target, chain)
            self._copies[decision.copy_id] = (min([at, *self._starts_of_equal_copies(decision)]), decision)

    def _starts_of_equal_copies(self, copy: CopyPrefix | Prefill) -> list[float]:
        """Return the start times of equal copies to the same instance: a request waits for the first one."""
        wanted = (type(copy), _target(copy), self._chain(copy))
        return [
            at for at, other in self._copies.values() if (type(other), _target(other), self._chain(other)) == wanted
        ]

    def _chain(self, copy: CopyPrefix | Prefill) -> tuple[int, ...]:
        if isinstance(copy, CopyPrefix):
            return copy.blocks
        return self._requests[copy.request_id].blocks[: copy.cached_tokens // BLOCK]

    def _fastest_s(self, copy: CopyPrefix | Prefill) -> float:
        """Return the transfer time alone on the widest path, with all its flows together."""
        source = self._cluster.index(copy.source if isinstance(copy, CopyPrefix) else copy.copy_from)
        target = self._cluster.index(_target(copy))
        nbytes = copy.kv_bytes if isinstance(copy, CopyPrefix) else copy.copy_bytes
        widest = 8 * max(float(self._cluster.capacity_bytes_per_s.max()), 1.0)
        return nbytes / widest + self._cluster.latency_s(source, target)


def _target(copy: CopyPrefix | Prefill) -> str:
    return copy.target if isinstance(copy, CopyPrefix) else copy.instance


@many
@example(("prfaas-1t-hybrid", "20 GB"), WARM, POOLED, WITH_REVIEWS)
@given(models, traces(), specs, assumptions)
def test_a_prefix_is_cached_only_when_complete_and_within_memory(
    model: tuple[str, str], trace: Trace, spec: ControlSpec, assumed: SimSpec
) -> None:
    """Each block that is reported as cached was computed, decoded or completely copied there. A prefill relies on
    nothing else, and with a hybrid model only on the end of an earlier prompt. Memory is reserved for copies in
    flight."""
    cluster = sites(*model)
    _, log = logged(cluster, trace, spec, assumed)
    audit = Audit(cluster, CAPACITY[model], model[0] == "prfaas-1t-hybrid")
    for at, group in groupby(records_of(log), key=lambda record: record.event.at):
        audit.instant(at, list(group))
    assert trace is not WARM or audit.landed > 0


def _without_times(summary: Summary) -> Summary:
    return msgspec.structs.replace(summary, wall_s=0.0, cpu_s=0.0, decision_s=None)


@many
@given(models, traces(), offloads, assumptions)
def test_without_shared_prefixes_copy_options_change_nothing(
    model: tuple[str, str], trace: Trace, offload: OffloadSpec | None, assumed: SimSpec
) -> None:
    """Without a common prefix there is nothing to copy or fetch, and runs are equal to the last bit. No request
    restarts in this test."""
    assumed = msgspec.structs.replace(assumed, stall_s=None)
    alone = Trace(
        name="aggregated",
        requests=tuple(
            msgspec.structs.replace(request, blocks=tuple(number * 1_000_000 + block for block in request.blocks))
            for number, request in enumerate(trace.requests, start=1)
        ),
    )
    plain = ControlSpec(decode="foresight", prefill="cache-aware", offload=offload)
    busy = msgspec.structs.replace(plain, prefix_pool=True, copies=EAGER)
    one, other = (simulate(sites(*model), alone, spec, assumed) for spec in (plain, busy))
    assert _without_times(one.summary) == _without_times(other.summary)
    assert (one.link_bytes == other.link_bytes).all()


@given(st.integers(0, 40), st.floats(1e6, 1e11), st.integers(1, 8))
@settings(max_examples=25, deadline=None)
def test_copies_ahead_of_demand_barely_slow_a_request(count: int, copy_bytes: float, connections: int) -> None:
    """Beside n copies of any size, a KV cache takes at most (1 + n / 1000) times as long."""
    cluster = sites()
    source, target = cluster.index("f0"), cluster.index("d0")
    fabric = Fabric(cluster, LinkCapacities(cluster, Background(), 0), 0, WanTransport(connections=connections))
    for number in range(count):
        fabric.send(1 << 40 | number, source, target, copy_bytes, kind="ahead")
    fabric.send(1, source, target, 1e9)
    alone_s = 1e9 / 1.25e9
    ended: list[int] = []
    while 1 not in ended:
        ended += [transfer.request for transfer in fabric.advance(fabric.next_finish_s())]
    by_window_s = 1e9 / (connections * WanTransport().ceiling_bytes_per_s(cluster.latency_s(source, target)))
    assert fabric.network.now <= max(alone_s * (1 + count / 1_000), by_window_s) * (1 + 1e-6)
