"""Creates the engine clients of a cluster: connection pools, availability and P/D protocols from the settings."""

from __future__ import annotations

import ssl
from collections.abc import Callable

from kvroute.http.client.pool import UpstreamPool
from kvroute.http.deadlines import Deadlines
from kvroute.serve.config.settings import GatewaySettings
from kvroute.serve.engines.availability import Availability
from kvroute.serve.engines.breaker import Breaker
from kvroute.serve.engines.client import EngineClient
from kvroute.serve.engines.protocols import PROTOCOLS
from kvroute.topology import Cluster
from kvroute.types import Endpoint, Instance


class EngineFactory:
    """Creates the engine clients of one cluster."""

    def __init__(
        self,
        settings: GatewaySettings,
        on_change: Callable[[str, bool, float], None],
        deadlines: Deadlines,
        *,
        exact: Callable[[str], bool],
        draw: Callable[[], float] | None = None,
    ) -> None:
        """
        Args:
            settings: of the gateway.
            on_change: receives the changes of availability.
            deadlines: shared by all connections.
            exact: whether prompts of a model are hashed as in engines' KV events.
            draw: random numbers for the jitter of circuit breakers.
        """
        self._settings, self._on_change, self._deadlines = settings, on_change, deadlines
        self._exact, self._draw = exact, draw
        self._tls: ssl.SSLContext | None = None
        self._breakers: dict[str, tuple[Breaker, list[Availability]]] = {}
        """Circuit breakers that data-parallel ranks share, with their users, by server."""

    def client(self, instance: Instance, *, up: bool = True) -> EngineClient:
        """Return the client of an instance with an endpoint. Args: `up`: see `Availability`."""
        settings, deadlines, endpoint = self._settings, self._deadlines, instance.endpoint
        assert endpoint is not None, "preflight requires endpoints"
        if self._tls is None and endpoint.url.startswith("https:"):
            # Loading the system's certificates takes tens of milliseconds, so it is done once.
            self._tls = ssl.create_default_context()
        connect_s = float(settings.timeouts.connect_s)
        breaker, sharers = self._breaker(instance)
        # A decode instance with a bootstrap server may become a prefill instance.
        asks = PROTOCOLS[endpoint.protocol].resolves_engine_id and endpoint.bootstrap
        return EngineClient(
            instance,
            UpstreamPool(endpoint.url, connect_s=connect_s, tls=self._tls, deadlines=deadlines),
            UpstreamPool(f"http://{endpoint.bootstrap}", connect_s=connect_s, deadlines=deadlines) if asks else None,
            UpstreamPool(endpoint.buffer, connect_s=connect_s, tls=self._tls, deadlines=deadlines)
            if endpoint.buffer
            else None,
            Availability(instance.name, breaker, self._on_change, up=up, sharers=sharers),
            approximate=_approximate(endpoint, settings, self._exact(instance.model)),
            measures=settings.measure != "engine",
            between_s=float(settings.timeouts.between_tokens_s),
        )

    def _breaker(self, instance: Instance) -> tuple[Breaker, list[Availability] | None]:
        """Return the circuit breaker of an instance's server, and the availabilities that share it (None: none do)."""
        known = self._breakers.get(instance.server) if instance.engine else None
        if known is not None and known[1]:
            return known
        limits = self._settings.breaker
        breaker = Breaker(
            failures=limits.failures,
            window_s=float(limits.window_s),
            share=limits.share,
            open_s=float(limits.open_s),
            jitter=limits.jitter,
            draw=self._draw,
        )
        if not instance.engine:
            return breaker, None
        users: list[Availability] = []
        self._breakers[instance.server] = breaker, users
        return breaker, users


def engine_clients(
    cluster: Cluster,
    settings: GatewaySettings,
    on_change: Callable[[str, bool, float], None],
    deadlines: Deadlines,
    *,
    exact: Callable[[str], bool],
    draw: Callable[[], float] | None = None,
) -> dict[str, EngineClient]:
    """Return the engine clients by name, all up. Args: as for `EngineFactory`."""
    factory = EngineFactory(settings, on_change, deadlines, exact=exact, draw=draw)
    return {instance.name: factory.client(instance) for instance in cluster.instances}


def _approximate(endpoint: Endpoint, settings: GatewaySettings, exact: bool) -> bool:
    """Whether the gateway assumes that what it sent to an instance is cached there: the instance has no KV events, or
    its events hold token ids, which do not match prompts hashed without a tokenizer."""
    if settings.prefix == "auto":
        return not endpoint.kv_events or not exact
    return settings.prefix == "approximate"
