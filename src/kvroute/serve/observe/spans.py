"""OpenTelemetry spans: one per request and one per leg, exported to a collector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, format_trace_id, set_span_in_context
from opentelemetry.trace import Tracer as _OtelTracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvroute.http.headers import Headers

__all__ = ["OTLPSpanExporter", "SpanTracer"]

_Attributes: TypeAlias = Mapping[str, str | int | float | bool]

_NOTHING: _Attributes = {}
_CONTEXT_HEADERS = (b"traceparent", b"tracestate")
_W3C = TraceContextTextMapPropagator()


class _UnsampledLeg:
    __slots__ = ("head",)

    def __init__(self, head: bytes) -> None:
        self.head = head

    def end(self, error: str = "", attributes: _Attributes = _NOTHING) -> None:
        """Do nothing: there is no span."""


class _Unsampled:
    """A request without spans; the context for the engines marks the trace as not sampled."""

    __slots__ = ("_leg",)
    trace_id = ""

    def __init__(self, context: Context) -> None:
        self._leg = _UnsampledLeg(_head_of(context))

    def leg(self, name: str, attributes: _Attributes = _NOTHING) -> _UnsampledLeg:
        """See `tracing.RequestTrace`."""
        return self._leg

    def end(self, code: int, error: str = "", attributes: _Attributes = _NOTHING) -> None:
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

    def request(self, headers: Headers, name: str, attributes: _Attributes = _NOTHING) -> _RequestSpan | _Unsampled:
        """See `tracing.Tracer`."""
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
        """See `tracing.Tracer`."""
        self._provider.shutdown()


class _LegSpan:
    __slots__ = ("_span", "head")

    def __init__(self, span: Span, context: Context) -> None:
        self._span = span
        self.head = _head_of(context)

    def end(self, error: str = "", attributes: _Attributes = _NOTHING) -> None:
        """See `tracing.LegTrace`."""
        _end(self._span, error, attributes)


class _RequestSpan:
    __slots__ = ("_context", "_span", "_tracer", "trace_id")

    def __init__(self, tracer: _OtelTracer, span: Span) -> None:
        self._tracer, self._span = tracer, span
        self._context = set_span_in_context(span, Context())
        self.trace_id = format_trace_id(span.get_span_context().trace_id)

    def leg(self, name: str, attributes: _Attributes = _NOTHING) -> _LegSpan:
        """See `tracing.RequestTrace`."""
        span = self._tracer.start_span(name, self._context, SpanKind.CLIENT, attributes)
        return _LegSpan(span, set_span_in_context(span, Context()))

    def end(self, code: int, error: str = "", attributes: _Attributes = _NOTHING) -> None:
        """See `tracing.RequestTrace`."""
        self._span.set_attribute("http.response.status_code", code)
        _end(self._span, error, attributes)


def _head_of(context: Context) -> bytes:
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, context)
    return "".join(f"{name}: {value}\r\n" for name, value in carrier.items()).encode("latin-1")


def _end(span: Span, error: str, attributes: _Attributes) -> None:
    if attributes:
        span.set_attributes(attributes)
    if error:
        span.set_status(Status(StatusCode.ERROR, error))
    span.end()
