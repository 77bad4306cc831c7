"""What happens to a completion whose client disconnects: it ends, or goes on until its KV cache is fetched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvroute.serve.engines.protocols import with_one_token
from kvroute.serve.proxy.legs.abandoned import SETTLE_S, AbandonedLimit, leaves_unfetched_kv, waits_for_write

if TYPE_CHECKING:
    from kvroute.serve.proxy.completion.end import RequestEnd
    from kvroute.serve.proxy.completion.legs import RequestLegs
    from kvroute.serve.proxy.request_state import RequestState


class ClientDeparture:
    """Handles the disconnect of one request's client."""

    __slots__ = ("_end", "_legs", "_state")

    def __init__(self, state: RequestState, legs: RequestLegs, end: RequestEnd) -> None:
        self._state, self._legs, self._end = state, legs, end

    def client_gone(self) -> None:
        """Handle the disconnect."""
        state = self._state
        if state.over:
            return
        try:
            now = state.runtime.now()
            if self._complete(now):
                return
            state.runtime.metrics.client_gone()
            if leaves_unfetched_kv(state, self._legs.prefill, self._legs.decode, now):
                self._abandon(now)
            else:
                self._end.client_gone(now)
        except Exception as error:
            self._end.internal_error(error)

    def _complete(self, now: float) -> bool:
        """End a request whose client has left with its whole response, as the end of a stream's body may come after it.
        Return whether it has ended."""
        decode = self._legs.decode
        if decode is None:
            return False
        decode.settle()
        if self._state.over:
            return True
        if not decode.complete:
            return False
        if decode.call is not None:
            decode.call.abort()
        decode.close()
        self._legs.drop_prefill(now)
        self._end.answered(decode, decode.usage(), now)
        return True

    def _abandon(self, now: float) -> None:
        """Go on until a decode engine has fetched the KV cache, or for the time limit."""
        state, prefill, decode = self._state, self._legs.prefill, self._legs.decode
        timeouts = state.runtime.settings.timeouts
        most_s = float(timeouts.abandoned_s)
        state.abandoned = True
        if decode is None or decode.waits:
            state.completion = with_one_token(state.completion)
            self._legs.replace_decode(now)
        elif prefill is not None and not state.prefill_done and waits_for_write(prefill, decode):
            most_s += timeouts.prefill_s
        elif state.runtime.control.admitted(state.number):
            most_s = min(most_s, SETTLE_S)
        limit = self._end.limit = AbandonedLimit(self._give_up)
        limit.end_after(most_s)

    def _give_up(self) -> None:
        """End an abandoned request if it has not ended."""
        if self._state.over:
            return
        try:
            self._end.client_gone(self._state.runtime.now())
        except Exception as error:
            self._end.internal_error(error)
