"""What one request or one copy holds of a pool, from `CachePool.begin` to `CachePool.end`; behaviour is the pool's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvroute.cachepool.catalogue import Blocks, Evicted
from kvroute.types import IntArray

NOTHING: IntArray = np.empty(0, np.int64)


class BlockNumbers(NamedTuple):
    """Where a lease's cache lies: numbers of blocks below the pool's capacity."""

    chain: IntArray
    """Full-attention blocks from the prompt's start; none for a model without full attention."""
    states: dict[tuple[str, int], IntArray]
    """By group and length in tokens."""
    transfer: IntArray
    """Transfer-cache blocks."""


@dataclass(slots=True)
class HeldState:
    """A request-level state after `depth` blocks of the chain."""

    group: int
    """1 and up, in the layout's order."""
    depth: int
    head: int
    """Its entry; before there is one, -1."""
    stored: bool
    """Whether it is populated."""


@dataclass(slots=True, eq=False)
class Lease:
    """To be read only, and by callers no further than `evicted`."""

    blocks: Blocks
    cached_tokens: int
    """What need not be computed: the match at the begin."""
    new_blocks: int
    """Full-attention blocks of the chain that were not there."""
    evicted: Evicted
    """What went to make room."""
    chain: IntArray
    """Entries of the full-attention group."""
    states: list[HeldState]
    """Ascending by depth and group."""
    tail: IntArray
    """The transfer-cache entry, or nothing."""
    filled: int
    """Blocks of the chain that are fully populated."""
    era: int
    """How often the pool had been cleared."""

    def backwards(self) -> IntArray:
        """All entries, deepest first, a state before the block at whose end it stands: the order of eviction."""
        parts, last = [self.tail], len(self.chain)
        for state in reversed(self.states):
            if last > state.depth:
                parts.append(self.chain[state.depth : last][::-1])
                last = state.depth
            parts.append(np.array([state.head], np.int64))
        return np.concatenate([*parts, self.chain[:last][::-1]])
