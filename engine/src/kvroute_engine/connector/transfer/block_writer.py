"""Sends full blocks to the node's buffer server, which writes them to the store. The worker's half of write-back.

Writing is best effort: a block that cannot be written is computed again when it is needed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvroute_engine.connector.transfer.pool import ConnectionPool, PeerServer
from kvroute_engine.connector.transfer.wire import (
    MATCH_KEYS_MAX,
    Match,
    Matched,
    StoreAnswer,
    StoreBlock,
    WireError,
    WireRefusal,
    crc32,
)

log = logging.getLogger(__name__)
PING_S = 1.0
"""Interval of messages to the buffer server while there is nothing to write. The first one opens its store."""
PARENT_WAIT_S = 10.0
"""Time for which a block waits for another instance to write its parent, in seconds."""
PAUSE_S = 0.1
"""Pause before a block whose parent is missing is sent again, in seconds."""
_KNOWN_MAX = 1 << 16
"""Number of blocks remembered as stored."""
_REPORT_S = 30.0
"""Minimum interval of log lines on a buffer server that fails, in seconds."""


@dataclass(slots=True, eq=False)
class _Block:
    key: bytes
    parent: bytes
    data: bytes
    until_s: float = 0.0
    """Time of the last attempt, set when the parent is first missing."""


class BlockWriter:
    """A thread that sends blocks in order. `close` ends it; blocks that wait are lost."""

    def __init__(self, pool: ConnectionPool, peer: PeerServer, limit_bytes: int, *, checksum: bool = False) -> None:
        """Args: `limit_bytes`: memory for blocks that wait."""
        self._pool, self._peer, self._limit_bytes, self._checksum = pool, peer, limit_bytes, checksum
        self._changed = threading.Condition()
        self._queue: deque[_Block] = deque()
        self._waiting_bytes = 0
        self._stored: list[bytes] = []
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._closed = False
        self._reported_s = -_REPORT_S
        self.dropped = 0
        """Number of blocks that were not written."""
        self._thread = threading.Thread(target=self._run, name="kv-write-back", daemon=True)
        self._thread.start()

    def wanted(self, keys: Sequence[bytes], block_bytes: int) -> list[int]:
        """Return the positions of the blocks to copy: those that are not known to be stored, as far as they fit into
        the memory for blocks that wait. The stored ones count as written."""
        with self._changed:
            self._stored.extend(key for key in keys if key in self._known)
            found = [at for at, key in enumerate(keys) if key not in self._known]
            room = (self._limit_bytes - self._waiting_bytes) // block_bytes
            self.dropped += max(len(found) - room, 0)
            return found[:room]

    def add(self, key: bytes, parent: bytes, data: bytes) -> None:
        """Write a block that is `wanted`."""
        with self._changed:
            self._waiting_bytes += len(data)
            self._queue.append(_Block(key, parent, data))
            self._changed.notify_all()

    def take_stored(self) -> list[bytes]:
        """Return the keys of the blocks that are in the store, since the last call."""
        with self._changed:
            stored, self._stored = self._stored, []
            return stored

    @property
    def idle(self) -> bool:
        """True if no block waits and no stored block is left to report."""
        with self._changed:
            return not self._waiting_bytes and not self._stored

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed, PING_S)
                if self._closed:
                    return
                batch = [self._queue[at] for at in range(min(len(self._queue), MATCH_KEYS_MAX))]
            try:
                self._write(batch)
            except OSError as error:
                self._failed(error)

    def _write(self, batch: Sequence[_Block]) -> None:
        """Write what is at the front of the queue, or ping the buffer server."""
        if not batch:
            self._request(Match(()))
            return
        # Blocks of one chain follow each other, so one question often covers many.
        chain = [batch[0]]
        for block in batch[1:]:
            if block.parent != chain[-1].key:
                break
            chain.append(block)
        reply = self._request(Match(tuple(block.key for block in chain)))
        found = reply.blocks if isinstance(reply, Matched) else 0
        for block in chain[:found]:
            self._done(block, stored=True)
        for at in range(found, len(chain)):
            if not self._send(chain[at]):
                self._defer(chain[at:])
                return

    def _send(self, block: _Block) -> bool:
        """Send one block. Return whether it is done, written or not; False: its parent is missing."""
        view = memoryview(block.data)
        checksum = crc32([view]) if self._checksum else None
        message = StoreBlock(key=block.key, parent=block.parent, nbytes=len(block.data), crc32=checksum)
        reply = self._request(message, [view])
        now = time.monotonic()
        block.until_s = block.until_s or now + PARENT_WAIT_S
        stored = isinstance(reply, StoreAnswer) and reply.stored
        if not stored and block.parent and now < block.until_s:
            return False
        self._done(block, stored=stored)
        return True

    def _defer(self, chain: Sequence[_Block]) -> None:
        """Move blocks behind all others, in order, and pause."""
        with self._changed:
            for block in chain:
                self._queue.remove(block)
            self._queue.extend(chain)
            self._changed.wait_for(lambda: self._closed, PAUSE_S)

    def _request(self, message: Match | StoreBlock, payload: Sequence[memoryview] = ()) -> object:
        channel, reply = self._pool.request(self._peer, message, payload)
        if isinstance(reply, WireRefusal):
            self._pool.drop(channel)
            raise WireError(reply.code, reply.reason)
        self._pool.keep(self._peer, channel)
        return reply

    def _done(self, block: _Block, *, stored: bool) -> None:
        with self._changed:
            self._queue.remove(block)
            self._waiting_bytes -= len(block.data)
            if stored:
                self._stored.append(block.key)
                self._known[block.key] = None
                if len(self._known) > _KNOWN_MAX:
                    self._known.popitem(last=False)
            else:
                self.dropped += 1
                self._known.clear()  # a block that was known to be stored may be the missing parent
            self._changed.notify_all()

    def _failed(self, error: OSError) -> None:
        """Drop what waits: the buffer server fails, and the blocks take memory."""
        now = time.monotonic()
        if now - self._reported_s >= _REPORT_S:
            self._reported_s = now
            log.warning("blocks are not written to the store: %s: %s", self._peer.source, error)
        with self._changed:
            self.dropped += len(self._queue)
            self._queue.clear()
            self._waiting_bytes = 0
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed, PING_S)
