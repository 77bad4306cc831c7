"""The HTTP server by worked examples over real sockets: framing, order, limits, clients that leave."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
import uvloop
from tests.waiting import HANGS_S, until

from kvroute.gateway.http.deadlines import Deadlines
from kvroute.gateway.http.exchange import Exchange
from kvroute.gateway.http.request_parser import RequestParser
from kvroute.gateway.http.server import HttpServer, Limits

T = TypeVar("T")
HOST = b"Host: gateway\r\n"
LAST = HOST + b"Connection: close\r\n"


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` with a time limit, so that a hang fails the test."""

    async def bounded() -> T:
        async with asyncio.timeout(HANGS_S):
            return await main

    return uvloop.run(bounded())


def echo(exchange: Exchange) -> None:
    seen = {
        "method": exchange.method.decode(),
        "path": exchange.path.decode(),
        "query": exchange.query.decode(),
        "body": exchange.body.decode(),
        "x": [value.decode() for name, value in exchange.headers if name == b"x"],
    }
    exchange.respond(200, json.dumps(seen).encode())


@asynccontextmanager
async def open_door(
    handler: Callable[[Exchange], None], limits: Limits | None = None
) -> AsyncIterator[tuple[HttpServer, int]]:
    door = HttpServer(handler, limits, deadlines=Deadlines(0.01))
    port = await door.listen("127.0.0.1", 0)
    try:
        yield door, port
    finally:
        await door.drain(0)
        assert door.connections == 0


@asynccontextmanager
async def client(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def talk(port: int, data: bytes) -> bytes:
    """Send the data and return everything that the server sends until it closes."""
    async with client(port) as (reader, writer):
        writer.write(data)
        return await reader.read()


def exchange_bytes(data: bytes, handler: Callable[[Exchange], None] = echo, limits: Limits | None = None) -> bytes:
    async def main() -> bytes:
        async with open_door(handler, limits) as (_, port):
            return await talk(port, data)

    return run(main())


def answers(raw: bytes) -> list[tuple[int, dict[bytes, bytes], bytes]]:
    """Parse a sequence of responses with content-length into status, headers and body."""
    found = []
    while raw:
        head, _, raw = raw.partition(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        headers = dict(line.split(b": ", 1) for line in lines)
        length = int(headers.get(b"content-length", b"0"))
        found.append((int(first.split()[1]), headers, raw[:length]))
        raw = raw[length:]
    return found


def only_fault(raw: bytes) -> tuple[int, str]:
    """Check that the only response is an error in OpenAI's JSON form with `connection: close`; return its status and
    message."""
    [(status, headers, body)] = answers(raw)
    assert headers[b"connection"] == b"close"
    assert headers[b"content-type"] == b"application/json"
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return status, error["message"]


def test_keep_alive_serves_one_request_after_the_other_on_one_connection() -> None:
    async def main() -> None:
        async with open_door(echo) as (door, port), client(port) as (reader, writer):
            for index in range(3):
                writer.write(b"POST /v1/%d?q=1 HTTP/1.1\r\n" % index + HOST + b"Content-Length: 2\r\n\r\nhi")
                head = await reader.readuntil(b"\r\n\r\n")
                assert b"connection" not in head
                length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
                seen = json.loads(await reader.readexactly(length))
                assert (seen["path"], seen["query"], seen["body"]) == (f"/v1/{index}", "q=1", "hi")
            assert door.connections == 1

    run(main())


def test_a_chunked_request_is_put_together_and_its_trailers_are_dropped() -> None:
    data = (
        b"POST / HTTP/1.1\r\n"
        + LAST
        + b"X: a\r\nTransfer-Encoding: chunked\r\n\r\n3;ext=1\r\nabc\r\nA\r\n0123456789\r\n0\r\nX: b\r\n\r\n"
    )
    [(status, _, body)] = answers(exchange_bytes(data))
    assert status == 200
    assert json.loads(body)["body"] == "abc0123456789"
    assert json.loads(body)["x"] == ["a"]


def test_pipelined_requests_are_answered_in_order_however_late_each_answer_comes() -> None:
    waiting: list[Exchange] = []

    async def main() -> list[tuple[int, dict[bytes, bytes], bytes]]:
        arrived = asyncio.Event()

        def handler(exchange: Exchange) -> None:
            waiting.append(exchange)
            arrived.set()

        async with open_door(handler) as (_, port), client(port) as (reader, writer):
            writer.write(b"".join(b"GET /%d HTTP/1.1\r\n%b\r\n" % (i, HOST) for i in range(5)))
            writer.write(b"GET /5 HTTP/1.1\r\n" + LAST + b"\r\n")
            for index in range(6):
                await arrived.wait()
                arrived.clear()
                assert len(waiting) == index + 1, "the next request waits for the answer to this one"
                waiting[index].respond(200, waiting[index].path)
            return answers(await reader.read())

    assert [body for _, _, body in run(main())] == [b"/%d" % i for i in range(6)]


def test_a_long_pipeline_is_served_without_recursion_and_with_bounded_parsing_ahead() -> None:
    n = 20_000
    data = (b"GET / HTTP/1.1\r\n" + HOST + b"\r\n") * n + b"GET /last HTTP/1.1\r\n" + LAST + b"\r\n"

    async def main() -> bytes:
        async with (
            open_door(lambda exchange: exchange.respond(204, b"")) as (_, port),
            client(port) as (reader, writer),
        ):
            writer.write(data)
            return await reader.read()

    assert run(main()).count(b"HTTP/1.1 204 No Content\r\n") == n + 1


@pytest.mark.parametrize(
    ("head", "keeps"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\n", True),
        (b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n", False),
        (b"GET / HTTP/1.0\r\n", False),
        (b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n", True),
    ],
    ids=["1.1", "1.1-close", "1.0", "1.0-keep-alive"],
)
def test_the_connection_is_kept_as_the_client_asks(head: bytes, keeps: bool) -> None:
    async def main() -> None:
        async with open_door(echo) as (_, port), client(port) as (reader, writer):
            writer.write(head + b"\r\n")
            answer = await reader.readuntil(b"\r\n\r\n")
            assert (b"connection: close" in answer) == (not keeps)
            if keeps:
                await reader.readuntil(b"}")
                writer.write(b"GET / HTTP/1.1\r\n" + LAST + b"\r\n")
            assert (b"HTTP/1.1 200 OK" in await reader.read()) == keeps

    run(main())


def test_head_gets_the_head_alone_and_the_next_answer_follows_it() -> None:
    raw = exchange_bytes(b"HEAD / HTTP/1.1\r\n" + HOST + b"\r\nGET / HTTP/1.1\r\n" + LAST + b"\r\n")
    head, _, rest = raw.partition(b"\r\n\r\n")
    assert b"content-length: " in head
    assert rest.startswith(b"HTTP/1.1 200 OK\r\n")


def test_a_streamed_answer_to_head_has_no_body() -> None:
    def handler(exchange: Exchange) -> None:
        exchange.start(200, [], None)
        exchange.write(b"data")
        exchange.end()

    raw = exchange_bytes(b"HEAD / HTTP/1.1\r\n" + LAST + b"\r\n", handler)
    assert raw.endswith(b"connection: close\r\n\r\n")


def test_a_body_of_unknown_length_ends_an_old_clients_connection_even_if_it_would_keep_it() -> None:
    def handler(exchange: Exchange) -> None:
        exchange.start(200, [], None)
        exchange.write(b"all")
        exchange.end()

    raw = exchange_bytes(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", handler)
    assert raw.endswith(b"connection: close\r\n\r\nall")


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        (b"http://h:1/a/b?c=/d", "/a/b", "c=/d"),
        (b"HTTPS://h?x=/", "/", "x=/"),
        (b"http://h", "/", ""),
        (b"/a?b?c", "/a", "b?c"),
    ],
    ids=["absolute", "no-path", "bare", "origin"],
)
def test_every_form_of_target_is_read(target: bytes, path: str, query: str) -> None:
    [(_, _, body)] = answers(exchange_bytes(b"GET " + target + b" HTTP/1.1\r\n" + LAST + b"\r\n"))
    assert (json.loads(body)["path"], json.loads(body)["query"]) == (path, query)


def test_a_client_that_waits_for_100_is_told_to_go_on_and_only_then() -> None:
    async def main() -> None:
        async with open_door(echo) as (_, port), client(port) as (reader, writer):
            head = b"POST / HTTP/1.1\r\n" + LAST + b"Expect: 100-continue\r\nContent-Length: 4\r\n\r\n"
            writer.write(head)
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"body")
            [(status, _, body)] = answers(await reader.read())
            assert (status, json.loads(body)["body"]) == (200, "body")
            assert b"100 Continue" not in await talk(port, head + b"body")

    run(main())


def test_nobody_who_has_begun_the_body_waits_for_100() -> None:
    reader = RequestParser(Limits())
    head = b"POST / HTTP/1.1\r\n" + HOST + b"Expect: 100-continue\r\nContent-Length: 4\r\n\r\n"
    reader.feed(head)
    assert reader.awaits_continue
    reader.feed(b"bo")
    assert not reader.awaits_continue


def test_a_body_that_is_too_large_is_refused_instead_of_continued() -> None:
    head = b"POST / HTTP/1.1\r\n" + HOST + b"Expect: 100-continue\r\nContent-Length: 11\r\n\r\n"
    status, message = only_fault(exchange_bytes(head, limits=Limits(body_bytes=10)))
    assert (status, "larger than 10 bytes; send a shorter prompt" in message) == (413, True)
    assert "`gateway.limits.body`" in message


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 4\r\n\r\nbody", b"Transfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n"]
)
def test_an_offer_to_upgrade_is_passed_over_and_the_body_is_still_a_body(framing: bytes) -> None:
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    data = b"POST /a HTTP/1.1\r\n" + HOST + upgrade + framing + b"GET /b HTTP/1.1\r\n" + LAST + b"\r\n"
    first, second = answers(exchange_bytes(data))
    assert (json.loads(first[2])["path"], json.loads(first[2])["body"]) == ("/a", "body")
    assert json.loads(second[2])["path"] == "/b"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"rubbish\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", 400),
        (b"GET nowhere HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX : a\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: a\r\n folded\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: a\x00b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: a\rb\r\n\r\n", 400),
        (b"GET / HTTP/1.1\nHost: a\n\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1, 1\r\n\r\nx", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3 \r\nabc\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 501),
        (b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n", 501),
        (b"PROPFIND / HTTP/1.1\r\nHost: a\r\n\r\n", 501),
        (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505),
        (b"GET / HTTP/1.2\r\nHost: a\r\n\r\n", 505),
        (b"GET /\r\n\r\n", 505),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    ],
    ids=lambda value: None if isinstance(value, bytes) else str(value),
)
def test_what_could_be_read_in_two_ways_is_refused(data: bytes, status: int) -> None:
    def handler(exchange: Exchange) -> None:
        raise AssertionError("nothing of this is a request")

    assert only_fault(exchange_bytes(data, handler))[0] == status


def test_what_is_fine_before_a_fault_is_answered_before_the_fault() -> None:
    good, bad = answers(exchange_bytes(b"GET /a HTTP/1.1\r\n" + HOST + b"\r\nrubbish\r\n\r\n"))
    assert (good[0], bad[0]) == (200, 400)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 300 + b"\r\n\r\n", 431),
        (b"GET /" + b"a" * 300 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: a\r\n" * 8 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 100_000, 431),
        (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X" * 100_000, 431),
        (b"\r\n" * 50_000, 431),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: " + b"a" * 100_000, 431),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"a" * 100_000, 431),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 65\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + b"10\r\n0123456789abcdef\r\n" * 5, 413),
    ],
    ids=[
        "value",
        "target",
        "lines",
        "endless-value",
        "endless-name",
        "endless-blank",
        "trailer",
        "extension",
        "length",
        "chunks",
    ],
)
def test_nobody_may_send_more_than_the_limits(data: bytes, status: int) -> None:
    limits = Limits(header_bytes=256, header_count=8, body_bytes=64)
    assert only_fault(exchange_bytes(data, limits=limits))[0] == status


SOON_S = 0.02


@pytest.mark.parametrize(
    ("data", "limits", "told"),
    [
        (b"", Limits(header_s=SOON_S), []),
        (b"G", Limits(header_s=SOON_S), [408]),
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\nGET / HTTP/1.1\r\nHost: ", Limits(header_s=SOON_S), [200, 408]),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n1", Limits(header_s=99, body_s=SOON_S), [408]),
        (
            b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n",
            Limits(header_s=99, body_s=SOON_S),
            [408],
        ),
    ],
    ids=["nothing", "letter", "second", "body", "chunks"],
)
def test_whoever_is_too_slow_is_told_so_and_let_go(data: bytes, limits: Limits, told: list[int]) -> None:
    assert [status for status, _, _ in answers(exchange_bytes(data, limits=limits))] == told


@pytest.mark.parametrize(
    ("head", "limits"),
    [
        (b"GET / HTTP/1.1\r\nX: ", Limits(header_s=0.1, header_bytes=1 << 30)),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9999999\r\n\r\n", Limits(header_s=99, body_s=0.1)),
    ],
    ids=["head", "body"],
)
def test_trickling_does_not_buy_time(head: bytes, limits: Limits) -> None:
    async def main() -> bytes:
        async with open_door(echo, limits) as (_, port), client(port) as (reader, writer):
            writer.write(head)
            answer = asyncio.create_task(reader.read())
            while not answer.done():
                writer.write(b"a")
                await asyncio.sleep(0)
            return await answer

    assert only_fault(run(main()))[0] == 408


def test_an_idle_connection_is_closed_in_silence() -> None:
    raw = exchange_bytes(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n", limits=Limits(keep_alive_s=0.02))
    assert len(answers(raw)) == 1


def test_far_too_many_connections_are_not_even_told() -> None:
    async def main() -> list[bytes]:
        async with open_door(echo, Limits(connections=0, linger_s=99)) as (_, port):
            readers = []
            for _ in range(65):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                readers.append((reader, writer))
                said = await reader.readline()
                if not said:
                    break
            for _, writer in readers:
                writer.close()
            return [said, *[await reader.read() for reader, _ in readers[:-1]]]

    last, *others = run(main())
    assert last == b""
    assert len(others) == 64
    assert all(b"retry-after: 1" in said for said in others)


def test_a_client_that_leaves_is_noticed_once_and_later_writes_go_nowhere() -> None:
    async def main() -> None:
        gone = asyncio.Event()
        begun = asyncio.Event()
        count = 0

        def on_gone() -> None:
            nonlocal count
            count += 1
            gone.set()

        exchanges: list[Exchange] = []

        def handler(exchange: Exchange) -> None:
            exchanges.append(exchange)
            exchange.on_gone = on_gone
            exchange.start(200, [], None)
            exchange.write(b"first")
            begun.set()

        async with open_door(handler) as (_, port):
            async with client(port) as (_reader, writer):
                writer.write(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
                await begun.wait()
            await gone.wait()
            [exchange] = exchanges
            exchange.write(b"more")
            exchange.end()
            exchange.abort()
            assert exchange.gone
            assert not exchange.finished
        assert count == 1

    run(main())


PIPELINE = b"GET /a HTTP/1.1\r\n" + HOST + b"\r\nGET /b HTTP/1.1\r\n" + HOST + b"\r\n"


@pytest.mark.parametrize("how", ["at-once", "later", "streamed", "http10"])
def test_a_client_that_only_ends_its_side_gets_its_answers(how: str) -> None:
    """`nc -N` does this; pipelines are included. The connection closes after the last response."""
    version = b"1.0" if how == "http10" else b"1.1"
    asked = PIPELINE if how != "http10" else b"GET /b HTTP/1.0\r\n" + HOST + b"\r\n"

    async def main() -> bytes:
        waiting: asyncio.Queue[Exchange] = asyncio.Queue()

        async def answer() -> None:
            for _ in range(asked.count(b"GET")):
                exchange = await waiting.get()
                await ended.wait()
                await asyncio.sleep(0)
                if how == "streamed":
                    exchange.start(200, [], 4)
                    for _ in range(2):
                        exchange.write(b"ok")
                        await asyncio.sleep(0.01)
                    exchange.end()
                else:
                    echo(exchange)

        def handler(exchange: Exchange) -> None:
            if how == "at-once":
                echo(exchange)
            else:
                waiting.put_nowait(exchange)

        ended = asyncio.Event()
        async with open_door(handler) as (_, port), client(port) as (reader, writer):
            answering = asyncio.create_task(answer()) if how != "at-once" else None
            writer.write(asked)
            writer.write_eof()
            asyncio.get_running_loop().call_later(0.05, ended.set)
            said = await reader.read()
            if answering is not None:
                answering.cancel()  # without a cancellation it waits for ever if the connection was broken off
                await asyncio.gather(answering, return_exceptions=True)
            return said

    said = run(main())
    assert said.count(b"HTTP/1.1 200 OK\r\n") == asked.count(b"GET")
    assert version == b"1.0" or how == "streamed" or b'"/a"' in said.partition(b'"/b"')[0]


@pytest.mark.parametrize("started", [False, True])
def test_a_client_that_ends_its_side_long_after_its_request_has_left(started: bool) -> None:
    """The server notices it without sending anything, before and after the start of the response."""

    async def main() -> None:
        exchanges: list[Exchange] = []
        gone = asyncio.Event()

        def handler(exchange: Exchange) -> None:
            exchanges.append(exchange)
            exchange.on_gone = gone.set
            if started:
                exchange.start(200, [], 2)

        async with open_door(handler) as (_, port), client(port) as (_, writer):
            writer.write(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
            await until(lambda: bool(exchanges))
            loop = asyncio.get_running_loop()
            await until(lambda: loop.time() > exchanges[0].received_s + 0.5)
            writer.write_eof()
            await gone.wait()

    run(main())


@pytest.mark.parametrize("started", [False, True])
def test_a_client_that_has_gone_is_told_from_one_that_only_ends_its_side(started: bool) -> None:
    """Both clients close their sending side in the same way. Data sent to the client that has gone causes a reset; the
    other client gets its response when it is ready, after interim responses."""

    async def main() -> None:
        gone: list[bytes] = []
        exchanges: dict[bytes, Exchange] = {}
        lost = asyncio.Event()

        def handler(exchange: Exchange) -> None:
            path = exchanges.setdefault(exchange.path, exchange).path

            def leaves() -> None:
                gone.append(path)
                lost.set()

            exchange.on_gone = leaves
            if started:
                exchange.start(200, [], 2)

        async with open_door(handler) as (_, port), client(port) as (reader, writer):
            writer.write(b"GET /stays HTTP/1.1\r\n" + HOST + b"\r\n")
            writer.write_eof()
            async with client(port) as (_, leaving):
                leaving.write(b"GET /goes HTTP/1.1\r\n" + HOST + b"\r\n")
                while len(exchanges) < 2:
                    await asyncio.sleep(0)
            await lost.wait()
            if not started:
                assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
                exchanges[b"/stays"].start(200, [], 2)
            exchanges[b"/stays"].write(b"ok")
            exchanges[b"/stays"].end()
            said = await reader.read()
            assert b"HTTP/1.1 200 OK\r\n" in said
            assert said.endswith(b"ok")
            assert gone == [b"/goes"]

    run(main())


def test_a_request_that_its_client_ends_in_the_middle_is_let_go() -> None:
    async def main() -> None:
        async with open_door(echo) as (_, port), client(port) as (reader, writer):
            writer.write(b"GET /a HTTP/1.1\r\n" + HOST + b"\r\nPOST /b HTTP/1.1\r\nHo")
            writer.write_eof()
            assert (await reader.read()).count(b"HTTP/1.1") == 1

    run(main())


def test_nobody_hears_of_a_client_that_leaves_after_its_answer() -> None:
    heard: list[str] = []

    def handler(exchange: Exchange) -> None:
        exchange.on_gone = lambda: heard.append("gone")
        echo(exchange)

    exchange_bytes(b"GET / HTTP/1.1\r\n" + LAST + b"\r\n", handler)
    assert heard == []


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize(("how", "length"), [("abort", None), ("abort", 10), ("short", 10)])
def test_a_broken_answer_looks_broken(how: str, version: bytes, length: int | None) -> None:
    """Chunked: the last chunk is missing. With a length: bytes are missing. Until the connection closes: a reset."""

    async def main() -> None:
        wrote = asyncio.Event()
        exchanges: list[Exchange] = []

        def handler(exchange: Exchange) -> None:
            exchanges.append(exchange)
            exchange.start(200, [], length)
            exchange.write(b"half")
            wrote.set()

        async with open_door(handler) as (_, port), client(port) as (reader, writer):
            writer.write(b"GET / HTTP/" + version + b"\r\n" + HOST + b"\r\n")
            raw = await reader.readuntil(b"half")
            [exchange] = exchanges
            exchange.abort() if how == "abort" else exchange.end()
            assert exchange.finished
            if version == b"1.0" and length is None:
                with pytest.raises(ConnectionResetError):
                    await reader.read()
            else:
                rest = await reader.read()
                assert b"0\r\n\r\n" not in rest
                assert raw.endswith(b"half")

    run(main())


def test_a_handler_that_raises_is_reported_and_the_client_gets_500() -> None:
    reported: list[dict[str, Any]] = []

    async def main() -> bytes:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

        def handler(exchange: Exchange) -> None:
            raise RuntimeError("a bug")

        async with open_door(handler) as (_, port):
            return await talk(port, b"GET / HTTP/1.1\r\n" + LAST + b"\r\n")

    assert answers(run(main()))[0][0] == 500
    assert [str(context["exception"]) for context in reported] == ["a bug"]


def test_draining_loses_no_request() -> None:
    """One response is being sent, one request is half received, one connection is idle and about to be used."""

    async def main() -> None:
        arrived = asyncio.Event()
        slow: list[Exchange] = []

        def handler(exchange: Exchange) -> None:
            if exchange.path == b"/slow":
                slow.append(exchange)
                arrived.set()
            else:
                echo(exchange)

        async with open_door(handler) as (door, port):
            async with (
                client(port) as (r1, w1),
                client(port) as (r2, w2),
                client(port) as (r3, w3),
                client(port) as (r4, _),
            ):
                w1.write(b"GET /slow HTTP/1.1\r\n" + HOST + b"\r\n")
                w2.write(b"POST /half HTTP/1.1\r\n" + HOST + b"Content-Length: 2\r\n\r\n1")
                w3.write(b"GET /idle HTTP/1.1\r\n" + HOST + b"\r\n")
                await arrived.wait()
                await r3.readuntil(b"}")
                draining = asyncio.create_task(door.drain(10, idle_s=1.0))
                await asyncio.sleep(0)
                w2.write(b"2")
                w3.write(b"GET /late HTTP/1.1\r\n" + HOST + b"\r\n")
                [(_, headers, body)] = answers(await r3.read())
                assert (json.loads(body)["path"], headers[b"connection"]) == ("/late", b"close")
                assert json.loads(answers(await r2.read())[0][2])["body"] == "12"
                assert await r4.read() == b"", "a connection that stays idle is closed"
                assert not draining.done()
                slow[0].respond(200, b"{}")
                [(_, headers, body)] = answers(await r1.read())
                assert (body, headers[b"connection"]) == (b"{}", b"close")
                await draining
            assert door.connections == 0
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", port)

    run(main())


def test_draining_answers_those_who_wait_to_be_accepted() -> None:
    """The connections are established and the requests are sent, but the server has not accepted the connections
    yet."""

    async def main() -> list[bytes]:
        door = HttpServer(echo)
        port = await door.listen("127.0.0.1", 0)
        waiting = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
        for client in waiting:
            client.sendall(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
        try:
            await door.drain(10)
            return [client.recv(4096) for client in waiting]
        finally:
            for client in waiting:
                client.close()

    assert all(said.startswith(b"HTTP/1.1 200 OK\r\n") for said in run(main()))


def test_nobody_who_is_connected_is_lost_while_the_door_closes() -> None:
    """Clients in separate threads open a new connection for each request until the port refuses them."""
    said: list[bytes] = []

    def ask(port: int) -> None:
        while True:
            try:
                client = socket.create_connection(("127.0.0.1", port))
            except ConnectionRefusedError:
                return
            with client:
                client.sendall(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
                said.append(client.recv(4096))

    async def main() -> None:
        door = HttpServer(echo)
        port = await door.listen("127.0.0.1", 0)
        clients = [asyncio.create_task(asyncio.to_thread(ask, port)) for _ in range(4)]
        while len(said) < 20:
            await asyncio.sleep(0)
        await door.drain(10, idle_s=1.0)
        await asyncio.gather(*clients)

    run(main())
    assert all(answer.startswith(b"HTTP/1.1 200 OK\r\n") for answer in said)


def test_draining_cuts_off_what_takes_too_long() -> None:
    async def main() -> None:
        arrived = asyncio.Event()
        gone = asyncio.Event()

        def handler(exchange: Exchange) -> None:
            exchange.on_gone = gone.set
            arrived.set()

        async with open_door(handler) as (door, port), client(port) as (reader, writer):
            writer.write(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
            await arrived.wait()
            await door.drain(0.01)
            assert gone.is_set()
            assert await reader.read() == b""

    run(main())


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", "key.pem"]
    command = ["openssl", "req", "-x509", *key, "-out", "cert.pem", "-days", "2", *names]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder


def test_tls_serves_the_same_and_a_plain_client_does_no_harm(certificate: Path) -> None:
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    trusting = ssl.create_default_context(cafile=str(certificate / "cert.pem"))

    async def main() -> None:
        door = HttpServer(echo, Limits(linger_s=0.02), deadlines=Deadlines(0.01))
        port = await door.listen("127.0.0.1", 0, server)
        plain = await talk(port, b"GET / HTTP/1.1\r\n" + LAST + b"\r\n")
        assert plain.startswith(b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\n")
        assert b"use https://" in plain
        with suppress(ConnectionError):
            assert await talk(port, b"\x00\x01") == b""
        for request, status in ((b"GET / HTTP/1.1\r\n" + LAST + b"\r\n", 200), (b"rubbish\r\n\r\n", 400)):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
            writer.write(request)
            assert answers(await reader.read())[0][0] == status
            writer.close()
            await writer.wait_closed()
        await door.drain(0)

    run(main())
