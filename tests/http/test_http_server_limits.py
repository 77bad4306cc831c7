"""Limits of the HTTP server: sizes of requests, timeouts of slow clients, number of connections."""

from __future__ import annotations

import asyncio

import pytest
from tests.http.server_rig import (
    HOST,
    client,
    echo,
    exchange_bytes,
    only_error,
    parse_responses,
    run,
    run_server,
)

from kvroute.http.server.server import RequestLimits


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
def test_requests_beyond_a_size_limit_are_rejected(data: bytes, status: int) -> None:
    limits = RequestLimits(header_bytes=256, header_count=8, body_bytes=64)
    assert only_error(exchange_bytes(data, limits=limits))[0] == status


def test_a_body_of_very_many_tiny_chunks_is_rejected_and_one_of_many_is_not() -> None:
    head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    status, reason = only_error(exchange_bytes(head + b"1\r\na\r\n" * 200_000))
    assert status == 400
    assert "chunks" in reason
    head = head.replace(b"Host", b"Connection: close\r\nHost")
    [(status, _, body)] = parse_responses(exchange_bytes(head + b"1\r\na\r\n" * 30_000 + b"0\r\n\r\n"))
    assert (status, body.count(b"a" * 30_000)) == (200, 1)


SOON_S = 0.02


@pytest.mark.parametrize(
    ("data", "limits", "statuses"),
    [
        (b"", RequestLimits(header_s=SOON_S), []),
        (b"G", RequestLimits(header_s=SOON_S), [408]),
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\nGET / HTTP/1.1\r\nHost: ", RequestLimits(header_s=SOON_S), [200, 408]),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n1", RequestLimits(header_s=99, body_s=SOON_S), [408]),
        (
            b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n",
            RequestLimits(header_s=99, body_s=SOON_S),
            [408],
        ),
    ],
    ids=["nothing", "letter", "second", "body", "chunks"],
)
def test_a_slow_client_gets_an_error_and_is_disconnected(
    data: bytes, limits: RequestLimits, statuses: list[int]
) -> None:
    assert [status for status, _, _ in parse_responses(exchange_bytes(data, limits=limits))] == statuses


@pytest.mark.parametrize(
    ("head", "limits"),
    [
        (b"GET / HTTP/1.1\r\nX: ", RequestLimits(header_s=0.1, header_bytes=1 << 30)),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9999999\r\n\r\n", RequestLimits(header_s=99, body_s=0.1)),
    ],
    ids=["head", "body"],
)
def test_slow_bytes_do_not_extend_a_deadline(head: bytes, limits: RequestLimits) -> None:
    async def main() -> bytes:
        async with run_server(echo, limits) as (_, port), client(port) as (reader, writer):
            writer.write(head)
            reading = asyncio.create_task(reader.read())
            while not reading.done():
                writer.write(b"a")
                await asyncio.sleep(0)
            return await reading

    assert only_error(run(main()))[0] == 408


def test_an_idle_connection_is_closed_without_a_response() -> None:
    raw = exchange_bytes(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n", limits=RequestLimits(keep_alive_s=0.02))
    assert len(parse_responses(raw)) == 1


def test_connections_far_beyond_the_limit_are_closed_without_a_response() -> None:
    async def main() -> list[bytes]:
        async with run_server(echo, RequestLimits(connections=0, linger_s=99)) as (_, port):
            readers = []
            for _ in range(65):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                readers.append((reader, writer))
                response = await reader.readline()
                if not response:
                    break
            for _, writer in readers:
                writer.close()
            return [response, *[await reader.read() for reader, _ in readers[:-1]]]

    last, *others = run(main())
    assert last == b""
    assert len(others) == 64
    assert all(b"retry-after: 1" in response for response in others)
