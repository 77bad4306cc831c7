"""Facts of one proxied request that its legs read. Only `ProxiedRequest` changes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvroute.http.headers import header_lines
from kvroute.serve.engines.fault_attribution import FaultAttribution

if TYPE_CHECKING:
    from kvroute.http.headers import Headers
    from kvroute.http.server.exchange import ClientExchange
    from kvroute.serve.api.requests import Completion
    from kvroute.serve.api.stream_record import StreamRecord
    from kvroute.serve.engines.protocols import KvHandshake
    from kvroute.serve.observe.tracing import RequestTrace
    from kvroute.serve.proxy.runtime import ClusterRuntime
    from kvroute.serve.wan.paths import PathAttempt
    from kvroute.types import Request


class RequestState:
    """The client's side of a request, what the core knows of it, and what is shared by its legs."""

    __slots__ = (
        "abandoned",
        "alone",
        "completion",
        "engine_id",
        "exchange",
        "faults",
        "head",
        "kind",
        "number",
        "over",
        "path",
        "path_attempt",
        "received_at",
        "record",
        "request",
        "request_id",
        "response_headers",
        "runtime",
        "trace",
    )
    head: bytes
    """Header lines that engines receive."""
    engine_id: bytes
    """X-Request-Id among them, see `RequestIds`."""

    def __init__(
        self,
        runtime: ClusterRuntime,
        exchange: ClientExchange,
        completion: Completion,
        request_id: bytes,
        received_at: float,
    ) -> None:
        self.runtime, self.exchange, self.completion, self.request_id = runtime, exchange, completion, request_id
        self.engine_id = b""
        self.number = runtime.next_number()
        """Its id in the core and in the event log."""
        self.received_at = received_at
        self.kind = completion.kind
        """Kind of the client's request; `completion` may be of another one when a stream is continued."""
        self.path = exchange.path
        """Path of its legs."""
        self.record: StreamRecord | None = None
        """Tokens of the response, if another engine may continue it."""
        self.request: Request | None = None
        self.response_headers: Headers = []
        """Headers that the gateway adds to the response."""
        self.path_attempt: PathAttempt | None = None
        """Its attempt to transfer the KV cache from another datacenter over a WAN path; None: there is none."""
        self.trace: RequestTrace | None = None
        self.faults: FaultAttribution | None = None
        """Attributes failed attempts to engines or to the request; None: no attempt has failed."""
        self.abandoned = False
        """The client has left, and the request goes on only until the prefill engine's KV cache is fetched."""
        self.alone = False
        """The decode instance computes the prompt, because the prefill instance has returned no transfer parameters."""
        self.over = False
        """The request has ended."""

    def head_of(self, handshake: KvHandshake | None) -> bytes:
        """Return the header lines that the engines of an attempt receive. Args: `handshake` of its legs; None: none."""
        if handshake is None or not handshake.attempt:
            return self.head
        return self._head_with(b"%b-%b" % (self.request_id, handshake.attempt))

    def rename(self, engine_id: bytes) -> None:
        """Use another id for the next attempt."""
        self.head, self.engine_id = self._head_with(engine_id), engine_id

    def _head_with(self, engine_id: bytes) -> bytes:
        own = header_lines([(b"x-request-id", self.engine_id)])
        assert self.head.startswith(own), "see `forwarded`"
        return header_lines([(b"x-request-id", engine_id)]) + self.head[len(own) :]

    def fault_attribution(self) -> FaultAttribution:
        """Return `faults`; create it at the first failure."""
        if self.faults is None:
            self.faults = FaultAttribution()
        return self.faults

    @property
    def prefill_done(self) -> bool:
        """Whether no prefill is in progress: the KV cache is complete, or a decode instance computes it itself."""
        return not self.runtime.control.prefilling(self.number)
