"""One engine as the gateway deals with it: its connections, dialect, guard and what is under way there."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvroute.gateway.breaker import Attempt, Breaker, Cause
from kvroute.gateway.call import Failure, Sink
from kvroute.gateway.dialects import DIALECTS, QUERY_PATH, DialectError, Meeting, engine_id
from kvroute.gateway.headers import Headers
from kvroute.gateway.pool import Pool, request_bytes
from kvroute.gateway.suspicion import NOT_COUNTED
from kvroute.types import Instance, Role

if TYPE_CHECKING:
    from kvroute.gateway.legs import Leg

_COPY_MAX = 64 * 1024
"""Bodies up to here are sent in one piece with their head."""


class Guard:
    """Whether an instance is to be given requests: what health checks say, what its breaker makes of its answers, and
    whether somebody holds it back.

    `on_change` is told of every change; a half-open breaker lets one request through and is closed to others meanwhile.
    """

    def __init__(self, name: str, breaker: Breaker, on_change: Callable[[str, bool, float], None]) -> None:
        self.name, self.breaker, self.healthy = name, breaker, True
        self.up = True
        self.present = True
        """False: no process listens there, or none has passed a health check yet."""
        self.ignored = False
        """Health checks and breaker are ignored: a panic."""
        self.on_available: Callable[[float], None] | None = None
        """Is told when, on every change of `available` or `counted`."""
        self._seen = (True, True)
        self._held: set[str] = set()
        self._tried = False
        """Whether its breaker is anything but closed, so that every word counts."""
        self._on_change = on_change

    def started(self, now: float) -> Attempt:
        """A request is on its way there; its end is told with what this returns."""
        attempt = self.breaker.started(now)
        if self._tried:
            self.look(now)
        return attempt

    def succeeded(self, attempt: Attempt, now: float) -> None:
        """It was answered, be it with a client's error."""
        self.breaker.succeeded(attempt, now)
        if self._tried:
            self.look(now)

    def failed(self, attempt: Attempt, now: float, cause: Cause = "no_answer") -> None:
        """It was not."""
        self.breaker.failed(attempt, now, cause)
        self.look(now)

    def acquitted(self, attempt: Attempt, now: float) -> None:
        """It was answered with an error, for which the request is to blame."""
        self.breaker.acquitted(attempt, now)
        if self._tried:
            self.look(now)

    def late_failure(self, now: float) -> Attempt:
        """An attempt for a request that fails after its success was reported: it is no half-open probe."""
        return self.breaker.started(now) if self.breaker.state(now) == "closed" else NOT_COUNTED

    def cancelled(self, attempt: Attempt, now: float) -> None:
        """Nobody waited for the answer."""
        self.breaker.cancelled(attempt, now)
        if self._tried:
            self.look(now)

    def set_healthy(self, healthy: bool, now: float, *, present: bool = True) -> None:
        """What the health checks say; see `present`."""
        self.healthy, self.present = healthy, present
        self.look(now)

    def ignore_checks(self, ignored: bool, now: float) -> None:
        """Whether health checks and breaker are ignored from now on."""
        if ignored != self.ignored:
            self.ignored = ignored
            self.look(now)

    @property
    def available(self) -> bool:
        """Whether health checks and breaker agree that it serves; a half-open breaker does not."""
        return self.healthy and not self._held and not self._tried

    @property
    def counted(self) -> bool:
        """Whether the panic threshold counts it: it is not administratively down, and its process listens."""
        return not self._held and (self.present or self.healthy)

    def hold(self, why: str, now: float) -> None:
        """Hold it back, for this reason among others, until `let_go`."""
        self._held.add(why)
        self.look(now)

    def let_go(self, why: str, now: float) -> None:
        """This reason is over; nothing if there was none."""
        self._held.discard(why)
        self.look(now)

    @property
    def why(self) -> str:
        """Why it is given nothing; empty: nothing speaks against it but its breaker."""
        return ", ".join(["unhealthy"] * (not self.healthy) + sorted(self._held))

    def look(self, now: float) -> None:
        """See whether anything has changed; called now and then too, for a breaker opens its door with time."""
        self._tried = self.breaker.state(now) != "closed"
        seen = self.available, self.counted
        if seen != self._seen:
            self._seen = seen
            if self.on_available is not None:
                self.on_available(now)  # before anything is told: a panic may keep this instance up
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
            instance: with an endpoint.
            pool: connections to it.
            bootstrap: connections to its bootstrap server, where the protocol asks that for the engine's id.
            guard: its health.
            approximate: nobody tells what it has cached, so that the gateway takes what it sent there for cached.
            measures: the time to an answer's first byte tells how long its transfer took.
            between_s: seconds between two bytes of an answer, at most.
        """
        assert instance.endpoint is not None
        self.instance, self.name, self.pool, self.guard = instance, instance.name, pool, guard
        self.role: Role = instance.role
        """That it serves now; conversions change it."""
        self.dialect = DIALECTS[instance.protocol]
        self.approximate = approximate
        self.measures = measures
        """Whether the gateway's own watch on transfers counts: False once the engine reports its transfers itself."""
        self.under_way = 0
        self.out_of_files = False
        """Its bootstrap server could not be asked the last time, for the gateway had no file descriptor left."""
        self._bootstrap, self._between_s = bootstrap, between_s
        self._engine_id = ""
        self._meeting: list[Callable[[], None]] = []
        """Who waits for the engine's id."""
        self._host = pool.host

    def send(self, leg: Leg, path: bytes, head: bytes, body: bytes, first_byte_s: float, now: float) -> None:
        """Start a leg's call; `head` is its headers, in lines."""
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
        """One call less."""
        self.under_way -= 1
        assert self.under_way >= 0

    def meeting(self, draw: Callable[[], int], *, early: bool = False) -> Meeting | None:
        """Where the two legs of a request meet; None while the engine's id is not known (`meet` asks for it).

        `draw` gives 63 random bits. `early`: both legs are sent at once, whatever the protocol.
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
        """Ask the bootstrap server for the engine's id, once for all who want it meanwhile; `then` is called in any
        case."""
        assert self._bootstrap is not None
        self._meeting.append(then)
        if len(self._meeting) > 1:
            return
        request = request_bytes(b"GET", QUERY_PATH, self._bootstrap.host, [], b"")
        self._bootstrap.send(request, _Introduction(self), first_byte_s=5.0, idle_s=5.0)

    def forget(self) -> None:
        """The engine may be another one by now: ask for its id again."""
        self._engine_id = ""

    def introduced(self, reply: bytes, *, out_of_files: bool = False) -> None:
        """The bootstrap server's answer; empty: there was none, for want of a file descriptor or for its own fault."""
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
    """Listens to a bootstrap server."""

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
