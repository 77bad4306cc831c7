"""Bytes to whole HTTP/1.x requests, without sockets or clock; refuses what two parsers could frame in two ways.

Strictness follows RFC 9112: conflicting lengths, folded headers, bare line feeds, control characters and codings other
than `chunked` are faults, and after a fault nothing of the connection is read any more.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import httptools

from kvroute.gateway.exchange import Headers
from kvroute.gateway.web_pages import WebPages

SLICE_BYTES = 16 * 1024
"""The parser cannot be stopped behind a request: so much of a pipeline is parsed ahead at most."""

LIGHT_BYTES = 64 * 1024
"""Bodies up to here are not weighed, and always taken."""

BODY_MEMORY_RATIO = 4
"""Memory that a request takes at its peak, per byte of its body: the body, the text that its prompt is read from, and
the bodies of two legs. Measured by bench.gateway.large_prompts."""

IDLE, HEAD, BODY = range(3)
"""What a reader is inside of: nothing, a request's head, a request's body."""

_METHODS = frozenset((b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS", b"TRACE", b"QUERY"))
_FRAMING = frozenset((b"host", b"content-length", b"transfer-encoding", b"expect", b"upgrade", b"origin"))
_SPENT = httptools.HttpRequestParser(object())
"""Calls nobody."""
_VERSION_ERRORS = ("Invalid HTTP version", "Pause on PRI/Upgrade")


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client may take."""

    header_bytes: int = 64 * 1024
    """Request line and headers together."""
    body_bytes: int = 64 * 1024 * 1024
    bodies_bytes: int = 1024 * 1024 * 1024
    """Memory for the bodies of all clients together: BODY_MEMORY_RATIO bytes for each byte, from its arrival until it
    is not needed any more; those of LIGHT_BYTES left out."""
    header_s: float = 10.0
    """From the first byte of a request to the end of its headers, and from connecting to the first byte."""
    body_s: float = 60.0
    """From the end of the headers to the end of the body."""
    keep_alive_s: float = 75.0
    connections: int = 4096
    connections_per_address: int = 3072
    header_count: int = 128
    stall_s: float = 120.0
    """For so long a client may read nothing of an answer that waits for it."""
    linger_s: float = 2.0
    """After an error, what the client still sends is read and dropped for so long: else it might miss the answer."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a request is refused before it is one: what an answer says, after which the connection is closed."""

    status: int
    message: str
    type: str = ""
    """Of the error; empty: as the status says."""
    code: str | None = None
    headers: bytes = b""
    """Further header lines of the answer, whole."""


class Parsed(NamedTuple):
    """A whole request, as `Exchange` begins with it."""

    method: bytes
    path: bytes
    query: bytes
    headers: Headers
    body: bytes
    http10: bool
    keep_alive: bool


class RequestReader:
    """Reads the requests of one connection: `feed` it, take from `ready`, and stop at a `fault`."""

    def __init__(self, limits: Limits, pages: WebPages | None = None) -> None:
        """`pages` says which web pages may send requests; None: all."""
        self.ready: deque[Parsed] = deque()
        self.fault: Fault | None = None
        """Concerns the request behind those that are ready."""
        self._limits = limits
        self._pages = pages
        self._parser = httptools.HttpRequestParser(self)
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

    def forget(self) -> None:
        """Let go of all that was read; nothing may be fed any more.

        Reader and parser hold each other, and a body would wait with them for the collector, which comes seldom.
        """
        self._parser = _SPENT
        self.ready.clear()
        self._clear()

    @property
    def head(self) -> tuple[bytes, bytes, Headers]:
        """Method, path and headers of the request whose body is being read; before that, as far as they are known."""
        return self.method, self._path, self._headers

    @property
    def body_bytes(self) -> int:
        """Of the body that is being read, as much as is there."""
        return len(self._body)

    @property
    def awaits_continue(self) -> bool:
        """The client holds the body back until it hears `100 Continue`."""
        return self._expects and self.phase == BODY and not self._body

    def feed(self, data: bytes) -> bytes:
        """Read until a request is ready or refused.

        Returns:
            What was not read, for a later `feed`; after a fault nothing.
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
            # The parser takes what follows for another protocol. We speak none, so it is told the framing once more.
            return self._feed(self._framing()) and self._feed(memoryview(data)[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self.fault = self.fault or _fault_of(error)
            return False
        if self._raw_bytes > self._limits.header_bytes + SLICE_BYTES:
            self.fault = self._too_long()  # of a header, trailer or chunk extension that does not end
            return False
        return True

    def _framing(self) -> bytes:
        if self._chunked:
            return b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
        return b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % self._content_length

    def _too_long(self) -> Fault:
        limits = self._limits
        return Fault(
            431, f"the request's headers are more than {limits.header_bytes} bytes or {limits.header_count} lines"
        )

    def _refuse(self, status: int, message: str, code: str | None = None) -> None:
        """Stop the parser: it stops at any exception."""
        self.fault = Fault(status, message, code=code)
        raise ValueError(message)

    # the parser's callbacks

    def on_message_begin(self) -> None:
        if self.phase != BODY:  # else it is the framing told once more
            self.phase = HEAD
            self._raw_bytes = 0

    def on_url(self, url: bytes) -> None:
        if self.phase != BODY:
            self._url += url
            self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_lines += 1
        self._count(len(name) + len(value) + 4)
        if self.phase == BODY:  # a trailer: nobody may act on it
            return
        name = name.lower()
        value = value.rstrip()
        self._headers.append((name, value))
        if name in _FRAMING:
            self._on_framing(name, value)

    def _count(self, nbytes: int) -> None:
        self._head_bytes += nbytes
        if self._head_bytes > self._limits.header_bytes or self._head_lines > self._limits.header_count:
            self.fault = self._too_long()
            raise ValueError

    def _on_framing(self, name: bytes, value: bytes) -> None:
        if name == b"host":
            self._hosts += 1
            self._host = value
        elif name == b"content-length":
            self._content_length = int(value)  # digits: the parser has seen to it
        elif name == b"transfer-encoding":
            if value.lower() != b"chunked":
                self._refuse(501, f"the transfer coding {value.decode('latin-1')!r} is not known; send chunked")
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
            self._refuse(505, f"HTTP/{version} is not spoken here; send HTTP/1.1")
        if self.method not in _METHODS:
            self._refuse(501, f"the method {self.method.decode('latin-1')!r} is not known")
        if self._hosts > 1 or not (self._hosts or self._http10):
            self._refuse(400, "the request must have one Host header")
        if self._http10 and self._chunked:
            self._refuse(400, "HTTP/1.0 knows no Transfer-Encoding; send Content-Length")
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
        if self._hosts or self._origin is not None:  # a client of HTTP/1.0 without Host is no browser
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
        mend = "send a shorter prompt, or have `gateway.limits.body` raised"
        return f"the request's body is larger than {self._limits.body_bytes} bytes; {mend}"

    def on_body(self, data: bytes) -> None:
        self._raw_bytes = 0
        body = self._body
        if len(body) + len(data) > self._limits.body_bytes:
            self._refuse(413, self._too_large(), "body_too_large")
        if not body:
            self._body = data
            return
        if isinstance(body, bytes):
            self._body = body = bytearray(body)
        body += data

    def on_message_complete(self) -> None:
        if self._upgrades and self._parser.should_upgrade():
            return  # as the parser sees it; the body follows
        self.ready.append(
            Parsed(
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


def _fault_of(error: httptools.HttpParserError) -> Fault:
    text = str(error)
    if text in _VERSION_ERRORS:
        return Fault(505, "this version of HTTP is not spoken here; send HTTP/1.1")
    return Fault(400, f"the request is no valid HTTP/1.1 ({text})")
