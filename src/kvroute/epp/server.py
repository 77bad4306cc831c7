"""The gRPC server of the picker: external processing, access logs and health, on the gateway's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from kvroute.epp.access_log import AccessLog
from kvroute.epp.envoy_pb2 import (
    HealthCheckRequest,
    HealthCheckResponse,
    ProcessingResponse,
    StreamAccessLogsMessage,
    StreamAccessLogsResponse,
)
from kvroute.epp.exchange import PickExchange, id_headers
from kvroute.epp.messages import ACCESS_LOGS, HEALTH, MESSAGE_BYTES, PROCESS, RequestRefused, immediate_reply
from kvroute.epp.stream import ProcessingStream, ProtocolFault
from kvroute.http.headers import request_id_of
from kvroute.http.server.request_parser import LIGHT_BYTES, HttpError
from kvroute.serve.api.responses import error_body
from kvroute.serve.observe.logs import log_event
from kvroute.serve.proxy.frontend import ServerParts
from kvroute_engine.addresses import host_port

_OPTIONS = (
    ("grpc.so_reuseport", 0),  # a second picker on the same port is an error
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_concurrent_streams", 1 << 30),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),  # pings go on while no stream sends data
)
_NOTICE_S = 3.0
"""Time in which Envoys notice that the picker drains: two failed health checks, one second apart, and their timeout."""
_ENTRIES_AT_ONCE = 100
"""Entries of the access log that are processed before other requests run."""
_BUSY = HttpError(429, "the picker has reached its limit of requests; try again later", "rate_limit_error")
_READINESS = frozenset({"", "readiness", PROCESS[1:].rpartition("/")[0]})
"""Services whose health is that of the picker."""


@dataclass(frozen=True, slots=True)
class PickerSpec:
    """Settings of the picker beside those of the gateway."""

    conformance: bool = False
    """Whether the headers of the conformance tests have an effect, and requests of any path reach an engine."""
    sidecar: bool = False
    """Whether a sidecar of each decode instance orders the prefill, so that the picker only names its instance."""
    fails_open: bool | None = None
    """Whether the configuration of Envoy that the picker has written fails open; None: it has written none."""


class PickerServer:
    """See `kvroute.serve.proxy.frontend.Server`."""

    def __init__(self, parts: ServerParts, settings: PickerSpec) -> None:
        self.limits = parts.limits
        self._endpoints, self._ready, self._settings = parts.endpoints, parts.ready, settings
        self._key_pair, self._deadlines = parts.key_pair, parts.deadlines
        self._server: Any = None
        self._streams: dict[ProcessingStream, None] = {}
        """Those that count; one that was refused for another one does not."""
        self._arriving: dict[ProcessingStream, None] = {}
        """Those of them whose request is not complete, oldest first."""
        self._bodies_bytes = self._refused = self._logging = 0
        """`_refused`: number of streams that were refused for another one and have not ended yet; `_logging`: number of
        streams of access logs."""
        self.access_log = AccessLog(lambda: parts.endpoints.serving)
        self._draining = asyncio.Event()
        self._closed = False

    @property
    def connections(self) -> int:
        """Number of streams; each is one request."""
        return len(self._streams)

    async def listen(self, host: str, port: int, ssl: object = None) -> int:
        """Accept Envoys at an address and return the port (chosen by the system if `port` is 0).

        Raises:
            OSError: the address cannot be used.
        """
        del ssl  # gRPC has a TLS of its own, which takes `ServerParts.key_pair`
        server = self._server = grpc.aio.server(options=[*_OPTIONS, *_pings(self.limits.stall_s)])
        server.add_generic_rpc_handlers(tuple(_handlers(self._process, self._health, self._logs)))
        address = host_port(host, port)
        try:
            if self._key_pair is None:
                drawn = server.add_insecure_port(address)
            else:
                drawn = server.add_secure_port(address, _renewed_credentials(self._key_pair))
        except RuntimeError:
            await server.start()  # gRPC can only stop a server that was started
            await server.stop(None)
            self._server = None
            raise OSError(None, "the address is in use, or not of this machine") from None
        await server.start()
        return int(drawn)

    def stop_accepting(self) -> None:
        """Reject new streams."""
        self._closed = True

    async def drain(self, timeout_s: float, *, idle_s: float = _NOTICE_S) -> None:
        """Reject new streams after `idle_s`, in which Envoys notice that the picker is not ready any more, and wait for
        those in progress, at most `timeout_s`."""
        if self._server is None:
            return
        await asyncio.sleep(min(idle_s, timeout_s))
        self._closed = True
        server, self._server = self._server, None
        self._draining.set()
        await server.stop(timeout_s)

    async def _health(self, request: HealthCheckRequest, _: Any) -> HealthCheckResponse:
        status = HealthCheckResponse.SERVICE_UNKNOWN
        if request.service == "liveness":
            status = HealthCheckResponse.SERVING
        elif request.service in _READINESS:
            status = HealthCheckResponse.NOT_SERVING if self._ready() else HealthCheckResponse.SERVING
        return HealthCheckResponse(status=status)

    async def _logs(self, _: Any, context: Any) -> StreamAccessLogsResponse:
        """Serve one stream of an Envoy, which lasts as long as that Envoy or the picker."""
        if self._logging >= self.limits.connections:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the picker has reached its limit of access logs")

        async def read() -> None:
            while (raw := await context.read()) is not grpc.aio.EOF:
                if len(raw) > MESSAGE_BYTES:  # Envoy sends 16 KiB by default
                    continue
                for number, entry in enumerate(StreamAccessLogsMessage.FromString(raw).http_logs.log_entry):
                    self.access_log.take(entry)
                    if number % _ENTRIES_AT_ONCE == _ENTRIES_AT_ONCE - 1:
                        await asyncio.sleep(0)

        waits = [asyncio.ensure_future(read()), asyncio.ensure_future(self._draining.wait())]
        self._logging += 1
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._logging -= 1
            for task in waits:
                task.cancel()
        return StreamAccessLogsResponse()

    async def _process(self, _: Any, context: Any) -> None:
        if self._closed:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the picker is shutting down")
        if len(self._streams) >= self.limits.connections and not self._make_room():
            request_id = request_id_of([])  # the request's own headers are not read
            self._endpoints.refused(429, b"", request_id, "")
            headers = [*id_headers(b"", request_id), (b"retry-after", b"1")]
            body = error_body(_BUSY.message, _BUSY.type)
            await context.write(immediate_reply(429, body, b"application/json", headers))
            return
        stream = ProcessingStream(context, self, conformance=self._settings.conformance)
        self._streams[stream] = self._arriving[stream] = None
        self._deadlines.watch(stream)
        try:
            await stream.run()
        except ProtocolFault as fault:
            log_event("error", "envoy_misconfigured", reason=str(fault))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(fault))
        finally:
            self._deadlines.forget(stream)
            self._arriving.pop(stream, None)
            if stream in self._streams:
                del self._streams[stream]
            else:
                self._refused -= 1
            self._bodies_bytes -= stream.held_bytes

    def _make_room(self) -> bool:
        """Refuse the oldest request that is not complete; return False if there is none, or if too many of those that
        were refused have not ended yet."""
        if not self._arriving or self._refused >= self.limits.connections // 8 + 64:
            return False
        oldest = next(iter(self._arriving))
        del self._arriving[oldest], self._streams[oldest]
        self._refused += 1
        oldest.refuse(_BUSY)
        return True

    # What `ProcessingStream` needs

    def hold(self, stream: ProcessingStream, nbytes: int) -> None:
        """See `StreamOwner`."""
        limits, size = self.limits, counted_bytes(nbytes)
        self._bodies_bytes += size - stream.held_bytes
        stream.held_bytes = size
        if nbytes > limits.body_bytes:
            what = f"the body is longer than {limits.body_bytes} bytes"
            raise RequestRefused(HttpError(413, what, code="body_too_large"))
        if self._bodies_bytes > limits.bodies_bytes:
            what = "the bodies of all requests together take all memory that they may"
            raise RequestRefused(HttpError(503, what, "service_unavailable"))

    def refused(self, status: int, path: bytes, request_id: bytes, client: str) -> None:
        """See `StreamOwner`."""
        self._endpoints.refused(status, path, request_id, client)

    def take(self, stream: ProcessingStream, exchange: PickExchange) -> None:
        """See `StreamOwner`."""
        self._arriving.pop(stream, None)
        if self._settings.conformance:
            self._endpoints.pass_any(exchange)
        else:
            self._endpoints.answer(exchange)


def _pings(stall_s: float) -> list[tuple[str, int]]:
    """Return options with which gRPC ends a connection whose peer is gone. Args: `stall_s`: after this time at most."""
    half_ms = max(int(500 * stall_s), 1)
    return [("grpc.keepalive_time_ms", half_ms), ("grpc.http2.ping_timeout_ms", half_ms)]


def counted_bytes(nbytes: int) -> int:
    """Return the memory that counts for a body of this size: four times its size, as in the gateway's HTTP server;
    none for a small one."""
    return 4 * nbytes if nbytes > LIGHT_BYTES else 0


def _renewed_credentials(key_pair: Callable[[], tuple[bytes, bytes]]) -> Any:
    """Return credentials with which each new connection uses the present key and certificate."""
    used = key_pair()

    def renewed() -> Any:
        """Called before each handshake, in a thread of gRPC; None: nothing has changed."""
        nonlocal used
        pair = key_pair()
        if pair == used:
            return None
        used = pair
        return grpc.ssl_server_certificate_configuration([pair])

    return grpc.dynamic_ssl_server_credentials(grpc.ssl_server_certificate_configuration([used]), renewed)


def _handlers(process: Callable[..., Any], health: Callable[..., Any], logs: Callable[..., Any]) -> list[Any]:
    """Return the handlers of all services."""
    processing = grpc.stream_stream_rpc_method_handler(process, None, ProcessingResponse.SerializeToString)
    checking = grpc.unary_unary_rpc_method_handler(
        health, HealthCheckRequest.FromString, HealthCheckResponse.SerializeToString
    )
    logging = grpc.stream_unary_rpc_method_handler(logs, None, StreamAccessLogsResponse.SerializeToString)
    found = []
    for path, handler in ((PROCESS, processing), (HEALTH, checking), (ACCESS_LOGS, logging)):
        service, _, method = path[1:].partition("/")
        found.append(grpc.method_handlers_generic_handler(service, {method: handler}))
    return found
