"""The decode leg: what it reports of the KV transfer, and what its failure means for the KV cache.

`RelayedDecodeLeg` sends it to the engine and relays the response; another proxy may also send it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvroute.serve.api.responses import TokenUsage
from kvroute.serve.proxy.legs.leg import Leg, LegOwner
from kvroute.serve.proxy.retry import UPSTREAM, LegFailure, record_failure
from kvroute.types import Decode

if TYPE_CHECKING:
    from kvroute.serve.api.requests import Completion
    from kvroute.serve.engines.client import EngineClient
    from kvroute.serve.observe.view import TtftBreakdown
    from kvroute.serve.proxy.expected_transfers import ExpectedEnd
    from kvroute.serve.proxy.legs.prefill_leg import PrefillLeg
    from kvroute.serve.proxy.request_state import RequestState


class TransferTimes(NamedTuple):
    """Seconds that a KV transfer took; None: not observed."""

    seconds: float | None = None
    """For the gateway's own metrics, as far as the transfer did not run during the prefill."""
    measured_s: float | None = None
    """For the core, if it is precise enough to learn from."""


NOT_OBSERVED = TransferTimes()


class DecodeOwner(LegOwner, Protocol):
    """Receives the steps of a decode."""

    def on_transfer_done(self, leg: DecodeLeg, times: TransferTimes, now: float) -> None:
        """Record that the KV transfer and the wait for a slot are over."""

    def on_first_token(self, leg: DecodeLeg, ttft: TtftBreakdown, decode_s: float, now: float) -> None:
        """Record the first event of a stream. Args: `decode_s` since the leg was sent, in seconds."""

    def on_response_end(self, leg: DecodeLeg, usage: TokenUsage | None, now: float) -> None:
        """Record that the client has its whole response, and the tokens that it took as far as they are known."""

    def on_prefill_done(self, engine: EngineClient, now: float) -> None:
        """Record that the KV cache is complete on `engine`."""

    def on_served_elsewhere(self, instance: str, now: float) -> Decode | None:
        """Move what is booked for the decode to the instance that serves it; return the decision as it is booked now,
        None if nothing moves."""

    def release_body(self) -> None:
        """Release the request's body and its copies: nothing is sent again."""


class DecodeLeg(Leg):
    """One request to a decode engine. It reports the KV transfer, the first token and the end of the response."""

    __slots__ = (
        "_expected_end",
        "_prefill",
        "aggregated",
        "decision",
        "early",
        "expected",
        "owner",
        "streams",
        "transfer_started_at",
        "transferring",
    )
    kind = "decode"
    owner: DecodeOwner
    state: RequestState

    def __init__(
        self, state: RequestState, owner: DecodeOwner, decision: Decode, prefill: PrefillLeg | None, now: float
    ) -> None:
        """Args: `prefill` is the leg that computes or has computed the KV cache; None: there is none."""
        super().__init__(state, owner, state.runtime.engines[decision.target], now)
        self.decision = decision
        self.aggregated = decision.source == decision.target
        """The same instance computes the prompt, so there is no KV transfer."""
        self._prefill = None if self.aggregated else prefill
        self.streams = False
        """The first token of the response can be observed."""
        self.expected = state.runtime.expected_transfers.expected(decision)
        self.early = False
        """The leg is sent before the KV cache is computed, although the protocol does not require it."""
        self.transferring = False
        """The metrics count the transfer as in progress."""
        self.transfer_started_at = now
        self._expected_end: ExpectedEnd | None = None

    @property
    def waits(self) -> bool:
        """Whether its engine needs transfer parameters that the prefill engine has not returned yet."""
        prefill = self._prefill
        if prefill is None or self.state.prefill_done or not self.engine.protocol.returns_params:
            return False
        handshake = prefill.handshake
        return handshake is not None and handshake.peer is None and not handshake.early

    def head(self) -> bytes:
        """See `Leg`."""
        return self.state.head_of(self._prefill.handshake if self._prefill is not None else None)

    def engine_request(self) -> Completion:
        """Return what the engine is to generate."""
        return self.state.completion

    def begin(self, now: float) -> None:
        """Send the leg.

        Raises:
            ProtocolError: the prefill engine has not sent the transfer parameters.
        """
        state, prefill, protocol = self.state, self._prefill, self.engine.protocol
        completion, timeouts = self.engine_request(), state.runtime.settings.timeouts
        computed = state.prefill_done
        if self.aggregated:
            body = protocol.aggregated_body(completion)
        else:
            assert prefill is not None
            assert prefill.handshake is not None
            self.early = prefill.handshake.early and not computed
            if computed or self.early:
                self.transfer_started(now)
            body = protocol.decode_body(completion, prefill.handshake, prefill.transfer_params)
        wait_s = timeouts.first_token_s if completion.stream else timeouts.answer_s
        self.send(body, wait_s + timeouts.prefill_s if self.early else wait_s, now)
        if computed or self.aggregated:
            self.expect_transfer(now)

    # The transfer

    def transfer_started(self, now: float) -> None:
        """Record the start of the KV transfer. A second call, when an early leg's prefill is complete, only resets the
        time from which the transfer is measured."""
        self.transfer_started_at = now
        if not self.transferring:
            self.transferring = True
            self.state.runtime.reports.transfer_started(self.decision, now, self.expected.transfer_s)

    def expect_transfer(self, now: float) -> None:
        """Schedule the expected end of the transfer for a response that comes whole and does not show it.

        Call it only once the KV cache is computed: an expected end marks the prefill as done, and if that prefill
        failed later, the decode engine would wait in vain.
        """
        state = self.state
        if not self.streams and not state.runtime.control.admitted(state.number):
            self._cancel_expected()
            due_at = now + sum(self.expected)
            self._expected_end = state.runtime.expected_transfers.expect(due_at, self._transfer_due, now)

    def _transfer_due(self, now: float) -> None:
        try:
            self._transfer_done(NOT_OBSERVED, now)
        except Exception as error:
            self.owner.internal_error(error)

    def _transfer_done(self, times: TransferTimes, now: float) -> None:
        self._cancel_expected()  # the owner processes the transfers that are due
        self.owner.on_transfer_done(self, times, now)

    def _cancel_expected(self) -> None:
        if self._expected_end is not None:
            self._expected_end.cancel()
            self._expected_end = None

    def end_transfer(self, now: float, landed: bool, seconds: float | None = None) -> bool:
        """Record that the transfer has ended. Return whether one was in progress."""
        self._cancel_expected()
        if not self.transferring:
            return False
        self.transferring = False
        self.state.runtime.reports.transfer_ended(self.decision, now, landed, seconds)
        return True

    def abort(self, now: float) -> None:
        """See Leg."""
        try:
            super().abort(now)
        finally:
            self.end_transfer(now, False)

    def _answered(self, now: float) -> None:
        """Report success after the first token or the whole response."""
        self.succeeded(now)
        state = self.state
        if state.path_attempt is not None:
            state.path_attempt.arrived(now)
        if state.faults is not None:
            state.faults.answered("decode", now)

    def failed(self, failure: LegFailure, now: float) -> None:
        """See Leg. If the decode engine cannot pull the KV cache, the prefill engine may have restarted."""
        if failure.sent:
            self.state.runtime.engines[self.decision.source].forget_engine_id()
        super().failed(failure, now)

    @property
    def not_resendable(self) -> bool:
        """Whether no other decode leg of the request can be sent."""
        return False

    def kv_refetchable(self) -> bool:
        """Return whether another decode engine may fetch the same KV cache."""
        prefill = self._prefill
        if prefill is None or not self.state.prefill_done:
            return self.early and prefill is not None
        return self.engine.protocol.allows_refetch(prefill.transfer_params)

    def record_failure(self, failure: LegFailure, now: float) -> None:
        """See Leg. A KV cache that does not arrive counts against its WAN path, or against nothing if the prompt is not
        computed yet. The request itself may also cause an error, so it is retried without the WAN path (see
        `FaultAttribution`)."""
        state, path = self.state, self.state.path_attempt
        found = record_failure(self.kind, failure, over_path=path is not None and path.open)
        self.count(found, self.engine.availability, self.attempt, now)
        if found.verdict != "path" or path is None:
            return
        if state.prefill_done:
            path.lost(state.fault_attribution(), now, error=found.uncertain)
        else:
            path.cancelled(now)

    # The response

    @property
    def complete(self) -> bool:
        """Whether the whole response is known to have arrived, although the call may go on."""
        return False

    def settle(self) -> None:
        """Process what has arrived until now."""

    def usage(self) -> TokenUsage:
        """Return the tokens of the response so far; None: unknown."""
        return TokenUsage(None, None)

    def abort_stream(self, why: str, kind: str = UPSTREAM) -> None:
        """End the response, which has begun, with an error. Args: `kind`: its type, if the response can tell it."""
        self.state.exchange.abort()
