"""The gateway as a whole: connects its components, reloads its file, drains and shuts down. It handles no request."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable
from functools import partial

import msgspec

from kvroute import __version__
from kvroute.http.deadlines import Deadlines
from kvroute.http.forwarding.stream_forwarder import StreamForwarder
from kvroute.http.loop_lag import LoopLag
from kvroute.http.server.web_pages import WebPages
from kvroute.serve.api import openapi
from kvroute.serve.api.api_keys import Keys
from kvroute.serve.api.streams import USAGE_MARK
from kvroute.serve.engines.retry_budget import RetryBudget
from kvroute.serve.lifecycle.certificates import PortCertificate, context_of, follow, port_certificate
from kvroute.serve.lifecycle.deployment import Deployment
from kvroute.serve.lifecycle.exposure import log_exposures
from kvroute.serve.lifecycle.membership import Membership
from kvroute.serve.lifecycle.peers import Peers, SharedByWorkers
from kvroute.serve.lifecycle.reload import ClusterManager, MergedReloads, Prepared
from kvroute.serve.lifecycle.snapshot import status_snapshot
from kvroute.serve.observe.admin.server import Admin, AdminParts
from kvroute.serve.observe.admin.state import DashboardState
from kvroute.serve.observe.file_descriptors import streams_to_forward
from kvroute.serve.observe.logs import Logs, log_event
from kvroute.serve.observe.metrics.metrics import Metrics
from kvroute.serve.observe.tracing import tracer_of
from kvroute.serve.observe.view import GatewayStatus
from kvroute.serve.proxy.admission.admission import AdmissionController
from kvroute.serve.proxy.admission.queue import AdmissionQueue
from kvroute.serve.proxy.admission.tenancy import Tenancy
from kvroute.serve.proxy.endpoints import Endpoints
from kvroute.serve.proxy.frontend import Frontend, FrontendServer, HttpFrontend, ServerParts
from kvroute.serve.proxy.own_pages import OwnPages
from kvroute.serve.proxy.request_ids import RequestIds
from kvroute.serve.proxy.runtime import ClusterRuntime, SharedServices
from kvroute.types import InputError, cannot_listen
from kvroute_engine.addresses import host_port

__all__ = ["Deployment", "Gateway"]

_REFRESH_S = 0.25
"""Interval between checks of breakers, event log and other periodic work, in seconds."""
_FINAL_DRAIN_S = 0.2
"""Time to send error responses to the requests that are aborted at shutdown, in seconds."""


class Gateway:
    """One gateway process: `start` it, then `drain` and `close` it."""

    def __init__(
        self,
        deployment: Deployment,
        *,
        seed: int | None = None,
        logs: Logs | None = None,
        frontend: Frontend | None = None,
        shared: SharedByWorkers | None = None,
    ) -> None:
        """
        Args:
            deployment: the cluster and settings to serve.
            seed: seed of the room numbers, ids and jitter that the gateway draws; None: the system's randomness.
            logs: log outputs, which a reload changes with the settings.
            frontend: the protocol of clients; None: HTTP/1.1.
            shared: what it shares with the other workers of its machine; None: it is no worker.
        """
        settings = deployment.settings
        self._start = time.monotonic()
        self._first, self._logs = deployment, logs
        self._frontend: Frontend = frontend if frontend is not None else HttpFrontend()
        roles = {instance.name: instance.role for instance in deployment.cluster.instances}
        self.metrics = Metrics(self._status, roles, version=__version__, policy=settings.policy)
        self._lag = LoopLag(self.metrics.loop_lagged)
        self._deadlines = Deadlines(lag=self._lag)
        self._forwarder = StreamForwarder(USAGE_MARK)
        self.state = DashboardState(
            deployment.cluster,
            self._status,
            policy=settings.policy,
            version=__version__,
            distributions=shared is not None,
        )
        self._shadowed(settings.shadow)
        self._tracer = tracer_of(settings.tracing.otlp, settings.tracing.share, version=__version__)
        self._budget = RetryBudget(share=settings.retries.share, floor_per_s=settings.retries.floor_per_s)
        self.peers = Peers(settings.replication, deployment.cluster.name, shared, self.metrics, self.now)
        self.replication = self.peers.replication
        """The connection to other gateways of the cluster; None: there are none."""
        self._admission = AdmissionController(deployment.admission_limits, peers=self.peers.counts)
        self._admission_queue = AdmissionQueue(self._admission, self.metrics, self.state, self.now)
        self._tenancy = Tenancy(settings, self.peers.usage)
        rooms = random.Random(seed)
        self._shared = SharedServices(
            now=self.now,
            metrics=self.metrics,
            state=self.state,
            tracer=self._tracer,
            budget=self._budget,
            rooms=rooms,
            jitter=random.Random(seed),
            deadlines=self._deadlines,
            lag=self._lag,
            forwarder=self._forwarder,
            salt_secret=shared.salt_secret if shared is not None else secrets.token_bytes(32),
            on_end=self._admission_queue.release,
            tenancy=self._tenancy,
            request_ids=RequestIds(partial(rooms.getrandbits, 64), shared=self.replication is not None),
            sharing=self.replication,
            engine_fault=self._frontend.engine_fault,
        )
        self._pages = WebPages()
        self._reloading = asyncio.Lock()
        self._reloads: MergedReloads | None = None
        self._certificate: PortCertificate | None = None
        self._admin_certificate: PortCertificate | None = None
        self._checked = self._draining = False
        self._clusters: ClusterManager | None = None
        self._membership: Membership | None = None
        self._admin: Admin | None = None
        self._periodic: list[asyncio.Task[None]] = []
        self._server: FrontendServer | None = None
        self._endpoints: Endpoints | None = None
        self.port = self.admin_port = 0

    def _shadowed(self, policy: str) -> None:
        self.metrics.shadow = policy
        self.state.shadow(policy)

    def now(self) -> float:
        """Return the time since the gateway object was created, in seconds."""
        return time.monotonic() - self._start

    @property
    def runtime(self) -> ClusterRuntime:
        """The loaded cluster that serves new requests."""
        assert self._clusters is not None, "start first"
        return self._clusters.runtime

    async def start(self) -> None:
        """Start to listen; sets `port` and `admin_port`.

        Raises:
            InputError: an address cannot be used, or the event log cannot be written.
        """
        self._lag.start()
        deployment = self._first
        settings, listen = deployment.settings, deployment.settings.listen
        manager = self._clusters = self.peers.clusters = ClusterManager(
            deployment, self._shared, lambda: self._admission.queued
        )
        self._reloads = MergedReloads(manager.room, self._reload)
        shows_metrics = self._frontend.metrics if listen.metrics is None else listen.metrics
        page = self.metrics.page if shows_metrics else None
        description = msgspec.json.encode(openapi.document(__version__))
        self._endpoints = Endpoints(
            manager.runtime,
            self._admission_queue,
            Keys.of(settings.keys),
            own_pages=OwnPages(self.ready, description, page, metrics_without_key=listen.metrics is True),
            started_unix_s=int(time.time()),
            pages=self._pages,
            proxied=self._frontend.proxied,
            relayed=self._frontend.relayed,
            routed=self._frontend.routed,
        )
        self._check_pages(deployment)
        certificate = self._certificate = port_certificate(listen.tls, "gateway.listen.tls")
        parts = ServerParts(
            self._endpoints,
            deployment.http_limits,
            self._deadlines,
            self._pages,
            self.ready,
            key_pair=None if certificate is None else lambda: certificate.pair,
        )
        self._forwarder.streams_max = streams_to_forward(settings.limits.connections, len(deployment.cluster.instances))
        if settings.forwarding_thread:
            self._forwarder.start()
        server = self._server = self._frontend.server(parts)
        try:
            self.port = await server.listen(listen.host, listen.port, context_of(certificate))
        except OSError as error:
            place, why = host_port(listen.host, listen.port), error.strerror or str(error)
            raise cannot_listen(place, error.errno, why, where="gateway.listen") from None
        self._admin = Admin(self._admin_parts(deployment))
        admin = self._admin_certificate = port_certificate(settings.admin.tls, "gateway.admin.tls")
        self.admin_port = await self._admin.start(settings.admin.host, settings.admin.port, context_of(admin))
        manager.watch()
        self._membership = Membership(manager, self._reloading, self.now, self._frontend.picker(self.port))
        self._membership.follow(deployment.cluster.file.discovery, deployment.folder)
        if self.replication is not None:
            self.replication.start(settings.prompt.block_tokens)
        self._periodic = [asyncio.create_task(self._tick()), asyncio.create_task(follow(certificate, admin))]
        address, shown = host_port(listen.host, self.port), settings.policy_fields()
        log_exposures(settings, settings)
        log_event("info", "serving", address=address, **shown, instances=len(manager.runtime.engines))

    def _check_pages(self, deployment: Deployment) -> None:
        """Set the origin checks: requests of web pages are checked if no API key is required."""
        assert self._endpoints is not None
        listen = deployment.settings.listen
        self._pages.change(
            checked=not self._endpoints.keys.required,
            listen_host=self._first.settings.listen.host,
            hosts=listen.hosts,
            origins=listen.origins,
        )

    def ready(self) -> str:
        """Return why the gateway accepts no requests; empty if it accepts them."""
        if self._draining:
            return "the gateway is draining"
        if self._clusters is None:
            return "the gateway is starting"
        if self._membership is not None and self._membership.waiting:
            return "no engines have been discovered yet"
        self._checked = self._checked or self._clusters.all_checked
        if not self._checked:
            return "the first health checks are not complete"
        up = [engine.role for engine in self.runtime.engines.values() if engine.availability.up]
        missing = [role for role in ("prefill", "decode") if role not in up and "both" not in up]
        return f"no {missing[0]} instance is up" if missing else ""

    async def drain(self) -> None:
        """Accept no new connections, and close each one after its response, or at the timeout in the settings."""
        if self._draining:
            return
        self._draining = True
        log_event("info", "draining", count=self._admission.in_flight)
        assert self._server is not None
        assert self._clusters is not None
        self._clusters.role_switches.stop()
        self._clusters.scaling.stop()
        await self._server.drain(float(self.runtime.settings.timeouts.drain_s))

    async def close(self) -> None:
        """Shut down; requests that are still in flight are aborted."""
        self._draining = True
        if self._reloads is not None:
            self._reloads.close()
        async with self._reloading:
            await self._close()

    async def _close(self) -> None:
        manager, server = self._clusters, self._server
        for task in self._periodic:
            task.cancel()
        await asyncio.gather(*self._periodic, return_exceptions=True)
        self._lag.close()
        if self.replication is not None:
            await self.replication.close()
        if self._membership is not None:
            await self._membership.close()
        if server is not None:
            server.stop_accepting()
        # Waiting requests are rejected first: each aborted request would otherwise make room for one of them.
        self._admission_queue.close()
        if manager is not None:
            manager.stop()
            await manager.unwatch()
        if server is not None:
            await server.drain(_FINAL_DRAIN_S, idle_s=0.0)
        if manager is not None:
            manager.close()
        self._forwarder.close()
        if self._admin is not None:
            await self._admin.close()
        await asyncio.get_running_loop().run_in_executor(None, self._tracer.close)

    async def reload(self, read: Callable[[], Deployment]) -> bool:
        """Serve the deployment that `read` returns from now on; requests in flight stay where they are.

        Only one reload runs at a time, and a thread reads the files. Reloads that wait are merged: the latest counts.
        Return False, and change nothing, if the reload fails or the gateway is draining.
        """
        assert self._reloads is not None, "start first"
        return await self._reloads(read)

    async def _reload(self, read: Callable[[], Deployment]) -> bool:
        assert self._clusters is not None
        async with self._reloading:
            try:
                if self._draining:
                    raise InputError("the gateway is draining", hint="start a new gateway")
                found = (self._membership.reported if self._membership is not None else None) or ()
                prepared = await asyncio.to_thread(self._clusters.prepare, read, found)
                serving = self._clusters.next(prepared)
            except Exception as error:  # after any error in reading, the old file stays in effect
                reason = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
                self.metrics.reloaded("refused")
                log_event("error", "reload_refused", reason=reason)
                return False
            before = self._clusters.deployment.settings
            await self._take_up(self._clusters, prepared, serving)
            self.metrics.reloaded("taken")
            log_event("info", "reloaded", **serving.settings.policy_fields(), instances=len(serving.engines))
            log_exposures(serving.settings, self._first.settings, before)
            for field in prepared.deployment.needs_restart(self._first):
                log_event("warning", "reload_needs_restart", field=f"gateway.{field}")
            return True

    async def _take_up(self, manager: ClusterManager, prepared: Prepared, serving: ClusterRuntime) -> None:
        assert self._endpoints is not None
        # Each step takes some milliseconds with hundreds of instances, so requests can be served in between.
        await asyncio.sleep(0)
        self.state.replace(serving.cluster)
        await asyncio.sleep(0)
        collectors = manager.switch(prepared, serving)
        if self._membership is not None:
            self._membership.recheck()
        self._endpoints.serving, self._endpoints.keys = serving, prepared.keys
        self.metrics.roles = {instance.name: instance.role for instance in serving.cluster.instances}
        self.metrics.policy = self.state.policy = serving.settings.policy
        self._shadowed(serving.settings.shadow)
        self._check_pages(prepared.deployment)
        self._change_settings(prepared.deployment)
        await manager.settle(collectors)
        if self._membership is not None:
            discovery, folder = prepared.deployment.cluster.file.discovery, prepared.deployment.folder
            self._membership.follow(discovery, folder)

    def _change_settings(self, deployment: Deployment) -> None:
        """Apply the settings that do not depend on the cluster."""
        assert self._server is not None
        assert self._admin is not None
        settings = deployment.settings
        self._server.limits = deployment.http_limits
        self._forwarder.streams_max = streams_to_forward(settings.limits.connections, len(deployment.cluster.instances))
        self._budget.share, self._budget.floor_per_s = settings.retries.share, settings.retries.floor_per_s
        self._admission_queue.change(deployment.admission_limits)
        self._tenancy.change(settings)
        self._admin.change(self._admin_parts(deployment))
        if self._logs is not None:
            self._logs.change(settings.log.format, settings.log.level, access=settings.log.access)
        certificates = (self._certificate, settings.listen.tls), (self._admin_certificate, settings.admin.tls)
        for certificate, tls in certificates:
            if certificate is not None and tls is not None:
                certificate.change(tls)

    def _admin_parts(self, deployment: Deployment) -> AdminParts:
        assert self._clusters is not None
        settings = deployment.settings
        return AdminParts(
            state=self.state,
            page=self.metrics.whole_page,
            now=self.now,
            ready=self.ready,
            version=__version__,
            config=lambda: settings,
            push=self._push if settings.oracle.source == "push" else None,
            token=settings.admin.push_token or "",
            read_token=settings.admin.read_token or "",
            host_names=frozenset(settings.admin.hosts),
        )

    async def _push(self, body: bytes) -> None:
        assert self._clusters is not None
        self._clusters.push(body)

    def _status(self) -> GatewayStatus:
        """Return the present gauges."""
        manager, replication = self._clusters, self.replication
        return status_snapshot(
            manager.clusters if manager is not None else (),
            self._admission,
            self._server.connections if self._server is not None else 0,
            self.now(),
            ready=not self.ready(),
            draining=self._draining,
            forwarded=len(self._forwarder),
            role_switches=manager.role_switches if manager is not None else None,
            scaling=manager.scaling if manager is not None else None,
            discovery=self._membership.load if self._membership is not None else None,
            replication=replication.load if replication is not None else None,
            path_ratios=self.state.lowest_path_ratios(self.now()),
        )

    async def _tick(self) -> None:
        assert self._clusters is not None
        while True:
            await asyncio.sleep(_REFRESH_S)
            try:
                self._clusters.refresh()
                self._tenancy.limiter.observe(self.now())
                if self.replication is not None:
                    self.replication.refresh()
                self.runtime.reports.open_files.check(self.now())
                self.state.remember(self.now())
            except Exception as error:  # the cause may be gone at the next run
                log_event("error", "check_failed", reason=f"{type(error).__name__}: {error}")
