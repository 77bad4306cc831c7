"""Which places are read far more than their peers, and which prefixes to copy from there; it moves nothing."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from kvroute.cachepool.catalogue import Blocks
from kvroute.cachepool.clusters import Copy, Place
from kvroute.types import InputError


class CachedPrefixes(Protocol):
    """Who has which prefix: the pools themselves (`CachePools`), or what a router has been told."""

    @property
    def places(self) -> tuple[Place, ...]:
        """All places that are there now, ascending."""
        ...

    @property
    def block_tokens(self) -> int:
        """Tokens of one block."""
        ...

    def plan(self, blocks: Blocks, block_tokens: int, source: Place, target: Place) -> Copy | None:
        """As `CachePools.plan`."""
        ...


class HotspotSpec(msgspec.Struct, frozen=True, kw_only=True):
    """When a place counts as hot. Raises InputError for a number out of its range."""

    window_reads: int = 1024
    """So many of the latest reads count; more is calmer and costs memory."""
    factor: float = 1.5
    """A place is hot if more tokens are read there than this many times the mean of its peers; above 1."""
    reads_min: int = 3
    """Only what has been read so often at its place is copied: a conversation's next turn reads its last one once."""

    def __post_init__(self) -> None:
        if self.window_reads < 1:
            raise InputError(f"{self.window_reads} reads", where="window_reads", mend="give 1 or more")
        if self.reads_min < 1:
            raise InputError(f"{self.reads_min} reads", where="reads_min", mend="give 1 or more")
        if not (math.isfinite(self.factor) and self.factor > 1):
            raise InputError(f"a factor of {self.factor}", where="factor", mend="give a number above 1, e.g. 1.5")


class CopySpec(msgspec.Struct, frozen=True, kw_only=True):
    """When cached prefixes are copied ahead of demand. Raises InputError for a number out of its range."""

    review_s: float = 10.0
    """Time between two plans."""
    hotspots: HotspotSpec = HotspotSpec()
    across: bool = True
    """Between datacenters too, while their links have bandwidth to spare."""
    abundant_below: float = 0.5
    """Utilisation of a link between datacenters up to which it has."""
    budget_s: float = 5.0
    """Copies under way need so many seconds of the free bandwidth at most, were they alone on it."""

    def __post_init__(self) -> None:
        for name, seconds in (("review_s", self.review_s), ("budget_s", self.budget_s)):
            if not 0 < seconds < math.inf:
                raise InputError(f"{seconds} s", where=f"copies.{name}", mend="give finite seconds above 0")
        if not 0 <= self.abundant_below <= 1:
            what = f"a utilisation of {self.abundant_below}"
            raise InputError(what, where="copies.abundant_below", mend="give a share, 0 to 1")


@dataclass(slots=True)
class _Plan:
    """Copies so far, and what they leave."""

    loads: dict[Place, float]
    """Tokens read at every place, as they would be."""
    budget_bytes: float
    copies: dict[tuple[Place, int], Copy] = field(default_factory=dict)
    """By target and last block."""
    left: dict[tuple[Place, int], float] = field(default_factory=dict)
    """Tokens of a prefix that a place would still read, by its last block."""

    def add(self, copy: Copy, tokens: float) -> None:
        """Half of these reads of the prefix go to the target from now on."""
        self.copies[copy.target, copy.blocks[-1]] = copy
        self.budget_bytes -= copy.nbytes
        self.left[copy.source, copy.blocks[-1]] = tokens / 2
        self.loads[copy.source] -= tokens / 2
        self.loads[copy.target] += tokens / 2


class Hotspots:
    """The latest reads of cached prefixes, and the copies that would spread them (PrfaaS 3.2, rebalancing).

    The peers of a place are those of its cluster and, if that is among the clusters that are `joined`, those of all
    others that are: clusters with abundant bandwidth between them, which the caller knows. A copy is taken to draw half
    of the prefix's reads to the new place. Reads at a place that is gone do not count.
    """

    def __init__(self, prefixes: CachedPrefixes, spec: HotspotSpec | None = None) -> None:
        self.spec = spec or HotspotSpec()
        self._prefixes = prefixes
        self._reads: deque[tuple[Place, Blocks, int]] = deque(maxlen=self.spec.window_reads)

    def note(self, place: Place, blocks: Blocks, tokens: int) -> None:
        """A request has reused the first `tokens` tokens of this chain at `place`.

        Raises InputError for an unknown place and for tokens that are negative or more than the chain has.
        """
        size = self._prefixes.block_tokens
        if place not in self._prefixes.places:
            what = f"no place {place.instance!r} in {place.cluster!r}"
            raise InputError(what, where="place", mend="see `places`")
        if not 0 <= tokens <= len(blocks) * size:
            what = f"{tokens} tokens of a chain of {len(blocks) * size}"
            raise InputError(what, where="tokens", mend="give what was reused")
        if tokens >= size:
            self._reads.append((place, blocks[: tokens // size], tokens))

    def read_tokens(self) -> dict[Place, int]:
        """Tokens read at every place within the window, ascending by place."""
        loads = dict.fromkeys(self._prefixes.places, 0)
        for place, _, tokens in self._reads:
            if place in loads:
                loads[place] += tokens
        return loads

    def hot(self, joined: Collection[str] = ()) -> tuple[Place, ...]:
        """Hot places, the hottest first, then by name."""
        return self._hot(self.read_tokens(), joined)

    def rebalance(self, budget_bytes: float, joined: Collection[str] = ()) -> tuple[Copy, ...]:
        """Copies that cool the hot places, within so many bytes; the caller starts those it likes.

        Within each cluster first, then, for what is hot among the joined ones even so, between these. From the hottest
        place its most read prefixes first, each to the peer that lacks it and is read least by then, until the place is
        hot no longer. A prefix is passed over if no copy would level the two, or it costs more than what is left of the
        budget.
        """
        plan = _Plan({place: float(tokens) for place, tokens in self.read_tokens().items()}, budget_bytes)
        for scope in ((), joined) if joined else ((),):
            for source in self._hot(plan.loads, scope):
                self._cool(source, scope, plan)
        return tuple(plan.copies.values())

    def _cool(self, source: Place, scope: Collection[str], plan: _Plan) -> None:
        """Add the copies for one place."""
        for blocks, tokens in self._read_at(source):
            if plan.loads[source] <= self._limit(source, plan.loads, scope):
                break
            left = plan.left.get((source, blocks[-1]), float(tokens))
            copy = self._level(blocks, left, source, scope, plan)
            if copy is not None and copy.nbytes <= plan.budget_bytes:
                plan.add(copy, left)

    def _level(self, blocks: Blocks, left: float, source: Place, scope: Collection[str], plan: _Plan) -> Copy | None:
        """The copy of a prefix to the coolest peer that lacks it, unless that were then read more than the source."""
        for target in sorted(_peers(source, plan.loads, scope), key=lambda place: (plan.loads[place], place)):
            if target == source or plan.loads[source] - plan.loads[target] < left:
                return None
            copy = self._prefixes.plan(blocks, self._prefixes.block_tokens, source, target)
            if copy is not None and (target, copy.blocks[-1]) not in plan.copies:
                return copy
        return None

    def _hot(self, loads: Mapping[Place, float], scope: Collection[str]) -> tuple[Place, ...]:
        hot = [place for place in loads if loads[place] > self._limit(place, loads, scope)]
        return tuple(sorted(hot, key=lambda place: (-loads[place], place)))

    def _limit(self, place: Place, loads: Mapping[Place, float], scope: Collection[str]) -> float:
        peers = _peers(place, loads, scope)
        return self.spec.factor * sum(loads[peer] for peer in peers) / len(peers)

    def _read_at(self, place: Place) -> list[tuple[Blocks, int]]:
        """Prefixes read often enough at a place, and tokens; the most read first, then the shorter, then by hash."""
        chain_of: dict[int, Blocks] = {}
        tokens_of: defaultdict[int, int] = defaultdict(int)
        times: defaultdict[int, int] = defaultdict(int)
        for where, blocks, tokens in self._reads:
            if where == place:
                chain_of[blocks[-1]] = blocks
                tokens_of[blocks[-1]] += tokens
                times[blocks[-1]] += 1
        prefixes = [
            (blocks, tokens_of[last]) for last, blocks in chain_of.items() if times[last] >= self.spec.reads_min
        ]
        return sorted(prefixes, key=lambda prefix: (-prefix[1], len(prefix[0]), prefix[0][-1]))


def _peers(place: Place, places: Collection[Place], scope: Collection[str]) -> list[Place]:
    """Places of its own cluster, or of all in the scope where that is among them; the place itself too."""
    clusters = scope if place.cluster in scope else (place.cluster,)
    return [peer for peer in places if peer.cluster in clusters]
