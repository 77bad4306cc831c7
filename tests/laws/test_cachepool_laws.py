"""Laws of the cache pool against a simple model, and of copies between pools."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvroute.cachepool import CachePool, CachePools, Hotspots, HotspotSpec, Layout, Lease, Place
from kvroute.llm import MODELS, Layers, Model

Chain = tuple[int, ...]
Key = tuple[str, Chain]
SIZE = 2
"""Tokens per block."""

FULL_LAYERS = Layers("attention", 2, 1, 3, 3)
"""24 bytes per token, therefore 48 per block."""
LINEAR = Layers("linear", 1, state_bytes=100.0)
"""Three blocks."""
WINDOW = Layers("sliding", 1, 1, 6, 6, window_tokens=5)
"""24 bytes per token up to the fifth: one block, two from three tokens on, three from five on."""
MODELS_BY_NAME = {
    "dense": Model("dense", (FULL_LAYERS,)),
    "linear": Model("linear", (FULL_LAYERS, LINEAR)),
    "both": Model("both", (FULL_LAYERS, LINEAR, WINDOW)),
    "windows": Model("windows", (WINDOW,)),
}
WINDOW_BLOCK_BYTES = 120.0
"""Block size of the model that has only windows: one block holds its largest state."""


def state_blocks(name: str, layers: tuple[Layers, ...], tokens: int) -> int:
    block_bytes = 48.0 if FULL_LAYERS in layers else WINDOW_BLOCK_BYTES
    nbytes = 100.0 if name == "linear" else 24.0 * min(tokens, 5)
    return int(-(-nbytes // block_bytes))


@dataclass(eq=False)
class Hold:
    """A lease of the model: its entries of every group and length, stored or not yet."""

    chain: Chain
    stored: list[Key]
    blank: list[Key]
    tail_blocks: int
    reused: int
    era: int


@dataclass
class ReferenceCache:
    """The model: stored entries with their sizes, the idle ones in order, and leases as plain lists."""

    layers: tuple[Layers, ...]
    capacity: int
    stored: dict[Key, int] = field(default_factory=dict)
    idle: list[Key] = field(default_factory=list)
    holds: list[Hold] = field(default_factory=list)
    outdated: list[Hold] = field(default_factory=list)
    """Leases from before a clear: their entries use memory but cannot be reused."""
    era: int = 0

    @property
    def states(self) -> list[str]:
        return [{"linear": "linear", "sliding": "sliding-5"}[la.kind] for la in self.layers if la.kind != "attention"]

    @property
    def full(self) -> bool:
        return FULL_LAYERS in self.layers

    def blocks_of(self, key: Key) -> int:
        group, prefix = key
        return 1 if group == "full" else state_blocks(group, self.layers, len(prefix) * SIZE)

    def has(self, chain: Chain, depth: int) -> bool:
        return not self.full or all(("full", chain[:d]) in self.stored for d in range(1, depth + 1))

    def depth(self, chain: Chain) -> int:
        return max(d for d in range(len(chain) + 1) if self.has(chain, d))

    def reusable(self, chain: Chain, most: int | None) -> int:
        most = len(chain) if most is None else min(most // SIZE, len(chain))
        fits = [d for d in range(1, most + 1) if all((group, chain[:d]) in self.stored for group in self.states)]
        return max((d for d in fits if self.has(chain, d)), default=0)

    def free(self) -> int:
        blanks = [self.blocks_of(key) for hold in self.holds for key in hold.blank]
        outdated = [
            self.blocks_of(key) for _, key in {(hold.era, key) for hold in self.outdated for key in hold.stored}
        ]
        outdated += [self.blocks_of(key) for hold in self.outdated for key in hold.blank]
        tails = [hold.tail_blocks for hold in self.holds + self.outdated]
        return self.capacity - sum(self.stored.values()) - sum(blanks) - sum(outdated) - sum(tails)

    def begin(self, chain: Chain, tokens: int | None, depths: list[int], most: int | None) -> list[Key] | None:
        """Return the evicted keys, or None if the request does not fit."""
        depth, reused = self.depth(chain), self.reusable(chain, most)
        keys = [("full", chain[:d]) for d in range(1, len(chain) + 1)] if self.full else []
        keys += [(group, chain[:reused]) for group in self.states if reused]
        keys += [(group, chain[:d]) for d in depths if d > reused for group in self.states]
        present = [key for key in keys if key in self.stored]
        blank = [key for key in keys if key not in self.stored]
        assert not self.full or sum(key[0] == "full" for key in present) == depth, "closed under prefixes"
        tail_blocks = 0
        if tokens is not None:
            beyond = max(tokens - len(chain) * SIZE, 0)
            tail_blocks = (-(-beyond // SIZE) if self.full else 0) + sum(
                state_blocks(group, self.layers, tokens) for group in self.states
            )
        needed = sum(map(self.blocks_of, blank)) + tail_blocks
        idle = [key for key in self.idle if key not in present]
        if needed > self.free() + sum(map(self.blocks_of, idle)):
            return None
        self.idle = idle
        evicted: list[Key] = []
        while self.free() < needed:
            evicted.append(self.idle.pop(0))
            del self.stored[evicted[-1]]
        self.holds.append(Hold(chain, present, blank, tail_blocks, reused, self.era))
        return evicted

    def fill(self, hold: Hold, depth: int) -> None:
        if hold in self.outdated:
            return
        for key in [key for key in hold.blank if len(key[1]) <= depth]:
            hold.blank.remove(key)
            self.stored[key] = self.blocks_of(key)
            hold.stored.append(key)
            if key in self.idle:
                self.idle.remove(key)

    def end(self, hold: Hold) -> None:
        if hold in self.outdated:
            self.outdated.remove(hold)
            return
        self.holds.remove(hold)
        names = ["full", *self.states]
        for key in sorted(hold.stored, key=lambda key: (-len(key[1]), -names.index(key[0]))):
            if not any(key in other.stored for other in self.holds):
                self.idle.append(key)

    def clear(self) -> None:
        self.stored, self.idle = {}, []
        self.outdated += self.holds
        self.holds = []
        self.era += 1


def chained(tokens: Chain) -> Chain:
    """Return block IDs that identify their whole prefix, as hashes do: the tokens so far, read as a number in base
    4."""
    return tuple(int("1" + "".join(map(str, tokens[:d])), 4) for d in range(1, len(tokens) + 1))


CHAINS = st.lists(st.integers(0, 1), max_size=7).map(tuple).map(chained)
INDICES = st.integers(0, 10**6)
MOST = st.none() | st.integers(0, 14)


class PoolMachine(RuleBasedStateMachine):
    """The pool equals the model: same matches, same counts, same evictions in the same order."""

    @initialize(model=st.sampled_from(sorted(MODELS_BY_NAME)), capacity=st.integers(0, 40))
    def start(self, model: str, capacity: int) -> None:
        layout = Layout.of(MODELS_BY_NAME[model], SIZE)
        self.pool = CachePool(layout, capacity)
        self.reference = ReferenceCache(MODELS_BY_NAME[model].layers, capacity)
        self.pairs: list[tuple[Lease, Hold]] = []
        self.seen: dict[Chain, None] = {(): None}

    @rule(
        chain=CHAINS,
        beyond=st.none() | st.integers(-1, 3),
        depths=st.none() | st.lists(st.integers(0, 7), max_size=3, unique=True),
        most=MOST,
    )
    def begin(self, chain: Chain, beyond: int | None, depths: list[int] | None, most: int | None) -> None:
        self.seen[chain] = None
        tokens = None if beyond is None else max(len(chain) * SIZE + beyond, 0)
        inside = [len(chain)] if depths is None else [d for d in depths if d <= len(chain)]
        before = self.pool.free_blocks, self.pool.idle_blocks
        expected = self.reference.begin(chain, tokens, inside, most)
        states_at = None if depths is None else [d * SIZE for d in inside]
        lease = self.pool.begin(chain, tokens=tokens, states_at=states_at, most_tokens=most)
        if expected is None:
            assert lease is None
            assert (self.pool.free_blocks, self.pool.idle_blocks) == before
            return
        assert lease is not None
        assert list(lease.evicted.blocks) == [prefix[-1] for group, prefix in expected if group == "full"]
        assert list(lease.evicted.states) == [(group, prefix[-1]) for group, prefix in expected if group != "full"]
        hold = self.reference.holds[-1]
        assert lease.cached_tokens == hold.reused * SIZE
        self.pairs.append((lease, hold))

    @precondition(lambda self: self.pairs)
    @rule(index=INDICES, tokens=st.integers(0, 14))
    def fill(self, index: int, tokens: int) -> None:
        lease, hold = self.pairs[index % len(self.pairs)]
        tokens = min(tokens, len(hold.chain) * SIZE)
        self.pool.fill(lease, tokens)
        self.reference.fill(hold, tokens // SIZE)

    @precondition(lambda self: self.pairs)
    @rule(index=INDICES)
    def sent(self, index: int) -> None:
        lease, hold = self.pairs[index % len(self.pairs)]
        self.pool.sent(lease)
        hold.tail_blocks = 0

    @precondition(lambda self: self.pairs)
    @rule(index=INDICES, filled=st.booleans())
    def end(self, index: int, filled: bool) -> None:
        lease, hold = self.pairs.pop(index % len(self.pairs))
        if filled:
            self.pool.fill(lease, len(hold.chain) * SIZE)
            self.reference.fill(hold, len(hold.chain))
        self.pool.end(lease)
        self.reference.end(hold)

    @precondition(lambda self: not self.pairs or len(self.seen) > 12)
    @rule()
    def clear(self) -> None:
        self.pool.clear()
        self.reference.clear()

    def teardown(self) -> None:
        """After any history all memory is returned, each block exactly once."""
        if not hasattr(self, "pool"):
            return
        for lease, hold in self.pairs:
            self.pool.end(lease)
            self.reference.end(hold)
        assert self.pool.leases == 0
        assert self.pool.free_blocks + self.pool.idle_blocks == self.pool.capacity_blocks
        self.pool.clear()
        assert self.pool.free_blocks == self.pool.capacity_blocks

    @invariant()
    def counts_are_the_models(self) -> None:
        assert self.pool.free_blocks == self.reference.free() >= 0
        assert self.pool.idle_blocks == sum(self.reference.blocks_of(key) for key in self.reference.idle)
        assert self.pool.leases == len(self.pairs)

    @invariant()
    def matches_are_the_models(self) -> None:
        for chain in list(self.seen)[-6:]:
            for most in (None, max(len(chain) * SIZE - 1, 0)):
                assert self.pool.match_tokens(chain, SIZE, most) == self.reference.reusable(chain, most) * SIZE

    @invariant()
    def blocks_have_one_use(self) -> None:
        """Leases share only blocks of the same cached content, and their blocks are never free or idle."""
        used: dict[int, object] = {}
        for lease, _ in self.pairs:
            numbers = self.pool.numbers(lease)
            uses: list[tuple[int, object]] = [
                (number, ("full", block)) for number, block in zip(numbers.chain.tolist(), lease.blocks, strict=False)
            ]
            for (group, tokens), members in numbers.states.items():
                block = lease.blocks[tokens // SIZE - 1]
                uses += [(number, (group, block, part)) for part, number in enumerate(members.tolist())]
            uses += [(number, ("transfer", id(lease))) for number in numbers.transfer.tolist()]
            assert len({number for number, _ in uses}) == len(uses)
            for number, use in uses:
                assert used.setdefault(number, use) == use
        assert all(0 <= number < self.pool.capacity_blocks for number in used)
        assert len(used) == self.pool.capacity_blocks - self.pool.free_blocks - self.pool.idle_blocks

    @invariant()
    def stored_is_closed_under_prefixes(self) -> None:
        for group, prefix in self.reference.stored if self.reference.full else ():
            assert ("full", prefix if group != "full" or len(prefix) < 2 else prefix[:-1]) in self.reference.stored


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=6).map(tuple), st.booleans()), max_size=12))
def test_malformed_chains_leak_nothing(chains: list[tuple[Chain, bool]]) -> None:
    """Hashes that repeat or have several parents may match too deep, but the memory counts stay correct."""
    pool = CachePool(Layout.of(MODELS_BY_NAME["both"], SIZE), 30)
    leases = []
    for chain, stays in chains:
        lease = pool.begin(chain, tokens=len(chain) * SIZE + 1)
        if lease is not None:
            pool.fill(lease, len(chain) * SIZE)
            leases.append(lease)
            if not stays:
                pool.end(leases.pop(0))
    for lease in leases:
        pool.end(lease)
    assert pool.free_blocks + pool.idle_blocks == 30
    pool.clear()
    assert pool.free_blocks == 30


@given(st.sampled_from(sorted(MODELS)), st.integers(1, 64), st.integers(1, 200))
def test_missing_bytes_follow_the_model_geometry(name: str, block_tokens: int, blocks: int) -> None:
    """For an empty pool, the missing bytes are those of the model's KV cache of that length; for a pool that has the
    prefix, none."""
    model, chain = MODELS[name], tuple(range(blocks))
    layout = Layout.of(model, block_tokens)
    pool = CachePool(layout, 2 * blocks + sum(layout.state_blocks(k, 10**6) for k in range(len(layout.states))))
    nbytes = model.kv_bytes(blocks * block_tokens)
    assert abs(pool.missing_bytes(chain) - nbytes) <= 1e-12 * nbytes
    lease = pool.begin(chain)
    assert lease is not None
    assert (pool.capacity_blocks - pool.free_blocks) * layout.block_bytes >= nbytes * (1 - 1e-12)
    pool.fill(lease, blocks * block_tokens)
    assert pool.missing_bytes(chain) == 0


CLUSTERS = (Place("east", "e0"), Place("east", "e1"), Place("west", "w0"), Place("west", "w1"))
STORES = st.lists(st.tuples(st.sampled_from(CLUSTERS), CHAINS), max_size=10)


def filled_pools(model: str, stores: list[tuple[Place, Chain]], capacity: int) -> CachePools:
    layout = Layout.of(MODELS_BY_NAME[model], SIZE)
    pools = CachePools({place: CachePool(layout, capacity) for place in reversed(CLUSTERS)})
    for place, chain in stores:
        lease = pools.pool(place).begin(chain)
        if lease is not None:
            pools.pool(place).fill(lease, len(chain) * SIZE)
            pools.pool(place).end(lease)
    return pools


@given(st.sampled_from(sorted(MODELS_BY_NAME)), STORES, CHAINS, MOST)
def test_a_cluster_matches_like_its_best_instance(
    model: str, stores: list[tuple[Place, Chain]], chain: Chain, most: int | None
) -> None:
    pools = filled_pools(model, stores, 30)
    each = pools.match_each(chain, SIZE, most)
    assert list(each) == sorted(CLUSTERS)
    for cluster, tokens, instance in pools.match(chain, SIZE, most):
        own = {place.instance: each[place] for place in CLUSTERS if place.cluster == cluster}
        assert tokens == max(own.values())
        assert instance == (min(name for name in own if own[name] == tokens) if tokens else "")


@given(st.sampled_from(sorted(MODELS_BY_NAME)), STORES, CHAINS, st.integers(1, 40), st.booleans())
def test_a_copy_is_complete_or_has_no_effect(
    model: str, stores: list[tuple[Place, Chain]], chain: Chain, capacity: int, landed: bool
) -> None:
    """Afterwards the target matches as far as the source, or as before; no lease remains, and the memory counts are
    consistent."""
    pools = filled_pools(model, stores, capacity)
    for source in CLUSTERS:
        for target in CLUSTERS:
            before = pools.match_each(chain, SIZE)
            copy = pools.plan(chain, SIZE, source, target)
            assert (copy is None) == (before[source] <= before[target])
            if copy is None:
                continue
            assert 0 < copy.nbytes <= MODELS_BY_NAME[model].kv_bytes(copy.tokens)
            entry = pools.start(copy)
            if entry is None:
                assert pools.match_each(chain, SIZE) == before
                continue
            assert pools.match_each(chain, SIZE)[target] <= before[target]
            assert pools.start(copy) is None, "the copy is in progress"
            pools.finish(entry, landed)
            after = pools.match_each(chain, SIZE)
            assert after[target] == before[source] if landed else after[target] <= before[target]
            assert after[source] == before[source]
            assert pools.in_flight == ()
            for place in (source, target):
                pool = pools.pool(place)
                assert pool.free_blocks + pool.idle_blocks == pool.capacity_blocks


READS = st.lists(st.tuples(st.sampled_from(CLUSTERS), CHAINS, st.integers(1, 5)), max_size=12)


SCOPES = st.sampled_from([(), ("west",), ("east", "west")])


@given(READS, st.sampled_from([0.0, 300.0, 1e6]), SCOPES, st.sampled_from([1.1, 1.25, 1.5]), st.integers(1, 3))
def test_rebalancing_levels_load_within_its_budget(
    reads: list[tuple[Place, Chain, int]], budget_bytes: float, joined: tuple[str, ...], factor: float, reads_min: int
) -> None:
    """For each copy, the source is hot at that point, the target is its least loaded peer and is afterwards not hotter
    than the source."""
    pools = filled_pools("linear", [(place, chain) for place, chain, _ in reads], 200)
    spots = Hotspots(pools, HotspotSpec(factor=factor, reads_min=reads_min))
    for place, chain, times in reads:
        for _ in range(times):
            spots.note(place, chain, len(chain) * SIZE)
    loads, hot = spots.read_tokens(), spots.hot(joined)
    for place in CLUSTERS:
        peers = [loads[peer] for peer in CLUSTERS if peer.cluster == place.cluster or len(joined) == 2]
        assert (place in hot) == (loads[place] > factor * sum(peers) / len(peers))
    copies = spots.rebalance(budget_bytes, joined)
    assert copies == spots.rebalance(budget_bytes, joined)
    assert sum(copy.nbytes for copy in copies) <= budget_bytes + 1e-9
    assert all(first != second for first, second in combinations(copies, 2))
    running = {place: float(tokens) for place, tokens in loads.items()}
    for copy in copies:
        near = [peer for peer in CLUSTERS if peer.cluster == copy.source.cluster]
        rivals = near if copy.target in near else list(CLUSTERS)
        assert rivals is near or len(joined) == 2
        assert running[copy.source] > factor * sum(running[peer] for peer in rivals) / len(rivals)
        lacking = [peer for peer in rivals if pools.plan(copy.blocks, SIZE, copy.source, peer)]
        assert (running[copy.target], copy.target) == min((running[peer], peer) for peer in lacking)
        before = [one for one in copies[: copies.index(copy)] if (one.source, one.blocks) == (copy.source, copy.blocks)]
        times_read = sum(times for place, chain, times in reads if (place, chain) == (copy.source, copy.blocks))
        assert times_read >= reads_min
        moved = times_read * copy.tokens / 2 ** (len(before) + 1)
        running[copy.source] -= moved
        running[copy.target] += moved
        assert running[copy.target] <= running[copy.source]
        entry = pools.start(copy)
        assert entry is not None
        pools.finish(entry, landed=True)
        assert pools.match_each(copy.blocks, SIZE)[copy.target] == copy.tokens
