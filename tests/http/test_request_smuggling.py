"""The gateway passes no request that two parsers could frame in different ways, and no response that contains a second
one."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from tests.http.test_http_server_laws import statuses
from tests.serve.rig import COMPLETIONS, MODEL
from tests.serve.stub_engines import (
    ReceivedRequest,
    completion,
    deployment,
    engines_of,
    run,
    serving,
    stub_rig,
)

BODY = msgspec.json.encode({"model": MODEL, "prompt": "a", "max_tokens": 1})
HIDDEN = b"POST /v1/embeddings?hidden HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
REFUSED = (400, 403, 413, 431, 501, 505)


def request(head: bytes, body: bytes = BODY, line: bytes = b"POST %b HTTP/1.1\r\n" % COMPLETIONS.encode()) -> bytes:
    return line + b"Host: localhost\r\n" + head + b"\r\n" + body + HIDDEN


def ambiguous() -> Iterator[bytes]:
    """Yield requests with a second one behind them; for each, some parsers disagree about where it ends or what it
    is."""
    for coding in (
        *(b"chunked, chunked", b"chunked, identity", b"identity, chunked", b"identity", b"gzip", b"gzip, chunked"),
        *(b"xchunked", b"chunkedx", b"chunked;q=1", b'"chunked"', b"\x0bchunked", b"chunked\x00", b"c\x00hunked"),
        *(b"chunked,", b",chunked", b"chu nked", b"\xffchunked", b"chunked\r\nTransfer-Encoding: identity"),
    ):
        yield request(b"Transfer-Encoding: %b\r\n" % coding, CHUNKS)
        yield request(b"Transfer-Encoding: %b\r\n%b" % (coding, LENGTH))
    for both in (LENGTH + CHUNKED, CHUNKED + LENGTH, LENGTH + CHUNKED.upper(), b"Content-Length: 0\r\n" + CHUNKED):
        yield request(both, CHUNKS)
    size = b"%d" % len(BODY)
    for length in (
        *(b"+" + size, b"-" + size, b"0x%x" % len(BODY), size + b" " + size, size + b"," + size, size + b", 0"),
        *(b"", b" ", size + b".0", b"1e2", size + b"\x00", b"\x0b" + size, b"99999999999999999999" + size, b"a"),
        *(size + b"\r\nContent-Length: 0", size + b"\r\nContent-Length: " + size, b"'%b'" % size, size + b";"),
    ):
        yield request(b"Content-Length: %b\r\n" % length)
    for name in (b"Transfer-Encoding :", b"Transfer-Encoding\t:", b"Transfer-Encoding\x00:", b"\x00Transfer-Encoding:"):
        yield request(b"%b chunked\r\n" % name + LENGTH, CHUNKS)
    for folded in (b"X: a\r\n Transfer-Encoding: chunked\r\n", b"X: a\r\n\tContent-Length: 0\r\n", b" X: a\r\n"):
        yield request(folded + LENGTH)
    for line in (b"X: a\rContent-Length: 0\r\n", b"X: a\nContent-Length: 0\r\n", b"X\r\n", b": a\r\n", b"X: \x00\r\n"):
        yield request(line + LENGTH)
    for text in (
        b"Host: other\r\n",
        b"Host : other\r\n",
        b"X\x7f: a\r\n",
        b"X: a\x0bb\r\n",
        b"X(: a\r\n",
        b"X y: a\r\n",
    ):
        yield request(text + LENGTH)
    n, data = b"%x" % len(BODY), BODY
    for chunks in (
        *(b"0x" + n + b"\r\n" + data + b"\r\n0\r\n\r\n", b"+" + n + b"\r\n" + data + b"\r\n0\r\n\r\n"),
        *(b" " + n + b"\r\n" + data + b"\r\n0\r\n\r\n", n + b" \r\n" + data + b"\r\n0\r\n\r\n"),
        *(
            n + b"\n" + data + b"\r\n0\r\n\r\n",
            n + b"\r" + data + b"\r\n0\r\n\r\n",
            n + b"\r\n" + data + b"\n0\r\n\r\n",
        ),
        *(n + b"\r\n" + data + b"0\r\n\r\n", n + b"\r\n" + data + b"\r\n0\n\n", n + b"\r\n" + data + b"xx0\r\n\r\n"),
        *(n + b"\r\r\n" + data + b"\r\n0\r\n\r\n", b"\r\n" + data + b"\r\n0\r\n\r\n", b"-1\r\n\r\n", b"g\r\n\r\n"),
        *(b"f" * 17 + n + b"\r\n" + data, n + b";\x00\r\n" + data + b"\r\n0\r\n\r\n"),
        *(n + b";a\nb\r\n" + data + b"\r\n0\r\n\r\n", n + b"\r\n" + data + b"\r\n0\r\nX : a\r\n\r\n"),
    ):
        yield request(CHUNKED, chunks)
    path = COMPLETIONS.encode()
    for first in (
        *(b"POST\t%b HTTP/1.1\r\n", b"POST %b HTTP/1.1 \r\n"),
        *(
            b"POST %b\r\n",
            b"POST %b http/1.1\r\n",
            b"POST %b HTTP/1.10\r\n",
            b"POST %b HTTP/9.9\r\n",
            b"POST %b HTTP/1.1\n",
        ),
        *(b"POST %b HTTP/1.1\r", b" POST %b HTTP/1.1\r\n", b"POST x%b HTTP/1.1\r\n", b"PO ST %b HTTP/1.1\r\n"),
        *(
            b"POST %b\x00 HTTP/1.1\r\n",
            b"POST %b\x7f HTTP/1.1\r\n",
            b"POST %b a HTTP/1.1\r\n",
            b"P\x00ST %b HTTP/1.1\r\n",
        ),
    ):
        yield request(LENGTH, line=first % path)
    yield b"POST %b HTTP/1.0\r\n" % path + CHUNKED + b"\r\n" + CHUNKS + HIDDEN
    yield b"POST %b HTTP/1.1\r\n" % path + LENGTH + b"\r\n" + BODY + HIDDEN  # no Host header


ATTACKS = tuple(ambiguous())
GOOD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def send_and_read(port: int, parts: list[bytes]) -> bytes:
    """Send the parts and return everything that the gateway sends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = b""
    try:
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0)
        writer.write_eof()
        while more := await reader.read(1 << 16):
            received += more
    except ConnectionError:
        pass
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()
    return received


@pytest.mark.parametrize("how", ["whole", "behind-another", "in-halves"])
def test_ambiguous_requests_are_rejected_and_reach_no_engine(how: str) -> None:
    """The hidden request reaches no engine either, and the gateway serves the next client."""
    assert len(set(ATTACKS)) >= 100

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        async with stub_rig(prefill + decode) as front:
            port = front.gateway.port
            for attack in ATTACKS:
                parts = [attack[: len(attack) // 3], attack[len(attack) // 3 :]] if how == "in-halves" else [attack]
                parts = [GOOD, *parts] if how == "behind-another" else parts
                answers = statuses(await send_and_read(port, parts))
                assert answers[: len(parts) - 1] == [200] or how != "behind-another", attack
                assert answers, attack
                assert answers[-1] in REFUSED, attack
                assert answers.count(200) == (how == "behind-another"), attack
            received: list[ReceivedRequest] = [request for engine in prefill + decode for request in engine.received]
            assert not received
            assert (await front.post(completion())).status == 200

    run(main())


SPLIT = (
    b"X-A: a\rX-Injected: 1\r\n",
    b"X-A: a\nX-Injected: 1\r\n",
    b"X-A: a\r\n X-Injected: 1\r\n",
    b"X-A: \x00\r\n",
    b"X-A : 1\r\n",
    b"Content-Length: 2\r\nContent-Length: 40\r\n",
    b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n",
)
SECOND = b"HTTP/1.1 200 OK\r\nX-Injected: 1\r\nContent-Length: 8\r\n\r\ninjected"


@pytest.mark.parametrize("head", [*SPLIT, b"Content-Length: 2\r\n"])
def test_engine_bytes_after_a_response_or_inside_headers_reach_no_client(head: bytes) -> None:
    """Bytes that an engine sends after its response or inside its headers reach no client: neither this one nor the
    next one on the same connection to the engine."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                received = await reader.readuntil(b"\r\n\r\n")
                if received.startswith(b"POST"):
                    length = int(received.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                    await reader.readexactly(length)
                    writer.write(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n{}" + SECOND)
                else:
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        prefill, decode = engines_of("vllm")
        # Two servers in one, because there is one engine of each role.
        other = await asyncio.start_server(serve, "127.0.0.1", 0)
        engines = [prefill[0], decode[0]]
        for engine, listening in zip(engines, (server, other), strict=True):
            engine.port = listening.sockets[0].getsockname()[1]
        async with serving(deployment(engines)) as front:
            for _ in range(4):
                response = await front.post({"input": "a"}, "/v1/embeddings")
                assert "x-injected" not in response.headers
                assert b"injected" not in response.body
                assert response.status == 200 if head not in SPLIT else response.status in (200, 502, 503)
        for listening in (server, other):
            listening.close()

    run(main())


def test_a_request_id_cannot_split_a_response() -> None:
    """The ID is sent back in the response; a line end in it is rejected before."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        async with stub_rig(prefill + decode) as front:
            for end in (b"\r", b"\n", b"\x00"):
                head = b"X-Request-Id: a%bX-Injected: 1\r\n" % end + LENGTH
                received = await send_and_read(front.gateway.port, [request(head)])
                assert statuses(received) == [400]
                assert b"injected" not in received.lower()
            assert not any(engine.received for engine in prefill + decode)

    run(main())


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions", "/v1/embeddings", "/tokenize"])
@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_a_deeply_nested_body_is_a_client_error(path: str, opening: bytes) -> None:
    async def main() -> None:
        prefill, decode = engines_of("vllm")
        async with stub_rig(prefill + decode) as front:
            body = b'{"model":"%b","prompt":"a","x":' % MODEL.encode() + opening * 50_000
            head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" % path.encode()
            received = await send_and_read(
                front.gateway.port, [head + b"Content-Length: %d\r\n\r\n" % len(body) + body]
            )
            assert received.startswith(b"HTTP/1.1 400 ")
            assert (await front.post(completion())).status == 200

    run(main())


@pytest.mark.parametrize("port", ["listen", "admin"])
def test_old_tls_versions_are_rejected(tmp_path: Path, port: str) -> None:
    """Both ports accept TLS 1.2 and 1.3 only, and they answer plain HTTP with a message about it."""
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", "key.pem"]
    command = ["openssl", "req", "-x509", *key, "-out", "cert.pem", "-days", "2", *names]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    files = f"tls: {{certificate: {tmp_path}/cert.pem, key: {tmp_path}/key.pem}}"
    ports = {"listen": "{port: 0}", "admin": "{port: 0}"} | {port: f"{{port: 0, {files}}}"}

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        async with stub_rig(prefill + decode, **ports) as front:
            number = front.gateway.port if port == "listen" else front.gateway.admin_port
            for version, accepted in (("TLSv1", False), ("TLSv1_1", False), ("TLSv1_2", True), ("TLSv1_3", True)):
                context = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
                with warnings.catch_warnings(action="ignore"):
                    context.minimum_version = context.maximum_version = ssl.TLSVersion[version]
                context.set_ciphers("ALL:@SECLEVEL=0")
                try:
                    reader, writer = await asyncio.open_connection("127.0.0.1", number, ssl=context)
                except (ssl.SSLError, ConnectionError):
                    assert not accepted
                    continue
                assert accepted
                writer.write(GOOD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
                assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
                writer.close()
                with suppress(ConnectionError, ssl.SSLError):
                    await writer.wait_closed()
            received = await send_and_read(number, [GOOD])
            assert received.startswith(b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\n")
            assert b"use https://" in received

    run(main())
