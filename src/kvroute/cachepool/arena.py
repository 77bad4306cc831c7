"""Allocator for memory blocks of equal size: which are free, which are held, and in which order the rest is evicted."""

from __future__ import annotations

import numpy as np

from kvroute.cachepool import kernels
from kvroute.types import InputError, IntArray


class Arena:
    """`capacity_blocks` blocks, allocated as entries of one or more blocks, each with a count of holders.

    A stored entry stays when its last holder releases it, until its blocks are needed: least recently released first, a
    total order. An entry that is not stored is freed at once. Entries are identified by their heads (block numbers).
    The caller must pass correct heads: they are not checked.
    """

    __slots__ = ("_counts", "_table", "capacity_blocks")

    def __init__(self, capacity_blocks: int) -> None:
        if capacity_blocks < 0:
            raise InputError(f"{capacity_blocks} blocks", where="capacity_blocks", hint="give 0 or more")
        self.capacity_blocks = capacity_blocks
        self._table: IntArray = np.zeros((7, capacity_blocks + 1), np.int64)
        self._table[kernels.STACK] = np.arange(capacity_blocks, -1, -1) - 1  # the lowest number is on top
        self._table[kernels.OLDER, -1] = self._table[kernels.NEWER, -1] = capacity_blocks
        self._counts: IntArray = np.array([capacity_blocks, 0], np.int64)

    @property
    def free_blocks(self) -> int:
        """Blocks that are not held and have no content."""
        return int(self._counts[kernels.FREE])

    @property
    def idle_blocks(self) -> int:
        """Blocks with content that are not held; they are evicted when blocks are needed."""
        return int(self._counts[kernels.IDLE])

    def idle_among(self, heads: IntArray) -> int:
        """Number of blocks of those among these entries that are not held."""
        return kernels.idle_among(heads, self._table)

    def take(self, extents: IntArray) -> IntArray:
        """Allocate entries with these numbers of free blocks, held once and not stored; return their heads."""
        assert int(extents.sum()) <= self.free_blocks
        heads: IntArray = np.empty(len(extents), np.int64)
        kernels.take(extents, heads, self._table, self._counts)
        return heads

    def mark_stored(self, heads: IntArray, stored: bool = True) -> None:
        """Set whether these entries, which must be held, stay when their last holder releases them."""
        self._table[kernels.STORED, heads] = stored

    def hold(self, heads: IntArray) -> None:
        """Add one holder to each entry."""
        kernels.hold(heads, self._table, self._counts)

    def release(self, heads: IntArray) -> None:
        """Remove one holder from each entry, in this order: the first one without holders is evicted first."""
        kernels.release(heads, self._table, self._counts)

    def evict(self, free_blocks: int) -> list[int]:
        """Evict idle entries until `free_blocks` are free, or none is left; return their heads in that order."""
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
