"""The HTTP server: listens, counts clients, lets them go without losing a request; ignores what is asked."""

from __future__ import annotations

import asyncio
import ssl as tls

from kvroute.gateway.client import Client, Handler
from kvroute.gateway.deadlines import Deadlines
from kvroute.gateway.reading import Limits

__all__ = ["Door", "Handler", "Limits"]

_BACKLOG = 4096


class Door:
    """Gives every request of every client to one handler."""

    def __init__(
        self,
        handler: Handler,
        limits: Limits | None = None,
        *,
        server_name: bytes = b"kvroute",
        deadlines: Deadlines | None = None,
    ) -> None:
        """
        Args:
            handler: called with each `Exchange`.
            limits: what a client may take.
            server_name: what the Server header says; empty: there is none.
            deadlines: shared with others, so that one timer serves all; None: an own one.
        """
        self.handler = handler
        self.limits = limits or Limits()
        self.server = b"server: %b\r\n" % server_name if server_name else b""
        self.draining = False
        self._deadlines = deadlines or Deadlines()
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
        server = await loop.create_server(
            lambda: Client(self),
            host,
            port,
            ssl=ssl,
            backlog=_BACKLOG,
            ssl_handshake_timeout=self.limits.header_s if ssl else None,
        )
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
            idle_s: so long a connection without a request stays open: one may be on its way, and would be lost.
        """
        self.stop_accepting()
        self.draining = True
        loop = asyncio.get_running_loop()
        for client in tuple(self._clients):
            client.drain(loop.time() + min(idle_s, timeout_s))
        try:
            async with asyncio.timeout(timeout_s):
                await self._until_empty()
        except TimeoutError:
            for client in tuple(self._clients):
                client.abort()
            await self._until_empty()

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
