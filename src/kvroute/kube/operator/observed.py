"""What the operator has observed of a cluster: one frozen snapshot, the whole input of a reconcile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvroute.kube.resources import Object

MANAGED_BY = "kvroute-operator"
"""Value of `app.kubernetes.io/managed-by`, and name of the field manager."""
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"


@dataclass(frozen=True, slots=True, order=True)
class Ref:
    """Name of one object."""

    api_version: str
    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}" if self.namespace else f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True)
class OperatorSpec:
    """What the installation gives to the operator."""

    image: str
    """Image of gateways whose KvRouter names none."""
    namespace: str = "kvroute-system"
    pull_secrets: tuple[str, ...] = ()
    """Names of the Secrets with which that image is pulled, in the namespaces of gateways and engines."""
    gateway_role: str = "kvroute-gateway"
    """ClusterRole that every gateway gets in its namespace."""
    nodes_role: str = "kvroute-gateway-nodes"
    """ClusterRole that every gateway gets in the whole cluster: it reads nodes."""
    nodes_binding: str = "kvroute-gateways"
    """ClusterRoleBinding of `nodes_role`, which the operator owns."""


@dataclass(frozen=True, slots=True)
class Observed:
    """One snapshot. Objects are those of the API server; lists may be in any order."""

    settings: OperatorSpec
    routers: tuple[Object, ...] = ()
    topologies: tuple[Object, ...] | None = None
    """kvroute's ClusterTopologies; None: their CustomResourceDefinition is not installed."""
    grove_topologies: tuple[Object, ...] | None = None
    """Grove's ClusterTopologies and ClusterTopologyBindings; None: neither is installed."""
    nodes: tuple[Object, ...] = ()
    pods: tuple[Object, ...] = ()
    """Pods of all namespaces that could be engines, and those of gateways."""
    owned: tuple[Object, ...] = ()
    """Objects of the kinds that the operator makes which have its label, or a name that it would use."""
    service_monitors: bool = False
    """Whether the CustomResourceDefinition ServiceMonitor is installed."""
    idle: frozenset[str] = field(default_factory=frozenset)
    """UIDs of pods that have no request in flight, as far as that is known."""


def ref_of(obj: Object) -> Ref:
    """Return the name of an object."""
    metadata = obj["metadata"]
    return Ref(obj["apiVersion"], obj["kind"], metadata.get("namespace", ""), metadata["name"])


def labels_of(obj: Object) -> Mapping[str, str]:
    """Return the labels of an object."""
    return obj["metadata"].get("labels") or {}


def annotations_of(obj: Object) -> Mapping[str, str]:
    """Return the annotations of an object."""
    return obj["metadata"].get("annotations") or {}


def is_ready(pod: Object) -> bool:
    """Return True if a pod is ready and does not end."""
    if pod["metadata"].get("deletionTimestamp"):
        return False
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(condition.get("type") == "Ready" and condition.get("status") == "True" for condition in conditions)


NOT_PULLED = ("ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName")
"""Reasons of the kubelet why a container waits for its image."""


def lacks_image(status: Object, container: str) -> bool:
    """Return True if, by the status of a pod, the image of a container or an init container cannot be pulled."""
    for container_status in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        if container_status.get("name") == container:
            return ((container_status.get("state") or {}).get("waiting") or {}).get("reason") in NOT_PULLED
    return False


def owned_by(obj: Object, owner: Object) -> bool:
    """Return True if `owner` is an owner of an object."""
    references = obj["metadata"].get("ownerReferences") or ()
    return any(reference.get("uid") == owner["metadata"].get("uid") for reference in references)
