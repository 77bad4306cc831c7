"""KV cache tensors as regions: host memory in place, device memory through a host buffer. Imports torch.

Only whole blocks are copied, because a CPU kernel packs keys and values inside a block in its own format.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from kvroute_engine.connector.blocks import Extent, Fence, HostRegion, Region
from kvroute_engine.errors import InputError

try:
    import torch  # type: ignore[import-not-found]
except ModuleNotFoundError:
    raise ImportError("kvroute_engine.connector.device needs torch, which comes with vllm") from None


class StagedRegion:
    """Blocks of a device tensor [blocks, bytes]: gathered into a host buffer to send, scattered from one when received.

    Copies are complete when a method returns. They run on a stream of the calling thread alone, so that they do not
    wait for the model, whose work is queued on another one.
    """

    def __init__(self, bytes_by_block: Any) -> None:
        self._tensor = bytes_by_block
        self.block_bytes = int(bytes_by_block.shape[1])
        self.chunk_bytes_max = 16 << 20
        """Each copy costs a fixed time: on an H100, transfers are 2.8 times as fast as with chunks of 1 MiB."""

    @property
    def extent(self) -> Extent:
        """Place of the blocks on the device."""
        blocks, stride_bytes = int(self._tensor.shape[0]), int(self._tensor.stride(0))
        device = self._tensor.device
        return Extent(
            address=int(self._tensor.data_ptr()),
            stride_bytes=stride_bytes,
            nbytes=(blocks - 1) * stride_bytes + self.block_bytes,
            blocks=blocks,
            device=device.index or 0,
            kind="DRAM" if device.type == "cpu" else "VRAM",
        )

    def outgoing(self, blocks: Sequence[int]) -> list[memoryview]:
        """Return a copy in host memory. The device must have finished writing the blocks."""
        staged = self._host_buffer(len(blocks))
        with _copying(self._tensor.device):
            if _adjacent(blocks):
                staged.copy_(self._tensor[blocks[0] : blocks[-1] + 1], non_blocking=True)
            else:
                staged.copy_(self._tensor.index_select(0, self._index(blocks)), non_blocking=True)
        return [_flat(staged)]

    def incoming(self, blocks: Sequence[int]) -> list[memoryview]:
        """Return a host buffer."""
        return [_flat(self._host_buffer(len(blocks)))]

    def landed(self, blocks: Sequence[int], views: list[memoryview]) -> None:
        """Copy the host buffer onto the device."""
        staged = torch.frombuffer(views[0], dtype=torch.uint8).view(len(blocks), self.block_bytes)
        with _copying(self._tensor.device):
            if _adjacent(blocks):
                self._tensor[blocks[0] : blocks[-1] + 1].copy_(staged, non_blocking=True)
            else:
                arrived = staged.to(self._tensor.device, non_blocking=True)
                self._tensor.index_copy_(0, self._index(blocks), arrived)

    def _host_buffer(self, blocks: int) -> Any:
        """Return memory that the device reads and writes by itself (pinned), which torch keeps for the next call."""
        pinned = self._tensor.device.type != "cpu"
        return torch.empty((blocks, self.block_bytes), dtype=torch.uint8, pin_memory=pinned)

    def _index(self, blocks: Sequence[int]) -> Any:
        return torch.tensor(blocks, dtype=torch.int64, device=self._tensor.device)


class _Streams(threading.local):
    """Streams for copies, by device. Each thread has its own."""

    def __init__(self) -> None:
        self.by_device: dict[Any, Any] = {}


_streams = _Streams()


@contextmanager
def _copying(device: Any) -> Iterator[None]:
    """Queue the work of a `with` statement on the calling thread's stream for copies, and wait for it at the end."""
    if device.type == "cpu":
        yield
        return
    stream = _streams.by_device.get(device)
    if stream is None:
        stream = _streams.by_device[device] = torch.Stream(device)
    with stream:
        yield
    stream.synchronize()


def _adjacent(blocks: Sequence[int]) -> bool:
    return all(after == block + 1 for block, after in pairwise(blocks))


def fence_of(tensor: Any) -> Fence | None:
    """Return a fence behind the work queued on the current stream of a tensor's device; None if work is not queued."""
    if tensor.device.type == "cpu":
        return None
    event = torch.Event(tensor.device)
    event.record()
    wait: Fence = event.synchronize
    return wait


def regions_of(layer: str, tensor: Any, blocks: int, *, staging: bool = False) -> list[Region]:
    """Return one layer's cache tensor as regions: one, or two if keys and values are separate ([2, blocks, ...]).

    Raises:
        InputError: blocks are not dense in memory, or the tensor does not divide into `blocks` blocks.
    """
    split = tensor.dim() > 1 and tensor.shape[0] == 2 and tensor.shape[1] % blocks == 0 and tensor.shape[0] % blocks
    halves = [tensor[0], tensor[1]] if split else [tensor]
    return [_region(layer, half, blocks, staging) for half in halves]


def _region(layer: str, tensor: Any, blocks: int, staging: bool) -> Region:
    if tensor.shape[0] % blocks:
        what = f"KV cache of shape {tuple(tensor.shape)} does not consist of {blocks} blocks"
        raise InputError(what, where=layer, hint="this model's cache layout is not supported")
    inner = tensor[0].numel()
    strides = sorted(zip(tensor.stride()[1:], tensor.shape[1:], strict=True))
    dense = 1
    for stride, size in strides:
        if size > 1 and stride != dense:
            raise InputError(
                "a block of the KV cache is not contiguous", where=layer, hint="use another KV cache layout"
            )
        dense *= size
    per_block, size = tensor.shape[0] // blocks, tensor.element_size()
    if per_block > 1 and tensor.stride(0) != inner:
        raise InputError("the parts of a block are not adjacent", where=layer, hint="use another KV cache layout")
    block_bytes, stride_bytes = per_block * inner * size, per_block * tensor.stride(0) * size
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    start = tensor.storage_offset() * size
    if staging or tensor.device.type != "cpu":
        raw.set_(tensor.untyped_storage(), start, (blocks, block_bytes), (stride_bytes, 1))
        return StagedRegion(raw)
    raw.set_(tensor.untyped_storage(), start, ((blocks - 1) * stride_bytes + block_bytes,), (1,))
    return HostRegion.of(raw.numpy(), block_bytes, stride_bytes)


def _flat(tensor: Any) -> memoryview:
    return memoryview(tensor.view(-1).numpy())
