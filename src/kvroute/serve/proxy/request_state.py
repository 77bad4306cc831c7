"""Facts of one client request that its legs read. Only the request itself changes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvroute.http.headers import header_lines
from kvroute.serve.engines.fault_attribution import FaultAttribution

if TYPE_CHECKING:
    from kvroute.http.client_exchange import ClientExchange
    from kvroute.http.headers import Headers
    from kvroute.serve.api.requests import Completion
    from kvroute.serve.api.stream_record import StreamRecord
    from kvroute.serve.engines.pd_protocol import KvHandshake
    from kvroute.serve.observe.tracing import RequestTrace
    from kvroute.serve.proxy.runtime import ClusterRuntime
    from kvroute.serve.wan.paths import PathAttempt
    from kvroute.types import Request


class RequestContext:
    """What the legs of every request share: the client's side, the header lines for engines, trace and failures."""

    __slots__ = (
        "_entered_id",
        "engine_id",
        "exchange",
        "faults",
        "head",
        "over",
        "path",
        "request_id",
        "runtime",
        "trace",
    )
    head: bytes
    """Header lines that engines receive."""

    def __init__(self, runtime: ClusterRuntime, exchange: ClientExchange, request_id: bytes) -> None:
        self.runtime, self.exchange, self.request_id = runtime, exchange, request_id
        self.engine_id = self._entered_id = b""
        """X-Request-Id for engines, of this attempt and of the first one: see `RequestIds`."""
        self.path = exchange.path
        """Path of its legs."""
        self.trace: RequestTrace | None = None
        self.faults: FaultAttribution | None = None
        """Attributes failed attempts to engines or to the request; None: no attempt has failed."""
        self.over = False
        """The request has ended."""

    def enter(self, name: str) -> None:
        """Begin the trace, and make the header lines for engines. Args: `name`: of the endpoint."""
        runtime, exchange = self.runtime, self.exchange
        self.trace = runtime.tracer.request(exchange.headers, name)
        self.engine_id = self._entered_id = runtime.request_ids.enter(exchange)
        self.head = runtime.engine_headers.lines(exchange.headers, self.engine_id)

    def next_attempt(self) -> None:
        """Use another id for the next attempt."""
        engine_id = self.runtime.request_ids.another(self.request_id)
        self.head, self.engine_id = self._head_with(engine_id), engine_id

    def leave(self) -> None:
        """End the request: it uses no id any more."""
        assert not self.over
        self.over = True
        self.runtime.request_ids.leave(self._entered_id)

    def _head_with(self, engine_id: bytes) -> bytes:
        own = header_lines([(b"x-request-id", self.engine_id)])
        assert self.head.startswith(own), "see `forwarded`"
        return header_lines([(b"x-request-id", engine_id)]) + self.head[len(own) :]

    def fault_attribution(self) -> FaultAttribution:
        """Return `faults`; create it at the first failure."""
        if self.faults is None:
            self.faults = FaultAttribution()
        return self.faults


class RequestState(RequestContext):
    """The same of a completion: also what the core knows of it."""

    __slots__ = (
        "abandoned",
        "aggregated",
        "completion",
        "kind",
        "number",
        "path_attempt",
        "received_at",
        "record",
        "request",
        "response_headers",
    )

    def __init__(
        self,
        runtime: ClusterRuntime,
        exchange: ClientExchange,
        completion: Completion,
        request_id: bytes,
        received_at: float,
    ) -> None:
        super().__init__(runtime, exchange, request_id)
        self.completion = completion
        self.number = runtime.next_number()
        """Its id in the core and in the event log."""
        self.received_at = received_at
        self.kind = completion.kind
        """Kind of the client's request; `completion` may be of another one when a stream is continued."""
        self.record: StreamRecord | None = None
        """Tokens of the response, if another engine may continue it."""
        self.request: Request | None = None
        self.response_headers: Headers = []
        """Headers that the gateway adds to the response."""
        self.path_attempt: PathAttempt | None = None
        """Its attempt to transfer the KV cache from another datacenter over a WAN path; None: there is none."""
        self.abandoned = False
        """The client has left, and the request goes on only until the prefill engine's KV cache is fetched."""
        self.aggregated = False
        """The decode instance computes the prompt, because the prefill instance has returned no transfer parameters."""

    def head_of(self, handshake: KvHandshake | None) -> bytes:
        """Return the header lines that the engines of an attempt receive. Args: `handshake` of its legs; None: none."""
        if handshake is None or not handshake.attempt:
            return self.head
        return self._head_with(b"%b-%b" % (self.request_id, handshake.attempt))

    @property
    def prefill_done(self) -> bool:
        """Whether no prefill is in progress: the KV cache is complete, or a decode instance computes it itself."""
        return not self.runtime.control.prefilling(self.number)
