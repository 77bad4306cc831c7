"""Memory locations of KV blocks: one region per layer, as bytes that sockets read and write without a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

ByteArray = npt.NDArray[np.uint8]
Fence: TypeAlias = Callable[[], None]
"""Waits until the device has finished the work that was queued before the fence was created."""


BlockNumber: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]
"""Number of a block, or of blocks, in a message. With the limit of `Extent.stride_bytes`, offsets have 60 bits."""


class BlockLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Properties that must be equal on two instances, so that a block's bytes have the same meaning on both."""

    model: str
    dtype: str
    block_tokens: int
    region_bytes: tuple[int, ...]
    """Size of one block in every region, in bytes, in the order of the layers."""
    tp: int = 1
    rank: int = 0


class Extent(msgspec.Struct, frozen=True, kw_only=True):
    """Place of a region in memory, for hardware that reads it by address."""

    address: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    """Address of block 0."""
    stride_bytes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 36)]
    nbytes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    """Bytes from the start of block 0 to the end of the last block."""
    blocks: BlockNumber
    device: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)] = 0
    """Number of the GPU; 0 for host memory."""
    kind: Literal["DRAM", "VRAM"] = "DRAM"
    """Host or device memory, by NIXL's names."""


class Region(Protocol):
    """One layer's part of the KV cache, as blocks."""

    @property
    def block_bytes(self) -> int:
        """Size of one block of this layer, in bytes."""
        ...

    @property
    def chunk_bytes_max(self) -> int:
        """Largest number of bytes that are sent and received at a time."""
        ...

    @property
    def extent(self) -> Extent:
        """Place of the blocks in memory."""
        ...

    def outgoing(self, blocks: Sequence[int]) -> list[memoryview]:
        """Return the bytes of `blocks`, in this order. The device must have finished writing them."""
        ...

    def incoming(self, blocks: Sequence[int]) -> list[memoryview]:
        """Return the buffers that receive the bytes of `blocks`, in this order."""
        ...

    def landed(self, blocks: Sequence[int], views: list[memoryview]) -> None:
        """Complete the write of `blocks`: all bytes are in `views`, which `incoming` returned. The device must have
        finished its work with the earlier content."""
        ...


@dataclass(frozen=True, slots=True)
class HostRegion:
    """Blocks in host memory: block b is the `block_bytes` bytes at b * stride_bytes."""

    memory: memoryview
    block_bytes: int
    stride_bytes: int

    @classmethod
    def of(cls, memory: ByteArray, block_bytes: int, stride_bytes: int) -> HostRegion:
        """Create a region over a flat array of bytes that starts with block 0."""
        assert memory.ndim == 1
        assert memory.flags.c_contiguous
        return cls(memory.data, block_bytes, stride_bytes)

    @property
    def blocks(self) -> int:
        """Number of whole blocks."""
        return (len(self.memory) - self.block_bytes) // self.stride_bytes + 1

    @property
    def chunk_bytes_max(self) -> int:
        """1 MiB: nothing is copied, so larger chunks would save headers only."""
        return 1 << 20

    @property
    def extent(self) -> Extent:
        """Place of the blocks in host memory."""
        address = int(np.frombuffer(self.memory, np.uint8).ctypes.data)
        nbytes = (self.blocks - 1) * self.stride_bytes + self.block_bytes
        return Extent(address=address, stride_bytes=self.stride_bytes, nbytes=nbytes, blocks=self.blocks)

    def outgoing(self, blocks: Sequence[int]) -> list[memoryview]:
        """Return views into the cache itself. Adjacent blocks are joined."""
        joined = self.stride_bytes == self.block_bytes
        return [self._run(first, count) for first, count in runs(blocks, joined)]

    incoming = outgoing

    def landed(self, blocks: Sequence[int], views: list[memoryview]) -> None:
        """Do nothing: the bytes are already in place."""

    def _run(self, first: int, count: int) -> memoryview:
        start = first * self.stride_bytes
        view = self.memory[start : start + count * self.block_bytes]
        assert len(view) == count * self.block_bytes, "block outside the KV cache"
        return view


def runs(blocks: Sequence[int], joined: bool = True) -> Iterator[tuple[int, int]]:
    """Yield runs of consecutive blocks as (first, count); unless `joined`, each block separately."""
    start = 0
    for index in range(1, len(blocks) + 1):
        if index == len(blocks) or not joined or blocks[index] != blocks[index - 1] + 1:
            yield blocks[start], index - start
            start = index
