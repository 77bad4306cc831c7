"""The decode leg that Envoy sends: the picker chooses its endpoints and follows its KV transfer."""

from __future__ import annotations

import asyncio
from heapq import nsmallest
from itertools import islice
from typing import TYPE_CHECKING

from kvroute.epp.envoy_call import EnvoyCall, engine_address, instances_in
from kvroute.epp.exchange import PickExchange
from kvroute.serve.proxy.legs.decode_leg import NOT_OBSERVED, DecodeLeg
from kvroute.serve.proxy.retry import LegFailure

if TYPE_CHECKING:
    from kvroute.serve.engines.client import EngineClient


class EnvoyDecodeLeg(DecodeLeg):
    """One request to a decode engine through Envoy, which tries the endpoints in order until it can connect to one.

    No byte of the response passes here, so its first token is not observed: the end of the KV transfer is expected at
    the time that the decision's own terms give, as for a response that is not streamed.
    """

    __slots__ = ()

    def send(self, body: bytes, first_byte_s: float, now: float, path: bytes = b"", method: bytes = b"POST") -> None:
        """Let Envoy send the request; a second leg of a request fails."""
        exchange = self._exchange
        if exchange.picked or not engine_address(self.engine):
            why = "Envoy has sent the request already" if exchange.picked else "the engine has no IP address"
            self.open = True
            self.attempt = self.engine.started(now, counted=False)
            failure = LegFailure("reset", f"{self.who}: {why}", 502, sent=True)
            asyncio.get_running_loop().call_soon(self.on_failed, failure)
            return
        self.sent_at = now
        call = EnvoyCall(self, self, exchange, [self.engine, *self._fallbacks()])
        call.send(self.begin_attempt(now), body, first_byte_s)
        self.owner.release_body()

    def head(self) -> bytes:
        """See `Leg`."""
        return super().head() + self.engine.rank_head + self.own_headers()

    @property
    def not_resendable(self) -> bool:
        """See `DecodeLeg`."""
        return self._exchange.picked

    def own_headers(self) -> bytes:
        """Return additional header lines for the engine."""
        return b""

    @property
    def _exchange(self) -> PickExchange:
        exchange = self.state.exchange
        assert isinstance(exchange, PickExchange), "this leg is made for requests of Envoy"
        return exchange

    def _fallbacks(self) -> list[EngineClient]:
        """Return the engines to try if Envoy cannot connect to the chosen one: the cheapest by the decision's terms,
        else the least loaded."""
        most = self.state.runtime.settings.retries.attempts - 1
        terms, engines = self.decision.terms, self.state.runtime.engines
        if terms is None:
            able = [engine for engine in engines.values() if self._may_serve(engine)]
            return nsmallest(most, able, key=lambda engine: (engine.in_flight, engine.name))
        order = terms.cost.argsort(kind="stable").tolist()
        names = [terms.names[index] for index in order if terms.feasible[index]]
        # The terms of a request that one instance serves also have the pair that it was compared with.
        ranked = (engines[name] for name in names if name in engines)
        return list(islice((engine for engine in ranked if self._may_serve(engine)), most))

    def _may_serve(self, engine: EngineClient) -> bool:
        chosen, only = self.engine, self._only()
        return (
            engine is not chosen
            and engine.rank_head == chosen.rank_head  # Envoy sends the same header to all of them
            and engine.role == chosen.role
            and engine.availability.up
            and (engine.instance.model, engine.instance.protocol) == (chosen.instance.model, chosen.instance.protocol)
            and (only is None or engine.name in only)
        )

    def _only(self) -> tuple[str, ...] | None:
        return instances_in(self._exchange.subsets, self.state.runtime)

    # See `EnvoyReports`

    def on_answered(self, now: float, *, reached: bool) -> None:
        """Report that the prefill is complete and that decoding begins."""
        self.prefilled(now)
        self._answered(now)
        if reached:
            self.state.runtime.metrics.decode_answered(now - self.sent_at)

    def prefilled(self, now: float) -> None:
        """Called when a response begins, which proves that the prefill is complete."""

    def on_moved(self, now: float) -> None:
        """Move what is booked to the engine that serves the request."""
        crosses = self.transferring
        self.end_transfer(now, False)
        decision = self.owner.on_served_elsewhere(self.engine.name, now)
        if decision is None:
            return
        self.decision = decision
        if crosses and decision.source != decision.target:
            self.transfer_started(now)
        if self.aggregated or self.state.prefill_done:
            self.expect_transfer(now)

    def on_answer_end(self, now: float) -> None:
        """Report the end of the request."""
        if self.open and self.status < 400:
            self._transfer_done(NOT_OBSERVED, now)
            self.state.runtime.reports.whole_answer(self.decision, now)
        self.close()
        self.owner.on_response_end(self, None, now)

    def failed(self, failure: LegFailure, now: float) -> None:
        """See `Leg`."""
        super().failed(failure, now)
        self.end_transfer(now, False)
