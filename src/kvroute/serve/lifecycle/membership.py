"""Discovered engines of the current cluster: joins, leaves and drains engines as the reports of a discovery source say.

An engine that the source no longer reports gets no new requests from then on. It leaves the cluster when its requests
have ended. After the drain time they are aborted, and the rules for failed legs apply.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from kvroute.control import NextCluster
from kvroute.serve.discovery.sources import source_of
from kvroute.serve.lifecycle.reload import ClusterManager
from kvroute.serve.observe.layout import ClusterLayout, layout_of
from kvroute.serve.observe.logs import log_event
from kvroute.serve.observe.view import DiscoveryLoad
from kvroute.topology.reading.discovery import admitted
from kvroute.topology.schema import Discovery
from kvroute.types import Discovered, DiscoverySource, InputError, Joined, OwnPicker

COALESCE_S = 0.1
"""Time for which further reports are awaited, so that they are applied together."""
_CHECK_S = 0.25
"""Interval between checks of draining engines."""
_RESTART_S = 5.0
"""Time after which a source that has failed with an internal error is started again."""
_GONE, _NOT_READY = "gone", "not ready"
"""Reasons for giving no requests to an engine: its source no longer reports it, or says that it takes none."""
_NAMES_SHOWN = 8


class Membership:
    """Applies the reports of one source, one after the other and never during a reload."""

    def __init__(
        self, manager: ClusterManager, lock: asyncio.Lock, now: Callable[[], float], picker: OwnPicker | None = None
    ) -> None:
        """
        Args:
            lock: is held during each change and each reload.
            picker: see `Frontend`.
        """
        self._manager, self._lock, self._now, self._picker = manager, lock, now, picker
        self._section: Discovery | None = None
        self._folder = Path()
        self._reported: tuple[Discovered, ...] | None = None
        self._found: dict[str, Discovered] = {}
        """The engines of the last report by name, as if all were ready: a member is compared with them."""
        self._unready: set[str] = set()
        """Names of those of them that are not ready."""
        self._held: set[str] = set()
        """Names of the members that are held because they are not ready."""
        self._reported_at = 0.0
        self._dirty = asyncio.Event()
        self._until: dict[tuple[str, str], float] = {}
        """End of the drain time of each engine that has left the reports, by name and uid."""
        self._refused: dict[str, tuple[str, str]] = {}
        """Uid of each reported engine that cannot join, and why, by name."""
        self._source: DiscoverySource | None = None
        self._failure = ""
        """Why the source could not be created, or has ended."""
        self._follower: asyncio.Task[None] | None = None
        self._applier: asyncio.Task[None] | None = None

    @property
    def reported(self) -> tuple[Discovered, ...] | None:
        """The engines of the last report; None: there was none."""
        return self._reported

    @property
    def load(self) -> DiscoveryLoad | None:
        """The present gauges; None: no engines are discovered."""
        if self._section is None:
            return None
        members = self._manager.runtime.uids
        source = self._source
        draining = sum((name, uid) in self._until for name, uid in members.items())
        return DiscoveryLoad(
            age_s=None if self._reported is None else max(self._now() - self._reported_at, 0.0),
            members=len(members) - draining,
            draining=draining,
            refused=tuple((name, why) for name, (_, why) in sorted(self._refused.items())),
            failures=(self._failure,) if self._failure else source.failures if source is not None else (),
            findings=dict(source.findings) if source is not None else {},
        )

    @property
    def waiting(self) -> bool:
        """Whether engines are discovered and the first report is not applied yet."""
        return self._section is not None and self._reported is None

    def follow(self, section: Discovery | None, folder: Path) -> None:
        """Follow the source of a cluster file from now on; an unchanged one continues. The last report stays valid
        until the next one. Args: `folder`: where relative paths start."""
        self._dirty.set()
        if (section, folder) == (self._section, self._folder):
            return
        self._section, self._folder = section, folder
        if self._follower is not None:
            self._follower.cancel()
            self._follower = self._source = None
            self._failure = ""
        if section is None:
            self._reported = None
            self._found, self._unready = {}, set()
            self._refused.clear()
            return
        loop = asyncio.get_running_loop()
        self._follower = loop.create_task(self._follow(section, folder))
        self._applier = self._applier or loop.create_task(self._apply_reports())

    async def _follow(self, section: Discovery, folder: Path) -> None:
        while True:
            try:
                self._source, self._failure = source_of(section, folder, self._picker), ""
                await self._source.run(self.report)
            except Exception as error:
                self._failure = _reason(error)
                log_event("error", "discovery_failed", reason=self._failure)
            await asyncio.sleep(_RESTART_S)

    async def close(self) -> None:
        """Stop the source, and apply no more reports."""
        tasks = [task for task in (self._follower, self._applier) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def report(self, engines: tuple[Discovered, ...]) -> None:
        """Take all engines that exist now. Those that have ended get no more requests from here on."""
        self._reported, self._reported_at = engines, self._now()
        self._found = {engine.name: engine if engine.ready else replace(engine, ready=True) for engine in engines}
        self._unready = {engine.name for engine in engines if not engine.ready}
        self._hold()
        self._dirty.set()

    def recheck(self) -> None:
        """Apply the last report to another cluster after a reload."""
        self._hold()
        self._dirty.set()

    async def _apply_reports(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CHECK_S if self._until else None):
                    await self._dirty.wait()
                    await asyncio.sleep(COALESCE_S)
            self._dirty.clear()
            async with self._lock:
                try:
                    await self._apply()
                except Exception as error:  # the next report, or the next check, may succeed
                    log_event("error", "cluster_change_failed", reason=f"{type(error).__name__}: {error}")
                    await asyncio.sleep(_CHECK_S)

    def _staying(self) -> dict[str, Joined]:
        """Return the members that the last report has, too."""
        members, found = self._manager.runtime.control.members, self._found
        return {name: member for name, member in members.items() if found.get(name) == member.engine}

    def _hold(self) -> None:
        """Give no requests to members that are not ready or not reported; start the drain time of the latter."""
        manager, now, members = self._manager, self._now(), self._manager.runtime.control.members
        staying = self._staying()
        drain_s = float(self._section.drain_s) if self._section is not None else 0.0
        for name in members.keys() - staying.keys():
            uid = members[name].engine.uid
            if (name, uid) not in self._until:
                # Another engine with this name proves that this one has ended, so its requests need not be awaited.
                self._until[name, uid] = now + (0.0 if name in self._found else drain_s)
            self._set(name, uid, _GONE, True, now)  # each time: a reload that has begun before has made another cluster
            manager.collect_no_more(name)
        for name, uid in list(self._until):
            if name in staying and staying[name].engine.uid == uid:
                del self._until[name, uid]
                self._set(name, uid, _GONE, False, now)
                manager.collect(name)
        for name in (self._unready | self._held) & staying.keys():
            self._set(name, staying[name].engine.uid, _NOT_READY, name in self._unready, now)
        self._held = self._unready & staying.keys()

    def _set(self, name: str, uid: str, why: str, held: bool, now: float) -> None:
        """Hold or release an engine in the current cluster and in those that still have requests."""
        for runtime in self._manager.clusters:
            if runtime.uids.get(name) == uid:
                availability = runtime.engines[name].availability
                (availability.hold if held else availability.release)(why, now)

    async def _apply(self) -> None:
        """Let engines join and leave so that the members are those of the last report."""
        if self._reported is None or self._section is None:
            return
        self._hold()
        runtime, found = self._manager.runtime, self._found
        staying = self._staying()
        leaving = runtime.control.members.keys() - staying.keys()
        left = tuple(sorted(name for name in leaving if self._drained(name, runtime.uids[name])))
        self._abort_retired()
        taken = staying.keys() | (leaving - set(left))
        new = [found[name] for name in sorted(found.keys() - taken)]
        joined = await asyncio.to_thread(self._admit, staying, new)
        if joined or left:
            await self._change(joined, left)

    def _admit(self, staying: Mapping[str, Joined], new: Sequence[Discovered]) -> tuple[Joined, ...]:
        deployment = self._manager.deployment
        faults = {engine.name: self._manager.exclusion(engine, deployment.settings) for engine in new}
        fine = [engine for engine in new if not faults[engine.name]]
        joined, refused = admitted(deployment.cluster, staying, fine)
        refused |= {name: why for name, why in faults.items() if why}
        uids = {engine.name: engine.uid for engine in new}
        now_refused = {name: (uids[name], why) for name, why in sorted(refused.items())}
        for name, refusal in now_refused.items():
            if self._refused.get(name) != refusal:
                log_event("warning", "engine_refused", instance=name, reason=refusal[1])
        self._refused = now_refused
        return joined

    def _drained(self, name: str, uid: str) -> bool:
        """Whether no request needs an engine of the current cluster any more. After its drain time its calls are
        aborted."""
        runtime = self._manager.runtime
        if not runtime.needs(name):
            return True
        if self._now() < self._until[name, uid]:
            return False
        runtime.engines[name].abort_calls()
        return not runtime.engines[name].in_flight

    def _abort_retired(self) -> None:
        """Abort the calls that clusters of earlier files still have on engines after their drain time."""
        now, current = self._now(), self._manager.runtime
        for name, uid in [key for key, until in self._until.items() if until <= now]:
            for runtime in self._manager.clusters:
                if runtime is not current and runtime.uids.get(name) == uid:
                    runtime.engines[name].abort_calls()
            if current.uids.get(name) != uid and all(
                cluster.uids.get(name) != uid for cluster in self._manager.clusters
            ):
                del self._until[name, uid]

    async def _change(self, joined: tuple[Joined, ...], left: tuple[str, ...]) -> None:
        manager = self._manager
        following, layout = await asyncio.to_thread(self._prepared, joined, left)
        uids = {name: manager.runtime.uids[name] for name in left}
        before = [manager.runtime.control.parts]
        try:
            manager.change(following, layout)
        except InputError as error:  # a request has come back to an engine; the next check tries again
            log_event("warning", "cluster_change_delayed", reason=str(error))
            return
        for name, uid in uids.items():
            if all(cluster.uids.get(name) != uid for cluster in manager.clusters):
                self._until.pop((name, uid), None)
        self._hold()
        names = (("joined", [member.engine.name for member in joined]), ("left", left))
        text = "; ".join(f"{what}: {_shown(which)}" for what, which in names if which)
        log_event("info", "cluster_changed", instances=len(manager.runtime.engines), reason=text)
        await asyncio.to_thread(before.clear)  # freeing the arrays of a large cluster takes milliseconds

    def _prepared(self, joined: tuple[Joined, ...], left: tuple[str, ...]) -> tuple[NextCluster, ClusterLayout]:
        following = self._manager.runtime.control.prepare(joined, left)
        return following, layout_of(following.parts.cluster, self._manager.next_layout)


def _reason(error: Exception) -> str:
    """Return why a source has failed, in one sentence."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"


def _shown(names: Sequence[str]) -> str:
    rest = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + rest
