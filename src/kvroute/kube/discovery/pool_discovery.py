"""Engines of an InferencePool, as its pods come and go, and as the pool itself changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from kvroute.kube.api.client import Access
from kvroute.kube.api.inference_pool import InferencePool, Members, members_of, not_installed
from kvroute.kube.api.informer import Informer
from kvroute.kube.api.requests import POOLS, Selection
from kvroute.kube.api.store import Key, ObjectStore
from kvroute.kube.discovery.engines import DiscoverySpec, KubernetesDiscovery
from kvroute.kube.discovery.pods import Effect, PodFinding
from kvroute.kube.discovery.pool_picker import PickerCheck, Services
from kvroute.types import InputError, OwnPicker
from kvroute.types.discovered import Discovered, Reporter

_NOT_FOUND = 404


@dataclass(slots=True, eq=False)
class _Followed:
    """The pods of one selector, and their ports."""

    discovery: KubernetesDiscovery
    engines: tuple[Discovered, ...] = ()
    findings: tuple[PodFinding, ...] = ()
    task: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """Report nothing more."""
        if self.task is not None:
            self.task.cancel()


class PoolDiscovery:
    """A `DiscoverySource` that follows one InferencePool.

    Each selector with its ports has a `KubernetesDiscovery` of its own. After a change of the pool the former one goes
    on until the new one reports, and for `handover_s` after that: its engines are reported beside the new ones.
    """

    def __init__(
        self,
        access: Access,
        options: DiscoverySpec,
        pool: str,
        own: OwnPicker | None = None,
        on_findings: Callable[[tuple[PodFinding, ...]], None] = lambda _: None,
    ) -> None:
        """
        Args:
            options: of the pods; the pool gives their labels and ports.
            pool: name, in the namespace of the options.
            own: this picker, which the pool should name; None: gateways need not ask this process.
            on_findings: called with all findings whenever they may have changed.

        Raises:
            InputError: there is no usable kubeconfig.
        """
        self._access, self._on_findings = access, on_findings
        namespace = options.selection(access).namespace
        self._options = replace(options, namespace=namespace)
        self._key: Key = (namespace, pool)
        self._pools: ObjectStore[InferencePool] = ObjectStore()
        self._changed = asyncio.Event()
        selection = Selection(namespace, name=pool)
        self._informer = Informer(
            access.connect, POOLS, selection, self._pools, lambda _: self._changed.set(), options.timing
        )
        self._picker = PickerCheck(Services(access, namespace), own, self._tell)
        self._faults: tuple[InputError, ...] = ()
        """Why the pool has no engines."""
        self._members: Members | None = None
        self._serving: _Followed | None = None
        """What the pool selects; None: nothing."""
        self._next: _Followed | None = None
        """Has not reported yet, and takes the place of `_serving` when it does."""
        self._former: _Followed | None = None
        """What the pool has selected before, during the handover."""

    @property
    def failures(self) -> tuple[str, ...]:
        """Why the pool, its pods or nodes are not up to date, one sentence each; empty while the server answers."""
        why = str(not_installed()) if self._informer.refused == _NOT_FOUND else self._informer.failure
        current = self._next or self._serving
        pods = current.discovery.failures if current is not None else ()
        return (f"{POOLS.plural}: {why}", *pods) if why else pods

    async def run(self, report: Reporter) -> None:
        """Report all engines when the first lists are there, and after each change, until cancelled. A pool that does
        not exist, or that selects nothing usable, has no engines."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._informer.run())
            await self._changed.wait()
            members = self._read(tasks)
            self._follow(members, tasks, report)
            while True:
                await self._changed.wait()
                before, members = members, self._read(tasks)
                if members != before:
                    self._follow(members, tasks, report)

    def _read(self, tasks: asyncio.TaskGroup) -> Members | None:
        """Return the endpoints of the pool as it is now; None: it has none."""
        self._changed.clear()
        pool = self._pools.objects.get(self._key)
        members, self._faults = None, ()
        try:
            if pool is None:
                raise InputError("it does not exist", where="metadata.name", hint="create it")
            members = members_of(pool)
        except InputError as fault:
            self._faults = (fault,)
        self._picker.follow(pool.spec.endpoint_picker_ref if pool is not None else None, tasks)
        self._tell()
        return members

    def _follow(self, members: Members | None, tasks: asyncio.TaskGroup, report: Reporter) -> None:
        """Follow other pods or ports; None: there are none."""
        ending = [self._next] if members is not None else [self._next, self._serving, self._former]
        for followed in filter(None, ending):
            followed.stop()
        self._next = None
        if members is None:
            self._serving = self._former = None
            report(())
            self._tell()
            return
        options = replace(self._options, selector=members.labels, ports=members.ports)
        followed = _Followed(KubernetesDiscovery(self._access, options, lambda found: self._found(followed, found)))
        self._next = followed

        def take(engines: tuple[Discovered, ...]) -> None:
            followed.engines = engines
            if followed is self._next:
                self._take_over(followed, tasks, report)
            report(self._engines())

        followed.task = tasks.create_task(followed.discovery.run(take))

    def _take_over(self, followed: _Followed, tasks: asyncio.TaskGroup, report: Reporter) -> None:
        """Make what has reported for the first time current."""
        if self._former is not None:
            self._former.stop()
        self._former, self._serving, self._next = self._serving, followed, None
        if self._former is not None:
            tasks.create_task(self._end_handover(self._former, report))

    async def _end_handover(self, former: _Followed, report: Reporter) -> None:
        await asyncio.sleep(self._options.handover_s)
        if former is self._former:
            former.stop()
            self._former = None
            report(self._engines())

    def _engines(self) -> tuple[Discovered, ...]:
        """Return the engines of the pool, and during a handover the former ones that have neither name nor address of
        one of them."""
        current = self._serving.engines if self._serving is not None else ()
        names, urls = {engine.name for engine in current}, {engine.endpoint.url for engine in current}
        former = [
            engine
            for engine in (self._former.engines if self._former is not None else ())
            if engine.name not in names and engine.endpoint.url not in urls
        ]
        return tuple(sorted((*current, *former), key=lambda engine: engine.name))

    def _found(self, followed: _Followed, findings: tuple[PodFinding, ...]) -> None:
        followed.findings = findings
        self._tell()

    def _tell(self) -> None:
        pods = self._serving.findings if self._serving is not None else ()
        of_pool = (*self._findings("left out", self._faults), *self._findings("warning", self._picker.faults))
        self._on_findings((*of_pool, *pods))

    def _findings(self, effect: Effect, faults: Iterable[InputError]) -> Iterable[PodFinding]:
        name = f"InferencePool {'/'.join(self._key)}"
        for fault in faults:
            yield PodFinding(pod=name, effect=effect, field=fault.where, what=fault.what, hint=fault.hint)
