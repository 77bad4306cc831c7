"""One worked example each for the prefix index and block hashes, edge cases, and a recorded trace."""

from __future__ import annotations

import gc
import io
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
import zstandard

from kvroute.prefix import Evicted, PrefixIndex, block_hashes
from kvroute.prefix.tree import PrefixNode
from kvroute.types import InputError

TRACE = Path(__file__).resolve().parents[2] / ".." / "shared" / "data" / "mooncake" / "conversation_trace.jsonl.zst"

SYSTEM = (1, 2)
ALICE = (*SYSTEM, 10, 11, 12)
BOB = (*SYSTEM, 20, 21)


def test_a_hash_is_seeded_by_its_parent() -> None:
    tokens = [7, 300, 70_000, 1, 99]
    first = xxhash.xxh64_intdigest(np.array([7, 300], "<i8").tobytes(), 5)
    second = xxhash.xxh64_intdigest(np.array([70_000, 1], "<i8").tobytes(), first)
    assert block_hashes(tokens, block_tokens=2, seed=5) == (first, second)


def test_hashes_are_stable_across_releases() -> None:
    """A gateway and its log are used across versions; the number was recorded once."""
    assert block_hashes(range(16)) == (50805424035424587,)


@pytest.mark.parametrize("dtype", ["i1", "u2", "<i4", ">i4", "u4", ">i8"])
def test_hashes_do_not_depend_on_the_integer_type_of_tokens(dtype: str) -> None:
    assert block_hashes(np.arange(100).astype(dtype), 8) == block_hashes(list(range(100)), 8)


def test_a_prompt_shorter_than_a_block_has_no_hashes() -> None:
    assert block_hashes([]) == block_hashes(range(15)) == block_hashes(np.array([], np.int64)) == ()


@pytest.mark.parametrize(
    ("tokens", "where"),
    [
        ([1.5], "tokens"),
        (["1"], "tokens"),
        ("hello", "tokens"),
        (b"hello", "tokens"),
        ([2**63], "tokens"),
        ([[1, 2], [3, 4]], "tokens"),
        (np.ones((2, 2), np.int64), "tokens"),
        (np.ones(3), "tokens"),
        (np.ones(3, np.uint64), "tokens"),
        (np.ones(3, np.bool_), "tokens"),
        (3, "tokens"),
    ],
)
def test_values_that_are_no_token_ids_are_rejected(tokens: Any, where: str) -> None:
    with pytest.raises(InputError, match=f"^{where}: "):
        block_hashes(tokens)


def test_invalid_block_size_and_seed_are_rejected() -> None:
    with pytest.raises(InputError, match="block_tokens: a block of 0 tokens; give 1 or more"):
        block_hashes([1], 0)
    for seed in (-1, 2**64):
        with pytest.raises(InputError, match="seed: "):
            block_hashes([1], 1, seed)


def test_match_depths_of_all_instances_at_once() -> None:
    index = PrefixIndex(4)
    index.store(0, ALICE)
    index.store(1, BOB)
    index.store(2, SYSTEM[:1])
    assert index.match(ALICE).tolist() == [5, 2, 1, 0]
    assert index.match((*ALICE, 13)).tolist() == [5, 2, 1, 0]
    assert index.match(ALICE[:4]).tolist() == [4, 2, 1, 0]
    assert index.match(()).tolist() == index.match((99,)).tolist() == [0, 0, 0, 0]
    assert [index.used_blocks(i) for i in range(4)] == [5, 4, 1, 0]


def test_shared_blocks_count_once() -> None:
    index = PrefixIndex(1)
    index.store(0, ALICE)
    index.store(0, BOB)
    assert index.used_blocks(0) == 7


def test_the_least_recently_touched_prefix_is_evicted_first_from_its_end() -> None:
    index = PrefixIndex(1, capacity_blocks=7)
    index.store(0, ALICE)
    index.store(0, BOB)
    assert index.store(0, (5, 6)) == [Evicted(0, ALICE, 3)]
    index.touch(0, ALICE)
    assert index.store(0, (8,)) == [Evicted(0, BOB, 3)]
    assert index.match_one(0, ALICE) == 3


def test_a_match_does_not_touch() -> None:
    index = PrefixIndex(1, capacity_blocks=4)
    index.store(0, (1, 2))
    index.store(0, (3, 4))
    index.match((1, 2))
    index.match_one(0, (1, 2))
    assert index.store(0, (5,)) == [Evicted(0, (1, 2), 1)]


def test_trimming_one_instance_does_not_change_the_others() -> None:
    index = PrefixIndex(2, [4, None])
    index.store(0, (1, 2, 3, 4))
    index.store(1, (1, 2, 3, 4))
    assert index.make_room(0, 3) == [Evicted(0, (1, 2, 3, 4), 1)]
    assert index.match((1, 2, 3, 4)).tolist() == [1, 4]


def test_a_prompt_that_does_not_fit_keeps_its_first_blocks() -> None:
    index = PrefixIndex(1, capacity_blocks=3)
    index.store(0, (9,))
    assert index.store(0, ALICE) == [Evicted(0, (9,), 0)]
    assert index.match_one(0, ALICE) == index.used_blocks(0) == 3
    assert index.store(0, ALICE) == []
    assert PrefixIndex(1, 0).store(0, ALICE, pin=True) == []


def test_pins_prevent_eviction_and_nest() -> None:
    index = PrefixIndex(1, capacity_blocks=5)
    index.store(0, ALICE, pin=True)
    assert index.pin(0, ALICE, 3) == 3
    assert index.store(0, BOB) == []
    assert index.match_one(0, BOB) == 2
    assert index.unpin(0, ALICE, 5)
    assert index.pinned_blocks(0) == 3
    assert index.set_capacity(0, 1) == [Evicted(0, ALICE, 3)]
    assert index.used_blocks(0) == 3
    assert index.unpin(0, ALICE, 3)
    assert not index.unpin(0, ALICE, 3)
    assert index.make_room(0, 0) == [Evicted(0, ALICE[:3], 2), Evicted(0, ALICE[:2], 1)]


def test_a_partial_pin_is_released_completely() -> None:
    index = PrefixIndex(1, capacity_blocks=3)
    index.store(0, ALICE, pin=True)
    assert index.pinned_blocks(0) == 3
    assert index.unpin(0, ALICE, len(ALICE))
    assert index.pinned_blocks(0) == 0


def test_an_engines_eviction_includes_pinned_blocks() -> None:
    index = PrefixIndex(2)
    for instance in (0, 1):
        index.store(instance, ALICE, pin=True)
        index.store(instance, BOB)
    index.evict(0, ALICE, 3)
    assert index.match(ALICE).tolist() == [3, 5]
    assert [index.pinned_blocks(i) for i in (0, 1)] == [3, 5]
    index.evict(0, ALICE, 1)
    assert index.match(BOB).tolist() == [1, 4]
    assert index.unpin(0, ALICE, 5)
    assert index.pinned_blocks(0) == 0
    index.evict(0, (77, 78), 0)
    index.evict(0, ALICE, 5)
    assert index.used_blocks(0) == 1


def test_clear_and_add() -> None:
    index = PrefixIndex(1, capacity_blocks=6)
    index.store(0, ALICE, pin=True)
    index.clear(0)
    assert (index.used_blocks(0), index.pinned_blocks(0), index.capacity_blocks(0)) == (0, 0, 6)
    assert (index.add_instance(), index.add_instance(2), len(index)) == (1, 2, 3)
    assert [index.capacity_blocks(i) for i in range(3)] == [6, 6, 2]
    index.store(1, ALICE)
    assert index.match(ALICE).tolist() == [0, 5, 0]


def test_an_id_under_two_parents_makes_two_chains() -> None:
    index = PrefixIndex(1)
    index.store(0, (1, 5, 6))
    index.store(0, (2, 5, 7))
    index.store(0, (1, 1, 1))
    assert index.used_blocks(0) == 8
    assert index.match_one(0, (2, 5, 7)) == index.match_one(0, (1, 1, 1)) == 3
    index.clear(0)
    assert index.used_blocks(0) == 0


def test_a_reduced_index_shrinks_when_pins_are_released() -> None:
    index = PrefixIndex(1)
    index.store(0, (1, 2), pin=True)
    index.store(0, (3,))
    assert index.set_capacity(0, 1) == [Evicted(0, (3,), 0)]
    index.store(0, (3,))
    assert index.used_blocks(0) == 2
    assert index.unpin(0, (1, 2), 2)
    assert index.store(0, ()) == [Evicted(0, (1, 2), 1)]


def test_blocks_that_remain_after_an_engines_eviction_can_be_evicted() -> None:
    index = PrefixIndex(1)
    index.store(0, ALICE)
    index.evict(0, ALICE, 2)
    assert index.set_capacity(0, 0) == [Evicted(0, SYSTEM, 0)]


def test_clear_removes_pins_on_blocks_that_others_still_have() -> None:
    index = PrefixIndex(2)
    for instance in (0, 1):
        index.store(instance, ALICE, pin=True)
    index.clear(0)
    index.store(0, ALICE)
    assert not index.unpin(0, ALICE, 5)
    assert [index.pinned_blocks(i) for i in (0, 1)] == [0, 5]


def test_lru_order_is_kept_over_many_touches() -> None:
    index = PrefixIndex(1, capacity_blocks=80)
    for start in range(40):
        index.store(0, (start, 100 + start), pin=start < 4)
    index.evict(0, (39, 139), 1)
    for _ in range(30):
        for start in range(38, -1, -1):
            index.touch(0, (start,))
    gone = [e.blocks for e in index.make_room(0, 80)]
    assert gone == [*[(s, 100 + s) for s in range(4, 39)], (39,), *[(s,) for s in range(38, 3, -1)]]


def test_touches_use_no_memory() -> None:
    """An instance under load may be touched for ever and never evict anything."""
    index = PrefixIndex(1)
    index.store(0, ALICE)
    tracemalloc.start()
    for _ in range(20_000):
        index.touch(0, ALICE)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < 20_000


def test_evicted_prefixes_use_no_memory() -> None:
    gc.collect()
    before = sum(isinstance(thing, PrefixNode) for thing in gc.get_objects())
    index = PrefixIndex(30, capacity_blocks=50)
    for k in range(3000):
        index.store(k % 30, (k % 3, 10 + k % 7, 100 + k, 200 + k))
    for instance in range(30):
        index.clear(instance)
    gc.collect()
    assert sum(isinstance(thing, PrefixNode) for thing in gc.get_objects()) == before + 1


def test_turns_of_one_session_are_stored_as_one_run() -> None:
    """Unneeded splits are merged again; otherwise matching a long session would take time proportional to its turns."""
    gc.collect()
    before = sum(isinstance(thing, PrefixNode) for thing in gc.get_objects())
    index = PrefixIndex(2)
    for turn in range(1, 101):
        for instance in (0, 1):
            index.store(instance, tuple(range(10 * turn)))
    for instance in (0, 1):
        index.touch(instance, tuple(range(1000)))
    assert sum(isinstance(thing, PrefixNode) for thing in gc.get_objects()) <= before + 4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda index: PrefixIndex(-1), "instances: -1 instances"),
        (lambda index: PrefixIndex(2, [1]), "capacity_blocks: 1 capacities for 2 instances"),
        (lambda index: PrefixIndex(2, [1, -1]), "capacity_blocks: -1 is negative"),
        (lambda index: PrefixIndex(0, -1), "capacity_blocks: -1 is negative"),
        (lambda index: index.add_instance(-1), "capacity_blocks: -1 is negative"),
        (lambda index: index.store(3, ALICE), "instance: there is no instance 3 among 3"),
        (lambda index: index.match_one(-1, ALICE), "instance: there is no instance -1 among 3"),
        (lambda index: index.make_room(0, -1), "blocks_needed: -1 is negative"),
        (lambda index: index.set_capacity(0, -1), "blocks: -1 is negative"),
        (lambda index: index.pin(0, ALICE, -1), "depth: -1 is negative"),
        (lambda index: index.unpin(0, ALICE, -1), "depth: -1 is negative"),
        (lambda index: index.evict(0, ALICE, -1), "keep: -1 is negative"),
    ],
)
def test_invalid_calls_are_rejected_with_their_place(wrong: Callable[[PrefixIndex], object], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        wrong(PrefixIndex(3))


def test_the_published_reuse_of_a_recorded_trace() -> None:
    """Mooncake's conversation trace reuses 36.64 % of its 512-token blocks in a cache without limit."""
    if not TRACE.exists():
        if os.environ.get("KVROUTE_REQUIRE_LIVE") == "1":
            pytest.fail(f"{TRACE} is missing")
        pytest.skip(f"{TRACE} is missing")
    index, blocks, hits = PrefixIndex(1), 0, 0
    with TRACE.open("rb") as packed:
        for line in io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(packed)):
            chain = tuple(json.loads(line)["hash_ids"])
            blocks += len(chain)
            hits += index.match_one(0, chain)
            index.store(0, chain)
    assert index.used_blocks(0) == 182_790
    assert round(100 * hits / blocks, 2) == 36.64
