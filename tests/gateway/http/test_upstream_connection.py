"""Upstream pools and calls: every call ends exactly once, connections are reused or closed, failures give their
phase."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.waiting import HANGS_S

from kvroute.gateway.http.call import Call, Failure
from kvroute.gateway.http.deadlines import Deadlines
from kvroute.gateway.http.exchange import Headers
from kvroute.gateway.http.pool import UpstreamPool, request_bytes
from kvroute.gateway.http.upstream_connection import HEAD_BYTES_MAX, HEAD_LINES_MAX, UpstreamConnection
from kvroute.types import InputError

T = TypeVar("T")
Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
GET = request_bytes(b"GET", b"/", b"engine", [], b"")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` with a time limit, so that a hang fails the test."""

    async def bounded() -> T:
        async with asyncio.timeout(HANGS_S):
            return await main

    return uvloop.run(bounded())


class Heard:
    """A response handler that records its calls in order."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: Headers = []
        self.body = b""
        self.failure: Failure | None = None
        self.told: list[str] = []
        self.over = asyncio.Event()
        self.started = asyncio.Event()

    def on_head(self, status: int, headers: Headers) -> None:
        self.told.append("head")
        self.status, self.headers = status, headers
        self.started.set()

    def on_body(self, data: bytes) -> None:
        self.told.append("body")
        self.body += data

    def on_end(self) -> None:
        self.told.append("end")
        self.over.set()

    def on_failure(self, failure: Failure) -> None:
        self.told.append("failure")
        self.failure = failure
        self.over.set()

    def check(self) -> None:
        """Check the order of calls that is guaranteed to every response handler."""
        ends = [word for word in self.told if word in ("end", "failure")]
        assert len(ends) == 1
        assert self.told[-1] == ends[0]
        assert self.told.count("head") <= 1
        assert "body" not in self.told or self.told[0] == "head"
        assert ends[0] == "failure" or self.told[0] == "head"


@asynccontextmanager
async def engine(script: Script, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Run a server that follows the script on each connection; close all connections at the end."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await script(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    yield f"{'https' if tls else 'http'}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def closed(pool: UpstreamPool) -> None:
    """Close the pool and check that it holds nothing."""
    pool.close()
    while pool.connections:
        await asyncio.sleep(0)
    assert (pool.busy, pool.idle) == (0, 0)


def send(
    pool: UpstreamPool, heard: Heard, request: bytes = GET, *, silent_s: float = 10.0, head_only: bool = False
) -> Call:
    call = pool.send(request, heard, first_byte_s=silent_s, idle_s=silent_s, head_only=head_only)
    assert heard.told == [], "callbacks never come from inside send"
    return call


async def ask(pool: UpstreamPool, request: bytes = GET, *, silent_s: float = 10.0, head_only: bool = False) -> Heard:
    heard = Heard()
    send(pool, heard, request, silent_s=silent_s, head_only=head_only)
    await heard.over.wait()
    heard.check()
    return heard


def replies(*pieces: bytes, close: bool = False) -> Script:
    """Return a script that answers each request with these pieces."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readuntil(b"\r\n\r\n"):
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0)
            if close:
                return

    return script


def one_answer(script: Script, *, silent_s: float = 10.0, head_only: bool = False) -> Heard:
    async def main() -> Heard:
        async with engine(script) as url:
            pool = UpstreamPool(url, deadlines=Deadlines(0.01))
            heard = await ask(pool, silent_s=silent_s, head_only=head_only)
            await closed(pool)
            return heard

    return run(main())


def test_a_connection_is_used_again_last_first() -> None:
    async def main() -> None:
        async with engine(replies(OK)) as url:
            pool = UpstreamPool(url)
            both = [Heard(), Heard()]
            for heard in both:
                send(pool, heard)
            assert (pool.busy, pool.idle) == (2, 0)
            for heard in both:
                await heard.over.wait()
            assert (pool.busy, pool.idle, pool.connections) == (0, 2, 2)
            for _ in range(3):
                assert (await ask(pool)).body == b"ok"
            assert (pool.busy, pool.idle, pool.connections) == (0, 2, 2)
            await closed(pool)

    run(main())


def test_the_sink_may_send_the_next_call_from_on_end_on_the_same_connection() -> None:
    async def main() -> None:
        async with engine(replies(OK)) as url:
            pool = UpstreamPool(url)
            second = Heard()

            class First(Heard):
                def on_end(self) -> None:
                    super().on_end()
                    send(pool, second)

            await_first = First()
            send(pool, await_first)
            await second.over.wait()
            assert second.body == b"ok"
            assert pool.connections == 1
            await closed(pool)

    run(main())


@pytest.mark.parametrize(
    ("pieces", "status", "body"),
    [
        ([OK], 200, b"ok"),
        (
            [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n", b"2\r\nde\r\n0\r\nx: y\r\n\r\n"],
            200,
            b"abcde",
        ),
        ([b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nlink: x\r\n\r\n", OK], 200, b"ok"),
        ([b"HTTP/1.1 204 No Content\r\n\r\n"], 204, b""),
        ([b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n"], 304, b""),
        ([b"HTTP/1.1 404\r\ncontent-length: 0\r\n\r\n"], 404, b""),
    ],
    ids=["length", "chunked", "informational", "204", "304", "no-reason"],
)
def test_every_framing_is_read_and_leaves_the_connection_usable(pieces: list[bytes], status: int, body: bytes) -> None:
    async def main() -> None:
        async with engine(replies(*pieces)) as url:
            pool = UpstreamPool(url)
            for _ in range(2):
                heard = await ask(pool)
                assert (heard.status, heard.body, heard.told[-1]) == (status, body, "end")
                assert not any(name in (b"link", b"x") for name, _ in heard.headers)
            assert (pool.idle, pool.connections) == (1, 1)
            await closed(pool)

    run(main())


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok",
        OK + b"surplus",
        OK + OK,
        OK + b"HTTP/1.1 200 OK\r\nx: ",
    ],
    ids=["until-close", "1.0", "close", "surplus", "second-answer", "half-an-answer"],
)
def test_a_connection_that_cannot_be_trusted_further_is_closed(answer: bytes) -> None:
    async def main() -> None:
        async with engine(replies(answer, close=b"content-length" not in answer)) as url:
            pool = UpstreamPool(url)
            heard = await ask(pool)
            assert (heard.status, heard.body, heard.told[-1]) == (200, b"ok", "end")
            assert pool.idle == 0
            await closed(pool)

    run(main())


def test_head_is_answered_without_a_body() -> None:
    heard = one_answer(replies(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n"), head_only=True)
    assert (heard.told, dict(heard.headers)[b"content-length"]) == (["head", "end"], b"99")


@pytest.mark.parametrize(
    ("answer", "kind", "phase"),
    [
        (b"", "reset", "first_byte"),
        (b"HTTP/1.1 200 OK\r\ncontent-", "reset", "first_byte"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n", "reset", "first_byte"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nok", "reset", "body"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n", "reset", "body"),
        (b"rubbish", "malformed", "first_byte"),
        (b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n", "malformed", "first_byte"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\nz", "malformed", "body"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n", "malformed", "first_byte"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"a" * 600_000, "malformed", "first_byte"),
        (b"HTTP/1.1 103 Early Hints\r\ncontent-length: 2\r\n\r\nok", "malformed", "first_byte"),
        (b"HTTP/1.1 020 OK\r\n\r\nok", "malformed", "first_byte"),
    ],
    ids=[
        "nothing",
        "half-head",
        "head",
        "short",
        "no-last-chunk",
        "rubbish",
        "upgrade",
        "chunk",
        "both",
        "endless",
        "informational",
        "020",
    ],
)
def test_an_answer_that_does_not_end_is_a_failure_and_says_where(answer: bytes, kind: str, phase: str) -> None:
    failure = one_answer(replies(answer, close=True)).failure
    assert failure is not None
    assert (failure.kind, failure.phase) == (kind, phase)


@pytest.mark.parametrize(
    ("answer", "phase"),
    [
        (b"", "first_byte"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", "first_byte"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n", "body"),
    ],
    ids=["nothing", "head", "body"],
)
def test_silence_is_a_timeout(answer: bytes, phase: str) -> None:
    failure = one_answer(replies(answer), silent_s=0.02).failure
    assert failure is not None
    assert (failure.kind, failure.phase) == ("timeout", phase)


def test_a_port_where_nobody_listens_refuses() -> None:
    async def main() -> Failure | None:
        async with engine(replies(OK)) as url:
            pass
        pool = UpstreamPool(url)
        heard = await ask(pool)
        await closed(pool)
        return heard.failure

    failure = run(main())
    assert failure is not None
    assert (failure.kind, failure.phase) == ("refused", "connect")


def test_connecting_takes_bounded_time() -> None:
    """The server never answers the TLS handshake of the client."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def main() -> Failure | None:
        async with engine(script) as url:
            pool = UpstreamPool(url.replace("http:", "https:"), connect_s=0.05)
            heard = await ask(pool)
            await closed(pool)
            return heard.failure

    failure = run(main())
    assert failure is not None
    assert (failure.kind, failure.phase) == ("timeout", "connect")


def test_a_kept_connection_that_died_is_replaced_unseen_once() -> None:
    """The engine reads the second request on a connection and closes it without a byte: it is sent once more, on a new
    connection."""
    connections = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await reader.readuntil(b"\r\n\r\n")

    async def main() -> None:
        async with engine(script) as url:
            pool = UpstreamPool(url)
            for _ in range(3):
                assert (await ask(pool)).told == ["head", "body", "end"]
            assert connections == 3
            await closed(pool)

    run(main())


def test_a_fresh_connection_that_dies_is_not_tried_again() -> None:
    connections = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        if connections == 1:
            writer.write(OK)
            await reader.readuntil(b"\r\n\r\n")

    async def main() -> None:
        async with engine(script) as url:
            pool = UpstreamPool(url)
            assert (await ask(pool)).told[-1] == "end"
            assert (await ask(pool)).told == ["failure"]
            assert connections == 2
            await closed(pool)

    run(main())


def test_a_request_that_is_forgotten_before_it_is_sent_is_sent_whole() -> None:
    async def main() -> None:
        async with engine(replies(OK)) as url:
            pool, heard = UpstreamPool(url), Heard()
            send(pool, heard).forget_request()
            await heard.over.wait()
            assert heard.told == ["head", "body", "end"]
            await closed(pool)

    run(main())


def test_a_request_that_is_forgotten_after_it_was_sent_is_not_sent_again() -> None:
    """The engine closes a kept-alive connection without a byte: the call fails at once and uses no other connection."""
    connections = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await reader.readuntil(b"\r\n\r\n")

    async def main() -> None:
        async with engine(script) as url:
            pool, heard = UpstreamPool(url), Heard()
            assert (await ask(pool)).told[-1] == "end"
            send(pool, heard).forget_request()
            await heard.over.wait()
            assert heard.failure is not None
            assert (heard.failure.kind, heard.told, connections) == ("reset", ["failure"], 1)
            await closed(pool)

    run(main())


def test_an_answer_that_has_begun_is_not_asked_for_again() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"H")

    async def main() -> None:
        async with engine(script) as url:
            pool = UpstreamPool(url)
            assert (await ask(pool)).told[-1] == "end"
            assert (await ask(pool)).told == ["failure"]
            await closed(pool)

    run(main())


@pytest.mark.parametrize("word", [b"", OK], ids=["close", "unsolicited"])
def test_an_idle_connection_that_closes_or_speaks_is_dropped(word: bytes) -> None:
    async def main() -> None:
        answered = asyncio.Event()

        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(OK)
            await answered.wait()
            writer.write(word)
            if word:
                await reader.read()

        async with engine(script) as url:
            pool = UpstreamPool(url)
            await ask(pool)
            assert pool.idle == 1
            answered.set()
            while pool.connections:
                await asyncio.sleep(0)
            assert pool.idle == 0
            await closed(pool)

    run(main())


def test_idle_connections_are_bounded_in_number_and_time() -> None:
    async def main() -> None:
        async with engine(replies(OK)) as url:
            pool = UpstreamPool(url, idle_max=2, keep_s=0.05, deadlines=Deadlines(0.01))
            calls = [Heard() for _ in range(5)]
            for heard in calls:
                send(pool, heard)
            for heard in calls:
                await heard.over.wait()
                assert pool.idle <= 2
            while pool.connections:
                await asyncio.sleep(0)
            assert pool.idle == 0

    run(main())


@pytest.mark.parametrize("when", ["connecting", "waiting", "body", "inside"])
def test_an_aborted_call_hears_nothing_and_the_engine_sees_it_leave(when: str) -> None:
    async def main() -> None:
        left = asyncio.Event()

        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            asked.set()
            if when in ("body", "inside"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok")
            try:
                await reader.read()
            finally:
                left.set()

        asked = asyncio.Event()
        async with engine(script) as url:
            pool = UpstreamPool(url)

            class Aborting(Heard):
                def on_head(self, status: int, headers: Headers) -> None:
                    super().on_head(status, headers)
                    if when == "inside":
                        call.abort()

            heard = Aborting()
            call = send(pool, heard)
            if when == "waiting":
                await asked.wait()
            elif when != "connecting":
                await heard.started.wait()
            told = list(heard.told)
            call.abort()
            call.abort()
            assert pool.busy == 0
            if when != "connecting":
                await left.wait()
            await closed(pool)
            assert heard.told == told
            assert not heard.over.is_set()

    run(main())


def test_a_paused_call_reads_nothing_and_does_not_time_out_until_it_is_resumed() -> None:
    """A second call with the same timeout serves as the clock: it times out, the paused one does not."""

    async def main() -> None:
        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            request = await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nab")
            if request.startswith(b"GET /paused"):
                await resumed.wait()
                writer.write(b"cd")
            await reader.read()

        resumed = asyncio.Event()
        async with engine(script) as url:
            pool = UpstreamPool(url, deadlines=Deadlines(0.01))

            class Pausing(Heard):
                def on_head(self, status: int, headers: Headers) -> None:
                    super().on_head(status, headers)
                    call.pause()

            paused = Pausing()
            call = send(pool, paused, request_bytes(b"GET", b"/paused", b"engine", [], b""), silent_s=0.3)
            await paused.started.wait()
            for _ in range(2):
                other = await ask(pool, silent_s=0.3)
                assert other.failure is not None
                assert other.failure.kind == "timeout"
            assert not paused.over.is_set()
            assert len(paused.body) <= 2
            resumed.set()
            call.resume()
            await paused.over.wait()
            assert (paused.body, paused.told[-1]) == (b"abcd", "end")
            assert pool.idle == 1
            assert (await ask(pool, silent_s=0.05)).failure is not None, "the connection reads again"
            await closed(pool)

    run(main())


def test_a_closed_pool_finishes_its_calls_and_keeps_nothing() -> None:
    async def main() -> None:
        async with engine(replies(OK)) as url:
            pool = UpstreamPool(url)
            heard = Heard()
            send(pool, heard)
            pool.close()
            await heard.over.wait()
            assert heard.body == b"ok"
            assert pool.idle == 0
            await closed(pool)

    run(main())


@pytest.mark.parametrize(
    "url", ["127.0.0.1:1", "ftp://a:1", "http://", "http://a:1/v1", "http://a:x", "http://a:70000"]
)
def test_what_is_no_origin_is_refused(url: str) -> None:
    with pytest.raises(InputError, match="is not a valid origin"):
        UpstreamPool(url)


def test_a_request_says_its_host_and_length() -> None:
    headers = [(b"x-request-id", b"7")]
    assert (
        request_bytes(b"POST", b"/v1/completions", b"e:1", headers, b"{}")
        == b"POST /v1/completions HTTP/1.1\r\nhost: e:1\r\nx-request-id: 7\r\ncontent-length: 2\r\n\r\n{}"
    )
    assert b"content-length: 0\r\n" in request_bytes(b"POST", b"/", b"e", [], b"")
    assert b"content-length" not in request_bytes(b"GET", b"/", b"e", [], b"")


def test_https_is_spoken_and_an_unknown_certificate_refused(tmp_path: Path) -> None:
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", "key.pem"]
    command = ["openssl", "req", "-x509", *key, "-out", "cert.pem", "-days", "2", *names]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")

    async def main() -> None:
        async with engine(replies(OK), server) as url:
            trusting = UpstreamPool(url, tls=ssl.create_default_context(cafile=str(tmp_path / "cert.pem")))
            for _ in range(2):
                assert (await ask(trusting)).body == b"ok"
            assert trusting.connections == 1
            await closed(trusting)
            wary = UpstreamPool(url)
            failure = (await ask(wary)).failure
            assert failure is not None
            assert (failure.kind, failure.phase) == ("refused", "connect")
            await closed(wary)

    run(main())


class Wire(asyncio.Transport):
    """An in-memory transport that records the written bytes and whether it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.closing = False

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        pass

    def is_closing(self) -> bool:
        return self.closing

    def abort(self) -> None:
        self.closing = True


@given(
    body=st.binary(max_size=200),
    chunks=st.lists(st.integers(1, 50), max_size=5),
    informational=st.booleans(),
    cuts=st.lists(st.integers(0, 400), max_size=12),
)
def test_an_answer_is_the_same_however_the_bytes_are_cut(
    body: bytes, chunks: list[int], informational: bool, cuts: list[int]
) -> None:
    raw = b"HTTP/1.1 100 Continue\r\n\r\n" if informational else b""
    if chunks:
        raw += b"HTTP/1.1 200 OK\r\nA: b \r\ntransfer-encoding: chunked\r\n\r\n"
        rest = body
        for size in chunks:
            piece, rest = rest[:size], rest[size:]
            raw += b"%x\r\n%b\r\n" % (len(piece), piece) if piece else b""
        raw += (b"%x\r\n%b\r\n" % (len(rest), rest) if rest else b"") + b"0\r\n\r\n"
    else:
        raw += b"HTTP/1.1 200 OK\r\nA: b \r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)

    async def main() -> None:
        pool, heard = UpstreamPool("http://engine:1"), Heard()
        line, wire = UpstreamConnection(pool), Wire()
        line.connection_made(wire)
        pool.keep(line)
        send(pool, heard)
        edges = sorted({0, len(raw), *(cut for cut in cuts if cut < len(raw))})
        for start, end in pairwise(edges):
            line.data_received(raw[start:end])
        heard.check()
        assert (heard.status, heard.body, heard.told[-1]) == (200, body, "end")
        assert heard.headers[0] == (b"a", b"b")
        assert (pool.busy, pool.idle, wire.closing) == (0, 1, False)
        line.connection_lost(None)
        assert pool.connections == 0

    asyncio.run(main())


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n"


@pytest.mark.parametrize(
    ("begin", "more", "phase"),
    [
        (b"HTTP/1.1 200 OK\r\nx: ", b"a" * 1000, "first_byte"),
        (b"HTTP/1.1 200 OK\r\n", b"x: y\r\n" * 100, "first_byte"),
        (b"", b"HTTP/1.1 103 Early Hints\r\nx: y\r\n\r\n" * 20, "first_byte"),
        (CHUNKED + b"0\r\nx: ", b"a" * 1000, "body"),
        (CHUNKED + b"0\r\n", b"x: y\r\n" * 100, "body"),
        (CHUNKED + b"2;x=", b"a" * 1000, "body"),
    ],
    ids=["head", "head-lines", "informational", "trailer", "trailer-lines", "chunk-extension"],
)
def test_what_is_not_body_is_refused_beyond_its_limit(begin: bytes, more: bytes, phase: str) -> None:
    """An endless head, trailer section or chunk extension is rejected after a bounded number of bytes."""

    async def main() -> None:
        pool, heard = UpstreamPool("http://engine:1"), Heard()
        line, wire = UpstreamConnection(pool), Wire()
        line.connection_made(wire)
        pool.keep(line)
        send(pool, heard)
        line.data_received(begin or more)
        pieces = 0
        while heard.failure is None and pieces * len(more) < 4 * HEAD_BYTES_MAX:
            line.data_received(more)
            pieces += 1
        heard.check()
        assert heard.failure is not None
        assert (heard.failure.kind, heard.failure.phase) == ("malformed", phase)
        assert pieces * len(more) <= HEAD_BYTES_MAX + len(more)
        line.connection_lost(None)

    asyncio.run(main())


def test_a_response_has_a_bounded_number_of_header_lines() -> None:
    for lines, kind in ((HEAD_LINES_MAX - 1, ""), (HEAD_LINES_MAX, "malformed")):
        heard = one_answer(replies(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n" + b"x: y\r\n" * lines + b"\r\nok"))
        assert (heard.failure.kind if heard.failure else "") == kind


BEHAVIOURS: dict[str, tuple[bytes, bool]] = {
    "fine": (OK, False),
    "fine-then-closed": (OK, True),
    "closed": (b"", True),
    "rubbish": (b"\x00\x01", False),
    "short": (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok", True),
    "surplus": (OK + OK, False),
    "until-close": (b"HTTP/1.1 200 OK\r\n\r\nok", True),
    "silent": (b"", False),
    "stuck": (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok", False),
}


@settings(max_examples=40, deadline=None)
@given(
    plan=st.lists(
        st.tuples(st.sampled_from(sorted(BEHAVIOURS)), st.sampled_from(["stay", "now", "later"])), max_size=20
    )
)
def test_every_call_ends_exactly_once_and_nothing_leaks(plan: list[tuple[str, str]]) -> None:
    """Engines behave in any way and callers leave at any time, all at once over one pool."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await reader.readuntil(b"\r\n\r\n")
            answer, close = BEHAVIOURS[request.split(b" ")[1][1:].decode()]
            writer.write(answer)
            if close:
                return

    async def main() -> None:
        async with engine(script) as url:
            pool = UpstreamPool(url, idle_max=3, deadlines=Deadlines(0.01))
            stayed = []
            for behaviour, leaving in plan:
                heard = Heard()
                request = request_bytes(b"GET", b"/" + behaviour.encode(), b"engine", [], b"")
                call = send(pool, heard, request, silent_s=0.2)
                if leaving == "stay":
                    stayed.append((behaviour, heard))
                    continue
                if leaving == "later":
                    for _ in range(3):
                        await asyncio.sleep(0)
                told = list(heard.told)
                call.abort()
                assert heard.told == told
            for behaviour, heard in stayed:
                await heard.over.wait()
                if behaviour in ("fine", "surplus", "until-close"):
                    assert heard.told[-1] == "end"
                elif behaviour in ("rubbish", "short", "silent", "stuck", "closed"):
                    assert heard.told[-1] == "failure"
            await closed(pool)
            for _, heard in stayed:
                heard.check()

    run(main())
