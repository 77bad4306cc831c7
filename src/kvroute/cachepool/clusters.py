"""The pools of all places together: what each cluster can reuse of a request, and copies of prefixes between places.

It moves no bytes: a copy is first a plan, then blocks held at both ends until the caller reports its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvroute.cachepool.catalogue import Blocks
from kvroute.cachepool.lease import Lease
from kvroute.cachepool.pool import CachePool
from kvroute.types import InputError


class Place(NamedTuple):
    """An instance in a cluster; a cluster is a datacenter."""

    cluster: str
    instance: str


class ClusterMatch(NamedTuple):
    """What one cluster can reuse of a request."""

    cluster: str
    tokens: int
    """Tokens that its best instance can reuse: PrfaaS l_prfaas or l_pd."""
    instance: str
    """The instance with the longest reusable prefix, the first by name on a tie; empty if nothing can be reused."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A plan to make the prefix that ends with this chain reusable at `target` as it is at `source`."""

    source: Place
    target: Place
    blocks: Blocks
    tokens: int
    """Length of the whole chain in tokens."""
    nbytes: float
    """Bytes of the part that the target lacks."""


@dataclass(slots=True, eq=False)
class CopyInFlight:
    """A copy whose blocks are held at both ends until `CachePools.finish`."""

    copy: Copy
    source: Lease
    target: Lease


class CachePools:
    """One pool for every place, all with the same layout (PrfaaS 3.2, the global KV cache manager)."""

    def __init__(self, pools: Mapping[Place, CachePool]) -> None:
        """Raises InputError if the pools have different layouts: copies between those are not possible."""
        self._pools = dict(sorted(pools.items()))
        self._in_flight: dict[tuple[Place, int], CopyInFlight] = {}
        """By target and last block."""
        layouts = {place: pool.layout for place, pool in self._pools.items()}
        for place, layout in layouts.items():
            if layout != next(iter(layouts.values())):
                what = f"{place.instance} in {place.cluster} has a different layout than the first pool"
                raise InputError(what, where="pools", hint="give every model its own pools")

    @property
    def places(self) -> tuple[Place, ...]:
        """All places, ascending."""
        return tuple(self._pools)

    @property
    def block_tokens(self) -> int:
        """Tokens of one block in every pool; 0 if there are no pools."""
        return next((pool.layout.block_tokens for pool in self._pools.values()), 0)

    @property
    def in_flight(self) -> tuple[Copy, ...]:
        """Copies that have started and not finished, in that order."""
        return tuple(entry.copy for entry in self._in_flight.values())

    def pool(self, place: Place) -> CachePool:
        """The pool of a place. Raises InputError for an unknown place."""
        pool = self._pools.get(place)
        if pool is None:
            raise InputError(
                f"there is no pool {place.instance!r} in {place.cluster!r}", where="place", hint="see `places`"
            )
        return pool

    def match_each(self, blocks: Blocks, block_tokens: int, most_tokens: int | None = None) -> dict[Place, int]:
        """Tokens that each place can reuse, ascending by place; see `CachePool.match_tokens`."""
        return {place: pool.match_tokens(blocks, block_tokens, most_tokens) for place, pool in self._pools.items()}

    def match(self, blocks: Blocks, block_tokens: int, most_tokens: int | None = None) -> tuple[ClusterMatch, ...]:
        """What each cluster can reuse, ascending by cluster; see `CachePool.match_tokens`."""
        best: dict[str, ClusterMatch] = {}
        for place, tokens in self.match_each(blocks, block_tokens, most_tokens).items():
            known = best.setdefault(place.cluster, ClusterMatch(place.cluster, 0, ""))
            if tokens > known.tokens:
                best[place.cluster] = ClusterMatch(place.cluster, tokens, place.instance)
        return tuple(best.values())

    def plan(
        self, blocks: Blocks, block_tokens: int, source: Place, target: Place, most_tokens: int | None = None
    ) -> Copy | None:
        """Plan the copy that makes reusable at `target` what `source` has of this chain. None if the target has as much
        or a copy is in progress. Changes nothing. Raises InputError like `pool` and `match_tokens`."""
        tokens = self.pool(source).match_tokens(blocks, block_tokens, most_tokens)
        chain, pool = blocks[: tokens // block_tokens], self.pool(target)
        if tokens <= pool.match_tokens(blocks, block_tokens, most_tokens) or (target, chain[-1]) in self._in_flight:
            return None
        return Copy(source, target, chain, tokens, pool.missing_bytes(chain))

    def start(self, copy: Copy) -> CopyInFlight | None:
        """Hold the blocks of a copy at both ends. None, without a change, if the plan is outdated (the source has lost
        the blocks, or the target has them) or the target has no room. `copy` of the result has the present bytes."""
        fresh = self.plan(copy.blocks, self.pool(copy.source).layout.block_tokens, copy.source, copy.target)
        if fresh is None or fresh.tokens != copy.tokens:
            return None
        target = self.pool(copy.target).begin(fresh.blocks)
        if target is None:
            return None
        source = self.pool(copy.source).begin(fresh.blocks)
        assert source is not None, "what can be reused needs no new blocks"
        entry = self._in_flight[copy.target, fresh.blocks[-1]] = CopyInFlight(fresh, source, target)
        return entry

    def finish(self, entry: CopyInFlight, landed: bool) -> None:
        """End a copy. If it is complete (`landed`), the prefix can be reused at the target; otherwise its blocks there
        are freed. Raises InputError for a copy that is not in progress."""
        copy = entry.copy
        key = (copy.target, copy.blocks[-1])
        if self._in_flight.get(key) is not entry:
            raise InputError("the copy has finished already", where="copy", hint="finish every copy only once")
        del self._in_flight[key]
        target = self.pool(copy.target)
        if landed:
            target.fill(entry.target, copy.tokens)
        target.end(entry.target)
        self.pool(copy.source).end(entry.source)
