"""Calls whose response the forwarding thread has: the end, the silence and the close of their connection. The thread is
replaced by a stream that has come back already."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest
from tests.http.upstream_rig import RecordedResponse, Wire, send

from kvroute.http.client.call import Call
from kvroute.http.client.pool import UpstreamPool
from kvroute.http.client.upstream_connection import UpstreamConnection
from kvroute.http.error_format import PlainErrors
from kvroute.http.forwarding.stream_forwarder import Forwarded, ForwardedStream, StreamForwarder
from kvroute.http.forwarding.turn_writes import TurnTransport
from kvroute.http.server.exchange import Exchange

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNK = b"9\r\ndata: 1\n\n\r\n"
END = b"0\r\n\r\n"
IDLE_S = 10.0


class ReturnedStream(ForwardedStream):
    """A stream that has come back; the event loop has not been told."""

    def __init__(self, result: Forwarded, last_s: float) -> None:
        super().__init__(StreamForwarder(), 1, (-1, -1), lambda result: None)
        self.result = result
        self._last_s = last_s

    @property
    def last_s(self) -> float:
        return self._last_s


class Chunks:
    """Hands the stream over when it is offered."""

    def __init__(self, stream: ForwardedStream) -> None:
        self.results: list[Forwarded] = []
        self._stream: ForwardedStream | None = stream

    def on_chunk(self, chunk: bytes, data_bytes: int) -> None:
        pass

    def forward(self, source: int, returned: Callable[[Forwarded], None]) -> ForwardedStream | None:
        stream, self._stream = self._stream, None
        return stream

    def on_forwarded(self, result: Forwarded) -> None:
        self.results.append(result)


class SocketWire(Wire):
    """A transport in memory with a socket."""

    def __init__(self) -> None:
        self._ends = socket.socketpair()
        super().__init__({"socket": self._ends[0]})
        self.reading = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def free(self) -> None:
        for end in self._ends:
            end.close()


class FollowedResponse(RecordedResponse):
    """A response whose end sends another call."""

    def __init__(self, follow: Callable[[], Call]) -> None:
        super().__init__()
        self._follow = follow

    def on_end(self) -> None:
        super().on_end()
        self._follow()


class ForwardedCall:
    """A call whose response the thread forwards; it has read `unparsed` and is silent for `silent_s`."""

    def __init__(
        self, unparsed: bytes, silent_s: float = IDLE_S + 1.0, response: RecordedResponse | None = None
    ) -> None:
        response = RecordedResponse() if response is None else response
        loop = asyncio.get_running_loop()
        self.pool, self.response, self.wire = UpstreamPool("http://engine:1"), response, SocketWire()
        self.connection = UpstreamConnection(self.pool)
        self.connection.connection_made(self.wire)
        self.pool.keep(self.connection)
        self.call: Call = send(self.pool, self.response, silent_s=IDLE_S)
        result = Forwarded(9, 1, 0, 0, b"", unparsed)
        self.chunks = self.call.chunks = Chunks(ReturnedStream(result, loop.time() - silent_s))
        self.connection.data_received(HEAD + CHUNK)
        for _ in range(4):
            self.connection.data_received(CHUNK)
        assert not self.wire.reading, "the thread has the stream"

    def expire(self) -> None:
        """Let the deadline of the connection pass."""
        self.connection.expire(asyncio.get_running_loop().time())

    def free(self) -> None:
        self.connection.connection_lost(None)
        self.wire.free()


def run(scenario: Callable[[], None]) -> None:
    async def main() -> None:
        scenario()

    asyncio.run(main())


def test_data_that_arrived_in_time_moves_the_deadline() -> None:
    def scenario() -> None:
        one = ForwardedCall(b"", silent_s=1.0)
        one.expire()
        assert one.connection.deadline_s == pytest.approx(asyncio.get_running_loop().time() + IDLE_S - 1.0, abs=1.0)
        assert (one.chunks.results, one.wire.reading) == ([], False)
        one.free()

    run(scenario)


def test_a_silent_engine_fails_the_call_after_the_event_loop_has_looked_for_data_too() -> None:
    def scenario() -> None:
        one = ForwardedCall(b"")
        one.expire()
        assert one.wire.reading
        assert asyncio.get_running_loop().time() < one.connection.deadline_s < asyncio.get_running_loop().time() + 2.0
        assert one.response.failure is None
        one.expire()
        assert one.response.failure is not None
        assert one.response.failure.kind == "timeout"
        assert len(one.chunks.results) == 1
        one.free()

    run(scenario)


def test_a_part_of_a_chunk_that_the_thread_has_read_is_data() -> None:
    """The body goes on in the event loop."""

    def scenario() -> None:
        one = ForwardedCall(CHUNK[:4])
        one.expire()
        one.connection.data_received(CHUNK[4:] + END)
        one.response.check()
        assert one.response.callbacks[-1] == "end"
        assert one.response.body.count(b"data: 1\n\n") == 2, "the first and the last; the others are chunks"
        one.free()

    run(scenario)


@pytest.mark.parametrize("how", ["expire", "fail", "pause"])
def test_the_end_that_the_thread_has_read_ends_its_call_and_not_the_next_one(how: str) -> None:
    """The end of the first call sends the next one on the same connection."""

    def scenario() -> None:
        other = RecordedResponse()
        one = ForwardedCall(END, response=FollowedResponse(lambda: send(one.pool, other)))
        if how == "expire":
            one.expire()
        elif how == "fail":
            one.connection.fail("the engine has left")
        else:
            one.call.pause()
        assert (one.response.callbacks[-1], other.callbacks) == ("end", [])
        assert one.wire.reading
        assert not one.wire.closing
        one.connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        assert (other.body, other.callbacks[-1]) == (b"ok", "end")
        one.free()

    run(scenario)


def test_an_aborted_call_counts_what_the_thread_has_forwarded() -> None:
    def scenario() -> None:
        one = ForwardedCall(END)
        one.call.abort()
        assert [result.data_lines for result in one.chunks.results] == [1]
        assert one.wire.closing
        assert "end" not in one.response.callbacks
        one.free()

    run(scenario)


def test_a_paused_call_is_not_read_until_it_resumes() -> None:
    def scenario() -> None:
        one = ForwardedCall(b"")
        one.call.pause()
        assert not one.wire.reading
        one.call.resume()
        assert one.wire.reading
        one.connection.data_received(CHUNK + END)
        assert one.response.callbacks[-1] == "end"
        one.free()

    run(scenario)


@pytest.mark.parametrize(
    ("length", "http10", "unsent", "tls", "possible"),
    [
        (None, False, 0, False, True),
        (100, False, 0, False, False),
        (None, True, 0, False, False),
        (None, False, 5, False, False),
        (None, False, 0, True, False),
    ],
    ids=["chunked", "content-length", "http-1.0", "unsent", "tls"],
)
def test_only_a_chunked_response_of_which_all_is_sent_can_be_continued_on_the_socket(
    length: int | None, http10: bool, unsent: int, tls: bool, possible: bool
) -> None:
    async def main() -> None:
        wire = ClientWire(unsent, tls)
        exchange = Exchange(
            b"POST",
            b"/",
            b"",
            [],
            b"",
            http10,
            True,
            0.0,
            "",
            TurnTransport(wire),
            b"",
            PlainErrors(),
            lambda exchange: None,
        )
        exchange.start(200, [], length)
        assert exchange.stream_socket() is None, "the head is not written yet"
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (exchange.stream_socket() is not None) == possible
        exchange.abort()
        assert exchange.stream_socket() is None
        wire.free()

    asyncio.run(main())


class ClientWire(SocketWire):
    """A transport to a client, with a number of unsent bytes."""

    def __init__(self, unsent: int, tls: bool) -> None:
        super().__init__()
        self._unsent, self._tls = unsent, tls

    def get_write_buffer_size(self) -> int:
        return self._unsent

    def can_write_eof(self) -> bool:
        return True

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return "a TLS context" if name == "sslcontext" and self._tls else super().get_extra_info(name, default)
