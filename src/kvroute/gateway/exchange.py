"""One client request and the way to answer it: head, framing and end of an HTTP/1.x answer; refuses to parse anything.

Header values go out as they come in: they must hold no CR or LF, which is so for all that the parsers let through.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import TypeAlias

Headers: TypeAlias = list[tuple[bytes, bytes]]
"""Names in lower case, in order; a name may come twice."""

_CHUNKED, _UNTIL_CLOSE, _NO_BODY = -1, -2, -3
_COPY_MAX = 16 * 1024
"""Up to so many bytes, one copy is cheaper than one more piece to write."""

STATUS_LINES: dict[int, bytes] = {s.value: b"HTTP/1.1 %d %b\r\n" % (s.value, s.phrase.encode()) for s in HTTPStatus}


def status_line(status: int) -> bytes:
    """The first line of an answer, with its line end."""
    return STATUS_LINES.get(status) or b"HTTP/1.1 %d Unknown\r\n" % status


class Exchange:
    """One client request, whole, and the way to answer it: `respond`, or `start`, `write`..., `end`.

    Whatever is written after the client has gone, or after `abort`, is dropped in silence. `on_pause` may be called
    from inside `write`.
    """

    __slots__ = (
        "_answered",
        "_left",
        "_released",
        "_server",
        "_transport",
        "_unwritten",
        "body",
        "finished",
        "gone",
        "headers",
        "http10",
        "keep_alive",
        "method",
        "on_gone",
        "on_pause",
        "on_resume",
        "path",
        "paused",
        "peer",
        "query",
        "received_s",
        "started",
    )

    def __init__(
        self,
        method: bytes,
        path: bytes,
        query: bytes,
        headers: Headers,
        body: bytes,
        http10: bool,
        keep_alive: bool,
        received_s: float,
        peer: str,
        transport: asyncio.Transport,
        server: bytes,
        answered: Callable[[Exchange], None],
        released: Callable[[], None] | None = None,
    ) -> None:
        """`server` is a whole header line or nothing; `answered` is called once, after `end` or `abort`; `released` is
        called when the body is not needed any more, if that is before the answer's end."""
        self.method = method
        self.path = path
        self.query = query
        self.headers = headers
        self.body = body
        self.http10 = http10
        self.keep_alive = keep_alive
        self.received_s = received_s
        """When the last byte of it was read, by the loop's clock."""
        self.peer = peer
        self.started = self.finished = self.gone = self.paused = False
        self.on_gone: Callable[[], None] | None = None
        self.on_pause: Callable[[], None] | None = None
        self.on_resume: Callable[[], None] | None = None
        self._transport = transport
        self._server = server
        self._answered = answered
        self._released = released
        self._left = _NO_BODY
        self._unwritten = b""

    @property
    def unsent_bytes(self) -> int:
        """Bytes of the answer that the client has not taken and the system does not hold."""
        return self._transport.get_write_buffer_size()

    def release_body(self) -> None:
        """The body is not needed any more: its memory is free, and is not counted any more."""
        self.body = b""
        if self._released is not None:
            self._released()

    def header(self, name: bytes) -> bytes | None:
        """The first header of this name (lower case), or None."""
        for key, value in self.headers:
            if key == name:
                return value
        return None

    def add_header_lines(self, lines: bytes) -> None:
        """Send whole header lines with the answer, whoever gives it; before it begins."""
        assert not self.started, "the head is on its way"
        self._server += lines

    def respond(
        self,
        status: int,
        body: bytes,
        content_type: bytes = b"application/json",
        headers: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        """Answer at once and whole; to HEAD with the head alone."""
        if self.gone or self.finished:
            return
        assert not self.started, "an exchange has one answer"
        self.started = True
        if status == 204:
            head = self._head(status, headers, b"")
        else:
            head = self._head(
                status, headers, b"content-type: %b\r\ncontent-length: %d\r\n" % (content_type, len(body))
            )
        if self.method == b"HEAD" or status in (204, 304):
            body = b""
        if len(body) <= _COPY_MAX:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))
        self._finish()

    def start(self, status: int, headers: Iterable[tuple[bytes, bytes]], length: int | None) -> None:
        """Begin an answer whose body follows: of `length` bytes, or chunked (HTTP/1.0: until the connection closes).

        `headers` must leave out content-length, transfer-encoding and connection: they are set here.
        """
        if self.gone or self.finished:
            return
        assert not self.started, "an exchange has one answer"
        self.started = True
        if status in (204, 304):
            framing = b""
        elif length is not None:
            framing = b"content-length: %d\r\n" % length
            self._left = length
        elif self.http10:
            self.keep_alive = False
            framing = b""
            self._left = _UNTIL_CLOSE
        else:
            framing = b"transfer-encoding: chunked\r\n"
            self._left = _CHUNKED
        if self.method == b"HEAD":
            self._left = _NO_BODY
        # Held back for what this turn of the loop may write still: every write is a system call.
        self._unwritten = self._head(status, headers, framing)
        asyncio.get_running_loop().call_soon(self._flush)

    def write(self, data: bytes) -> None:
        """Send body bytes."""
        if self.gone or self.finished or not data:
            return
        assert self.started, "start comes before write"
        left = self._left
        if left == _NO_BODY:
            return
        before, self._unwritten = self._unwritten, b""
        if left == _CHUNKED:
            if len(data) <= _COPY_MAX:
                self._transport.write(b"%b%x\r\n%b\r\n" % (before, len(data), data))
            else:
                self._transport.writelines((b"%b%x\r\n" % (before, len(data)), data, b"\r\n"))
            return
        if left >= 0:
            assert len(data) <= left, "more body than the length said"
            self._left = left - len(data)
        if before:
            self._transport.writelines((before, data))
        else:
            self._transport.write(data)

    def end(self) -> None:
        """End the answer. One that is shorter than its length is aborted: the client must see that it is broken."""
        if self.gone or self.finished:
            return
        assert self.started, "start comes before end"
        if self._left > 0:
            self.abort()
            return
        if self._left == _CHUNKED:
            self._unwritten += b"0\r\n\r\n"
        self._flush()
        self._finish()

    def abort(self) -> None:
        """Close the connection without an end: the client sees a broken answer, or none."""
        if self.gone or self.finished:
            return
        if self._left == _UNTIL_CLOSE:
            _reset_on_close(self._transport)
        self.keep_alive = False
        self._transport.abort()
        self._finish()

    def lose(self) -> None:
        """The connection is lost (the door says so): tells the owner, once."""
        if self.gone or self.finished:
            return
        self.gone = True
        on_gone = self.on_gone
        self._forget()
        if on_gone is not None:
            on_gone()

    def pause(self) -> None:
        """The client reads more slowly than it is written to (the door says so)."""
        self.paused = True
        if self.on_pause is not None:
            self.on_pause()

    def resume(self) -> None:
        """The client has caught up (the door says so)."""
        self.paused = False
        if self.on_resume is not None:
            self.on_resume()

    def _head(self, status: int, headers: Iterable[tuple[bytes, bytes]], framing: bytes) -> bytes:
        lines = [status_line(status), self._server]
        lines += [b"%b: %b\r\n" % header for header in headers]
        lines.append(framing)
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        elif self.http10:
            lines.append(b"connection: keep-alive\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)

    def _flush(self) -> None:
        if self._unwritten and not self.gone and not self.finished:
            before, self._unwritten = self._unwritten, b""
            self._transport.write(before)

    def _finish(self) -> None:
        self.finished = True
        self._forget()
        self._answered(self)

    def _forget(self) -> None:
        """Break the cycle of references with the owner, so that memory comes back without the collector."""
        self.on_gone = self.on_pause = self.on_resume = self._released = None


def _reset_on_close(transport: asyncio.Transport) -> None:
    """An answer that ends with the connection is seen to be broken only if the connection is reset, not closed."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
