"""The gateway as a whole: puts its parts together, reads its file again, drains and ends. It handles no request."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from kvroute import __version__
from kvroute.control import EventLog, LogHeader
from kvroute.gateway import openapi
from kvroute.gateway.admin import Admin, AdminParts
from kvroute.gateway.admission import Admission, AdmissionLimits
from kvroute.gateway.budget import RetryBudget
from kvroute.gateway.deadlines import Deadlines
from kvroute.gateway.door import Door
from kvroute.gateway.gauges import load_of
from kvroute.gateway.journey import Journey
from kvroute.gateway.keys import Keys
from kvroute.gateway.logs import note
from kvroute.gateway.metrics import Metrics
from kvroute.gateway.preflight import deployment_of, tls_context
from kvroute.gateway.prompt import Prompts
from kvroute.gateway.reading import Limits
from kvroute.gateway.reception import Reception
from kvroute.gateway.serving import Serving
from kvroute.gateway.settings import GatewaySettings
from kvroute.gateway.state import ClusterState
from kvroute.gateway.stations import stations_of
from kvroute.gateway.tracing import tracer_of
from kvroute.gateway.view import Load
from kvroute.gateway.watchers import Watchers
from kvroute.topology import Cluster
from kvroute.topology.assembly import read_text
from kvroute.types import Endpoint, InputError

_LOOK_S = 0.25
"""Breakers and the event log are looked at so often."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is served: the cluster file's text, and what it says."""

    text: str
    cluster: Cluster
    settings: GatewaySettings

    @classmethod
    def read(
        cls,
        path: Path,
        adjust: Callable[[GatewaySettings], GatewaySettings] = lambda settings: settings,
        endpoints: Mapping[str, Endpoint] | None = None,
    ) -> Deployment:
        """Read a cluster file.

        Args:
            path: the file.
            adjust: what the command line changes.
            endpoints: of emulated engines, in place of the file's.

        Raises:
            InputErrors: every fault of the file.
        """
        return cls.of(read_text(path), str(path), adjust, endpoints)

    @classmethod
    def of(
        cls,
        text: str,
        source: str,
        adjust: Callable[[GatewaySettings], GatewaySettings] = lambda settings: settings,
        endpoints: Mapping[str, Endpoint] | None = None,
    ) -> Deployment:
        """The same from the file's text; `source` names it in errors."""
        cluster, settings = deployment_of(text, source, embedded=endpoints is not None)
        if endpoints is not None:
            cluster = _emulated(cluster, endpoints, source)
        return cls(text, cluster, adjust(settings))


def _emulated(cluster: Cluster, endpoints: Mapping[str, Endpoint], source: str) -> Cluster:
    other = [instance for instance in cluster.instances if instance.protocol != "vllm"]
    if other:
        what = f"instance {other[0].name} speaks {other[0].protocol}, and emulated engines speak vllm"
        raise InputError(what, where=source, mend="leave `protocol` out")
    instances = tuple(msgspec.structs.replace(i, endpoint=endpoints[i.name]) for i in cluster.instances)
    return replace(cluster, instances=instances)


class Gateway:
    """From `start` to `drain` and `close`."""

    def __init__(self, deployment: Deployment, *, seed: int | None = None) -> None:
        """Args: `seed` makes the rooms and ids that the gateway draws the same again; None: the system's randomness."""
        settings = deployment.settings
        self._start = time.monotonic()
        self._deployment = deployment
        self._rooms = random.Random(seed) if seed is not None else random.SystemRandom()
        self._deadlines = Deadlines()
        self._prompts = _prompts(settings)
        roles = {instance.name: instance.role for instance in deployment.cluster.instances}
        self.metrics = Metrics(self._look, roles, version=__version__, policy=settings.policy)
        self.state = ClusterState(deployment.cluster, self._look, policy=settings.policy, version=__version__)
        self._tracer = tracer_of(settings.tracing.otlp, settings.tracing.share, version=__version__)
        self._budget = _budget(settings)
        self._admission = Admission(_admission_limits(settings))
        self._retired: list[tuple[Serving, Watchers]] = []
        self._logs = 0
        self._draining = False
        self._admin: Admin | None = None
        self._watchers: Watchers | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._serving: Serving | None = None
        self._door: Door | None = None
        self._reception: Reception | None = None
        self.port = self.admin_port = 0

    def now(self) -> float:
        """Seconds since the gateway was made."""
        return time.monotonic() - self._start

    @property
    def serving(self) -> Serving:
        """What new requests are served by."""
        assert self._serving is not None, "start first"
        return self._serving

    async def start(self) -> None:
        """Listen; `port` and `admin_port` say where.

        Raises:
            InputError: an address cannot be had, or the event log not be written.
        """
        settings = self._deployment.settings
        self._serving = self._made()
        self._reception = Reception(
            self._serving,
            self._admission,
            Keys.of(settings.keys),
            ready=self.ready,
            page=self._page,
            description=msgspec.json.encode(openapi.document(__version__)),
            started_unix_s=int(time.time()),
        )
        door = self._door = Door(self._reception, _limits(settings), deadlines=self._deadlines)
        listen = settings.listen
        tls = tls_context(listen.tls) if listen.tls else None
        try:
            self.port = await door.listen(listen.host, listen.port, tls)
        except OSError as error:
            what = f"{listen.host}:{listen.port} cannot be listened on ({error.strerror or error})"
            raise InputError(what, where="gateway.listen", mend="choose another port") from None
        self._admin = Admin(
            AdminParts(
                state=self.state,
                metrics=self.metrics,
                now=self.now,
                ready=self.ready,
                version=__version__,
                config=lambda: self._deployment.settings,
                push=self._push,
                token=settings.admin.push_token or "",
                host_names=frozenset(settings.admin.hosts),
            )
        )
        self.admin_port = await self._admin.start(settings.admin.host, settings.admin.port)
        self._watchers = Watchers(self._serving)
        self._watchers.start()
        self._ticker = asyncio.get_running_loop().create_task(self._tick())
        address = f"{listen.host}:{self.port}"
        note("info", "serving", address=address, policy=settings.policy, instances=len(self._serving.stations))

    def ready(self) -> str:
        """Why no requests are taken; empty: they are."""
        if self._draining:
            return "the gateway is draining"
        if self._serving is None or self._watchers is None:
            return "the gateway is starting"
        up = [station.instance.role for station in self._serving.stations.values() if station.guard.up]
        missing = [role for role in ("prefill", "decode") if role not in up and "both" not in up]
        return f"no {missing[0]} instance is up" if missing else ""

    async def drain(self) -> None:
        """Take no new connections; end each behind its answer, or after the time that the settings give."""
        if self._draining:
            return
        self._draining = True
        note("info", "draining", count=self._admission.in_flight)
        assert self._door is not None
        await self._door.drain(float(self._deployment.settings.timeouts.drain_s))

    async def close(self) -> None:
        """End everything; requests that are still under way are broken off."""
        self._draining = True
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        if self._door is not None:
            self._door.stop_accepting()
        for serving, watchers in [*self._retired, *([(self._serving, self._watchers)] if self._serving else [])]:
            for journey in list(serving.journeys.values()):
                journey.stop()
            if watchers is not None:
                await watchers.close()
            serving.close()
        if self._reception is not None:
            self._reception.close()
        if self._door is not None:
            await self._door.drain(0.0)
        if self._admin is not None:
            await self._admin.close()
        self._prompts.close()
        await asyncio.get_running_loop().run_in_executor(None, self._tracer.close)

    async def reload(self, read: Callable[[], Deployment]) -> bool:
        """Serve what `read` gives from now on; requests under way stay where they are. Returns False, and changes
        nothing, where it raises InputError."""
        assert self._reception is not None
        assert self._watchers is not None
        assert self._door is not None
        try:
            deployment = read()
            keys = Keys.of(deployment.settings.keys)
            prompts = _prompts(deployment.settings)
            old, old_watchers, before = self.serving, self._watchers, self._deployment
            self._deployment, old_prompts, self._prompts = deployment, self._prompts, prompts
            try:
                serving = self._made()
            except InputError:
                self._deployment, self._prompts = before, old_prompts
                raise
        except InputError as error:
            self.metrics.reloaded("refused")
            note("error", "reload_refused", reason=str(error))
            return False
        _carry(old, serving)
        self._serving = serving
        self._watchers = Watchers(serving)
        self._reception.serving, self._reception.keys = serving, keys
        self._reception.change(self._admission.change(_admission_limits(deployment.settings)))
        self._door.limits = _limits(deployment.settings)
        self.metrics.roles = {instance.name: instance.role for instance in deployment.cluster.instances}
        self.metrics.policy = self.state.policy = deployment.settings.policy
        self.state.replace(deployment.cluster)
        self._retired.append((old, old_watchers))
        await old_watchers.close()
        self._watchers.start()
        self.metrics.reloaded("taken")
        note("info", "reloaded", policy=deployment.settings.policy, instances=len(serving.stations))
        return True

    def _made(self) -> Serving:
        """A core and stations for the deployment."""
        deployment, settings = self._deployment, self._deployment.settings
        cluster, spec = deployment.cluster, settings.control_spec()
        required = Keys.of(settings.keys).required
        key = os.environ.get(settings.upstream_key_env or "", "").encode()
        serving = Serving(
            cluster,
            spec.build(cluster),
            settings,
            now=self.now,
            prompts=self._prompts,
            budget=self._budget,
            metrics=self.metrics,
            state=self.state,
            tracer=self._tracer,
            events=self._event_log(LogHeader(cluster=deployment.text, spec=spec)),
            rooms=self._rooms,
            engine_key=key if required else None,
            on_end=self._ended,
        )
        exact = self._prompts.exact
        serving.stations = stations_of(cluster, settings, serving.changed, self.now, self._deadlines, exact=exact)
        return serving

    def _event_log(self, header: LogHeader) -> EventLog | None:
        """One file for each cluster that is served, the second with `.1` at its end."""
        path = self._deployment.settings.log.events
        if path is None:
            return None
        name = path if not self._logs else f"{path}.{self._logs}"
        self._logs += 1
        return EventLog(Path(name), header)

    def _ended(self, journey: Journey) -> None:
        assert self._reception is not None
        self._reception.leave(journey.ticket)

    def _push(self, body: bytes) -> None:
        """Telemetry that somebody sent to the admin port."""
        assert self._watchers is not None
        self._watchers.push(body)

    def _page(self, accept: str) -> tuple[str, bytes]:
        kind, pieces = self.metrics.page(accept)
        return kind, "".join(pieces).encode()

    def _look(self) -> Load:
        """The gauges now."""
        connections = self._door.connections if self._door is not None else 0
        return load_of(
            self._serving,
            self._admission,
            connections,
            self.now(),
            ready=not self.ready(),
            draining=self._draining,
        )

    async def _tick(self) -> None:
        """What changes with time alone."""
        while True:
            await asyncio.sleep(_LOOK_S)
            now = self.now()
            for station in self.serving.stations.values():
                station.guard.look(now)
            if self.serving.events is not None:
                self.serving.events.flush()
            for serving, _ in [pair for pair in self._retired if not pair[0].journeys]:
                serving.close()
            self._retired = [pair for pair in self._retired if pair[0].journeys]


def _carry(old: Serving, new: Serving) -> None:
    """What is known of instances that stay: their health, and who measures their transfers."""
    for name, station in new.stations.items():
        before = old.stations.get(name)
        if before is not None and before.instance.endpoint == station.instance.endpoint:
            station.measures = before.measures
            if not before.guard.healthy:
                station.guard.set_healthy(False, new.now())


def _prompts(settings: GatewaySettings) -> Prompts:
    prompt = settings.prompt
    tokenizer = Path(prompt.tokenizer) if prompt.tokenizer else None
    return Prompts(tokenizer, block_tokens=prompt.block_tokens, bytes_per_token=prompt.bytes_per_token)


def _budget(settings: GatewaySettings) -> RetryBudget:
    return RetryBudget(share=settings.retries.share, floor_per_s=settings.retries.floor_per_s)


def _admission_limits(settings: GatewaySettings) -> AdmissionLimits:
    limits = settings.limits
    return AdmissionLimits(
        in_flight=limits.in_flight,
        queue=limits.queue,
        queue_wait_s=float(limits.queue_wait_s),
        per_key=limits.per_key,
        of_key=settings.keys.concurrency,
    )


def _limits(settings: GatewaySettings) -> Limits:
    limits = settings.limits
    return Limits(
        header_bytes=int(limits.header_bytes),
        body_bytes=int(limits.body_bytes),
        header_s=float(limits.header_s),
        body_s=float(limits.body_s),
        keep_alive_s=float(limits.keep_alive_s),
        connections=limits.connections,
        stall_s=float(limits.stall_s),
    )
