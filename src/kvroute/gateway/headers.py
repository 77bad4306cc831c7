"""What headers become on their way through the gateway; they are never changed, only left out or added.

What belongs to one connection (RFC 9110, 7.6.1) does not cross.
"""

from __future__ import annotations

from typing import TypeAlias

Headers: TypeAlias = list[tuple[bytes, bytes]]
"""Names in lower case."""

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"close",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"content-length",
    }
)
OUR_OWN = _HOP_BY_HOP | {b"host", b"expect", b"accept-encoding", b"x-request-id"}
"""Of a client's headers: what engines do not get as it is. Accept-Encoding, since answers are read on the way."""
THEIR_OWN = _HOP_BY_HOP | {b"server", b"date", b"x-request-id"}
"""Of an engine's headers: what clients do not get."""
_USUAL = frozenset({b"keep-alive", b"Keep-Alive", b"close", b"Close"})
"""Values of Connection that name no further header."""


def forwarded(headers: Headers, request_id: bytes, left_out: frozenset[bytes] = OUR_OWN) -> Headers:
    """What a client's headers become on the way to an engine.

    Authorization goes along; `request_id` is the client's own X-Request-Id, or made up for those that send none.
    """
    kept = [(b"x-request-id", request_id)]
    typed = False
    for header in headers:
        name = header[0]
        if name in left_out:
            if name == b"connection" and header[1] not in _USUAL and not _words(header[1]) <= left_out:
                return forwarded(headers, request_id, left_out | _words(header[1]))
        else:
            kept.append(header)
            if name == b"content-type":
                typed = True
    if not typed:
        kept.append((b"content-type", b"application/json"))
    return kept


def header_lines(headers: Headers) -> bytes:
    """The same as they go over the wire."""
    return b"".join([b"%b: %b\r\n" % header for header in headers])


def answered(headers: Headers, request_id: bytes, left_out: frozenset[bytes] = THEIR_OWN) -> tuple[bytes, Headers]:
    """What an engine's headers become on the way to the client: the content type, and the rest."""
    kept = [(b"x-request-id", request_id)]
    content_type = b"application/json"
    for header in headers:
        name = header[0]
        if name == b"content-type":
            content_type = header[1]
        elif name not in left_out:
            kept.append(header)
        elif name == b"connection" and header[1] not in _USUAL and not _words(header[1]) <= left_out:
            return answered(headers, request_id, left_out | _words(header[1]))
    return content_type, kept


def _words(value: bytes) -> frozenset[bytes]:
    return frozenset(word.strip().lower() for word in value.split(b","))
