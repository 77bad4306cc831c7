"""Copies of cached prefixes in virtual time: when they end, the memory that they hold, and the outcome of failed
ones."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvroute.control import ControlSpec, LogHeader, LogRecord
from kvroute.control.log import EventLog, read_log
from kvroute.control.state.hotspots import CopySpec, HotspotSpec
from kvroute.prefix import PrefixIndex
from kvroute.sim.instances import KvMemory
from kvroute.sim.run import Run, simulate
from kvroute.sim.settings import CapacityChange, SimSpec
from kvroute.sim.workload import Trace, TracedRequest
from kvroute.topology import Cluster, parse
from kvroute.types import CopyFinished, CopyPrefix, KvStored, Prefill

TEXT = """
name: two
datacenters: [{name: away}, {name: home}]
nodes:
  - {name: node0, datacenter: away, gpus: 4, nics: {compute: {count: 4, capacity: 100 Gbps}}}
  - {name: node1, datacenter: home, gpus: 4, nics: {compute: {count: 4, capacity: 4 Gbps}}}
  - {name: node2, datacenter: home, gpus: 4, nics: {compute: {count: 4, capacity: 4 Gbps}}}
  - {name: node3, datacenter: home, gpus: 4, nics: {compute: {count: 4, capacity: 100 Gbps}}}
wan: [{from: away, to: home, capacity: 8 Gbps, latency: 5 ms}]
network: {latency: {datacenter: 1 ms}, tier_bandwidth: {datacenter: 16 Gbps, wan: 8 Gbps}}
timing: {default: {prefill: {kind: linear, per_token: 1 ms}, decode: {base: 10 ms}}}
defaults: {model: llama-3-8b, tp: 4, kv_capacity: MEMORY}
instances:
  - {name: f0, role: prefill, gpus: "node0:0-3"}
  - {name: p0, role: prefill, gpus: "node1:0-3"}
  - {name: p1, role: prefill, gpus: "node2:0-3"}
  - {name: d0, role: decode, gpus: "node3:0-3", kv_capacity: 50 GB}
"""
BLOCK, TOKEN_BYTES = 512, 131_072
DEPTH = 20
TOKENS = DEPTH * BLOCK
FETCH_S = TOKENS * TOKEN_BYTES / 2e9 + 1e-3
"""1.34 GB at 2 GB/s between the two servers at home."""
WAN_S = TOKENS * TOKEN_BYTES / 1e9 + 5e-3


def sites(memory: str = "50 GB") -> Cluster:
    """Return sites where a prompt takes ten seconds of prefill and its prefix less than one second to fetch."""
    return parse(TEXT.replace("MEMORY", memory))


def prompt(at_s: float, extra: int = 0, document: int = 0, answer: int = 1) -> TracedRequest:
    """Return a document of 20 blocks with a question."""
    chain = tuple(range(document * 100, document * 100 + DEPTH))
    return TracedRequest(at_s=at_s, input_tokens=TOKENS + extra, output_tokens=answer, blocks=chain, block_tokens=BLOCK)


def simulated(
    path: Path, requests: tuple[TracedRequest, ...], spec: ControlSpec, assumed: SimSpec, memory: str = "50 GB"
) -> tuple[Run, list[LogRecord]]:
    """Return the run and its log."""
    with EventLog(path, LogHeader(cluster="", spec=spec)) as log:
        run = simulate(sites(memory), Trace("documents", requests), spec, assumed, log=log)
    return run, list(read_log(path)[1])


POOL = ControlSpec(decode="foresight", prefill="cache-aware", prefix_pool=True)
AHEAD = ControlSpec(
    decode="foresight",
    prefill="cache-aware",
    copies=CopySpec(review_s=1.0, hotspots=HotspotSpec(window_reads=8, factor=1.2, reads_min=1), budget_s=60.0),
)


def test_a_sibling_can_use_a_fetched_prefix_at_once(tmp_path: Path) -> None:
    """Three documents are on three instances. While p0 prefills a question to its own document, p1 fetches that
    document and prefills the next question."""
    cluster = sites()
    home = (prompt(0.0, document=1), prompt(0.1, document=2), prompt(0.2, document=3))
    run, _ = simulated(tmp_path / "log", (*home, prompt(40.0, 4_000, 2), prompt(40.1, 400, 2)), POOL, SimSpec())
    rows = run.outcomes
    assert [cluster.instances[int(source)].name for source in rows.source] == ["f0", "p0", "p1", "p0", "p1"]
    assert rows.cached_tokens.tolist() == [0, 0, 0, TOKENS, TOKENS]
    assert rows.prefill_started_s[4] == pytest.approx(40.1 + FETCH_S)
    assert rows.prefill_finished_s[4] - rows.prefill_started_s[4] == pytest.approx(0.4)
    copied = run.summary.copied_prefixes
    assert (copied.transfers, copied.kv_bytes) == (1, TOKENS * TOKEN_BYTES)


def test_without_fetches_every_instance_computes_its_own_prefix(tmp_path: Path) -> None:
    """The requests are the same: the question waits 4 s for the previous one on the instance that has the document."""
    home = (prompt(0.0, document=1), prompt(0.1, document=2), prompt(0.2, document=3))
    spec = msgspec.structs.replace(POOL, prefix_pool=False)
    run, _ = simulated(tmp_path / "log", (*home, prompt(40.0, 4_000, 2), prompt(40.1, 400, 2)), spec, SimSpec())
    assert run.outcomes.prefill_started_s[4] == pytest.approx(44.0)
    assert run.summary.copied_prefixes.transfers == 0


HOT = tuple(prompt(12.0 + number, 100) for number in range(8))
"""Questions to one document."""


def test_a_hot_prefix_is_copied_ahead_of_demand(tmp_path: Path) -> None:
    """The prefix is read repeatedly on f0: it is copied to p0 and p1 at 1 GB/s, and cached there when the last byte
    arrives. When f0 is busy, the next question finds the document at home and does not wait."""
    late = (prompt(59.0, 5_000), prompt(59.5, 200))
    assumed = SimSpec(review_s=1.0)
    run, records = simulated(tmp_path / "log", (prompt(0.0), *HOT, *late), AHEAD, assumed)
    orders = [(r.event.at, d) for r in records for d in r.decisions if isinstance(d, CopyPrefix)]
    assert [(order.source, order.target) for _, order in orders] == [("f0", "p0"), ("f0", "p1")]
    ends = [r.event for r in records if isinstance(r.event, CopyFinished)]
    events = [record.event for record in records if record.event.at < late[0].at_s]
    stored = [event for event in events if isinstance(event, KvStored) and event.instance in ("p0", "p1")]
    assert [(event.at, event.blocks) for event in stored] == [(end.at, tuple(range(DEPTH))) for end in ends]
    assert ends[0].at >= orders[0][0] + WAN_S
    rows, cluster = run.outcomes, sites()
    assert cluster.instances[int(rows.source[-1])].name == "p0"
    assert rows.cached_tokens[-1] == TOKENS
    assert rows.prefill_started_s[-1] == 59.5
    ahead = run.summary.copied_ahead
    assert (ahead.transfers, ahead.kv_bytes) == (2, 2 * TOKENS * TOKEN_BYTES)
    assert run.summary.copied_prefixes.transfers == 0


def test_a_stalled_copy_is_removed_and_repeated(tmp_path: Path) -> None:
    """The path to home is cut during the copy, for longer than the stall limit."""
    cut = (CapacityChange(at_s=14.5, link="wan", share=0.0), CapacityChange(at_s=30.0, link="wan", share=1.0))
    more = tuple(prompt(31.0 + number, 50) for number in range(10))
    assumed = SimSpec(review_s=1.0, changes=cut, stall_s=2.0, telemetry="tier")
    run, records = simulated(tmp_path / "log", (prompt(0.0), *HOT, *more), AHEAD, assumed)
    ends = [r.event for r in records if isinstance(r.event, CopyFinished)]
    failed = [end for end in ends if not end.landed]
    assert [end.at for end in failed] == [16.5] * len(failed)
    assert len(failed) >= 1
    assert [end.landed for end in ends][-1]
    at_home = [r.event.at for r in records if isinstance(r.event, KvStored) and r.event.instance in ("p0", "p1")]
    assert min(at_home) > 30.0
    assert run.summary.requests.finished == len(HOT) + len(more) + 1
    landed_bytes = sum(end.landed for end in ends) * TOKENS * TOKEN_BYTES
    assert run.summary.copied_ahead.kv_bytes > landed_bytes


def test_bytes_sent_before_the_end_of_the_run_are_accounted_for(tmp_path: Path) -> None:
    """No request waits for copies: the run ends with the last request, in the middle of a copy."""
    run, records = simulated(tmp_path / "log", (prompt(0.0), *HOT[:2]), AHEAD, SimSpec(review_s=1.0))
    orders = [d for r in records for d in r.decisions if isinstance(d, CopyPrefix)]
    assert orders
    assert not [r for r in records if isinstance(r.event, CopyFinished)]
    assert 0 < run.summary.copied_ahead.kv_bytes < len(orders) * TOKENS * TOKEN_BYTES
    kv_bytes = float(run.outcomes.kv_bytes.sum())
    assert run.network_bytes == pytest.approx(3 * (kv_bytes + run.summary.copied_ahead.kv_bytes))


def _by_time(request: TracedRequest) -> float:
    return request.at_s


def test_a_copy_without_room_is_rejected_at_once(tmp_path: Path) -> None:
    """Memory holds 29 blocks and a copy of 20 is in flight: another copy of 20 does not fit."""
    other = tuple(prompt(12.2 + number, 100, 1) for number in range(8))
    first = (prompt(0.0), prompt(0.0, document=1))
    run, records = simulated(
        tmp_path / "log", (*first, *sorted((*HOT, *other), key=_by_time)), AHEAD, SimSpec(review_s=1.0), "2 GB"
    )
    orders = {d.copy_id: (r.event.at, d) for r in records for d in r.decisions if isinstance(d, CopyPrefix)}
    refused = [r.event for r in records if isinstance(r.event, CopyFinished) and not r.event.landed]
    assert refused
    assert all(orders[event.copy_id][0] == event.at for event in refused)
    assert run.summary.requests.finished == len(run.outcomes.state)


def test_a_prompt_does_not_use_memory_reserved_for_a_copy() -> None:
    """20 of 29 blocks are reserved for a copy, so the first nine blocks of a prompt of 20 are stored, and the copy is
    complete."""
    memory = KvMemory(PrefixIndex(1, [29]), [29], [0])
    copied, computed = tuple(range(DEPTH)), tuple(range(100, 100 + DEPTH))
    assert memory.has_room(0, copied, 0)
    assert memory.reserve(0, copied, 0, DEPTH) == []
    assert not memory.has_room(0, computed, 0)
    memory.store(0, computed)
    assert (memory.index.used_blocks(0), memory.index.match_one(0, computed)) == (9, 9)
    memory.transfer_done(0, copied, 0)
    memory.release(0, copied, DEPTH)
    assert memory.index.match_one(0, copied) == DEPTH
    assert memory.free_blocks(0) == 29


@pytest.mark.parametrize("fails", [False, True], ids=["landed", "failed"])
def test_copies_leave_no_memory_reserved(tmp_path: Path, fails: bool) -> None:
    """Each instance has room for one document: after the copies, for any outcome, another document fits."""
    cut = (CapacityChange(at_s=14.5, link="wan", share=0.0), CapacityChange(at_s=50.0, link="wan", share=1.0))
    others = tuple(prompt(60.0, document=number) for number in (1, 2, 3))
    assumed = SimSpec(review_s=1.0, stall_s=2.0, telemetry="tier", changes=cut if fails else ())
    _, records = simulated(tmp_path / "log", (prompt(0.0), *HOT, *others), AHEAD, assumed, "2 GB")
    events = [record.event for record in records]
    ends = [event for event in events if isinstance(event, CopyFinished) and event.at < 50.0]
    assert ends
    assert {end.landed for end in ends} == {not fails}
    stored = [event for event in events if isinstance(event, KvStored) and event.at > 60.0]
    fresh = {event.instance: len(event.blocks) for event in stored if event.instance != "d0"}
    assert fresh == {"f0": DEPTH, "p0": DEPTH, "p1": DEPTH}


def test_a_second_request_waits_for_a_copy_in_flight(tmp_path: Path) -> None:
    """Two questions to p0's document go to p1, and its bytes are sent once; a stall ends the wait of both."""
    home = (prompt(0.0, document=1), prompt(0.1, document=2), prompt(0.2, document=3))
    questions = (prompt(40.0, 9_000, 2), prompt(40.1, 400, 2), prompt(40.2, 300, 2))
    cut = (
        CapacityChange(at_s=40.3, link="node2 nic0 down", share=0.0),
        CapacityChange(at_s=99.0, link="node2 nic0 down", share=1.0),
    )
    for changes in ((), cut):
        assumed = SimSpec(stall_s=1.0, changes=changes)
        run, records = simulated(tmp_path / "log", (*home, *questions), POOL, assumed)
        rows, cluster = run.outcomes, sites()
        waited = [d for r in records for d in r.decisions if isinstance(d, Prefill) and d.copy_id]
        assert [(copy.request_id, copy.instance) for copy in waited] == [(4, "p1"), (5, "p1")]
        assert [cluster.instances[int(source)].name for source in rows.source[4:]] == ["p1", "p1"]
        ends = [r.event for r in records if isinstance(r.event, CopyFinished)]
        assert run.summary.copied_prefixes.transfers == 1
        assert [end.copy_id for end in ends] == [1, 2]
        if changes:
            assert [(end.at, end.landed) for end in ends] == [(41.3, False)] * 2
            assert rows.cached_tokens[4:].tolist() == [0, 0]
            assert rows.prefill_started_s[4] == 41.3
        else:
            assert [end.at for end in ends] == pytest.approx([40.1 + FETCH_S] * 2)
            assert rows.prefill_started_s[4:].tolist() == pytest.approx([40.1 + FETCH_S, 40.5 + FETCH_S])
            assert run.summary.copied_prefixes.kv_bytes == TOKENS * TOKEN_BYTES


def test_a_fetch_without_room_is_skipped(tmp_path: Path) -> None:
    """Memory holds 29 blocks: while a copy of 20 to p1 is in flight, one of 19 of these blocks has no room."""
    home = (prompt(0.0, document=1), prompt(0.1, document=2), prompt(0.2, document=3))
    shorter = msgspec.structs.replace(prompt(40.2, 300, 2), blocks=tuple(range(200, 200 + DEPTH - 1)))
    questions = (prompt(40.0, 9_000, 2), prompt(40.1, 400, 2), shorter)
    run, records = simulated(tmp_path / "log", (*home, *questions), POOL, SimSpec(), "2 GB")
    ends = [(r.event.copy_id, r.event.landed) for r in records if isinstance(r.event, CopyFinished)]
    assert ends == [(2, False), (1, True)]
    rows = run.outcomes
    assert (rows.source[5], rows.cached_tokens[5]) == (rows.source[4], 0)
    assert rows.prefill_started_s[5] == 40.2
    assert rows.prefill_finished_s[5] - 40.2 == pytest.approx((TOKENS + 300) * 1e-3)
