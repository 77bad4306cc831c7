"""Which places are read far more than their peers, and which prefixes to copy from there; it moves nothing."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping

import msgspec

from kvroute.cachepool.catalogue import Blocks
from kvroute.cachepool.clusters import CachePools, Copy, Place
from kvroute.types import InputError


class HotspotSpec(msgspec.Struct, frozen=True, kw_only=True):
    """When a place counts as hot. Raises InputError for a number out of its range."""

    window_reads: int = 1024
    """So many of the latest reads count; more is calmer and costs memory."""
    factor: float = 1.5
    """A place is hot if more tokens are read there than this many times the mean of its peers; above 1."""

    def __post_init__(self) -> None:
        if self.window_reads < 1:
            raise InputError(f"{self.window_reads} reads", where="window_reads", mend="give 1 or more")
        if not (math.isfinite(self.factor) and self.factor > 1):
            raise InputError(f"a factor of {self.factor}", where="factor", mend="give a number above 1, e.g. 1.5")


class Hotspots:
    """The latest reads of cached prefixes, and the copies that would spread them (PrfaaS 3.2, rebalancing).

    The peers of a place are those of its cluster or, with `across`, all: the latter only while bandwidth between
    clusters is abundant, which the caller knows. A copy is taken to draw half of the prefix's reads to the new place.
    """

    def __init__(self, pools: CachePools, spec: HotspotSpec | None = None) -> None:
        self.spec = spec or HotspotSpec()
        self._pools = pools
        self._reads: deque[tuple[Place, Blocks, int]] = deque(maxlen=self.spec.window_reads)

    def note(self, place: Place, blocks: Blocks, tokens: int) -> None:
        """A request has reused the first `tokens` tokens of this chain at `place`.

        Raises InputError for an unknown place and for tokens that are negative or more than the chain has.
        """
        size = self._pools.pool(place).layout.block_tokens
        if not 0 <= tokens <= len(blocks) * size:
            what = f"{tokens} tokens of a chain of {len(blocks) * size}"
            raise InputError(what, where="tokens", mend="give what was reused")
        if tokens >= size:
            self._reads.append((place, blocks[: tokens // size], tokens))

    def read_tokens(self) -> dict[Place, int]:
        """Tokens read at every place within the window, ascending by place."""
        loads = dict.fromkeys(self._pools.places, 0)
        for place, _, tokens in self._reads:
            loads[place] += tokens
        return loads

    def hot(self, across: bool = False) -> tuple[Place, ...]:
        """Hot places, the hottest first, then by name."""
        loads = self.read_tokens()
        hot = [place for place in loads if loads[place] > self._limit(place, loads, across)]
        return tuple(sorted(hot, key=lambda place: (-loads[place], place)))

    def rebalance(self, budget_bytes: float, across: bool = False) -> tuple[Copy, ...]:
        """Copies that cool the hot places, within so many bytes; the caller starts those it likes.

        From the hottest place its most read prefixes first, each to the peer that is read least by then, until the
        place is hot no longer. A prefix is passed over if its copy would not level the two, or costs more than what
        is left of the budget.
        """
        loads: dict[Place, float] = {place: float(tokens) for place, tokens in self.read_tokens().items()}
        copies: dict[tuple[Place, int], Copy] = {}
        for source in self.hot(across):
            for blocks, tokens in self._prefixes(source):
                if loads[source] <= self._limit(source, loads, across):
                    break
                target = min(self._peers(source, across), key=lambda place: (loads[place], place))
                copy = self._level(blocks, source, target, loads[source] - loads[target] - tokens)
                if copy is None or copy.nbytes > budget_bytes or (target, copy.blocks[-1]) in copies:
                    continue
                budget_bytes -= copy.nbytes
                copies[target, copy.blocks[-1]] = copy
                loads[source] -= tokens / 2
                loads[target] += tokens / 2
        return tuple(copies.values())

    def _level(self, blocks: Blocks, source: Place, target: Place, gap_left: float) -> Copy | None:
        """The copy of a prefix, unless the target would then be read more than the source."""
        if gap_left < 0 or source == target:
            return None
        return self._pools.plan(blocks, self._pools.pool(source).layout.block_tokens, source, target)

    def _peers(self, place: Place, across: bool) -> list[Place]:
        """The place itself among them."""
        return [peer for peer in self._pools.places if across or peer.cluster == place.cluster]

    def _limit(self, place: Place, loads: Mapping[Place, float], across: bool) -> float:
        peers = self._peers(place, across)
        return self.spec.factor * sum(loads[peer] for peer in peers) / len(peers)

    def _prefixes(self, place: Place) -> list[tuple[Blocks, int]]:
        """Prefixes read at `place` with their tokens, the most read first; ties go to the shorter, then by hash."""
        chain_of: dict[int, Blocks] = {}
        tokens_of: defaultdict[int, int] = defaultdict(int)
        for where, blocks, tokens in self._reads:
            if where == place:
                chain_of[blocks[-1]] = blocks
                tokens_of[blocks[-1]] += tokens
        prefixes = [(blocks, tokens_of[last]) for last, blocks in chain_of.items()]
        return sorted(prefixes, key=lambda prefix: (-prefix[1], len(prefix[0]), prefix[0][-1]))
