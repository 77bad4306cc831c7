"""Finds places that are read far more than their peers, and the prefixes to copy from them. It moves no data."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from kvroute.types import InputError

Blocks = tuple[int, ...]
"""Chained hashes of a prompt's blocks."""


class CacheLocation(NamedTuple):
    """An instance in a datacenter."""

    datacenter: str
    instance: str


@dataclass(frozen=True, slots=True)
class PlannedCopy:
    """A plan to make the prefix that ends with this chain reusable at `target` as it is at `source`."""

    source: CacheLocation
    target: CacheLocation
    blocks: Blocks
    tokens: int
    """Length of the whole chain in tokens."""
    nbytes: float
    """Bytes of the part that the target lacks."""


class CachedPrefixes(Protocol):
    """The prefixes that each place has cached."""

    @property
    def places(self) -> tuple[CacheLocation, ...]:
        """All present places, ascending."""
        ...

    @property
    def block_tokens(self) -> int:
        """Tokens of one block."""
        ...

    def plan(
        self, blocks: Blocks, block_tokens: int, source: CacheLocation, target: CacheLocation
    ) -> PlannedCopy | None:
        """Plan the copy that makes reusable at `target` what `source` has of this chain. None if the target has as much
        or a copy is in progress."""
        ...


class HotspotSpec(msgspec.Struct, frozen=True, kw_only=True):
    """When a place counts as hot. Raises InputError for a number out of range."""

    window_reads: int = 1024
    """Number of latest reads that count; a higher number reacts more slowly and needs more memory."""
    factor: float = 1.5
    """A place is hot if more tokens are read there than this multiple of the mean of its peers; above 1."""
    reads_min: int = 3
    """Minimum number of reads of a prefix at its place before it is copied. It excludes conversations, whose next turn
    reads the last one once."""

    def __post_init__(self) -> None:
        if self.window_reads < 1:
            raise InputError(f"{self.window_reads} reads", where="window_reads", hint="give 1 or more")
        if self.reads_min < 1:
            raise InputError(f"{self.reads_min} reads", where="reads_min", hint="give 1 or more")
        if not (math.isfinite(self.factor) and self.factor > 1):
            raise InputError(f"a factor of {self.factor}", where="factor", hint="give a number above 1, e.g. 1.5")


class CopySpec(msgspec.Struct, frozen=True, kw_only=True):
    """When cached prefixes are copied ahead of demand. Raises InputError for a number out of range."""

    review_s: float = 10.0
    """Time between two plans, in seconds."""
    hotspots: HotspotSpec = HotspotSpec()
    across: bool = True
    """Whether copies may also go between datacenters, while their links have spare bandwidth."""
    abundant_below: float = 0.5
    """Utilisation up to which a link between datacenters has spare bandwidth."""
    budget_s: float = 5.0
    """Maximum time that the copies in progress would need with the free bandwidth, in seconds."""

    def __post_init__(self) -> None:
        for name, seconds in (("review_s", self.review_s), ("budget_s", self.budget_s)):
            if not 0 < seconds < math.inf:
                raise InputError(f"{seconds} s", where=f"copies.{name}", hint="give finite seconds above 0")
        if not 0 <= self.abundant_below <= 1:
            what = f"a utilisation of {self.abundant_below}"
            raise InputError(what, where="copies.abundant_below", hint="give a share, 0 to 1")


@dataclass(slots=True)
class _Plan:
    """The planned copies, and the state after them."""

    loads: dict[CacheLocation, float]
    """Tokens read at every place after the planned copies."""
    budget_bytes: float
    copies: dict[tuple[CacheLocation, int], PlannedCopy] = field(default_factory=dict)
    """Planned copies by target and last block."""
    left: dict[tuple[CacheLocation, int], float] = field(default_factory=dict)
    """Tokens of a prefix that a place would still read, by its last block."""

    def add(self, copy: PlannedCopy, tokens: float) -> None:
        """Add a copy; half of these reads of the prefix then go to the target."""
        self.copies[copy.target, copy.blocks[-1]] = copy
        self.budget_bytes -= copy.nbytes
        self.left[copy.source, copy.blocks[-1]] = tokens / 2
        self.loads[copy.source] -= tokens / 2
        self.loads[copy.target] += tokens / 2


class Hotspots:
    """The latest reads of cached prefixes, and the copies that would spread them (PrfaaS 3.2, rebalancing).

    A place is an instance in a datacenter (`CacheLocation`). Its peers are the places of its datacenter. If that
    datacenter is one of the `joined` ones, which the caller reports to have abundant bandwidth between them, the places
    of all joined datacenters are its peers. The model assumes that a copy draws half of the prefix's reads to the new
    place. Reads at a place that no longer exists do not count.
    """

    def __init__(self, prefixes: CachedPrefixes, spec: HotspotSpec | None = None) -> None:
        self.spec = spec or HotspotSpec()
        self._prefixes = prefixes
        self._reads: deque[tuple[CacheLocation, Blocks, int]] = deque(maxlen=self.spec.window_reads)

    def note(self, place: CacheLocation, blocks: Blocks, tokens: int) -> None:
        """Record that a request has reused the first `tokens` tokens of this chain at `place`.

        Raises InputError for an unknown place and for tokens that are negative or more than the chain has.
        """
        size = self._prefixes.block_tokens
        if place not in self._prefixes.places:
            what = f"there is no instance {place.instance!r} in {place.datacenter!r}"
            raise InputError(what, where="place", hint="see `places`")
        if not 0 <= tokens <= len(blocks) * size:
            what = f"{tokens} tokens exceed the chain of {len(blocks) * size}"
            raise InputError(what, where="tokens", hint="give the number of reused tokens")
        if tokens >= size:
            self._reads.append((place, blocks[: tokens // size], tokens))

    def read_tokens(self) -> dict[CacheLocation, int]:
        """Tokens read at every place within the window, ascending by place."""
        loads = dict.fromkeys(self._prefixes.places, 0)
        for place, _, tokens in self._reads:
            if place in loads:
                loads[place] += tokens
        return loads

    def hot(self, joined: Collection[str] = ()) -> tuple[CacheLocation, ...]:
        """Hot places, the hottest first, then by name."""
        return self._hot(self.read_tokens(), joined)

    def rebalance(self, budget_bytes: float, joined: Collection[str] = ()) -> tuple[PlannedCopy, ...]:
        """Plan copies that relieve the hot places, within `budget_bytes`; the caller decides which of them to start.

        Copies within each datacenter come first, then copies between the joined datacenters for places that are still
        hot. Places are handled from the hottest on, and their prefixes from the most read on, until the place is no
        longer hot. Each prefix goes to the least read peer that lacks it. A prefix is skipped if no copy would balance
        the two places, or if it exceeds the remaining budget.
        """
        plan = _Plan({place: float(tokens) for place, tokens in self.read_tokens().items()}, budget_bytes)
        for scope in ((), joined) if joined else ((),):
            for source in self._hot(plan.loads, scope):
                self._cool(source, scope, plan)
        return tuple(plan.copies.values())

    def _cool(self, source: CacheLocation, scope: Collection[str], plan: _Plan) -> None:
        """Add the copies for one place."""
        for blocks, tokens in self._read_at(source):
            if plan.loads[source] <= self._limit(source, plan.loads, scope):
                break
            left = plan.left.get((source, blocks[-1]), float(tokens))
            copy = self._level(blocks, left, source, scope, plan)
            if copy is not None and copy.nbytes <= plan.budget_bytes:
                plan.add(copy, left)

    def _level(
        self, blocks: Blocks, left: float, source: CacheLocation, scope: Collection[str], plan: _Plan
    ) -> PlannedCopy | None:
        """The copy of a prefix to the least read peer that lacks it; None if the peer would then have more reads."""
        for target in sorted(_peers(source, plan.loads, scope), key=lambda place: (plan.loads[place], place)):
            if target == source or plan.loads[source] - plan.loads[target] < left:
                return None
            copy = self._prefixes.plan(blocks, self._prefixes.block_tokens, source, target)
            if copy is not None and (target, copy.blocks[-1]) not in plan.copies:
                return copy
        return None

    def _hot(self, loads: Mapping[CacheLocation, float], scope: Collection[str]) -> tuple[CacheLocation, ...]:
        hot = [place for place in loads if loads[place] > self._limit(place, loads, scope)]
        return tuple(sorted(hot, key=lambda place: (-loads[place], place)))

    def _limit(self, place: CacheLocation, loads: Mapping[CacheLocation, float], scope: Collection[str]) -> float:
        peers = _peers(place, loads, scope)
        return self.spec.factor * sum(loads[peer] for peer in peers) / len(peers)

    def _read_at(self, place: CacheLocation) -> list[tuple[Blocks, int]]:
        """Prefixes read often enough at a place, with their tokens; most tokens first, then shortest, then by hash."""
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


def _peers(place: CacheLocation, places: Collection[CacheLocation], scope: Collection[str]) -> list[CacheLocation]:
    """Places of its own datacenter, or of all in `scope` if its own is one of them; includes the place itself."""
    datacenters = scope if place.datacenter in scope else (place.datacenter,)
    return [peer for peer in places if peer.datacenter in datacenters]
