"""Collectors that run beside requests: health checks, load, KV events and telemetry; each emits events."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from kvroute.http.client.callbacks import weakly
from kvroute.http.client.poller import PollSpec
from kvroute.http.client.pool import UpstreamPool
from kvroute.http.loop_lag import LoopLag
from kvroute.serve.engines.health import HealthChecks
from kvroute.serve.engines.servers import Servers
from kvroute.serve.observe.logs import log_event
from kvroute.serve.proxy.runtime import ClusterRuntime, same_engine
from kvroute.serve.telemetry.kv_events import KvEvents
from kvroute.serve.telemetry.prometheus import PrometheusSource
from kvroute.serve.telemetry.push import read_push
from kvroute.serve.telemetry.scrape import Scraper
from kvroute.serve.wan.tcp_links import TcpSample
from kvroute.types import CROSS_DATACENTER, CongestionMeasured, Endpoint, Event, InputError, TransferMeasured


class LinkEvents:
    """Emits events on the outgoing KV connections of one cluster's prefill instances."""

    def __init__(self, runtime: ClusterRuntime) -> None:
        self._runtime = runtime
        self._others = 0.0
        """Value that was last emitted."""

    def seen(self, source: str, links: Sequence[TcpSample]) -> None:
        """Take new samples of the connections on which an instance sends KV."""
        runtime = self._runtime
        now = runtime.now()
        for link in links:
            if link.backlogged and link.arrived_bytes and link.target in runtime.engines:
                # The event describes one transfer; the core accounts for the others in progress.
                kv_bytes = link.arrived_bytes / max(self._crossing(source, link.target), 1)
                runtime.on_telemetry(
                    TransferMeasured(now, source, link.target, kv_bytes, link.seconds, measured_by="tcp")
                )
        if runtime.wan_paths is not None:
            runtime.wan_paths.links_seen(source, links, now)
            self._congestion(runtime.wan_paths.others(now), now)

    def _crossing(self, source: str, target: str) -> int:
        """Return the number of own transfers in progress between two instances."""
        return sum(request.transfers(source, target) for request in self._runtime.requests.values())

    def _congestion(self, others: float | None, now: float) -> None:
        """Emit others' share of the WAN paths, and 0 once when it ends; operator telemetry is more complete and
        replaces it."""
        oracle = self._runtime.settings.oracle
        if others is None or oracle.source != "static" or not oracle.separates_own_traffic:
            return
        if others or self._others:
            self._runtime.on_telemetry(CongestionMeasured(now, (0.0,) * CROSS_DATACENTER + (others,)))
        self._others = others


class Collectors:
    """All collectors of one cluster, between `start` and `close`."""

    def __init__(
        self,
        runtime: ClusterRuntime,
        lag: LoopLag,
        jitter: random.Random,
        on_event: Callable[[Event], None] | None = None,
        before: Collectors | None = None,
    ) -> None:
        """
        Args:
            runtime: the cluster.
            lag: lateness of the event loop, in which no engine's health check fails.
            jitter: draws the jitter of health checks.
            on_event: receives the events of the collectors; default: the cluster.
            before: the collectors that these replace. Their KV event subscriptions continue without interruption: a new
                subscription may miss an eviction, so the view of that engine's cache would have to be cleared.
        """
        settings = runtime.settings
        self._runtime = runtime
        self._servers = servers = Servers(engine.instance for engine in runtime.engines.values())
        self._on_event = on_event or runtime.on_telemetry

        def pool_of(server: str) -> UpstreamPool:
            return runtime.engines[next(iter(servers.instances(server)))].pool

        health, scrape = settings.health, settings.scrape
        known = before.known(runtime) if before is not None else {}
        joined = dict.fromkeys(servers.of(name) for name in runtime.uids)
        self._health = HealthChecks(
            [server for server in servers if server not in joined or server in known],
            pool_of,
            weakly(self._health_changed),
            runtime.now,
            PollSpec(
                path=health.path,
                interval_s=float(health.interval_s),
                timeout_s=float(health.timeout_s),
                lag=lag,
                jitter=health.jitter,
                draw=jitter.random,
                on_discard=runtime.metrics.health_check_discarded,
            ),
            failures=health.failures,
            known=known,
        )
        for server in joined:
            if server not in known:
                self._health.add(server)  # a discovered engine is down until its first check
        self._publishers = self._publishing()
        taken = before.hand_over(settings.prompt.block_tokens) if before is not None else None
        self._takes_over = taken is not None
        self._kv_events = taken or KvEvents(
            self._publishers,
            settings.prompt.block_tokens,
            self._on_event,
            runtime.now,
            count=weakly(self._count_kv),
            on_rank=weakly(self._published),
        )
        self._published_ranks: dict[str, int] = {}
        """Rank in the whole engine that each data-parallel rank publishes in its KV events."""
        self._hands_over = False
        self._scraper = Scraper(
            servers,
            pool_of,
            self._on_event,
            runtime.now,
            PollSpec(
                path=scrape.path,
                interval_s=float(scrape.interval_s),
                timeout_s=float(scrape.interval_s),
                body_max_bytes=int(scrape.body_bytes),
            ),
            on_restart=self._kv_events.restarted,
            on_links=LinkEvents(runtime).seen,
            # Several gateways would each take all transfers of an engine for their own.
            attribute=runtime.reports.own_transfers.measured if runtime.sharing is None else None,
            on_losses=runtime.reports.kv_lost,
        )
        prometheus = settings.oracle.prometheus
        self._prometheus: PrometheusSource | None = None
        if prometheus is not None:
            links = [link.name for link in runtime.cluster.links]
            self._prometheus = PrometheusSource(prometheus, links, self._on_event, runtime.now, random.Random())

    def add(self, name: str) -> None:
        """Collect from another engine of the cluster from now on. Does nothing for one that is collected from."""
        if name in self._servers:
            return
        engine = self._runtime.engines[name]
        instance, server = engine.instance, engine.instance.server
        if self._servers.add(name, server, instance.rank):
            self._health.add(server)
        elif self._health.up(server):  # another rank of it has joined before
            engine.availability.set_healthy(True, self._runtime.now(), present=self._health.present(server))
        self._scraper.add(name)
        endpoint = instance.endpoint
        if endpoint is not None and self._runtime.settings.prefix != "approximate":
            try:
                self._kv_events.add(name, endpoint)
            except InputError as error:
                log_event("error", "kv_events_not_followed", instance=name, reason=str(error))

    def remove(self, name: str) -> None:
        """Collect nothing more from an engine: another one may have its address soon. Does nothing for one that is not
        collected from."""
        if name not in self._servers:
            return
        server = self._servers.of(name)
        self._scraper.remove(name)
        if self._servers.remove(name):
            self._health.remove(server)
        self._publishers.pop(name, None)  # `start` follows all of them
        self._kv_events.remove(name)
        self._published_ranks.pop(name, None)

    def relink(self) -> None:
        """Follow a change of the cluster's links."""
        if self._prometheus is not None:
            self._prometheus.relink([link.name for link in self._runtime.cluster.links])

    @property
    def all_checked(self) -> bool:
        """Whether the health of every instance has been checked."""
        return self._health.all_checked

    def known(self, heir: ClusterRuntime) -> dict[str, bool]:
        """Return the health of the servers that another cluster also has, with all their instances."""
        return {
            server: up
            for server, up in self._health.known().items()
            if all(same_engine(name, self._runtime, heir) for name in self._servers.instances(server))
        }

    def hand_over(self, block_tokens: int) -> KvEvents | None:
        """Return the KV event subscriptions, which are then not closed here; None if the new block size differs."""
        if self._kv_events.block_tokens != block_tokens:
            return None
        self._hands_over = True
        return self._kv_events

    def _publishing(self) -> dict[str, Endpoint]:
        """Return the engines whose KV events are used."""
        if self._runtime.settings.prefix == "approximate":
            return {}
        clients = self._runtime.engines.values()
        return {client.name: client.instance.endpoint for client in clients if client.instance.endpoint is not None}

    def start(self) -> None:
        """Start all collectors.

        Raises:
            InputError: a KV event endpoint cannot be connected to; all other collectors run.
        """
        self._health.start()
        self._scraper.start()
        if self._prometheus is not None:
            self._prometheus.start()
        if self._takes_over:
            self._kv_events.emit, self._kv_events.count = self._on_event, weakly(self._count_kv)
            self._kv_events.on_rank = weakly(self._published)
            self._kv_events.change(self._publishers)
        else:
            self._kv_events.start()

    def push(self, body: bytes) -> None:
        """Process pushed telemetry. Raises InputError if it is invalid."""
        for event in read_push(body, self._runtime.cluster, self._runtime.now()):
            # A pushed transfer does not mean that the engine reports its own transfers.
            receiver = self._runtime.notify if isinstance(event, TransferMeasured) else self._runtime.on_telemetry
            receiver(event)

    async def close(self) -> None:
        """Stop all collectors."""
        if self._prometheus is not None:
            self._prometheus.close()
            await self._prometheus.closed()
        self._scraper.close()
        self._health.close()
        if not self._hands_over:
            self._kv_events.close()

    def _published(self, name: str, rank: int) -> None:
        """Compare the rank that an instance publishes with those of its engine: ranks of one server are consecutive."""
        if name not in self._servers:
            return
        ranks = self._servers.instances(self._servers.of(name))
        self._published_ranks[name] = rank
        for other in ranks.keys() & self._published_ranks.keys():
            expected = self._published_ranks[other] + ranks[name] - ranks[other]
            if rank != expected:
                what = f"its KV events are those of rank {rank}, but by those of {other} it is rank {expected}"
                reason = f"{what}; give each rank its own port in `kv_events`"
                log_event("warning", "kv_events_of_another_rank", instance=name, reason=reason)
                return

    def _count_kv(self, instance: str, batches: int, gaps: int) -> None:
        metrics = self._runtime.metrics
        metrics.kv_events(instance, batches)
        for _ in range(gaps):
            metrics.kv_gap(instance)

    def _health_changed(self, server: str, healthy: bool, at: float) -> None:
        if not healthy:
            log_event("warning", "health_check_failed", instance=server, reason=self._health.why(server))
        present = self._health.present(server)
        for name in tuple(self._servers.instances(server)):
            self._runtime.engines[name].availability.set_healthy(healthy, at, present=present)
            if not present:
                self._runtime.process_ended(name)
