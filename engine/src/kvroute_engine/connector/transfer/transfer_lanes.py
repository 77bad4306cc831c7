"""One lane of a transfer: writes parts to the cache as they arrive over a connection, or over its replacement."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvroute_engine.connector.blocks import Fence, Region
from kvroute_engine.connector.transfer.channel import FramedSocket
from kvroute_engine.connector.transfer.pool import ConnectionPool, PeerServer
from kvroute_engine.connector.transfer.remote_memory import BlockCopy, RemoteMemory
from kvroute_engine.connector.transfer.wire import (
    BlockPart,
    Copied,
    Fetch,
    KeepAlive,
    LaneEnd,
    MemoryParts,
    Message,
    WireError,
    crc32,
)

log = logging.getLogger(__name__)
_BARREN_MAX = {"reset": 3, "checksum": 3, "timeout": 1, "nixl": 2}
"""By failure: number of consecutive connections after which a lane gives up, if no lane has received new blocks of the
transfer during them. After any other failure a lane gives up at once."""


@dataclass(frozen=True, slots=True)
class BlockTransfer:
    """Blocks from position `first` of a request on `peer`, and the local blocks that receive them, in order."""

    request_id: str
    """Local name of the request."""
    peer: PeerServer
    remote_request_id: str
    first: int
    blocks: tuple[int, ...]
    checksum: bool = False
    prompt: str = ""
    """Digest of the prompt, for the peer to compare."""
    wait_s: float = 0.0
    """Maximum wait for a prompt that is not yet being computed, in seconds; 0: the prompt is already computed."""
    connections: int = 0
    """Maximum number of connections; 0: as in the options."""
    release: bool = True
    """Whether the peer may free the request's blocks when the transfer is over."""
    fence: Fence | None = field(default=None, compare=False)
    """Must be passed before the local blocks are written: the device may still use their earlier content."""


class TransferProgress:
    """Received blocks and active lanes of a transfer, shared by its threads."""

    def __init__(self, transfer: BlockTransfer, regions: Sequence[Region], name: str, began: float) -> None:
        """`name` identifies the transfer to the peer and is unique; `began` is the start time, in seconds."""
        self.transfer, self.regions, self.name, self.began = transfer, regions, name, began
        self.lock = threading.Condition()
        """Notified when all blocks of a region have arrived, and at the end of the transfer."""
        self.ended = False
        self.lanes = 0
        """Number of lanes started so far."""
        self.lanes_left = 0
        self.nbytes = 0
        self.nixl_bytes = 0
        self.failure = ""
        self.cancelled = False
        self._channels: set[FramedSocket] = set()
        self._landed = [bytearray(len(transfer.blocks)) for _ in regions]
        self._missing = [len(transfer.blocks) for _ in regions]
        """Number of blocks that have not arrived, by region."""

    def cancel(self) -> None:
        """Abort all lanes, now and later."""
        with self.lock:
            self.cancelled = True
            for channel in self._channels:
                channel.abort()

    def enter(self, channel: FramedSocket) -> None:
        """Register `channel` as used by a lane."""
        with self.lock:
            self._channels.add(channel)
            if self.cancelled:
                channel.abort()

    def leave(self, channel: FramedSocket) -> None:
        """Unregister `channel`."""
        with self.lock:
            self._channels.discard(channel)

    def receive(self, channel: FramedSocket, part: BlockPart) -> None:
        """Read a part's bytes from `channel` to their places in the cache.

        Raises:
            WireError: the part was not requested, or it is damaged.
        """
        region, here = self._place(part)
        views = region.incoming(here)
        channel.receive_into(views)
        if part.crc32 is not None and crc32(views) != part.crc32:
            raise _damaged(part)
        if self.transfer.fence:
            self.transfer.fence()
        region.landed(here, views)

    def copy(self, channel: FramedSocket, remote: RemoteMemory, parts: Sequence[BlockPart], beat_s: float) -> Message:
        """Read parts from the peer's memory to their places in the cache. Return the peer's confirmation, its next
        message. Args: `beat_s`: interval of messages to the peer during the read, in seconds.

        Raises:
            WireError: a part was not requested, is damaged, cannot be read, or the peer no longer held it.
        """
        if not parts:
            raise WireError("malformed", "a message without parts")
        copies = [BlockCopy(part.region, self._place(part)[1], part.blocks) for part in parts]
        for part in parts:
            if len(part.blocks) != part.count:
                raise WireError("malformed", f"{len(part.blocks)} numbers of {part.count} blocks")
        if self.transfer.fence:
            self.transfer.fence()
        remote.read(copies, lambda: channel.send(KeepAlive()), beat_s)
        for part, copy in zip(parts, copies, strict=True):
            if part.crc32 is not None and crc32(self.regions[copy.region].outgoing(copy.here)) != part.crc32:
                raise _damaged(part)
        channel.send(Copied(parts[-1].number))
        return channel.receive_next()

    def count_arrived(self, part: BlockPart, *, nixl: bool) -> None:
        """Count a part whose bytes are in their places. Args: `nixl`: they were read from the peer's memory."""
        start, count = part.first - self.transfer.first, part.count
        landed, block_bytes = self._landed[part.region], self.regions[part.region].block_bytes
        with self.lock:
            # A peer that sends the same blocks again and again makes no progress.
            fresh = landed[start : start + count].count(0)
            self.nbytes += fresh * block_bytes
            self.nixl_bytes += fresh * block_bytes * nixl
            landed[start : start + count] = b"\1" * count
            self._missing[part.region] -= fresh
            if not self._missing[part.region]:
                self.lock.notify_all()

    def _place(self, part: BlockPart) -> tuple[Region, tuple[int, ...]]:
        start, count = part.first - self.transfer.first, part.count
        regions, blocks = self.regions, self.transfer.blocks
        known = 0 <= part.region < len(regions) and 0 <= start < start + count <= len(blocks)
        if not known or part.nbytes != count * regions[part.region].block_bytes:
            what = f"{part.nbytes} bytes as {count} blocks from position {part.first} of region {part.region}"
            raise WireError("malformed", what)
        return regions[part.region], blocks[start : start + count]

    def wait(self, regions: Sequence[int]) -> None:
        """Return when all blocks of these regions have arrived, or when the transfer has ended."""
        with self.lock:
            self.lock.wait_for(lambda: self.ended or not any(self._missing[region] for region in regions))

    @property
    def complete(self) -> bool:
        """True if every block of every region has arrived."""
        return not any(self._missing)


class TransferLane:
    """One connection of a transfer, and its replacements when it breaks. Used by one thread."""

    def __init__(
        self,
        number: int,
        progress: TransferProgress,
        pool: ConnectionPool,
        first_part: Callable[[], None],
        beat_s: float,
    ) -> None:
        """Args: `first_part` is called when the first part has arrived; `beat_s`: interval of messages to the peer
        while a part is read from its memory, in seconds."""
        self._number, self._progress, self._pool, self._first_part = number, progress, pool, first_part
        self._beat_s = beat_s
        self._after = -1

    def carry(self) -> str:
        """Receive parts until the peer has none left for this lane. Return empty, or the failure in one word."""
        barren = 0
        while not self._progress.cancelled:
            landed = self._progress.nbytes
            try:
                self._fetch()
            except OSError as error:
                failure = _error_code(error)
                if failure == "nixl":
                    self._pool.use_tcp(self._progress.transfer.peer, error)
                barren = barren + 1 if self._progress.nbytes == landed else 0
                if not self._progress.cancelled and (failure not in _BARREN_MAX or barren >= _BARREN_MAX[failure]):
                    transfer = self._progress.transfer
                    log.warning(
                        "KV transfer of %s from %s failed: %s", transfer.request_id, transfer.peer.source, error
                    )
                    return failure
            else:
                return ""
        return "cancelled"

    def _fetch(self) -> None:
        progress, transfer = self._progress, self._progress.transfer
        fetch = Fetch(
            request_id=transfer.remote_request_id,
            first=transfer.first,
            count=len(transfer.blocks),
            transfer=progress.name,
            lane=self._number,
            after=self._after,
            checksum=transfer.checksum,
            prompt=transfer.prompt,
            wait_s=transfer.wait_s,
        )
        channel, message = self._pool.request(transfer.peer, fetch)
        progress.enter(channel)
        try:
            self._listen(channel, message)
        except BaseException:
            self._pool.drop(channel)
            raise
        finally:
            progress.leave(channel)
        self._pool.keep(transfer.peer, channel)

    def _listen(self, channel: FramedSocket, message: Message) -> None:
        remote = self._pool.remote_memory(channel)
        while not isinstance(message, LaneEnd):
            if isinstance(message, BlockPart):
                self._progress.receive(channel, message)
                self._count([message], nixl=False)
                message = channel.receive_next()
            elif isinstance(message, MemoryParts) and remote is not None:
                parts = message.parts
                message = self._progress.copy(channel, remote, parts, self._beat_s)
                self._count(parts, nixl=True)
            elif isinstance(message, KeepAlive):
                message = channel.receive_next()
            else:
                raise WireError("malformed", f"{type(message).__name__} instead of Part")

    def _count(self, parts: Sequence[BlockPart], *, nixl: bool) -> None:
        for part in parts:
            self._progress.count_arrived(part, nixl=nixl)
        if self._after < 0:
            self._first_part()
        self._after = parts[-1].number


def _damaged(part: BlockPart) -> WireError:
    return WireError("checksum", f"blocks of region {part.region} were damaged in transit")


def _error_code(error: OSError) -> str:
    match error:
        case WireError():
            return error.code
        case ConnectionRefusedError():
            return "refused"
        case TimeoutError():
            return "timeout"
        case ConnectionError() | OSError(errno=errno.ENOTCONN):  # the latter if it broke before its first use
            return "reset"
        case _:
            return "unreachable"
