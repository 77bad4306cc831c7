"""Requests of engines to write full blocks to a store, answered on one connection. Part of a buffer server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvroute_engine.connector.transfer.channel import FramedSocket
from kvroute_engine.connector.transfer.wire import (
    Match,
    Matched,
    StoreAnswer,
    StoreBlock,
    WireError,
    WireRefusal,
    crc32,
)
from kvroute_engine.errors import InputError


class WritableStore(Protocol):
    """A store to which peers may write full blocks; see `kvroute_engine.block_store.BlockStore`."""

    def match(self, keys: Sequence[bytes]) -> int:
        """Return how many leading keys are stored."""
        ...

    def write(self, key: bytes, parent: bytes, block: memoryview) -> bool:
        """Store a full block; return whether it is stored afterwards."""
        ...


class BlockReceiver:
    """Receives blocks of one size for one store. Thread-safe."""

    def __init__(self, store: WritableStore, block_bytes: int) -> None:
        self._store, self._block_bytes = store, block_bytes

    def answer(self, channel: FramedSocket, message: Match | StoreBlock) -> None:
        """Answer a request. A failure of the store is a refusal with its sentence.

        Raises:
            WireError: the block has another size, or was damaged in transit.
            OSError: the connection broke.
        """
        block = self._received(channel, message) if isinstance(message, StoreBlock) else memoryview(b"")
        try:
            channel.send(self._done(message, block))
        except InputError as error:
            channel.send(WireRefusal("store", str(error)))

    def _received(self, channel: FramedSocket, message: StoreBlock) -> memoryview:
        if message.nbytes != self._block_bytes:
            raise WireError("malformed", f"a block has {self._block_bytes} bytes, not {message.nbytes}")
        block = memoryview(bytearray(self._block_bytes))
        channel.receive_into([block])
        if message.crc32 is not None and crc32([block]) != message.crc32:
            raise WireError("checksum", "a block was damaged in transit")
        return block

    def _done(self, message: Match | StoreBlock, block: memoryview) -> Matched | StoreAnswer:
        if isinstance(message, Match):
            return Matched(self._store.match(message.keys))
        return StoreAnswer(self._store.write(message.key, message.parent, block))
