"""Laws of the HTTP server: the requests do not depend on how the bytes are split, and no input stops the server."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from http.client import HTTPResponse
from io import BytesIO
from itertools import pairwise
from typing import Any, TypeVar

import pytest
import uvloop
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.waiting import HANGS_S

from kvroute.http.deadlines import Deadlines
from kvroute.http.server.exchange import Exchange
from kvroute.http.server.request_parser import ParsedRequest, RequestParser
from kvroute.http.server.server import HttpServer, RequestLimits

T = TypeVar("T")
LIMITS = RequestLimits(header_bytes=512, body_bytes=2048, header_count=16)
TOKEN = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=8).map(lambda text: b"x-" + text.encode())
VALUE = st.binary(max_size=20).map(lambda data: bytes(c for c in data if c >= 0x21 and c != 0x7F))


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` with a time limit, so that a hang fails the test."""

    async def bounded() -> T:
        async with asyncio.timeout(HANGS_S):
            return await main

    return uvloop.run(bounded())


@st.composite
def requests(draw: st.DrawFn) -> tuple[bytes, ParsedRequest]:
    """Draw a request as bytes and as its parsed form; it keeps the connection open."""
    method = draw(st.sampled_from([b"GET", b"POST", b"PUT", b"HEAD", b"DELETE", b"OPTIONS"]))
    path = b"/" + draw(st.text("abc/%.~", max_size=8)).encode()
    query = draw(st.text("abc=&?", max_size=8)).encode()
    headers = [(b"host", b"gateway"), *draw(st.lists(st.tuples(TOKEN, VALUE), max_size=5))]
    body = draw(st.binary(max_size=300))
    sizes = draw(st.lists(st.integers(1, 100), max_size=4))
    if sizes:
        headers.append((b"transfer-encoding", b"chunked"))
        framed, rest = b"", body
        for size in sizes:
            piece, rest = rest[:size], rest[size:]
            framed += b"%X;e=1\r\n%b\r\n" % (len(piece), piece) if piece else b""
        framed += (b"%x\r\n%b\r\n" % (len(rest), rest) if rest else b"") + b"0\r\n\r\n"
    else:
        headers.append((b"content-length", b"%d" % len(body)))
        framed = body
    blank = draw(st.sampled_from([b"", b" ", b"  "]))
    lines = b"".join(b"%b:%b%b%b\r\n" % (name.title(), blank, value, blank) for name, value in headers)
    target = path + (b"?" + query if query else b"")
    raw = b"%b %b HTTP/1.1\r\n%b\r\n%b" % (method, target, lines, framed)
    return raw, ParsedRequest(method, path, query, headers, body, False, True)


def pieces(raw: bytes, cuts: Sequence[int]) -> Iterator[bytes]:
    edges = sorted({0, len(raw), *(cut % (len(raw) + 1) for cut in cuts)})
    for start, end in pairwise(edges):
        yield raw[start:end]


def read(raw: bytes, cuts: Sequence[int]) -> tuple[list[ParsedRequest], int]:
    """Parse the bytes; return the requests in order and the status of the error after them, 0 if there is none."""
    reader = RequestParser(LIMITS)
    for piece in pieces(raw, cuts):
        while piece and reader.fault is None:
            piece = reader.feed(piece)
    return list(reader.ready), reader.fault.status if reader.fault else 0


CUTS = st.lists(st.integers(0, 5000), max_size=20)


@given(several=st.lists(requests(), min_size=1, max_size=4), cuts=CUTS)
def test_parsed_requests_do_not_depend_on_how_the_bytes_are_split(
    several: list[tuple[bytes, ParsedRequest]], cuts: list[int]
) -> None:
    raw = b"".join(raw for raw, _ in several)
    assert read(raw, cuts) == ([parsed for _, parsed in several], 0)


@given(several=st.lists(requests(), min_size=1, max_size=2))
def test_parsing_byte_by_byte_equals_parsing_at_once(several: list[tuple[bytes, ParsedRequest]]) -> None:
    raw = b"".join(raw for raw, _ in several)
    assert read(raw, range(len(raw))) == read(raw, [])


@st.composite
def corrupted(draw: st.DrawFn) -> bytes:
    """Draw requests with a few bytes replaced, removed, repeated or inserted."""
    raw = bytearray(b"".join(raw for raw, _ in draw(st.lists(requests(), min_size=1, max_size=3))))
    special_bytes = st.sampled_from(
        [b"\r", b"\n", b"\r\n", b"\x00", b" ", b"\t", b":", b"0", b"-", b"\xff", b";", b"chunked"]
    )
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(raw)))
        end = min(len(raw), at + draw(st.integers(0, 3)))
        raw[at:end] = draw(st.one_of(special_bytes, st.binary(max_size=3)))
    return bytes(raw)


NAMED = b"host", b"content-length", b"transfer-encoding"


@settings(max_examples=300)
@given(raw=st.one_of(corrupted(), st.binary(max_size=100)), cuts=CUTS)
@example(raw=b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\nabc", cuts=[])
@example(raw=b"GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: c\r\nhunked\r\n\r\n0\r\n\r\n", cuts=[49])
def test_corrupted_requests_have_one_interpretation_for_every_split(raw: bytes, cuts: list[int]) -> None:
    """No exception occurs, an error has a 4xx or 5xx status, and an accepted request has exactly one Host and one
    framing.

    If a request has several errors, the cuts decide which one is found first.
    """
    whole, status = read(raw, [])
    in_pieces, status_in_pieces = read(raw, cuts)
    assert whole == in_pieces
    assert (status == 0) == (status_in_pieces == 0)
    assert {status, status_in_pieces} <= {0, 400, 413, 431, 501, 505}
    for request in whole:
        names = [name for name, _ in request.headers]
        host, length, coding = (names.count(name) for name in NAMED)
        assert host == 1 or (request.http10 and host == 0)
        assert length + coding <= 1
        assert all(value.lower() == b"chunked" for name, value in request.headers if name == b"transfer-encoding")
        assert all(int(value) == len(request.body) for name, value in request.headers if name == b"content-length")
        assert not any(c < 0x20 and c != 9 for _, value in request.headers for c in value)
        assert len(request.body) <= LIMITS.body_bytes


@asynccontextmanager
async def run_server(limits: RequestLimits) -> AsyncIterator[int]:
    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))

    def handler(exchange: Exchange) -> None:
        exchange.respond(200, exchange.body[:64])

    server = HttpServer(handler, limits, deadlines=Deadlines(0.01))
    port = await server.listen("127.0.0.1", 0)
    try:
        yield port
        await check_still_serving(port)
    finally:
        await server.drain(0)
    assert problems == []
    assert server.connections == 0


async def send_and_read(port: int, parts: Sequence[bytes], *, leave: bool = False) -> bytes:
    """Send the parts, optionally close the sending side, and read until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = b""
    try:
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0)
        if leave:
            writer.write_eof()
        received = await reader.read()
    except ConnectionError:
        pass
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
    return received


async def check_still_serving(port: int) -> None:
    """Check that a valid request is served now."""
    raw = await send_and_read(port, [b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"])
    assert raw.startswith(b"HTTP/1.1 200 OK\r\n")
    assert raw.endswith(b"ok")


def statuses(raw: bytes) -> list[int]:
    """Return the statuses of a sequence of responses with content-length; no bytes may be left over."""
    codes = []
    while raw:
        assert raw.startswith(b"HTTP/1.1 ")
        head, _, raw = raw.partition(b"\r\n\r\n")
        codes.append(int(head[9:12]))
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]) if codes[-1] >= 200 else 0
        if codes[-1] >= 400:
            assert b"connection: close" in head
            assert set(json.loads(raw[:length] or b'{"error": 0}')) == {"error"}
        raw = raw[length:]
    return codes


@settings(max_examples=30, deadline=None)
@given(inputs=st.lists(st.tuples(st.one_of(corrupted(), st.binary(max_size=200)), CUTS), min_size=1, max_size=6))
def test_after_any_input_the_server_responds_or_closes_and_serves_the_next_client(
    inputs: list[tuple[bytes, list[int]]],
) -> None:
    async def main() -> None:
        async with run_server(
            RequestLimits(header_bytes=512, body_bytes=2048, header_s=0.02, body_s=0.02, keep_alive_s=0.02)
        ) as port:
            for raw, cuts in inputs:
                if b"HEAD" in raw:
                    continue  # responses to HEAD cannot be separated from the others
                received = await send_and_read(port, list(pieces(raw, cuts)))
                assert all(status in (100, 200, 400, 408, 413, 431, 501, 505) for status in statuses(received))

    run(main())


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(st.one_of(st.binary(max_size=50), st.integers(16_000, 70_000).map(lambda n: b"z" * n)), max_size=6),
    how=st.sampled_from(["whole", "length", "chunked", "chunks"]),
    version=st.sampled_from([b"1.0", b"1.1"]),
    method=st.sampled_from([b"GET", b"HEAD"]),
)
def test_a_response_is_read_as_it_was_written(parts: list[bytes], how: str, version: bytes, method: bytes) -> None:
    """The HTTP client of the standard library reads it."""
    body = b"".join(parts)

    def handler(exchange: Exchange) -> None:
        if how == "whole":
            exchange.respond(200, body, b"text/plain", [(b"x-a", b"1")])
            return
        exchange.start(200, [(b"x-a", b"1")], len(body) if how == "length" else None)
        for part in parts:
            if how == "chunks" and part:
                exchange.write_chunk(b"%x\r\n%b\r\n" % (len(part), part), len(part))
            else:
                exchange.write(part)
        exchange.end()

    async def main() -> bytes:
        server = HttpServer(handler)
        port = await server.listen("127.0.0.1", 0)
        raw = await send_and_read(port, [b"%b / HTTP/%b\r\nHost: a\r\nConnection: close\r\n\r\n" % (method, version)])
        await server.drain(0)
        return raw

    class Socket:
        def makefile(self, _: str) -> BytesIO:
            return BytesIO(raw)

    raw = run(main())
    response = HTTPResponse(Socket(), method=method.decode())  # type: ignore[arg-type]
    response.begin()
    assert (response.status, response.getheader("x-a")) == (200, "1")
    assert response.read() == (b"" if method == b"HEAD" else body)
    assert method != b"HEAD" or raw.partition(b"\r\n\r\n")[2] == b""
    response.close()


async def flood(port: int, head: bytes, block: bytes, times: int) -> bytes:
    """Send until the server stops reading; return what it sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    reading = asyncio.create_task(reader.read())
    writer.write(head)
    with suppress(ConnectionError):
        for _ in range(times):
            writer.write(block)
            await writer.drain()
            if reading.done():
                break
    received = b""
    with suppress(ConnectionError):
        received = await reading
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()
    return received


MIB = 1 << 20


@pytest.mark.parametrize(
    ("field", "block", "status"),
    [
        (b"Content-Length: 104857600", bytes(MIB), 413),
        (b"Transfer-Encoding: chunked", b"100000\r\n" + bytes(MIB) + b"\r\n", 413),
        (b"Transfer-Encoding: chunked", b"1\r\nx\r\n" * (MIB // 6), 400),
    ],
    ids=["length", "chunked", "tiny-chunks"],
)
def test_a_body_of_100_mb_is_rejected_early_and_the_response_can_be_read(
    field: bytes, block: bytes, status: int
) -> None:
    """A body of tiny chunks has too many chunks before it has too many bytes."""
    head = b"POST / HTTP/1.1\r\nHost: a\r\n%b\r\n\r\n" % field

    async def main() -> None:
        async with run_server(RequestLimits(body_bytes=2 * MIB)) as port:
            assert statuses(await flood(port, head, block, 100)) == [status]

    run(main())


def test_a_body_of_100_mb_is_accepted_if_the_limit_allows_it() -> None:
    async def main() -> None:
        async with run_server(RequestLimits(body_bytes=100 * MIB)) as port:
            head = b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 104857600\r\n\r\n"
            assert (await flood(port, head, bytes(MIB), 100)).startswith(b"HTTP/1.1 200 OK\r\n")

    run(main())


def test_slow_headers_delay_no_other_client() -> None:
    """Slowloris: many connections start a request and never end it."""

    async def main() -> None:
        async with run_server(RequestLimits(header_s=0.2)) as port:
            slow = [
                asyncio.create_task(send_and_read(port, [b"GET / HTTP/1.1\r\n", b"Host: a\r\n", b"X: "]))
                for _ in range(100)
            ]
            await asyncio.sleep(0)
            await check_still_serving(port)
            for received in await asyncio.gather(*slow):
                assert statuses(received) == [408]

    run(main())


def test_clients_that_disconnect_at_any_point_leak_nothing() -> None:
    """A bounded fuzz test with a fixed seed sends valid and invalid requests of every prefix length and leaves."""
    generator = random.Random(20)
    good = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    good += b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"

    async def main() -> None:
        async with run_server(LIMITS) as port:
            for _ in range(150):
                raw = bytearray(good[: generator.randrange(len(good))])
                for _ in range(generator.randrange(3)):
                    at = generator.randrange(len(raw) + 1)
                    raw[at : at + 1] = generator.randbytes(1)
                received = await send_and_read(port, [bytes(raw)], leave=True)
                assert all(status in (200, 400, 413, 431, 501, 505) for status in statuses(received))

    run(main())
