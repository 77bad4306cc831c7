"""Cached KV that the simulator reads from the store: laws of bytes, order and room, and the read paths compared."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvroute.control import ControlSpec, LogHeader, decisions_equal, replay
from kvroute.control.log import EventLog, read_log
from kvroute.llm import model
from kvroute.sim.run import Run, simulate
from kvroute.sim.settings import SimSpec
from kvroute.sim.workload import Loop, Trace, TracedRequest
from kvroute.topology import Cluster, parse
from kvroute.types import Decision, Decode, Event, KvStored, PrefillFinished, ReadFinished, ReadKv

BLOCK = 16
TEXT = """
name: stored
racks: [{name: rack0}]
storage: {reads: READS, buffer: BUFFER}
nodes:
  - {name: node0, rack: rack0, gpus: 8, nics: {compute: {count: 8, capacity: 100 Gbps}, storage: {capacity: 20 Gbps}}}
  - {name: node1, rack: rack0, gpus: 8, nics: {compute: {count: 8, capacity: 100 Gbps}, storage: {capacity: 20 Gbps}}}
  - {name: node2, rack: rack0, gpus: 8, nics: {compute: {count: 8, capacity: 100 Gbps}, storage: {capacity: 20 Gbps}}}
timing: {default: {prefill: {kind: linear, per_token: 90 us, base: 5 ms}, decode: {base: 5 ms, per_request: 0.1 ms}}}
defaults: {model: deepseek-v3.2, tp: 8, kv_capacity: 1.4 GB}
instances:
  - {name: prefill0, role: prefill, gpus: "node0:0-7"}
  - {name: decode0, role: decode, gpus: "node1:0-7", kv_capacity: 40 GB}
  - {name: decode1, role: decode, gpus: "node2:0-7", kv_capacity: 40 GB}
"""
READS = ("prefill", "alternating", "shorter", "split")
SPEC = ControlSpec(prefill="cache-aware")
NIC_BYTES_PER_S = 20e9 / 8


def cluster(reads: str, buffer: str = "80 GB") -> Cluster:
    return parse(TEXT.replace("READS", reads).replace("BUFFER", buffer))


def agents(
    count: int, turns: int, *, context: int = 16_000, appended: int = 160, output: int = 16, think_s: float = 1.0
) -> Trace:
    """Return agents in a closed loop: each turn extends the context of the turn before."""
    requests, after = [], []
    for turn in range(turns):
        for agent in range(count):
            tokens = context + turn * (appended + output)
            blocks = tuple((agent << 32) + number for number in range(tokens // BLOCK))
            requests.append(TracedRequest(0.0, tokens, output, blocks, BLOCK))
            after.append((agent + (turn - 1) * count,) if turn else ())
    think = tuple(think_s if earlier else 0.0 for earlier in after)
    return Trace("agents", tuple(requests), loop=Loop(tuple(after), think, (math.inf,) * len(requests)))


def run(reads: str, trace: Trace, *, buffer: str = "80 GB", log: EventLog | None = None) -> Run:
    return simulate(cluster(reads, buffer), trace, SPEC, SimSpec(), log=log)


def logged(folder: Path, reads: str, trace: Trace, buffer: str = "80 GB") -> tuple[Run, list[Event], list[Decision]]:
    """Return a run with its events and decisions, which another core repeats."""
    path, here = folder / f"{reads}.log", cluster(reads, buffer)
    with EventLog(path, LogHeader(cluster="", spec=SPEC)) as log:
        done = simulate(here, trace, SPEC, SimSpec(), log=log)
    _, records = read_log(path)
    read = list(records)
    assert all(decisions_equal(record.decisions, again) for record, again in replay(SPEC.build(here), iter(read)))
    return done, [record.event for record in read], [decision for record in read for decision in record.decisions]


@pytest.mark.parametrize("reads", READS)
def test_bytes_and_events_agree_with_the_decisions(tmp_path: Path, reads: str) -> None:
    """Every part is read once, and its bytes cross the storage NICs; what is written was not stored before."""
    trace = agents(8, 4)
    done, events, decisions = logged(tmp_path, reads, trace)
    store, orders = done.summary.store, [decision for decision in decisions if isinstance(decision, ReadKv)]
    assert store is not None
    assert store.reads == len(orders) > 0
    by_side = dict.fromkeys(("prefill", "decode"), 0.0)
    for order in orders:
        tokens = order.prefill_tokens + order.decode_tokens
        by_side["prefill"] += order.kv_bytes * order.prefill_tokens / tokens
        by_side["decode"] += order.kv_bytes * order.decode_tokens / tokens
    assert store.prefill_bytes == pytest.approx(by_side["prefill"])
    assert store.decode_bytes == pytest.approx(by_side["decode"])
    parts = {
        (order.read_id, side)
        for order in orders
        for side, tokens in (("prefill", order.prefill_tokens), ("decode", order.decode_tokens))
        if tokens
    }
    ends = [(event.read_id, event.side) for event in events if isinstance(event, ReadFinished)]
    assert len(ends) == len(parts)
    assert set(ends) == parts
    blocks = {block for request in trace.requests for block in request.blocks}
    assert store.written_bytes == len(blocks) * model("deepseek-v3.2").kv_bytes(BLOCK)
    links = cluster(reads)
    nics = [links.storage_links(index) for index in range(3)]
    read_bytes = sum(done.link_bytes[down] for pairs in nics for _, down in pairs)
    assert read_bytes == pytest.approx(store.prefill_bytes + store.decode_bytes)
    assert sum(done.link_bytes[up] for pairs in nics for up, _ in pairs) == pytest.approx(store.written_bytes)


def test_a_read_takes_the_time_of_the_storage_nics() -> None:
    """One agent: its second turn waits for its bytes, by one NIC or, with split reads, by two."""
    trace, waits = agents(1, 2), {}
    kv_bytes = float(model("deepseek-v3.2").kv_bytes(16_000 // BLOCK * BLOCK))
    for reads in ("prefill", "split"):
        # Another context in between leaves no room for this one in the prefill instance's memory.
        two = with_another_context(trace)
        done = run(reads, two)
        arrived, started = done.outcomes.arrived_s[2], done.outcomes.prefill_started_s[2]
        waits[reads] = float(started - arrived)
    assert waits["prefill"] == pytest.approx(kv_bytes / NIC_BYTES_PER_S, rel=1e-6)
    assert waits["split"] == pytest.approx(kv_bytes / NIC_BYTES_PER_S / 2, rel=2 * BLOCK / 16_000)


def with_another_context(trace: Trace) -> Trace:
    """Return the two turns of an agent with another agent's first turn between them."""
    first, second = trace.requests
    other = replace(first, blocks=tuple((7 << 32) + number for number in range(len(first.blocks))))
    return Trace("three", (first, other, second), loop=Loop(((), (0,), (1,)), (0.0, 0.5, 0.5), (math.inf,) * 3))


def test_both_sides_are_faster_than_the_prefill_node_alone() -> None:
    """The order of the read paths, and the bytes of the busiest NIC, as with the gateway and emulated engines."""
    ends, balance = {}, {}
    for reads in READS:
        done = run(reads, agents(24, 5))
        assert done.summary.requests.finished == 120
        assert done.summary.store is not None
        ends[reads], balance[reads] = done.end_s, done.summary.store.balance
    assert max(ends["split"], ends["shorter"]) < ends["alternating"] < ends["prefill"]
    assert balance["prefill"] == 3.0
    assert balance["alternating"] == pytest.approx(1.5, rel=0.05)
    assert max(balance["shorter"] or 9.0, balance["split"] or 9.0) < 1.2


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(READS),
    st.integers(1, 6),
    st.integers(1, 4),
    st.sampled_from(["80 GB", "1 GB", "300 MB"]),
    st.sampled_from([0.0, 0.1, 3.0]),
    st.integers(1_000, 9_000),
)
def test_every_request_ends_with_any_buffer(
    reads: str, count: int, turns: int, buffer: str, think_s: float, context: int
) -> None:
    """Reads wait for room without blocking each other for good, even if a single one is larger than the buffer."""
    trace = agents(count, turns, think_s=think_s, context=context)
    done = run(reads, trace, buffer=buffer)
    assert done.summary.requests.finished == len(trace.requests)
    again = run(reads, trace, buffer=buffer)
    assert (again.end_s, again.summary.store) == (done.end_s, done.summary.store)


def test_a_small_buffer_delays_reads_and_loses_none() -> None:
    trace = agents(12, 4)
    wide, narrow = run("split", trace), run("split", trace, buffer="800 MB")
    assert narrow.end_s > wide.end_s
    assert narrow.summary.requests == wide.summary.requests


@pytest.mark.parametrize("reads", ["alternating", "shorter", "split"])
def test_a_planned_decode_sends_only_what_its_instance_lacks_when_it_is_due(tmp_path: Path, reads: str) -> None:
    """The decode instance is chosen before the read; what its cache holds may change until the prefill is over. The
    buffer of its node has what that node has read."""
    _, events, decisions = logged(tmp_path, reads, agents(6, 4))
    due = {event.request_id for event in events if isinstance(event, PrefillFinished)}
    orders = {decision.request_id: decision for decision in decisions if isinstance(decision, ReadKv)}
    planned = [decision for decision in decisions if isinstance(decision, Decode) and decision.request_id in orders]
    assert planned
    for decode in planned:
        assert decode.request_id in due
        assert decode.target == orders[decode.request_id].decode_instance
        whole, order = 16_000 + decode.request_id // 6 * 176, orders[decode.request_id]
        read_at = order.first_token + order.prefill_tokens
        own = {*range(decode.hit_tokens), *range(read_at, read_at + order.decode_tokens)}
        assert decode.kv_bytes == pytest.approx((whole - len(own)) * model("deepseek-v3.2").kv_bytes_per_token)


def test_the_router_learns_of_stored_blocks_when_they_are_written(tmp_path: Path) -> None:
    _, events, _ = logged(tmp_path, "shorter", agents(1, 2))
    stored = next(event for event in events if isinstance(event, KvStored) and event.tier == "store")
    ended = next(event for event in events if isinstance(event, PrefillFinished))
    kv_bytes = float(model("deepseek-v3.2").kv_bytes(16_000))
    assert stored.at - ended.at == pytest.approx(kv_bytes / NIC_BYTES_PER_S)
    assert len(stored.blocks) == 1_000


@pytest.mark.parametrize("reads", ["prefill", "shorter", "split"])
def test_the_bandwidth_of_the_whole_store_limits_all_nodes_together(reads: str) -> None:
    """As one link before all storage NICs: no effect if it carries what they do, and with the rate of one NIC it
    delivers no more than that, whatever the read path."""
    trace = agents(12, 4)

    def limited(bytes_per_s: float) -> Run:
        text = TEXT.replace("buffer: BUFFER", f"buffer: 80 GB, bandwidth: {bytes_per_s / 1e9} GB/s")
        return simulate(parse(text.replace("READS", reads)), trace, SPEC, SimSpec())

    free, wide, narrow = run(reads, trace), limited(3 * NIC_BYTES_PER_S), limited(NIC_BYTES_PER_S)
    assert wide.end_s == pytest.approx(free.end_s)
    store = narrow.summary.store
    assert store is not None
    assert narrow.link_bytes[-1] == pytest.approx(store.prefill_bytes + store.decode_bytes)
    assert store.prefill_bytes + store.decode_bytes <= NIC_BYTES_PER_S * narrow.end_s
    if reads == "prefill":
        assert narrow.end_s == pytest.approx(free.end_s)
    else:
        assert narrow.end_s > 1.2 * free.end_s


@pytest.mark.parametrize("output", [1, 16, 33])
def test_a_turn_reads_the_blocks_that_the_decode_before_it_filled(tmp_path: Path, output: int) -> None:
    """The KV of the last output token is never computed, so its block is full one token later."""
    _, _, decisions = logged(tmp_path, "shorter", agents(6, 4, output=output))
    orders = {decision.request_id: decision for decision in decisions if isinstance(decision, ReadKv)}
    assert len(orders) > 6
    for number, order in orders.items():
        before = 16_000 + (number // 6 - 1) * (160 + output)
        assert order.prefill_tokens + order.decode_tokens == (before + output - 1) // BLOCK * BLOCK
