"""One engine as the gateway uses it: its connections, P/D protocol, availability and requests in progress."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Raw

from kvroute.http.client.call import Call, Failure, ResponseHandler
from kvroute.http.client.pool import UpstreamPool, request_bytes
from kvroute.http.headers import Headers, header_lines
from kvroute.serve.engines.availability import NOT_COUNTED, Availability
from kvroute.serve.engines.breaker import Attempt
from kvroute.serve.engines.pd_protocol import KvHandshake, KvSource, ProtocolError
from kvroute.serve.engines.protocols import PROTOCOLS, QUERY_PATH, engine_id
from kvroute.types import Instance, Role

RANK_HEADER = b"x-data-parallel-rank"
_COPY_MAX = 64 * 1024
"""Larger bodies are sent separately from their head, to avoid a copy."""
_TOKENS_PER_EVENT_MAX, _TOKENS_PER_EVENT_WEIGHT = 64.0, 0.1
"""Largest value of `tokens_per_event`, and the weight of one stream in it; the first streams have equal weights."""


class EngineClient:
    """One instance with an endpoint."""

    def __init__(
        self,
        instance: Instance,
        pool: UpstreamPool,
        bootstrap: UpstreamPool | None,
        buffer: UpstreamPool | None,
        availability: Availability,
        *,
        approximate: bool,
        measures: bool,
        between_s: float,
    ) -> None:
        """
        Args:
            instance: instance with an endpoint.
            pool: connections to it.
            bootstrap: connections to its bootstrap server, if the protocol obtains the engine's id there.
            buffer: connections to the buffer server on its node; None: it reads nothing from a store.
            availability: its availability.
            approximate: the engine does not report its cache contents; the gateway assumes that what it sent is cached.
            measures: whether the time to the first byte of a response measures its transfer.
            between_s: maximum time between two bytes of a response, in seconds.
        """
        assert instance.endpoint is not None
        self.instance, self.name, self.pool, self.availability = instance, instance.name, pool, availability
        self.role: Role = instance.role
        """The current role; role switches change it."""
        self.protocol = PROTOCOLS[instance.protocol]
        self.approximate = approximate
        self.measures = measures
        """Whether the gateway's own measurement of transfers counts; False once the engine reports its transfers."""
        self.in_flight = 0
        self.out_of_files = False
        """Whether the last request to its bootstrap server failed for lack of a file descriptor in the gateway."""
        self.rank_headers: Headers = [(RANK_HEADER, b"%d" % instance.rank)] if instance.engine else []
        """Selects the data-parallel rank; empty: the server has one, or divides requests itself."""
        self.rank_head = header_lines(self.rank_headers)
        self.buffer, self.buffer_url = buffer, instance.endpoint.buffer
        self._bootstrap, self._between_s = bootstrap, between_s
        self._engine_id = ""
        self.peer: Raw | None = None
        """How decode engines reach it, from its last response; None: unknown, or its protocol does not need it."""
        self._engine_id_waiters: list[Callable[[], None]] = []
        """Callbacks that wait for the engine's id."""
        self._host = pool.host
        self.tokens_per_event = 1.0
        self._streams_counted = 0
        """Mean number of tokens in one event of its streams: more than one with speculative decoding."""

    def send(
        self,
        sink: ResponseHandler,
        path: bytes,
        head: bytes,
        body: bytes,
        *,
        first_byte_s: float,
        method: bytes = b"POST",
    ) -> Call:
        """Start a call for a leg, after `started`.

        Args:
            sink: receives the response.
            path: of the request.
            head: header lines of the request.
            body: of the request; empty for GET.
            first_byte_s: timeout for the first byte of the response's body, in seconds.
            method: of the request.
        """
        large = body if len(body) > _COPY_MAX else b""
        request = b"%b %b HTTP/1.1\r\nhost: %b\r\n%b%b%b\r\n%b" % (
            method,
            path,
            self._host,
            head,
            self.rank_head,
            b"content-length: %d\r\n" % len(body) if method != b"GET" else b"",
            b"" if large else body,
        )
        return self.pool.send(request, sink, first_byte_s=first_byte_s, idle_s=self._between_s, body=large)

    def started(self, now: float, *, counted: bool) -> Attempt:
        """Count a call that is being sent, here or by another proxy; `leg_closed` follows once it is over.

        Args:
            now: current time.
            counted: False if the circuit breaker must not count this attempt (see `NOT_COUNTED`).

        Returns:
            The attempt as `availability` counts it.
        """
        self.in_flight += 1
        return self.availability.started(now) if counted else NOT_COUNTED

    def learn_tokens_per_event(self, tokens: int, events: int) -> None:
        """Learn from a stream that has reported its number of tokens."""
        seen = min(max(tokens / max(events, 1), 1.0), _TOKENS_PER_EVENT_MAX)
        self._streams_counted += 1
        weight = max(1.0 / self._streams_counted, _TOKENS_PER_EVENT_WEIGHT)
        self.tokens_per_event += (seen - self.tokens_per_event) * weight

    def leg_closed(self) -> None:
        """Count a finished call."""
        self.in_flight -= 1
        assert self.in_flight >= 0

    def handshake(self, draw: Callable[[], int], *, early: bool = False) -> KvHandshake | None:
        """Return the transfer parameters of a request's two legs; None while the engine's id is unknown (see
        `resolve_engine_id`).

        `draw` returns 63 random bits. `early`: both legs are sent at once, whatever the protocol.
        """
        endpoint = self.instance.endpoint
        assert endpoint is not None
        source = KvSource(self.name, endpoint.bootstrap, self._engine_id, self.peer)
        return self.protocol.handshake(source, draw, early=early)

    def resolve_engine_id(self, then: Callable[[], None]) -> None:
        """Request the engine's id from the bootstrap server, once for all concurrent callers; always call `then`."""
        assert self._bootstrap is not None
        self._engine_id_waiters.append(then)
        if len(self._engine_id_waiters) > 1:
            return
        request = request_bytes(b"GET", QUERY_PATH, self._bootstrap.host, [], b"")
        self._bootstrap.send(request, _Introduction(self), first_byte_s=5.0, idle_s=5.0)

    def forget_engine_id(self) -> None:
        """Discard the engine's id and how it is reached, because the engine may be a different one now."""
        self._engine_id, self.peer = "", None

    def on_engine_id(self, reply: bytes, *, out_of_files: bool = False) -> None:
        """Process the bootstrap server's response; empty: it failed, or the gateway had no file descriptor."""
        self.out_of_files = out_of_files
        try:
            self._engine_id = engine_id(reply, self.instance.rank if self.instance.engine else None)
        except ProtocolError:
            self._engine_id = ""
        waiting, self._engine_id_waiters = self._engine_id_waiters, []
        for then in waiting:
            then()

    def abort_calls(self) -> None:
        """Fail all calls in progress because the engine is gone; their requests decide what follows."""
        why = "the engine is gone"
        self.pool.abort_calls(why)
        for pool in (self._bootstrap, self.buffer):
            if pool is not None:
                pool.abort_calls(why)

    def close(self) -> None:
        """Close idle connections."""
        self.availability.close()
        self.pool.close()
        for pool in (self._bootstrap, self.buffer):
            if pool is not None:
                pool.close()


class _Introduction(ResponseHandler):
    """Receives the response of a bootstrap server."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._parts: list[bytes] = []
        self._status = 0

    def on_head(self, status: int, headers: Headers) -> None:
        self._status = status

    def on_body(self, data: bytes) -> None:
        if len(self._parts) < 1024:
            self._parts.append(data)

    def on_end(self) -> None:
        self._engine.on_engine_id(b"".join(self._parts) if self._status == 200 else b"")

    def on_failure(self, failure: Failure) -> None:
        self._engine.on_engine_id(b"", out_of_files=failure.kind == "out_of_files")
