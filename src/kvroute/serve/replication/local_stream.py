"""A worker's connection to the stream that the workers of one machine share."""

from __future__ import annotations

import asyncio
import struct
from contextlib import suppress
from pathlib import Path

from kvroute.serve.replication.stream import ENTRY_MAX_BYTES, StreamError

HEADER = struct.Struct(">I")
"""Size of the entry that follows, in bytes."""
_READ_BYTES = 1 << 20


class LocalStream:
    """A `SharedStream` over a Unix socket, whose server is the parent process of the workers."""

    def __init__(self, path: Path) -> None:
        """Args: `path` of the socket. Nothing is connected before the first call."""
        self._path = path
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._received = bytearray()
        self._read = 0

    async def open(self) -> str:
        """Connect. Return the place in the stream from which reading begins."""
        try:
            self._reader, self._writer = await asyncio.open_unix_connection(self._path, limit=ENTRY_MAX_BYTES)
            await self._reader.readexactly(HEADER.size)
            self._received.clear()
        except (OSError, asyncio.IncompleteReadError) as error:
            raise StreamError(f"the parent process does not answer ({error})") from error
        return "0"

    async def append(self, entry: bytes) -> None:
        """Append an entry."""
        assert self._writer is not None, "`open` comes first"
        try:
            self._writer.write(HEADER.pack(len(entry)) + entry)
            await self._writer.drain()
        except OSError as error:
            raise StreamError(f"the parent process has ended ({error})") from error

    async def read(self, after: str) -> list[tuple[str, bytes]]:
        """Wait for the next entries; return them with their places. `after` is not used: entries come once."""
        assert self._reader is not None, "`open` comes first"
        while not (entries := self._complete()):
            try:
                received = await self._reader.read(_READ_BYTES)
            except OSError as error:
                raise StreamError(f"the parent process has ended ({error})") from error
            if not received:
                raise StreamError("the parent process has ended")
            self._received += received
        first = self._read + 1
        self._read += len(entries)
        return [(str(number), entry) for number, entry in enumerate(entries, first)]

    def _complete(self) -> list[bytes]:
        """Remove the complete entries from what was received, and return them."""
        entries, at, received = [], 0, self._received
        while len(received) - at >= HEADER.size:
            end = at + HEADER.size + HEADER.unpack_from(received, at)[0]
            if end > len(received):
                break
            entries.append(bytes(received[at + HEADER.size : end]))
            at = end
        del received[:at]
        return entries

    async def close(self) -> None:
        """Disconnect."""
        if self._writer is not None:
            self._writer.close()
            with suppress(OSError):
                await self._writer.wait_closed()


async def read_entry(reader: asyncio.StreamReader) -> bytes:
    """Return the next entry.

    Raises:
        asyncio.IncompleteReadError: the other side has closed the connection.
    """
    (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    assert size <= ENTRY_MAX_BYTES, "reports are bounded"
    return await reader.readexactly(size)
