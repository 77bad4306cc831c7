"""The current cluster, earlier clusters that still have requests after a reload, and the switch to the next one."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from msgspec.structs import replace

from kvroute.control import Control, LogHashing, LogHeader, NextCluster
from kvroute.serve.api.api_keys import Keys
from kvroute.serve.api.prompt import Prompts
from kvroute.serve.config.instance_checks import discovered_fault
from kvroute.serve.config.settings import GatewaySettings
from kvroute.serve.config.settings_checks import tls_context
from kvroute.serve.lifecycle.carry_over import StateCarryOver
from kvroute.serve.lifecycle.deployment import Deployment
from kvroute.serve.lifecycle.role_switches import RoleSwitches
from kvroute.serve.lifecycle.scaling import ScalingDriver
from kvroute.serve.observe.event_log import EventLogWriter
from kvroute.serve.observe.layout import ClusterLayout
from kvroute.serve.observe.logs import log_event
from kvroute.serve.proxy.runtime import ClusterRuntime, Secrets, SharedServices
from kvroute.serve.telemetry.collectors import Collectors
from kvroute.topology.reading.discovery import admitted
from kvroute.types import Discovered, Event, InputError

_SPACING_S = 30.0
"""Longest time that a reload waits because requests of two earlier clusters are in progress, in seconds."""
_POLL_S = 0.05
_FREE_S, _FREE_PAUSE_S = 1e-3, 4e-3
"""Duration of one step in freeing the memory of closed clusters, and of the pause after it."""


Read: TypeAlias = Callable[[], Deployment]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Data that a reload has read outside the event loop."""

    deployment: Deployment
    keys: Keys
    prompts: Prompts
    control: Control
    log_header: LogHeader | None
    """None: there is no event log."""
    following: NextCluster | None = None
    """What the engines that have been discovered before add to the cluster; None: there are none."""


def _log_header(deployment: Deployment) -> LogHeader | None:
    """Return the first line of the event log, if there is one, and compile the code that the log needs."""
    if deployment.settings.log.events is None:
        return None
    LogHashing().blocks((0,))
    return deployment.log_header


class MergedReloads:
    """Does one reload at a time. Those that wait are merged into one, which reads the files when its turn comes."""

    def __init__(self, room: Callable[[], Awaitable[None]], reload: Callable[[Read], Awaitable[bool]]) -> None:
        """
        Args:
            room: waits until the next reload may begin.
            reload: serves the deployment that a function returns; returns whether it does.
        """
        self._room, self._reload = room, reload
        self._read: Read | None = None
        self._waiting: asyncio.Task[bool] | None = None
        self._turn = asyncio.Lock()

    async def __call__(self, read: Read) -> bool:
        """Reload, at the latest call's word; return whether it was successful. False: `close` was called before."""
        self._read = read
        waiting = self._waiting = self._waiting or asyncio.create_task(self._next())
        await asyncio.wait([waiting])
        return not waiting.cancelled() and waiting.result()

    def close(self) -> None:
        """Forget the reload that waits."""
        if self._waiting is not None:
            self._waiting.cancel()

    async def _next(self) -> bool:
        async with self._turn:
            try:
                await self._room()
            finally:
                read, self._read, self._waiting = self._read, None, None
            assert read is not None, "each call sets it"
            return await self._reload(read)


class ClusterManager:
    """Starts with one cluster; `prepare`, `next` and `switch` change to another."""

    def __init__(self, deployment: Deployment, shared: SharedServices, queued: Callable[[], int] = lambda: 0) -> None:
        """Args: `queued` returns the number of requests that wait for admission.

        Raises InputError if the tokenizer cannot be read or the event log cannot be created."""
        self.deployment = deployment
        self._shared = shared
        self._prompts = deployment.prompts()
        try:
            keys, core = Keys.of(deployment.settings.keys), deployment.core()
            self.runtime = self._made(Prepared(deployment, keys, self._prompts, core, _log_header(deployment)), 0)
        except InputError:
            self._prompts.close()
            raise
        self._collectors = Collectors(self.runtime, shared.lag, shared.jitter, self._on_event)
        self.role_switches = RoleSwitches(self.runtime, self._on_event)
        self.scaling = ScalingDriver(self.runtime, self.role_switches, queued, self._on_event)
        self._retired: list[ClusterRuntime] = []
        self._carry_over: StateCarryOver | None = None
        self._closed: deque[Iterator[int]] = deque()
        """Clusters without requests whose memory is not freed yet."""
        self._freeing: asyncio.Task[None] | None = None
        self._switched_s = 0.0

    @property
    def clusters(self) -> tuple[ClusterRuntime, ...]:
        """Clusters that have or get requests, the current one first."""
        return (self.runtime, *self._retired)

    @property
    def all_checked(self) -> bool:
        """Whether the health of every instance has been checked."""
        return self._collectors.all_checked

    def watch(self) -> None:
        """Start the collectors of the first cluster. Raises InputError as `Collectors.start` does."""
        self._collectors.start()

    def push(self, body: bytes) -> None:
        """Process pushed telemetry. Raises InputError if it is invalid."""
        self._collectors.push(body)

    @property
    def next_layout(self) -> int:
        """Id of the dashboard's layout after the present one."""
        return self._shared.state.next_layout

    def change(self, following: NextCluster, layout: ClusterLayout) -> None:
        """Let discovered engines join and leave the current cluster.

        Args:
            following: what `Control.prepare` of its core has returned.
            layout: of the changed cluster, for the dashboard.

        Raises:
            InputError: see `ClusterRuntime.change`.
        """
        runtime, shared = self.runtime, self._shared
        runtime.change(following)
        if self._carry_over is not None:
            self._carry_over.forget(following.left)
        for member in following.joined:
            shared.metrics.roles[member.engine.name] = member.engine.role
            self._collectors.add(member.engine.name)
        self._collectors.relink()
        shared.state.change(runtime.cluster, layout)
        shared.metrics.changed(len(following.joined), len(following.left))

    def collect(self, name: str) -> None:
        """Collect health, load and KV events of an engine of the current cluster again."""
        self._collectors.add(name)

    def collect_no_more(self, name: str) -> None:
        """Collect nothing more from an engine of the current cluster, although it may still have requests."""
        self._collectors.remove(name)

    def exclusion(self, engine: Discovered, settings: GatewaySettings) -> str:
        """Return why the settings or the protocol of clients exclude a discovered engine; empty if they do not."""
        return discovered_fault(engine, settings) or self._shared.engine_fault(engine)

    def prepare(self, read: Callable[[], Deployment], engines: tuple[Discovered, ...] = ()) -> Prepared:
        """Do all time-consuming work for another deployment; may run in a thread. Raises InputError, and what `read`
        raises. Args: `engines` that have been discovered before."""
        deployment = read()
        settings = deployment.settings
        keys, control = Keys.of(settings.keys), deployment.core()
        for tls in (settings.listen.tls, settings.admin.tls):
            if tls is not None:
                tls_context(tls)
        same = settings.prompt == self.deployment.settings.prompt
        header = _log_header(deployment)
        following = None
        if engines and deployment.cluster.file.discovery is not None:
            fine = [replace(engine, ready=True) for engine in engines if not self.exclusion(engine, settings)]
            following = control.prepare(admitted(deployment.cluster, {}, fine)[0], ())
        prompts = self._prompts if same else deployment.prompts()
        return Prepared(deployment, keys, prompts, control, header, following)

    async def room(self) -> None:
        """Wait until another cluster takes no more memory than one reload needs: each has an index of all cached
        prefixes. Clusters without requests must be freed. At most one may have requests, unless they take long."""
        while self._closed or (len(self._retired) > 1 and self._shared.now() < self._switched_s + _SPACING_S):
            await asyncio.sleep(_POLL_S)

    def next(self, prepared: Prepared) -> ClusterRuntime:
        """Return the cluster that may become current. Raises InputError if its event log cannot be created."""
        try:
            number = self.runtime.last_number + 1
            return self._made(prepared, number)
        except InputError:
            if prepared.prompts is not self._prompts:
                prepared.prompts.close()
            raise

    def switch(self, prepared: Prepared, runtime: ClusterRuntime) -> Collectors:
        """Make `runtime` the current cluster and create its collectors; return the previous collectors, which the
        caller closes. `settle` carries over the remaining state."""
        old, collectors = self.runtime, self._collectors
        self._switched_s = self._shared.now()
        self._retired.append(old)
        self._carry_over = StateCarryOver(old, runtime, self._retired)
        self._carry_over.at_once()
        self.role_switches.take_over(old, runtime)
        self.scaling.take_over(old, runtime)
        self._collectors = Collectors(runtime, self._shared.lag, self._shared.jitter, self._on_event, collectors)
        self.runtime, self.deployment, self._prompts = runtime, prepared.deployment, prepared.prompts
        self._prompts.change(float(runtime.settings.limits.queue_wait_s))
        return collectors

    async def settle(self, collectors: Collectors) -> None:
        """Close the previous collectors, start the new ones, and carry over the cache contents to the new core."""
        closing = asyncio.ensure_future(collectors.close())
        try:
            self._collectors.start()
        except InputError as error:
            log_event("error", "kv_events_not_followed", reason=str(error))
        await closing
        if self._carry_over is not None:
            await self._carry_over.prefixes()

    def refresh(self) -> None:
        """Apply the changes that depend on time alone."""
        now = self._shared.now()
        for runtime in self.clusters:
            for engine in runtime.engines.values():
                engine.availability.refresh(now)
            runtime.panics.refresh(now)
            if runtime.wan_paths is not None:
                runtime.wan_paths.refresh(now)
            if runtime.events is not None:
                runtime.events.flush()
        if self._carry_over is not None:
            self._carry_over.refresh()
        self.role_switches.advance(self.clusters)
        self.scaling.advance(self.clusters)
        carry_over = self._carry_over
        for runtime in [
            retired for retired in self._retired if retired.idle and not (carry_over and carry_over.reads(retired))
        ]:
            self._retired.remove(runtime)
            runtime.close()
            self._closed.append(runtime.control.dismantle())
            if all(runtime.reading.prompts is not other.reading.prompts for other in self.clusters):
                runtime.reading.prompts.close()
        if self._carry_over is not None and self._carry_over.over and not self._retired:
            self._carry_over = None
        if self._closed and self._freeing is None:
            self._freeing = asyncio.get_running_loop().create_task(self._free())

    async def _free(self) -> None:
        """Free the memory of closed clusters in short steps, so that requests are not delayed."""
        while self._closed:
            until = time.perf_counter() + _FREE_S
            while self._closed and time.perf_counter() < until:
                if next(self._closed[0], None) is None:
                    self._closed.popleft()
            await asyncio.sleep(_FREE_PAUSE_S)
        self._freeing = None

    def stop(self) -> None:
        """Abort the requests in progress; their clients get an error."""
        for runtime in self.clusters:
            if runtime.placement is not None:
                runtime.placement.close()  # each aborted request would otherwise make room for one that waits
            for proxied in list(runtime.requests.values()):
                proxied.stop()

    async def unwatch(self) -> None:
        """Stop autoscaling, role switches and collectors."""
        await self.scaling.close()
        await self.role_switches.close()
        await self._collectors.close()

    def close(self) -> None:
        """Close all clusters; no more requests follow."""
        if self._freeing is not None:
            self._freeing.cancel()
        for runtime in self.clusters:
            runtime.close()
            runtime.reading.prompts.close()

    def _on_event(self, event: Event) -> None:
        """Process an event of a collector."""
        self.runtime.on_telemetry(event)
        if self._carry_over is not None:
            self._carry_over.on_event(event)

    def _recording(self, prepared: Prepared) -> EventLogWriter | None:
        deployment, header = prepared.deployment, prepared.log_header
        log = deployment.settings.log
        if log.events is None or header is None:
            return None
        lost = self._shared.metrics.log_lost
        return EventLogWriter(Path(log.events), header, log.terms, deployment.log_bounds, lost)

    def _made(self, prepared: Prepared, first_number: int) -> ClusterRuntime:
        deployment, prompts, control = prepared.deployment, prepared.prompts, prepared.control
        cluster, settings, shared = deployment.cluster, deployment.settings, self._shared
        key = os.environ.get(settings.upstream_key_env or "", "").encode()
        salt = os.environ.get(settings.cache_salt_secret_env or "", "").encode() or shared.salt_secret
        runtime = ClusterRuntime(
            cluster,
            control,
            settings,
            shared,
            prompts=prompts,
            events=self._recording(prepared),
            secrets=Secrets(key if prepared.keys.required else None, salt),
            first_number=first_number,
        )
        if prepared.following is not None:
            runtime.change(prepared.following)
        return runtime
