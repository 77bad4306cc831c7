"""One call to one engine for one request: counted at its station, told to its guard, and given back, each exactly once.

What an answer means is for the kinds of leg; this is what they have in common.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from kvroute.gateway.breaker import is_failure
from kvroute.gateway.headers import answered
from kvroute.gateway.suspicion import NOT_COUNTED

if TYPE_CHECKING:
    from kvroute.gateway.breaker import Attempt
    from kvroute.gateway.call import Call, Failure
    from kvroute.gateway.headers import Headers
    from kvroute.gateway.journey import Journey
    from kvroute.gateway.station import Station
    from kvroute.gateway.tracing import LegTrace

LegKind = Literal["copy", "prefill", "decode"]

ANSWER_BYTES_MAX = 64 * 2**20
"""A collected answer that is longer is a fault of its engine."""
TIMEOUT_STATUS = {"timeout": 504}
FULL = frozenset((429, 503))
"""An engine that is full or starting up has not touched the KV cache."""
UNAVAILABLE = "service_unavailable"
_VERBS = {
    "refused": "refused the connection",
    "reset": "broke off",
    "timeout": "took too long",
    "malformed": "did not speak HTTP",
}


class Leg:
    """One call; its station counts it from `send` to the first of close and abort, and its guard hears of it once.

    Its callbacks let no exception out: a mistake ends the journey, with a 500 for the client.
    """

    __slots__ = (
        "_parts",
        "attempt",
        "call",
        "headers",
        "journey",
        "open",
        "sent_at",
        "size",
        "station",
        "status",
        "told",
        "trace",
    )
    kind: LegKind = "prefill"
    headers: Headers

    def __init__(self, journey: Journey, station: Station, now: float) -> None:
        self.journey, self.station, self.sent_at = journey, station, now
        self.call: Call | None = None
        self.trace: LegTrace | None = None
        self.attempt: Attempt = 0
        self.status = self.size = 0
        self.open = self.told = False
        """`told`: the guard has heard of it."""
        self._parts: list[bytes] = []

    def body(self) -> bytes:
        """What has been collected."""
        parts = self._parts
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def send(self, body: bytes, first_byte_s: float, now: float, path: bytes = b"") -> None:
        """Begin the call; `path` is the client's where none is given."""
        journey = self.journey
        head = journey.head
        if journey.trace is not None:
            self.trace = journey.trace.leg(self.kind, {"kvroute.instance": self.station.name})
            head += self.trace.head
        self.station.send(self, path or journey.exchange.path, head, body, first_byte_s, now)

    def on_head(self, status: int, headers: Headers) -> None:
        """See Sink."""
        self.status, self.headers = status, headers

    def keep(self, data: bytes) -> bool:
        """Collect; False where the answer is longer than anybody should send."""
        self._parts.append(data)
        self.size += len(data)
        return self.size <= ANSWER_BYTES_MAX

    def succeeded(self, now: float) -> None:
        """The engine has answered, be it with a client's error."""
        if not self.told:
            self.told = True
            self.station.guard.succeeded(self.attempt, now)

    def close(self, error: str = "") -> None:
        """The call is over."""
        if self.open:
            self.open = False
            self.call = None  # which holds the leg: a cycle keeps bodies until the collector comes
            self.station.left()
            if self.trace is not None:
                self.trace.end(error)

    def abort(self, now: float) -> None:
        """Nobody waits for the answer any more: neither a success nor a failure."""
        if self.open:
            if self.call is not None:
                self.call.abort()
            if not self.told:
                self.told = True
                self.station.guard.cancelled(self.attempt, now)
            self.close("cancelled")

    def failed(self, kind: str, why: str, now: float) -> None:
        """The engine has not answered, has stopped half-way, or (`kind` "status") answers with its own error."""
        if self.told:
            self.attempt = self.station.guard.late_failure(now)
        self.told = True
        self.blame(kind, now)
        self.close(why)
        self.journey.serving.leg_failed(self.kind, self.station.name, kind, why, self.journey.request_id)

    def blame(self, kind: str, now: float) -> None:
        """Report a failure, which ends the attempt."""
        guard = self.station.guard
        if kind == "status" and self.status == 429:
            guard.succeeded(self.attempt, now)
        else:
            suspicion = self.journey.suspect()
            suspicion.failed(guard, self.attempt, self.kind, now, error=kind == "status")
            if self.journey.over:  # its client has the answer
                suspicion.ended(200, now)

    def not_sent(self, now: float) -> None:
        """The call fails before it is sent: begin the attempt that will be reported as failed."""
        self.attempt = self.station.guard.started(now) if self.journey.suspicion is None else NOT_COUNTED

    def endless(self) -> None:
        """The engine sends more than anybody should."""
        if self.call is not None:
            self.call.abort()
        why = f"{self.kind} instance {self.station.name} sent an answer without end"
        self.lost("malformed", why, 502, sent=True)

    def refused(self) -> None:
        """An engine's own error: the client's fault is the client's to read, anything else is a failure."""
        status = self.status
        if status == 429 or is_failure(status):
            full = status in FULL
            why = f"{self.kind} instance {self.station.name} answered {status}"
            self.lost("status", why, 503 if full else 502, sent=not full)
            return
        journey = self.journey
        now = journey.serving.now()
        self.succeeded(now)
        self.close()
        if journey.over or (self is journey.prefill and journey.computed):
            return  # the decode leg's first token was faster
        journey.drop_legs(now)
        content_type, headers = answered(self.headers, journey.request_id)
        journey.exchange.respond(status, self.body(), content_type, headers)
        journey.end(status, now)

    def on_body(self, data: bytes) -> None:
        """See Sink."""
        raise NotImplementedError

    def on_end(self) -> None:
        """See Sink."""
        raise NotImplementedError

    def on_failure(self, failure: Failure) -> None:
        """See Sink. A call that never reached the engine leaves the KV cache where it is."""
        try:
            if failure.kind == "out_of_files":
                self.out_of_files()
                return
            why = f"{self.kind} instance {self.station.name} {_VERBS[failure.kind]}"
            status = TIMEOUT_STATUS.get(failure.kind, 502)
            self.lost(failure.kind, why, status, sent=failure.phase != "connect")
        except Exception as error:
            self.journey.broke(error)

    def out_of_files(self) -> None:
        """The gateway has no file descriptor left for a connection: no engine is to blame, and none is asked again."""
        journey, now = self.journey, self.journey.serving.now()
        self.station.guard.cancelled(self.attempt, now)
        self.told = True
        why = f"the gateway has no file descriptor left to connect to {self.kind} instance {self.station.name}"
        self.close(why)
        journey.serving.leg_failed(self.kind, self.station.name, "out_of_files", why, journey.request_id)
        if not (journey.over or (self is journey.prefill and journey.computed)):
            journey.fail(503, why, now, UNAVAILABLE)

    def lost(self, kind: str, why: str, status: int, *, sent: bool) -> None:
        """The leg came to nothing: it is tried again elsewhere, or the request ends.

        Args:
            kind: one word for the metrics.
            why: one sentence for the client.
            status: for the client, if this is the end.
            sent: the engine may have fetched the KV cache, which is then gone from its source.
        """
        raise NotImplementedError
