"""The HTTP server: listens, counts clients, lets them go without losing a request; ignores what is asked."""

from __future__ import annotations

import asyncio
import ctypes
import ipaddress
import os
import socket
import ssl as tls
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from kvroute.gateway.client import Client, Guard, Handler
from kvroute.gateway.deadlines import Deadlines
from kvroute.gateway.reading import Limits

__all__ = ["Door", "Handler", "Limits"]

_BACKLOG = 4096
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
    ) -> None:
        """
        Args:
            handler: called with each `Exchange`.
            limits: what a client may take.
            guard: refuses requests before their body is read; one that comes with its head it does not see.
            refused: called with status and path (empty: not known) for each answer that the door gives by itself.
            server_name: what the Server header says; empty: there is none.
            deadlines: shared with others, so that one timer serves all; None: an own one.
        """
        self.handler, self.guard, self.refused = handler, guard, refused
        self.limits = limits or Limits()
        self.server = b"server: %b\r\n" % server_name if server_name else b""
        self.draining = False
        self.bodies_bytes = 0
        self._deadlines = deadlines if deadlines is not None else Deadlines()
        self._clients: dict[Client, None] = {}
        self._servers: list[asyncio.Server] = []
        self._empty = asyncio.Event()

    @property
    def connections(self) -> int:
        """Clients that are connected."""
        return len(self._clients)

    async def listen(self, host: str, port: int, ssl: tls.SSLContext | None = None) -> int:
        """Accept clients at an address; returns the port (chosen by the system if 0 was given).

        Raises:
            OSError: the address is taken, or not of this machine.
        """
        loop = asyncio.get_running_loop()
        make = partial(
            loop.create_server,
            lambda: Client(self),
            ssl=ssl,
            backlog=_BACKLOG,
            ssl_handshake_timeout=self.limits.header_s if ssl else None,
        )
        own = bound(host, port)
        server = await (make(host, port) if own is None else make(sock=own))
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    def stop_accepting(self) -> None:
        """Close the listening sockets; clients that are connected stay."""
        for server in self._servers:
            server.close()
        self._servers.clear()

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
                await self._until_empty()
        except TimeoutError:
            self.stop_accepting()
            for client in tuple(self._clients):
                client.abort()
            await self._until_empty()

    def _let_go(self, idle_s: float) -> None:
        until_s = asyncio.get_running_loop().time() + idle_s
        for client in tuple(self._clients):
            client.drain(until_s)

    async def _accept_last(self) -> None:
        """Accept whoever is connected already: closing a listening socket resets those that wait in its queue."""
        for listening in [sock for server in self._servers for sock in server.sockets]:
            with suppress(OSError):  # of a system without such filters: there, some may be reset
                _refuse_syn(listening.fileno())
        await asyncio.sleep(_HANDSHAKE_S)
        # A loop that was late may wake here before it has looked at its sockets.
        seen = -1
        while seen != len(self._clients):
            seen = len(self._clients)
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def _until_empty(self) -> None:
        while self._clients:
            self._empty.clear()
            await self._empty.wait()

    # what clients say

    def enter(self, client: Client) -> int:
        """See `Frontage`."""
        self._clients[client] = None
        self._deadlines.watch(client)
        return self.limits.connections - len(self._clients)

    def leave(self, client: Client) -> None:
        """See `Frontage`."""
        self._clients.pop(client, None)
        self._deadlines.forget(client)
        if not self._clients:
            self._empty.set()


def bound(host: str, port: int) -> socket.socket | None:
    """A socket bound to an IP address, so that no resolver is asked for it; None where the host is a name.

    Raises:
        OSError: the address is taken, or not of this machine.
    """
    try:
        version = ipaddress.ip_address(host.partition("%")[0]).version
    except ValueError:
        return None
    own = socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if version == 6:
            own.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        own.bind((host, port))
    except OSError:
        own.close()
        raise
    own.setblocking(False)
    return own


def _refuse_syn(fd: int) -> None:
    """Have the system ignore attempts to connect to a listening socket; handshakes under way go on.

    Raises:
        OSError: it cannot.
    """
    program = ctypes.create_string_buffer(_NO_SYN)
    with socket.socket(fileno=os.dup(fd)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 4, ctypes.addressof(program)))
