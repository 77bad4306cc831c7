"""The end of one completion: its error responses, what it is charged for, and the reports of its end."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from kvroute.http.headers import answered
from kvroute.serve.api.responses import error_body, error_event, with_text_code
from kvroute.serve.proxy.request_reports import EndedRequest
from kvroute.serve.proxy.retry import UPSTREAM, LegFailure, free_of_charge, retry_after

if TYPE_CHECKING:
    from kvroute.serve.api.responses import TokenUsage
    from kvroute.serve.observe.view import TtftBreakdown
    from kvroute.serve.proxy.admission.tenancy import RequestAccount
    from kvroute.serve.proxy.completion.legs import RequestLegs
    from kvroute.serve.proxy.completion.prompt import PromptReading
    from kvroute.serve.proxy.legs.abandoned import AbandonedLimit
    from kvroute.serve.proxy.legs.decode_leg import DecodeLeg
    from kvroute.serve.proxy.legs.leg import Leg
    from kvroute.serve.proxy.request_state import RequestState

OURS = "server_error"
_GONE = 499


class RequestEnd:
    """Ends a request, once, and reports it."""

    __slots__ = ("_legs", "_state", "account", "limit", "reading")

    def __init__(self, state: RequestState, legs: RequestLegs, account: RequestAccount) -> None:
        self._state, self._legs, self.account = state, legs, account
        self.reading: PromptReading | None = None
        """The reading of the prompt, which ends with the request."""
        self.limit: AbandonedLimit | None = None
        """The time limit of an abandoned request; None: the client is there."""

    def first_token(self, ttft: TtftBreakdown, now: float, *, retried: bool) -> None:
        """Record the time to the first token, and the prediction beside it unless a leg has failed."""
        runtime, account = self._state.runtime, self.account
        account.ttft_s = now - account.arrived_at
        if runtime.placement is None:
            return
        runtime.metrics.classes.first_token(account.service_class, ttft.total_s)
        if account.predicted_s is not None and not retried:
            runtime.metrics.classes.predicted(account.predicted_s, account.ttft_s)
            runtime.state.predicted(account.predicted_s, account.ttft_s)

    # The reasons

    def answered(self, leg: DecodeLeg, usage: TokenUsage | None, now: float) -> None:
        """End a request whose client has its whole response."""
        if usage is not None and usage.prompt_tokens is not None:
            self.account.prompt_tokens = usage.prompt_tokens
        self._end(leg.status, now, usage.output_tokens if usage is not None else None, relayed_bytes=leg.size)

    def pass_on(self, leg: Leg, now: float) -> None:
        """Respond with the engine's error response."""
        state = self._state
        self._legs.drop(now)
        content_type, headers = answered(leg.headers)
        headers += state.response_headers
        state.exchange.respond(leg.status, with_text_code(leg.body()), content_type, headers)
        self._end(leg.status, now)

    def stream_failed(self, leg: DecodeLeg, failure: LegFailure, now: float) -> None:
        """End a stream that has broken off with an error event."""
        runtime, faults = self._state.runtime, self._state.faults
        runtime.metrics.stream_failed()
        runtime.state.stream_failed(now)
        leg.abort_stream(failure.reason)
        self._legs.drop(now)
        if faults is not None:  # first: the status of a stream that has broken off proves nothing
            faults.ended(failure.status, now)
        self._end(200, now, leg.usage().output_tokens, relayed_bytes=leg.size, error=failure.reason)

    def failed(self, failure: LegFailure, now: float, kind: str = UPSTREAM) -> None:
        """Respond with the failure of a leg."""
        body = error_body(failure.message, kind)
        self.refused(failure.status, body, now, failure.reason, failure.retry_after_s)

    def refused(self, status: int, body: bytes, now: float, why: str, retry_after_s: int = 1) -> None:
        """Respond with an error.

        Args:
            status: of the response.
            body: of the response.
            now: time, gateway clock.
            why: reason for the trace and for a stream that has begun.
            retry_after_s: value of Retry-After, if the status has this header.
        """
        self._legs.drop(now)
        exchange = self._state.exchange
        if exchange.started and self._state.record is not None:
            assert exchange.writer is not None, "only a stream that is relayed here has a record"
            exchange.writer.write(error_event(why, UPSTREAM))
            exchange.writer.end()
        elif exchange.started:
            exchange.abort()
        else:
            headers = [*self._state.response_headers, *retry_after(status, retry_after_s)]
            exchange.respond(status, body, b"application/json", headers)
        self._end(status, now, error=why)

    def client_gone(self, now: float) -> None:
        """End a request whose client has left."""
        self._legs.drop(now)
        self._end(_GONE, now, error="the client closed the connection")

    def internal_error(self, error: Exception) -> None:
        """Handle a bug in the gateway: respond with an error, and release what the request holds."""
        asyncio.get_running_loop().call_exception_handler(
            {"message": "a proxied request failed with an internal error", "exception": error}
        )
        why, exchange, decode = "internal error in the gateway", self._state.exchange, self._legs.decode
        now = self._state.runtime.now()
        with suppress(Exception):
            self._legs.drop_prefill(now)
        with suppress(Exception):
            self._legs.drop_decode(now)
        with suppress(Exception):
            if not exchange.started:
                exchange.respond(500, error_body(why, OURS))
            elif decode is not None and not exchange.finished:
                decode.abort_stream(why, OURS)
        if not self._state.over:
            with suppress(Exception):
                self._end(500, now, error=why)

    # What follows

    def _end(
        self, status: int, now: float, output_tokens: int | None = None, *, relayed_bytes: int = 0, error: str = ""
    ) -> None:
        """End the request and report it; the legs must be closed already."""
        state, runtime, account = self._state, self._state.runtime, self.account
        state.leave()
        if state.abandoned:
            status = _GONE
            runtime.metrics.abandoned(fetched=runtime.control.admitted(state.number))
        self._legs.close()
        if self.limit is not None:
            self.limit.cancel()
            self.limit = None
        if self.reading is not None:
            self.reading.cancel()
            self.reading = None
        try:
            if state.faults is not None:
                state.faults.ended(status, now)
            if state.path_attempt is not None:
                state.path_attempt.cancelled(now)
            if runtime.control.in_progress(state.number):
                runtime.report.finished(state.number, output_tokens, now, account.ttft_s)
            if state.trace is not None:
                state.trace.end(status, error)
        finally:
            seconds = now - state.received_at
            ended = EndedRequest(state.number, account.ticket, state.kind, status, seconds, relayed_bytes)
            try:
                self._close_charge(status, output_tokens, now)
            finally:
                runtime.reports.ended(ended, now)

    def _close_charge(self, status: int, output_tokens: int | None, now: float) -> None:
        """Charge what was used, or nothing if the gateway or the engines have failed the request."""
        state, runtime, charge = self._state, self._state.runtime, self.account.charge
        if runtime.placement is None:
            return
        if output_tokens is not None and status == 200:
            runtime.tenancy.answered(output_tokens)
        if charge is not None and state.request is not None:
            if free_of_charge(status):
                charge.refund(now)
            else:
                reported = self.account.prompt_tokens
                prompt_tokens = state.request.input_tokens if reported is None else reported
                used = prompt_tokens + max(output_tokens or 0, self._legs.generated_tokens)
                unseen = status == 200 and output_tokens is None
                charge.settle(max(used, charge.tokens) if unseen else used, now)
        runtime.placement.ended(state.number, now)
