"""Traces as a collector receives them, and the trace context that engines receive."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from tests.serve.stub_engines import completion, engines_of, failing, run, stub_rig

from kvroute.http.headers import Headers
from kvroute.serve.observe.tracing import (
    Attributes,
    LegTrace,
    PassingTracer,
    RequestTrace,
    Tracer,
    tracer_of,
)
from kvroute.types import InputError

PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NOTHING: Attributes = {}
UNSAMPLED = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"


class Collector(HTTPServer):
    """Receives OTLP/HTTP and stores the spans."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.services: set[str] = set()
        super().__init__(("127.0.0.1", 0), _Export)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Export(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.server.services |= {
                pair.value.string_value for pair in resource.resource.attributes if pair.key == "service.name"
            }
            self.server.spans += [span for scope in resource.scope_spans for span in scope.spans]
        self.send_response(200 if self.path == "/v1/traces" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@contextmanager
def collector() -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _exported(share: float, drive: Callable[[Tracer], None]) -> Collector:
    """Return the collector with the spans of a run, after a flush."""
    with collector() as server:
        tracer = tracer_of(server.url, share, version="1.2")
        try:
            drive(tracer)
        finally:
            tracer.close()
    return server


def _traced(tracer: Tracer, headers: Headers, attributes: Attributes = NOTHING) -> RequestTrace:
    request = tracer.request(headers, "POST /v1/completions", attributes)
    assert request is not None
    return request


def _headers(leg: LegTrace) -> Headers:
    return [(name, value) for name, _, value in (line.partition(b": ") for line in leg.head.splitlines())]


def _attributes(span: Span) -> dict[str, object]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "") for pair in span.attributes}


def test_a_request_with_two_legs_and_a_retry() -> None:
    """One root span continues the client's trace, with a child span per leg; each engine receives the span of its own
    leg."""
    sent: list[tuple[bytes, bytes]] = []

    def drive(tracer: Tracer) -> None:
        headers = [(b"host", b"x"), (b"traceparent", PARENT), (b"tracestate", b"vendor=1")]
        request = _traced(tracer, headers, {"kvroute.request_id": "r1"})
        assert request.trace_id == "0af7651916cd43dd8448eb211c80319c"
        for name, error in (("prefill", ""), ("decode", "reset"), ("decode", "")):
            leg = request.leg(name, {"kvroute.instance": f"{name}0"})
            sent.extend(_headers(leg))
            leg.end(error, {"kvroute.kv_bytes": 3e8})
        request.end(200)

    server = _exported(1.0, drive)
    assert server.services == {"kvroute"}
    [root] = [span for span in server.spans if span.name == "POST /v1/completions"]
    legs = [span for span in server.spans if span is not root]
    assert root.parent_span_id.hex() == "b7ad6b7169203331"
    assert root.kind == Span.SPAN_KIND_SERVER
    assert _attributes(root) == {"kvroute.request_id": "r1", "http.response.status_code": 200}
    assert [span.name for span in legs] == ["prefill", "decode", "decode"]
    assert {span.parent_span_id for span in legs} == {root.span_id}
    assert {span.trace_id.hex() for span in server.spans} == {"0af7651916cd43dd8448eb211c80319c"}
    assert [span.status.code for span in legs] == [0, Status.STATUS_CODE_ERROR, 0]
    assert _attributes(legs[0]) == {"kvroute.instance": "prefill0", "kvroute.kv_bytes": 3e8}
    parents = [value.decode() for name, value in sent if name == b"traceparent"]
    assert parents == [f"00-0af7651916cd43dd8448eb211c80319c-{span.span_id.hex()}-01" for span in legs]
    assert [value for name, value in sent if name == b"tracestate"] == [b"vendor=1"] * 3


def test_without_a_client_context_a_new_trace_begins() -> None:
    """Two requests are two unrelated traces."""
    trace_ids: list[str] = []

    def drive(tracer: Tracer) -> None:
        for _ in range(2):
            request = _traced(tracer, [])
            trace_ids.append(request.trace_id)
            request.end(503, "no room")

    server = _exported(1.0, drive)
    assert len(set(trace_ids)) == 2
    assert {span.trace_id.hex() for span in server.spans} == set(trace_ids)
    assert all(not span.parent_span_id and span.status.message == "no room" for span in server.spans)


@pytest.mark.parametrize(("share", "parent"), [(0.0, b""), (1.0, UNSAMPLED)], ids=["by-share", "by-client"])
def test_unsampled_traces_are_not_exported_and_engines_get_the_flag(share: float, parent: bytes) -> None:
    """The engines get a context of the same trace without the sampled flag; exemplars get no ID."""

    def drive(tracer: Tracer) -> None:
        request = _traced(tracer, [(b"traceparent", parent)] if parent else [])
        assert request.trace_id == ""
        for name in ("prefill", "decode"):
            leg = request.leg(name)
            [(_, value)] = _headers(leg)
            assert not int(value[-2:], 16) & 1  # the sampled flag of W3C trace context
            assert not parent or value.split(b"-")[1] == parent.split(b"-")[1]
            leg.end()
        request.end(200)

    assert _exported(share, drive).spans == []


def test_a_sampled_parent_is_sampled_for_any_share() -> None:
    """The client has decided already."""

    def drive(tracer: Tracer) -> None:
        _traced(tracer, [(b"traceparent", PARENT)]).end(200)

    assert len(_exported(0.0, drive).spans) == 1


def test_an_invalid_client_context_begins_a_new_trace() -> None:
    """Any bytes may occur in a header."""

    def drive(tracer: Tracer) -> None:
        for value in (b"", b"00-xyz", b"\xff\xfe", PARENT + b"-more", b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01"):
            _traced(tracer, [(b"traceparent", value)]).end(200)

    spans = _exported(1.0, drive).spans
    assert len(spans) == 5
    assert all(not span.parent_span_id for span in spans)


def test_without_tracing_no_header_is_removed() -> None:
    """The client's context is then a header like any other."""
    tracer = tracer_of(None)
    assert tracer.request([(b"traceparent", PARENT)], "POST /v1/completions") is None
    assert not tracer.replaced


def test_the_exporter_needs_a_valid_url() -> None:
    """An invalid URL or share is reported before anything starts."""
    tracer = tracer_of(None)
    assert isinstance(tracer, PassingTracer)
    tracer.close()
    with pytest.raises(InputError, match="http URL"):
        tracer_of("127.0.0.1:4318")
    with pytest.raises(InputError, match=r"outside \[0, 1\]"):
        tracer_of("http://127.0.0.1:4318", 1.5)


def test_a_gateway_traces_its_legs_and_passthrough_requests() -> None:
    """There is a span per leg and engine, also for failed ones; each engine receives its own span; after the drain all
    are exported."""
    prefill, decode = engines_of("vllm")
    decode[0].serve = decode[1].serve = failing(503, times=1)

    async def main(url: str) -> None:
        async with stub_rig(prefill + decode, f"  tracing: {{otlp: '{url}'}}\n") as front:
            headers = {"traceparent": PARENT.decode(), "tracestate": "vendor=1"}
            assert (await front.post(completion(stream=True), headers=headers)).status == 200
            assert (await front.post(completion() | {"input": "x"}, "/v1/embeddings", headers=headers)).status == 200

    with collector() as server:
        run(main(server.url))
    roots = {span.name: span for span in server.spans if span.kind == Span.SPAN_KIND_SERVER}
    assert set(roots) == {"completions", "passthrough"}
    assert {span.parent_span_id.hex() for span in roots.values()} == {PARENT.split(b"-")[2].decode()}
    for name, legs in (("completions", ["prefill", "decode", "decode"]), ("passthrough", ["passthrough"])):
        own = [span for span in server.spans if span.parent_span_id == roots[name].span_id]
        assert sorted(span.name for span in own) == sorted(legs)
        assert sum(span.status.code == Status.STATUS_CODE_ERROR for span in own) == (name == "completions")
        assert _attributes(roots[name])["http.response.status_code"] == 200
        for span in own:
            engine = next(e for e in prefill + decode if e.name == _attributes(span)["kvroute.instance"])
            traceparent = f"00-{span.trace_id.hex()}-{span.span_id.hex()}-01"
            [received] = [received for received in engine.received if received.headers["traceparent"] == traceparent]
            assert received.headers["tracestate"] == "vendor=1"
