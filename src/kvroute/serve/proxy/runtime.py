"""One loaded cluster: the control core on the wall clock, its engine clients, and the receivers of its events.

A reload of the cluster file creates a new one; the old one lives until its last request has finished.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from kvroute.control import Control, NextCluster
from kvroute.http.client.callbacks import weakly
from kvroute.http.deadlines import Deadlines
from kvroute.http.forwarding.stream_forwarder import StreamForwarder
from kvroute.http.loop_lag import LoopLag
from kvroute.serve.api.cache_salt import CacheSalts
from kvroute.serve.api.passthrough_paths import PassthroughPaths
from kvroute.serve.api.prompt import Prompts
from kvroute.serve.engines.client import RANK_HEADER, EngineClient
from kvroute.serve.engines.factory import EngineFactory
from kvroute.serve.engines.panic import Panics, PanicSet
from kvroute.serve.engines.retry_budget import RetryBudget
from kvroute.serve.observe.admin.state import DashboardState
from kvroute.serve.observe.file_descriptors import OpenFiles
from kvroute.serve.observe.logs import log_event
from kvroute.serve.observe.metrics.metrics import Metrics
from kvroute.serve.observe.tracing import Tracer
from kvroute.serve.proxy.admission.placement_queue import PlacementQueue
from kvroute.serve.proxy.admission.tenancy import Tenancy
from kvroute.serve.proxy.constraint_log import ConstraintFallbackLog
from kvroute.serve.proxy.expected_transfers import ExpectedTransfers
from kvroute.serve.proxy.own_transfers import OwnTransfers
from kvroute.serve.proxy.request_events import Caller, RequestEvents, Sharing
from kvroute.serve.proxy.request_ids import EngineHeaders, RequestIds
from kvroute.serve.proxy.request_reports import RequestInProgress, RequestReports
from kvroute.serve.proxy.served_models import ServedModels, UnsplitKinds
from kvroute.serve.wan.paths import WanPaths
from kvroute.topology import Cluster
from kvroute.types import (
    ClusterChanged,
    CongestionMeasured,
    Decision,
    Discovered,
    Event,
    InstanceDown,
    InstanceMeasured,
    InstanceUp,
    KvCleared,
    LinksMeasured,
    TransferMeasured,
)

if TYPE_CHECKING:
    from kvroute.serve.config.settings import GatewaySettings
    from kvroute.serve.observe.event_log import EventLogWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedServices:
    """Services that consecutive clusters share."""

    now: Callable[[], float]
    metrics: Metrics
    state: DashboardState
    tracer: Tracer
    budget: RetryBudget
    rooms: random.Random
    """Random generator for SGLang's bootstrap rooms and for request ids."""
    jitter: random.Random
    """Random generator for the jitter of health checks and circuit breakers."""
    deadlines: Deadlines
    lag: LoopLag
    forwarder: StreamForwarder
    salt_secret: bytes
    """The secret of cache salts if the settings give none."""
    on_end: Callable[[int], None]
    """Called with the ticket of each request that ends."""
    tenancy: Tenancy
    request_ids: RequestIds
    sharing: Sharing | None = None
    """Tells the other gateways of the cluster; None: there are none."""
    engine_fault: Callable[[Discovered], str] = lambda engine: ""
    """Returns why the protocol of clients excludes a discovered engine; empty if it does not."""


class Secrets(NamedTuple):
    """Secrets from the environment, which the settings name."""

    engine_key: bytes | None
    """Key for all engines; empty: none is sent. None: the client's own key is forwarded."""
    cache_salt: bytes


class RequestReading:
    """What turns a client's request into one that the core can decide on."""

    def __init__(self, cluster: Cluster, settings: GatewaySettings, prompts: Prompts, salt_secret: bytes) -> None:
        """
        Args:
            cluster: as it is now.
            settings: of its `gateway` section.
            prompts: reads prompts as the settings say.
            salt_secret: of the cache salts.
        """
        self._settings = settings
        self.prompts = prompts
        self.models = ServedModels(cluster, settings.models, settings.adapters)
        self.unsplit = UnsplitKinds()
        self.salts = CacheSalts.of(settings.cache_salt, settings.keys, salt_secret)
        """Salts by client key; None: clients share the engines' prefix caches."""
        self.passthrough = PassthroughPaths(settings.passthrough)
        """Paths of requests that one engine serves alone."""
        affinity = settings.session_affinity
        self.session_header = affinity.header.lower().encode() if affinity is not None else b""
        """Request header that names the client's session; empty: sessions are not distinguished."""
        self.keeps_ids = cluster.file.storage is not None or (
            settings.offload is not None and settings.offload.copy_s > 0
        )
        """Whether prompts keep their token ids, because their cached prefixes may be copied or read from a store."""

    def change(self, cluster: Cluster) -> None:
        """Read the models' names of the cluster as it is now."""
        self.models = ServedModels(cluster, self._settings.models, self._settings.adapters)


class ClusterRuntime:
    """What a request needs: decisions, engine clients and receivers of reports. Nothing here blocks."""

    def __init__(
        self,
        cluster: Cluster,
        control: Control,
        settings: GatewaySettings,
        shared: SharedServices,
        *,
        prompts: Prompts,
        events: EventLogWriter | None,
        secrets: Secrets,
        first_number: int = 0,
    ) -> None:
        """
        Args:
            cluster: of the file.
            control: the core that decides for it.
            settings: of its `gateway` section.
            shared: services that it shares with the clusters before and after it.
            prompts: reads prompts as the settings say.
            events: the event log; None: events are not logged.
            secrets: what the settings refer to and do not contain.
            first_number: of its first request.
        """
        self.cluster, self.settings, self.now = cluster, settings, shared.now
        self.budget, self.metrics, self.state = shared.budget, shared.metrics, shared.state
        self.tracer, self.events, self.forwarder = shared.tracer, events, shared.forwarder
        self.reading = RequestReading(cluster, settings, prompts, secrets.cache_salt)
        self._factory = EngineFactory(
            settings,
            weakly(self.on_availability),
            shared.deadlines,
            exact=prompts.exact,
            draw=shared.jitter.random,
        )
        self.engines = {instance.name: self._factory.client(instance) for instance in cluster.instances}
        self.uids: dict[str, str] = {}
        """Discovered engines: the uid of each, by name."""
        self.panics = Panics(self.engines, settings.health.panic, weakly(self.panicked))
        """Panic state of each model and role; in a panic, health checks and breakers are ignored."""
        self.wan_paths: WanPaths | None = None
        """WAN paths of prefills; None: the settings have no `offload` section."""
        if settings.offload is not None:
            scrape_s = float(settings.scrape.interval_s)
            self.wan_paths = WanPaths(cluster, self.engines, settings.offload.wan_path, scrape_s=scrape_s)
        self.requests: dict[int, RequestInProgress] = {}
        self.callers: dict[int, Caller] = {}
        """Client of each request, by number; filled only if a log uses it."""
        self.measured: dict[str, InstanceMeasured] = {}
        """Last load measurement of each engine."""
        self.telemetry: CongestionMeasured | LinksMeasured | None = None
        """Last measurement of the network."""
        self.expected_transfers = ExpectedTransfers(cluster)
        replaced = shared.tracer.replaced
        if cluster.file.discovery is not None or any(instance.engine for instance in cluster.instances):
            replaced |= {RANK_HEADER}
        self.engine_headers = EngineHeaders(settings.forward_headers, replaced, secrets.engine_key)
        """What engines receive of the clients' headers."""
        self.control = control
        """The core; only `report` changes it."""
        self._rooms = shared.rooms
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = first_number - 1
        fallbacks = ConstraintFallbackLog(settings.constraint) if settings.constraint else None
        self.sharing, self.request_ids = shared.sharing, shared.request_ids
        self.report = RequestEvents(control, shared.metrics, events, self.callers, fallbacks, shared.sharing)
        """Passes the steps of requests to the core."""
        self.reports = RequestReports(
            metrics=shared.metrics,
            dashboard=shared.state,
            now=shared.now,
            events=self.report,
            engines=self.engines,
            requests=self.requests,
            callers=self.callers,
            own_transfers=OwnTransfers(self.expected_transfers.uncontended_s, partial(_ranks_of, self.engines)),
            open_files=OpenFiles(shared.metrics),
            on_end=shared.on_end,
        )
        self.tenancy = shared.tenancy
        self.placement: PlacementQueue | None = None
        """When requests are placed; None: at once."""
        if settings.classes or settings.fair_queue is not None:
            wait_s = float(settings.limits.queue_wait_s)
            section, metrics = settings.fair_queue, shared.metrics
            self.placement = PlacementQueue(control, shared.tenancy, section, metrics, shared.now, wait_max_s=wait_s)

    # Changes of the cluster

    def change(self, following: NextCluster) -> None:
        """Add the engines that join and remove those that leave. Engines that join are down until a health check
        succeeds. Nothing uses those that leave any more.

        Raises:
            InputError: a request is in progress on an engine that leaves. Nothing has changed.
        """
        now = self.now()
        self.control.expect(following)
        self.notify(ClusterChanged(now, following.joined, following.left))
        self.cluster = self.control.cluster
        for name in following.left:
            engine = self.engines.pop(name)
            self.panics.remove(engine, now)
            engine.close()
            self.measured.pop(name, None)
            self.reports.own_transfers.forget(name)
            del self.uids[name]
            self.metrics.forget(name)
        for member in following.joined:
            name = member.engine.name
            instance = self.cluster.instances[self.cluster.index(name)]
            self.uids[name] = member.engine.uid
            self.engines[name] = self._factory.client(instance, up=False)
            self.panics.add(self.engines[name])
        self.expected_transfers.change(self.cluster)
        self.reading.change(self.cluster)

    def needs(self, name: str) -> bool:
        """Whether any request is in flight on the instance, or needs the KV cache that it holds."""
        engine = self.engines.get(name)
        if engine is not None and engine.in_flight:
            return True
        return any(request.uses(name) for request in self.requests.values())

    def process_ended(self, name: str) -> None:
        """Record that the process of an instance has ended: no process listens at its address any more."""
        self.engines[name].forget_engine_id()
        for request in tuple(self.requests.values()):
            request.on_process_ended(name)

    # Decisions

    def decide(self, event: Event) -> tuple[Decision, ...]:
        """See `RequestEvents`."""
        return self.report.decide(event)

    def notify(self, event: Event) -> None:
        """See `RequestEvents`."""
        self.report.notify(event)

    def on_availability(self, name: str, up: bool, now: float) -> None:
        """Report a change of availability."""
        if self.wan_paths is None or not self.wan_paths.changing:  # the path logs one line for all instances behind it
            reason = {} if up else {"reason": self.engines[name].availability.reason or "breaker"}
            log_event("info" if up else "warning", "instance_up" if up else "instance_down", instance=name, **reason)
        # No slow start for an instance whose checks are merely ignored, or whose path is open again.
        same_engine = self.engines[name].availability.ignored or (
            self.wan_paths is not None and self.wan_paths.changing
        )
        self.notify(InstanceUp(now, name, returned=not same_engine) if up else InstanceDown(now, name))

    def panicked(self, panicking: PanicSet) -> None:
        """Report the start or end of a panic."""
        state, model, role = panicking.state, panicking.model, panicking.role
        figures = {"available": state.available, "instances": state.instances}
        if state.active:
            self.metrics.panicked(model, role)
            log_event("warning", "panic_started", model=model, role=role, **figures)
        else:
            log_event("info", "panic_ended", model=model, role=role, **figures)

    def on_telemetry(self, event: Event) -> None:
        """Process an event of a collector: load, caches and transfers of engines, congestion of the network."""
        match event:
            case TransferMeasured(target=target):
                if self.settings.measure == "first-byte":
                    return
                # The engine measures its transfers more accurately than the gateway can from outside.
                self.engines[target].measures = False
                self.state.transfer_measured(event)
            case InstanceMeasured(instance=name):
                self.measured[name] = event
            case CongestionMeasured() | LinksMeasured():
                self.telemetry = event
            case KvCleared(instance=name):
                # It may be a different engine now, which does not report its transfers.
                self.engines[name].measures = self.settings.measure != "engine"
                self.engines[name].forget_engine_id()
        self.notify(event)

    # Called by requests

    def next_number(self) -> int:
        """Return the next request's id in the event log."""
        self._numbers += 1
        return self._numbers

    @property
    def last_number(self) -> int:
        """The last value of `next_number`."""
        return self._numbers

    def draw(self) -> int:
        """Return 63 random bits."""
        return self._rooms.getrandbits(63)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task and reference it until it is done."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def prefills_elsewhere(self, engine: EngineClient) -> bool:
        """Whether another instance is up that could prefill instead of this one."""
        model, protocol = engine.instance.model, engine.instance.protocol
        return any(
            other is not engine
            and other.availability.up
            and other.role != "decode"
            and (other.instance.model, other.instance.protocol) == (model, protocol)
            for other in self.engines.values()
        )

    @property
    def idle(self) -> bool:
        """Whether no request is in progress, including passthrough requests."""
        return not self.requests and not any(engine.in_flight for engine in self.engines.values())

    def close(self) -> None:
        """Release all resources; no more requests follow."""
        if self.placement is not None:
            self.placement.close()
        self.expected_transfers.close()
        self.panics.close()
        for task in self._tasks:
            task.cancel()
        for engine in self.engines.values():
            engine.close()
        if self.events is not None:
            self.events.close()


def same_engine(name: str, old: ClusterRuntime, new: ClusterRuntime) -> bool:
    """Whether an instance is in both clusters and is the same engine."""
    if old.uids.get(name) != new.uids.get(name):
        return False
    before, after = old.engines.get(name), new.engines.get(name)
    if before is None or after is None:
        return False
    return (before.instance.endpoint, before.instance.model) == (after.instance.endpoint, after.instance.model)


def _ranks_of(engines: Mapping[str, EngineClient], name: str) -> int:
    """Return the tensor-parallel ranks of an engine. A method of the runtime would be a reference cycle."""
    engine = engines.get(name)
    return engine.instance.tp if engine is not None else 1
