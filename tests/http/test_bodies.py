"""Request bodies: which clients may send one, how many bytes the gateway holds, and that they are freed at once."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import resource
import socket
import struct
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
import uvloop
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.serve.rig import COMPLETIONS, MODEL, GatewayResponse, rig
from tests.waiting import HANGS_S, until

from kvroute.http.client.pool import UpstreamPool
from kvroute.http.client.upstream_connection import UpstreamConnection
from kvroute.http.deadlines import Deadlines
from kvroute.http.server.exchange import Exchange
from kvroute.http.server.request_parser import (
    BODY_MEMORY_RATIO,
    LIGHT_BYTES,
    RequestLimits,
    RequestParser,
)
from kvroute.http.server.server import HttpServer
from kvroute.serve.api.api_keys import hash_text

T = TypeVar("T")
MB = 1_000_000
KEY = "kvr_alice"
HEAD = b"POST %b HTTP/1.1\r\nHost: g\r\n" % COMPLETIONS.encode()
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` with a time limit, so that a hang fails the test."""

    async def bounded() -> T:
        async with asyncio.timeout(HANGS_S):
            return await main

    return uvloop.run(bounded())


@contextmanager
def no_collector() -> Iterator[None]:
    """Turn the garbage collector off: memory must be freed by reference counts."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def close(*streams: Streams) -> None:
    for _, writer in streams:
        writer.close()
    for _, writer in streams:
        with suppress(ConnectionError):
            await writer.wait_closed()


async def reset(*streams: Streams) -> None:
    """Close by a TCP reset. The end of a stream alone could come from a client that still waits for its response."""
    for _, writer in streams:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await close(*streams)


async def until_counted(server: HttpServer, nbytes: int) -> None:
    """Wait until the server has counted bodies of at least `nbytes`, or of none if `nbytes` is 0."""
    while server.bodies_bytes < nbytes * BODY_MEMORY_RATIO if nbytes else server.bodies_bytes:
        await asyncio.sleep(0)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("scenario", ["leaves", "slow", "answered"])
def test_memory_of_bodies_is_freed_without_the_garbage_collector(scenario: str) -> None:
    """The clients leave during the body, are rejected, or leave before the response."""
    rounds = 10 if scenario == "slow" else 30
    announced = 8 * MB if scenario == "answered" else 9 * MB

    async def main() -> int:
        taken = asyncio.Event()

        def handler(exchange: Exchange) -> None:
            exchange.on_gone = taken.set

        server = HttpServer(handler, RequestLimits(body_s=0.2 if scenario == "slow" else 60), deadlines=Deadlines(0.01))
        port = await server.listen("127.0.0.1", 0)
        before = resident_bytes()
        for _ in range(rounds):
            client = await asyncio.open_connection("127.0.0.1", port)
            client[1].write(HEAD + b"Content-Length: %d\r\n\r\n" % announced + bytes(8 * MB))
            if scenario != "slow":
                await until_counted(server, 8 * MB)
            else:
                assert b" 408 " in await client[0].readline()
                assert server.bodies_bytes == 0
            await (reset if scenario == "answered" else close)(client)
            await until_counted(server, 0)
        grown = resident_bytes() - before
        await server.drain(0)
        return grown

    with no_collector():
        assert run(main()) < 0.4 * rounds * 8 * MB


def test_parsers_and_connections_are_freed_after_use() -> None:
    async def main() -> None:
        parser = RequestParser(RequestLimits())
        parser.feed(HEAD + b"Content-Length: 5\r\n\r\n123")
        assert parser.body_bytes == 3
        parser.forget()
        assert parser.body_bytes == 0

        class Wire(asyncio.Transport):
            def is_closing(self) -> bool:
                return False

        pool = UpstreamPool("http://engine:1")
        connection = UpstreamConnection(pool)
        connection.connection_made(Wire())
        connection.connection_lost(None)
        watched = {id(parser), id(connection)}  # no weak references: a compiled object does not support them
        del parser, connection
        assert not [
            obj
            for obj in gc.get_objects()
            if id(obj) in watched and isinstance(obj, RequestParser | UpstreamConnection)
        ]

    with no_collector():
        run(main())


def test_the_total_size_of_bodies_is_bounded_and_small_bodies_are_always_accepted() -> None:
    """A request beyond the bound is rejected with Retry-After; a client that leaves makes room."""

    async def main() -> None:
        exchanges: list[Exchange] = []
        server = HttpServer(
            exchanges.append, RequestLimits(bodies_bytes=MB * BODY_MEMORY_RATIO), deadlines=Deadlines(0.01)
        )
        port = await server.listen("127.0.0.1", 0)

        async def send(nbytes: int, length: int = MB) -> Streams:
            client = await asyncio.open_connection("127.0.0.1", port)
            client[1].write(HEAD + b"Content-Length: %d\r\n\r\n" % length + bytes(nbytes))
            return client

        first = await send(600_000)
        await until_counted(server, 600_000)
        second = await send(600_000)
        response = await second[0].read()
        assert response.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1\r\n" in response
        assert b"bodies" in response
        small = await send(LIGHT_BYTES, LIGHT_BYTES)
        while not exchanges:
            await asyncio.sleep(0)
        await close(first)
        await until_counted(server, 0)
        third = await send(600_000, 600_000)
        while len(exchanges) < 2:
            await asyncio.sleep(0)
        assert server.bodies_bytes == 600_000 * BODY_MEMORY_RATIO, "a body counts until its response"
        exchanges[1].respond(200, b"{}")
        assert server.bodies_bytes == 0
        await close(second, third, small)
        await server.drain(0)

    run(main())


def test_a_body_is_subtracted_from_the_total_once_it_is_no_longer_needed() -> None:
    """The memory of the body is free while the response continues, and it is subtracted only once."""

    async def main() -> None:
        exchanges: list[Exchange] = []
        server = HttpServer(
            exchanges.append, RequestLimits(bodies_bytes=MB * BODY_MEMORY_RATIO), deadlines=Deadlines(0.01)
        )
        port = await server.listen("127.0.0.1", 0)
        client = await asyncio.open_connection("127.0.0.1", port)
        for number in (1, 2):
            client[1].write(HEAD + b"Content-Length: 600000\r\n\r\n" + bytes(600_000))
            while len(exchanges) < number:
                await asyncio.sleep(0)
            exchange = exchanges[-1]
            exchange.start(200, [], None)
            exchange.release_body()
            assert server.bodies_bytes == 0
            assert exchange.body == b""
            exchange.write(b"answer")
            exchange.release_body()
            exchange.end()
            exchange.release_body()
            assert server.bodies_bytes == 0
        await close(client)
        await server.drain(0)

    run(main())


def test_a_stream_frees_its_request_body_at_the_first_token() -> None:
    """The body is kept until the first token, because the request may be sent again until then. The response is
    complete."""

    async def main() -> None:
        async with rig() as gate:
            body = {"model": MODEL, "prompt": "word " * 40_000, "max_tokens": 60, "ignore_eos": True, "stream": True}
            response = await gate.post(body)
            assert response.body.count(b"data: ") == 61
            # The second stream is much longer than the test waits.
            streaming = asyncio.create_task(gate.post(body | {"max_tokens": 20_000}))
            await until(lambda: bool(gate.requests))
            (proxied,) = gate.requests
            assert proxied.state.exchange.body
            await until(lambda: proxied.state.exchange.body == b"")
            assert not proxied.state.completion.fields
            assert not proxied.state.over
            streaming.cancel()
            await asyncio.gather(streaming, return_exceptions=True)
            assert await gate.becomes_idle()

    run(main())


def test_large_bodies_are_parsed_one_at_a_time_and_small_ones_concurrently() -> None:
    """Each response is that of its own request; a client that has left meanwhile is skipped."""

    async def main() -> None:
        async with rig() as gate:

            async def send(number: int) -> GatewayResponse:
                more = {"user": "u" * (3_000_000 * (number % 2) + 200_000), "max_tokens": 2}
                body = io.BytesIO(json.dumps({"model": MODEL, "prompt": "word" * (100 + number), **more}).encode())
                async with gate.session.post(gate.url + COMPLETIONS, data=body) as response:
                    return GatewayResponse(response.status, {}, await response.read())

            head = HEAD + b"Content-Length: 3000002\r\n\r\n"
            disconnected = await asyncio.open_connection("127.0.0.1", gate.gateway.port)
            disconnected[1].write(head + b'"' + b"a" * 3_000_000 + b'"')
            await disconnected[1].drain()
            await close(disconnected)
            responses = await asyncio.gather(*map(send, range(6)))
            assert [response.status for response in responses] == [200] * 6
            tokens = [response.json["usage"]["prompt_tokens"] for response in responses]
            assert tokens == [100 + number for number in range(6)]
            assert await gate.becomes_idle()

    run(main())


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 200_000), st.integers(0, 200_000), st.sampled_from(["leave", "answer", "abort"])),
        max_size=6,
    ),
    st.sampled_from([reset, reset, reset, close]),
)
@example([(70_000, 0, "leave"), (60_000, 10_000, "leave"), (0, 70_000, "answer"), (20_000, 90_000, "abort")], close)
def test_bodies_of_disconnected_clients_are_not_counted(
    plan: list[tuple[int, int, str]], leave: Callable[..., Coroutine[Any, Any, None]]
) -> None:
    """Most clients leave by a reset, because the end of a stream is probed for a second before it counts as leaving."""

    async def main() -> None:
        server = HttpServer(
            lambda exchange: None, RequestLimits(bodies_bytes=300_000, linger_s=0.01), deadlines=Deadlines(0.01)
        )

        def handler(exchange: Exchange) -> None:
            how = exchange.query
            if how == b"answer":
                exchange.respond(200, b"{}")
            elif how == b"abort":
                exchange.abort()

        server.handler = handler
        port = await server.listen("127.0.0.1", 0)
        clients = []
        for sent, more, how in plan:
            client = await asyncio.open_connection("127.0.0.1", port)
            head = b"POST /?%b HTTP/1.1\r\nHost: g\r\nContent-Length: %d\r\n\r\n" % (how.encode(), sent + more)
            client[1].write(head + bytes(sent))
            await asyncio.sleep(0)
            client[1].write(bytes(more))
            clients.append(client)
        await leave(*clients)
        await until(lambda: not server.connections)
        counted = server.bodies_bytes
        await server.drain(0)
        assert counted == 0

    run(main())


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/embeddings", "/health"])
@pytest.mark.parametrize("framing", ["Content-Length: 50000000", "Transfer-Encoding: chunked", "Expect: 100-continue"])
def test_a_request_without_a_key_is_rejected_before_its_body(path: str, framing: str) -> None:
    """The response comes although no byte of the body was sent; with a key the gateway sends 100 Continue and waits for
    the body."""
    head = f"POST {path} HTTP/1.1\r\nHost: g\r\n{framing}\r\n"
    if framing.startswith("Expect"):
        head += "Content-Length: 50000000\r\n"

    async def main() -> None:
        async with rig(f"  keys: {{known: {{alice: '{hash_text(KEY)}'}}}}\n") as gate:
            client = await asyncio.open_connection("127.0.0.1", gate.gateway.port)
            client[1].write(head.encode() + b"Authorization: Bearer kvr_bob\r\n\r\n")
            response = await client[0].read()
            assert response.startswith(b"HTTP/1.1 401 ")
            assert b"www-authenticate: Bearer\r\n" in response
            assert b'"code":"invalid_api_key"' in response
            await close(client)
            page = await gate.metrics()
            assert 'kvroute_rejects_total{reason="key"} 1' in page
            kind = {COMPLETIONS: "completions", "/v1/embeddings": "embeddings"}.get(path, "other")
            assert f'kvroute_requests_total{{endpoint="{kind}",code="401"}} 1' in page
            if framing.startswith("Expect"):
                client = await asyncio.open_connection("127.0.0.1", gate.gateway.port)
                client[1].write(head.encode() + f"Authorization: Bearer {KEY}\r\n\r\n".encode())
                assert await client[0].readline() == b"HTTP/1.1 100 Continue\r\n"
                await close(client)

    run(main())


@pytest.mark.parametrize(
    ("raw", "status", "reason"),
    [
        (b"rubbish\r\n\r\n", 400, "malformed"),
        (HEAD + b"Content-Length: 2000000\r\n\r\n", 413, "too_large"),
        (HEAD + b"X: " + b"a" * 70_000 + b"\r\n\r\n", 431, "too_large"),
        (HEAD + b"Content-Length: 2\r\n\r\n1", 408, "too_slow"),
    ],
    ids=["400", "413", "431", "408"],
)
def test_rejections_by_the_http_server_are_counted(raw: bytes, status: int, reason: str) -> None:
    async def main() -> None:
        async with rig("  limits: {body: 1 MB, body_time: 50 ms}\n") as gate:
            client = await asyncio.open_connection("127.0.0.1", gate.gateway.port)
            client[1].write(raw)
            assert (await client[0].readline()).startswith(b"HTTP/1.1 %d " % status)
            page = (await gate.get("/metrics")).body.decode()
            kind = "completions" if status in (413, 408) else "other"
            assert f'kvroute_requests_total{{endpoint="{kind}",code="{status}"}} 1' in page
            assert f'kvroute_rejects_total{{reason="{reason}"}} 1' in page
            await close(client)

    run(main())
