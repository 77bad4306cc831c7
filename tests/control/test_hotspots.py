"""Tests of `kvroute.control.state.hotspots`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.control.state.hotspots import CacheLocation, Hotspots, HotspotSpec, PlannedCopy
from kvroute.types import InputError

Chain = tuple[int, ...]
SIZE = 4
"""Tokens per block."""
BLOCK_BYTES = 64.0
ALICE = (1, 2, 10, 11)
BOB = (1, 2, 20)
EAST, EAST_TOO = CacheLocation("east", "e0"), CacheLocation("east", "e1")
WEST, WEST_TOO = CacheLocation("west", "w0"), CacheLocation("west", "w1")
PLACES = (EAST, EAST_TOO, WEST, WEST_TOO)


class StoredChains:
    """Cached prefixes as a set of chains per place; only a whole chain can be reused, as with linear attention."""

    block_tokens = SIZE

    def __init__(self, stored: Iterable[tuple[CacheLocation, Chain]], places: Iterable[CacheLocation] = PLACES) -> None:
        self.places = tuple(sorted(places))
        self._chains: dict[CacheLocation, set[Chain]] = {place: set() for place in self.places}
        for place, chain in stored:
            self.store(place, chain)

    def store(self, place: CacheLocation, chain: Chain) -> None:
        self._chains[place].add(chain)

    def depth(self, place: CacheLocation, chain: Chain) -> int:
        return next((end for end in range(len(chain), 0, -1) if chain[:end] in self._chains[place]), 0)

    def plan(
        self, blocks: Chain, block_tokens: int, source: CacheLocation, target: CacheLocation
    ) -> PlannedCopy | None:
        there, here = self.depth(source, blocks), self.depth(target, blocks)
        if there <= here:
            return None
        return PlannedCopy(source, target, blocks[:there], there * block_tokens, there * BLOCK_BYTES)


CHAINS = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(
    lambda branch: tuple(hash(tuple(branch[: end + 1])) for end in range(len(branch)))
)
READS = st.lists(st.tuples(st.sampled_from(PLACES), CHAINS, st.integers(1, 5)), max_size=12)
SCOPES = st.sampled_from([(), ("west",), ("east", "west")])


@given(READS, st.sampled_from([0.0, 300.0, 1e6]), SCOPES, st.sampled_from([1.1, 1.25, 1.5]), st.integers(1, 3))
def test_rebalancing_levels_load_within_its_budget(
    reads: list[tuple[CacheLocation, Chain, int]],
    budget_bytes: float,
    joined: tuple[str, ...],
    factor: float,
    reads_min: int,
) -> None:
    """For each copy, the source is hot at that point, the target is its least loaded peer and is afterwards not hotter
    than the source."""
    prefixes = StoredChains((place, chain) for place, chain, _ in reads)
    spots = Hotspots(prefixes, HotspotSpec(factor=factor, reads_min=reads_min))
    for place, chain, times in reads:
        for _ in range(times):
            spots.note(place, chain, len(chain) * SIZE)
    loads, hot = spots.read_tokens(), spots.hot(joined)
    for place in PLACES:
        peers = [loads[peer] for peer in PLACES if peer.datacenter == place.datacenter or len(joined) == 2]
        assert (place in hot) == (loads[place] > factor * sum(peers) / len(peers))
    copies = spots.rebalance(budget_bytes, joined)
    assert copies == spots.rebalance(budget_bytes, joined)
    assert sum(copy.nbytes for copy in copies) <= budget_bytes + 1e-9
    assert all(first != second for first, second in combinations(copies, 2))
    running = {place: float(tokens) for place, tokens in loads.items()}
    for copy in copies:
        near = tuple(peer for peer in PLACES if peer.datacenter == copy.source.datacenter)
        scopes = [near, PLACES] if len(joined) == 2 else [near]
        assert any(is_hottest_to_least(prefixes, copy, running, factor, scope) for scope in scopes)
        before = [
            earlier
            for earlier in copies[: copies.index(copy)]
            if (earlier.source, earlier.blocks) == (copy.source, copy.blocks)
        ]
        times_read = sum(times for place, chain, times in reads if (place, chain) == (copy.source, copy.blocks))
        assert times_read >= reads_min
        moved = times_read * copy.tokens / 2 ** (len(before) + 1)
        running[copy.source] -= moved
        running[copy.target] += moved
        assert running[copy.target] <= running[copy.source]
        prefixes.store(copy.target, copy.blocks)


def is_hottest_to_least(
    prefixes: StoredChains,
    copy: PlannedCopy,
    running: dict[CacheLocation, float],
    factor: float,
    scope: tuple[CacheLocation, ...],
) -> bool:
    """Return whether the source is hot among the peers and the target is the least read of those without the chain."""
    hot = running[copy.source] > factor * sum(running[peer] for peer in scope) / len(scope)
    lacking = [peer for peer in scope if prefixes.plan(copy.blocks, SIZE, copy.source, peer)]
    least = min(((running[peer], peer) for peer in lacking), default=None)
    return hot and least == (running[copy.target], copy.target)


def test_a_hot_prefix_is_copied_to_the_least_read_peer() -> None:
    prefixes = StoredChains([(EAST, ALICE), (EAST, BOB)], (WEST, EAST_TOO, EAST))
    spots = Hotspots(prefixes, HotspotSpec(window_reads=12, factor=1.5, reads_min=2))
    for _ in range(50):
        spots.note(EAST, ALICE, 16)
    for _ in range(2):
        spots.note(EAST, BOB, 12)
    spots.note(WEST, (7,), 3)
    assert spots.read_tokens() == {EAST: 10 * 16 + 2 * 12, EAST_TOO: 0, WEST: 0}
    assert spots.hot() == (EAST,)
    assert spots.rebalance(4 * BLOCK_BYTES) == (PlannedCopy(EAST, EAST_TOO, ALICE, 16, 4 * BLOCK_BYTES),)
    assert spots.rebalance(4 * BLOCK_BYTES - 1) == (PlannedCopy(EAST, EAST_TOO, BOB, 12, 3 * BLOCK_BYTES),)
    assert [copy.target for copy in spots.rebalance(1e9, joined=("east", "west"))] == [EAST_TOO, WEST]


def test_a_rarely_read_prefix_is_not_copied() -> None:
    """However hot an instance is, a prefix that was read only once may never be read again."""
    spots = Hotspots(StoredChains([(EAST, ALICE)]), HotspotSpec(reads_min=3))
    spots.note(EAST, ALICE, 16)
    spots.note(EAST, ALICE, 16)
    assert (spots.hot(), spots.rebalance(1e9)) == ((EAST,), ())
    spots.note(EAST, ALICE, 16)
    assert [copy.blocks for copy in spots.rebalance(1e9)] == [ALICE]


def test_a_copy_that_would_only_move_the_hotspot_is_not_planned() -> None:
    """With 20 tokens against 8, half of the only prefix would make it 10 against 18."""
    chain = (*ALICE, 12)
    spots = Hotspots(StoredChains([(EAST, chain)]), HotspotSpec(factor=1.25, reads_min=1))
    spots.note(EAST, chain, 20)
    spots.note(EAST_TOO, (7, 8), 8)
    assert spots.hot() == (EAST,)
    assert spots.rebalance(1e9) == ()


def test_the_hottest_instance_comes_first() -> None:
    spots = Hotspots(StoredChains([]), HotspotSpec(factor=1.1))
    spots.note(EAST, ALICE, 16)
    spots.note(WEST, (*ALICE, 12), 20)
    assert spots.hot(joined=("east", "west")) == (WEST, EAST)


def test_invalid_reads_are_rejected() -> None:
    spots = Hotspots(StoredChains([]))
    with pytest.raises(InputError, match=r"^tokens: 17 tokens exceed the chain of 16; give the number of reused"):
        spots.note(EAST, ALICE, 17)
    with pytest.raises(InputError, match=r"^place: there is no instance 'e9' in 'east'"):
        spots.note(CacheLocation("east", "e9"), ALICE, 16)
