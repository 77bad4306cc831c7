"""One ordered stream that the workers of a machine share: each entry goes to all of them, in one order.

The parent process of the workers runs the server on a Unix socket. Entries are not kept: a worker that connects again
asks the others in the stream.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

from kvroute.serve.replication.local_stream import HEADER, read_entry
from kvroute.serve.replication.stream import ENTRY_MAX_BYTES

UNREAD_MAX_BYTES = 64 << 20


class StreamServer:
    """Listens from `start` to `close`."""

    def __init__(self, unread_max_bytes: int = UNREAD_MAX_BYTES) -> None:
        """Args: `unread_max_bytes`: a worker that leaves more entries unread is disconnected."""
        self._unread_max_bytes = unread_max_bytes
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self, path: Path) -> None:
        """Listen on a new Unix socket."""
        self._server = await asyncio.start_unix_server(self._serve, path, limit=ENTRY_MAX_BYTES)

    async def close(self) -> None:
        """Disconnect all workers and stop listening."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.close()
        if self._server is not None:
            await self._server.wait_closed()

    @property
    def connections(self) -> int:
        """Number of connected workers."""
        return len(self._writers)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        writer.write(HEADER.pack(0))  # entries of others are read from here on
        try:
            while True:
                self._send(await read_entry(reader))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    def _send(self, entry: bytes) -> None:
        framed = HEADER.pack(len(entry)) + entry
        for writer in list(self._writers):
            if writer.transport.get_write_buffer_size() > self._unread_max_bytes:
                self._writers.discard(writer)
                writer.transport.abort()
            else:
                writer.write(framed)
