"""KvRouters of a snapshot: their specs, what their constraints mean, and the engine pods that they select."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvroute.kube.operator.observed import Observed, Ref, labels_of, ref_of
from kvroute.kube.operator.pod_labels import PodTopology, merged_levels
from kvroute.kube.resources import (
    ClusterTopologySpec,
    KvRouterSpec,
    Object,
    TopologyLevel,
    name_of,
    read_grove_levels,
    read_spec,
)
from kvroute.kube.resources.engines import selects
from kvroute.kube.resources.resolution import Catalog, ResolvedTopology, resolve
from kvroute.types import InputError


@dataclass(frozen=True, slots=True)
class RouterView:
    """A KvRouter and what is known about it."""

    obj: Object
    spec: KvRouterSpec | None
    resolved: ResolvedTopology | None
    problem: str
    """Why the spec or its constraint cannot be used; empty: they can."""
    pods: tuple[Object, ...]

    @property
    def ends(self) -> bool:
        """Whether it is being deleted."""
        return bool(self.obj["metadata"].get("deletionTimestamp"))

    @property
    def unresolved(self) -> bool:
        """Whether it is not known which labels its pods should have."""
        constrained = self.spec is None or self.spec.kv_cache_transfer_topology is not None
        return constrained and self.resolved is None and not self.ends


def read_catalog(observed: Observed) -> Catalog:
    """Return the topologies of a snapshot; one that cannot be read counts as absent."""
    own = None if observed.topologies is None else dict(_topologies(observed.topologies, grove=False))
    grove = None if observed.grove_topologies is None else dict(_topologies(observed.grove_topologies, grove=True))
    return Catalog(own, grove)


def _topologies(objects: Sequence[Object], *, grove: bool) -> Iterator[tuple[str, ClusterTopologySpec]]:
    for obj in sorted(objects, key=name_of):
        try:
            yield obj["metadata"]["name"], read_grove_levels(obj) if grove else read_spec(obj, ClusterTopologySpec)
        except InputError:
            continue


def read_router(router: Object, catalog: Catalog, pods: Sequence[Object]) -> RouterView:
    """Return a KvRouter with its pods; faults become `problem`."""
    chosen = (pod for pod in pods if selects(router, pod["metadata"].get("namespace", ""), labels_of(pod)))
    engines = tuple(sorted(chosen, key=name_of))
    try:
        spec = read_spec(router, KvRouterSpec)
    except InputError as error:
        return RouterView(router, None, None, str(error), engines)
    try:
        transfer = spec.kv_cache_transfer_topology
        return RouterView(router, spec, resolve(transfer, catalog) if transfer else None, "", engines)
    except InputError as error:
        return RouterView(router, spec, None, str(error), engines)


def pod_topologies(pods: Sequence[Object], routers: Sequence[RouterView]) -> list[PodTopology]:
    """Return what pods should have, in the order of their names. A pod of a KvRouter that cannot be resolved is left
    out: its labels stay as they are."""
    levels: dict[Ref, list[Sequence[TopologyLevel]]] = {}
    unknown: set[Ref] = set()
    for router in routers:
        for pod in router.pods:
            if router.unresolved:
                unknown.add(ref_of(pod))
            elif router.resolved is not None and not router.ends:
                levels.setdefault(ref_of(pod), []).append(router.resolved.levels)
    return [
        PodTopology(pod, merged_levels(levels.get(ref_of(pod), [])))
        for pod in sorted(pods, key=name_of)
        if ref_of(pod) not in unknown and not pod["metadata"].get("deletionTimestamp")
    ]
