"""The two ways to listen to an engine: a prefill leg is collected, an answer leg is relayed or collected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from kvroute.gateway.answers import sse_events, usage_tokens
from kvroute.gateway.exchange import Headers

if TYPE_CHECKING:
    from kvroute.gateway.breaker import Attempt
    from kvroute.gateway.call import Call, Failure
    from kvroute.gateway.journey import Journey
    from kvroute.gateway.station import Station
    from kvroute.gateway.tracing import LegTrace

LegKind = Literal["prefill", "decode"]

_STATUS = {"timeout": 504}
_VERBS = {
    "refused": "refused the connection",
    "reset": "broke off",
    "timeout": "took too long",
    "malformed": "did not speak HTTP",
}
_ERROR_START = (b'data: {"error"', b'data: {"object":"error"')
"""How engines begin a stream that has failed before its first token."""


class Leg:
    """One call to one engine for one request; its station counts it from `send` to the first of close and abort, and
    its guard hears of it once."""

    __slots__ = (
        "_parts",
        "attempt",
        "call",
        "headers",
        "journey",
        "open",
        "size",
        "size_max",
        "station",
        "status",
        "told",
        "trace",
    )
    kind: LegKind = "prefill"

    def __init__(self, journey: Journey, station: Station, size_max: int) -> None:
        self.journey, self.station, self.size_max = journey, station, size_max
        self.call: Call | None = None
        self.trace: LegTrace | None = None
        self.attempt: Attempt = 0
        self.status = 0
        self.headers: Headers = []
        self.open = False
        self.told = False
        """The guard has heard of it."""
        self._parts: list[bytes] = []
        self.size = 0

    def body(self) -> bytes:
        """What has been collected."""
        return b"".join(self._parts) if len(self._parts) != 1 else self._parts[0]

    def content_type(self) -> bytes:
        """Of the engine's answer."""
        return next((value for name, value in self.headers if name == b"content-type"), b"application/json")

    def on_head(self, status: int, headers: Headers) -> None:
        """See Sink."""
        self.status, self.headers = status, headers

    def keep(self, data: bytes) -> bool:
        """Collect; False where the answer is longer than anybody should send."""
        self._parts.append(data)
        self.size += len(data)
        return self.size <= self.size_max

    def succeeded(self, now: float) -> None:
        """The engine has answered, be it with a client's error."""
        if not self.told:
            self.told = True
            self.station.guard.succeeded(self.attempt, now)

    def failed(self, now: float) -> None:
        """The engine has not, or has stopped half-way."""
        if self.told:
            self.attempt = self.station.guard.started(now)
        self.told = True
        self.station.guard.failed(self.attempt, now)

    def close(self, error: str = "") -> None:
        """The call is over."""
        if self.open:
            self.open = False
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


class PrefillLeg(Leg):
    """Collects the short answer of a prefill engine."""

    __slots__ = ()

    def on_body(self, data: bytes) -> None:
        """See Sink. What SGLang streams beside the decode engine's answer is not kept."""
        if self.station.dialect.joint and self.status < 400:
            return
        if not self.keep(data) and self.call is not None:
            self.call.abort()
            why = f"prefill instance {self.station.name} sent an answer without end"
            self.journey.prefill_failed(self, "malformed", why, 502)

    def on_end(self) -> None:
        """See Sink."""
        self.journey.prefill_answered(self)

    def on_failure(self, failure: Failure) -> None:
        """See Sink."""
        self.journey.prefill_failed(self, failure.kind, failure_text(self, failure), _STATUS.get(failure.kind, 502))


class AnswerLeg(Leg):
    """Relays a streamed answer from its first token on; collects one that comes whole, so that it can be retried."""

    __slots__ = ("_events", "first", "streams")
    kind = "decode"

    def __init__(self, journey: Journey, station: Station, size_max: int, *, streams: bool) -> None:
        super().__init__(journey, station, size_max)
        self.streams = streams
        self.first = True
        self._events = 0

    def on_body(self, data: bytes) -> None:
        """See Sink."""
        if not self.streams or self.status >= 400:
            if not self.keep(data) and self.call is not None:
                self.call.abort()
                why = f"decode instance {self.station.name} sent an answer without end"
                self.journey.answer_failed(self, "malformed", why, 502, sent=True)
            return
        if self.first:
            if data.startswith(_ERROR_START):
                if self.call is not None:
                    self.call.abort()
                why = f"decode instance {self.station.name} failed before the first token"
                self.journey.answer_failed(self, "status", why, 502, sent=True)
                return
            self.first = False
            self.journey.first_token(self)
        self._events += sse_events(data)
        self.size += len(data)
        self.journey.answer_data(self, data)

    def on_end(self) -> None:
        """See Sink."""
        self.journey.answered(self)

    def on_failure(self, failure: Failure) -> None:
        """See Sink. A call that never reached the engine leaves the KV cache where it is."""
        status = _STATUS.get(failure.kind, 502)
        sent = failure.phase != "connect"
        self.journey.answer_failed(self, failure.kind, failure_text(self, failure), status, sent=sent)

    def pause(self) -> None:
        """The client is slow: read no more from the engine."""
        if self.call is not None and self.open:
            self.call.pause()

    def resume(self) -> None:
        """The client has caught up."""
        if self.call is not None and self.open:
            self.call.resume()

    def output_tokens(self) -> int | None:
        """Length of the answer as far as it came: events of a stream, the usage of a whole answer."""
        return self._events if self.streams else usage_tokens(self.body()) if self.status < 400 else None


def failure_text(leg: Leg, failure: Failure) -> str:
    """One sentence for the client and the log; the engine's name, not its address."""
    return f"{leg.kind} instance {leg.station.name} {_VERBS[failure.kind]}"
