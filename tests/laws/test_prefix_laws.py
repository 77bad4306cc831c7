"""Laws of the prefix index against a simple model, and of chained hashes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvroute.prefix import Evicted, PrefixIndex, block_hashes

Chain = tuple[int, ...]


@dataclass
class ReferenceCache:
    """One instance of the model: every prefix separately, with the time of its last touch, and the pinned chains."""

    capacity: int | None
    touched: dict[Chain, int] = field(default_factory=dict)
    pins: list[Chain] = field(default_factory=list)

    def depth(self, chain: Chain) -> int:
        return next((d for d in range(len(chain), 0, -1) if chain[:d] in self.touched), 0)

    def pinned(self, prefix: Chain) -> bool:
        return any(pin[: len(prefix)] == prefix for pin in self.pins)

    def touch(self, chain: Chain, time: int) -> int:
        depth = self.depth(chain)
        self.touched.update({chain[:d]: time for d in range(1, depth + 1)})
        return depth

    def make_room(self, needed: int, spared: Chain = ()) -> list[Chain]:
        """Evict the least recently touched prefix first, the deepest first among equals, one block after the other."""
        evicted: list[Chain] = []
        free = [p for p in self.touched if not self.pinned(p) and spared[: len(p)] != p]
        for prefix in sorted(free, key=lambda p: (self.touched[p], -len(p))):
            if self.capacity is None or len(self.touched) + needed <= self.capacity:
                break
            del self.touched[prefix]
            evicted.append(prefix)
        return evicted

    def store(self, chain: Chain, time: int) -> list[Chain]:
        depth = self.touch(chain, time)
        evicted = self.make_room(len(chain) - depth, spared=chain)
        for d in range(depth + 1, len(chain) + 1):
            if self.capacity is not None and len(self.touched) >= self.capacity:
                break
            self.touched[chain[:d]] = time
        return evicted

    def pin(self, chain: Chain, depth: int) -> int:
        depth = self.depth(chain[:depth])
        if depth:
            self.pins.append(chain[:depth])
        return depth

    def unpin(self, chain: Chain, depth: int) -> bool:
        ends = [chain[:d] for d in range(self.depth(chain[:depth]), 0, -1) if chain[:d] in self.pins]
        if ends:
            self.pins.remove(ends[0])
        return bool(ends)

    def evict(self, chain: Chain, keep: int) -> None:
        top = chain[: keep + 1]
        if len(top) > keep:
            self.touched = {p: time for p, time in self.touched.items() if p[: keep + 1] != top}
            cut = [pin[:keep] if pin[: keep + 1] == top else pin for pin in self.pins]
            self.pins = [pin for pin in cut if pin]


def blocks_lost(evicted: list[Evicted]) -> list[Chain]:
    return [e.blocks[:d] for e in evicted for d in range(len(e.blocks), e.keep, -1)]


def chained(tokens: Chain) -> Chain:
    """Return block IDs that identify their whole prefix, as hashes do: the tokens so far, read as a number in base
    4."""
    return tuple(int("1" + "".join(map(str, tokens[:d])), 4) for d in range(1, len(tokens) + 1))


TOKENS = st.lists(st.integers(0, 2), max_size=7).map(tuple) | st.lists(st.integers(0, 1), max_size=12).map(tuple)
INDICES = st.integers(0, 10**6)
DEPTH = st.integers(0, 13)


class IndexMachine(RuleBasedStateMachine):
    """The index equals the model: same depths, same counts, same evictions in the same order."""

    def chain(self, tokens: Chain) -> Chain:
        return chained(tokens)

    @initialize(instances=st.sampled_from([1, 2, 3, 20]), capacity=st.none() | st.integers(0, 16))
    def start(self, instances: int, capacity: int | None) -> None:
        self.index = PrefixIndex(instances, capacity)
        self.references = [ReferenceCache(capacity) for _ in range(instances)]
        self.uniform = capacity
        self.time = 0
        self.seen: dict[Chain, None] = {(): None}

    def pick(self, instance: int, tokens: Chain) -> tuple[int, ReferenceCache, Chain]:
        self.time += 1
        chain = self.chain(tokens)
        self.seen[chain] = None
        instance %= len(self.references)
        return instance, self.references[instance], chain

    @rule(instance=INDICES, tokens=TOKENS, pin=st.booleans())
    def store(self, instance: int, tokens: Chain, pin: bool) -> None:
        instance, reference, chain = self.pick(instance, tokens)
        before = self.index.used_blocks(instance)
        assert blocks_lost(self.index.store(instance, chain, pin)) == reference.store(chain, self.time)
        assert reference.capacity is None or self.index.used_blocks(instance) <= max(before, reference.capacity)
        if pin:
            reference.pin(chain, len(chain))

    @rule(tokens=TOKENS, step=st.integers(1, 3))
    def store_widely(self, tokens: Chain, step: int) -> None:
        for instance in range(0, len(self.references), step):
            self.store(instance, tokens, False)

    @rule(instance=INDICES, tokens=TOKENS)
    def touch(self, instance: int, tokens: Chain) -> None:
        instance, reference, chain = self.pick(instance, tokens)
        assert self.index.touch(instance, chain) == reference.touch(chain, self.time)

    @rule(instance=INDICES, tokens=TOKENS, depth=DEPTH)
    def pin(self, instance: int, tokens: Chain, depth: int) -> None:
        instance, reference, chain = self.pick(instance, tokens)
        assert self.index.pin(instance, chain, depth) == reference.pin(chain, depth)

    @rule(instance=INDICES, tokens=TOKENS, depth=DEPTH)
    def unpin(self, instance: int, tokens: Chain, depth: int) -> None:
        instance, reference, chain = self.pick(instance, tokens)
        assert self.index.unpin(instance, chain, depth) == reference.unpin(chain, depth)

    @precondition(lambda self: any(reference.pins for reference in self.references))
    @rule(which=INDICES, deeper=st.integers(0, 2))
    def release_pin(self, which: int, deeper: int) -> None:
        pins = [(instance, pin) for instance, reference in enumerate(self.references) for pin in reference.pins]
        instance, chain = pins[which % len(pins)]
        depth = len(chain) + deeper
        assert self.index.unpin(instance, chain, depth)
        assert self.references[instance].unpin(chain, depth)

    @rule(instance=INDICES, needed=st.integers(0, 8))
    def make_room(self, instance: int, needed: int) -> None:
        instance, reference, _ = self.pick(instance, ())
        assert blocks_lost(self.index.make_room(instance, needed)) == reference.make_room(needed)
        self.check_room(instance, needed)

    @rule(instance=INDICES, capacity=st.none() | st.integers(0, 20))
    def set_capacity(self, instance: int, capacity: int | None) -> None:
        instance, reference, _ = self.pick(instance, ())
        reference.capacity = capacity
        assert blocks_lost(self.index.set_capacity(instance, capacity)) == reference.make_room(0)
        self.check_room(instance, 0)

    def check_room(self, instance: int, needed: int) -> None:
        """Check that there is room, unless pins alone occupy it."""
        used, capacity = self.index.used_blocks(instance), self.references[instance].capacity
        assert capacity is None or used + needed <= capacity or used == self.index.pinned_blocks(instance)

    @rule(instance=INDICES, tokens=TOKENS, keep=DEPTH)
    def evict(self, instance: int, tokens: Chain, keep: int) -> None:
        instance, reference, chain = self.pick(instance, tokens)
        self.index.evict(instance, chain, keep)
        reference.evict(chain, keep)

    @precondition(lambda self: any(reference.touched for reference in self.references))
    @rule(which=INDICES, up=st.integers(1, 3))
    def evict_cached_block(self, which: int, up: int) -> None:
        held = [
            (instance, prefix) for instance, reference in enumerate(self.references) for prefix in reference.touched
        ]
        instance, chain = held[which % len(held)]
        keep = max(0, len(chain) - up)
        self.index.evict(instance, chain, keep)
        self.references[instance].evict(chain, keep)

    @rule(instance=INDICES)
    def clear(self, instance: int) -> None:
        instance, reference, _ = self.pick(instance, ())
        self.index.clear(instance)
        reference.touched, reference.pins = {}, []

    @precondition(lambda self: len(self.references) < 40)
    @rule()
    def add_instance(self) -> None:
        assert self.index.add_instance() == len(self.references)
        self.references.append(ReferenceCache(self.uniform))

    def teardown(self) -> None:
        """After any history, all blocks can be evicted in the right order once no pin is left, and no node remains."""
        for instance, reference in enumerate(getattr(self, "references", ())):
            for pin in reference.pins:
                assert self.index.unpin(instance, pin, len(pin))
            reference.pins, reference.capacity = [], 0
            assert blocks_lost(self.index.set_capacity(instance, 0)) == reference.make_room(0)
            assert self.index.used_blocks(instance) == self.index.pinned_blocks(instance) == 0

    @invariant()
    def counts_are_the_models(self) -> None:
        for instance, reference in enumerate(self.references):
            assert self.index.used_blocks(instance) == len(reference.touched)
            assert self.index.pinned_blocks(instance) == sum(map(reference.pinned, reference.touched))

    @invariant()
    def depths_are_the_models(self) -> None:
        for chain in list(self.seen)[-6:]:
            self.check_match(chain)

    def check_match(self, chain: Chain) -> None:
        depths = self.index.match(chain)
        assert depths.dtype == np.int64
        assert depths.tolist() == [reference.depth(chain) for reference in self.references]
        assert depths.tolist() == [self.index.match_one(instance, chain) for instance in range(len(self.references))]


class MalformedMachine(IndexMachine):
    """IDs repeat and have several parents: everything except the depth of a match equals that of chained IDs."""

    def chain(self, tokens: Chain) -> Chain:
        return tokens

    def check_match(self, chain: Chain) -> None:
        depths = self.index.match(chain).tolist()
        assert all(
            reference.depth(chain) <= d <= len(chain) for d, reference in zip(depths, self.references, strict=True)
        )
        assert depths == [self.index.match_one(instance, chain) for instance in range(len(self.references))]


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=70, stateful_step_count=40, deadline=None)
TestMalformed = MalformedMachine.TestCase
TestMalformed.settings = settings(max_examples=35, stateful_step_count=40, deadline=None)

PROMPT = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40)


@given(PROMPT, PROMPT, st.integers(1, 5), st.integers(0, 2**64 - 1))
def test_hashes_are_equal_exactly_for_the_common_blocks(a: list[int], b: list[int], size: int, seed: int) -> None:
    """Hashes are chained: a block's hash depends on all tokens up to its end and on no later one."""
    b = a[: len(b) // 2] + b[len(b) // 2 :]
    for d, (x, y) in enumerate(zip(block_hashes(a, size, seed), block_hashes(b, size, seed), strict=False), start=1):
        assert (x == y) == (a[: d * size] == b[: d * size])


@given(PROMPT, PROMPT, st.integers(1, 5))
def test_a_longer_prompt_only_adds_hashes(a: list[int], more: list[int], size: int) -> None:
    """Only full blocks are hashed, and the hashes of the first blocks stay the same."""
    short, long = block_hashes(a, size), block_hashes(a + more, size)
    assert len(short) == len(a) // size
    assert long[: len(short)] == short
    assert all(0 <= h < 2**64 for h in long)


@given(PROMPT)
def test_lists_and_arrays_have_equal_hashes(tokens: list[int]) -> None:
    """The hashes depend on the tokens, not on the container."""
    assert block_hashes(tokens, 2) == block_hashes(np.array(tokens, np.int64), 2) == block_hashes(tuple(tokens), 2)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=12), st.integers(1, 20))
def test_an_index_is_reproduced_from_its_reported_chains(chains: list[list[int]], capacity: int) -> None:
    """The other index has the same content and evicts it in the same order."""

    def held(index: PrefixIndex) -> set[tuple[int, ...]]:
        return {chain[:depth] for chain in index.chains(0) for depth in range(1, len(chain) + 1)}

    first, second = PrefixIndex(1, capacity), PrefixIndex(1)
    for numbers in chains:
        # Chained: a hash identifies everything before it.
        first.store(0, tuple(hash(tuple(numbers[: end + 1])) for end in range(len(numbers))))
    for chain in first.chains(0):
        assert second.store(0, chain) == []
    assert second.used_blocks(0) == first.used_blocks(0) == len(held(first))
    for room in range(first.used_blocks(0), -1, -1):
        first.set_capacity(0, room)
        second.set_capacity(0, room)
        assert held(second) == held(first)
        assert len(held(first)) == room
