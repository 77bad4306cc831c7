"""Test rig for upstream calls: a scripted engine, and a sink that stores the response of a call."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import uvloop
from tests.waiting import HANGS_S

from kvroute.http.client.call import Call, Failure
from kvroute.http.client.pool import UpstreamPool, request_bytes
from kvroute.http.forwarding.stream_forwarder import Forwarded, ForwardedStream
from kvroute.http.headers import Headers

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


class RecordedResponse:
    """A response handler that records its calls in order."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: Headers = []
        self.body = b""
        self.failure: Failure | None = None
        self.callbacks: list[str] = []
        self.ended = asyncio.Event()
        self.started = asyncio.Event()

    def on_head(self, status: int, headers: Headers) -> None:
        self.callbacks.append("head")
        self.status, self.headers = status, headers
        self.started.set()

    def on_body(self, data: bytes) -> None:
        self.callbacks.append("body")
        self.body += data

    def on_end(self) -> None:
        self.callbacks.append("end")
        self.ended.set()

    def on_failure(self, failure: Failure) -> None:
        self.callbacks.append("failure")
        self.failure = failure
        self.ended.set()

    def check(self) -> None:
        """Check the order of calls that is guaranteed to every response handler."""
        ends = [name for name in self.callbacks if name in ("end", "failure")]
        assert len(ends) == 1
        assert self.callbacks[-1] == ends[0]
        assert self.callbacks.count("head") <= 1
        assert "body" not in self.callbacks or self.callbacks[0] == "head"
        assert ends[0] == "failure" or self.callbacks[0] == "head"


class RecordedChunks:
    """A handler of chunks that records them. It lets no thread forward any."""

    def __init__(self, response: RecordedResponse | None = None) -> None:
        """Args: `response` receives the data of the chunks, too."""
        self.chunks: list[tuple[bytes, int]] = []
        self._response = response

    def on_chunk(self, chunk: bytes, data_bytes: int) -> None:
        self.chunks.append((chunk, data_bytes))
        if self._response is not None:
            self._response.on_body(chunk[-2 - data_bytes : -2])

    def forward(self, source: int, returned: Callable[[Forwarded], None]) -> ForwardedStream | None:
        return None

    def on_forwarded(self, result: Forwarded) -> None:
        raise AssertionError("no thread forwards chunks")


class Wire(asyncio.Transport):
    """An in-memory transport that drops what is written and records whether it was closed."""

    def __init__(self, extra: dict[str, Any] | None = None) -> None:
        super().__init__(extra)
        self.closing = False

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        pass

    def is_closing(self) -> bool:
        return self.closing

    def abort(self) -> None:
        self.closing = True


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
    pool: UpstreamPool,
    response: RecordedResponse,
    request: bytes = GET,
    *,
    silent_s: float = 10.0,
    head_only: bool = False,
) -> Call:
    call = pool.send(request, response, first_byte_s=silent_s, idle_s=silent_s, head_only=head_only)
    assert response.callbacks == [], "callbacks never come from inside send"
    return call


async def fetch(
    pool: UpstreamPool, request: bytes = GET, *, silent_s: float = 10.0, head_only: bool = False
) -> RecordedResponse:
    response = RecordedResponse()
    send(pool, response, request, silent_s=silent_s, head_only=head_only)
    await response.ended.wait()
    response.check()
    return response


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
