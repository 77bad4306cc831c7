"""Parses bytes into complete HTTP/1.x requests, without sockets or clock; rejects ambiguous framing.

It is as strict as RFC 9112: conflicting lengths, folded headers, bare line feeds, control characters and codings other
than `chunked` are faults. After a fault nothing more is read from the connection.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import httptools

from kvroute.http.headers import Headers
from kvroute.http.server.web_pages import WebPages

SLICE_BYTES = 16 * 1024
"""Maximum number of bytes of a pipeline that are parsed ahead: the parser cannot stop at the end of a request."""

LIGHT_BYTES = 64 * 1024
"""Bodies up to this size do not count towards the memory limit and are always accepted."""

_PIECE_BYTES, _EXCESS_MAX = 16, 1 << 20
"""Each piece of a body costs as much as so many bytes; costs beyond the bytes of the body are limited."""

BODY_MEMORY_RATIO = 4
"""Peak memory of a request per byte of its body: the body, the text from which its prompt is parsed, and the bodies of
two legs. Measured by bench.gateway.large_prompts."""

IDLE, HEAD, BODY = range(3)
"""Parser state: between requests, in a request's head, in a request's body."""

_METHODS = frozenset((b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS", b"TRACE", b"QUERY"))
_FRAMING = frozenset((b"host", b"content-length", b"transfer-encoding", b"expect", b"upgrade", b"origin"))
_SPENT = httptools.HttpRequestParser(object())
"""A parser without callbacks."""
_HTTP2_START = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""What a client sends first that uses HTTP/2 without asking (RFC 9113, 3.4); its SETTINGS frame follows."""
_SETTINGS_TYPE = b"\x04"
_VERSION_ERRORS = ("Invalid HTTP version", "Pause on PRI/Upgrade")


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits for clients."""

    header_bytes: int = 64 * 1024
    """Maximum size of request line and headers together."""
    body_bytes: int = 64 * 1024 * 1024
    bodies_bytes: int = 1024 * 1024 * 1024
    """Memory for the bodies of all clients together: BODY_MEMORY_RATIO bytes for each byte, from its arrival until it
    is not needed any more; bodies up to LIGHT_BYTES do not count."""
    header_s: float = 10.0
    """Time limit from the first byte of a request to the end of its headers, and from connecting to the first byte."""
    body_s: float = 60.0
    """Time limit from the end of the headers to the end of the body."""
    keep_alive_s: float = 75.0
    connections: int = 4096
    connections_per_address: int = 3072
    header_count: int = 128
    stall_s: float = 120.0
    """Time limit for a client that reads nothing of a pending response."""
    linger_s: float = 2.0
    """Time after an error response in which input is discarded; without it the client might miss the response."""


@dataclass(frozen=True, slots=True)
class HttpError:
    """Rejection of a request before it is complete: the error response, after which the connection is closed."""

    status: int
    message: str
    type: str = ""
    """Error type; empty: derived from the status."""
    code: str | None = None
    headers: bytes = b""
    """Further complete header lines of the response."""


class ParsedRequest(NamedTuple):
    """A complete request, as `Exchange` starts with it."""

    method: bytes
    path: bytes
    query: bytes
    headers: Headers
    body: bytes
    http10: bool
    keep_alive: bool


class RequestParser:
    """Parses the requests of one connection: call `feed`, take requests from `ready`, and stop at a `fault`."""

    def __init__(self, limits: RequestLimits, pages: WebPages | None = None) -> None:
        """Args: `pages` decides which web pages may send requests; None: all."""
        self.ready: deque[ParsedRequest] = deque()
        self.fault: HttpError | None = None
        """Applies to the request after those in `ready`."""
        self._limits = limits
        self._header_bytes_max, self._header_count_max = limits.header_bytes, limits.header_count
        self._pages = pages
        self._parser = httptools.HttpRequestParser(self)
        self.speaks_http2 = False
        """Whether the fault is that the client uses HTTP/2."""
        self._clear()

    def _clear(self) -> None:
        self.phase = IDLE
        self.method = b""
        self._url = b""
        self._headers: Headers = []
        self._head_bytes = self._head_lines = 0
        self._raw_bytes = 0
        self._hosts = 0
        self._host = b""
        self._origin: bytes | None = None
        self._content_length = 0
        self._chunked = self._expects = self._upgrades = False
        self._path = self._query = b""
        self._http10 = self._keep_alive = False
        self._body: bytes | bytearray = b""
        self._pieces = 0

    def forget(self) -> None:
        """Release everything that was read; `feed` must not be called any more.

        Reader and parser reference each other; without this, a body would be kept until the rare garbage collection.
        """
        self._parser = _SPENT
        self.ready.clear()
        self._clear()

    @property
    def head(self) -> tuple[bytes, bytes, Headers]:
        """Method, path and headers of the request whose body is being read; before that, the parts that are known."""
        return self.method, self._path, self._headers

    @property
    def path_so_far(self) -> bytes:
        """The path, also while the headers are being read."""
        return self._path or self._url.partition(b"?")[0]

    @property
    def body_bytes(self) -> int:
        """Bytes received of the current body."""
        return len(self._body)

    @property
    def awaits_continue(self) -> bool:
        """Whether the client waits for `100 Continue` before it sends the body."""
        return self._expects and self.phase == BODY and not self._body

    def feed(self, data: bytes) -> bytes:
        """Parse until a request is ready or rejected.

        Returns:
            the bytes that were not parsed, for a later `feed`; empty after a fault.
        """
        assert self.fault is None
        if len(data) <= SLICE_BYTES:
            self._feed(data)
            return b""
        view = memoryview(data)
        for end in range(SLICE_BYTES, len(data) + SLICE_BYTES, SLICE_BYTES):
            if not self._feed(view[end - SLICE_BYTES : end]):
                return b""
            if self.ready:
                return data[end:]
        return b""

    def _feed(self, data: bytes | memoryview) -> bool:
        self._raw_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # The parser treats the rest as another protocol. None is supported, so feed the framing to a new parser;
            # the old one accepts nothing more after `Connection: close`.
            self._parser = httptools.HttpRequestParser(self)
            return self._feed(self._framing()) and self._feed(memoryview(data)[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self.fault = self.fault or _fault_of(error)
            start, kind = len(_HTTP2_START), len(_HTTP2_START) + 3
            self.speaks_http2 = data[:start] == _HTTP2_START and data[kind : kind + 1] == _SETTINGS_TYPE
            return False
        if self._raw_bytes > self._limits.header_bytes + SLICE_BYTES:
            self.fault = self._too_long()  # a header, trailer or chunk extension does not end
            return False
        return True

    def _framing(self) -> bytes:
        if self._chunked:
            return b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
        return b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % self._content_length

    def _too_long(self) -> HttpError:
        limits = self._limits
        return HttpError(
            431, f"the request's headers exceed {limits.header_bytes} bytes or {limits.header_count} lines"
        )

    def _refuse(self, status: int, message: str, code: str | None = None) -> None:
        """Stop the parser with an exception."""
        self.fault = HttpError(status, message, code=code)
        raise ValueError(message)

    # callbacks of the parser

    def on_message_begin(self) -> None:
        if self.phase != BODY:  # otherwise it is the repeated framing
            self.phase = HEAD
            self._raw_bytes = 0

    def on_url(self, url: bytes) -> None:
        if self.phase != BODY:
            self._url += url
            self._head_bytes += len(url)
            if self._head_bytes > self._header_bytes_max:
                self._reject_long_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_lines += 1
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > self._header_bytes_max or self._head_lines > self._header_count_max:
            self._reject_long_head()
        if self.phase == BODY:  # a trailer, which is ignored
            return
        name, value = name.lower(), value.rstrip()
        self._headers.append((name, value))
        if name in _FRAMING:
            self._on_framing(name, value)

    def _reject_long_head(self) -> None:
        """Stop the parser with an exception."""
        self.fault = self._too_long()
        raise ValueError

    def _on_framing(self, name: bytes, value: bytes) -> None:
        if name == b"host":
            self._hosts += 1
            self._host = value
        elif name == b"content-length":
            self._content_length = int(value)  # the parser has checked that these are digits
        elif name == b"transfer-encoding":
            if value.lower() != b"chunked":
                self._refuse(501, f"the transfer coding {value.decode('latin-1')!r} is not supported; send chunked")
            self._chunked = True
        elif name == b"expect":
            self._expects = value.lower() == b"100-continue"
        elif name == b"origin":
            self._origin = value
        else:
            self._upgrades = True

    def on_headers_complete(self) -> None:
        if self.phase == BODY:
            return
        parser = self._parser
        self.method = parser.get_method()
        version = parser.get_http_version()
        self._http10 = version == "1.0"
        if version != "1.1" and not self._http10:
            self._refuse(505, f"HTTP/{version} is not supported; send HTTP/1.1")
        if self.method not in _METHODS:
            self._refuse(501, f"the method {self.method.decode('latin-1')!r} is not supported")
        if self._hosts > 1 or not (self._hosts or self._http10):
            self._refuse(400, "the request must have one Host header")
        if self._http10 and self._chunked:
            self._refuse(400, "HTTP/1.0 does not support Transfer-Encoding; send Content-Length")
        pages = self._pages
        if pages is not None and (self._origin is not None or self._host not in pages.passed):
            self._check_page(pages)
        self._read_target()
        if self._content_length > self._limits.body_bytes:
            self._refuse(413, self._too_large(), "body_too_large")
        if self._http10:
            self._expects = False
        self._keep_alive = parser.should_keep_alive()
        self.phase = BODY

    def _check_page(self, pages: WebPages) -> None:
        if self._hosts or self._origin is not None:  # an HTTP/1.0 client without Host is not a browser
            why = pages.refusal(self._host, self._origin)
            if why:
                self._refuse(403, why, "web_page_refused")

    def _read_target(self) -> None:
        url = self._url
        if not url.startswith(b"/"):
            if url == b"*" and self.method == b"OPTIONS":
                pass
            elif url[:7].lower() == b"http://" or url[:8].lower() == b"https://":
                rest = url[url.index(b"//") + 2 :]  # authority, path and query
                slash, mark = rest.find(b"/"), rest.find(b"?")
                if slash >= 0 and not 0 <= mark < slash:
                    url = rest[slash:]
                else:
                    url = b"/" + (rest[mark:] if mark >= 0 else b"")
            else:
                self._refuse(400, "the request's target is neither a path nor an http URL")
        self._path, _, self._query = url.partition(b"?")

    def _too_large(self) -> str:
        hint = "send a shorter prompt, or ask the operator to raise `gateway.limits.body`"
        return f"the request's body is larger than {self._limits.body_bytes} bytes; {hint}"

    def on_body(self, data: bytes) -> None:
        self._raw_bytes = 0
        body = self._body
        if len(body) + len(data) > self._limits.body_bytes:
            self._refuse(413, self._too_large(), "body_too_large")
        self._pieces += 1
        if self._pieces * _PIECE_BYTES > len(body) + _EXCESS_MAX:
            self._refuse(400, "the request's body has very many chunks of very few bytes; send larger ones")
        if not body:
            self._body = data
            return
        if isinstance(body, bytes):
            self._body = body = bytearray(body)
        body += data

    def on_message_complete(self) -> None:
        if self._upgrades and self._parser.should_upgrade():
            return  # the parser assumes another protocol; the body follows
        self.ready.append(
            ParsedRequest(
                self.method,
                self._path,
                self._query,
                self._headers,
                bytes(self._body),
                self._http10,
                self._keep_alive,
            )
        )
        self._clear()


def _fault_of(error: httptools.HttpParserError) -> HttpError:
    text = str(error)
    if text in _VERSION_ERRORS:
        return HttpError(505, "this HTTP version is not supported; send HTTP/1.1")
    return HttpError(400, f"the request is not valid HTTP/1.1 ({text})")
