"""Test rig for the HTTP server: a server on a free port, a client that sends raw bytes, and a parser of responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import uvloop
from tests.waiting import HANGS_S

from kvroute.http.deadlines import Deadlines
from kvroute.http.error_format import ErrorFormat
from kvroute.http.server.exchange import Exchange
from kvroute.http.server.server import HttpServer, RequestLimits

T = TypeVar("T")
HOST = b"Host: gateway\r\n"
HOST_AND_CLOSE = HOST + b"Connection: close\r\n"


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
async def run_server(
    handler: Callable[[Exchange], None], limits: RequestLimits | None = None, errors: ErrorFormat | None = None
) -> AsyncIterator[tuple[HttpServer, int]]:
    http_server = HttpServer(handler, limits, errors=errors, deadlines=Deadlines(0.01))
    port = await http_server.listen("127.0.0.1", 0)
    try:
        yield http_server, port
    finally:
        await http_server.drain(0)
        assert http_server.connections == 0


@asynccontextmanager
async def client(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def send_and_read(port: int, data: bytes) -> bytes:
    """Send the data and return everything that the server sends until it closes."""
    async with client(port) as (reader, writer):
        writer.write(data)
        return await reader.read()


def exchange_bytes(
    data: bytes,
    handler: Callable[[Exchange], None] = echo,
    limits: RequestLimits | None = None,
    errors: ErrorFormat | None = None,
) -> bytes:
    async def main() -> bytes:
        async with run_server(handler, limits, errors) as (_, port):
            return await send_and_read(port, data)

    return run(main())


def parse_responses(raw: bytes) -> list[tuple[int, dict[bytes, bytes], bytes]]:
    """Parse a sequence of responses with content-length into status, headers and body."""
    responses = []
    while raw:
        head, _, raw = raw.partition(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        headers = dict(line.split(b": ", 1) for line in lines)
        length = int(headers.get(b"content-length", b"0"))
        responses.append((int(first.split()[1]), headers, raw[:length]))
        raw = raw[length:]
    return responses


def only_error(raw: bytes) -> tuple[int, str]:
    """Check that the only response is an error in the form of `PlainErrors` with `connection: close`; return its status
    and message."""
    [(status, headers, body)] = parse_responses(raw)
    assert headers[b"connection"] == b"close"
    assert headers[b"content-type"] == b"application/json"
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "code"}
    return status, error["message"]
