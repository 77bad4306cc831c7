"""One instance on the network: its HTTP and KV ports, its engine, and its restart on request."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import RequestHandler

from kvroute.emulator.api.connection import ConnectionAborted, KvAddress
from kvroute.emulator.engine.engine import Engine
from kvroute.emulator.engine.faults import Faults
from kvroute.emulator.errors import ApiError
from kvroute.emulator.kv.kv_events import KvPublisher
from kvroute.emulator.kv_server import KvServer
from kvroute.types import Role, cannot_listen
from kvroute_engine import origins
from kvroute_engine.addresses import host_port

BODY_MAX = 1 << 28
BACKLOG = 1024
_FLUSH_S = 1.0
"""Longest wait for the output of a connection that a fault closes, in seconds."""
ANSWER_S = 0.02
"""Delay before a restart begins, in seconds, so that the request for it gets a response."""
LINGER_S = 0.2
"""Time that open requests have to detect that their connection is closed, in seconds."""


def listener(host: str, port: int) -> socket.socket:
    """Return a TCP socket that is bound but does not listen: the port is kept and connections are refused.

    Raises:
        InputError: the address cannot be bound.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise cannot_listen(host_port(host, port), error.errno, error.strerror or str(error)) from None
    bound.setblocking(False)
    return bound


RANK_HEADER = "X-data-parallel-rank"


@dataclass(slots=True, eq=False)
class InstanceServer:
    """One emulated instance. Call `bind`, `open` and `close` in this order; `restart` is possible while it is open.

    Data-parallel ranks of one server have one HTTP port, that of rank 0, and an engine and a KV port each.
    """

    host: str
    port: int
    """HTTP port; 0 until `bind` if the system chooses it, like `kv_port`."""
    kv_port: int
    answer: Answer
    new_engine: Callable[[], Engine]
    kv_server: KvServer
    publisher: KvPublisher | None
    faults: Faults
    role: Role
    """Role that it serves now; it can be changed at run time."""
    leader: InstanceServer | None = None
    """Rank 0 of its server, which has the HTTP port; None: it is the only rank, or rank 0."""
    followers: list[InstanceServer] = field(default_factory=list)
    """The other ranks of its server in order, if it is rank 0."""
    engine: Engine = field(init=False)
    started_s: float = 0.0
    """Start time of the engine, in seconds since the epoch."""
    _http: web.Server | None = None
    _open: list[asyncio.Server] = field(default_factory=list)
    _bound: list[socket.socket] = field(default_factory=list)
    """Bound sockets that keep the ports while the server is down."""
    _restart: asyncio.Task[None] | None = None
    _back: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to end the downtime early."""
    _turn: int = 0
    """Requests that named no rank."""

    @property
    def ranks(self) -> list[InstanceServer]:
        """The ranks of its server in order, if it is rank 0; without data parallelism only itself."""
        return [self, *self.followers]

    def for_request(self, request: web.BaseRequest) -> InstanceServer:
        """Return the rank that serves a request: the one that its header names, else the one with the fewest requests,
        in turn if several have.

        Raises:
            ApiError: the header names a rank that does not exist.
        """
        ranks, named = self.ranks, request.headers.get(RANK_HEADER, "")
        try:
            rank = int(named)
        except ValueError:
            self._turn += 1
            order = ranks[self._turn % len(ranks) :] + ranks[: self._turn % len(ranks)]
            return min(order, key=lambda candidate: candidate.engine.running + candidate.engine.waiting)
        if not 0 <= rank < len(ranks):
            raise ApiError(f"data_parallel_rank {rank} is out of range [0, {len(ranks)}).")
        return ranks[rank]

    @property
    def origin(self) -> KvAddress:
        """Address from which the instance's KV is fetched."""
        return KvAddress(self.host, self.kv_port, self.kv_server.kv_source.engine_id)

    def bind(self) -> None:
        """Bind the ports.

        Raises:
            InputError: a port cannot be bound.
        """
        if self.leader is None:
            self._bound.append(listener(self.host, self.port))
            self.port = self._bound[0].getsockname()[1]
        else:
            self.port = self.leader.port
        self._bound.append(listener(self.host, self.kv_port))
        self.kv_port = self._bound[-1].getsockname()[1]

    async def open(self) -> None:
        """Start the engine and listen."""
        loop = asyncio.get_running_loop()
        self.engine, self.started_s = self.new_engine(), time.time()
        self.kv_server.open(self.engine)
        (*http, kv), self._bound = self._bound, []
        if http:
            self._http = web.Server(
                self._answer, request_factory=_large_request, handler_cancellation=True, access_log=None
            )
            self._open.append(await loop.create_server(self._http, sock=http[0], backlog=BACKLOG))
        self._open.append(await loop.create_server(self.kv_server, sock=kv, backlog=BACKLOG))

    async def _down(self) -> None:
        """Drop everything at once, as when a process dies, but keep the ports."""
        http, self._http = self._http, None
        for server in self._open:
            server.close()
        self._open.clear()
        self.engine.close()
        self.kv_server.abort()
        if http is not None:
            for connection in http.connections:
                if connection.transport is not None:
                    connection.transport.abort()
            await http.shutdown(timeout=LINGER_S)
        ports = (self.port, self.kv_port) if self.leader is None else (self.kv_port,)
        self._bound = [listener(self.host, port) for port in ports]
        if self.publisher is not None:
            self.publisher.restart()

    async def close(self) -> None:
        """Stop, even if requests are in progress."""
        if self._restart is not None:
            self._restart.cancel()
            await asyncio.gather(self._restart, return_exceptions=True)
        if self._open:
            await self._down()
        for bound in self._bound:
            bound.close()
        if self.publisher is not None:
            await self.publisher.close()

    def restart(self, down_s: float) -> None:
        """Stop soon, refuse connections for `down_s` seconds and come back empty. No effect during a restart."""
        if self._restart is None or self._restart.done():
            self._back.clear()
            self._restart = asyncio.get_running_loop().create_task(self._come_back(down_s))

    async def come_back(self) -> None:
        """End the downtime of a restart at once. No effect without a restart in progress."""
        self._back.set()
        if self._restart is not None:
            await self._restart

    async def _come_back(self, down_s: float) -> None:
        await asyncio.sleep(ANSWER_S)
        for rank in self.ranks:
            await rank._down()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._back.wait(), down_s)
        for rank in reversed(self.ranks):  # the HTTP port last: all ranks are there for the first request
            await rank.open()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        why = origins.refusal(
            request.headers.get("Host", ""),
            request.headers.get("Origin"),
            known={self.host.lower()},
            any_host=not origins.is_loopback(self.host),
        )
        if why:
            return web.Response(status=403, body=ApiError(why, status=403).body(), content_type="application/json")
        try:
            return await self.answer(self, request)
        except ApiError as refusal:
            return web.Response(status=refusal.status, body=refusal.body(), content_type="application/json")
        except (
            ConnectionAborted,
            ConnectionResetError,
        ):  # an injected fault, or the client disconnected during a write
            await _reset(request)
            await asyncio.get_running_loop().create_future()  # until the loss of the connection cancels this task
            raise


async def _reset(request: web.BaseRequest) -> None:
    """Close the connection abruptly once the peer's side of it has all output so far: a fault after three tokens sends
    three tokens, however late the event loop is."""
    until_s = time.monotonic() + _FLUSH_S
    while request.transport is not None and request.transport.get_write_buffer_size() and time.monotonic() < until_s:
        await asyncio.sleep(0.001)
    if request.transport is not None:
        request.transport.abort()


Answer: TypeAlias = Callable[[InstanceServer, web.BaseRequest], Awaitable[web.StreamResponse]]


def _large_request(
    message: RawRequestMessage,
    payload: StreamReader,
    protocol: RequestHandler,
    writer: AbstractStreamWriter,
    task: asyncio.Task[None],
) -> web.BaseRequest:
    """Create a request with a higher size limit, because prompts exceed the framework's default."""
    loop = asyncio.get_running_loop()
    return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=BODY_MAX)
