"""Host memory for blocks in slots of equal size. No I/O; the caller locks."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from kvroute.connector.blocks import ByteArray, HostRegion, runs


class Arena:
    """Slots, each with the layer blocks of one full block in order. Memory is used when a slot is first written."""

    def __init__(self, layers: int, layer_bytes: int, quota_bytes: int) -> None:
        """Args: `quota_bytes` of whole slots are available."""
        self.block_bytes = layers * layer_bytes
        self.slots = quota_bytes // self.block_bytes
        self._memory: ByteArray = np.empty(self.slots * self.block_bytes, np.uint8)
        self._free = list(range(self.slots))
        self.regions = [
            HostRegion.of(self._memory[layer * layer_bytes :], layer_bytes, self.block_bytes)
            for layer in range(layers)
            if self.slots
        ]

    @property
    def free_slots(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Return `count` slots, lowest numbers first. At least `count` are free."""
        assert count <= len(self._free), "the caller checks for room"
        return [heapq.heappop(self._free) for _ in range(count)]

    def give_back(self, slots: Iterable[int]) -> None:
        """Free slots."""
        for slot in slots:
            heapq.heappush(self._free, slot)

    def pieces(self, slots: Sequence[int], blocks_max: int) -> Iterator[tuple[int, memoryview]]:
        """Yield the memory of slots in order, as runs of at most `blocks_max` adjacent slots: their number and
        bytes."""
        for first, count in runs(slots):
            for start in range(first, first + count, blocks_max):
                size = min(blocks_max, first + count - start)
                yield size, self._memory.data[start * self.block_bytes : (start + size) * self.block_bytes]
