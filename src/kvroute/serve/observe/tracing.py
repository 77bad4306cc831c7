"""Traces of requests and their legs; the client's W3C context is passed on to the engines.

Without an exporter the client's own trace headers are forwarded unchanged, and nothing else is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeAlias

from kvroute.http.headers import Headers
from kvroute.types import InputError

Attributes: TypeAlias = Mapping[str, str | int | float | bool]

_NOTHING: Attributes = {}


class LegTrace(Protocol):
    """One leg of a request."""

    head: bytes
    """Header lines for the engine."""

    def end(self, error: str = "", attributes: Attributes = _NOTHING) -> None:
        """End the leg; `error` is empty if it succeeded."""
        ...


class RequestTrace(Protocol):
    """One request; `leg` may be called again for a retry."""

    trace_id: str
    """32 hex digits, for exemplars and logs; empty if the trace is not exported."""

    def leg(self, name: str, attributes: Attributes = _NOTHING) -> LegTrace:
        """Start a leg."""
        ...

    def end(self, code: int, error: str = "", attributes: Attributes = _NOTHING) -> None:
        """End the request."""
        ...


class Tracer(Protocol):
    """Source of request traces; one per gateway."""

    replaced: frozenset[bytes]
    """Headers of the client that trace headers replace."""

    def request(self, headers: Headers, name: str, attributes: Attributes = _NOTHING) -> RequestTrace | None:
        """Start the trace of a request with these headers; None: it is not traced here."""
        ...

    def close(self) -> None:
        """Send pending spans; blocks for a few seconds at most. Nothing may be traced afterwards."""
        ...


class PassingTracer:
    """Tracing is off: the client's trace headers are forwarded unchanged, as all of its headers are."""

    replaced: frozenset[bytes] = frozenset()

    def request(self, headers: Headers, name: str, attributes: Attributes = _NOTHING) -> None:
        """See `Tracer`."""

    def close(self) -> None:
        """Do nothing: there are no spans."""


def tracer_of(otlp_url: str | None, share: float = 1.0, *, version: str = "") -> Tracer:
    """Return the tracer for an OTLP/HTTP collector such as `http://127.0.0.1:4318`; None: only forward the context.

    Raises:
        InputError: the URL is not of http or https, or the share is outside [0, 1].
    """
    if not 0 <= share <= 1:
        raise InputError(f"{share} is outside [0, 1]", where="gateway.tracing.share", hint="try 0.1")
    if otlp_url is None:
        return PassingTracer()
    if not otlp_url.startswith(("http://", "https://")):
        hint = "write http://host:4318"
        raise InputError(f"{otlp_url!r} is not an http URL", where="gateway.tracing.otlp", hint=hint)
    url = otlp_url.rstrip("/")
    from kvroute.serve.observe.spans import OTLPSpanExporter, SpanTracer  # only who exports spans pays for them

    return SpanTracer(
        OTLPSpanExporter(endpoint=url if url.endswith("/v1/traces") else f"{url}/v1/traces"),
        share=share,
        version=version,
    )
