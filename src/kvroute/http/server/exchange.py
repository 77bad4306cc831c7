"""One client request and its response: writes head, framing and end of an HTTP/1.x response. It parses nothing.

Header values are sent unchanged. They must contain no CR or LF, which the parsers ensure.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Callable, Iterable
from email.utils import formatdate
from http import HTTPStatus

from kvroute.http.error_format import ErrorFormat
from kvroute.http.forwarding.turn_writes import TurnTransport
from kvroute.http.headers import Headers, request_id_of

_CHUNKED, _UNTIL_CLOSE, _NO_BODY = -1, -2, -3
_COPY_MAX = 16 * 1024
"""Largest body part, in bytes, for which a copy is cheaper than a separate write."""

STATUS_LINES: dict[int, bytes] = {s.value: b"HTTP/1.1 %d %b\r\n" % (s.value, s.phrase.encode()) for s in HTTPStatus}


def status_line(status: int) -> bytes:
    """Return the first line of a response, with its line end."""
    return STATUS_LINES.get(status) or b"HTTP/1.1 %d Unknown\r\n" % status


class _DateLine:
    """The Date header line of one second."""

    second = -1
    line = b""


def own_lines(id_lines: bytes) -> bytes:
    """Return the header lines of every response beside Server: Date, and the request's id. Args: `id_lines`: see
    `ErrorFormat`."""
    second = int(time.time())
    if second != _DateLine.second:
        _DateLine.second, _DateLine.line = second, b"date: %b\r\n" % formatdate(second, usegmt=True).encode()
    return _DateLine.line + id_lines


class Exchange:
    """A `ClientExchange` and its `ResponseWriter`: call `respond`, or `start`, `write`..., `end`.

    Writes after the client has disconnected, or after `abort`, are dropped. `on_pause` may be called from inside
    `write`.
    """

    __slots__ = (
        "_answered",
        "_errors",
        "_left",
        "_request_id",
        "_resized",
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
    full_status = 503

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
        transport: TurnTransport,
        server: bytes,
        errors: ErrorFormat,
        answered: Callable[[Exchange], None],
        resized: Callable[[int], bool] | None = None,
    ) -> None:
        """Args: `server` is a whole header line or empty; `errors` makes error responses; `answered` is called once,
        after `end` or `abort`; `resized` is called with the size of the body when that changes before the end of the
        response, and returns whether there is memory for it."""
        self.method = method
        self.path = path
        self.query = query
        self.headers = headers
        self.body = body
        self.http10 = http10
        self.keep_alive = keep_alive
        self.received_s = received_s
        """Time when the last byte of the request was read, on the loop's clock."""
        self.peer = peer
        self.started = self.finished = self.gone = self.paused = False
        self.on_gone: Callable[[], None] | None = None
        self.on_pause: Callable[[], None] | None = None
        self.on_resume: Callable[[], None] | None = None
        self._transport = transport
        self._server = server
        self._errors = errors
        self._answered = answered
        self._resized = resized
        self._request_id = b""
        self._left = _NO_BODY
        self._unwritten = b""

    @property
    def request_id(self) -> bytes:
        """Value of X-Request-Id, which every response has: see `request_id_of`."""
        if not self._request_id:
            self._request_id = request_id_of(self.headers)
        return self._request_id

    @property
    def writer(self) -> Exchange:
        """See `ClientExchange`."""
        return self

    @property
    def unsent_bytes(self) -> int:
        """Bytes of the response that are not yet written to the socket."""
        return self._transport.get_write_buffer_size()

    def release_body(self) -> None:
        """Free the memory of the body, which is not needed any more, and stop counting it."""
        self.replace_body(b"")

    def replace_body(self, body: bytes) -> bool:
        """Replace the body, for example by its decoded form. Return whether there is memory for it."""
        self.body = body
        return self._resized is None or self._resized(len(body))

    def header(self, name: bytes) -> bytes | None:
        """Return the value of the first header with this name (lower case), or None."""
        for key, value in self.headers:
            if key == name:
                return value
        return None

    def add_header_lines(self, lines: bytes) -> None:
        """Add whole header lines to any response of this request; call it before the response begins."""
        assert not self.started, "the response has already started"
        self._server += lines

    def respond(
        self,
        status: int,
        body: bytes,
        content_type: bytes = b"application/json",
        headers: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        """Send a whole response; for HEAD only its head. An error gets the format of its path (see `ErrorFormat`)."""
        if self.gone or self.finished:
            return
        assert not self.started, "an exchange has one response"
        self.started = True
        if status >= 400:
            body = self._errors.of_path(self.path, status, body)
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
        """Begin a response whose body follows: `length` bytes, or chunked (HTTP/1.0: until the connection closes).

        `headers` must not contain content-length, transfer-encoding or connection: they are set here.
        """
        if self.gone or self.finished:
            return
        assert not self.started, "an exchange has one response"
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
        # Buffered until the end of this loop iteration, to combine it with the first body bytes in one system call.
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
            assert len(data) <= left, "the body is longer than its content-length"
            self._left = left - len(data)
        if not before:
            self._transport.write(data)
        elif len(data) <= _COPY_MAX:
            self._transport.write(before + data)
        else:
            self._transport.writelines((before, data))

    def write_chunk(self, chunk: bytes, data_bytes: int) -> None:
        """Send body bytes that have the framing of a chunk already, without another copy.

        Args:
            chunk: size line without extensions, data and line end.
            data_bytes: size of the data.
        """
        if self._left == _CHUNKED and not self._unwritten and not self.gone and not self.finished:
            self._transport.write_now(chunk)
        else:
            self.write(chunk[-2 - data_bytes : -2])

    def stream_socket(self) -> int | None:
        """Return the client's socket if chunks may be written to it directly now: the body is chunked, nothing waits to
        be sent before them, and there is no TLS. Otherwise return None."""
        transport = self._transport
        if self._left != _CHUNKED or self._unwritten or self.gone or self.finished or transport.is_closing():
            return None
        own = transport.get_extra_info("socket")
        if own is None or transport.get_extra_info("sslcontext") is not None or transport.get_write_buffer_size():
            return None
        return int(own.fileno())

    def write_framed(self, chunks: bytes) -> None:
        """Send the rest of chunks, from any of their bytes on, of which the bytes before were written to the socket."""
        if not self.gone and not self.finished:
            self._transport.write_now(chunks)

    def end(self) -> None:
        """End the response. If it is shorter than its length, abort it, so that the client detects the error."""
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
        """Close the connection without ending the response: the client sees a truncated response, or none."""
        if self.gone or self.finished:
            return
        if self._left == _UNTIL_CLOSE:
            _reset_on_close(self._transport)
        self.keep_alive = False
        self._transport.abort()
        self._finish()

    def connection_lost(self) -> None:
        """Report to the owner, once, that the connection is lost. The client connection calls it."""
        if self.gone or self.finished:
            return
        self.gone = True
        on_gone = self.on_gone
        self._forget()
        if on_gone is not None:
            on_gone()

    def pause(self) -> None:
        """Pause the owner, because the client reads too slowly. The client connection calls it."""
        self.paused = True
        if self.on_pause is not None:
            self.on_pause()

    def resume(self) -> None:
        """Resume the owner, because the client has caught up. The client connection calls it."""
        self.paused = False
        if self.on_resume is not None:
            self.on_resume()

    def _head(self, status: int, headers: Iterable[tuple[bytes, bytes]], framing: bytes) -> bytes:
        lines = [status_line(status), self._server, own_lines(self._errors.id_lines(self.path, self.request_id))]
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
        """Break the reference cycle with the owner, so that memory is freed without the garbage collector."""
        self.on_gone = self.on_pause = self.on_resume = self._resized = None


def _reset_on_close(transport: TurnTransport) -> None:
    """Make the close a reset: the client cannot detect otherwise that a response without length is truncated."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
