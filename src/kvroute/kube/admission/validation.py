"""Validation: which KvRouters, ClusterTopologies and engine pods are rejected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvroute.kube.admission.review import AdmissionRequest, ReviewResponse, rejection, subject
from kvroute.kube.admission.router_checks import FileCheck, router_problems
from kvroute.kube.discovery.labels import PREFIX, ROLE
from kvroute.kube.resources import GROUP, ClusterTopologySpec, Object, name_of, read_spec
from kvroute.kube.resources.engines import ROLES
from kvroute.kube.resources.resolution import FIELD, Catalog
from kvroute.topology import parse
from kvroute.types import InputError, InputErrors
from kvroute_engine.files.form import nearest

CONSTRAINT_ANNOTATION = f"{PREFIX}kv-cache-transfer-topology"
"""Reserved: a constraint belongs to a KvRouter, and an engine that carries one is rejected."""
_WORKLOADS = frozenset({"Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "Job", "LeaderWorkerSet"})


@dataclass(frozen=True, slots=True)
class AdmissionView:
    """What checks need to know about the cluster."""

    catalog: Catalog = field(default_factory=Catalog)
    routers: Sequence[Object] = field(default_factory=tuple)
    """All KvRouters."""
    check_file: FileCheck = parse
    """Reads the text of a cluster file, and raises InputErrors for what a gateway would refuse."""


def validate(request: AdmissionRequest, view: AdmissionView) -> ReviewResponse:
    """Return whether an object may be created, changed or deleted."""
    kind = (request.kind.group, request.kind.kind)
    found: Sequence[InputError] = ()
    try:
        if request.sub_resource:
            return ReviewResponse()
        if kind == (GROUP, "KvRouter") and request.operation != "DELETE":
            found = tuple(router_problems(request, view.catalog, view.check_file))
        elif kind == (GROUP, "ClusterTopology"):
            found = tuple(_topology_problems(request, view.routers))
        elif request.operation != "DELETE":
            found = tuple(_engine_problems(subject(request)))
    except InputError as error:
        return rejection(error)
    return rejection(InputErrors(found)) if found else ReviewResponse()


def _topology_problems(request: AdmissionRequest, routers: Sequence[Object]) -> Iterator[InputError]:
    """Yield faults of a ClusterTopology, and KvRouters that would lose the level that they use."""
    kept: set[str] = set()
    if request.operation != "DELETE":
        spec = read_spec(subject(request), ClusterTopologySpec)
        kept = {level.domain for level in spec.levels}
        for attribute, title in (("domain", "domain"), ("label_key", "labelKey")):
            yield from _repeated([getattr(level, attribute) for level in spec.levels], title)
    name = str((subject(request).get("metadata") or {}).get("name") or "")
    for router in routers:
        transfer = (router.get("spec") or {}).get("kvCacheTransferTopology") or {}
        if transfer.get("clusterTopologyName") == name and transfer.get("level") not in kept:
            what = f"the KvRouter {name_of(router)!r} uses the level {transfer.get('level')!r} of this ClusterTopology"
            fix = f"change {FIELD} of that KvRouter first"
            yield InputError(what, where="spec.levels" if kept else "metadata.name", hint=fix)


def _repeated(values: Sequence[str], title: str) -> Iterator[InputError]:
    for index, value in enumerate(values):
        if value in values[:index]:
            what = f"{value!r} is the {title} of two levels"
            yield InputError(what, where=f"spec.levels[{index}].{title}", hint="give each level one of its own")


def _engine_problems(obj: Object) -> Iterator[InputError]:
    """Yield faults of a pod, or of the pod template of a workload."""
    if obj.get("kind") == "Pod":
        yield from _pod_problems(obj.get("metadata") or {}, "metadata", name_of(obj))
    elif obj.get("kind") in _WORKLOADS:
        template = ((obj.get("spec") or {}).get("template") or {}).get("metadata") or {}
        yield from _pod_problems(template, "spec.template.metadata", name_of(obj))
        if CONSTRAINT_ANNOTATION in ((obj.get("metadata") or {}).get("annotations") or {}):
            yield _misplaced("metadata", f"{obj['kind']} {name_of(obj)!r}")


def _pod_problems(metadata: dict[str, Any], where: str, name: str) -> Iterator[InputError]:
    role = (metadata.get("labels") or {}).get(ROLE)
    if role is not None and role not in ROLES:
        yield InputError(f"the role {role!r} is unknown", where=f"{where}.labels[{ROLE}]", hint=nearest(role, ROLES))
    if CONSTRAINT_ANNOTATION in (metadata.get("annotations") or {}):
        yield _misplaced(where, f"{role or 'a'} pod {name!r}")


def _misplaced(where: str, what: str) -> InputError:
    place = f"{where}.annotations[{CONSTRAINT_ANNOTATION}]"
    fix = f"remove it, and set {FIELD} of the KvRouter that selects these engines"
    return InputError(f"a constraint belongs to a gateway, not to the {what}", where=place, hint=fix)
