"""Limits on the admin port's connections: their number and their timeouts. aiohttp reads the requests."""

from __future__ import annotations

import asyncio
from typing import cast

from aiohttp import web

from kvroute.http.deadlines import NEVER_S, Deadlines
from kvroute.http.server.connection_limits import (
    BUSY,
    IDLE,
    UNREAD,
    AcceptedConnection,
    ConnectionOutcome,
    Connections,
    network_of,
)
from kvroute.serve.observe.logs import log_accept_paused

CONNECTIONS_MOST = 256
PER_ADDRESS_MOST = 192
HEAD_S = 10.0
"""Timeout of the TLS handshake, and time from the connect to the end of the first request's headers, in seconds."""
KEEP_ALIVE_S = 75.0
"""Time from a response to the end of the next request's headers, in seconds."""
STALL_S = 30.0
"""Longest time that a client may read nothing of a pending response, in seconds."""
LINGER_S = 2.0
_FULL = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nretry-after: 1\r\nconnection: close\r\n\r\n"


class AdminConnections:
    """All connections of the admin port; implements `listener.Port`."""

    def __init__(
        self, *, most: int = CONNECTIONS_MOST, per_address: int = PER_ADDRESS_MOST, head_s: float = HEAD_S
    ) -> None:
        self._most, self._per_address, self._head_s = most, per_address, head_s
        self._connections = Connections()
        self._deadlines = Deadlines()
        self.of_handler: dict[web.RequestHandler, AdminConnection] = {}

    def __len__(self) -> int:
        return len(self._connections)

    @property
    def times_s(self) -> tuple[float, float]:
        """See `Port`."""
        return self._head_s, LINGER_S

    def enter(self, new: AcceptedConnection) -> ConnectionOutcome:
        """See `Port`."""
        self._deadlines.watch(new)
        return self._connections.enter(new, self._most, self._per_address, asyncio.get_running_loop().time())

    def leave(self, gone: AcceptedConnection) -> None:
        """See `Port`."""
        self._deadlines.forget(gone)
        self._connections.leave(gone)

    def accept_paused(self, reason: str, seconds: float) -> None:
        """See `Port`."""
        log_accept_paused(reason, seconds)

    def not_tls(self) -> None:
        """See `Port`."""

    def begin(self, request: web.BaseRequest) -> None:
        """Record that a request's headers have arrived."""
        connection = self.of_handler.get(request.protocol)
        if connection is not None:
            connection.begin()

    def end(self, request: web.BaseRequest) -> None:
        """Record that the response of a request is ready to be sent."""
        connection = self.of_handler.get(request.protocol)
        if connection is not None:
            connection.end()

    async def close(self) -> None:
        """Abort the connections that aiohttp has not closed, and wait until all are closed."""
        for connection in self._connections.all():
            connection.abort()
        await self._connections.until_empty()


class AdminConnection(asyncio.Protocol):
    """Protocol between a transport and its aiohttp handler."""

    def __init__(self, port: AdminConnections, handler: web.RequestHandler) -> None:
        self.address, self.deadline_s = "", NEVER_S
        self._port, self._handler = port, handler
        self._now = asyncio.get_running_loop().time
        self._transport: asyncio.Transport
        self._busy = self._paused = self._refused = False

    def begin(self) -> None:
        """Record that a request's headers have arrived."""
        self._busy = True
        self._set_deadline()

    def end(self) -> None:
        """Record that the response is ready to be sent."""
        self._busy = False
        self._set_deadline()

    def _set_deadline(self) -> None:
        if self._paused:
            self.deadline_s = self._now() + STALL_S
        else:
            self.deadline_s = NEVER_S if self._busy else self._now() + KEEP_ALIVE_S

    # methods of `AcceptedConnection`

    def waits_for(self) -> int:
        """See `AcceptedConnection`."""
        return UNREAD if self._paused or self._refused else BUSY if self._busy else IDLE

    def expire(self, now: float) -> None:
        """See `AcceptedConnection`."""
        self._transport.abort()

    def drain(self, idle_until_s: float) -> None:
        """See `AcceptedConnection`."""
        self.deadline_s = min(self.deadline_s, idle_until_s)

    def abort(self) -> None:
        """See `AcceptedConnection`."""
        self._transport.abort()

    # methods of `asyncio.Protocol`

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)
        self.address = network_of(transport.get_extra_info("peername"))
        self.deadline_s = self._now() + self._port.times_s[0]
        if self._port.enter(self) is ConnectionOutcome.TAKEN:
            self._port.of_handler[self._handler] = self
            self._handler.connection_made(transport)
        else:
            self._refused = True
            self._transport.write(_FULL)
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if not self._refused:
            self._handler.data_received(data)

    def eof_received(self) -> bool:
        """Send the pending responses to a client that has closed only its side. TLS has no half-closed state."""
        if self._refused or self._transport.get_extra_info("sslcontext") is not None:
            return False
        self._handler.close()  # after the requests that it has received
        return True

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._paused = True
        self._set_deadline()
        if not self._refused:
            self._handler.pause_writing()

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._paused = False
        self._set_deadline()
        if not self._refused:
            self._handler.resume_writing()

    def connection_lost(self, exc: BaseException | None) -> None:
        """See `asyncio.Protocol`."""
        self.deadline_s = NEVER_S
        self._port.leave(self)
        if self._port.of_handler.pop(self._handler, None) is not None:
            self._handler.connection_lost(exc)
