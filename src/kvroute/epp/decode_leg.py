"""The decode leg that Envoy sends. The picker names the endpoints, and learns status, served endpoint and end."""

from __future__ import annotations

import asyncio
from heapq import nsmallest
from itertools import islice
from typing import TYPE_CHECKING

from kvroute.epp.addresses import address_of, host_of
from kvroute.epp.exchange import Pick, PickExchange
from kvroute.http.headers import Headers
from kvroute.serve.engines.breaker import is_failure
from kvroute.serve.observe.logs import log_event
from kvroute.serve.proxy.legs.decode_leg import DecodeLeg, DecodeOwner, TransferTimes
from kvroute.serve.proxy.legs.leg import FULL, blame_engine
from kvroute.serve.proxy.legs.prefill_leg import PrefillLeg
from kvroute.serve.proxy.request_state import RequestState
from kvroute.serve.proxy.retry import LegFailure
from kvroute.types import Decode

if TYPE_CHECKING:
    from kvroute.serve.engines.client import EngineClient
    from kvroute.serve.proxy.runtime import ClusterRuntime

_NOT_OBSERVED = TransferTimes()
_KEPT_PREFIXES = (b"x-envoy-", b"x-forwarded-", b"x-request-id")
"""Headers of Envoy's own, which it does not let others change or which it sets again."""


def engine_at(runtime: ClusterRuntime, address: str, rank: int = 0) -> EngineClient | None:
    """Return the engine with an address; None: the cluster has none. Args: `rank`: the one to return of several
    data-parallel ranks there."""
    there = [engine for engine in runtime.engines.values() if engine_address(engine) == address]
    return next((engine for engine in there if engine.instance.rank == rank), there[0] if there else None)


def engine_address(engine: EngineClient) -> str:
    """Return the address of an engine as Envoy writes it; empty if Envoy cannot use it."""
    endpoint = engine.instance.endpoint
    return address_of(endpoint.url) if endpoint is not None else ""


def connects_s(runtime: ClusterRuntime) -> float:
    """Return the time that Envoy may spend on connections for one request, in seconds."""
    return float(runtime.timeouts.connect_s) * runtime.settings.retries.attempts


def header_changes(client: Headers, lines: bytes) -> tuple[Headers, list[bytes]]:
    """Return what turns a client's headers into those that an engine receives: headers to set, and names to remove.

    Args:
        client: headers of the client's request.
        lines: header lines that the engine receives.
    """
    sent: Headers = []
    for line in lines.split(b"\r\n")[:-1]:
        name, _, value = line.partition(b": ")
        sent.append((name.lower(), value))
    names = {name for name, _ in sent}
    removed = {name for name, _ in client if name not in names and not name.startswith(_KEPT_PREFIXES)}
    return [header for header in sent if header not in client], sorted(removed)


class EnvoyDecodeLeg(DecodeLeg):
    """One request to a decode engine through Envoy, which tries the endpoints in order until it can connect to one.

    No byte of the response passes here, so its first token is not observed: the end of the KV transfer is expected at
    the time that the decision's own terms give, as for a response that is not streamed.
    """

    __slots__ = ("_engines",)

    def __init__(
        self, state: RequestState, owner: DecodeOwner, decision: Decode, prefill: PrefillLeg | None, now: float
    ) -> None:
        super().__init__(state, owner, decision, prefill, now)
        self.streams = False
        self._engines: list[EngineClient] = []
        """In the order in which Envoy tries them."""

    def send(self, body: bytes, first_byte_s: float, now: float, path: bytes = b"") -> None:
        """Let Envoy send the request, which it does once: a second leg of a request fails."""
        exchange = self._exchange
        self._engines = [self.engine, *self._fallbacks()]
        addresses = [engine_address(engine) for engine in self._engines]
        if exchange.picked or not addresses[0]:
            why = "Envoy has sent the request already" if exchange.picked else "the engine has no IP address"
            self.open = True
            self.attempt = self.engine.started(now, counted=False)
            failure = LegFailure("reset", f"decode instance {self.engine.name}: {why}", 502, sent=True)
            asyncio.get_running_loop().call_soon(self.on_failed, failure)
            return
        head = self.head() + self.engine.rank_head + self.own_headers()
        if self.state.trace is not None:
            self.trace = self.state.trace.leg(self.kind, {"kvroute.instance": self.engine.name})
            head += self.trace.head
        added, removed = header_changes(exchange.headers, head)
        self.open, self.sent_at = True, now
        self.attempt = self.engine.started(now, counted=self.state.faults is None)
        exchange.on_response, exchange.on_end, exchange.on_late = self._on_response, self._on_end, self._on_late
        wait_s = first_byte_s + connects_s(self.state.runtime)
        exchange.pick(Pick(",".join(filter(None, addresses)), added, removed, body, wait_s))
        self.owner.release_body()

    @property
    def final(self) -> bool:
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
            able = [each for each in engines.values() if self._may_serve(each)]
            return nsmallest(most, able, key=lambda each: (each.in_flight, each.name))
        order = terms.cost.argsort(kind="stable").tolist()
        names = [terms.names[index] for index in order if terms.feasible[index]]
        # The terms of a request that one instance serves also have the pair that it was compared with.
        ranked = (engines[name] for name in names if name in engines)
        return list(islice((each for each in ranked if self._may_serve(each)), most))

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

    # The response

    def _on_late(self) -> None:
        """Fail the leg, because Envoy has reported no response in time."""
        try:
            why = f"decode instance {self.engine.name} did not respond in time"
            self.on_failed(LegFailure("timeout", why, 504, sent=True))
        except Exception as error:
            self.owner.internal_error(error)

    def _on_response(self, status: int, served: str) -> None:
        try:
            now = self.state.runtime.now()
            self.status = status
            reached = self._serve(served, now) if served else False
            if not served and is_failure(status):
                why = f"Envoy reached no endpoint of decode instance {self.engine.name}"
                self._broke(LegFailure("refused", why, status, sent=False), now)
            elif status == 429 or is_failure(status):
                why = f"decode instance {self.engine.name} returned status {status}"
                self._broke(LegFailure("status", why, status, sent=status not in FULL), now)
            elif status >= 400:
                self.succeeded(now)
                self.end_transfer(now, False)
            else:
                self.prefilled(now)
                self._answered(now)
                if reached:
                    self.state.runtime.metrics.decode_answered(now - self.sent_at)
        except Exception as error:
            self.owner.internal_error(error)

    def prefilled(self, now: float) -> None:
        """Called when a response begins, which proves that the prefill is complete."""

    def _broke(self, failure: LegFailure, now: float) -> None:
        """Record that the leg has failed; Envoy sends its error to the client."""
        self.failed(failure, now)
        self.end_transfer(now, False)

    def _serve(self, served: str, now: float) -> bool:
        """Move the leg to the engine that serves it. Those that Envoy has tried before have refused the connection or
        were full. Return whether the engine is known."""
        runtime = self.state.runtime
        addresses = [engine_address(engine) for engine in self._engines]
        if served == addresses[0]:
            return True
        tried = addresses.index(served) if served in addresses else 0
        engine = self._engines[tried] if tried else engine_at(runtime, served, self.engine.instance.rank)
        log_event(
            "warning",
            "served_elsewhere",
            request_id=self.state.request_id.decode("latin-1"),
            instance=self.engine.name,
            reason=f"Envoy sent it to {engine.name if engine is not None else served}",
        )
        if engine is None or engine is self.engine:
            return False
        self._leave(tried, now)
        self._enter(engine, now)
        return True

    def _leave(self, tried: int, now: float) -> None:
        """End the attempts on the engines that do not serve the leg. Args: `tried`: how many Envoy has tried.

        Envoy does not say why it went on. Status 503 counts less than a refused connection, so it is what counts.
        """
        faults = self.state.fault_attribution
        if tried:
            blame_engine(self.engine, self.attempt, "decode", "status", 503, faults, now)
        else:
            self.engine.availability.cancelled(self.attempt, now)
        for engine in self._engines[1:tried]:
            attempt = engine.availability.late_failure(now)
            blame_engine(engine, attempt, "decode", "status", 503, faults, now)
        for engine in self._engines[:tried]:
            why = f"decode instance {engine.name} refused the connection or was full"
            self.state.runtime.leg_failed("decode", engine.name, "refused", why, self.state.request_id)
        self.engine.leg_closed()

    def _enter(self, engine: EngineClient, now: float) -> None:
        self.engine = engine
        self.attempt = engine.started(now, counted=self.state.faults is None)
        crosses = self.transferring
        self.end_transfer(now, False)
        decision = self.owner.on_served_elsewhere(engine.name, now)
        if decision is None:
            return
        self.decision = decision
        if crosses and decision.source != decision.target:
            self.transfer_started(now)
        if self.aggregated or self.state.prefill_done:
            self.expect_transfer(now)

    def _on_end(self) -> None:
        try:
            now = self.state.runtime.now()
            if self.open and self.status < 400:
                self._transfer_done(_NOT_OBSERVED, now)
                self.state.runtime.whole_answer(self.decision, now)
            self.close()
            self.owner.on_response_end(self, None, now)
        except Exception as error:
            self.owner.internal_error(error)

    def abort_stream(self, why: str, kind: str = "") -> None:
        """End the request in Envoy with an error."""
        self.state.exchange.abort()


def instances_in(subsets: tuple[frozenset[str], ...], runtime: ClusterRuntime) -> tuple[str, ...] | None:
    """Return the names of the instances whose endpoints are in all subsets; None: there are no subsets."""
    if not subsets:
        return None
    addresses = {name: engine_address(engine) for name, engine in runtime.engines.items()}
    return tuple(name for name, address in addresses.items() if address and _in_all(address, subsets))


def _in_all(address: str, subsets: tuple[frozenset[str], ...]) -> bool:
    return all(address in subset or host_of(address) in subset for subset in subsets)
