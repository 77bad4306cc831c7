"""One call to one engine for one request. Its engine client counts it and records its outcome, each exactly once.

The kinds of leg interpret the response; this module holds what they share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from kvroute.serve.api.responses import error_text
from kvroute.serve.engines.availability import NOT_COUNTED
from kvroute.serve.engines.breaker import is_failure
from kvroute.serve.proxy.retry import LegFailure, LegKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvroute.http.client.call import Call, Failure
    from kvroute.http.headers import Headers
    from kvroute.serve.engines.breaker import Attempt, Cause
    from kvroute.serve.engines.client import EngineClient
    from kvroute.serve.engines.fault_attribution import FaultAttribution
    from kvroute.serve.observe.tracing import LegTrace
    from kvroute.serve.proxy.request_state import RequestState

ANSWER_BYTES_MAX = 64 * 2**20
"""A longer collected response counts as a failure of its engine."""
FAILURE_STATUS = {"timeout": 504, "out_of_files": 503}
"""Status of the response by kind of failure; others: 502."""
FULL = frozenset((429, 503))
"""Statuses of an engine that is full or starting up; it has not touched the KV cache."""
_PROVEN: Mapping[str, Cause] = {"status": "error", "reset": "no_answer", "malformed": "no_answer"}
"""Kinds of failures that the request may have caused, and as what they count if another attempt succeeds."""
_VERBS = {
    "refused": "refused the connection",
    "reset": "closed the connection",
    "timeout": "did not respond in time",
    "malformed": "sent an invalid HTTP response",
}


def blame_engine(
    engine: EngineClient,
    attempt: Attempt,
    leg: LegKind,
    failure: str,
    status: int,
    faults: Callable[[], FaultAttribution],
    now: float,
) -> None:
    """Report a failed attempt to the availability of its instance. An instance that is full (429) has responded, and a
    missing file descriptor is no fault of the engine.

    Args:
        engine: the instance.
        attempt: as its availability counts it.
        leg: kind of the call.
        failure: kind of the failure, see `LegFailure`.
        status: status of the response, for `failure` "status".
        faults: returns the attribution of the request's failures.
        now: time, gateway clock.
    """
    if failure == "out_of_files":
        engine.availability.cancelled(attempt, now)
    elif failure == "status" and status == 429:
        engine.availability.succeeded(attempt, now)
    else:
        proven = _PROVEN.get(failure)
        faults().failed(
            engine.availability, attempt, leg, now, uncertain=proven is not None, proven=proven or "no_answer"
        )


class LegOwner(Protocol):
    """Receives the outcome of each leg and decides what follows."""

    def on_leg_failed(self, leg: Leg, failure: LegFailure, now: float) -> None:
        """Handle a failure of the leg, which has ended and counted it."""

    def on_client_error(self, leg: Leg, now: float) -> None:
        """Handle an engine's response that blames the client's request; the leg has ended."""

    def internal_error(self, error: Exception) -> None:
        """Handle a bug in the gateway."""


class Leg:
    """One call. Its engine client counts it from `send` to the first `close` or `abort`; its outcome is reported once.

    Callbacks raise no exceptions: an internal error ends the request, with status 500 for the client.
    """

    __slots__ = (
        "_parts",
        "attempt",
        "call",
        "dropped",
        "engine",
        "headers",
        "open",
        "outcome_reported",
        "owner",
        "sent_at",
        "size",
        "state",
        "status",
        "trace",
    )
    kind: Literal["copy", "prefill", "decode"] = "prefill"
    headers: Headers

    def __init__(self, state: RequestState, owner: LegOwner, engine: EngineClient, now: float) -> None:
        self.state, self.owner, self.engine, self.sent_at = state, owner, engine, now
        self.call: Call | None = None
        self.trace: LegTrace | None = None
        self.attempt: Attempt = 0
        self.status = self.size = 0
        self.open = self.outcome_reported = self.dropped = False
        """`outcome_reported`: the outcome has been reported to the instance's availability; `dropped`: the owner does
        not need the leg any more."""
        self._parts: list[bytes] = []

    def body(self) -> bytes:
        """Return the collected part of the response body."""
        parts = self._parts
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def send(self, body: bytes, first_byte_s: float, now: float, path: bytes = b"") -> None:
        """Start the call; `path` defaults to that of the client's request."""
        state = self.state
        head = self.head()
        if state.trace is not None:
            self.trace = state.trace.leg(self.kind, {"kvroute.instance": self.engine.name})
            head += self.trace.head
        self.open = True
        self.call, self.attempt = self.engine.send(
            self,
            path or state.path,
            head,
            body,
            first_byte_s=first_byte_s,
            now=now,
            counted=state.faults is None,
        )

    def head(self) -> bytes:
        """Return the header lines for the engine, without those of traces and of its rank."""
        return self.state.head

    def on_head(self, status: int, headers: Headers) -> None:
        """See `ResponseHandler`."""
        self.status, self.headers = status, headers

    def succeeded(self, now: float) -> None:
        """Report that the engine has responded; a client error is also a success."""
        if not self.outcome_reported:
            self.outcome_reported = True
            self.engine.availability.succeeded(self.attempt, now)

    def close(self, error: str = "") -> None:
        """End the call."""
        if self.open:
            self.open = False
            self.call = None  # the call references the leg: a cycle would keep bodies until garbage collection
            self.engine.leg_closed()
            if self.trace is not None:
                self.trace.end(error)

    def abort(self, now: float) -> None:
        """Cancel the call because its response is no longer needed: neither a success nor a failure."""
        self.dropped = True
        if self.open:
            if self.call is not None:
                self.call.abort()
            if not self.outcome_reported:
                self.outcome_reported = True
                self.engine.availability.cancelled(self.attempt, now)
            self.close("cancelled")

    def on_failed(self, failure: LegFailure) -> None:
        """End the leg and report its failure; the owner decides what follows."""
        now = self.state.runtime.now()
        self.failed(failure, now)
        self.owner.on_leg_failed(self, failure, now)

    def failed(self, failure: LegFailure, now: float) -> None:
        """End the leg: the engine did not respond, stopped half-way, or (`kind` "status") responded with its own
        error."""
        if self.outcome_reported:
            self.attempt = self.engine.availability.late_failure(now)
        self.outcome_reported = True
        self.blame(failure.kind, now)
        self.close(failure.reason)
        runtime, request_id = self.state.runtime, self.state.request_id
        runtime.leg_failed(self.kind, self.engine.name, failure.kind, failure.reason, request_id)

    def blame(self, kind: str, now: float) -> None:
        """Report a failure, which ends the attempt."""
        state = self.state
        blame_engine(self.engine, self.attempt, self.kind, kind, self.status, state.fault_attribution, now)
        if state.over and state.faults is not None:  # the client has its response
            state.faults.ended(200, now)

    def not_sent(self, now: float) -> None:
        """Start the attempt for a call that fails before it is sent; it will be reported as failed."""
        self.attempt = self.engine.availability.started(now) if self.state.faults is None else NOT_COUNTED

    def response_too_large(self) -> None:
        """Fail the leg because the response is too large."""
        if self.call is not None:
            self.call.abort()
        why = f"{self.kind} instance {self.engine.name} sent a response that is too large"
        self.on_failed(LegFailure("malformed", why, 502, sent=True))

    def on_error_status(self) -> None:
        """Report an error status of the engine: a client error is for the client; anything else is a failure."""
        status = self.status
        if status == 429 or is_failure(status):
            full = status in FULL
            why = f"{self.kind} instance {self.engine.name} returned status {status}"
            self.on_failed(LegFailure("status", why, 503 if full else 502, not full, error_text(self.body())))
            return
        now = self.state.runtime.now()
        self.succeeded(now)
        self.close()
        self.owner.on_client_error(self, now)

    def on_body(self, data: bytes) -> None:
        """See `ResponseHandler`: collect the response, up to ANSWER_BYTES_MAX."""
        try:
            self._parts.append(data)
            self.size += len(data)
            if self.size > ANSWER_BYTES_MAX:
                self.response_too_large()
        except Exception as error:
            self.owner.internal_error(error)

    def on_end(self) -> None:
        """See `ResponseHandler`."""
        raise NotImplementedError

    def on_failure(self, failure: Failure) -> None:
        """See `ResponseHandler`. A call that never reached the engine leaves the KV cache in place."""
        try:
            if failure.kind == "out_of_files":
                self.out_of_files()
                return
            why = f"{self.kind} instance {self.engine.name} {_VERBS[failure.kind]}"
            if failure.kind == "malformed":
                why += f": {failure.text}"
            status = FAILURE_STATUS.get(failure.kind, 502)
            self.on_failed(LegFailure(failure.kind, why, status, sent=failure.phase != "connect"))
        except Exception as error:
            self.owner.internal_error(error)

    def out_of_files(self) -> None:
        """Report that the gateway has no free file descriptor. This is no fault of the engine."""
        now = self.state.runtime.now()
        self.engine.availability.cancelled(self.attempt, now)
        self.outcome_reported = True
        why = f"the gateway has no file descriptor left to connect to {self.kind} instance {self.engine.name}"
        failure = LegFailure("out_of_files", why, FAILURE_STATUS["out_of_files"], sent=False)
        self.close(why)
        self.state.runtime.leg_failed(self.kind, self.engine.name, failure.kind, why, self.state.request_id)
        self.owner.on_leg_failed(self, failure, now)
