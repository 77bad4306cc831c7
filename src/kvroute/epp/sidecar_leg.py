"""The decode leg whose engine has a sidecar that orders the prefill, as llm-d's routing sidecar does.

The picker chooses both instances at arrival, and names the prefill instance in the header `x-prefiller-host-port`.
Nothing reports the end of the prefill: it is the time at which all that is booked on its instance should be done, or
the beginning of the response, whichever is earlier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvroute.epp.decode_leg import EnvoyDecodeLeg
from kvroute.epp.envoy_call import engine_address

if TYPE_CHECKING:
    from kvroute.serve.engines.client import EngineClient

PREFILLER = b"x-prefiller-host-port"


class SidecarDecodeLeg(EnvoyDecodeLeg):
    """See `EnvoyDecodeLeg`. A request of one leg has no prefill instance, and its body is that of the client, too."""

    __slots__ = ()

    def begin(self, now: float) -> None:
        """Send the leg."""
        state, timeouts = self.state, self.state.runtime.settings.timeouts
        wait_s = timeouts.first_token_s if state.completion.stream else timeouts.answer_s
        prefill_s = 0.0 if self.aggregated else timeouts.prefill_s
        self.send(self.engine.protocol.aggregated_body(state.completion), wait_s + prefill_s, now)
        if self.aggregated:
            self.expect_transfer(now)
            return
        due_at = now + self._prefill_s(now)
        self._expected_end = state.runtime.expected_transfers.expect(due_at, self._prefill_due, now)

    def own_headers(self) -> bytes:
        """See `EnvoyDecodeLeg`."""
        source = self._source()
        return b"" if source is None else b"%b: %b\r\n" % (PREFILLER, engine_address(source).encode())

    def prefilled(self, now: float) -> None:
        """See `EnvoyDecodeLeg`."""
        source = self._source()
        if source is not None and not self.state.prefill_done:
            self._cancel_expected()  # the owner processes what is due
            self.owner.on_prefill_done(source, now)

    def _source(self) -> EngineClient | None:
        """Return the prefill instance; None: there is none, or it has left the cluster."""
        return None if self.aggregated else self.state.runtime.engines.get(self.decision.source)

    def _prefill_s(self, now: float) -> float:
        """Return the time until the prefill instance has done all that is booked there, in seconds."""
        load = self.state.runtime.control.loads(now).get(self.decision.source)
        return load.pending_s if load is not None else 0.0

    def _prefill_due(self, now: float) -> None:
        try:
            if self.open:
                self.prefilled(now)
        except Exception as error:
            self.owner.internal_error(error)
