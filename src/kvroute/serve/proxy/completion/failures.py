"""Carries out what `retry.decide` says about the failures of one completion: retries within attempts and budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from kvroute.serve.api.stream_record import COMPLETIONS_PATH
from kvroute.serve.proxy.retry import (
    DecodeWithoutPrefill,
    EndStream,
    Fail,
    Ignore,
    LegFailure,
    PassOn,
    PrefillWithoutCopy,
    Retry,
    Step,
    decide,
)

if TYPE_CHECKING:
    from kvroute.serve.proxy.completion.end import RequestEnd
    from kvroute.serve.proxy.completion.legs import RequestLegs
    from kvroute.serve.proxy.legs.leg import Leg
    from kvroute.serve.proxy.request_state import RequestState


class RequestFailures:
    """The failures of one request, and its retries."""

    __slots__ = ("_attempts", "_end", "_legs", "_state")

    def __init__(self, state: RequestState, legs: RequestLegs, end: RequestEnd) -> None:
        self._state, self._legs, self._end = state, legs, end
        self._attempts = 1

    @property
    def retried(self) -> bool:
        """Whether a leg was sent again."""
        return self._attempts > 1

    def follow(self, step: Step, leg: Leg, failure: LegFailure, now: float) -> None:
        """Carry out what follows from the failure of a step. Args: `leg`: which has failed, or depends on the step."""
        match decide(step, failure, self._legs.progress(leg)):
            case Ignore():
                pass
            case PrefillWithoutCopy():
                assert self._legs.prefill is not None
                assert self._legs.prefill.copy is not None
                self._legs.prefill.copy.continue_without(now)
            case DecodeWithoutPrefill():
                self._prefill_lost(now)
            case PassOn():
                self._end.pass_on(leg, now)
            case EndStream():
                decode = self._legs.decode
                assert decode is not None
                if not self._continue_stream(now):
                    self._end.stream_failed(decode, failure, now)
            case Retry(leg="prefill"):
                self._retry_prefill(failure, now)
            case Retry(kv_lost=kv_lost, abort_prefill=abort_prefill):
                self._retry_decode(failure, now, kv_lost=kv_lost, abort_prefill=abort_prefill)
            case Fail(error_kind=error_kind):
                self._end.failed(failure, now, error_kind)

    def _prefill_lost(self, now: float) -> None:
        """Handle a prefill that has failed without a retry while the decode engine waits for its KV cache: the decode
        engine may compute the prompt itself; otherwise it reports an error."""
        state, legs = self._state, self._legs
        legs.prefill = None
        if state.path_attempt is not None:
            state.path_attempt.cancelled(now)
        if legs.decode is not None:
            legs.decode.end_transfer(now, False)
        legs.carry_out(state.runtime.report.prefill_finished(state.number, now), now)

    def _retry_prefill(self, failure: LegFailure, now: float) -> None:
        state, legs = self._state, self._legs
        legs.prefill = None
        legs.drop_decode(now)
        if self._may_retry("prefill", now):
            legs.carry_out(state.runtime.report.prefill_failed(state.number, now), now)
        else:
            self._end.failed(failure, now)

    def _retry_decode(self, failure: LegFailure, now: float, *, kv_lost: bool, abort_prefill: bool) -> None:
        state, legs = self._state, self._legs
        assert legs.decode is not None
        if abort_prefill and legs.prefill is not None:
            legs.prefill.abort(now)
        legs.release_kept()
        legs.drop_decode(now)
        if self._may_retry("decode", now):
            legs.carry_out(state.runtime.report.decode_failed(state.number, now, kv_lost=kv_lost), now)
        else:
            self._end.failed(failure, now)

    def _continue_stream(self, now: float) -> bool:
        """Let other engines generate the rest of a stream that has broken off. Return False if that is impossible."""
        state, legs, record, leg = self._state, self._legs, self._state.record, self._legs.decode
        if record is None or leg is None or not record.continuable or not self._may_retry("decode", now):
            return False
        legs.decode = None
        legs.release_kept()
        leg.end_transfer(now, False)
        legs.ids = None
        state.completion, state.path = record.rest(), COMPLETIONS_PATH
        state.runtime.metrics.stream_continued()
        legs.carry_out(state.runtime.report.decode_failed(state.number, now, kv_lost=True), now)
        return True

    def _may_retry(self, leg: Literal["prefill", "decode"], now: float) -> bool:
        """Return whether a failed leg may be retried; if so, count the retry as made."""
        state, runtime = self._state, self._state.runtime
        if state.abandoned or self._attempts >= runtime.settings.retries.attempts:
            return False
        if not runtime.budget.spend(now):
            runtime.metrics.retry_refused(leg)
            return False
        self._attempts += 1
        state.next_attempt()
        runtime.metrics.retried(leg)
        return True
