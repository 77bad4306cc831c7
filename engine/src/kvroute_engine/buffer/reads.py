"""Reads from the store into the buffer of one node: room is granted and blocks are read first in, first out.

Everything but the store's calls runs in one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from kvroute_engine.buffer.shards import Shard, Shards
from kvroute_engine.errors import InputError

MATCH_THREADS = 4


class ReadError(InputError):
    """A read that cannot be carried out; `status` is that of its HTTP response."""

    def __init__(self, status: int, message: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status


@dataclass(slots=True, eq=False)
class BufferedRead:
    """One read of consecutive blocks of a prompt."""

    id: str
    keys: list[bytes]
    """Keys of the leading blocks that are stored."""
    block_bytes: int
    """Bytes of a block, all shards together."""
    began_s: float
    room: asyncio.Future[None]
    """Done when the read has its slots."""
    slots: list[list[int]] = field(default_factory=list)
    """Slots by shard."""
    held: int = 0
    """Shards that hold the blocks for engines."""
    waited_s: float = 0.0
    """Time until the first byte was read, in seconds."""
    in_service_s: float = 0.0
    """Duration of the read after that, in seconds."""
    task: asyncio.Task[None] | None = None
    released: bool = False
    error: InputError | None = None
    """Failure of the store."""

    @property
    def kv_bytes(self) -> int:
        """Size of the read in bytes."""
        return len(self.keys) * self.block_bytes


class NodeReads:
    """The reads of one node. All methods are called in the event loop."""

    def __init__(self, shards: Shards, clock: Callable[[], float] = time.monotonic) -> None:
        self._shards, self._clock = shards, clock
        self._reads: dict[str, BufferedRead] = {}
        self._waiting: deque[BufferedRead] = deque()
        """Reads that wait for room."""
        self._match_threads = ThreadPoolExecutor(MATCH_THREADS, "block-match")
        self._read_thread = ThreadPoolExecutor(1, "block-read")
        """One thread, so that reads are carried out in order."""
        self.read_bytes = 0
        """Bytes of complete reads so far."""

    @property
    def queued_bytes(self) -> int:
        """Bytes of reads that are not complete."""
        return sum(read.kv_bytes for read in self._reads.values() if not read.held)

    @property
    def buffered_bytes(self) -> int:
        """Bytes of the buffer in use."""
        used = [
            (shard.arena.slots - shard.arena.free_slots) * shard.arena.block_bytes for shard in self._shards.opened()
        ]
        return sum(used)

    async def begin(self, read_id: str, keys: Sequence[bytes]) -> BufferedRead:
        """Begin to read the leading blocks that are stored. Return when the read has room in the buffer.

        Raises:
            ReadError: no engine has connected, the id is in use, or the blocks do not fit into the buffer at all.
            StoreError: the store fails.
        """
        if read_id in self._reads:
            raise ReadError(409, f"read {read_id} exists", "give every read its own id")
        shards = self._shards.complete()
        if not shards:
            raise ReadError(503, "no engine has connected to this buffer server yet", "start an engine that uses it")
        loop = asyncio.get_running_loop()
        block_bytes = sum(shard.arena.block_bytes for shard in shards)
        read = BufferedRead(read_id, list(keys), block_bytes, self._clock(), loop.create_future())
        self._reads[read_id] = read
        try:
            stored = await loop.run_in_executor(self._match_threads, _stored, shards, read.keys)
            del read.keys[stored:]
            room = min(shard.arena.slots for shard in shards)
            if stored > room:
                raise ReadError(413, f"{stored} blocks are more than the {room} of the buffer", "increase its quota")
            self._waiting.append(read)
            self._grant(shards)
            await read.room
        except BaseException as error:
            released = isinstance(error, asyncio.CancelledError) and read.room.cancelled()
            self.release(read_id)
            if released:
                raise ReadError(404, f"read {read_id} was released") from None
            raise
        return read

    def find(self, read_id: str) -> BufferedRead:
        """Return a read that has begun.

        Raises:
            ReadError: there is none, or it is over.
        """
        read = self._reads.get(read_id)
        if read is None or read.task is None:
            raise ReadError(404, f"there is no read {read_id}")
        return read

    async def complete(self, read: BufferedRead) -> None:
        """Return when the blocks of a read that has begun are in the buffer.

        Raises:
            ReadError: it was released meanwhile.
            StoreError: the store fails.
        """
        assert read.task is not None, "the read has begun"
        await asyncio.shield(read.task)
        if read.error is not None:
            raise read.error
        if read.released:
            raise ReadError(404, f"read {read.id} was released")

    def release(self, read_id: str) -> None:
        """Free the buffer of a read, or cancel the read. No effect if there is none."""
        read = self._reads.get(read_id)
        if read is None or read.released:
            return
        read.released = True
        if read.held:
            for shard in self._shards.complete():
                shard.server.forget(read_id)
        elif not read.slots:
            if read in self._waiting:
                self._waiting.remove(read)
            self._end(read)
        self.collect()

    def collect(self) -> None:
        """Free the slots of the reads whose blocks engines have released, or whose time is over."""
        shards = self._shards.complete()
        for number, shard in enumerate(shards):
            for freed in shard.server.freed():
                read = self._reads[freed.request_id]
                shard.arena.release(read.slots[number])
                read.held -= 1
                if not read.held:
                    self._end(read)
        self._grant(shards)

    def close(self) -> None:
        """End the threads."""
        for read in list(self._reads.values()):
            self.release(read.id)
        self._match_threads.shutdown(cancel_futures=True)
        self._read_thread.shutdown(cancel_futures=True)

    def _end(self, read: BufferedRead) -> None:
        if self._reads.get(read.id) is read:
            del self._reads[read.id]
        if not read.room.done():
            read.room.cancel()

    def _grant(self, shards: Sequence[Shard]) -> None:
        """Give slots to the reads that wait, first in, first out, and begin to read."""
        while self._waiting and all(len(self._waiting[0].keys) <= shard.arena.free_slots for shard in shards):
            read = self._waiting.popleft()
            read.slots = [shard.arena.take(len(read.keys)) for shard in shards]
            read.task = asyncio.get_running_loop().create_task(self._fill(read, shards))
            if not read.room.done():
                read.room.set_result(None)

    async def _fill(self, read: BufferedRead, shards: Sequence[Shard]) -> None:
        """Read the blocks, then hold them for engines until they are released or their time is over."""
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._read_thread, self._read, read, shards)
        except InputError as error:
            read.error, found = error, 0
        except BaseException:
            self._free(read, shards)
            raise
        if read.released or not found:
            self._free(read, shards)
            read.keys.clear()
            return
        for shard, slots in zip(shards, read.slots, strict=True):
            shard.arena.release(slots[found:])
            del slots[found:]
        del read.keys[found:]
        self.read_bytes += read.kv_bytes
        read.held = len(shards)
        for shard, slots in zip(shards, read.slots, strict=True):
            shard.server.hold(read.id, slots, prompt=read.keys[-1].hex())
        self.collect()

    def _free(self, read: BufferedRead, shards: Sequence[Shard]) -> None:
        for shard, slots in zip(shards, read.slots, strict=True):
            shard.arena.release(slots)
        self._end(read)
        self._grant(shards)

    def _read(self, read: BufferedRead, shards: Sequence[Shard]) -> int:
        """Read all shards, in a thread. Return the number of leading blocks that all of them have."""
        start_s = self._clock()
        read.waited_s = start_s - read.began_s
        found = len(read.keys)
        for shard, slots in zip(shards, read.slots, strict=True):
            found = 0 if read.released else shard.read(read.keys[:found], slots[:found])
        read.in_service_s = self._clock() - start_s
        return found


def _stored(shards: Sequence[Shard], keys: Sequence[bytes]) -> int:
    """Return how many leading blocks all shards have in the store."""
    count = len(keys)
    for shard in shards:
        count = shard.store.match(keys[:count])
    return count
