"""Time limits of the connections to an aiohttp server, which itself waits for a slow request for ever."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from aiohttp import web

from kvroute_engine.addresses import bound


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Times after which a connection is closed, in seconds."""

    request_s: float = 10.0
    """From the connect, or the first byte of a later request, to the end of the request's body; also the time of the
    TLS handshake. Kubernetes' API server waits 10 s for a whole review by default."""
    idle_s: float = 120.0
    """From a response to the first byte of the next request. The API server closes its idle connections after 90 s."""


class TimedConnection(asyncio.Protocol):
    """Protocol between a transport and its aiohttp handler, which aborts the connection at a limit."""

    def __init__(self, handler: web.RequestHandler, limits: ConnectionLimits) -> None:
        self._handler, self._limits = handler, limits
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle | None = None
        self._idle = False

    @staticmethod
    def of(request: web.BaseRequest) -> TimedConnection | None:
        """Return the connection of a request; None if it is closed."""
        return None if request.transport is None else cast(TimedConnection, request.transport.get_protocol())

    def received(self) -> None:
        """Note that a whole request has arrived: until `answered` the server decides how long it takes."""
        self._stop_timer()

    def answered(self) -> None:
        """Note that the response is ready to be sent."""
        self._idle = True
        self._start_timer(self._limits.idle_s)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)
        self._start_timer(self._limits.request_s)
        self._handler.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._idle:
            self._idle = False
            self._start_timer(self._limits.request_s)
        self._handler.data_received(data)

    def eof_received(self) -> None:
        """See `asyncio.Protocol`."""
        self._handler.eof_received()

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._handler.resume_writing()

    def connection_lost(self, exc: BaseException | None) -> None:
        """See `asyncio.Protocol`."""
        self._stop_timer()
        self._handler.connection_lost(exc)

    def _start_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


Request = TypeVar("Request", bound=web.BaseRequest)


async def answer_whole(
    request: Request, handler: Callable[[Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Read the whole request within the limits of its `TimedConnection`, then let the handler answer it."""
    connection = TimedConnection.of(request)
    await request.read()
    if connection is None:
        return await handler(request)
    connection.received()
    try:
        return await handler(request)
    finally:
        connection.answered()


async def listen(
    handlers: Callable[[], web.RequestHandler],
    host: str,
    port: int,
    limits: ConnectionLimits,
    context: ssl.SSLContext | None = None,
) -> asyncio.Server:
    """Serve the connections of a port by aiohttp's handlers, each in a `TimedConnection`; with `context`, over TLS.

    Raises:
        OSError: the address cannot be used.
    """
    own = bound(host, port)
    place: dict[str, Any] = {"sock": own} if own is not None else {"host": host, "port": port}
    handshake_s = limits.request_s if context is not None else None
    return await asyncio.get_running_loop().create_server(
        lambda: TimedConnection(handlers(), limits), ssl=context, ssl_handshake_timeout=handshake_s, **place
    )
