"""The buffer server: a port for engines, which speaks the connector's protocol, and an HTTP port for routers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from aiohttp import web

from kvroute_engine.addresses import host_port
from kvroute_engine.block_store.location import StoreLocation
from kvroute_engine.buffer.arena import check_lockable
from kvroute_engine.buffer.reads import NodeReads
from kvroute_engine.buffer.routes import Routes
from kvroute_engine.buffer.shards import Shards
from kvroute_engine.connector.options import ConnectorSettings
from kvroute_engine.connector.transfer.channel import FramedSocket
from kvroute_engine.connector.transfer.handshake import accept_handshake
from kvroute_engine.connector.transfer.listener import Admit, PeerListener
from kvroute_engine.errors import cannot_listen
from kvroute_engine.timed_connection import ConnectionLimits, answer_whole, listen

COLLECT_S = 0.5
"""Interval of the search for blocks whose hold time is over, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSpec:
    """Settings of a buffer server."""

    location: StoreLocation
    quota_bytes: int
    """Host memory for blocks."""
    lock_memory: bool = False
    """Keep this memory from being swapped out."""
    host: str = "127.0.0.1"
    """Address of both ports."""
    port: int = 0
    """HTTP port for routers; 0: the system chooses."""
    options: ConnectorSettings = field(default_factory=ConnectorSettings)
    """Options of the port for engines, as those of the connector."""
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    """Times within which a router must send a request."""


class BufferServer:
    """`start` opens both ports; `close` closes them and frees everything."""

    def __init__(self, settings: BufferSpec) -> None:
        """Create the server; nothing is opened yet.

        Raises:
            StoreError: the store cannot be used.
            InputError: so much memory cannot be locked.
        """
        settings.location.check()
        if settings.lock_memory:
            check_lockable(settings.quota_bytes)
        self._settings, self._token = settings, settings.options.secret()
        self._shards = Shards(
            settings.location,
            settings.options,
            settings.quota_bytes,
            self._collect_soon,
            lock_memory=settings.lock_memory,
        )
        self._reads = NodeReads(self._shards)
        self._routes = Routes(self._reads, lambda: self.data, settings.quota_bytes, settings.host)
        self._listener: PeerListener | None = None
        self._runner: web.ServerRunner | None = None
        self._http: asyncio.Server | None = None
        self._collector: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def url(self) -> str:
        """URL for routers."""
        assert self._http is not None
        port = self._http.sockets[0].getsockname()[1]
        return f"http://{host_port(self._settings.options.advertised(), port)}"

    @property
    def data(self) -> str:
        """`host:port` for engines."""
        assert self._listener is not None
        return host_port(self._settings.options.advertised(), self._listener.port)

    async def start(self) -> None:
        """Open both ports.

        Raises:
            InputError: a port cannot be opened.
        """
        settings, self._loop = self._settings, asyncio.get_running_loop()
        options = settings.options
        try:
            self._listener = PeerListener(options.host, options.port, options.timeout_s, self._accepted)
        except OSError as error:
            raise cannot_listen(host_port(options.host, options.port), error.errno, error.strerror or "") from None
        handlers = web.Server(lambda request: answer_whole(request, self._routes.answer), access_log=None)
        self._runner = web.ServerRunner(handlers)
        await self._runner.setup()
        try:
            self._http = await listen(handlers, settings.host, settings.port, settings.limits)
        except OSError as error:
            raise cannot_listen(host_port(settings.host, settings.port), error.errno, error.strerror or "") from None
        self._collector = self._loop.create_task(self._collect_forever())

    async def close(self) -> None:
        """Close both ports; reads in progress fail."""
        if self._collector is not None:
            self._collector.cancel()
        if self._http is not None:
            self._http.close()
        if self._runner is not None:
            await self._runner.cleanup()
        loop = asyncio.get_running_loop()
        if self._listener is not None:
            await loop.run_in_executor(None, self._shards.close)
            await loop.run_in_executor(None, self._listener.close)
        self._reads.close()

    def _accepted(self, channel: FramedSocket, peer: str, admit: Admit) -> None:
        """Serve one engine, in a thread."""
        hello = accept_handshake(channel, self._token, self._settings.options, admit, self._shards.mismatch)
        self._shards.of(hello.layout).server.serve(channel, hello.instance or peer)

    def _collect_soon(self) -> None:
        """Collect released blocks in the event loop. Called from any thread."""
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._reads.collect)

    async def _collect_forever(self) -> None:
        while True:
            await asyncio.sleep(COLLECT_S)
            self._reads.collect()
