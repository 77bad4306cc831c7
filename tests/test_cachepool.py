"""One worked example each for the cache pool, the view of all clusters and rebalancing, and edge cases."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvroute.cachepool import CachePool, CachePools, Copy, Evicted, Hotspots, HotspotSpec, Layout, Lease, Place
from kvroute.llm import MODELS, Layers, Model, model
from kvroute.types import InputError

SYSTEM = (1, 2)
ALICE = (*SYSTEM, 10, 11)
BOB = (*SYSTEM, 20)
DENSE = Layout.of(Model("dense", (Layers("attention", 1, 1, 4, 4),)), 4)
HYBRID = Layout.of(Model("hybrid", (Layers("attention", 1, 1, 4, 4), Layers("linear", 1, state_bytes=100.0))), 4)
"""Blocks of 64 bytes; a state takes two blocks."""
EAST, EAST_TOO, WEST = Place("east", "e0"), Place("east", "e1"), Place("west", "w0")


def begun(pool: CachePool, blocks: tuple[int, ...], **how: int | list[int]) -> Lease:
    lease = pool.begin(blocks, **how)  # type: ignore[arg-type]
    assert lease is not None
    return lease


def store(pool: CachePool, blocks: tuple[int, ...], **how: list[int]) -> None:
    """Run a whole prefill."""
    lease = begun(pool, blocks, **how)
    pool.fill(lease, len(blocks) * pool.layout.block_tokens)
    pool.end(lease)


def test_the_published_hybrid_model() -> None:
    """PrfaaS Table 5: 17,280 bytes per token and 173.9 MiB of state, which is 660 blocks of 16 tokens."""
    layout = Layout.of(model("prfaas-1t-hybrid"), 16)
    assert layout.block_bytes == 16 * 17_280
    assert [state.name for state in layout.states] == ["linear"]
    assert layout.state_blocks(0, 1000) == layout.state_blocks(0, 100_000) == 660


def test_windows_are_separate_states() -> None:
    """GPT-OSS-20B has 12 full layers and 12 layers with a window of 128 tokens, with equal bytes per token."""
    layout = Layout.of(MODELS["gpt-oss-20b"], 16)
    assert [state.name for state in layout.states] == ["sliding-128"]
    assert [layout.state_blocks(0, tokens) for tokens in (16, 17, 128, 5000)] == [1, 2, 8, 8]


def test_full_attention_matches_a_part_of_a_prefix() -> None:
    pool = CachePool(DENSE, 8)
    store(pool, ALICE)
    assert pool.match_tokens(ALICE, 4) == 16
    assert pool.match_tokens(BOB, 4) == 8
    assert pool.match_tokens(ALICE, 4, most_tokens=15) == 12
    assert pool.match_tokens((5, 6), 4) == pool.match_tokens((), 4) == 0


def test_a_state_matches_at_its_exact_length_only() -> None:
    pool = CachePool(HYBRID, 12)
    store(pool, ALICE)
    assert pool.match_tokens(ALICE, 4) == pool.match_tokens((*ALICE, 12), 4) == 16
    assert pool.match_tokens(BOB, 4) == pool.match_tokens(ALICE, 4, most_tokens=15) == 0
    store(pool, BOB, states_at=[8, 12])
    assert pool.match_tokens(BOB, 4) == 12
    assert pool.match_tokens((*SYSTEM, 30), 4) == pool.match_tokens(ALICE, 4, most_tokens=15) == 8
    assert (pool.free_blocks, pool.idle_blocks) == (1, 5 + 3 * 2)


def test_an_evicted_state_ends_its_match() -> None:
    """The block of the evicted state is still present and is evicted next; the shorter prefix has its own state."""
    pool = CachePool(HYBRID, 6)
    store(pool, SYSTEM, states_at=[4, 8])
    assert begun(pool, (9,), states_at=[]).evicted == Evicted((), (("linear", 2),))
    assert pool.match_tokens(SYSTEM, 4) == 4
    assert begun(pool, (8,), states_at=[]).evicted == Evicted((), ())
    assert begun(pool, (7,), states_at=[]).evicted == Evicted((2,), ())
    assert pool.match_tokens(SYSTEM, 4) == 4


def test_filled_blocks_are_reusable_at_once_and_none_before() -> None:
    pool = CachePool(DENSE, 8)
    lease = begun(pool, ALICE)
    assert pool.match_tokens(ALICE, 4) == 0
    pool.fill(lease, 11)
    assert pool.match_tokens(ALICE, 4) == 8
    pool.end(lease)
    assert pool.match_tokens(ALICE, 4) == 8
    assert (pool.free_blocks, pool.idle_blocks) == (6, 2)


def test_the_second_of_two_equal_prefills_reuses_the_blocks_of_the_first() -> None:
    pool = CachePool(HYBRID, 12)
    first, second = begun(pool, ALICE), begun(pool, ALICE)
    assert pool.free_blocks == 0
    for lease in (first, second):
        pool.fill(lease, 16)
    assert pool.free_blocks == 6
    numbers = pool.numbers(first), pool.numbers(second)
    assert numbers[0].chain.tolist() == numbers[1].chain.tolist()
    assert numbers[0].states["linear", 16].tolist() == numbers[1].states["linear", 16].tolist()
    pool.end(first)
    assert pool.idle_blocks == 0
    pool.end(second)
    assert pool.idle_blocks == 6


def test_transfer_blocks_are_freed_when_the_transfer_completes() -> None:
    """Three tokens after the last whole block take one block, the state at the exact end takes two."""
    pool = CachePool(HYBRID, 12)
    lease = begun(pool, ALICE, tokens=19)
    assert len(pool.numbers(lease).transfer) == 3
    assert pool.free_blocks == 12 - 6 - 3
    pool.fill(lease, 16)
    pool.sent(lease)
    assert pool.free_blocks == 6
    pool.sent(lease)
    pool.end(lease)
    assert (pool.free_blocks, pool.idle_blocks) == (6, 6)


def test_a_receiver_reserves_the_whole_prompt_for_the_transfer() -> None:
    pool = CachePool(HYBRID, 12)
    lease = begun(pool, (), tokens=19)
    assert len(pool.numbers(lease).transfer) == 5 + 2
    pool.end(lease)
    assert pool.free_blocks == 12


def test_the_least_recently_released_prefix_is_evicted_first_from_its_end() -> None:
    pool = CachePool(HYBRID, 9)
    store(pool, SYSTEM)
    store(pool, (7,))
    lease = begun(pool, (8, 9, 10))
    assert lease.evicted == Evicted((2,), (("linear", 2),))
    assert pool.match_tokens((7,), 4) == 4
    pool.end(lease)


def test_held_blocks_are_not_evicted_and_allocation_is_all_or_nothing() -> None:
    pool = CachePool(DENSE, 5)
    store(pool, BOB)
    lease = begun(pool, BOB)
    assert pool.begin((7, 8, 9)) is None
    assert (pool.free_blocks, pool.match_tokens(BOB, 4)) == (2, 12)
    pool.end(lease)
    assert begun(pool, (7, 8, 9)).evicted == Evicted((20,), ())


def test_after_a_clear_nothing_is_reused_and_all_memory_is_free() -> None:
    pool = CachePool(HYBRID, 12)
    store(pool, BOB)
    lease = begun(pool, ALICE)
    pool.clear()
    pool.fill(lease, 16)
    assert pool.match_tokens(BOB, 4) == pool.match_tokens(ALICE, 4) == 0
    assert pool.free_blocks == 12 - 4 - 2
    pool.end(lease)
    assert pool.free_blocks == 12


POOL = CachePool(DENSE, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Layout.of(MODELS["llama-3-8b"], 0), "block_tokens: a block of 0 tokens; give 1 or more"),
        (lambda: Layout.of(Model("none", (Layers("linear", 1),))), "model: none has no KV cache"),
        (lambda: CachePool(DENSE, -1), "capacity_blocks: -1 blocks; give 0 or more"),
        (
            lambda: POOL.match_tokens(ALICE, 16),
            "block_tokens: the hashes are of blocks of 16 tokens, but the pool has 4",
        ),
        (lambda: POOL.match_tokens(ALICE, 4, -1), "most_tokens: -1 is negative"),
        (lambda: POOL.begin(BOB, states_at=[6]), "states_at: no block of a chain of 3 ends at 6 tokens; give mult"),
        (lambda: POOL.begin(BOB, states_at=[16]), "states_at: no block of a chain of 3 ends at 16 tokens"),
        (lambda: POOL.begin(BOB, tokens=-1), "tokens: -1 is negative"),
        (lambda: POOL.fill(begun(POOL, (1,)), 8), "tokens: 8 tokens exceed the chain of 4"),
        (lambda: POOL.end(begun(CachePool(DENSE, 1), (1,))), "lease: the lease has ended or belongs to another pool"),
        (lambda: HotspotSpec(window_reads=0), "window_reads: 0 reads"),
        (lambda: HotspotSpec(factor=1.0), "factor: a factor of 1.0"),
        (lambda: HotspotSpec(factor=float("nan")), "factor: a factor of nan"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_invalid_input_is_rejected(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        call()


def test_a_lease_can_end_only_once() -> None:
    pool = CachePool(DENSE, 4)
    lease = begun(pool, BOB)
    pool.end(lease)
    for call in (pool.end, pool.sent, pool.numbers):
        with pytest.raises(InputError, match=r"^lease: the lease has ended"):
            call(lease)
    assert pool.free_blocks == 4


def sites(layout: Layout = HYBRID, capacity_blocks: int = 12) -> CachePools:
    return CachePools({place: CachePool(layout, capacity_blocks) for place in (WEST, EAST_TOO, EAST)})


def test_reusable_tokens_by_cluster() -> None:
    pools = sites()
    store(pools.pool(EAST_TOO), ALICE)
    store(pools.pool(WEST), BOB, states_at=[8])
    assert pools.match(ALICE, 4) == (("east", 16, "e1"), ("west", 8, "w0"))
    assert pools.match(BOB, 4) == (("east", 0, ""), ("west", 8, "w0"))
    assert pools.match_each(ALICE, 4) == {EAST: 0, EAST_TOO: 16, WEST: 8}


def test_a_copy_transfers_only_missing_blocks() -> None:
    """Two blocks of 64 bytes are there already; the state of 100 bytes is transferred whole."""
    pools = sites()
    store(pools.pool(EAST), ALICE)
    store(pools.pool(WEST), BOB)
    copy = pools.plan((*ALICE, 12), 4, EAST, WEST)
    assert copy == Copy(EAST, WEST, ALICE, 16, 2 * 64 + 100.0)
    entry = pools.start(copy)
    assert entry is not None
    assert pools.plan(ALICE, 4, EAST, WEST) is None
    assert pools.in_flight == (copy,)
    assert pools.match(ALICE, 4)[1].tokens == 0
    pools.finish(entry, landed=True)
    assert pools.match(ALICE, 4)[1] == ("west", 16, "w0")
    with pytest.raises(InputError, match=r"^copy: the copy has finished already"):
        pools.finish(entry, landed=True)


def test_a_failed_copy_leaves_no_blocks() -> None:
    pools = sites()
    store(pools.pool(EAST), ALICE)
    copy = pools.plan(ALICE, 4, EAST, WEST)
    assert copy is not None
    entry = pools.start(copy)
    assert entry is not None
    pools.finish(entry, landed=False)
    assert pools.pool(WEST).free_blocks == 12
    assert pools.pool(EAST).idle_blocks == 6


def test_an_outdated_copy_or_one_without_room_does_not_start() -> None:
    pools = sites()
    store(pools.pool(EAST), ALICE)
    copy = pools.plan(ALICE, 4, EAST, WEST)
    assert copy is not None
    taken = begun(pools.pool(WEST), tuple(range(100, 107)))
    assert pools.start(copy) is None
    pools.pool(WEST).end(taken)
    pools.pool(EAST).clear()
    assert pools.start(copy) is None
    assert pools.in_flight == ()


def test_a_copy_whose_source_has_evicted_the_end_does_not_start() -> None:
    pools = sites(DENSE, 4)
    store(pools.pool(EAST), ALICE)
    copy = pools.plan(ALICE, 4, EAST, WEST)
    store(pools.pool(EAST), (7,))
    assert copy is not None
    assert pools.match_each(ALICE, 4)[EAST] == 12
    assert pools.start(copy) is None


def test_the_end_of_one_copy_does_not_end_a_second_one() -> None:
    pools = sites()
    store(pools.pool(EAST), ALICE)
    copy = pools.plan(ALICE, 4, EAST, WEST)
    assert copy is not None
    first = pools.start(copy)
    assert first is not None
    pools.finish(first, landed=False)
    assert pools.start(copy) is not None
    with pytest.raises(InputError, match=r"^copy: the copy has finished already"):
        pools.finish(first, landed=True)
    assert pools.in_flight == (copy,)


def test_pools_of_one_view_must_have_equal_layouts() -> None:
    with pytest.raises(InputError, match=r"^pools: w0 in west has a different layout"):
        CachePools({EAST: CachePool(DENSE, 1), WEST: CachePool(HYBRID, 1)})
    with pytest.raises(InputError, match=r"^place: there is no pool 'e9' in 'east'"):
        sites().pool(Place("east", "e9"))


def test_a_hot_prefix_is_copied_to_the_coolest_peer() -> None:
    pools = sites(DENSE)
    for blocks in (ALICE, BOB):
        store(pools.pool(EAST), blocks)
    spots = Hotspots(pools, HotspotSpec(window_reads=12, factor=1.5, reads_min=2))
    for _ in range(50):
        spots.note(EAST, ALICE, 16)
    for _ in range(2):
        spots.note(EAST, BOB, 12)
    spots.note(WEST, (7,), 3)
    assert spots.read_tokens() == {EAST: 10 * 16 + 2 * 12, EAST_TOO: 0, WEST: 0}
    assert spots.hot() == (EAST,)
    assert spots.rebalance(4 * 64.0) == (Copy(EAST, EAST_TOO, ALICE, 16, 4 * 64.0),)
    assert spots.rebalance(4 * 64.0 - 1) == (Copy(EAST, EAST_TOO, BOB, 12, 3 * 64.0),)
    assert [copy.target for copy in spots.rebalance(1e9, joined=("east", "west"))] == [EAST_TOO, WEST]


def test_a_rarely_read_prefix_is_not_copied() -> None:
    """However hot an instance is, a prefix that was read only once may never be read again."""
    pools = sites(DENSE)
    store(pools.pool(EAST), ALICE)
    spots = Hotspots(pools, HotspotSpec(reads_min=3))
    spots.note(EAST, ALICE, 16)
    spots.note(EAST, ALICE, 16)
    assert (spots.hot(), spots.rebalance(1e9)) == ((EAST,), ())
    spots.note(EAST, ALICE, 16)
    assert [copy.blocks for copy in spots.rebalance(1e9)] == [ALICE]


def test_a_copy_that_would_only_move_the_hotspot_is_not_planned() -> None:
    """With 20 tokens against 8, half of the only prefix would make it 10 against 18."""
    pools = sites(DENSE)
    store(pools.pool(EAST), (*ALICE, 12))
    spots = Hotspots(pools, HotspotSpec(factor=1.25, reads_min=1))
    spots.note(EAST, (*ALICE, 12), 20)
    spots.note(EAST_TOO, (7, 8), 8)
    assert spots.hot() == (EAST,)
    assert spots.rebalance(1e9) == ()


def test_the_hottest_instance_comes_first() -> None:
    spots = Hotspots(sites(DENSE), HotspotSpec(factor=1.1))
    spots.note(EAST, ALICE, 16)
    spots.note(WEST, (*ALICE, 12), 20)
    assert spots.hot(joined=("east", "west")) == (WEST, EAST)


def test_invalid_reads_are_rejected() -> None:
    with pytest.raises(
        InputError, match=r"^tokens: 17 tokens exceed the chain of 16; give the number of reused tokens"
    ):
        Hotspots(sites()).note(EAST, ALICE, 17)


def test_a_pool_that_is_filled_twice_evicts_all_earlier_prefixes() -> None:
    """The pool is filled twice: all earlier prefixes are gone, and each of their blocks was reported as evicted."""
    pool = CachePool(DENSE, 100_000)
    chains = [tuple(range(start, start + 10_000)) for start in range(0, 200_000, 10_000)]
    gone: set[int] = set()
    for chain in chains:
        lease = begun(pool, chain)
        gone.update(lease.evicted.blocks)
        pool.fill(lease, 40_000)
        pool.end(lease)
    assert gone == set(range(100_000))
    assert [pool.match_tokens(chain, 4) for chain in chains] == [0] * 10 + [40_000] * 10
