"""Host memory for blocks in slots of equal size. No I/O; the caller locks."""

from __future__ import annotations

import ctypes
import heapq
import os
import resource
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from kvroute_engine.connector.blocks import ByteArray, HostRegion, runs
from kvroute_engine.errors import InputError

_MLOCK_ONFAULT = 1


class Arena:
    """Slots, each with the layer blocks of one full block in order. Memory is used when a slot is first written."""

    def __init__(self, layers: int, layer_bytes: int, quota_bytes: int, *, locked: bool = False) -> None:
        """Create the slots.

        Args:
            layers, layer_bytes: shape of a block.
            quota_bytes: size of all slots, rounded down to whole ones.
            locked: the kernel never swaps a slot out that has been written.

        Raises:
            InputError: the memory cannot be locked.
        """
        self.block_bytes = layers * layer_bytes
        self.slots = quota_bytes // self.block_bytes
        self._memory: ByteArray = np.empty(self.slots * self.block_bytes, np.uint8)
        if locked and self.slots:
            _lock(self._memory)
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

    def release(self, slots: Iterable[int]) -> None:
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


def check_lockable(nbytes: int) -> None:
    """Check that this process may lock so much memory.

    Raises:
        InputError: its limit is lower.
    """
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if os.geteuid() and limit != resource.RLIM_INFINITY and limit < nbytes:
        raise _not_lockable(f"at most {limit} bytes of memory may be locked, less than the quota of {nbytes}")


def _lock(memory: ByteArray) -> None:
    """Lock pages from their first use on."""
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "mlock2"):
        raise _not_lockable("this system cannot lock memory from its first use on")
    if library.mlock2(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes), _MLOCK_ONFAULT):
        raise _not_lockable(f"{memory.nbytes} bytes of memory cannot be locked ({os.strerror(ctypes.get_errno())})")


def _not_lockable(what: str) -> InputError:
    return InputError(what, where="--lock-memory", hint="raise the limit (`ulimit -l`), or omit the option")
