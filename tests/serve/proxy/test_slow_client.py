"""A client that reads slowly, through the whole gateway: its engine is slowed down, and no byte is lost or buffered
without bound."""

from __future__ import annotations

import asyncio
import socket
from typing import cast

import httptools
import msgspec
import pytest
import xxhash
from aiohttp import web
from tests.serve.rig import COMPLETIONS
from tests.serve.stub_engines import (
    Engine,
    ReceivedRequest,
    completion,
    engines_of,
    run,
    start_stream,
    stub_rig,
)

from kvroute.types import KvProtocol

EVENT_BYTES = 64 * 1024
TOTAL_BYTES = 100 * 1024 * 1024
SYSTEM_MAX_BYTES = 48 * 1024 * 1024
"""Upper bound of the bytes in the gateway and in the buffers of four sockets at the largest system size."""
QUIET_TURNS = 300
"""Number of turns of the shared event loop without a new byte after which all transfers count as stopped."""


def sse(index: int) -> bytes:
    """Return one event of the stream."""
    return b"data: %b\n\n" % (b"%015d-" % index * (EVENT_BYTES // 16))[: EVENT_BYTES - 8]


class Reader(asyncio.Protocol):
    """A client that sends its request and reads nothing until the test resumes it; it counts and hashes the body."""

    def __init__(self, request: bytes) -> None:
        self.body_bytes = 0
        self.hash = xxhash.xxh64()
        self.done = asyncio.Event()
        self._request = request
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        self.body_bytes += len(data)
        self.hash.update(data)

    def on_message_complete(self) -> None:
        self.done.set()


class Source:
    """The stream of a decode engine, sent as fast as the peer reads."""

    def __init__(self) -> None:
        self.taken_bytes = 0

    async def serve(self, _: Engine, request: web.BaseRequest, __: ReceivedRequest) -> web.StreamResponse:
        """Send the stream."""
        response = await start_stream(request)
        for index in range(TOTAL_BYTES // EVENT_BYTES):
            await response.write(sse(index))
            self.taken_bytes += EVENT_BYTES
        await response.write_eof()
        return response

    async def until_paused(self) -> int:
        """Wait until no more bytes are taken; return the number of bytes taken."""
        quiet_turns, before = 0, -1
        while quiet_turns < QUIET_TURNS:
            await asyncio.sleep(0)
            quiet_turns, before = (quiet_turns + 1 if self.taken_bytes == before > 0 else 0), self.taken_bytes
        return self.taken_bytes


async def reader_of(port: int) -> Reader:
    """Connect a client with a small receive buffer that does not read."""
    body = msgspec.json.encode(completion(stream=True))
    head = b"POST %b HTTP/1.1\r\nHost: g\r\nContent-Length: %d\r\n\r\n" % (COMPLETIONS.encode(), len(body))
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, EVENT_BYTES)
    sock.connect(("127.0.0.1", port))
    sock.setblocking(False)
    _, reader = await asyncio.get_running_loop().create_connection(lambda: Reader(head + body), sock=sock)
    reader.transport.pause_reading()
    return reader


@pytest.mark.parametrize("protocol", ["vllm", "sglang"])
def test_bytes_that_a_client_does_not_read_stay_in_the_engine(protocol: KvProtocol) -> None:
    """The client then reads in bursts and receives all bytes unchanged; another client is served meanwhile."""

    async def main() -> None:
        source = Source()
        prefill, decode = engines_of(protocol)
        for engine in decode:
            engine.serve = source.serve
        async with stub_rig(prefill + decode) as front:
            reader = await reader_of(front.gateway.port)
            assert await source.until_paused() <= SYSTEM_MAX_BYTES
            assert reader.body_bytes == 0
            assert (await front.get("/health")).status == 200
            for _ in range(20):
                reader.transport.resume_reading()
                await asyncio.sleep(0)
                reader.transport.pause_reading()
                assert source.taken_bytes - reader.body_bytes <= SYSTEM_MAX_BYTES
            reader.transport.resume_reading()
            await reader.done.wait()
            expected = xxhash.xxh64()
            for index in range(TOTAL_BYTES // EVENT_BYTES):
                expected.update(sse(index))
            assert (reader.body_bytes, reader.hash.digest()) == (TOTAL_BYTES, expected.digest())
            reader.transport.abort()
            assert await front.becomes_idle(), front.held_resources()

    run(main())


def test_a_client_that_never_reads_is_disconnected_and_its_engine_released() -> None:
    """The gateway closes both connections after the timeout in the settings."""

    async def main() -> None:
        source, left = Source(), asyncio.Event()
        prefill, decode = engines_of("vllm")

        async def serve(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
            try:
                return await source.serve(engine, request, received)
            finally:
                left.set()

        for engine in decode:
            engine.serve = serve
        async with stub_rig(prefill + decode, "  limits: {stall: 50 ms}\n") as front:
            reader = await reader_of(front.gateway.port)
            await left.wait()
            assert source.taken_bytes < TOTAL_BYTES
            assert await front.becomes_idle(), front.held_resources()
            reader.transport.abort()

    run(main())
