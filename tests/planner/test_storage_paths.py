"""Reading cached KV through both sides: every resource by an independent account of the hops, and by brute force."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvroute.planner.dualpath.storage_paths import (
    KvRatios,
    NodeBandwidth,
    ResourceLoad,
    best_reads,
    loads,
    saturation,
)

NIC = 50e9
PUBLISHED = KvRatios(persisted=False)


def node(storage: float = 1.0, *, replication: float = 1.0, dram: float = 500e9) -> NodeBandwidth:
    """Return a node with eight GPUs; `storage` in compute NICs."""
    return NodeBandwidth(8 * NIC, storage * NIC, storage * NIC, dram, replication)


nodes = st.builds(
    NodeBandwidth,
    compute_nics=st.floats(50e9, 800e9),
    storage_read=st.floats(5e9, 200e9),
    storage_write=st.floats(5e9, 200e9),
    dram=st.floats(50e9, 2e12),
    replication=st.sampled_from([1.0, 2.0, 4.0, 8.0]),
)
turns = st.builds(KvRatios, miss=st.floats(0.0, 2.0), generated=st.floats(0.0, 1.0), persisted=st.booleans())


def carried(  # one line for each hop of the publication's figure 4
    prefill: NodeBandwidth, decode: NodeBandwidth, turn: KvRatios, bounce: bool, by_prefill: float, by_decode: float
) -> defaultdict[str, float]:
    """Return bytes per second on every resource if the prefill nodes read `by_prefill` and the decode nodes
    `by_decode`."""
    used: defaultdict[str, float] = defaultdict(float)

    def hop(nbytes: float, *resources: str) -> None:
        for resource in resources:
            used[resource] += nbytes

    cached = by_prefill + by_decode
    miss, generated = turn.miss * cached, turn.generated * cached
    hop(by_prefill, "prefill storage read", "prefill DRAM")
    hop(by_prefill, "prefill DRAM")
    hop(by_prefill * prefill.replication, "prefill compute NIC read", "prefill compute NIC write")
    hop(by_decode, "decode storage read", "decode DRAM")
    hop(by_decode, "decode DRAM")
    hop(by_decode * prefill.replication, "decode compute NIC read", "prefill compute NIC write")
    hop(by_prefill + miss, "prefill compute NIC read", "decode compute NIC write")
    if bounce:
        hop(by_prefill + miss, "decode DRAM")
        hop(cached + miss, "decode DRAM")
        hop((cached + miss) * decode.replication, "decode compute NIC read", "decode compute NIC write")
    if turn.persisted:
        hop(generated, "decode compute NIC read", "decode compute NIC write", "decode DRAM")
        hop(miss + generated, "decode DRAM", "decode storage write")
    return used


def fits(
    resource_loads: tuple[ResourceLoad, ...],
    used: Mapping[str, float],
    prefill_nodes: int,
    decode_nodes: int,
    slack: float,
) -> bool:
    """Return whether every load is at most its capacity times `slack`."""
    count = {"prefill": prefill_nodes, "decode": decode_nodes}
    return all(used[load.name] <= load.capacity * count[load.side] * slack for load in resource_loads)


@given(nodes, nodes, turns, st.booleans(), st.floats(0.0, 1e12), st.floats(0.0, 1e12))
def test_every_load_is_the_sum_of_its_hops(
    prefill: NodeBandwidth, decode: NodeBandwidth, turn: KvRatios, bounce: bool, by_prefill: float, by_decode: float
) -> None:
    """The two coefficients of each resource give what the single hops add up to."""
    used = carried(prefill, decode, turn, bounce, by_prefill, by_decode)
    resource_loads = loads(prefill, decode, turn, bounce=bounce)
    assert {load.name for load in resource_loads} >= set(used)
    for load in resource_loads:
        linear = load.per_prefill_read * by_prefill + load.per_decode_read * by_decode
        assert linear == pytest.approx(used[load.name], rel=1e-9, abs=1e-3)


@given(nodes, nodes, turns, st.booleans())
def test_the_range_of_ratios_is_that_of_a_search(
    prefill: NodeBandwidth, decode: NodeBandwidth, turn: KvRatios, bounce: bool
) -> None:
    """All storage NICs can read at full rate exactly at the ratios in the range."""
    resource_loads = loads(prefill, decode, turn, bounce=bounce)
    ratios = saturation(resource_loads)
    for count in range(1, 13):
        for others in (1, 2, 5, 12):
            ratio = count / others
            used = carried(prefill, decode, turn, bounce, count * prefill.storage_read, others * decode.storage_read)
            if fits(resource_loads, used, count, others, 1.0 - 1e-9):
                assert ratios.possible
                assert ratios.low * (1 - 1e-6) <= ratio <= ratios.high * (1 + 1e-6)
            elif not fits(resource_loads, used, count, others, 1.0 + 1e-9):
                assert not ratios.low * (1 + 1e-6) < ratio < ratios.high * (1 - 1e-6)


@given(nodes, nodes, turns, st.booleans(), st.integers(1, 8), st.integers(1, 8))
@example(node(replication=4.0), node(replication=4.0), PUBLISHED, True, 2, 4)
def test_no_split_of_the_reads_beats_the_best_one(
    prefill: NodeBandwidth, decode: NodeBandwidth, turn: KvRatios, bounce: bool, prefill_nodes: int, decode_nodes: int
) -> None:
    """The best reads fit, and 40 x 40 other pairs that fit read less together."""
    resource_loads = loads(prefill, decode, turn, bounce=bounce)
    reads = best_reads(resource_loads, prefill_nodes, decode_nodes)
    used = carried(prefill, decode, turn, bounce, *reads)
    assert fits(resource_loads, used, prefill_nodes, decode_nodes, 1 + 1e-6)
    alone, nothing = best_reads(resource_loads, prefill_nodes, decode_nodes, prefill_only=True)
    assert nothing == 0.0
    assert alone <= sum(reads) * (1 + 1e-6)
    most = prefill_nodes * prefill.storage_read, decode_nodes * decode.storage_read
    for i in range(41):
        for j in range(41):
            other = most[0] * i / 40, most[1] * j / 40
            if fits(resource_loads, carried(prefill, decode, turn, bounce, *other), prefill_nodes, decode_nodes, 1.0):
                assert sum(other) <= sum(reads) * (1 + 1e-6)
                assert j > 0 or other[0] <= alone * (1 + 1e-6)


def test_equally_good_splits_use_the_storage_nics_evenly() -> None:
    """The prefill nodes' compute NICs limit the sum; the storage NICs of both sides then have the same share."""
    resource_loads = loads(node(replication=4.0), node(), PUBLISHED)
    by_prefill, by_decode = best_reads(resource_loads, 2, 4)
    assert by_prefill + by_decode == pytest.approx(200e9)
    assert by_prefill / 2 == pytest.approx(by_decode / 4)


@pytest.mark.parametrize("storage", [0.5, 1.0, 1.5, 2.0])
def test_the_published_range(storage: float) -> None:
    """Equation 9: s/(g-s) to the least of three bounds."""
    gpus, dram = 8.0, 500e9 / (storage * NIC)
    bounds = (gpus - 2 * storage) / storage, (gpus - storage) / (2 * storage), (dram - 3) / 2
    ratios = saturation(loads(node(storage), node(storage), PUBLISHED))
    assert (ratios.low, ratios.high) == pytest.approx((storage / (gpus - storage), min(bounds)))


@pytest.mark.parametrize(
    ("replication", "turn", "bounce", "expected"),
    [
        (1.0, PUBLISHED, True, (1 / 7, 7 / 2)),
        (1.0, PUBLISHED, False, (1 / 7, 8.0)),
        (2.0, PUBLISHED, True, (1 / 3, 2.0)),
        (1.0, KvRatios(0.11, 0.03), True, (1 / 7, 2.7657)),
    ],
)
def test_known_ranges(replication: float, turn: KvRatios, bounce: bool, expected: tuple[float, float]) -> None:
    """Eight GPUs, one storage NIC: the default, without the decode node's DRAM, replicated KV, and 90 % cached."""
    here = node(replication=replication)
    ratios = saturation(loads(here, here, turn, bounce=bounce))
    assert (ratios.low, ratios.high) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("replication", "turn"), [(4.0, PUBLISHED), (8.0, PUBLISHED), (1.0, KvRatios(1.0, 0.1))])
def test_no_ratio_is_enough(replication: float, turn: KvRatios) -> None:
    """KV replicated on four ranks, or half of the prompt not cached: the resources that prevent it are named."""
    here = node(replication=replication)
    ratios = saturation(loads(here, here, turn))
    assert not ratios.possible
    assert ratios.high_by is not None
