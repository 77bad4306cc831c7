"""The storage nodes of an emulated cluster: reads into the buffer of a node, and write-back of full blocks.

A node reads first in, first out: a read waits for room in the buffer, then for the bytes. They come from a modelled
store, which keeps keys and no bytes behind a storage NIC that is timed by the clock, or from a real one
(`real_store`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from kvroute.emulator.clock import Alarm, Clock
from kvroute.emulator.errors import ApiError

HOLD_S = 120.0
"""Time for which a buffer is held until a prefill fetches it, in seconds."""


class StoredBlocks:
    """Keys of the blocks in the store, by model."""

    def __init__(self) -> None:
        self._keys: dict[str, set[bytes]] = {}

    def match(self, model: str, keys: Sequence[bytes]) -> int:
        """Return how many leading keys are stored."""
        stored = self._keys.get(model, set())
        return next((at for at, key in enumerate(keys) if key not in stored), len(keys))

    def add(self, model: str, keys: Sequence[bytes]) -> None:
        """Store blocks."""
        self._keys.setdefault(model, set()).update(keys)

    def forget(self, model: str) -> None:
        """Remove all blocks of a model."""
        self._keys.pop(model, None)


@dataclass(slots=True, eq=False)
class EmulatedBufferRead:
    """One read of consecutive blocks into the buffer of a node."""

    id: str
    blocks: int
    kv_bytes: float
    began_s: float
    in_service_s: float = 0.0
    """Duration of reading its bytes, in seconds."""
    waited_s: float = 0.0
    """Time until its first byte was read, in seconds."""
    reserved: bool = False
    """It has room in the buffer."""
    complete: bool = False
    progress: asyncio.Future[None] | None = None
    """Done when the read may continue."""
    transfer: asyncio.Task[None] | None = None
    """The read itself, after the read has room."""
    alarm: Alarm | None = None


class Medium(Protocol):
    """Where a node reads and writes blocks; one node's."""

    async def match(self, model: str, keys: Sequence[bytes]) -> int:
        """Return how many leading keys are stored."""

    async def read(self, read: EmulatedBufferRead, model: str, keys: Sequence[bytes]) -> int:
        """Read blocks after those of earlier calls; return the number of leading blocks that were read. Adds to the
        times of `read`."""

    async def write(self, model: str, keys: Sequence[bytes], stored: int, block_bytes: float) -> bool:
        """Write a chain of blocks, of which the first `stored` are there; return whether all are stored now.

        Args:
            model: name of the model.
            keys: keys of the chain.
            stored: number of blocks that need not be written.
            block_bytes: size of a block in modelled bytes.
        """

    def close(self) -> None:
        """Release what it holds."""


@dataclass(slots=True, eq=False)
class ModelledNic:
    """The storage NIC of a node, and a store that keeps keys."""

    clock: Clock
    store: StoredBlocks
    read_bytes_per_s: float
    write_bytes_per_s: float
    _read_until_s: float = 0.0
    _write_until_s: float = 0.0

    async def match(self, model: str, keys: Sequence[bytes]) -> int:
        """See `Medium`."""
        return self.store.match(model, keys)

    async def read(self, read: EmulatedBufferRead, model: str, keys: Sequence[bytes]) -> int:
        """See `Medium`."""
        now = self.clock.now()
        start_s = max(now, self._read_until_s)
        read.waited_s += start_s - now
        read.in_service_s = read.kv_bytes / self.read_bytes_per_s
        self._read_until_s = start_s + read.in_service_s
        await _until(self.clock, self._read_until_s)
        return len(keys)

    async def write(self, model: str, keys: Sequence[bytes], stored: int, block_bytes: float) -> bool:
        """See `Medium`."""
        nbytes = (len(keys) - stored) * block_bytes
        self._write_until_s = max(self.clock.now(), self._write_until_s) + nbytes / self.write_bytes_per_s
        await _until(self.clock, self._write_until_s)
        self.store.add(model, keys[stored:])
        return True

    def close(self) -> None:
        """See `Medium`."""


async def _until(clock: Clock, when_s: float) -> None:
    due = asyncio.get_running_loop().create_future()
    alarm = clock.at(when_s, partial(_set, due))
    try:
        await due
    finally:
        alarm.cancel()


def _set(due: asyncio.Future[None]) -> None:
    if not due.done():
        due.set_result(None)


@dataclass(slots=True, eq=False)
class StorageNode:
    """Buffer and reads of one node; all sizes are modelled bytes."""

    clock: Clock
    medium: Medium
    buffer_bytes: float
    hold_s: float = HOLD_S
    read_bytes: float = 0.0
    """Bytes of complete reads so far."""
    written_bytes: float = 0.0
    _free_bytes: float = field(init=False)
    _reads: dict[str, EmulatedBufferRead] = field(default_factory=dict)
    _waiting: deque[EmulatedBufferRead] = field(default_factory=deque)
    """Reads that wait for room in the buffer."""
    _writes: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._free_bytes = self.buffer_bytes

    @property
    def queued_bytes(self) -> float:
        """Bytes of reads that are not complete."""
        return sum(read.kv_bytes for read in self._reads.values() if not read.complete)

    @property
    def buffered_bytes(self) -> float:
        """Bytes of the buffer in use."""
        return self.buffer_bytes - self._free_bytes

    async def read(self, read_id: str, model: str, keys: Sequence[bytes], block_bytes: float) -> EmulatedBufferRead:
        """Read the leading blocks that are stored, and return when they are in the buffer.

        Raises:
            ApiError: the id is in use, or the blocks do not fit into the buffer at all.
        """
        return await self.complete(await self.begin(read_id, model, keys, block_bytes))

    async def begin(self, read_id: str, model: str, keys: Sequence[bytes], block_bytes: float) -> EmulatedBufferRead:
        """Begin to read the leading blocks that are stored, and return when they have room in the buffer.

        Raises:
            ApiError: the id is in use, or the blocks do not fit into the buffer at all.
        """
        self._require_new(read_id)
        blocks = await self.medium.match(model, keys)
        self._require_new(read_id)
        read = EmulatedBufferRead(read_id, blocks, blocks * block_bytes, self.clock.now())
        if read.kv_bytes > self.buffer_bytes:
            what = f"{blocks} blocks need {read.kv_bytes:.3g} bytes, but the buffer has {self.buffer_bytes:.3g}"
            raise ApiError(f"{what}; raise `storage.buffer` in the cluster file", status=413)
        self._reads[read_id] = read
        try:
            await self._reserve(read)
        except asyncio.CancelledError:
            self.release(read_id)
            raise
        transfer = self._transfer(read, model, keys[:blocks], block_bytes)
        read.transfer = asyncio.get_running_loop().create_task(transfer)
        return read

    def _require_new(self, read_id: str) -> None:
        if read_id in self._reads:
            raise ApiError(f"read {read_id} exists; give every read its own id", status=409, kind="ConflictError")

    def find(self, read_id: str) -> EmulatedBufferRead:
        """Return a read that has begun.

        Raises:
            ApiError: there is none.
        """
        read = self._reads.get(read_id)
        if read is None or read.transfer is None:
            raise ApiError(f"there is no read {read_id}", status=404, kind="NotFoundError")
        return read

    async def complete(self, read: EmulatedBufferRead) -> EmulatedBufferRead:
        """Return a read that has begun when its blocks are in the buffer. It is released if the caller gives up.

        Raises:
            ApiError: it was released meanwhile.
        """
        assert read.transfer is not None, "the read has begun"
        try:
            await asyncio.shield(read.transfer)
        except asyncio.CancelledError:
            if not read.transfer.cancelled():  # the caller was cancelled
                self.release(read.id)
                raise
            raise ApiError("the read was released", status=404, kind="NotFoundError") from None
        return read

    async def _reserve(self, read: EmulatedBufferRead) -> None:
        self._waiting.append(read)
        self._grant()
        if not read.reserved:
            read.progress = asyncio.get_running_loop().create_future()
            await read.progress

    def _grant(self) -> None:
        """Give room to the reads that wait, first in, first out."""
        while self._waiting and self._waiting[0].kv_bytes <= self._free_bytes:
            read = self._waiting.popleft()
            self._free_bytes -= read.kv_bytes
            read.reserved = True
            _continue(read)

    async def _transfer(self, read: EmulatedBufferRead, model: str, keys: Sequence[bytes], block_bytes: float) -> None:
        """Read the blocks and hold them."""
        read.waited_s = self.clock.now() - read.began_s
        read.blocks = await self.medium.read(read, model, keys)
        self._free_bytes += read.kv_bytes - read.blocks * block_bytes
        read.kv_bytes = read.blocks * block_bytes
        read.complete = True
        self.read_bytes += read.kv_bytes
        read.alarm = self.clock.at(self.clock.now() + self.hold_s, partial(self.release, read.id))

    def complete_read(self, read_id: str) -> EmulatedBufferRead | None:
        """Return a read whose blocks are in the buffer; None if there is none."""
        read = self._reads.get(read_id)
        return read if read is not None and read.complete else None

    def release(self, read_id: str) -> None:
        """Free the buffer of a read, or cancel it. No effect if there is none."""
        read = self._reads.pop(read_id, None)
        if read is None:
            return
        if read.alarm is not None:
            read.alarm.cancel()
        if read.transfer is not None:
            read.transfer.cancel()
        elif read.progress is not None:
            read.progress.cancel()
        if read.reserved:
            self._free_bytes += read.kv_bytes
        else:
            self._waiting.remove(read)
        self._grant()

    def write(self, model: str, keys: Sequence[bytes], block_bytes: float, on_stored: Callable[[], None]) -> None:
        """Write a chain of blocks to the store, as far as they are not there; call `on_stored` when all are there."""
        task = asyncio.get_running_loop().create_task(self._write(model, keys, block_bytes, on_stored))
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)

    async def _write(
        self, model: str, keys: Sequence[bytes], block_bytes: float, on_stored: Callable[[], None]
    ) -> None:
        stored = await self.medium.match(model, keys)
        if await self.medium.write(model, keys, stored, block_bytes):
            self.written_bytes += (len(keys) - stored) * block_bytes
            on_stored()

    async def close(self) -> None:
        """Cancel all reads and writes."""
        for read_id in list(self._reads):
            self.release(read_id)
        for task in list(self._writes):
            task.cancel()
        await asyncio.gather(*self._writes, return_exceptions=True)
        self.medium.close()


def _continue(read: EmulatedBufferRead) -> None:
    if read.progress is not None and not read.progress.done():
        read.progress.set_result(None)
