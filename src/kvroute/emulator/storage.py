"""The store of an emulated cluster, and each node's storage NIC and buffer, timed by the wall clock.

The store keeps the keys of full KV blocks and no bytes. A node reads first in, first out: a read waits for room in the
buffer, then for the NIC.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

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
class BufferedRead:
    """One read of consecutive blocks into the buffer of a node."""

    id: str
    blocks: int
    kv_bytes: float
    began_s: float
    in_service_s: float = 0.0
    """Time that the NIC takes for it, in seconds."""
    waited_s: float = 0.0
    """Time until the NIC began with it, in seconds."""
    reserved: bool = False
    """It has room in the buffer."""
    complete: bool = False
    progress: asyncio.Future[None] | None = None
    """Done when the read may continue."""
    transfer: asyncio.Task[None] | None = None
    """The read itself, after the read has room."""
    alarm: Alarm | None = None


@dataclass(slots=True, eq=False)
class StorageNode:
    """Storage NIC and buffer of one node; all sizes are modelled bytes."""

    clock: Clock
    store: StoredBlocks
    read_bytes_per_s: float
    write_bytes_per_s: float
    buffer_bytes: float
    hold_s: float = HOLD_S
    read_bytes: float = 0.0
    """Bytes of complete reads so far."""
    written_bytes: float = 0.0
    _free_bytes: float = field(init=False)
    _reads: dict[str, BufferedRead] = field(default_factory=dict)
    _waiting: deque[BufferedRead] = field(default_factory=deque)
    """Reads that wait for room in the buffer."""
    _read_until_s: float = 0.0
    _write_until_s: float = 0.0

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

    async def read(self, read_id: str, model: str, keys: Sequence[bytes], block_bytes: float) -> BufferedRead:
        """Read the leading blocks that are stored, and return when they are in the buffer.

        Raises:
            ApiError: the id is in use, or the blocks do not fit into the buffer at all.
        """
        return await self.complete(await self.begin(read_id, model, keys, block_bytes))

    async def begin(self, read_id: str, model: str, keys: Sequence[bytes], block_bytes: float) -> BufferedRead:
        """Begin to read the leading blocks that are stored, and return when they have room in the buffer.

        Raises:
            ApiError: the id is in use, or the blocks do not fit into the buffer at all.
        """
        if read_id in self._reads:
            raise ApiError(f"read {read_id} exists; give every read its own id", status=409, kind="ConflictError")
        blocks = self.store.match(model, keys)
        read = BufferedRead(read_id, blocks, blocks * block_bytes, self.clock.now())
        if read.kv_bytes > self.buffer_bytes:
            what = f"{blocks} blocks need {read.kv_bytes:.3g} bytes, but the buffer has {self.buffer_bytes:.3g}"
            raise ApiError(f"{what}; raise `storage.buffer` in the cluster file", status=413)
        self._reads[read_id] = read
        try:
            await self._reserve(read)
        except asyncio.CancelledError:
            self.release(read_id)
            raise
        read.transfer = asyncio.get_running_loop().create_task(self._transfer(read))
        return read

    def find(self, read_id: str) -> BufferedRead:
        """Return a read that has begun.

        Raises:
            ApiError: there is none.
        """
        read = self._reads.get(read_id)
        if read is None or read.transfer is None:
            raise ApiError(f"there is no read {read_id}", status=404, kind="NotFoundError")
        return read

    async def complete(self, read: BufferedRead) -> BufferedRead:
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

    async def _reserve(self, read: BufferedRead) -> None:
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

    async def _transfer(self, read: BufferedRead) -> None:
        """Wait until the NIC has read these blocks after those of earlier reads, and hold them."""
        now = self.clock.now()
        start_s = max(now, self._read_until_s)
        read.waited_s, read.in_service_s = start_s - read.began_s, read.kv_bytes / self.read_bytes_per_s
        self._read_until_s = start_s + read.in_service_s
        read.progress = asyncio.get_running_loop().create_future()
        read.alarm = self.clock.at(self._read_until_s, partial(_continue, read))
        await read.progress
        read.complete = True
        self.read_bytes += read.kv_bytes
        read.alarm = self.clock.at(self.clock.now() + self.hold_s, partial(self.release, read.id))

    def complete_read(self, read_id: str) -> BufferedRead | None:
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
        """Write blocks to the store; call `on_stored` when they are there."""
        nbytes = len(keys) * block_bytes
        self._write_until_s = max(self.clock.now(), self._write_until_s) + nbytes / self.write_bytes_per_s

        def stored() -> None:
            self.store.add(model, keys)
            self.written_bytes += nbytes
            on_stored()

        self.clock.at(self._write_until_s, stored)


def _continue(read: BufferedRead) -> None:
    if read.progress is not None and not read.progress.done():
        read.progress.set_result(None)
