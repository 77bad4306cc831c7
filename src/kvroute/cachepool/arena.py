"""Equal blocks of memory: which are free, which are held, which of the rest goes first; knows nothing of prefixes."""

from __future__ import annotations

import numpy as np

from kvroute.cachepool import kernels
from kvroute.types import InputError, IntArray


class Arena:
    """`capacity_blocks` blocks, given out as entries of one or more blocks with a count of holders.

    An entry that is marked as stored stays when its last holder leaves, until its blocks are needed: least recently
    released first, a total order. An entry that is not stored is free at that moment. Heads (block numbers) name
    entries; a caller keeps them right, for nothing is checked here.
    """

    __slots__ = ("_counts", "_table", "capacity_blocks")

    def __init__(self, capacity_blocks: int) -> None:
        if capacity_blocks < 0:
            raise InputError(f"{capacity_blocks} blocks", where="capacity_blocks", mend="give 0 or more")
        self.capacity_blocks = capacity_blocks
        self._table: IntArray = np.zeros((7, capacity_blocks + 1), np.int64)
        self._table[kernels.STACK] = np.arange(capacity_blocks, -1, -1) - 1  # the lowest number on top
        self._table[kernels.OLDER, -1] = self._table[kernels.NEWER, -1] = capacity_blocks
        self._counts: IntArray = np.array([capacity_blocks, 0], np.int64)

    @property
    def free_blocks(self) -> int:
        """Blocks in nobody's use and without content."""
        return int(self._counts[kernels.FREE])

    @property
    def idle_blocks(self) -> int:
        """Blocks with content that nobody holds: they go when others need them."""
        return int(self._counts[kernels.IDLE])

    def idle_among(self, heads: IntArray) -> int:
        """Blocks of those of these entries that nobody holds."""
        return kernels.idle_among(heads, self._table)

    def take(self, extents: IntArray) -> IntArray:
        """New entries of so many free blocks each, held once, not stored."""
        assert int(extents.sum()) <= self.free_blocks
        heads: IntArray = np.empty(len(extents), np.int64)
        kernels.take(extents, heads, self._table, self._counts)
        return heads

    def mark_stored(self, heads: IntArray, stored: bool = True) -> None:
        """Whether these entries, held ones, stay when their last holder leaves."""
        self._table[kernels.STORED, heads] = stored

    def hold(self, heads: IntArray) -> None:
        """One holder more on each."""
        kernels.hold(heads, self._table, self._counts)

    def release(self, heads: IntArray) -> None:
        """One holder less on each, in this order: the first of those without holders goes first."""
        kernels.release(heads, self._table, self._counts)

    def evict(self, free_blocks: int) -> list[int]:
        """Drop idle entries until so many blocks are free, or none is left; their heads, in that order."""
        gone: IntArray = np.empty(max(free_blocks - self.free_blocks, 0), np.int64)
        count = kernels.evict(free_blocks, gone, self._table, self._counts)
        heads: list[int] = gone[:count].tolist()
        return heads

    def members(self, head: int) -> IntArray:
        """Numbers of the blocks of one entry."""
        numbers, block = [], head
        while block >= 0:
            numbers.append(block)
            block = int(self._table[kernels.MEMBER, block])
        return np.array(numbers, np.int64)
