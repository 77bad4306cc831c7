"""One engine as the gateway uses it: its connections, protocol dialect, availability and requests in progress."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvroute.gateway.engines.breaker import Attempt, Breaker, Cause
from kvroute.gateway.engines.fault_attribution import NOT_COUNTED
from kvroute.gateway.engines.protocols import DIALECTS, QUERY_PATH, DialectError, Meeting, engine_id
from kvroute.gateway.http.call import Failure, Sink
from kvroute.gateway.http.headers import Headers
from kvroute.gateway.http.pool import Pool, request_bytes
from kvroute.types import Instance, Role

if TYPE_CHECKING:
    from kvroute.gateway.proxy.leg import Leg

_COPY_MAX = 64 * 1024
"""Larger bodies are sent separately from their head, to avoid a copy."""


class Guard:
    """Availability of an instance: health checks, circuit breaker, and holds (other reasons to send nothing).

    `on_change` is called at every change; a half-open breaker lets one request through and blocks others meanwhile.
    """

    def __init__(self, name: str, breaker: Breaker, on_change: Callable[[str, bool, float], None]) -> None:
        self.name, self.breaker, self.healthy = name, breaker, True
        self.up = True
        self.present = True
        """False: no process listens there, or none has passed a health check yet."""
        self.ignored = False
        """Whether health checks and breaker are ignored because of a panic."""
        self.on_available: Callable[[float], None] | None = None
        """Called with the time at every change of `available` or `counted`."""
        self._seen = (True, True)
        self._held: set[str] = set()
        self._tried = False
        """Whether its breaker is not closed, so that every outcome may change the state."""
        self._on_change = on_change

    def started(self, now: float) -> Attempt:
        """Record that a request is being sent; its outcome is reported with the returned attempt."""
        attempt = self.breaker.started(now)
        if self._tried:
            self.look(now)
        return attempt

    def succeeded(self, attempt: Attempt, now: float) -> None:
        """Record a response, which may be a client error."""
        self.breaker.succeeded(attempt, now)
        if self._tried:
            self.look(now)

    def failed(self, attempt: Attempt, now: float, cause: Cause = "no_answer") -> None:
        """Record a failure."""
        self.breaker.failed(attempt, now, cause)
        self.look(now)

    def acquitted(self, attempt: Attempt, now: float) -> None:
        """Record an error response that is the fault of the request."""
        self.breaker.acquitted(attempt, now)
        if self._tried:
            self.look(now)

    def late_failure(self, now: float) -> Attempt:
        """Start an attempt for a request that fails after its success was reported; it is not a half-open probe."""
        return self.breaker.started(now) if self.breaker.state(now) == "closed" else NOT_COUNTED

    def cancelled(self, attempt: Attempt, now: float) -> None:
        """Record that the response was not needed any more."""
        self.breaker.cancelled(attempt, now)
        if self._tried:
            self.look(now)

    def set_healthy(self, healthy: bool, now: float, *, present: bool = True) -> None:
        """Set the result of the health checks; see `present`."""
        self.healthy, self.present = healthy, present
        self.look(now)

    def ignore_checks(self, ignored: bool, now: float) -> None:
        """Set whether health checks and breaker are ignored."""
        if ignored != self.ignored:
            self.ignored = ignored
            self.look(now)

    @property
    def available(self) -> bool:
        """Whether health checks and a closed breaker allow requests, and nothing holds the instance."""
        return self.healthy and not self._held and not self._tried

    @property
    def counted(self) -> bool:
        """Whether it counts for the panic threshold: it is not administratively down, and its process listens."""
        return not self._held and (self.present or self.healthy)

    def hold(self, why: str, now: float) -> None:
        """Stop requests to the instance for this reason, possibly among others, until `let_go`."""
        self._held.add(why)
        self.look(now)

    def let_go(self, why: str, now: float) -> None:
        """Remove this reason, if present."""
        self._held.discard(why)
        self.look(now)

    @property
    def why(self) -> str:
        """Why it gets no requests; empty: only its breaker may prevent them."""
        return ", ".join(["unhealthy"] * (not self.healthy) + sorted(self._held))

    def look(self, now: float) -> None:
        """Update the state and report changes; also called periodically, since an open breaker later allows a probe."""
        self._tried = self.breaker.state(now) != "closed"
        seen = self.available, self.counted
        if seen != self._seen:
            self._seen = seen
            if self.on_available is not None:
                self.on_available(now)  # before the change is reported: a panic may keep this instance up
        well = self.healthy and (not self._tried or self.breaker.allows(now))
        up = not self._held and (well or (self.ignored and self.present))
        if up != self.up:
            self.up = up
            self._on_change(self.name, up, now)


class Station:
    """One instance with an endpoint."""

    def __init__(
        self,
        instance: Instance,
        pool: Pool,
        bootstrap: Pool | None,
        guard: Guard,
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
            guard: its availability.
            approximate: the engine does not report its cache contents; the gateway assumes that what it sent is cached.
            measures: whether the time to the first byte of a response measures its transfer.
            between_s: maximum time between two bytes of a response, in seconds.
        """
        assert instance.endpoint is not None
        self.instance, self.name, self.pool, self.guard = instance, instance.name, pool, guard
        self.role: Role = instance.role
        """The current role; role switches change it."""
        self.dialect = DIALECTS[instance.protocol]
        self.approximate = approximate
        self.measures = measures
        """Whether the gateway's own measurement of transfers counts; False once the engine reports its transfers."""
        self.under_way = 0
        self.out_of_files = False
        """Whether the last request to its bootstrap server failed for lack of a file descriptor in the gateway."""
        self._bootstrap, self._between_s = bootstrap, between_s
        self._engine_id = ""
        self._meeting: list[Callable[[], None]] = []
        """Callbacks that wait for the engine's id."""
        self._host = pool.host

    def send(self, leg: Leg, path: bytes, head: bytes, body: bytes, first_byte_s: float, now: float) -> None:
        """Start a leg's call; `head` holds its header lines."""
        leg.open = True
        self.under_way += 1
        leg.attempt = self.guard.started(now) if leg.journey.suspicion is None else NOT_COUNTED
        large = body if len(body) > _COPY_MAX else b""
        request = b"POST %b HTTP/1.1\r\nhost: %b\r\n%bcontent-length: %d\r\n\r\n%b" % (
            path,
            self._host,
            head,
            len(body),
            b"" if large else body,
        )
        leg.call = self.pool.send(request, leg, first_byte_s=first_byte_s, idle_s=self._between_s, body=large)

    def left(self) -> None:
        """Count a finished call."""
        self.under_way -= 1
        assert self.under_way >= 0

    def meeting(self, draw: Callable[[], int], *, early: bool = False) -> Meeting | None:
        """Return the transfer parameters of a request's two legs; None while the engine's id is unknown (see `meet`).

        `draw` returns 63 random bits. `early`: both legs are sent at once, whatever the protocol.
        """
        endpoint = self.instance.endpoint
        assert endpoint is not None
        if endpoint.protocol == "vllm" and early:
            name = uuid.UUID(int=draw() << 1 | 1).hex
            return Meeting(transfer_id=name, bootstrap=endpoint.bootstrap, early=True, instance=self.name)
        if endpoint.protocol == "vllm":
            return _PLAIN
        if endpoint.protocol == "sglang":
            return Meeting(room=draw(), bootstrap=endpoint.bootstrap)
        if not self._engine_id:
            return None
        name = uuid.UUID(int=draw() << 1 | 1).hex
        return Meeting(transfer_id=name, bootstrap=endpoint.bootstrap, engine_id=self._engine_id)

    def meet(self, then: Callable[[], None]) -> None:
        """Request the engine's id from the bootstrap server, once for all concurrent callers; always call `then`."""
        assert self._bootstrap is not None
        self._meeting.append(then)
        if len(self._meeting) > 1:
            return
        request = request_bytes(b"GET", QUERY_PATH, self._bootstrap.host, [], b"")
        self._bootstrap.send(request, _Introduction(self), first_byte_s=5.0, idle_s=5.0)

    def forget(self) -> None:
        """Discard the engine's id, because the engine may be a different one now."""
        self._engine_id = ""

    def introduced(self, reply: bytes, *, out_of_files: bool = False) -> None:
        """Process the bootstrap server's response; empty: it failed, or the gateway had no file descriptor."""
        self.out_of_files = out_of_files
        try:
            self._engine_id = engine_id(reply)
        except DialectError:
            self._engine_id = ""
        waiting, self._meeting = self._meeting, []
        for then in waiting:
            then()

    def close(self) -> None:
        """Close idle connections."""
        self.pool.close()
        if self._bootstrap is not None:
            self._bootstrap.close()


_PLAIN = Meeting()


class _Introduction(Sink):
    """Receives the response of a bootstrap server."""

    def __init__(self, station: Station) -> None:
        self._station = station
        self._parts: list[bytes] = []
        self._status = 0

    def on_head(self, status: int, headers: Headers) -> None:
        self._status = status

    def on_body(self, data: bytes) -> None:
        if len(self._parts) < 1024:
            self._parts.append(data)

    def on_end(self) -> None:
        self._station.introduced(b"".join(self._parts) if self._status == 200 else b"")

    def on_failure(self, failure: Failure) -> None:
        self._station.introduced(b"", out_of_files=failure.kind == "out_of_files")
