"""Backpressure: a slow client slows its engine down; the bytes held in the gateway are bounded and none is lost."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

import httptools
import pytest
import uvloop
import xxhash
from tests.waiting import HANGS_S

from kvroute.http.client.call import Call, Failure
from kvroute.http.client.pool import UpstreamPool, request_bytes
from kvroute.http.deadlines import Deadlines
from kvroute.http.headers import Headers
from kvroute.http.server.exchange import Exchange
from kvroute.http.server.server import HttpServer, RequestLimits

T = TypeVar("T")
BLOCK_BYTES = 64 * 1024
TOTAL_BYTES = 256 * 1024 * 1024
HELD_MAX_BYTES = 64 * 1024 + 256 * 1024 + 1024
"""High-water mark of the transport, one read from the engine, and framing."""
SYSTEM_MAX_BYTES = 32 * 1024 * 1024
"""Upper bound of the bytes in the buffers of four sockets, at the largest size that the system gives them."""


Runner = Callable[[Coroutine[Any, Any, None]], None]
LOOPS = pytest.mark.parametrize("runner", [uvloop.run, asyncio.run], ids=["uvloop", "asyncio"])


def run(main: Coroutine[Any, Any, T], runner: Callable[[Coroutine[Any, Any, T]], T] = uvloop.run) -> T:
    """Run `main` with a time limit, so that a hang fails the test."""

    async def bounded() -> T:
        async with asyncio.timeout(HANGS_S):
            return await main

    return runner(bounded())


def block(index: int) -> bytes:
    return index.to_bytes(8, "big") * (BLOCK_BYTES // 8)


class Engine(asyncio.Protocol):
    """Answers every request with `TOTAL_BYTES`, as fast as the peer reads."""

    def __init__(self, chunked: bool) -> None:
        self.chunked = chunked
        self.sent_bytes = 0
        self.stopped = asyncio.Event()
        self.lost = asyncio.Event()
        self._flowing = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()

    def data_received(self, data: bytes) -> None:
        if not data.endswith(b"\r\n\r\n"):
            return
        framing = b"transfer-encoding: chunked" if self.chunked else b"content-length: %d" % TOTAL_BYTES
        self.transport.write(b"HTTP/1.1 200 OK\r\n%b\r\n\r\n" % framing)
        self._flowing = True
        self._flow()

    def _flow(self) -> None:
        while self._flowing and self.sent_bytes < TOTAL_BYTES:
            data = block(self.sent_bytes // BLOCK_BYTES)
            self.sent_bytes += BLOCK_BYTES
            self.transport.write(b"%x\r\n%b\r\n" % (BLOCK_BYTES, data) if self.chunked else data)
            if self.sent_bytes == TOTAL_BYTES and self.chunked:
                self.transport.write(b"0\r\n\r\n")

    def pause_writing(self) -> None:
        self._flowing = False
        self.stopped.set()

    def resume_writing(self) -> None:
        self._flowing = True
        self.stopped.clear()
        self._flow()


class MinimalProxy:
    """Relays from an engine to a client, with backpressure connected at both ends: the minimal owner of an exchange."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.forwarded_bytes = self.unsent_max_bytes = self.pauses = 0
        self.paused = asyncio.Event()
        self.failures: list[Failure] = []

    def join(self, call: Call) -> None:
        def pause() -> None:
            self.pauses += 1
            self.paused.set()
            call.pause()

        self.exchange.on_pause, self.exchange.on_resume, self.exchange.on_gone = pause, call.resume, call.abort

    def on_head(self, status: int, headers: Headers) -> None:
        length = next((int(value) for name, value in headers if name == b"content-length"), None)
        self.exchange.start(status, [], length)

    def on_body(self, data: bytes) -> None:
        self.forwarded_bytes += len(data)
        self.exchange.write(data)
        self.unsent_max_bytes = max(self.unsent_max_bytes, self.exchange.unsent_bytes)

    def on_end(self) -> None:
        self.exchange.end()

    def on_failure(self, failure: Failure) -> None:
        self.failures.append(failure)
        self.exchange.abort()


class Reader(asyncio.Protocol):
    """A client that reads nothing until the test resumes it; it counts and hashes the body."""

    def __init__(self) -> None:
        self.body_bytes = 0
        self.hash = xxhash.xxh64()
        self.done = asyncio.Event()
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(b"GET / HTTP/1.1\r\nHost: gateway\r\n\r\n")

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        self.body_bytes += len(data)
        self.hash.update(data)

    def on_message_complete(self) -> None:
        self.done.set()


class ProxySetup:
    """An engine, a gateway that only relays, and clients."""

    def __init__(self, chunked: bool, limits: RequestLimits | None = None) -> None:
        self.chunked = chunked
        self.limits = limits
        self.engines: list[Engine] = []
        self.proxies: list[MinimalProxy] = []
        self.started = asyncio.Event()
        self._clients: list[asyncio.Transport] = []

    async def __aenter__(self) -> ProxySetup:
        loop = asyncio.get_running_loop()

        def engine() -> Engine:
            self.engines.append(Engine(self.chunked))
            return self.engines[-1]

        self._server = await loop.create_server(engine, "127.0.0.1", 0)
        self._deadlines = Deadlines(0.01)
        port = self._server.sockets[0].getsockname()[1]
        self.pool = UpstreamPool(f"http://127.0.0.1:{port}", deadlines=self._deadlines)
        self.http_server = HttpServer(self._handle, self.limits, deadlines=self._deadlines)
        self._port = await self.http_server.listen("127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self._clients:
            client.abort()
        await self.http_server.drain(0)
        self.pool.close()
        while self.pool.connections:
            await asyncio.sleep(0)
        self._server.close()
        assert (self.pool.busy, self.pool.idle, self.http_server.connections) == (0, 0, 0)

    def _handle(self, exchange: Exchange) -> None:
        proxy = MinimalProxy(exchange)
        request = request_bytes(b"GET", b"/", self.pool.host, [], b"")
        proxy.join(self.pool.send(request, proxy, first_byte_s=20, idle_s=20))
        self.proxies.append(proxy)
        self.started.set()

    async def client(self) -> Reader:
        sock = socket.create_connection(("127.0.0.1", self._port))
        sock.setblocking(False)
        _, reader = await asyncio.get_running_loop().create_connection(Reader, sock=sock)
        reader.transport.pause_reading()
        self._clients.append(reader.transport)
        return reader

    async def until_paused(self) -> tuple[Engine, MinimalProxy]:
        """Wait until the engine of the latest client cannot send any more."""
        await self.started.wait()
        proxy = self.proxies[-1]
        await proxy.paused.wait()
        engine = self.engines[-1]
        await engine.stopped.wait()
        return engine, proxy


def check_bounded_and_whole(chunked: bool, runner: Runner) -> None:
    async def main() -> None:
        async with ProxySetup(chunked) as setup:
            reader = await setup.client()
            engine, proxy = await setup.until_paused()
            assert reader.body_bytes == 0
            assert proxy.unsent_max_bytes <= HELD_MAX_BYTES
            assert proxy.forwarded_bytes <= SYSTEM_MAX_BYTES
            assert engine.sent_bytes <= SYSTEM_MAX_BYTES
            reader.transport.resume_reading()
            await reader.done.wait()
            expected = xxhash.xxh64()
            for index in range(TOTAL_BYTES // BLOCK_BYTES):
                expected.update(block(index))
            assert (reader.body_bytes, reader.hash.digest()) == (TOTAL_BYTES, expected.digest())
            assert proxy.unsent_max_bytes <= HELD_MAX_BYTES
            assert proxy.pauses > 0
            assert setup.pool.idle == 1

    run(main(), runner)


@LOOPS
def test_a_response_of_known_length_waits_while_the_client_does_not_read(runner: Runner) -> None:
    check_bounded_and_whole(False, runner)


@LOOPS
def test_a_chunked_response_waits_while_the_client_does_not_read(runner: Runner) -> None:
    check_bounded_and_whole(True, runner)


def test_a_stalled_client_delays_no_other_client() -> None:
    async def main() -> None:
        async with ProxySetup(chunked=True) as setup:
            stalled = await setup.client()
            await setup.until_paused()
            reader = await setup.client()
            reader.transport.resume_reading()
            await reader.done.wait()
            assert reader.body_bytes == TOTAL_BYTES
            assert stalled.body_bytes == 0

    run(main())


def test_a_client_that_never_reads_is_disconnected_and_its_engine_released() -> None:
    async def main() -> None:
        async with ProxySetup(chunked=True, limits=RequestLimits(stall_s=0.05)) as setup:
            await setup.client()
            engine, proxy = await setup.until_paused()
            await engine.lost.wait()
            assert proxy.exchange.gone
            assert proxy.failures == []
            assert setup.pool.busy == 0

    run(main())


@pytest.mark.parametrize(("n", "padding", "answer_bytes"), [(400, 0, 300_000), (1500, 600, 100_000)])
def test_a_pipeline_with_unread_responses_is_paused_and_completed_later(
    n: int, padding: int, answer_bytes: int
) -> None:
    """Responses come in order, each one larger than the high-water mark; the requests arrive in one read or in
    several."""
    request = b"GET /%%d HTTP/1.1\r\nHost: gateway\r\nX-Padding: %b\r\n\r\n" % (b"x" * padding)

    async def main() -> None:
        served = 0
        paused = asyncio.Event()

        def handler(exchange: Exchange) -> None:
            nonlocal served
            served += 1
            exchange.on_pause = paused.set
            exchange.respond(200, exchange.path.ljust(answer_bytes))

        server = HttpServer(handler)
        port = await server.listen("127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.writelines([request % index for index in range(n)])
        await paused.wait()
        for _ in range(100):
            await asyncio.sleep(0)
            assert served * answer_bytes <= SYSTEM_MAX_BYTES
        for index in range(n):
            await reader.readuntil(b"\r\n\r\n")
            body = await reader.readexactly(answer_bytes)
            assert body.rstrip() == b"/%d" % index
        assert served == n
        writer.close()
        await server.drain(0)

    run(main())


def test_a_client_that_sends_more_during_its_request_gets_backpressure() -> None:
    async def main() -> None:
        served: list[Exchange] = []
        server = HttpServer(served.append)
        port = await server.listen("127.0.0.1", 0)
        sock = socket.create_connection(("127.0.0.1", port))
        sock.setblocking(False)
        data = b"GET / HTTP/1.1\r\nHost: gateway\r\n\r\n" * 2000
        sent_bytes = refusals = 0
        while refusals < 200 and sent_bytes < 2 * SYSTEM_MAX_BYTES:
            try:
                sent_bytes += sock.send(data)
                refusals = 0
            except BlockingIOError:
                refusals += 1
            await asyncio.sleep(0)
        assert sent_bytes <= SYSTEM_MAX_BYTES
        assert len(served) == 1
        sock.close()
        await server.drain(0)

    run(main())
