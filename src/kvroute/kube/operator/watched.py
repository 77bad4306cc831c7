"""Objects that the operator watches, reduced to what a reconcile reads, and back to JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec.structs import replace

from kvroute.kube.admission.injection import INIT_CONTAINER
from kvroute.kube.api.objects import ObjectMeta
from kvroute.kube.api.requests import Resource
from kvroute.kube.discovery.labels import CONTAINER, PREFIX
from kvroute.kube.operator.gateway_workload import GATEWAY_CONTAINER
from kvroute.kube.operator.observed import NOT_PULLED, lacks_image
from kvroute.kube.operator.rights import GROVE, NODES, PODS, ROUTERS, TOPOLOGIES, ResourceKind


class WatchedMeta(ObjectMeta, frozen=True, rename="camel", kw_only=True, omit_defaults=True):
    """Metadata with the fields that controllers need."""

    generation: int = 0
    finalizers: list[str] | None = None


class WatchedObject(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """An object of any kind."""

    metadata: WatchedMeta = WatchedMeta()
    spec: dict[str, Any] = {}
    status: dict[str, Any] = {}


def as_json(kind: ResourceKind, obj: WatchedObject) -> dict[str, Any]:
    """Return an object as the API server writes it; lists of built-in kinds leave out `apiVersion` and `kind`."""
    found: dict[str, Any] = msgspec.to_builtins(obj)
    return {"apiVersion": kind.api_version, "kind": kind.kind} | found


def kept_router(obj: WatchedObject) -> WatchedObject:
    """Return a KvRouter or a ClusterTopology as it is, but without annotations."""
    return replace(obj, metadata=replace(obj.metadata, annotations=None))


def kept_node(obj: WatchedObject) -> WatchedObject:
    """Return a node with its labels alone: its status changes every few seconds."""
    return WatchedObject(metadata=replace(obj.metadata, annotations=None))


def kept_pod(obj: WatchedObject) -> WatchedObject:
    """Return a pod with its labels, kvroute's annotations, its node, its readiness, and whether an image is missing."""
    notes = obj.metadata.annotations or {}
    own = {key: value for key, value in notes.items() if key.startswith(PREFIX) and key != CONTAINER}
    conditions = [
        {"type": "Ready", "status": condition.get("status", "")}
        for condition in obj.status.get("conditions") or ()
        if condition.get("type") == "Ready"
    ]
    node = obj.spec.get("nodeName")
    status: dict[str, Any] = {"conditions": conditions} if conditions else {}
    waiting = {"waiting": {"reason": NOT_PULLED[0]}}  # the kubelet's own reason changes with each attempt
    containers = (INIT_CONTAINER, GATEWAY_CONTAINER)
    if unpulled := [{"name": name, "state": waiting} for name in containers if lacks_image(obj.status, name)]:
        status["containerStatuses"] = unpulled
    return WatchedObject(
        metadata=replace(obj.metadata, annotations=own or None, finalizers=None),
        spec={"nodeName": node} if node else {},
        status=status,
    )


WATCHED: tuple[tuple[ResourceKind, Callable[[WatchedObject], WatchedObject]], ...] = (
    (ROUTERS, kept_router),
    (TOPOLOGIES, kept_router),
    *((kind, kept_router) for kind in GROVE),
    (NODES, kept_node),
    (PODS, kept_pod),
)
"""Kinds that the operator watches, and what it keeps of their objects."""


def resource_of(kind: ResourceKind) -> Resource[WatchedObject]:
    """Return where an informer finds the objects of a kind."""
    return Resource(kind.path().rpartition("/")[0], kind.plural, WatchedObject)
