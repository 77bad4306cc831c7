"""Creates the engine clients of a cluster: connection pools, availability and P/D protocols from the settings."""

from __future__ import annotations

import ssl
from collections.abc import Callable

from kvroute.gateway.config.settings import GatewaySettings
from kvroute.gateway.engines.availability import Availability
from kvroute.gateway.engines.breaker import Breaker
from kvroute.gateway.engines.client import EngineClient
from kvroute.gateway.engines.protocols import PROTOCOLS
from kvroute.gateway.http.deadlines import Deadlines
from kvroute.gateway.http.pool import UpstreamPool
from kvroute.topology import Cluster
from kvroute.types import Endpoint


def engine_clients(
    cluster: Cluster,
    settings: GatewaySettings,
    on_change: Callable[[str, bool, float], None],
    deadlines: Deadlines,
    *,
    exact: bool,
    draw: Callable[[], float] | None = None,
) -> dict[str, EngineClient]:
    """Return the engine clients by name, all up. `exact`: prompts are hashed as in engines' KV events. `draw`: random
    numbers for the jitter of circuit breakers."""
    timeouts, limits = settings.timeouts, settings.breaker
    # Loading the system's certificates takes tens of milliseconds, so it is done once.
    https = any(i.endpoint is not None and i.endpoint.url.startswith("https:") for i in cluster.instances)
    tls = ssl.create_default_context() if https else None
    engines = {}
    for instance in cluster.instances:
        endpoint = instance.endpoint
        assert endpoint is not None, "preflight requires endpoints"
        breaker = Breaker(
            failures=limits.failures,
            window_s=float(limits.window_s),
            share=limits.share,
            open_s=float(limits.open_s),
            jitter=limits.jitter,
            draw=draw,
        )
        connect_s = float(timeouts.connect_s)
        # A decode instance with a bootstrap server may become a prefill instance.
        asks = PROTOCOLS[endpoint.protocol].resolves_engine_id and endpoint.bootstrap
        engines[instance.name] = EngineClient(
            instance,
            UpstreamPool(endpoint.url, connect_s=connect_s, tls=tls, deadlines=deadlines),
            UpstreamPool(f"http://{endpoint.bootstrap}", connect_s=connect_s, deadlines=deadlines) if asks else None,
            UpstreamPool(endpoint.buffer, connect_s=connect_s, tls=tls, deadlines=deadlines)
            if endpoint.buffer
            else None,
            Availability(instance.name, breaker, on_change),
            approximate=_approximate(endpoint, settings, exact),
            measures=settings.measure != "engine",
            between_s=float(timeouts.between_tokens_s),
        )
    return engines


def _approximate(endpoint: Endpoint, settings: GatewaySettings, exact: bool) -> bool:
    """Whether the gateway assumes that what it sent to an instance is cached there: the instance has no KV events, or
    its events hold token ids, which do not match prompts hashed without a tokenizer."""
    if settings.prefix == "auto":
        return not endpoint.kv_events or not exact
    return settings.prefix == "approximate"
