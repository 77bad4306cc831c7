"""One request that needs no decision: Envoy sends it to any instance that is up, in turn."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from kvroute.epp.envoy_call import EnvoyCall, engine_address, instances_in
from kvroute.epp.exchange import PickExchange
from kvroute.serve.api.passthrough_paths import READ
from kvroute.serve.proxy.legs.leg import Leg
from kvroute.serve.proxy.legs.passthrough import PASSTHROUGH, PassthroughRequest, first_byte_s
from kvroute.serve.proxy.retry import Progress

if TYPE_CHECKING:
    from kvroute.serve.engines.client import EngineClient


class PassthroughPick(PassthroughRequest):
    """See `PassthroughRequest`. Envoy makes the call, and tries the next instance if it cannot connect to the first."""

    def send_next(self, now: float) -> bool:
        """Let Envoy send the request."""
        engines = self._candidates()
        if not engines:
            return False
        exchange, content, runtime = self._exchange, self.content, self.runtime
        leg = self.leg = EnvoyPassthroughLeg(self.state, self, engines[0], now)
        body = b"" if exchange.method in READ else content.body
        call = EnvoyCall(leg, leg, exchange, engines)
        call.send(leg.begin_attempt(now), body, first_byte_s(content, runtime.settings.timeouts))
        exchange.release_body()
        return True

    def progress(self) -> Progress:
        """See `PassthroughRequest`. Envoy sends a request once."""
        return Progress(self.state.over, self._exchange.started, decode_not_resendable=self._exchange.picked)

    @property
    def _exchange(self) -> PickExchange:
        exchange = self.state.exchange
        assert isinstance(exchange, PickExchange), "this request is made for those of Envoy"
        return exchange

    def _candidates(self) -> list[EngineClient]:
        only = instances_in(self._exchange.subsets, self.runtime)
        able = (engine for engine in self.untried if (only is None or engine.name in only) and engine_address(engine))
        found: dict[str, EngineClient] = {}
        for engine in islice(able, self.runtime.settings.retries.attempts):
            found.setdefault(engine_address(engine), engine)  # data-parallel ranks have the same address
        return list(found.values())


class EnvoyPassthroughLeg(Leg):
    """The call that Envoy makes. No byte of the response passes here."""

    __slots__ = ("owner",)
    kind = PASSTHROUGH
    owner: PassthroughPick

    @property
    def who(self) -> str:
        """See `Leg`."""
        return f"instance {self.engine.name}"

    def on_moved(self, now: float) -> None:
        """See `EnvoyReports`."""

    def on_answered(self, now: float, *, reached: bool) -> None:
        """See `EnvoyReports`."""
        self.succeeded(now)

    def on_answer_end(self, now: float) -> None:
        """See `EnvoyReports`."""
        self.close()
        self.owner.end(self.status)
