"""The forwarding thread: every byte arrives once and in order, and no descriptor or registration is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import select
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.http.test_forwarding_loop import slowly
from tests.http.upstream_rig import run
from tests.waiting import HANGS_S

from kvroute.http.forwarding.stream_forwarder import Forwarded, StreamForwarder

EVENT = b'data: {"token": 1}\n\n'
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
END = b"0\r\n\r\n"


@asynccontextmanager
async def forwarding() -> AsyncIterator[StreamForwarder]:
    """Run a thread; at the end all of its descriptors are closed."""
    before = set(os.listdir("/proc/self/fd"))
    forwarder = StreamForwarder()
    forwarder.start()
    try:
        yield forwarder
    finally:
        forwarder.close()
    assert len(forwarder) == 0
    assert set(os.listdir("/proc/self/fd")) <= before


class Pair:
    """An engine's and a client's end of a stream, and the gateway's two sockets between them."""

    def __init__(self, forwarder: StreamForwarder, *, send_bytes: int = 0) -> None:
        self.engine, self.source = socket.socketpair()
        self.sink, self.client = socket.socketpair()
        if send_bytes:
            self.sink.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
        for sock in (self.engine, self.source, self.sink, self.client):
            sock.setblocking(False)
        self.forwarder = forwarder
        self.returned: asyncio.Future[Forwarded] = asyncio.get_running_loop().create_future()

    def begin(self, token_line: bytes = b"") -> None:
        stream = self.forwarder.begin(self.source.fileno(), self.sink.fileno(), token_line, self.returned.set_result)
        assert stream is not None
        self.stream = stream

    async def received(self, nbytes: int) -> bytes:
        """Return what the client receives, until so many bytes have arrived."""
        data = b""
        while len(data) < nbytes:
            data += await asyncio.get_running_loop().sock_recv(self.client, nbytes - len(data))
        return data

    def close(self) -> None:
        for sock in (self.engine, self.source, self.sink, self.client):
            sock.close()


@contextmanager
def pair(forwarder: StreamForwarder, *, send_bytes: int = 0) -> Iterator[Pair]:
    made = Pair(forwarder, send_bytes=send_bytes)
    try:
        yield made
    finally:
        made.close()


def test_chunks_reach_the_client_and_the_end_of_the_body_returns_the_stream() -> None:
    async def scenario() -> None:
        async with forwarding() as forwarder:
            with pair(forwarder) as one:
                one.begin()
                for _ in range(3):
                    one.engine.send(CHUNK)
                    assert await one.received(len(CHUNK)) == CHUNK
                one.engine.send(CHUNK + END)
                assert await one.received(len(CHUNK)) == CHUNK
                result = await one.returned
                assert result == Forwarded(4 * len(EVENT), 4, 0, 0, b"", END)
                assert len(forwarder) == 0

    run(scenario())


@pytest.mark.parametrize("rest", [END, CHUNK[:-1], b"5\r\nhello\r\n", b"\x00", CHUNK[:2]])
def test_what_is_no_whole_chunk_returns_unparsed(rest: bytes) -> None:
    async def scenario() -> None:
        async with forwarding() as forwarder:
            with pair(forwarder) as one:
                one.begin()
                one.engine.send(CHUNK + rest)
                result = await one.returned
                assert (result.data_lines, result.unsent, result.unparsed) == (1, b"", rest)
                assert await one.received(len(CHUNK)) == CHUNK

    run(scenario())


def test_the_end_of_either_side_returns_the_stream() -> None:
    async def scenario() -> None:
        async with forwarding() as forwarder:
            with pair(forwarder) as one:
                one.begin()
                one.engine.close()
                assert await one.returned == Forwarded(0, 0, 0, 0, b"", b"")
            with pair(forwarder) as one:
                one.begin()
                one.client.close()
                one.engine.send(CHUNK)
                assert await one.returned == Forwarded(len(EVENT), 1, 0, 0, CHUNK, b"")

    run(scenario())


def test_a_client_that_does_not_read_returns_the_stream_with_the_unsent_bytes() -> None:
    """The event loop goes on from any byte of a chunk."""

    async def scenario() -> None:
        async with forwarding() as forwarder:
            with pair(forwarder, send_bytes=4096) as one:
                one.begin()
                sent = 0
                while not one.returned.done():
                    try:
                        one.engine.send(CHUNK)
                        sent += 1
                    except BlockingIOError:
                        pass
                    await asyncio.sleep(0)
                result = await one.returned
                assert result.data_lines > 0
                assert result.unparsed == b""
                before = len(CHUNK) * result.data_lines - len(result.unsent)
                assert await one.received(before) + result.unsent == CHUNK * result.data_lines

    run(scenario())


def test_a_stream_that_is_taken_back_is_not_read_any_more() -> None:
    async def scenario() -> None:
        async with forwarding() as forwarder:
            with pair(forwarder) as one:
                one.begin()
                began_s = time.monotonic()
                one.engine.send(CHUNK)
                await one.received(len(CHUNK))
                assert began_s <= one.stream.last_s <= time.monotonic()
                result = one.stream.take_back()
                assert result == Forwarded(len(EVENT), 1, 0, 0, b"", b"")
                assert one.stream.take_back() is result, "a second call changes nothing"
                one.engine.send(CHUNK)
                assert await asyncio.get_running_loop().sock_recv(one.source, 100) == CHUNK
                await asyncio.sleep(0)
                assert not one.returned.done()

    run(scenario())


def test_a_stream_that_has_come_back_already_can_be_taken_back() -> None:
    """The thread returns several streams; the event loop takes one of them before it has heard of that."""

    async def scenario() -> None:
        async with forwarding() as forwarder:
            with pair(forwarder) as one, pair(forwarder) as other:
                for joined in (one, other):
                    joined.begin()
                    joined.engine.send(CHUNK + END)
                for joined in (one, other):
                    _wait_until_readable(joined.client)
                assert one.stream.take_back().unparsed == END
                assert (await other.returned).unparsed == END
                assert not one.returned.done()

    run(scenario())


def _wait_until_readable(client: socket.socket) -> None:
    """Wait without running the event loop."""
    assert select.select([client], [], [], HANGS_S)[0]


def test_the_thread_has_a_limited_number_of_streams() -> None:
    async def scenario() -> None:
        async with forwarding() as forwarder:
            forwarder.streams_max = 2
            with pair(forwarder) as one, pair(forwarder) as other, pair(forwarder) as third:
                one.begin()
                other.begin()
                begun = forwarder.begin(third.source.fileno(), third.sink.fileno(), b"", third.returned.set_result)
                assert begun is None
                one.stream.take_back()
                third.begin()

    run(scenario())


@pytest.mark.parametrize("spare", [0, 1])
def test_without_descriptors_the_stream_stays_in_the_event_loop(spare: int) -> None:
    async def scenario() -> None:
        async with forwarding() as forwarder:
            with pair(forwarder) as one, every_descriptor_used(spare):
                assert forwarder.begin(one.source.fileno(), one.sink.fileno(), b"", one.returned.set_result) is None

    run(scenario())


@contextmanager
def every_descriptor_used(spare: int) -> Iterator[None]:
    """Use all descriptors of the process but `spare`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(int(name) for name in os.listdir("/proc/self/fd")) + 20, hard))
    used = []
    try:
        with contextlib.suppress(OSError):
            while True:
                used.append(os.dup(0))
        for descriptor in used[:spare]:
            os.close(descriptor)
        yield
    finally:
        for descriptor in used[spare:]:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_rows_are_used_again_at_once_while_streams_come_back_from_both_sides() -> None:
    """A late command or event of a stream does not concern the next stream of its row."""

    async def scenario() -> None:
        draw = random.Random(1)
        async with forwarding() as forwarder, contextlib.AsyncExitStack() as stack:
            sides = [BusySide(stack.enter_context(pair(forwarder)), number) for number in range(16)]
            for _ in range(20_000):
                side = draw.choice(sides)
                if side.forwarded and not side.ended:
                    side.send(draw.random() < 0.3)
                side = draw.choice(sides)
                if side.forwarded:
                    side.take_back()
                draw.choice(sides).begin()
                if draw.random() < 0.2:
                    await asyncio.sleep(0)
            for side in sides:
                if side.forwarded:
                    side.take_back()
                side.receive()
                assert side.received == side.sent
            assert len(forwarder) == 0
            # The kernel watches the pipe with commands and no socket.
            assert Path(f"/proc/self/fdinfo/{epoll_of_this_process()}").read_text().count("tfd:") == 1

    run(scenario())


def epoll_of_this_process() -> int:
    """Return the newest epoll instance: the thread's. The event loop has an older one."""
    return max(
        int(path.name)
        for path in Path("/proc/self/fd").iterdir()
        if path.is_symlink() and "eventpoll" in os.readlink(path)
    )


class BusySide:
    """A stream that the thread or the event loop forwards; its engine sends chunks and ends of bodies."""

    def __init__(self, one: Pair, number: int) -> None:
        self._one, self._number = one, number
        self.sent = self.received = b""
        """What the engine has sent, without the ends of bodies, and what the client has received."""
        self.forwarded = self.ended = False

    def begin(self) -> None:
        if not self.forwarded:
            self.forwarded = True
            one = self._one
            stream = one.forwarder.begin(one.source.fileno(), one.sink.fileno(), b"", self._returned)
            assert stream is not None
            self._stream = stream

    def send(self, end: bool) -> None:
        """Send a chunk, and with `end` the end of the body."""
        event = b"data: %d: %d\n\n" % (self._number, len(self.sent))
        chunk = b"%x\r\n%b\r\n" % (len(event), event)
        self.sent, self.ended = self.sent + chunk, end
        self._one.engine.send(chunk + END if end else chunk)
        self.receive()

    def take_back(self) -> None:
        self._returned(self._stream.take_back())

    def receive(self) -> None:
        """Let the client receive what has arrived."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self.received += self._one.client.recv(1 << 20)

    def _returned(self, result: Forwarded) -> None:
        """Forward what the thread has left."""
        self.forwarded = False
        rest = result.unparsed
        with contextlib.suppress(BlockingIOError):
            rest += self._one.source.recv(1 << 16)
        if self.ended:
            assert rest.endswith(END)
            rest, self.ended = rest[: -len(END)], False
        self._one.sink.send(result.unsent + rest)


def test_nothing_is_taken_before_the_start_and_after_the_end() -> None:
    async def scenario() -> None:
        forwarder = StreamForwarder()
        with pair(forwarder) as one:
            assert forwarder.begin(one.source.fileno(), one.sink.fileno(), b"", one.returned.set_result) is None
        forwarder.close()
        async with forwarding() as forwarder:
            with pair(forwarder) as one:
                one.begin()
                forwarder.close()
                assert (await one.returned).unparsed == b""
                forwarder.close()
                assert forwarder.begin(one.source.fileno(), one.sink.fileno(), b"", one.returned.set_result) is None

    run(scenario())


class EventLoopSide:
    """The event loop's part in its simplest form: it reads a stream itself until it is between two chunks again."""

    def __init__(self, one: Pair) -> None:
        self._one, self.data_lines = one, 0
        self._pending = b""

    async def run(self) -> None:
        """Forward the stream to its end."""
        one, loop = self._one, asyncio.get_running_loop()
        while True:
            one.returned = loop.create_future()
            one.begin()
            await self._result(await one.returned)
            while self._pending:
                whole = slowly(self._pending, b"")
                self.data_lines += whole.data_lines
                await loop.sock_sendall(one.sink, self._pending[: whole.whole])
                self._pending = self._pending[whole.whole :]
                if self._pending == END:
                    return
                if self._pending:
                    self._pending += await loop.sock_recv(one.source, 1 << 16)

    def take_back(self) -> None:
        """Take the stream back, if the thread owns it."""
        if not self._one.returned.done():
            self._one.returned.set_result(self._one.stream.take_back())

    async def _result(self, result: Forwarded) -> None:
        self.data_lines += result.data_lines
        await asyncio.get_running_loop().sock_sendall(self._one.sink, result.unsent)
        self._pending = result.unparsed


@settings(max_examples=50)
@given(
    st.lists(st.integers(0, 3000), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(1, 8000), st.booleans()), max_size=12),
)
def test_every_byte_arrives_once_and_in_order(sizes: list[int], pieces: list[tuple[int, bool]]) -> None:
    """The engine's chunks arrive in any pieces, the event loop takes the stream back at any time, and the client's
    buffer is smaller than some of the chunks."""
    events = [b"data: %b\n\n" % (b"x" * size) for size in sizes]
    body = b"".join([b"%x\r\n%b\r\n" % (len(event), event) for event in events])

    async def scenario() -> None:
        async with forwarding() as forwarder:
            with pair(forwarder, send_bytes=2048) as one:
                side, loop = EventLoopSide(one), asyncio.get_running_loop()
                forwards, receives = loop.create_task(side.run()), loop.create_task(one.received(len(body)))
                await asyncio.sleep(0)
                rest = body + END
                for nbytes, take in pieces:
                    await loop.sock_sendall(one.engine, rest[:nbytes])
                    rest = rest[nbytes:]
                    if take:
                        side.take_back()
                await loop.sock_sendall(one.engine, rest)
                assert await receives == body
                await forwards
                assert side.data_lines == len(events)

    run(scenario())
