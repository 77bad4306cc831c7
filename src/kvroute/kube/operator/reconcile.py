"""The reconcile: a snapshot of the cluster in, the changes that it needs out. Pure, and the same for equal inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvroute.kube.discovery.labels import PREFIX
from kvroute.kube.operator.actions import Action, Apply, Delete, PatchMetadata, up_to_date
from kvroute.kube.operator.conditions import StatusCounts, engine_counts, gateway_pods, status_changes
from kvroute.kube.operator.findings import labelling, resolution, router_readiness
from kvroute.kube.operator.gateway_objects import OPTIONAL, nodes_binding, wanted_objects
from kvroute.kube.operator.observed import (
    MANAGED_BY,
    MANAGED_BY_LABEL,
    Observed,
    Ref,
    is_ready,
    labels_of,
    owned_by,
    ref_of,
)
from kvroute.kube.operator.pod_labels import PodTopology, label_changes
from kvroute.kube.operator.role_switch import SwitchLimits, switch_roles
from kvroute.kube.operator.routers import RouterView, pod_topologies, read_catalog, read_router
from kvroute.kube.resources import KvRouterSpec, Object, name_of

FINALIZER = f"{PREFIX}topology-labels"
"""Keeps a KvRouter until the labels of its engine pods are removed."""


def reconcile(observed: Observed, now: float) -> tuple[Action, ...]:
    """Return the changes that bring the cluster nearer to what KvRouters ask for, in the order of their execution.

    An action depends on no other action of the same list, so the execution may stop anywhere and start again with a new
    snapshot. When nothing is left to do the list is empty.

    Args:
        observed: the snapshot.
        now: Unix time in seconds.
    """
    catalog = read_catalog(observed)
    routers = [read_router(router, catalog, observed.pods) for router in sorted(observed.routers, key=name_of)]
    nodes = {node["metadata"]["name"]: node for node in observed.nodes}
    topologies = pod_topologies(observed.pods, routers)
    actions: list[Action] = [*_finalizers(routers, topologies)]
    actions += _binding(routers, observed)
    for wanted in topologies:
        actions += label_changes(wanted, nodes)
    for router in routers:
        if not router.ends:
            actions += _router_actions(router, observed, topologies, nodes, now)
    return tuple(_one_patch_per_object(actions))


def _finalizers(routers: Sequence[RouterView], topologies: Sequence[PodTopology]) -> Iterator[Action]:
    """Add the finalizer to KvRouters with a constraint; remove it from one that ends when its pods have no label to
    remove."""
    pending = {ref_of(topology.pod) for topology in topologies if topology.unwanted}
    for router in routers:
        metadata = router.obj["metadata"]
        present = tuple(metadata.get("finalizers") or ())
        needed = not router.ends and router.spec is not None and router.spec.kv_cache_transfer_topology is not None
        waits = router.ends and any(ref_of(pod) in pending for pod in router.pods)
        wanted = tuple(finalizer for finalizer in present if finalizer != FINALIZER)
        if needed or (waits and FINALIZER in present):
            wanted = present if FINALIZER in present else (*present, FINALIZER)
        if wanted != present and (needed or router.ends or router.spec is not None):
            yield PatchMetadata(ref_of(router.obj), metadata.get("resourceVersion", ""), finalizers=wanted)


def _binding(routers: Sequence[RouterView], observed: Observed) -> Iterator[Action]:
    """Keep the ClusterRoleBinding of all gateways; it is made for the first KvRouter. It gives no rights to a
    ServiceAccount that belongs to others."""
    own = (router.obj for router in routers if not router.ends and not _foreign_account(router, observed))
    wanted = nodes_binding(own, observed.settings)
    actual = next((obj for obj in observed.owned if ref_of(obj) == ref_of(wanted)), None)
    if actual is None:
        if wanted["subjects"]:
            yield Apply(wanted)
    elif _managed(actual) and not up_to_date(wanted, actual):
        yield Apply(wanted)


def _managed(obj: Object) -> bool:
    return labels_of(obj).get(MANAGED_BY_LABEL) == MANAGED_BY


def _foreign_account(router: RouterView, observed: Observed) -> bool:
    metadata = router.obj["metadata"]
    name = Ref("v1", "ServiceAccount", metadata["namespace"], metadata["name"])
    return any(ref_of(obj) == name and not owned_by(obj, router.obj) for obj in observed.owned)


def _router_actions(
    router: RouterView,
    observed: Observed,
    topologies: Sequence[PodTopology],
    nodes: Mapping[str, Object],
    now: float,
) -> Iterator[Action]:
    taken: list[Ref] = []
    if router.spec is not None and not router.problem:
        yield from _objects(router, router.spec, observed, taken)
        limits = SwitchLimits(router.spec.drain_seconds, observed.idle)
        yield from switch_roles(router.pods, limits, now)
    gateways = gateway_pods(router.obj, observed.pods)
    engines = engine_counts(router.pods)
    chosen = {ref_of(pod) for pod in router.pods}
    missing = {
        topology.pod["metadata"]["name"]: topology.missing(nodes)
        for topology in topologies
        if ref_of(topology.pod) in chosen
    }
    findings = [
        router_readiness(router, gateways, observed.settings, taken),
        resolution(router),
        labelling(router, missing),
    ]
    labelled = sum(not levels for levels in missing.values()) if router.resolved is not None else 0
    counts = StatusCounts(sum(map(is_ready, gateways)), engines, labelled)
    yield from status_changes(router.obj, findings, counts, now)


def _objects(router: RouterView, spec: KvRouterSpec, observed: Observed, taken: list[Ref]) -> Iterator[Action]:
    """Apply what is absent or different, and delete own objects that are no longer wanted.

    If an object of a wanted name belongs to others, it stays as it is, and nothing is applied: a gateway must not run
    with another one's configuration, service account or address. `taken` gets these names.
    """
    actual = {ref_of(obj): obj for obj in observed.owned}
    wanted = wanted_objects(router.obj, spec, router.resolved, observed)
    binding = ref_of(nodes_binding((), observed.settings))
    present = [(obj, actual.get(ref_of(obj))) for obj in wanted]
    taken += [ref_of(obj) for obj, found in present if found is not None and not owned_by(found, router.obj)]
    taken += [ref for ref, obj in actual.items() if ref == binding and not _managed(obj)]
    if taken:
        return
    for obj, found in present:
        if found is None or not up_to_date(obj, found):
            yield Apply(obj)
    kept = {ref_of(obj) for obj in wanted}
    for ref, obj in sorted(actual.items()):
        ours = owned_by(obj, router.obj) and _managed(obj)
        if ours and ref not in kept and ref.kind in OPTIONAL:
            yield Delete(ref, obj["metadata"].get("uid", ""))


def _one_patch_per_object(actions: Sequence[Action]) -> Iterator[Action]:
    """Join patches of one object: the second one would fail, because the first one changes the object."""
    joined: dict[Ref, PatchMetadata] = {}
    for action in actions:
        if isinstance(action, PatchMetadata):
            first = joined.get(action.ref)
            joined[action.ref] = action if first is None else _joined(first, action)
    for action in actions:
        if not isinstance(action, PatchMetadata):
            yield action
        elif action.ref in joined:
            yield joined.pop(action.ref)


def _joined(first: PatchMetadata, second: PatchMetadata) -> PatchMetadata:
    return PatchMetadata(
        first.ref,
        first.resource_version,
        {**(first.labels or {}), **(second.labels or {})} or None,
        {**(first.annotations or {}), **(second.annotations or {})} or None,
        second.finalizers if second.finalizers is not None else first.finalizers,
    )
