"""The HTTP server: listens, limits connections, and drains them without losing a request. It handles no request."""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import ssl as tls
import struct
from contextlib import suppress

from kvroute.http.deadlines import Deadlines
from kvroute.http.error_format import ErrorFormat, PlainErrors
from kvroute.http.server.client_connection import ClientConnection, Handler, ServerHooks
from kvroute.http.server.connection_limits import AcceptedConnection, ConnectionOutcome, Connections
from kvroute.http.server.listener import Listener
from kvroute.http.server.request_parser import RequestLimits
from kvroute.http.server.web_pages import WebPages

__all__ = ["Handler", "HttpServer", "RequestLimits", "ServerHooks"]

_HANDSHAKE_S = 0.05
"""Time for TCP handshakes that were in progress when the server stopped accepting to complete, in seconds."""
_SO_ATTACH_FILTER = 26
_NO_SYN = b"".join(
    struct.pack("=HBBI", *step) for step in ((0x30, 0, 0, 13), (0x45, 0, 1, 2), (0x06, 0, 0, 0), (0x06, 0, 0, 1 << 31))
)
"""A socket filter (classic BPF): load byte 13 of the TCP header; drop the packet if the SYN bit is set."""


class HttpServer:
    """Passes every request of every client to one handler."""

    def __init__(
        self,
        handler: Handler,
        limits: RequestLimits | None = None,
        *,
        hooks: ServerHooks | None = None,
        errors: ErrorFormat | None = None,
        server_name: bytes = b"kvroute",
        deadlines: Deadlines | None = None,
        pages: WebPages | None = None,
        shares_port: bool = False,
    ) -> None:
        """
        Args:
            handler: called with each `Exchange`.
            limits: limits for clients.
            hooks: called for what the handler does not see.
            errors: makes error responses; None: `PlainErrors`.
            server_name: value of the Server header; empty: no such header.
            deadlines: shared with other components, so that one timer serves all; None: a new one.
            pages: the web pages that may send requests; None: all.
            shares_port: other processes of the same user listen at the same address (SO_REUSEPORT), and the system
                distributes the connections.
        """
        self.handler, self.hooks, self.errors = handler, hooks or ServerHooks(), errors or PlainErrors()
        self.limits = limits or RequestLimits()
        self.server = b"server: %b\r\n" % server_name if server_name else b""
        self.draining = False
        self.bodies_bytes = 0
        self.pages = pages
        self._deadlines = deadlines if deadlines is not None else Deadlines()
        self._connections = Connections()
        self._listeners: list[Listener] = []
        self._shares_port = shares_port

    @property
    def connections(self) -> int:
        """Number of open connections, including those in a TLS handshake."""
        return len(self._connections)

    async def listen(self, host: str, port: int, ssl: tls.SSLContext | None = None) -> int:
        """Accept clients at an address and return the port (chosen by the system if `port` is 0).

        Raises:
            OSError: the address is in use, or does not belong to this machine.
        """
        listener = Listener(self, lambda: ClientConnection(self), ssl)
        drawn = await listener.listen(host, port, shared=self._shares_port)
        self._listeners.append(listener)
        return drawn

    def stop_accepting(self) -> None:
        """Close the listening sockets; open connections stay."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    async def drain(self, timeout_s: float, *, idle_s: float = 0.5) -> None:
        """Drain: requests in flight are served, and each connection is closed after its response.

        Args:
            timeout_s: time after which the remaining connections are aborted.
            idle_s: time for which idle connections stay open, because a request may be on its way, and for which new
                connections are accepted, because a load balancer may not have noticed the drain yet.
        """
        self.draining = True
        idle_s = min(idle_s, timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                if idle_s > 0:
                    self._let_go(idle_s)
                    await asyncio.sleep(idle_s)
                    await self._accept_last()
                self.stop_accepting()
                self._let_go(idle_s)
                await self._connections.until_empty()
        except TimeoutError:
            self.stop_accepting()
            for connection in self._connections.all():
                connection.abort()
            await self._connections.until_empty()

    def _let_go(self, idle_s: float) -> None:
        until_s = asyncio.get_running_loop().time() + idle_s
        for connection in self._connections.all():
            connection.drain(until_s)

    async def _accept_last(self) -> None:
        """Accept the connections in the listening sockets' queues: closing a socket resets those in its queue."""
        for fileno in [fileno for listener in self._listeners for fileno in listener.filenos]:
            with suppress(OSError):  # the system has no such filters: some connections may be reset
                _refuse_syn(fileno)
        await asyncio.sleep(_HANDSHAKE_S)
        # If the loop was late, it may resume here before it has polled its sockets.
        seen = -1
        while seen != self.connections:
            seen = self.connections
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    # called by connections and listeners

    @property
    def times_s(self) -> tuple[float, float]:
        """See `Port`."""
        return self.limits.header_s, self.limits.linger_s

    def enter(self, new: AcceptedConnection) -> ConnectionOutcome:
        """See `ServerCallbacks`."""
        limits = self.limits
        self._deadlines.watch(new)
        now = asyncio.get_running_loop().time()
        return self._connections.enter(new, limits.connections, limits.connections_per_address, now)

    def leave(self, gone: AcceptedConnection) -> None:
        """See `ServerCallbacks`."""
        self._deadlines.forget(gone)
        self._connections.leave(gone)

    def accept_paused(self, reason: str, seconds: float) -> None:
        """See `Port`."""
        if self.hooks.accept_paused is not None:
            self.hooks.accept_paused(reason, seconds)

    def not_tls(self) -> None:
        """See `Port`."""
        if self.hooks.refused is not None:
            self.hooks.refused(400, b"", b"", "")


def _refuse_syn(fd: int) -> None:
    """Make the system drop new connection attempts to a listening socket; handshakes in progress continue.

    Raises:
        OSError: the system has no socket filters.
    """
    program = ctypes.create_string_buffer(_NO_SYN)
    with socket.socket(fileno=os.dup(fd)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 4, ctypes.addressof(program)))
