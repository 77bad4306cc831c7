"""The HTTP server: listens, counts clients, lets them go without losing a request; ignores what is asked."""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import ssl as tls
import struct
from collections.abc import Callable
from contextlib import suppress

from kvroute.gateway.client import Client, Guard, Handler
from kvroute.gateway.connections import Connection, Connections, Entry
from kvroute.gateway.deadlines import Deadlines
from kvroute.gateway.listener import Listener
from kvroute.gateway.reading import Limits
from kvroute.gateway.web_pages import WebPages

__all__ = ["Door", "Handler", "Limits"]

_HANDSHAKE_S = 0.05
"""For so long connections that had begun before the door closed may still come to stand."""
_SO_ATTACH_FILTER = 26
_NO_SYN = b"".join(
    struct.pack("=HBBI", *step) for step in ((0x30, 0, 0, 13), (0x45, 0, 1, 2), (0x06, 0, 0, 0), (0x06, 0, 0, 1 << 31))
)
"""A socket filter (classic BPF): load byte 13 of the TCP header; with its SYN bit drop the packet, else keep it."""


class Door:
    """Gives every request of every client to one handler."""

    def __init__(
        self,
        handler: Handler,
        limits: Limits | None = None,
        *,
        guard: Guard | None = None,
        refused: Callable[[int, bytes], None] | None = None,
        server_name: bytes = b"kvroute",
        deadlines: Deadlines | None = None,
        pages: WebPages | None = None,
    ) -> None:
        """
        Args:
            handler: called with each `Exchange`.
            limits: what a client may take.
            guard: refuses requests before their body is read; one that comes with its head it does not see.
            refused: called with status and path (empty: not known) for each answer that the door gives by itself.
            server_name: what the Server header says; empty: there is none.
            deadlines: shared with others, so that one timer serves all; None: an own one.
            pages: which web pages may send requests; None: all.
        """
        self.handler, self.guard, self.refused = handler, guard, refused
        self.limits = limits or Limits()
        self.server = b"server: %b\r\n" % server_name if server_name else b""
        self.draining = False
        self.bodies_bytes = 0
        self.pages = pages
        self._deadlines = deadlines if deadlines is not None else Deadlines()
        self._connections = Connections()
        self._listeners: list[Listener] = []

    @property
    def connections(self) -> int:
        """Clients that are connected, those in a TLS handshake among them."""
        return len(self._connections)

    async def listen(self, host: str, port: int, ssl: tls.SSLContext | None = None) -> int:
        """Accept clients at an address; returns the port (chosen by the system if 0 was given).

        Raises:
            OSError: the address is taken, or not of this machine.
        """
        listener = Listener(self, lambda: Client(self), ssl)
        drawn = await listener.listen(host, port)
        self._listeners.append(listener)
        return drawn

    def stop_accepting(self) -> None:
        """Close the listening sockets; clients that are connected stay."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    async def drain(self, timeout_s: float, *, idle_s: float = 0.5) -> None:
        """Let all clients go: requests under way are answered, and each connection is closed behind its answer.

        Args:
            timeout_s: after so long, what is not answered is cut off.
            idle_s: so long a connection without a request stays open, for one may be on its way and would be lost; and
                so long new clients are taken, for a load balancer may not know yet.
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
        """Accept whoever is connected already: closing a listening socket resets those that wait in its queue."""
        for fileno in [fileno for listener in self._listeners for fileno in listener.filenos]:
            with suppress(OSError):  # of a system without such filters: there, some may be reset
                _refuse_syn(fileno)
        await asyncio.sleep(_HANDSHAKE_S)
        # A loop that was late may wake here before it has looked at its sockets.
        seen = -1
        while seen != self.connections:
            seen = self.connections
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    # what connections say

    @property
    def times_s(self) -> tuple[float, float]:
        """See `Port`."""
        return self.limits.header_s, self.limits.linger_s

    def enter(self, new: Connection) -> Entry:
        """See `Frontage`."""
        limits = self.limits
        self._deadlines.watch(new)
        now = asyncio.get_running_loop().time()
        return self._connections.enter(new, limits.connections, limits.connections_per_address, now)

    def leave(self, gone: Connection) -> None:
        """See `Frontage`."""
        self._deadlines.forget(gone)
        self._connections.leave(gone)

    def not_tls(self) -> None:
        """See `Port`."""
        if self.refused is not None:
            self.refused(400, b"")


def _refuse_syn(fd: int) -> None:
    """Have the system ignore attempts to connect to a listening socket; handshakes under way go on.

    Raises:
        OSError: it cannot.
    """
    program = ctypes.create_string_buffer(_NO_SYN)
    with socket.socket(fileno=os.dup(fd)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 4, ctypes.addressof(program)))
