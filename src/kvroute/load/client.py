"""HTTP client of the load generator: one keep-alive connection per request in progress, without a limit of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools

from kvroute.types import InputError
from kvroute_engine.addresses import host_port


class LoadClient:
    """Keep-alive connections to one server, one per request in progress; plain HTTP/1.1, no TLS."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise InputError(f"{url!r} is not an http:// address", where="url", hint="give http://host:port")
        self._host, self._port = parts.hostname, parts.port or 80
        self._idle: list[LoadConnection] = []

    async def post(
        self,
        path: str,
        body: bytes,
        on_body: Callable[[bytes], None],
        on_sent: Callable[[], None] = lambda: None,
        headers: bytes = b"",
    ) -> int:
        """Send a request, stream the response body into `on_body` and return the status.

        Raises:
            OSError: the connection breaks before the end.
        """
        connection = await self._connection()
        host = host_port(self._host, self._port)
        head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        length = f"content-length: {len(body)}\r\n\r\n"
        try:
            ended = connection.send(head.encode() + headers + length.encode() + body, on_body)
            on_sent()
            status = await ended
        except BaseException:
            connection.abort()
            raise
        if connection.reusable:
            self._idle.append(connection)
        return status

    def close(self) -> None:
        """Close idle connections."""
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    async def _connection(self) -> LoadConnection:
        while self._idle:
            if (connection := self._idle.pop()).reusable:
                return connection
        loop = asyncio.get_running_loop()
        _, fresh = await loop.create_connection(LoadConnection, self._host, self._port)
        return fresh


@dataclass(slots=True, eq=False)
class LoadConnection(asyncio.Protocol):
    """One connection. It handles one request at a time and parses the response with httptools."""

    reusable: bool = False
    """True if the connection is open and no request is in progress."""
    _transport: asyncio.Transport | None = None
    _parser: httptools.HttpResponseParser | None = None
    _on_body: Callable[[bytes], None] = field(default=lambda data: None)
    _ended: asyncio.Future[int] | None = None

    def send(self, request: bytes, on_body: Callable[[bytes], None]) -> asyncio.Future[int]:
        """Write a request. The future contains the response's status when the response ends."""
        assert self._transport is not None
        self.reusable, self._on_body = False, on_body
        self._parser = httptools.HttpResponseParser(self)
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._ended

    def abort(self) -> None:
        """Close at once."""
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.reusable = cast(asyncio.Transport, transport), True

    def data_received(self, data: bytes) -> None:
        if self._parser is None:  # unexpected data on an idle connection
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"malformed response: {error}"))
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        self._fail(ConnectionError(f"the connection broke: {error or 'closed by the server'}"))

    def on_body(self, data: bytes) -> None:
        """Called by the parser."""
        self._on_body(data)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        assert self._parser is not None
        assert self._ended is not None
        self.reusable = self._parser.should_keep_alive()
        if not self._ended.done():
            self._ended.set_result(self._parser.get_status_code())
        self._parser = None
        if not self.reusable:
            self.abort()

    def _fail(self, error: OSError) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)
