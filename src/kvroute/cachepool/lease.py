"""The blocks that one request or one copy holds in a pool, from `CachePool.begin` to `CachePool.end`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvroute.cachepool.catalogue import Blocks, Evicted
from kvroute.types import IntArray

NOTHING: IntArray = np.empty(0, np.int64)


class BlockNumbers(NamedTuple):
    """Location of a lease's cache: block numbers below the pool's capacity."""

    chain: IntArray
    """Full-attention blocks from the prompt's start; empty for a model without full attention."""
    states: dict[tuple[str, int], IntArray]
    """Blocks of the states, by group and length in tokens."""
    transfer: IntArray
    """Transfer-cache blocks."""


@dataclass(slots=True)
class HeldState:
    """A request-level state after `depth` blocks of the chain."""

    group: int
    """Number of the group, 1 and up, in the layout's order."""
    depth: int
    head: int
    """Head of its entry; -1 while there is none."""
    stored: bool
    """Whether it is populated."""


@dataclass(slots=True, eq=False)
class Lease:
    """Read only. Callers outside the pool may use the fields up to `evicted`."""

    blocks: Blocks
    cached_tokens: int
    """Tokens that need not be computed: the match at `begin`."""
    new_blocks: int
    """Number of full-attention blocks of the chain that were not cached."""
    evicted: Evicted
    """Entries evicted to make room."""
    chain: IntArray
    """Entries of the full-attention group."""
    states: list[HeldState]
    """States held, ascending by depth and group."""
    tail: IntArray
    """The transfer-cache entry; empty if there is none."""
    filled: int
    """Number of blocks of the chain that are fully populated."""
    era: int
    """Number of times that the pool had been cleared at `begin`."""

    def backwards(self) -> IntArray:
        """All entries, deepest first, and a state before the block at whose end it is: the order of eviction."""
        parts, last = [self.tail], len(self.chain)
        for state in reversed(self.states):
            if last > state.depth:
                parts.append(self.chain[state.depth : last][::-1])
                last = state.depth
            parts.append(np.array([state.head], np.int64))
        return np.concatenate([*parts, self.chain[:last][::-1]])
