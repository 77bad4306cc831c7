"""What runs beside requests: health checks, load, KV events and telemetry, each an emitter of events for the core."""

from __future__ import annotations

import random

from kvroute.gateway.health import HealthChecks
from kvroute.gateway.kv_events import KvEvents
from kvroute.gateway.logs import note
from kvroute.gateway.pool import Pool
from kvroute.gateway.prometheus import PrometheusSource
from kvroute.gateway.push import read_push
from kvroute.gateway.scrape import Scraper
from kvroute.gateway.serving import Serving


class Watchers:
    """All watchers of one cluster, between `start` and `close`."""

    def __init__(self, serving: Serving) -> None:
        settings, names = serving.settings, tuple(serving.stations)
        self._serving = serving

        def pool_of(name: str) -> Pool:
            return serving.stations[name].pool

        health, scrape = settings.health, settings.scrape
        self._health = HealthChecks(
            names,
            pool_of,
            self._health_changed,
            serving.now,
            path=health.path,
            interval_s=float(health.interval_s),
            timeout_s=float(health.timeout_s),
            failures=health.failures,
        )
        self._kv_events = KvEvents(
            {i.name: i.endpoint for i in serving.cluster.instances if i.endpoint}
            if settings.prefix != "approximate"
            else {},
            settings.prompt.block_tokens,
            serving.heard,
            serving.now,
        )
        self._scraper = Scraper(
            names,
            pool_of,
            serving.heard,
            serving.now,
            on_restart=self._kv_events.restarted,
            path=scrape.path,
            interval_s=float(scrape.interval_s),
            timeout_s=float(scrape.interval_s),
        )
        prometheus = settings.oracle.prometheus
        self._prometheus: PrometheusSource | None = None
        if prometheus is not None:
            links = [link.name for link in serving.cluster.links]
            self._prometheus = PrometheusSource(prometheus, links, serving.heard, serving.now, random.Random())

    def start(self) -> None:
        """Begin to watch.

        Raises:
            InputError: a KV event endpoint that cannot be connected to.
        """
        self._kv_events.start()
        self._health.start()
        self._scraper.start()
        if self._prometheus is not None:
            self._prometheus.start()

    def push(self, body: bytes) -> None:
        """Telemetry that somebody sent. Raises InputError where it is none."""
        for event in read_push(body, self._serving.cluster, self._serving.now()):
            self._serving.heard(event)

    async def close(self) -> None:
        """Stop watching."""
        if self._prometheus is not None:
            self._prometheus.close()
            await self._prometheus.closed()
        self._scraper.close()
        self._health.close()
        self._kv_events.close()

    def _health_changed(self, name: str, healthy: bool, at: float) -> None:
        if not healthy:
            note("warning", "health_check_failed", instance=name, reason=self._health.why(name))
        self._serving.stations[name].guard.set_healthy(healthy, at)
