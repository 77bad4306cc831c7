"""Cached KV in CPU memory and in the store: hits that cost time, and the read that a request then waits for."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.control.live_rig import HEAD
from tests.control.test_storage_reads import BLOCK, cluster_with

from kvroute import llm
from kvroute.control import Control, ControlSpec
from kvroute.topology import Cluster, parse
from kvroute.types import (
    Admitted,
    Arrived,
    Decision,
    Decode,
    Finished,
    InputError,
    InstanceDown,
    KvCleared,
    KvEvicted,
    KvStored,
    MemoryTier,
    Prefill,
    PrefillFailed,
    PrefillFinished,
    ReadFinished,
    ReadKv,
    Reject,
    Request,
    TransferFinished,
)

Some = TypeVar("Some", Prefill, ReadKv)
CHAIN = tuple(range(1, 41))
SPEC = ControlSpec(decode="netkv", prefill="cache-aware")
TOKEN_BYTES = float(llm.model("llama-3-70b").kv_bytes(1))
PREFILL_TOKEN_S, PREFILL_BASE_S = 100e-6, 10e-3


def request(number: int, blocks: int = len(CHAIN), *, copyable: bool = True) -> Request:
    return Request(
        id=number,
        input_tokens=blocks * BLOCK + 1,
        blocks=CHAIN[:blocks],
        block_tokens=BLOCK,
        max_output_tokens=1,
        copyable=copyable,
    )


def core(
    reads: str = "shorter", spec: ControlSpec = SPEC, near: str = "8 Gbps", far: str = "80 Gbps"
) -> tuple[Cluster, Control]:
    """Return a cluster and its core. A NIC of 80 Gbps reads a token in a third of the time of computing it, one of
    8 Gbps takes three times as long."""
    cluster = cluster_with(reads, near=near, other="80 Gbps", far=far)
    return cluster, spec.build(cluster)


def of(kind: type[Some], decisions: tuple[Decision, ...]) -> Some:
    """Return the one decision of a kind."""
    [found] = [decision for decision in decisions if isinstance(decision, kind)]
    return found


STORED = st.lists(
    st.tuples(
        st.sampled_from(["prefill0", "prefill2", "decode0"]),
        st.sampled_from(["gpu", "cpu", "disk", "store"]),
        st.integers(1, 40),
    ),
    max_size=8,
)


@given(STORED, st.integers(1, 40), st.sampled_from(["prefill", "shorter"]))
def test_the_cheapest_option_of_each_candidate_is_chosen(
    stored: list[tuple[str, MemoryTier, int]], blocks: int, reads: str
) -> None:
    """A dictionary of depths and a loop over the four options give the same cost for every candidate."""
    _, control = core(reads, far="" if reads == "prefill" else "8 Gbps")
    depth: dict[tuple[str, str], int] = {}
    for name, tier, count in stored:
        control.handle(KvStored(0.0, name, CHAIN[:count], BLOCK, tier))
        where = ("", tier) if tier == "store" else (name, tier)
        depth[where] = max(depth.get(where, 0), count)
    decision = of(Prefill, control.handle(Arrived(0.0, request(1, blocks))))
    assert decision.terms is not None
    tokens = blocks * BLOCK + 1
    rates = {"prefill0": 1e9, "prefill2": 0.0} if reads == "prefill" else {"prefill0": 10e9, "prefill2": 10e9}
    cost = dict(zip(decision.terms.names, decision.terms.cost.tolist(), strict=True))
    for name in ("prefill0", "prefill2"):
        gpu, cpu, disk = (min(depth.get((name, tier), 0), blocks) for tier in ("gpu", "cpu", "disk"))
        store = min(depth.get(("", "store"), 0), blocks) if rates[name] else 0
        load_s = {gpu: 0.0}
        if cpu > gpu:
            load_s[cpu] = (cpu - gpu) * BLOCK * TOKEN_BYTES / 50e9
        held = max(gpu, cpu)
        if disk > held:
            load_s[disk] = load_s.get(cpu, 0.0) + (disk - held) * BLOCK * TOKEN_BYTES / 5e9
        if store > held:
            read_s = store * BLOCK * TOKEN_BYTES / rates[name]
            load_s[store] = min(read_s, load_s.get(store, read_s))
        best = min(
            seconds + PREFILL_BASE_S + PREFILL_TOKEN_S * (tokens - found * BLOCK) for found, seconds in load_s.items()
        )
        assert cost[name] == pytest.approx(best)


@pytest.mark.parametrize(("rate", "expected"), [("5 GB/s", "prefill0"), ("1 MB/s", "prefill1")])
def test_a_prefix_on_disk_is_a_hit_if_reading_it_is_faster_than_computing_it(rate: str, expected: str) -> None:
    """The first instance has some work ahead. The rate is a key of the cluster file; clearing drops the prefix."""
    text = HEAD.replace("defaults: {", f"defaults: {{disk_bandwidth: {rate}, ")
    lines = [
        f"  - {{name: {name}, role: {role}, gpus: 'node{node}:{gpu}-{gpu + 1}'}}\n"
        for name, role, node, gpu in (
            ("prefill0", "prefill", 0, 0),
            ("prefill1", "prefill", 1, 0),
            ("d", "decode", 0, 2),
        )
    ]
    control = SPEC.build(parse(text + "".join(lines)))
    control.handle(KvStored(0.0, "prefill0", CHAIN, BLOCK, "disk"))
    control.handle(Arrived(0.0, Request(id=1, input_tokens=100, max_output_tokens=1), ("prefill0", "d")))
    decision = of(Prefill, control.handle(Arrived(0.0, request(2))))
    assert decision.instance == expected
    if expected == "prefill0":
        assert decision.cached_tokens == len(CHAIN) * BLOCK
        assert decision.terms is not None
        assert decision.terms.parts["load_s"][0] == pytest.approx(len(CHAIN) * BLOCK * TOKEN_BYTES / 5e9)
    control.handle(KvEvicted(0.0, "prefill0", CHAIN, 10, "disk"))
    assert control.caches.tier_tokens("disk", request(3), "llama-3-70b", np.array([1]), 10**6).tolist() == [10 * BLOCK]
    assert [tier for tier, _ in control.caches.chains(1)] == ["disk"]
    control.handle(KvCleared(0.0, "prefill0"))
    assert list(control.caches.chains(1)) == []


def test_without_other_tiers_nothing_changes() -> None:
    _, control = core()
    control.handle(KvStored(0.0, "prefill0", CHAIN, BLOCK))
    decisions = control.handle(Arrived(0.0, request(1)))
    assert [type(decision) for decision in decisions] == [Prefill]
    terms = of(Prefill, decisions).terms
    assert terms is not None
    assert "load_s" not in terms.parts


def test_what_one_instance_wrote_to_the_store_every_instance_can_read() -> None:
    cluster, control = core()
    control.handle(KvStored(0.0, "decode1", CHAIN, BLOCK, "store"))
    decisions = control.handle(Arrived(0.0, request(1)))
    prefill, read = of(Prefill, decisions), of(ReadKv, decisions)
    assert prefill.cached_tokens == len(CHAIN) * BLOCK
    assert (read.first_token, read.prefill_tokens + read.decode_tokens) == (0, len(CHAIN) * BLOCK)
    assert read.kv_bytes == len(CHAIN) * BLOCK * TOKEN_BYTES
    assert prefill.terms is not None
    assert prefill.terms.parts["load_s"].min() > 0.0
    queues = {name: load.storage_queue_s for name, load in control.loads(0.0).items()}
    reader = read.prefill_instance if read.prefill_tokens else read.decode_instance
    reading = {instance.node for instance in cluster.instances if queues[instance.name]}
    assert reading == {cluster.instances[cluster.index(reader)].node}


def test_the_decode_instance_of_the_read_path_gets_the_request() -> None:
    _, control = core("alternating")
    control.handle(KvStored(0.0, "decode1", CHAIN, BLOCK, "store"))
    for number in (1, 2):
        read = of(ReadKv, control.handle(Arrived(0.0, request(number))))
        assert control.handle(ReadFinished(0.5, read.read_id, "prefill" if read.prefill_tokens else "decode")) == ()
        [decode] = control.handle(PrefillFinished(1.0, number))
        assert isinstance(decode, Decode)
        assert decode.target == read.decode_instance
        assert not control.reading(read.read_id)
        control.handle(TransferFinished(2.0, number))
        control.handle(Admitted(2.0, number))
    for number in (1, 2):
        control.handle(Finished(3.0, number))
    assert {load.storage_queue_s for load in control.loads(3.0).values()} == {0.0}
    assert {load.queued for load in control.loads(3.0).values()} == {0}


def test_another_decode_instance_is_chosen_if_that_of_the_read_path_goes_down() -> None:
    _, control = core()
    control.handle(KvStored(0.0, "decode1", CHAIN, BLOCK, "store"))
    read = of(ReadKv, control.handle(Arrived(0.0, request(1))))
    control.handle(InstanceDown(0.5, read.decode_instance))
    [decode] = control.handle(PrefillFinished(1.0, 1))
    assert isinstance(decode, Decode)
    assert decode.target != read.decode_instance


def test_a_failed_prefill_gets_a_read_of_its_own() -> None:
    _, control = core()
    control.handle(KvStored(0.0, "decode1", CHAIN, BLOCK, "store"))
    first = of(ReadKv, control.handle(Arrived(0.0, request(1))))
    second = of(ReadKv, control.handle(PrefillFailed(1.0, 1)))
    assert second.read_id > first.read_id
    assert second.prefill_instance != first.prefill_instance
    assert not control.reading(first.read_id)
    side = "prefill" if first.prefill_tokens else "decode"
    with pytest.raises(InputError, match="does not read for read 1"):
        control.handle(ReadFinished(1.0, first.read_id, side))  # type: ignore[arg-type]
    control.handle(Finished(2.0, 1))
    assert not control.reading(second.read_id)


@pytest.mark.parametrize("case", ["tokens unknown", "layerwise", "evicted", "cache unused"])
def test_nothing_is_read_if_it_cannot_be_used(case: str) -> None:
    layerwise, used = case == "layerwise", case != "cache unused"
    spec = ControlSpec(decode="netkv", prefill="cache-aware", layerwise=layerwise, prefill_cache=used)
    _, control = core(spec=spec)
    control.handle(KvStored(0.0, "decode1", CHAIN, BLOCK, "store"))
    if case == "evicted":
        control.handle(KvEvicted(0.0, "decode0", CHAIN, 0, "store"))
    decisions = control.handle(Arrived(0.0, request(1, copyable=case != "tokens unknown")))
    assert not any(isinstance(decision, ReadKv | Reject) for decision in decisions)
    assert of(Prefill, decisions).cached_tokens == 0


def test_a_restart_clears_cpu_memory_and_keeps_the_store() -> None:
    _, control = core("prefill", near="80 Gbps")
    for tier, blocks in (("cpu", 30), ("store", 40)):
        control.handle(KvStored(0.0, "prefill0", CHAIN[:blocks], BLOCK, tier))  # type: ignore[arg-type]
    assert of(Prefill, control.handle(Arrived(0.0, request(1, 30)))).cached_tokens == 30 * BLOCK
    control.handle(Finished(0.0, 1))
    control.handle(KvCleared(0.0, "prefill0"))
    assert of(ReadKv, control.handle(Arrived(0.0, request(2, 30)))).prefill_tokens == 30 * BLOCK


def test_requests_that_are_read_make_computing_more_expensive() -> None:
    """An idle instance would compute the prompt sooner than its node could read it. That would delay the requests whose
    reads end meanwhile."""
    _, control = core("prefill", near="80 Gbps")
    control.handle(InstanceDown(0.0, "prefill2"))
    control.handle(KvStored(0.0, "prefill0", CHAIN, BLOCK, "store"))
    read_s = len(CHAIN) * BLOCK * TOKEN_BYTES / 10e9
    for number in range(1, 8):
        assert of(ReadKv, control.handle(Arrived(0.0, request(number)))).prefill_tokens == len(CHAIN) * BLOCK
        assert control.loads(0.0)["prefill0"].storage_queue_s == pytest.approx(number * read_s)
    assert 7 * read_s > PREFILL_BASE_S + PREFILL_TOKEN_S * len(CHAIN) * BLOCK
    assert control.loads(60.0)["prefill0"].pending_s == 0.0
    assert of(ReadKv, control.handle(Arrived(60.0, request(8)))).prefill_tokens == len(CHAIN) * BLOCK


def test_the_time_to_read_counts_for_the_decode_instance() -> None:
    """The decode instance beside the prefill instance has the fastest transfer, but its NIC is slow. The other two take
    turns, because the node of the first one reads."""
    _, control = core("shorter")
    control.handle(InstanceDown(0.0, "prefill2"))
    control.handle(KvStored(0.0, "prefill0", CHAIN, BLOCK, "store"))
    reads = [of(ReadKv, control.handle(Arrived(0.0, request(number)))) for number in (1, 2)]
    assert [read.prefill_tokens for read in reads] == [0, 0]
    assert {read.decode_instance for read in reads} == {"decode1", "decode2"}
    for read in reads:
        [decode] = control.handle(PrefillFinished(1.0, read.request_id))
        assert isinstance(decode, Decode)
        assert decode.terms is not None
        assert decode.terms.parts["read_s"][decode.terms.names.index("decode0")] > decode.terms.parts["read_s"].min()


def test_a_slow_store_is_not_read() -> None:
    _, control = core("prefill", near="8 Gbps", far="")
    control.handle(KvStored(0.0, "prefill0", CHAIN, BLOCK, "store"))
    assert [type(decision) for decision in control.handle(Arrived(0.0, request(1)))] == [Prefill]
