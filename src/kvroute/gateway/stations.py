"""Makes the stations of a cluster: pools, guards and dialects from the settings."""

from __future__ import annotations

import ssl
from collections.abc import Callable

from kvroute.gateway.breaker import Breaker
from kvroute.gateway.deadlines import Deadlines
from kvroute.gateway.pool import Pool
from kvroute.gateway.settings import GatewaySettings
from kvroute.gateway.station import Guard, Station
from kvroute.topology import Cluster
from kvroute.types import Endpoint


def stations_of(
    cluster: Cluster,
    settings: GatewaySettings,
    on_change: Callable[[str, bool, float], None],
    deadlines: Deadlines,
    *,
    exact: bool,
    draw: Callable[[], float] | None = None,
) -> dict[str, Station]:
    """Stations by name, all up. `exact`: prompts are hashed as engines' KV events are. `draw`: for the jitter of
    circuit breakers."""
    timeouts, limits = settings.timeouts, settings.breaker
    # Reading the system's certificates takes tens of milliseconds: once for all.
    https = any(i.endpoint is not None and i.endpoint.url.startswith("https:") for i in cluster.instances)
    tls = ssl.create_default_context() if https else None
    stations = {}
    for instance in cluster.instances:
        endpoint = instance.endpoint
        assert endpoint is not None, "preflight asks for endpoints"
        breaker = Breaker(
            failures=limits.failures,
            window_s=float(limits.window_s),
            share=limits.share,
            open_s=float(limits.open_s),
            jitter=limits.jitter,
            draw=draw,
        )
        connect_s = float(timeouts.connect_s)
        # A decode instance that has one may come to prefill.
        asks = endpoint.protocol == "mooncake" and endpoint.bootstrap
        stations[instance.name] = Station(
            instance,
            Pool(endpoint.url, connect_s=connect_s, tls=tls, deadlines=deadlines),
            Pool(f"http://{endpoint.bootstrap}", connect_s=connect_s, deadlines=deadlines) if asks else None,
            Guard(instance.name, breaker, on_change),
            approximate=_approximate(endpoint, settings, exact),
            measures=settings.measure != "engine",
            between_s=float(timeouts.between_tokens_s),
        )
    return stations


def _approximate(endpoint: Endpoint, settings: GatewaySettings, exact: bool) -> bool:
    """Whether what was sent to an instance is taken for cached there: nobody tells better, or in a language (token ids)
    that prompts without a tokenizer are not in."""
    if settings.prefix == "auto":
        return not endpoint.kv_events or not exact
    return settings.prefix == "approximate"
