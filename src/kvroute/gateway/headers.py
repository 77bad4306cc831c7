"""What headers become on their way through the gateway; they are never changed, only left out or added.

An engine gets the request headers of a list, because it acts on some that are for operators (`X-data-parallel-rank`).
A client gets all response headers but those of one connection (RFC 9110, 7.6.1).
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
"""Request headers that only the gateway sets. Accept-Encoding is one because the gateway reads the answers."""
FORWARDED = frozenset(
    {
        b"accept",
        b"authorization",
        b"content-type",
        b"user-agent",
        *(b"idempotency-key", b"openai-beta", b"openai-organization", b"openai-project"),
        *(b"traceparent", b"tracestate", b"baggage", b"uber-trace-id", b"x-amzn-trace-id", b"x-cloud-trace-context"),
        *(b"b3", b"x-b3-traceid", b"x-b3-spanid", b"x-b3-parentspanid", b"x-b3-sampled", b"x-b3-flags"),
        *(b"x-datadog-trace-id", b"x-datadog-parent-id", b"x-datadog-sampling-priority"),
        *(b"x-datadog-origin", b"x-datadog-tags"),
    }
)
"""Request headers that reach engines: those of OpenAI's SDKs and of tracing; `gateway.forward_headers` adds others."""
THEIR_OWN = _HOP_BY_HOP | {b"server", b"date", b"x-request-id"}
"""Of an engine's headers: what clients do not get."""
_USUAL = frozenset({b"keep-alive", b"Keep-Alive", b"close", b"Close"})
"""Values of Connection that name no further header."""


def forwarded(headers: Headers, request_id: bytes, names: frozenset[bytes] = FORWARDED) -> Headers:
    """The headers that an engine gets of a client's request.

    Args:
        headers: of the client's request.
        request_id: the client's X-Request-Id, or the gateway's own where the client sends none.
        names: the headers that are forwarded, unless the client's Connection header names them.
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
