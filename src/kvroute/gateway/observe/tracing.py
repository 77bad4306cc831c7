"""OpenTelemetry traces: a span per request and one per leg; the client's W3C context is passed on to the engines.

Without an exporter the client's own trace headers are forwarded unchanged, and nothing else is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeAlias

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, format_trace_id, set_span_in_context
from opentelemetry.trace import Tracer as _OtelTracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvroute.gateway.http.headers import Headers
from kvroute.types import InputError

Attributes: TypeAlias = Mapping[str, str | int | float | bool]

_CONTEXT_HEADERS = (b"traceparent", b"tracestate")
_NOTHING: Attributes = {}
_W3C = TraceContextTextMapPropagator()


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


class _UnsampledLeg:
    __slots__ = ("head",)

    def __init__(self, head: bytes) -> None:
        self.head = head

    def end(self, error: str = "", attributes: Attributes = _NOTHING) -> None:
        """Do nothing: there is no span."""


class _Unsampled:
    """A request without spans; the context for the engines marks the trace as not sampled."""

    __slots__ = ("_leg",)
    trace_id = ""

    def __init__(self, context: Context) -> None:
        self._leg = _UnsampledLeg(_head_of(context))

    def leg(self, name: str, attributes: Attributes = _NOTHING) -> _UnsampledLeg:
        """See `RequestTrace`."""
        return self._leg

    def end(self, code: int, error: str = "", attributes: Attributes = _NOTHING) -> None:
        """Do nothing: there is no span."""


class SpanTracer:
    """Tracing is on: every request is a span, each leg a child of it; the leg's span is the parent of the engine's."""

    replaced = frozenset(_CONTEXT_HEADERS)

    def __init__(self, exporter: SpanExporter, *, share: float, version: str) -> None:
        """Args: `share` in [0, 1] of the requests that are traced if the client has made no sampling decision."""
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(share)),
            resource=Resource.create({"service.name": "kvroute", "service.version": version}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("kvroute.gateway", version)

    def request(self, headers: Headers, name: str, attributes: Attributes = _NOTHING) -> RequestTrace:
        """See `Tracer`."""
        carrier = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in headers if name in _CONTEXT_HEADERS
        }
        # An empty context instead of the current one: callbacks of one loop have no current request.
        context = _W3C.extract(carrier, Context()) if carrier else Context()
        span = self._tracer.start_span(name, context, SpanKind.SERVER, attributes)
        if not span.is_recording():
            return _Unsampled(set_span_in_context(span, Context()))
        return _RequestSpan(self._tracer, span)

    def close(self) -> None:
        """See `Tracer`."""
        self._provider.shutdown()


class _LegSpan:
    __slots__ = ("_span", "head")

    def __init__(self, span: Span, context: Context) -> None:
        self._span = span
        self.head = _head_of(context)

    def end(self, error: str = "", attributes: Attributes = _NOTHING) -> None:
        """See `LegTrace`."""
        _end(self._span, error, attributes)


class _RequestSpan:
    __slots__ = ("_context", "_span", "_tracer", "trace_id")

    def __init__(self, tracer: _OtelTracer, span: Span) -> None:
        self._tracer, self._span = tracer, span
        self._context = set_span_in_context(span, Context())
        self.trace_id = format_trace_id(span.get_span_context().trace_id)

    def leg(self, name: str, attributes: Attributes = _NOTHING) -> _LegSpan:
        """See `RequestTrace`."""
        span = self._tracer.start_span(name, self._context, SpanKind.CLIENT, attributes)
        return _LegSpan(span, set_span_in_context(span, Context()))

    def end(self, code: int, error: str = "", attributes: Attributes = _NOTHING) -> None:
        """See `RequestTrace`."""
        self._span.set_attribute("http.response.status_code", code)
        _end(self._span, error, attributes)


def _head_of(context: Context) -> bytes:
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, context)
    return "".join(f"{name}: {value}\r\n" for name, value in carrier.items()).encode("latin-1")


def _end(span: Span, error: str, attributes: Attributes) -> None:
    if attributes:
        span.set_attributes(attributes)
    if error:
        span.set_status(Status(StatusCode.ERROR, error))
    span.end()


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
    return SpanTracer(
        OTLPSpanExporter(endpoint=url if url.endswith("/v1/traces") else f"{url}/v1/traces"),
        share=share,
        version=version,
    )
