"""Groups: disjoint, of one size, and as valuable as an exhaustive search finds them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.planner.placement_files import cluster_text

from kvroute.planner.placement.all_reduce_times import AllReduceTimes
from kvroute.planner.placement.grouping import Grouper, Method, Pool, greedy_chunks, milp_chunks
from kvroute.planner.placement.swaps import Price, Swaps
from kvroute.topology import Cluster
from kvroute.topology.gpu_paths import Gpu
from kvroute.topology.place import Shards
from kvroute.topology.reading.assembly import load_network

NBYTES = 8e6
COMPUTE_S = 2e-3
"""Computing time beside which an all-reduce counts, so that slow groups have a value, too."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    path = tmp_path_factory.mktemp("grouping") / "cluster.yaml"
    path.write_text(cluster_text(racks=2, servers=3, gpus=4, oversubscription=2.0))
    return load_network(path)


def price_of(cluster: Cluster) -> Price:
    times = AllReduceTimes(cluster, None, 2.0)

    def price(group: Shards) -> float:
        return 1.0 / (COMPUTE_S + times.best(group, NBYTES)[1].seconds(NBYTES))

    return price


def free_gpus(cluster: Cluster, kept: list[int]) -> list[Gpu]:
    """The first `kept[node]` GPUs of each node."""
    return [(node, gpu) for node, count in enumerate(kept) for gpu in range(count)]


def exhaustive(cluster: Cluster, kept: tuple[int, ...], size: int) -> float:
    """The highest sum of prices over all partitions into groups of `size`, by the number of GPUs on each node."""
    price = price_of(cluster)

    def shares(left: tuple[int, ...], wanted: int) -> Iterator[tuple[int, ...]]:
        if not left:
            if wanted == 0:
                yield ()
            return
        for here in range(min(left[0], wanted) + 1):
            for rest in shares(left[1:], wanted - here):
                yield (here, *rest)

    @cache
    def value(taken: tuple[int, ...]) -> float:
        return price(tuple((node, gpu) for node, count in enumerate(taken) for gpu in range(count)))

    @cache
    def best(left: tuple[int, ...]) -> float:
        if sum(left) < size:
            return 0.0
        return max(
            value(taken) + best(tuple(a - b for a, b in zip(left, taken, strict=True))) for taken in shares(left, size)
        )

    return best(kept)


@settings(deadline=None, max_examples=25)
@given(kept=st.lists(st.integers(0, 4), min_size=6, max_size=6), size=st.sampled_from([2, 3, 4]))
def test_groups_are_near_the_exhaustive_optimum(cluster: Cluster, kept: list[int], size: int) -> None:
    """The sum of prices is at most 2 % below that of the best partition of 6 servers."""
    grouper = Grouper(Pool.of(cluster, free_gpus(cluster, kept)), size, price_of(cluster))
    found = grouper.groups()
    price = price_of(cluster)
    best = exhaustive(cluster, tuple(kept), size)
    assert sum(map(price, found)) >= 0.98 * best - 1e-12


@settings(deadline=None, max_examples=25)
@given(
    kept=st.lists(st.integers(0, 4), min_size=6, max_size=6),
    size=st.integers(1, 6),
    method=st.sampled_from(["milp", "greedy"]),
    limit=st.none() | st.integers(0, 3),
    spread=st.booleans(),
)
def test_groups_are_disjoint_and_of_one_size(
    cluster: Cluster, kept: list[int], size: int, method: Method, limit: int | None, spread: bool
) -> None:
    gpus = free_gpus(cluster, kept)
    pool = Pool.of(cluster, gpus)
    found = Grouper(pool, size, price_of(cluster), method).groups(limit, spread=spread)
    used = [gpu for group in found for gpu in group]
    assert len(found) == min(len(gpus) // size, len(gpus) if limit is None else limit)
    assert all(len(group) == size for group in found)
    assert sorted(used + pool.left()) == gpus


def test_a_limit_takes_racks_in_turn_or_one_after_the_other(cluster: Cluster) -> None:
    def racks(*, spread: bool) -> list[int]:
        pool = Pool.of(cluster, free_gpus(cluster, [4] * 6))
        groups = Grouper(pool, 4, price_of(cluster)).groups(2, spread=spread)
        return sorted(cluster.places.domains[group[0][0]][1] for group in groups)

    one, other = cluster.places.domains[0][1], cluster.places.domains[5][1]
    assert racks(spread=False) == [one, one]
    assert racks(spread=True) == [one, other]


@settings(deadline=None, max_examples=40)
@given(counts=st.lists(st.integers(0, 8), min_size=1, max_size=6), size=st.sampled_from([2, 4, 8]))
def test_chunks_are_on_different_servers_and_fit(counts: list[int], size: int) -> None:
    values = {chunk: float(chunk) for chunk in (8, 4, 2, 1) if size % chunk == 0 and size // chunk <= len(counts)}
    solved, greedy = milp_chunks(counts, size, values), greedy_chunks(counts, size, values)
    for plan in (solved, greedy):
        used = np.zeros(len(counts))
        for places in plan:
            assert len(set(places)) == len(places)
            used[list(places)] += size // len(places)
        assert (used <= counts).all()
    total = [sum(values[size // len(places)] for places in plan) for plan in (solved, greedy)]
    assert total[0] >= total[1] - 1e-6


def test_swaps_make_equal_shares_out_of_unequal_ones(cluster: Cluster) -> None:
    """Two groups of 3 + 1 and 1 + 3 GPUs on two servers become two groups inside one server each."""
    uneven = [((0, 0), (0, 1), (0, 2), (1, 0)), ((0, 3), (1, 1), (1, 2), (1, 3))]
    price = price_of(cluster)
    swaps = Swaps([uneven[0], uneven[1], ((2, 0), (2, 1), (2, 2), (2, 3))], [], price, lambda node: 0)
    swaps.run()
    found = swaps.groups
    assert all(len({node for node, _ in group}) == 1 for group in found)
