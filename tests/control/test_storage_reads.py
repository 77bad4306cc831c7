"""Reads from the store: the read path against an obvious version, and queues that end empty."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.control.state.storage_reads import ReadRange, StorageReads
from kvroute.topology import Cluster, parse
from kvroute.types import ReadKv, Request, Side

BLOCK = 16
TOKEN_BYTES = 1e5
NIC_BYTES_PER_S = 1e9

FILE = """
name: stored
storage: {{reads: {reads}{limit}}}
racks: [{{name: rack0}}]
nodes:
  - {{name: node0, rack: rack0, gpus: 4, nics: {{compute: {{capacity: 100 Gbps}}, storage: {{capacity: {near}}}}}}}
  - {{name: node1, rack: rack0, gpus: 4, nics: {{compute: {{capacity: 100 Gbps}}, storage: {{capacity: {other}}}}}}}
  - {{name: node2, rack: rack0, gpus: 4, nics: {{compute: {{capacity: 100 Gbps}}{far}}}}}
timing:
  default: {{prefill: {{kind: linear, per_token: 100 us, base: 10 ms}}, decode: {{base: 10 ms, per_request: 1 ms}}}}
defaults: {{model: llama-3-70b, tp: 2, kv_capacity: 40 GB}}
instances:
  - {{name: decode0, role: decode, gpus: "node0:2-3"}}
  - {{name: decode1, role: decode, gpus: "node1:2-3"}}
  - {{name: decode2, role: decode, gpus: "node2:2-3"}}
  - {{name: prefill0, role: prefill, gpus: "node0:0-1"}}
  - {{name: prefill2, role: prefill, gpus: "node2:0-1"}}
"""


def cluster_with(reads: str, *, limit: str = "", near: str = "8 Gbps", other: str = "8 Gbps", far: str = "") -> Cluster:
    """Return a cluster of three nodes; `near`, `other` and `far` are the storage NICs of node0, node1 and node2."""
    third = f", storage: {{capacity: {far}}}" if far else ""
    return parse(
        FILE.format(reads=reads, limit=f", bandwidth: {limit}" if limit else "", near=near, other=other, far=third)
    )


def begin(reads: StorageReads, cluster: Cluster, source: str, target: str | None, blocks: int) -> ReadKv:
    request = Request(id=1, input_tokens=blocks * BLOCK + 1, block_tokens=BLOCK)
    read = ReadRange(0, blocks * BLOCK, blocks * BLOCK * TOKEN_BYTES)
    return reads.begin(request, cluster.index(source), None if target is None else cluster.index(target), read)


def queue_s(reads: StorageReads, cluster: Cluster, name: str) -> float:
    return float(reads.queue_s()[cluster.index(name)])


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["prefill0", "prefill2"]), st.sampled_from(["decode0", "decode1", None]), st.integers(1, 40)
    ),
    max_size=12,
)


@given(st.sampled_from(["prefill", "alternating", "shorter", "split"]), STEPS, st.data())
def test_queues_hold_what_is_being_read_and_end_empty(
    reads: str, steps: list[tuple[str, str | None, int]], data: st.DataObject
) -> None:
    cluster = cluster_with(reads)
    storage = StorageReads(cluster)
    waiting: dict[int, dict[Side, tuple[str, float]]] = {}
    for source, target, blocks in steps:
        if source == "prefill2" and target is None:
            continue  # neither node has a storage NIC, so the core would not read
        decision = begin(storage, cluster, source, target, blocks)
        assert decision.prefill_tokens + decision.decode_tokens == blocks * BLOCK
        parts: dict[Side, tuple[str, float]] = {}
        if decision.prefill_tokens:
            parts["prefill"] = (cluster.instances[cluster.index(source)].node, decision.prefill_tokens * TOKEN_BYTES)
        if decision.decode_tokens:
            assert target is not None
            parts["decode"] = (cluster.instances[cluster.index(target)].node, decision.decode_tokens * TOKEN_BYTES)
        assert "node2" not in [node for node, _ in parts.values()]
        waiting[decision.read_id] = parts
        for read_id in list(waiting):
            if data.draw(st.booleans()) and waiting[read_id]:
                side = sorted(waiting[read_id])[0]
                assert storage.finished(read_id, side)
                assert not storage.finished(read_id, side)
                del waiting[read_id][side]
        for instance in cluster.instances:
            queued = sum(n for parts in waiting.values() for node, n in parts.values() if node == instance.node)
            assert queue_s(storage, cluster, instance.name) == pytest.approx(queued / NIC_BYTES_PER_S)
    for read_id in waiting:
        storage.end(read_id)
        storage.end(read_id)
        assert not storage.in_progress(read_id)
    assert not storage.queue_s().any()


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 40))
def test_the_shorter_side_reads_and_a_split_read_ends_no_later(prefill: int, decode: int, blocks: int) -> None:
    finish_s: dict[str, float] = {}
    for mode in ("shorter", "split"):
        cluster = cluster_with(mode, other="4 Gbps")
        storage = StorageReads(cluster)
        for name, queued in (("prefill0", prefill), ("decode1", decode)):
            if queued:
                begin(storage, cluster, name, None, queued)
        rates = {"prefill0": NIC_BYTES_PER_S, "decode1": NIC_BYTES_PER_S / 2}
        before = {name: queue_s(storage, cluster, name) for name in rates}
        decision = begin(storage, cluster, "prefill0", "decode1", blocks)
        tokens = {"prefill0": decision.prefill_tokens, "decode1": decision.decode_tokens}
        finish_s[mode] = max(before[n] + tokens[n] * TOKEN_BYTES / rates[n] for n in rates if tokens[n])
        whole_s = {n: before[n] + blocks * BLOCK * TOKEN_BYTES / rates[n] for n in rates}
        if mode == "shorter":
            assert finish_s[mode] == pytest.approx(min(whole_s.values()))
            assert 0 in tokens.values()
        assert decision.terms is not None
        assert dict(zip(decision.terms.names, decision.terms.cost, strict=True)) == pytest.approx(whole_s)
    assert finish_s["split"] <= finish_s["shorter"] * (1 + 1e-9)


def test_alternating_reads_take_turns() -> None:
    cluster = cluster_with("alternating")
    storage = StorageReads(cluster)
    decisions = [begin(storage, cluster, "prefill0", "decode1", 4) for _ in range(4)]
    assert [decision.prefill_tokens for decision in decisions] == [64, 0, 64, 0]


def test_a_side_without_a_storage_nic_does_not_read() -> None:
    cluster = cluster_with("split")
    storage = StorageReads(cluster)
    assert begin(storage, cluster, "prefill0", "decode2", 9).decode_tokens == 0
    decision = begin(storage, cluster, "prefill2", "decode1", 9)
    assert decision.prefill_tokens == 0
    assert decision.terms is not None
    assert decision.terms.feasible.tolist() == [False, True]


def test_instances_of_one_node_do_not_split_a_read() -> None:
    cluster = cluster_with("split")
    decision = begin(StorageReads(cluster), cluster, "prefill0", "decode0", 9)
    assert (decision.prefill_tokens, decision.decode_tokens) == (144, 0)


def test_the_bandwidth_of_the_store_limits_each_node() -> None:
    cluster = cluster_with("prefill", limit="0.5 GB/s")
    storage = StorageReads(cluster)
    assert not storage.needs_decode_instance
    begin(storage, cluster, "prefill0", None, 10)
    assert queue_s(storage, cluster, "prefill0") == pytest.approx(10 * BLOCK * TOKEN_BYTES / 0.5e9)
    assert queue_s(storage, cluster, "decode2") == 0.0
