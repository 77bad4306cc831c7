"""Where KV blocks lie in memory: one region per layer, as bytes that sockets read from and write to without a copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

ByteArray = npt.NDArray[np.uint8]


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """What two instances must have in common for a block's bytes to mean the same on both."""

    model: str
    dtype: str
    block_tokens: int
    region_bytes: tuple[int, ...]
    """Bytes of one block in every region, in the order of the layers."""
    tp: int = 1
    rank: int = 0


class Region(Protocol):
    """One layer's part of the KV cache, block by block."""

    @property
    def block_bytes(self) -> int:
        """Of one block of this layer."""
        ...

    def outgoing(self, blocks: Sequence[int]) -> list[memoryview]:
        """The bytes of `blocks`, in their order."""
        ...

    def landing(self, blocks: Sequence[int]) -> list[memoryview]:
        """Where the bytes of `blocks` are to be written, in their order."""
        ...

    def landed(self, blocks: Sequence[int], views: list[memoryview]) -> None:
        """All bytes are in `views`, which `landing` gave."""
        ...


@dataclass(frozen=True, slots=True)
class HostRegion:
    """Blocks in host memory: block b is the `block_bytes` bytes at b * stride_bytes."""

    memory: memoryview
    block_bytes: int
    stride_bytes: int

    @classmethod
    def of(cls, memory: ByteArray, block_bytes: int, stride_bytes: int) -> HostRegion:
        """Over a flat array of bytes that starts with block 0."""
        assert memory.ndim == 1
        assert memory.flags.c_contiguous
        return cls(memory.data, block_bytes, stride_bytes)

    @property
    def blocks(self) -> int:
        """How many whole blocks there are."""
        return (len(self.memory) - self.block_bytes) // self.stride_bytes + 1

    def outgoing(self, blocks: Sequence[int]) -> list[memoryview]:
        """Views into the cache itself; neighbours are joined."""
        joined = self.stride_bytes == self.block_bytes
        return [self._run(first, count) for first, count in runs(blocks, joined)]

    landing = outgoing

    def landed(self, blocks: Sequence[int], views: list[memoryview]) -> None:
        """The bytes are in place already."""

    def _run(self, first: int, count: int) -> memoryview:
        start = first * self.stride_bytes
        view = self.memory[start : start + count * self.block_bytes]
        assert len(view) == count * self.block_bytes, "block outside the KV cache"
        return view


def runs(blocks: Sequence[int], joined: bool = True) -> Iterator[tuple[int, int]]:
    """Stretches of consecutive blocks as (first, count); each block for itself unless `joined`."""
    start = 0
    for index in range(1, len(blocks) + 1):
        if index == len(blocks) or not joined or blocks[index] != blocks[index - 1] + 1:
            yield blocks[start], index - start
            start = index
