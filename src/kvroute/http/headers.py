"""Selects the headers that the gateway forwards; it adds or removes headers, but changes none.

An engine receives only listed request headers, because it acts on some that are for operators (`X-data-parallel-rank`).
A client receives all response headers except hop-by-hop ones (RFC 9110, 7.6.1) and those of `THEIR_OWN`.
"""

from __future__ import annotations

import os
from typing import TypeAlias

import xxhash

Headers: TypeAlias = list[tuple[bytes, bytes]]
"""Headers in order, names in lower case; a name may occur more than once."""

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
OUR_OWN = _HOP_BY_HOP | {b"host", b"expect", b"accept-encoding", b"content-encoding", b"x-request-id"}
"""Request headers that only the gateway sets; the codings of bodies are among them because the gateway reads bodies."""
FORWARDED = frozenset(
    {
        b"accept",
        b"authorization",
        b"content-type",
        b"user-agent",
        *(b"anthropic-beta", b"anthropic-version"),
        *(b"idempotency-key", b"openai-beta", b"openai-organization", b"openai-project"),
        *(b"traceparent", b"tracestate", b"baggage", b"uber-trace-id", b"x-amzn-trace-id", b"x-cloud-trace-context"),
        *(b"b3", b"x-b3-traceid", b"x-b3-spanid", b"x-b3-parentspanid", b"x-b3-sampled", b"x-b3-flags"),
        *(b"x-datadog-trace-id", b"x-datadog-parent-id", b"x-datadog-sampling-priority"),
        *(b"x-datadog-origin", b"x-datadog-tags"),
    }
)
"""Request headers that are forwarded: those of OpenAI's and Anthropic's SDKs and of tracing; `gateway.forward_headers`
adds others."""
THEIR_OWN = _HOP_BY_HOP | {b"server", b"date", b"x-request-id", b"request-id"}
"""Response headers of engines that are not forwarded to clients."""
_USUAL = frozenset({b"keep-alive", b"Keep-Alive", b"close", b"Close"})
"""Values of the Connection header that name no other header."""


_ID_BYTES_MAX = 200
"""Longest X-Request-Id of a client that engines and logs get."""


def request_id_of(headers: Headers) -> bytes:
    """Return the X-Request-Id of a request: the client's own if engines and logs accept it, else a random one."""
    for name, value in headers:
        if name == b"x-request-id":
            if 0 < len(value) <= _ID_BYTES_MAX:
                return value
            break
    return os.urandom(16).hex().encode()


def session_of(headers: Headers, name: bytes) -> int:
    """Return a hash of the session that this header names, not 0; 0 if the header is missing or empty."""
    value = next((value for header, value in headers if header == name), b"")
    return (xxhash.xxh64_intdigest(value) or 1) if value else 0


def forwarded(headers: Headers, request_id: bytes, names: frozenset[bytes] = FORWARDED) -> Headers:
    """Return the headers of a client's request that an engine receives.

    Args:
        headers: headers of the client's request.
        request_id: the client's X-Request-Id, or a generated one if the client sends none.
        names: the headers to forward, unless the client's Connection header names them.
    """
    kept = [(b"x-request-id", request_id)]
    typed = False
    for header in headers:
        name = header[0]
        if name in names:
            kept.append(header)
            if name == b"content-type":
                typed = True
        elif name == b"connection" and header[1] not in _USUAL and not names.isdisjoint(_words(header[1])):
            return forwarded(headers, request_id, names - _words(header[1]))
    if not typed:
        kept.append((b"content-type", b"application/json"))
    return kept


def header_lines(headers: Headers) -> bytes:
    """Return headers as HTTP/1.1 lines."""
    return b"".join([b"%b: %b\r\n" % header for header in headers])


def answered(headers: Headers, left_out: frozenset[bytes] = THEIR_OWN) -> tuple[bytes, Headers]:
    """Return the headers of an engine's response that a client receives: the content type, and all others."""
    kept = []
    content_type = b"application/json"
    for header in headers:
        name = header[0]
        if name == b"content-type":
            content_type = header[1]
        elif name not in left_out:
            kept.append(header)
        elif name == b"connection" and header[1] not in _USUAL and not _words(header[1]) <= left_out:
            return answered(headers, left_out | _words(header[1]))
    return content_type, kept


def _words(value: bytes) -> frozenset[bytes]:
    return frozenset(word.strip().lower() for word in value.split(b","))
