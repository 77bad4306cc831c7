"""A server that speaks Redis's protocol and keeps one stream, but answers reads in another form when told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


def bulk(data: bytes) -> bytes:
    """Return a string in Redis's protocol."""
    return b"$%d\r\n%b\r\n" % (len(data), data)


def listed(*parts: bytes) -> bytes:
    """Return a list of encoded values."""
    return b"*%d\r\n" % len(parts) + b"".join(parts)


class FaultyRedis:
    """The stream and what the server answers in place of it."""

    def __init__(self) -> None:
        self.port, self.entries = 0, list[bytes]()
        self.answers: dict[bytes, bytes] = {}
        """Answer to each read command by its name, in place of the right one."""
        self.faults = 0
        """Number of such answers."""

    def _item(self, number: int) -> bytes:
        return listed(bulk(b"%d-0" % (number + 1)), listed(bulk(b"r"), bulk(self.entries[number])))

    async def _answer(self, arguments: list[bytes]) -> bytes:
        command = arguments[0].upper()
        if command in self.answers:
            self.faults += 1
            return self.answers[command]
        if command == b"XADD":
            self.entries.append(arguments[-1])
            return bulk(b"%d-0" % len(self.entries))
        if command == b"XREVRANGE":
            return listed(self._item(len(self.entries) - 1)) if self.entries else listed()
        if command == b"XREAD":
            first = int(arguments[-1].split(b"-")[0])
            items = [self._item(number) for number in range(first, len(self.entries))]
            return listed(listed(bulk(arguments[-2]), listed(*items))) if items else b"*-1\r\n"
        return b"+OK\r\n"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the commands of one connection."""
        try:
            while header := await reader.readline():
                arguments = []
                for _ in range(int(header[1:])):
                    size = int((await reader.readline())[1:])
                    arguments.append((await reader.readexactly(size + 2))[:-2])
                writer.write(await self._answer(arguments))
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def faulty_redis() -> AsyncIterator[FaultyRedis]:
    """Run the server on a free port."""
    found = FaultyRedis()
    server = await asyncio.start_server(found.serve, "127.0.0.1", 0)
    found.port = server.sockets[0].getsockname()[1]
    try:
        yield found
    finally:
        server.close()
