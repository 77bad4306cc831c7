"""Parses the bytes of HTTP/1.x responses, without sockets or clock; limits the bytes beside the body."""

from __future__ import annotations

import httptools

from kvroute.http.headers import Headers

HEAD_BYTES_MAX = 256 * 1024
"""Maximum consecutive bytes without a byte of the body: the longest head, trailer section and chunk extension."""
HEAD_LINES_MAX = 256
"""Maximum header lines of one response."""
_FRAMING = (b"content-length", b"transfer-encoding")
_SPENT = httptools.HttpResponseParser(object())
"""A parser without callbacks."""


class ResponseParser:
    """Parses the responses of one connection, one after the other: `feed`, and `clear` between two of them."""

    __slots__ = (
        "_bare_bytes",
        "_chunk_ended",
        "_parser",
        "between_chunks",
        "complete",
        "head_only",
        "headers",
        "keep_alive",
        "parts",
        "received",
        "status",
        "surplus",
    )

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.head_only = False
        """The response has no body, whatever its headers say."""
        self.clear()

    def clear(self) -> None:
        """Begin with the next response."""
        self.received = False
        """A byte of the response has arrived."""
        self._bare_bytes = 0
        self.status = 0
        """0: the head is not complete."""
        self.headers: Headers = []
        self.keep_alive = self.complete = False
        self.surplus = False
        """Bytes have followed the response."""
        self._chunk_ended = False
        """The last chunk that has begun is complete."""
        self.between_chunks = False
        """The last data ended with a complete chunk."""
        self.parts: list[bytes] = []
        """Pieces of the body that are not taken yet."""

    def forget(self) -> None:
        """Drop httptools' parser, which references this object, and the received data; nothing is parsed any more."""
        self._parser = _SPENT
        self.parts = []

    @property
    def until_close(self) -> bool:
        """Whether the response body ends with the connection (RFC 9112 section 6.3)."""
        return not any(
            name == b"content-length" or (name == b"transfer-encoding" and value.lower().endswith(b"chunked"))
            for name, value in self.headers
        )

    def feed(self, data: bytes) -> str:
        """Parse data; return an error text, or an empty string."""
        self.received, self.between_chunks = True, False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            return "the engine switches protocols without a request for it"
        except httptools.HttpParserError as error:
            return f"the response is not valid HTTP ({error})"
        self.between_chunks = self._chunk_ended and data.endswith(b"\r\n")
        if self.parts:
            self._bare_bytes = 0
            return ""
        self._bare_bytes += len(data)
        if self._bare_bytes > HEAD_BYTES_MAX:
            part = "trailer section or chunk extension" if self.status else "head"
            return f"the response's {part} is longer than {HEAD_BYTES_MAX} bytes"
        return ""

    # callbacks of the parser

    def on_message_begin(self) -> None:
        self.surplus = self.complete

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:  # otherwise it is a trailer
            self.headers.append((name.lower(), value.rstrip()))

    def on_headers_complete(self) -> None:
        if self.complete:
            return
        status = self._parser.get_status_code()
        if status < 200:  # informational, before the response
            if status < 100 or any(name in _FRAMING for name, _ in self.headers):
                raise ValueError("an informational response has no body")  # RFC 9110 section 15.2; ends the parsing
            self.headers = []
            return
        self.status = status
        self.keep_alive = self._parser.should_keep_alive()
        self.complete = self.head_only

    def on_body(self, data: bytes) -> None:
        if not self.complete:
            self.parts.append(data)

    def on_chunk_header(self) -> None:
        self._chunk_ended = False

    def on_chunk_complete(self) -> None:
        self._chunk_ended = True

    def on_message_complete(self) -> None:
        self.complete = self.status != 0
