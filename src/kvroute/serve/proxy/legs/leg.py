"""One call to one engine for one request. Its engine client counts it and records its outcome, each exactly once.

The kinds of leg interpret the response; this module holds what they share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvroute.serve.engines.availability import NOT_COUNTED
from kvroute.serve.proxy.retry import LegFailure, call_failure, record_failure, status_failure

if TYPE_CHECKING:
    from kvroute.http.client.call import Call, Failure
    from kvroute.http.headers import Headers
    from kvroute.serve.engines.availability import Availability
    from kvroute.serve.engines.breaker import Attempt
    from kvroute.serve.engines.client import EngineClient
    from kvroute.serve.observe.tracing import LegTrace
    from kvroute.serve.proxy.request_state import RequestContext
    from kvroute.serve.proxy.retry import Blame, LegKind

ANSWER_BYTES_MAX = 64 * 2**20
"""A longer collected response counts as a failure of its engine."""


class LegOwner(Protocol):
    """Receives the outcome of each leg and decides what follows."""

    def on_leg_failed(self, leg: Leg, failure: LegFailure, now: float) -> None:
        """Handle a failure of the leg, or an engine's error response for the client. The leg has ended and counted
        it."""

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
    kind: LegKind = "prefill"
    headers: Headers

    def __init__(self, state: RequestContext, owner: LegOwner, engine: EngineClient, now: float) -> None:
        self.state, self.owner, self.engine, self.sent_at = state, owner, engine, now
        self.call: Call | None = None
        self.trace: LegTrace | None = None
        self.attempt: Attempt = 0
        self.status = self.size = 0
        self.open = self.outcome_reported = self.dropped = False
        """`outcome_reported`: the outcome has been reported to the instance's availability; `dropped`: the owner does
        not need the leg any more."""
        self._parts: list[bytes] = []

    @property
    def who(self) -> str:
        """The instance, for the reason of a failure."""
        return f"{self.kind} instance {self.engine.name}"

    def body(self) -> bytes:
        """Return the collected part of the response body."""
        parts = self._parts
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def send(self, body: bytes, first_byte_s: float, now: float, path: bytes = b"", method: bytes = b"POST") -> None:
        """Start the call; `path` defaults to that of the client's request."""
        head = self.begin_attempt(now)
        path = path or self.state.path
        self.call = self.engine.send(self, path, head, body, first_byte_s=first_byte_s, method=method)

    def begin_attempt(self, now: float) -> bytes:
        """Count the call, here or in another proxy, and begin its trace. Return the header lines for the engine."""
        state, head = self.state, self.head()
        if state.trace is not None:
            self.trace = state.trace.leg(self.kind, {"kvroute.instance": self.engine.name})
            head += self.trace.head
        self.open = True
        self.attempt = self.engine.started(now, counted=state.faults is None)
        return head

    def head(self) -> bytes:
        """Return the header lines for the engine, without those of traces and of its rank."""
        return self.state.head

    def on_head(self, status: int, headers: Headers) -> None:
        """See `ResponseHandler`."""
        self.status, self.headers = status, headers

    def succeeded(self, now: float) -> None:
        """Report that the engine has responded."""
        if not self.outcome_reported:
            self.outcome_reported = True
            self.engine.availability.succeeded(self.attempt, now)

    def cancelled(self, now: float) -> None:
        """Report that the attempt ends as neither a success nor a failure."""
        if not self.outcome_reported:
            self.outcome_reported = True
            self.engine.availability.cancelled(self.attempt, now)

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
            self.cancelled(now)
            self.close("cancelled")

    def on_failed(self, failure: LegFailure) -> None:
        """End the leg and report its failure; the owner decides what follows."""
        now = self.state.runtime.now()
        self.failed(failure, now)
        self.owner.on_leg_failed(self, failure, now)

    def failed(self, failure: LegFailure, now: float) -> None:
        """End the leg: the engine did not respond, stopped half-way, or (`kind` "status") responded with an error."""
        if self.outcome_reported:
            self.attempt = self.engine.availability.late_failure(now)
        self.outcome_reported = True
        self.record_failure(failure, now)
        faults = self.state.faults
        if self.state.over and faults is not None:  # the client has its response
            faults.ended(200, now)
        if failure.passed_on:
            self.close()
            return
        self.close(failure.reason)
        reports, request_id = self.state.runtime.reports, self.state.request_id
        reports.leg_failed(self.kind, self.engine.name, failure.kind, failure.reason, request_id)

    def record_failure(self, failure: LegFailure, now: float) -> None:
        """Report a failure, which ends the attempt, to what it counts against."""
        self.count(record_failure(self.kind, failure), self.engine.availability, self.attempt, now)

    def count(self, found: Blame, availability: Availability, attempt: Attempt, now: float) -> None:
        """Report the end of an attempt to the availability of its instance."""
        if found.verdict == "answered":
            availability.succeeded(attempt, now)
        elif found.verdict == "instance":
            faults = self.state.fault_attribution()
            faults.failed(availability, attempt, self.kind, now, uncertain=found.uncertain, proven=found.proven)
        else:
            availability.cancelled(attempt, now)

    def not_sent(self, now: float) -> None:
        """Start the attempt for a call that fails before it is sent; it will be reported as failed."""
        self.attempt = self.engine.availability.started(now) if self.state.faults is None else NOT_COUNTED

    def response_too_large(self) -> None:
        """Fail the leg because the response is too large."""
        if self.call is not None:
            self.call.abort()
        self.on_failed(LegFailure("malformed", f"{self.who} sent a response that is too large", 502, sent=True))

    def on_error_status(self) -> None:
        """Report an error response of the engine."""
        self.on_failed(status_failure(self.kind, self.who, self.status, self.body(), self.headers))

    def on_body(self, data: bytes) -> None:
        """See `ResponseHandler`: collect the response, up to ANSWER_BYTES_MAX."""
        try:
            self._parts.append(data)
            self.size += len(data)
            if self.size > ANSWER_BYTES_MAX:
                self.response_too_large()
        except Exception as error:
            self.owner.internal_error(error)

    @property
    def refused(self) -> bool:
        """Whether the response is an error that has not been passed on."""
        return self.status >= 400

    def on_end(self) -> None:
        """See `ResponseHandler`."""
        try:
            if self.status >= 400 and self.refused:
                self.on_error_status()
            else:
                self.on_response(self.state.runtime.now())
        except Exception as error:
            self.owner.internal_error(error)

    def on_response(self, now: float) -> None:
        """Handle a whole response without an error."""
        self.succeeded(now)
        self.close()

    def on_failure(self, failure: Failure) -> None:
        """See `ResponseHandler`. A call that never reached the engine leaves the KV cache in place."""
        try:
            sent = failure.phase != "connect"
            self.on_failed(call_failure(self.who, failure.kind, sent=sent, text=failure.text))
        except Exception as error:
            self.owner.internal_error(error)
