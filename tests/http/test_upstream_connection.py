"""Upstream calls: every framing of a response is read, failures give their phase, callers may pause and abort."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.http.upstream_rig import (
    OK,
    RecordedChunks,
    RecordedResponse,
    Script,
    Wire,
    closed,
    engine,
    fetch,
    replies,
    run,
    send,
)

from kvroute.http.client.call import Call, Failure
from kvroute.http.client.pool import UpstreamPool, request_bytes
from kvroute.http.client.response_parser import HEAD_BYTES_MAX, HEAD_LINES_MAX
from kvroute.http.client.upstream_connection import UpstreamConnection
from kvroute.http.deadlines import Deadlines
from kvroute.http.headers import Headers


def one_response(script: Script, *, silent_s: float = 10.0, head_only: bool = False) -> RecordedResponse:
    async def main() -> RecordedResponse:
        async with engine(script) as url:
            pool = UpstreamPool(url, deadlines=Deadlines(0.01))
            response = await fetch(pool, silent_s=silent_s, head_only=head_only)
            await closed(pool)
            return response

    return run(main())


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
def test_every_framing_is_parsed_and_the_connection_stays_usable(pieces: list[bytes], status: int, body: bytes) -> None:
    async def main() -> None:
        async with engine(replies(*pieces)) as url:
            pool = UpstreamPool(url)
            for _ in range(2):
                response = await fetch(pool)
                assert (response.status, response.body, response.callbacks[-1]) == (status, body, "end")
                assert not any(name in (b"link", b"x") for name, _ in response.headers)
            assert (pool.idle, pool.connections) == (1, 1)
            await closed(pool)

    run(main())


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok",
        OK + b"surplus",
        OK + OK,
        OK + b"HTTP/1.1 200 OK\r\nx: ",
    ],
    ids=["until-close", "1.0", "close", "surplus", "second-response", "half-a-response"],
)
def test_a_connection_in_an_uncertain_state_is_closed(reply: bytes) -> None:
    async def main() -> None:
        async with engine(replies(reply, close=b"content-length" not in reply)) as url:
            pool = UpstreamPool(url)
            response = await fetch(pool)
            assert (response.status, response.body, response.callbacks[-1]) == (200, b"ok", "end")
            assert pool.idle == 0
            await closed(pool)

    run(main())


def test_a_response_to_a_head_call_has_no_body() -> None:
    response = one_response(replies(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n"), head_only=True)
    assert (response.callbacks, dict(response.headers)[b"content-length"]) == (["head", "end"], b"99")


@pytest.mark.parametrize(
    ("reply", "kind", "phase"),
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
def test_an_incomplete_response_is_a_failure_with_its_phase(reply: bytes, kind: str, phase: str) -> None:
    failure = one_response(replies(reply, close=True)).failure
    assert failure is not None
    assert (failure.kind, failure.phase) == (kind, phase)


@pytest.mark.parametrize(
    ("reply", "phase"),
    [
        (b"", "first_byte"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", "first_byte"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n", "body"),
    ],
    ids=["nothing", "head", "body"],
)
def test_an_engine_that_sends_nothing_causes_a_timeout(reply: bytes, phase: str) -> None:
    failure = one_response(replies(reply), silent_s=0.02).failure
    assert failure is not None
    assert (failure.kind, failure.phase) == ("timeout", phase)


def test_a_closed_port_is_reported_as_connection_refused() -> None:
    async def main() -> Failure | None:
        async with engine(replies(OK)) as url:
            pass
        pool = UpstreamPool(url)
        response = await fetch(pool)
        await closed(pool)
        return response.failure

    failure = run(main())
    assert failure is not None
    assert (failure.kind, failure.phase) == ("refused", "connect")


def test_connect_and_tls_handshake_have_a_timeout() -> None:
    """The server never answers the TLS handshake of the client."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def main() -> Failure | None:
        async with engine(script) as url:
            pool = UpstreamPool(url.replace("http:", "https:"), connect_s=0.05)
            response = await fetch(pool)
            await closed(pool)
            return response.failure

    failure = run(main())
    assert failure is not None
    assert (failure.kind, failure.phase) == ("timeout", "connect")


@pytest.mark.parametrize("when", ["connecting", "waiting", "body", "inside"])
def test_an_aborted_call_gets_no_callback_and_closes_its_connection(when: str) -> None:
    async def main() -> None:
        left = asyncio.Event()

        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            requested.set()
            if when in ("body", "inside"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok")
            try:
                await reader.read()
            finally:
                left.set()

        requested = asyncio.Event()
        async with engine(script) as url:
            pool = UpstreamPool(url)

            class Aborting(RecordedResponse):
                def on_head(self, status: int, headers: Headers) -> None:
                    super().on_head(status, headers)
                    if when == "inside":
                        call.abort()

            response = Aborting()
            call = send(pool, response)
            if when == "waiting":
                await requested.wait()
            elif when != "connecting":
                await response.started.wait()
            callbacks = list(response.callbacks)
            call.abort()
            call.abort()
            assert pool.busy == 0
            if when != "connecting":
                await left.wait()
            await closed(pool)
            assert response.callbacks == callbacks
            assert not response.ended.is_set()

    run(main())


def test_a_paused_call_reads_nothing_and_does_not_time_out() -> None:
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

            class Pausing(RecordedResponse):
                def on_head(self, status: int, headers: Headers) -> None:
                    super().on_head(status, headers)
                    call.pause()

            paused = Pausing()
            call = send(pool, paused, request_bytes(b"GET", b"/paused", b"engine", [], b""), silent_s=0.3)
            await paused.started.wait()
            for _ in range(2):
                other = await fetch(pool, silent_s=0.3)
                assert other.failure is not None
                assert other.failure.kind == "timeout"
            assert not paused.ended.is_set()
            assert len(paused.body) <= 2
            resumed.set()
            call.resume()
            await paused.ended.wait()
            assert (paused.body, paused.callbacks[-1]) == (b"abcd", "end")
            assert pool.idle == 1
            assert (await fetch(pool, silent_s=0.05)).failure is not None, "the connection reads again"
            await closed(pool)

    run(main())


def test_a_request_has_host_and_content_length() -> None:
    headers = [(b"x-request-id", b"7")]
    assert (
        request_bytes(b"POST", b"/v1/completions", b"e:1", headers, b"{}")
        == b"POST /v1/completions HTTP/1.1\r\nhost: e:1\r\nx-request-id: 7\r\ncontent-length: 2\r\n\r\n{}"
    )
    assert b"content-length: 0\r\n" in request_bytes(b"POST", b"/", b"e", [], b"")
    assert b"content-length" not in request_bytes(b"GET", b"/", b"e", [], b"")


def test_https_works_and_an_unknown_certificate_is_rejected(tmp_path: Path) -> None:
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
                assert (await fetch(trusting)).body == b"ok"
            assert trusting.connections == 1
            await closed(trusting)
            untrusting = UpstreamPool(url)
            failure = (await fetch(untrusting)).failure
            assert failure is not None
            assert (failure.kind, failure.phase) == ("refused", "connect")
            await closed(untrusting)

    run(main())


@given(
    body=st.binary(max_size=200),
    chunks=st.lists(st.integers(1, 50), max_size=5),
    informational=st.booleans(),
    cuts=st.lists(st.integers(0, 400), max_size=12),
)
def test_a_parsed_response_does_not_depend_on_how_the_bytes_are_split(
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
        pool, response = UpstreamPool("http://engine:1"), RecordedResponse()
        connection, wire = UpstreamConnection(pool), Wire()
        connection.connection_made(wire)
        pool.keep(connection)
        send(pool, response)
        edges = sorted({0, len(raw), *(cut for cut in cuts if cut < len(raw))})
        for start, end in pairwise(edges):
            connection.data_received(raw[start:end])
        response.check()
        assert (response.status, response.body, response.callbacks[-1]) == (200, body, "end")
        assert response.headers[0] == (b"a", b"b")
        assert (pool.busy, pool.idle, wire.closing) == (0, 1, False)
        connection.connection_lost(None)
        assert pool.connections == 0

    asyncio.run(main())


SPELLINGS = (b"%x\r\n", b"%X\r\n", b"0%x\r\n", b"%x;x=y\r\n")
"""Size lines of chunks; the gateway itself writes the first form."""


@given(
    datas=st.lists(st.tuples(st.binary(min_size=1, max_size=40), st.booleans(), st.integers(0, 3)), max_size=6),
    cuts=st.lists(st.integers(0, 300), max_size=4),
)
@example(datas=[(b"a", False, 0), (b"b", True, 0)], cuts=[52])
@example(datas=[(b"\n", False, 0)], cuts=[])
def test_chunks_that_arrive_alone_are_relayed_with_their_framing_and_all_bytes_arrive_once_in_order(
    datas: list[tuple[bytes, bool, int]], cuts: list[int]
) -> None:
    """The body does not depend on which chunks skip the parser."""
    raw, ends, body, events = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", list[int](), b"", set[bytes]()
    for data, ends_event, spelling in datas:
        data += b"\n\n" if ends_event else b""
        raw += SPELLINGS[spelling] % len(data) + data + b"\r\n"
        body += data
        chunk = b"%x\r\n%b\r\n" % (len(data), data)
        if chunk.endswith(b"\n\n\r\n"):  # of one line feed, too: the size line ends with another one
            events.add(chunk)
        ends.append(len(raw))
    raw += b"0\r\n\r\n"

    async def main() -> None:
        pool, response = UpstreamPool("http://engine:1"), RecordedResponse()
        connection, wire = UpstreamConnection(pool), Wire()
        connection.connection_made(wire)
        pool.keep(connection)
        handler = RecordedChunks(response)
        send(pool, response).chunks = handler
        edges = sorted({0, len(raw), *ends, *(cut for cut in cuts if cut < len(raw))})
        for start, end in pairwise(edges):
            connection.data_received(raw[start:end])
        response.check()
        assert (response.body, response.callbacks[-1]) == (body, "end")
        assert (pool.busy, pool.idle, wire.closing) == (0, 1, False)
        # A chunk is parsed if the bytes before it arrived in two parts between CR and LF.
        spans = {span for span in set(pairwise(ends)) & set(pairwise(edges)) if span[0] - 1 not in edges}
        assert [chunk for chunk, _ in handler.chunks] == [
            raw[slice(*span)] for span in sorted(spans) if raw[slice(*span)] in events
        ]
        connection.connection_lost(None)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("chunk", "alone"),
    [
        (b"5\r\nabc\n\n\r\n", True),
        (b"4\r\nabc\n\n\r\n", False),
        (b"5\r\nabcde\r\n", False),
        (b"05\r\nabc\n\n\r\n", False),
        (b"5;\r\nabc\n\n\r\n", False),
        (b"3\r\nabc\r\n5\r\nabc\n\n\r\n", False),
    ],
    ids=["alone", "wrong-size", "no-event", "zero", "extension", "two"],
)
def test_a_chunk_skips_the_parser_only_if_it_is_exactly_one_event_in_the_gateways_own_form(
    chunk: bytes, alone: bool
) -> None:
    async def main() -> None:
        pool, response = UpstreamPool("http://engine:1"), RecordedResponse()
        connection = UpstreamConnection(pool)
        connection.connection_made(Wire())
        pool.keep(connection)
        handler = RecordedChunks()
        send(pool, response).chunks = handler
        connection.data_received(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        connection.data_received(b"2\r\nok\r\n")
        connection.data_received(chunk)
        assert handler.chunks == ([(chunk, 5)] if alone else [])
        connection.connection_lost(None)

    asyncio.run(main())


def test_bytes_between_chunks_that_are_no_chunk_are_malformed() -> None:
    """After chunks that skip the parser, it still detects an invalid size line."""

    async def main() -> None:
        pool, response = UpstreamPool("http://engine:1"), RecordedResponse()
        connection = UpstreamConnection(pool)
        connection.connection_made(Wire())
        pool.keep(connection)
        send(pool, response).chunks = RecordedChunks()
        connection.data_received(CHUNKED)
        connection.data_received(b"5\r\nabc\n\n\r\n")
        connection.data_received(b"no chunk\n\n\r\n")
        response.check()
        assert response.failure is not None
        assert response.failure.kind == "malformed"
        connection.connection_lost(None)

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
def test_response_heads_trailers_and_chunk_extensions_have_a_size_limit(begin: bytes, more: bytes, phase: str) -> None:
    """An endless head, trailer section or chunk extension is rejected after a bounded number of bytes."""

    async def main() -> None:
        pool, response = UpstreamPool("http://engine:1"), RecordedResponse()
        connection, wire = UpstreamConnection(pool), Wire()
        connection.connection_made(wire)
        pool.keep(connection)
        send(pool, response)
        connection.data_received(begin or more)
        pieces = 0
        while response.failure is None and pieces * len(more) < 4 * HEAD_BYTES_MAX:
            connection.data_received(more)
            pieces += 1
        response.check()
        assert response.failure is not None
        assert (response.failure.kind, response.failure.phase) == ("malformed", phase)
        assert pieces * len(more) <= HEAD_BYTES_MAX + len(more)
        connection.connection_lost(None)

    asyncio.run(main())


def test_a_response_has_a_bounded_number_of_header_lines() -> None:
    for lines, kind in ((HEAD_LINES_MAX - 1, ""), (HEAD_LINES_MAX, "malformed")):
        response = one_response(replies(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n" + b"x: y\r\n" * lines + b"\r\nok"))
        assert (response.failure.kind if response.failure else "") == kind


def tiny_chunks(count: int, data: bytes = b"a") -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data) * count


def test_other_work_runs_between_parts_of_a_stream_of_tiny_chunks_and_the_stream_ends() -> None:
    """However much has arrived, one turn of the loop parses some thousand chunks."""

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            writer.write(tiny_chunks(40_000))
            await writer.drain()

    class Counted(RecordedResponse):
        turns = 0
        parts: ClassVar[list[tuple[int, int]]] = []

        def on_body(self, data: bytes) -> None:
            super().on_body(data)
            self.parts.append((self.turns, len(data)))

    async def main() -> None:
        async with engine(endless) as url:
            pool, response = UpstreamPool(url), Counted()
            send(pool, response)
            while not response.ended.is_set():
                response.turns += 1
                await asyncio.sleep(0)
            await closed(pool)
        assert response.failure is not None
        assert response.failure.kind == "malformed"
        assert "very many pieces" in response.failure.text
        assert max(nbytes for _, nbytes in response.parts) <= 4_096
        turns = Counter(turn for turn, _ in response.parts)
        assert max(turns.values()) <= 2, "one of what was received before, one of what is received"
        assert len(response.body) < 2**18

    run(main())


def test_other_work_runs_between_parts_of_a_body_whose_handling_takes_long() -> None:
    """However much has arrived: one turn of the loop handles little of it. What is handled quickly comes in larger
    parts."""
    whole = b"%x\r\n%b\r\n" % (60_000, b"a" * 60_000) * 100
    reply = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + whole + b"0\r\n\r\n"

    class Counted(RecordedResponse):
        def __init__(self, seconds: float) -> None:
            super().__init__()
            self.turns, self.seconds, self.parts = 0, seconds, Counter[int]()

        def on_body(self, data: bytes) -> None:
            self.parts[self.turns] += len(data)
            until_s = time.perf_counter() + self.seconds
            while time.perf_counter() < until_s:
                pass

    async def main() -> None:
        async with engine(replies(reply)) as url:
            pool, slow, fast = UpstreamPool(url), Counted(0.004), Counted(0.0)
            for response in (slow, fast):
                send(pool, response)
                while not response.ended.is_set():
                    response.turns += 1
                    await asyncio.sleep(0)
            await closed(pool)
        assert (slow.failure, fast.failure) == (None, None)
        assert (slow.parts.total(), fast.parts.total()) == (6_000_000, 6_000_000)
        assert max(slow.parts.values()) <= 2**16 < max(fast.parts.values())

    run(main())


@pytest.mark.parametrize("data", [b"a", b"ab", b"data: x\n\n"])
def test_many_small_chunks_arrive_complete_and_the_connection_stays_usable(data: bytes) -> None:
    count = 30_000
    reply = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + tiny_chunks(count, data) + b"0\r\n\r\n"

    async def main() -> None:
        async with engine(replies(reply)) as url:
            pool = UpstreamPool(url)
            for _ in range(2):
                assert (await fetch(pool)).body == data * count
            assert pool.connections == 1
            await closed(pool)

    run(main())


def test_a_call_that_is_paused_within_tiny_chunks_goes_on_when_it_is_resumed() -> None:
    """Also if it is paused in a callback while received bytes wait to be parsed."""
    count = 30_000
    reply = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + tiny_chunks(count) + b"0\r\n\r\n"

    class Pausing(RecordedResponse):
        call: Call

        def on_body(self, data: bytes) -> None:
            super().on_body(data)
            self.call.pause()
            asyncio.get_running_loop().call_soon(asyncio.get_running_loop().call_soon, self.call.resume)

    async def main() -> None:
        async with engine(replies(reply)) as url:
            pool, response = UpstreamPool(url), Pausing()
            response.call = send(pool, response)
            await response.ended.wait()
            assert response.body == b"a" * count
            await closed(pool)

    run(main())
