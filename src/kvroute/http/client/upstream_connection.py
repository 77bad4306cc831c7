"""One connection to an engine: sends requests, and calls the sink with responses; the pool opens it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Literal, Protocol

from kvroute.http.client.call import Call, ChunkHandler, Failure, Phase
from kvroute.http.client.response_parser import HEAD_LINES_MAX, ResponseParser
from kvroute.http.deadlines import NEVER_S
from kvroute.http.forwarding.stream_forwarder import Forwarded, ForwardedStream
from kvroute.http.forwarding.turn_writes import TurnTransport
from kvroute.http.slices import SLICE_BYTES, TurnBudget

_PIECES_MAX = 1024
"""Pieces of the body, or header lines, in one turn of the loop; what follows is parsed in the next one."""
_PIECE_BYTES, _EXCESS_MAX = 16, 1 << 20
"""Each piece of a body costs as much as so many bytes; costs beyond the bytes of the body are limited."""
_EVENT_CHUNK_END = b"\n\n\r\n"
"""End of a chunk whose data ends with an empty line."""
_COLON, _DATA = 58, b"data:"
"""First byte of a comment, which keeps a connection alive, and part of every event."""
_SIZE_LINE_MAX = 10
"""Longest size line that is compared, its line end included."""
_SIZE_LINES = tuple([b"%x\r\n" % size for size in range(2048)])
"""Size lines of the chunks of a stream, most of which are short."""
_CHUNKS_BEFORE = 4
"""Chunks in a row that arrive alone before a thread forwards those that follow: short streams are not worth it."""
_UNREAD_S = 1.0
"""Time for the event loop to find data that has arrived, in seconds, before it fails a call that the thread had."""


class ConnectionOwner(Protocol):
    """The owner of connections, which also counts calls: the pool."""

    def keep(self, connection: UpstreamConnection) -> None:
        """The connection is free for the next call."""
        ...

    def opened(self, connection: UpstreamConnection) -> None:
        """The connection is open."""
        ...

    def lost(self, connection: UpstreamConnection) -> None:
        """The connection is closed."""
        ...

    def resend(self, call: Call) -> None:
        """Send the call again on a new connection."""
        ...


class UpstreamConnection(asyncio.Protocol):
    """One keep-alive connection to an engine, with one call at a time."""

    def __init__(self, owner: ConnectionOwner) -> None:
        self.deadline_s = NEVER_S
        self._owner = owner
        self._transport: TurnTransport | None = None
        self._doomed = False
        self._served = False
        self._call: Call | None = None
        self._now: Callable[[], float] = asyncio.get_running_loop().time
        self._response = ResponseParser()
        self._budget = TurnBudget()
        self._forwarded: ForwardedStream | None = None
        """The response while a thread forwards it."""
        self._clear()

    def _clear(self) -> None:
        self._head_told = self._body_begun = False
        self._single_chunks = 0
        """Chunks in a row that arrived alone."""
        self._excess = 0
        """Cost of the pieces of the body beyond their bytes."""
        self._rest = b""
        """Bytes that were received and are parsed in the next turn of the loop; reading is paused meanwhile."""
        self._budget.nbytes = SLICE_BYTES

    @property
    def usable(self) -> bool:
        """Whether the connection is open, and the engine is not known to be closing it."""
        return self._transport is not None and not self._transport.is_closing()

    def begin(self, call: Call) -> None:
        """Send a call's request; its callbacks run in later turns of the loop."""
        assert self._call is None
        assert self._transport is not None
        self._call = call
        call.connection = self
        self._response.head_only = call.head_only
        self.deadline_s = self._now() + call.first_byte_s
        if call.body:
            self._transport.writelines((call.request, call.body))
        else:
            self._transport.write(call.request)
        if call.paused:
            self.pause()

    def park(self, seconds: float) -> None:
        """Keep the connection idle for the next call, for this time at most."""
        self.deadline_s = self._now() + seconds

    def close(self) -> None:
        """Close the connection at once, even if it is not open yet."""
        if self._forwarded is not None:
            self._count(self._forwarded.take_back())
        self._call = None
        self._doomed = True
        self.deadline_s = NEVER_S
        self._forget()
        if self._transport is not None:
            self._transport.abort()

    def fail(self, why: str) -> None:
        """End the call in progress, if there is one, as if the engine had closed the connection."""
        if self._take_back() and self._call is not None:
            self._fail("reset", why)

    def pause(self) -> None:
        """Stop reading."""
        if not self._take_back():
            return
        self.deadline_s = NEVER_S
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        """Resume reading."""
        if self._call is not None:
            self.deadline_s = self._now() + self._wait_s(self._call)
        if self._rest:
            asyncio.get_running_loop().call_soon(self._parse_rest)
        else:
            self._read_on()

    def _wait_s(self, call: Call) -> float:
        """Return how long the engine may send nothing now."""
        return call.idle_s if self._body_begun and not call.waits else call.first_byte_s

    def expire(self, now: float) -> None:
        """End a call whose engine was silent too long, or close a connection that was idle too long."""
        if self._forwarded is not None:
            self._expire_forwarded(self._forwarded, now)
            return
        if self._call is None:
            self.close()
        else:
            what = "no token" if self._call.waits and self._body_begun else "nothing"
            self._fail("timeout", f"the engine sent {what} for {self._wait_s(self._call):g} s")

    # callbacks of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = TurnTransport(transport)
        self._owner.opened(self)
        if self._doomed:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        call = self._call
        if call is None:  # unexpected data: no call is in progress
            self.close()
            return
        chunks = call.chunks
        if chunks is not None and self._response.between_chunks and data.endswith(_EVENT_CHUNK_END):
            # Without a call of the parser, if the data is exactly one chunk as the gateway itself would write it.
            data_bytes = len(data) - data.find(b"\r\n", 0, _SIZE_LINE_MAX) - 4
            if data.startswith(_SIZE_LINES[data_bytes] if data_bytes < len(_SIZE_LINES) else b"%x\r\n" % data_bytes):
                if data[-2 - data_bytes] != _COLON or _DATA in data:
                    self._single_chunks += 1
                    if not call.paused:
                        self.deadline_s = self._now() + call.idle_s  # first: the callback may pause or end the call
                chunks.on_chunk(data, data_bytes)
                if self._single_chunks >= _CHUNKS_BEFORE:
                    self._hand_over(call, chunks)
                return
        if self._rest:
            self._rest += data
            return
        self._single_chunks = 0
        response, short = self._response, len(data) <= SLICE_BYTES
        error = response.feed(data) if short else self._feed_slices(data)
        if response.status and not self._head_told:
            self._head_told = True
            if len(response.headers) > HEAD_LINES_MAX:
                self._fail("malformed", f"the response has more than {HEAD_LINES_MAX} header lines")
                return
            call.handler.on_head(response.status, response.headers)
        comment = False
        parts = response.parts
        if parts and not call.over:
            count = len(parts)
            body = parts[0] if count == 1 else b"".join(parts)
            parts.clear()
            if count > 1 or self._excess or len(body) < _PIECE_BYTES:
                self._excess = max(self._excess + _PIECE_BYTES * count - len(body), 0)
            self._body_begun = True
            comment = call.events and body[0] == _COLON and _DATA not in body
            if short:
                call.handler.on_body(body)
            else:
                started_s = time.perf_counter()
                call.handler.on_body(body)
                self._budget.handled(len(body), time.perf_counter() - started_s)
        if call.over:  # aborted by the sink
            return
        if response.complete:
            self._end(keep=response.keep_alive and not response.surplus and not error and not call.head_only)
        elif error:
            self._fail("malformed", error)
        elif self._excess > _EXCESS_MAX:
            self._fail("malformed", "the engine sends its response in very many pieces of very few bytes")
        elif self._body_begun and not (call.paused or call.waits or comment):
            self.deadline_s = self._now() + call.idle_s

    def eof_received(self) -> None:
        """Treat a half-closed connection as closed: the engine sends nothing more."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.lost(self)
        self._transport = None
        self._forget()
        call = self._call
        if call is None:
            return
        if exc is None and self._head_told and self._response.until_close:
            self._end(keep=False)
        elif self._served and not self._response.received and not call.retried:
            self._call = None
            call.connection = None
            call.retried = True
            self._owner.resend(call)
        else:
            self._fail(
                "reset", f"the engine closed the connection ({exc})" if exc else "the engine closed the connection"
            )

    def _feed_slices(self, data: bytes) -> str:
        """Parse data as far as one turn of the loop may go; return an error text, or an empty string."""
        response = self._response
        for at in range(0, len(data), SLICE_BYTES):
            end = at + SLICE_BYTES
            error = response.feed(data[at:end])
            if error or end >= len(data):
                return error
            if response.complete:
                response.surplus = True
                return ""
            if end >= self._budget.nbytes or len(response.parts) + len(response.headers) > _PIECES_MAX:
                self._rest, response.between_chunks = data[end:], False
                assert self._transport is not None
                self._transport.pause_reading()
                asyncio.get_running_loop().call_soon(self._parse_rest)
                return ""
        return ""

    def _parse_rest(self) -> None:
        """Parse what an earlier turn of the loop has left, and then read on."""
        call = self._call
        if not self._rest or call is None or call.paused:
            return
        rest, self._rest = self._rest, b""
        self.data_received(rest)
        if not self._rest and (self._call is None or not self._call.paused):
            self._read_on()

    def _read_on(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _forget(self) -> None:
        """Drop the received data."""
        self._response.forget()
        self._rest = b""

    # the thread that forwards chunks

    def _hand_over(self, call: Call, chunks: ChunkHandler) -> None:
        """Let the thread forward the chunks that follow, if that is possible now."""
        self._single_chunks = 0
        transport = self._transport
        if call.over or call.paused or transport is None or transport.is_closing():
            return
        own = transport.get_extra_info("socket")
        if own is None or transport.get_extra_info("sslcontext") is not None:
            return
        self._forwarded = chunks.forward(own.fileno(), self._returned)
        if self._forwarded is not None:
            transport.pause_reading()

    def _expire_forwarded(self, forwarded: ForwardedStream, now: float) -> None:
        """Set the deadline by the data that the thread has received. If it is over, continue in the event loop, which
        may find data that has arrived since, for example if the whole process was stopped."""
        assert self._call is not None
        last_s, idle_s = forwarded.last_s, self._call.idle_s
        if last_s + idle_s > now:
            self.deadline_s = last_s + idle_s
        elif self._take_back() and forwarded.last_s == last_s and not self._call.paused:
            self.deadline_s = now + min(idle_s, _UNREAD_S)

    def _take_back(self) -> bool:
        """Continue in the event loop; return whether the call is not over. Its end may be among the bytes that were
        read, and the connection then serves the next call."""
        if self._forwarded is None:
            return True
        call = self._call
        self._returned(self._forwarded.take_back())
        return self._call is call

    def _returned(self, result: Forwarded) -> None:
        """Continue in the event loop after the thread has returned the response."""
        self._count(result)
        call = self._call
        if call is None or self._transport is None or self._transport.is_closing():
            return
        if not call.paused:
            self.resume()
        if result.unparsed:
            self.data_received(result.unparsed)

    def _count(self, result: Forwarded) -> None:
        self._forwarded = None
        if self._call is not None and self._call.chunks is not None:
            self._call.chunks.on_forwarded(result)

    def _end(self, *, keep: bool) -> None:
        call = self._call
        assert call is not None
        if call.paused:
            call.paused = False
            self.resume()
        self._call = None
        call.finish()
        if keep:
            self._served = True
            self._response.clear()
            self._clear()
            self._owner.keep(self)
        else:
            self.close()
        call.handler.on_end()

    def _fail(self, kind: Literal["reset", "timeout", "malformed"], text: str) -> None:
        call = self._call
        assert call is not None
        phase: Phase = "body" if self._body_begun else "first_byte"
        self.close()
        call.finish()
        call.handler.on_failure(Failure(kind, phase, text))
