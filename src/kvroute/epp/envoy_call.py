"""The call of one leg that Envoy makes: the endpoints that it tries in order, and which of them serves it.

No byte of the response passes here. The picker learns the status, the endpoint that has served it, and the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvroute.epp.addresses import address_of, host_of
from kvroute.epp.exchange import Pick
from kvroute.serve.observe.logs import log_event
from kvroute.serve.proxy.retry import SKIPPED, call_failure, proxy_failure, record_failure, status_failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvroute.epp.exchange import PickExchange
    from kvroute.http.headers import Headers
    from kvroute.serve.engines.client import EngineClient
    from kvroute.serve.proxy.legs.leg import Leg
    from kvroute.serve.proxy.runtime import ClusterRuntime

_KEPT_PREFIXES = (b"x-envoy-", b"x-forwarded-", b"x-request-id")
"""Headers of Envoy's own, which it does not let others change or which it sets again."""


class EnvoyReports(Protocol):
    """What follows for a leg from the reports of Envoy."""

    def on_moved(self, now: float) -> None:
        """Continue on the leg's `engine`, which has served the call in place of the chosen one."""

    def on_answered(self, now: float, *, reached: bool) -> None:
        """Handle the beginning of a response without an error. Args: `reached`: a known engine has sent it."""

    def on_answer_end(self, now: float) -> None:
        """Handle the end of the response, whatever its status is."""


class EnvoyCall:
    """One call, from the choice of its endpoints to the end of its response."""

    __slots__ = ("_engines", "_exchange", "_leg", "_reports")

    def __init__(
        self, leg: Leg, reports: EnvoyReports, exchange: PickExchange, engines: Sequence[EngineClient]
    ) -> None:
        """Args: `engines` in the order in which Envoy tries them; the first one is that of the leg."""
        self._leg, self._reports, self._exchange, self._engines = leg, reports, exchange, engines

    def send(self, head: bytes, body: bytes, wait_s: float) -> None:
        """Let Envoy send the request, which it does once.

        Args:
            head: header lines that the engine receives.
            body: of the request.
            wait_s: time limit for the beginning of the response, without the time for connections, in seconds.
        """
        exchange, runtime = self._exchange, self._leg.state.runtime
        added, removed = header_changes(exchange.headers, head)
        exchange.on_response, exchange.on_end, exchange.on_late = self._on_response, self._on_end, self._on_late
        addresses = dict.fromkeys(filter(None, map(engine_address, self._engines)))
        exchange.pick(Pick(",".join(addresses), added, removed, body, wait_s + connects_s(runtime)))

    def _on_late(self) -> None:
        """Fail the leg, because Envoy has reported no response in time."""
        leg = self._leg
        try:
            leg.on_failed(call_failure(leg.who, "timeout", sent=True))
        except Exception as error:
            leg.owner.internal_error(error)

    def _on_response(self, status: int, served: str) -> None:
        leg = self._leg
        try:
            now = leg.state.runtime.now()
            leg.status = status
            reached = self._serve(served, now) if served else False
            if status >= 400:  # Envoy sends the error to the client
                who, kind = leg.who, leg.kind
                leg.failed(status_failure(kind, who, status, b"") if served else proxy_failure(who, status), now)
                return
            if not served:
                leg.cancelled(now)
            self._reports.on_answered(now, reached=reached)
        except Exception as error:
            leg.owner.internal_error(error)

    def _on_end(self) -> None:
        leg = self._leg
        try:
            self._reports.on_answer_end(leg.state.runtime.now())
        except Exception as error:
            leg.owner.internal_error(error)

    def _serve(self, served: str, now: float) -> bool:
        """Move the leg to the engine that serves it. Those that Envoy has tried before have refused the connection or
        were full. Return whether the engine is known."""
        leg, runtime = self._leg, self._leg.state.runtime
        addresses = [engine_address(engine) for engine in self._engines]
        if served == addresses[0]:
            return True
        tried = addresses.index(served) if served in addresses else 0
        engine = self._engines[tried] if tried else engine_at(runtime, served, leg.engine.instance.rank)
        log_event(
            "warning",
            "served_elsewhere",
            request_id=leg.state.request_id.decode("latin-1"),
            instance=leg.engine.name,
            reason=f"Envoy sent it to {engine.name if engine is not None else served}",
        )
        if engine is None or engine is leg.engine:
            return False
        self._leave(tried, now)
        leg.engine = engine
        leg.attempt = engine.started(now, counted=leg.state.faults is None)
        self._reports.on_moved(now)
        return True

    def _leave(self, tried: int, now: float) -> None:
        """End the attempts on the engines that do not serve the leg. Args: `tried`: how many Envoy has tried."""
        leg = self._leg
        if not tried:
            leg.engine.availability.cancelled(leg.attempt, now)
        for number, engine in enumerate(self._engines[:tried]):
            attempt = engine.availability.late_failure(now) if number else leg.attempt
            why = f"{leg.kind} instance {engine.name} refused the connection or was full"
            found = record_failure(leg.kind, status_failure(leg.kind, why, SKIPPED, b""))
            leg.count(found, engine.availability, attempt, now)
            leg.state.runtime.reports.leg_failed(leg.kind, engine.name, "refused", why, leg.state.request_id)
        leg.engine.leg_closed()


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
    return float(runtime.settings.timeouts.connect_s) * runtime.settings.retries.attempts


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


def instances_in(subsets: tuple[frozenset[str], ...], runtime: ClusterRuntime) -> tuple[str, ...] | None:
    """Return the names of the instances whose endpoints are in all subsets; None: there are no subsets."""
    if not subsets:
        return None
    addresses = {name: engine_address(engine) for name, engine in runtime.engines.items()}
    return tuple(name for name, address in addresses.items() if address and _in_all(address, subsets))


def _in_all(address: str, subsets: tuple[frozenset[str], ...]) -> bool:
    return all(address in subset or host_of(address) in subset for subset in subsets)
