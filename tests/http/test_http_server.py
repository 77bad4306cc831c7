"""The HTTP server by worked examples over real sockets: framing, order of responses, rejected requests, TLS."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.http.server_rig import (
    HOST,
    HOST_AND_CLOSE,
    client,
    echo,
    exchange_bytes,
    only_error,
    parse_responses,
    run,
    run_server,
    send_and_read,
)

from kvroute.http.deadlines import Deadlines
from kvroute.http.server.exchange import Exchange
from kvroute.http.server.request_parser import RequestParser
from kvroute.http.server.server import HttpServer, RequestLimits


def test_keep_alive_serves_several_requests_on_one_connection() -> None:
    async def main() -> None:
        async with run_server(echo) as (http_server, port), client(port) as (reader, writer):
            for index in range(3):
                writer.write(b"POST /v1/%d?q=1 HTTP/1.1\r\n" % index + HOST + b"Content-Length: 2\r\n\r\nhi")
                head = await reader.readuntil(b"\r\n\r\n")
                assert b"connection" not in head
                length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
                seen = json.loads(await reader.readexactly(length))
                assert (seen["path"], seen["query"], seen["body"]) == (f"/v1/{index}", "q=1", "hi")
            assert http_server.connections == 1

    run(main())


def test_a_chunked_request_is_assembled_and_its_trailers_are_dropped() -> None:
    data = (
        b"POST / HTTP/1.1\r\n"
        + HOST_AND_CLOSE
        + b"X: a\r\nTransfer-Encoding: chunked\r\n\r\n3;ext=1\r\nabc\r\nA\r\n0123456789\r\n0\r\nX: b\r\n\r\n"
    )
    [(status, _, body)] = parse_responses(exchange_bytes(data))
    assert status == 200
    assert json.loads(body)["body"] == "abc0123456789"
    assert json.loads(body)["x"] == ["a"]


def test_pipelined_requests_are_answered_in_order() -> None:
    waiting: list[Exchange] = []

    async def main() -> list[tuple[int, dict[bytes, bytes], bytes]]:
        arrived = asyncio.Event()

        def handler(exchange: Exchange) -> None:
            waiting.append(exchange)
            arrived.set()

        async with run_server(handler) as (_, port), client(port) as (reader, writer):
            writer.write(b"".join(b"GET /%d HTTP/1.1\r\n%b\r\n" % (i, HOST) for i in range(5)))
            writer.write(b"GET /5 HTTP/1.1\r\n" + HOST_AND_CLOSE + b"\r\n")
            for index in range(6):
                await arrived.wait()
                arrived.clear()
                assert len(waiting) == index + 1, "the next request waits for the answer to this one"
                waiting[index].respond(200, waiting[index].path)
            return parse_responses(await reader.read())

    assert [body for _, _, body in run(main())] == [b"/%d" % i for i in range(6)]


def test_a_long_pipeline_is_served_without_recursion_and_with_bounded_parsing_ahead() -> None:
    n = 20_000
    data = (b"GET / HTTP/1.1\r\n" + HOST + b"\r\n") * n + b"GET /last HTTP/1.1\r\n" + HOST_AND_CLOSE + b"\r\n"

    async def main() -> bytes:
        async with (
            run_server(lambda exchange: exchange.respond(204, b"")) as (_, port),
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
def test_the_connection_is_kept_open_if_the_client_requests_it(head: bytes, keeps: bool) -> None:
    async def main() -> None:
        async with run_server(echo) as (_, port), client(port) as (reader, writer):
            writer.write(head + b"\r\n")
            response = await reader.readuntil(b"\r\n\r\n")
            assert (b"connection: close" in response) == (not keeps)
            if keeps:
                await reader.readuntil(b"}")
                writer.write(b"GET / HTTP/1.1\r\n" + HOST_AND_CLOSE + b"\r\n")
            assert (b"HTTP/1.1 200 OK" in await reader.read()) == keeps

    run(main())


def test_a_response_to_head_has_no_body_and_the_next_response_follows() -> None:
    raw = exchange_bytes(b"HEAD / HTTP/1.1\r\n" + HOST + b"\r\nGET / HTTP/1.1\r\n" + HOST_AND_CLOSE + b"\r\n")
    head, _, rest = raw.partition(b"\r\n\r\n")
    assert b"content-length: " in head
    assert rest.startswith(b"HTTP/1.1 200 OK\r\n")


def test_a_streamed_response_to_head_has_no_body() -> None:
    def handler(exchange: Exchange) -> None:
        exchange.start(200, [], None)
        exchange.write(b"data")
        exchange.end()

    raw = exchange_bytes(b"HEAD / HTTP/1.1\r\n" + HOST_AND_CLOSE + b"\r\n", handler)
    assert raw.endswith(b"connection: close\r\n\r\n")


def test_a_response_of_unknown_length_closes_an_http_1_0_connection() -> None:
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
def test_every_form_of_request_target_is_parsed(target: bytes, path: str, query: str) -> None:
    [(_, _, body)] = parse_responses(exchange_bytes(b"GET " + target + b" HTTP/1.1\r\n" + HOST_AND_CLOSE + b"\r\n"))
    assert (json.loads(body)["path"], json.loads(body)["query"]) == (path, query)


def test_100_continue_is_sent_only_to_clients_that_wait_for_it() -> None:
    async def main() -> None:
        async with run_server(echo) as (_, port), client(port) as (reader, writer):
            head = b"POST / HTTP/1.1\r\n" + HOST_AND_CLOSE + b"Expect: 100-continue\r\nContent-Length: 4\r\n\r\n"
            writer.write(head)
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"body")
            [(status, _, body)] = parse_responses(await reader.read())
            assert (status, json.loads(body)["body"]) == (200, "body")
            assert b"100 Continue" not in await send_and_read(port, head + b"body")

    run(main())


def test_100_continue_is_not_sent_after_the_body_has_begun() -> None:
    reader = RequestParser(RequestLimits())
    head = b"POST / HTTP/1.1\r\n" + HOST + b"Expect: 100-continue\r\nContent-Length: 4\r\n\r\n"
    reader.feed(head)
    assert reader.awaits_continue
    reader.feed(b"bo")
    assert not reader.awaits_continue


def test_a_body_that_is_too_large_is_rejected_without_100_continue() -> None:
    head = b"POST / HTTP/1.1\r\n" + HOST + b"Expect: 100-continue\r\nContent-Length: 11\r\n\r\n"
    status, message = only_error(exchange_bytes(head, limits=RequestLimits(body_bytes=10)))
    assert (status, "larger than 10 bytes; send a shorter prompt" in message) == (413, True)
    assert "`gateway.limits.body`" in message


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 4\r\n\r\nbody", b"Transfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n"]
)
def test_an_upgrade_header_is_ignored_and_the_body_is_read(framing: bytes) -> None:
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    data = b"POST /a HTTP/1.1\r\n" + HOST + upgrade + framing + b"GET /b HTTP/1.1\r\n" + HOST_AND_CLOSE + b"\r\n"
    first, second = parse_responses(exchange_bytes(data))
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
def test_ambiguous_requests_are_rejected(data: bytes, status: int) -> None:
    def handler(exchange: Exchange) -> None:
        raise AssertionError("nothing of this is a request")

    assert only_error(exchange_bytes(data, handler))[0] == status


def test_valid_requests_before_an_error_are_answered_first() -> None:
    good, bad = parse_responses(exchange_bytes(b"GET /a HTTP/1.1\r\n" + HOST + b"\r\nrubbish\r\n\r\n"))
    assert (good[0], bad[0]) == (200, 400)


def test_a_handler_that_raises_is_reported_and_the_client_gets_500() -> None:
    reported: list[dict[str, Any]] = []

    async def main() -> bytes:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

        def handler(exchange: Exchange) -> None:
            raise RuntimeError("a bug")

        async with run_server(handler) as (_, port):
            return await send_and_read(port, b"GET / HTTP/1.1\r\n" + HOST_AND_CLOSE + b"\r\n")

    assert parse_responses(run(main()))[0][0] == 500
    assert [str(context["exception"]) for context in reported] == ["a bug"]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", "key.pem"]
    command = ["openssl", "req", "-x509", *key, "-out", "cert.pem", "-days", "2", *names]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder


def test_tls_serves_requests_and_a_plain_text_client_does_no_harm(certificate: Path) -> None:
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    trusting = ssl.create_default_context(cafile=str(certificate / "cert.pem"))

    async def main() -> None:
        http_server = HttpServer(echo, RequestLimits(linger_s=0.02), deadlines=Deadlines(0.01))
        port = await http_server.listen("127.0.0.1", 0, server)
        plain = await send_and_read(port, b"GET / HTTP/1.1\r\n" + HOST_AND_CLOSE + b"\r\n")
        assert plain.startswith(b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\n")
        assert b"use https://" in plain
        with suppress(ConnectionError):
            assert await send_and_read(port, b"\x00\x01") == b""
        for request, status in ((b"GET / HTTP/1.1\r\n" + HOST_AND_CLOSE + b"\r\n", 200), (b"rubbish\r\n\r\n", 400)):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
            writer.write(request)
            assert parse_responses(await reader.read())[0][0] == status
            writer.close()
            await writer.wait_closed()
        await http_server.drain(0)

    run(main())


@pytest.mark.parametrize(
    "more", [b"", b"\0\0\4\x08\0\0\0\0\0\0\0\xff\xff", bytes(40)], ids=["alone", "window", "request"]
)
def test_a_client_that_uses_http2_without_asking_is_told_so_in_its_frames(more: bytes) -> None:
    """SETTINGS, then GOAWAY with HTTP_1_1_REQUIRED and a sentence; nothing of HTTP/1.1, which it could not read."""
    settings = b"\0\0\6\4\0\0\0\0\0\0\3\0\0\0\x64"
    raw = exchange_bytes(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings + more)
    frames = []
    while raw:
        length = int.from_bytes(raw[:3])
        frames.append((raw[3], raw[5:9], raw[9 : 9 + length]))
        raw = raw[9 + length :]
    assert frames[0] == (4, bytes(4), b"")
    [(kind, stream, content)] = frames[1:]
    assert (kind, stream, content[:4], content[4:8]) == (7, bytes(4), bytes(4), b"\0\0\0\x0d")
    assert b"send HTTP/1.1" in content


def test_an_offer_of_http2_is_ignored() -> None:
    for closes in (b"", b", close"):
        offer = b"Host: g\r\nConnection: Upgrade, HTTP2-Settings%b\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n" % closes
        sent = b"POST /x HTTP/1.1\r\n" + offer + b"Content-Length: 2\r\n\r\nhi"
        if not closes:
            sent += b"GET / HTTP/1.1\r\n" + HOST_AND_CLOSE + b"\r\n"
        found = parse_responses(exchange_bytes(sent))
        assert [status for status, _, _ in found] == [200] * (1 if closes else 2)
        assert json.loads(found[0][2])["body"] == "hi"
