"""Caches of everything that the operator watches, and the snapshot that a reconcile takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import httpx2

from kvroute.kube.admission.validation import AdmissionView
from kvroute.kube.api.informer import ABSENT, DEFAULT_TIMING, Informer, Timing
from kvroute.kube.api.requests import Selection
from kvroute.kube.api.store import ObjectStore
from kvroute.kube.operator.api_calls import ApiCalls
from kvroute.kube.operator.gateway_workload import GATEWAY_LABEL
from kvroute.kube.operator.observed import Observed, OperatorSpec
from kvroute.kube.operator.pod_labels import WRITTEN
from kvroute.kube.operator.rights import BINDINGS, GROVE, NODES, OWNED, PODS, ROUTERS, TOPOLOGIES, ResourceKind
from kvroute.kube.operator.routers import read_catalog
from kvroute.kube.operator.watched import WATCHED, WatchedObject, as_json, resource_of
from kvroute.kube.resources import Object
from kvroute.kube.resources.engines import selects

_PARALLEL_READS = 8
ABSENT_S = 60.0
"""Highest pause between two looks for a kind that need not be installed."""


@dataclass(frozen=True, slots=True)
class _Followed:
    """One kind with its cache."""

    kind: ResourceKind
    store: ObjectStore[WatchedObject]
    informer: Informer[WatchedObject]

    @property
    def absent(self) -> bool:
        """Whether the server has no such kind."""
        return self.informer.refused == ABSENT

    @property
    def known(self) -> bool:
        return self.store.synced or self.absent

    def objects(self) -> tuple[Object, ...]:
        return tuple(as_json(self.kind, obj) for _, obj in sorted(self.store.objects.items()))


class WatchedObjects:
    """Follows KvRouters, topologies, nodes and pods of the whole cluster."""

    def __init__(
        self,
        connect: Callable[[], httpx2.AsyncClient],
        on_change: Callable[[], None],
        timing: Timing = DEFAULT_TIMING,
        absent_s: float = ABSENT_S,
    ) -> None:
        """
        Args:
            on_change: called after each change of what is kept.
            absent_s: highest pause between two looks for a kind that need not be installed.
        """
        self._followed: dict[ResourceKind, _Followed] = {}
        for kind, keep in WATCHED:
            store = ObjectStore(keep)
            pauses = replace(timing, absent_max_s=absent_s) if kind in GROVE else timing
            informer = Informer(connect, resource_of(kind), Selection(), store, lambda _: on_change(), pauses)
            self._followed[kind] = _Followed(kind, store, informer)

    async def run(self) -> None:
        """Follow the server until cancelled."""
        async with asyncio.TaskGroup() as group:
            for followed in self._followed.values():
                group.create_task(followed.informer.run())

    @property
    def complete(self) -> bool:
        """Whether each kind has been listed, or does not exist."""
        return self._known(*self._followed)

    def view(self) -> AdmissionView | None:
        """Return what admission checks read; None until it is complete."""
        if not self._known(ROUTERS, TOPOLOGIES, *GROVE):
            return None
        routers = self._followed[ROUTERS].objects()
        observed = Observed(OperatorSpec(""), routers, self._topologies(), self._grove())
        return AdmissionView(read_catalog(observed), routers)

    async def snapshot(self, calls: ApiCalls, settings: OperatorSpec, *, service_monitors: bool) -> Observed:
        """Return everything that a reconcile needs. Objects of gateways are read by name, from the server itself."""
        routers = self._followed[ROUTERS].objects()
        pods = self._pods(routers)
        owned = await _owned(calls, settings, routers, service_monitors)
        return Observed(
            settings=settings,
            routers=routers,
            topologies=self._topologies(),
            grove_topologies=self._grove(),
            nodes=self._followed[NODES].objects(),
            pods=pods,
            owned=owned,
            service_monitors=service_monitors,
        )

    def _known(self, *kinds: ResourceKind) -> bool:
        return all(self._followed[kind].known for kind in kinds)

    def _pods(self, routers: Iterable[Object]) -> tuple[Object, ...]:
        """Return pods that a KvRouter selects, those of gateways, and those that have labels of the operator."""
        listed = tuple(routers)
        found = []
        for (namespace, _), pod in sorted(self._followed[PODS].store.objects.items()):
            labels = pod.metadata.labels or {}
            kept = WRITTEN in (pod.metadata.annotations or {}) or GATEWAY_LABEL.items() <= labels.items()
            if kept or any(selects(router, namespace, labels) for router in listed):
                found.append(as_json(PODS, pod))
        return tuple(found)

    def _topologies(self) -> tuple[Object, ...] | None:
        followed = self._followed[TOPOLOGIES]
        return None if followed.absent else followed.objects()

    def _grove(self) -> tuple[Object, ...] | None:
        installed = [self._followed[kind] for kind in GROVE if not self._followed[kind].absent]
        return tuple(obj for followed in installed for obj in followed.objects()) if installed else None


async def _owned(
    calls: ApiCalls, settings: OperatorSpec, routers: Iterable[Object], service_monitors: bool
) -> tuple[Object, ...]:
    """Read the objects with names that the operator uses, a few at a time."""
    kinds = [kind for kind in OWNED if service_monitors or kind.kind != "ServiceMonitor"]
    names = [(BINDINGS, "", settings.nodes_binding)]
    for router in routers:
        metadata = router["metadata"]
        for kind in kinds:
            name = f"{metadata['name']}-cluster" if kind.kind == "ConfigMap" else metadata["name"]
            names.append((kind, metadata["namespace"], name))
    limit = asyncio.Semaphore(_PARALLEL_READS)

    async def read(kind: ResourceKind, namespace: str, name: str) -> Object | None:
        async with limit:
            return await calls.get(kind, namespace, name)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(read(*name)) for name in names]
    found = [task.result() for task in tasks]
    return tuple(obj for obj in found if obj is not None)
