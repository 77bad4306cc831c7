"""Pods and nodes as the API server sends them, reduced to the fields that discovery uses.

msgspec skips all other fields while it decodes, so managed fields, volumes and probes never take memory. Every field
has a default, because a bookmark is an object with little more than a resource version.
"""

from __future__ import annotations

import msgspec


class ObjectMeta(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """Metadata of any object."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    deletion_timestamp: str | None = None
    """Set while the object is being deleted."""


class ContainerPort(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """A port that a container declares; declaring is optional in Kubernetes."""

    name: str = ""
    container_port: int = 0


class EnvironmentVariable(msgspec.Struct, frozen=True, kw_only=True):
    """A variable of a container; its value is empty if it comes from elsewhere (a secret, a field)."""

    name: str = ""
    value: str = ""


class Container(msgspec.Struct, frozen=True, kw_only=True):
    """A container: what it runs and the ports that it declares."""

    name: str = ""
    image: str = ""
    command: list[str] | None = None
    args: list[str] | None = None
    env: list[EnvironmentVariable] | None = None
    ports: list[ContainerPort] | None = None


class PodSpec(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """What a pod runs, and where."""

    node_name: str = ""
    containers: list[Container] | None = None


class PodCondition(msgspec.Struct, frozen=True, kw_only=True):
    """A condition of a pod; its status is "True", "False" or "Unknown"."""

    type: str = ""
    status: str = ""


class ContainerStatus(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """State of a container."""

    name: str = ""
    restart_count: int = 0


class PodStatus(msgspec.Struct, frozen=True, rename={"pod_ip": "podIP", "container_statuses": "containerStatuses"}):
    """State of a pod as its kubelet reports it."""

    phase: str = ""
    pod_ip: str = ""
    conditions: list[PodCondition] | None = None
    container_statuses: list[ContainerStatus] | None = None


class KubePod(msgspec.Struct, frozen=True, kw_only=True):
    """One pod."""

    metadata: ObjectMeta = ObjectMeta()
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def labels(self) -> dict[str, str]:
        """Its labels."""
        return self.metadata.labels or {}

    @property
    def annotations(self) -> dict[str, str]:
        """Its annotations."""
        return self.metadata.annotations or {}

    def value(self, key: str) -> str:
        """Return the label with this key, else the annotation, else ""."""
        return (self.labels.get(key) or self.annotations.get(key) or "").strip()

    @property
    def containers(self) -> list[Container]:
        """Its containers without init containers, in the order of the manifest."""
        return self.spec.containers or []

    @property
    def ready(self) -> bool:
        """Whether its Ready condition holds and nobody has begun to delete it."""
        holds = any(
            condition.type == "Ready" and condition.status == "True" for condition in self.status.conditions or []
        )
        return holds and self.metadata.deletion_timestamp is None

    def restarts(self, container: str) -> int:
        """Return how often the container with this name was started again."""
        return max(
            (status.restart_count for status in self.status.container_statuses or [] if status.name == container),
            default=0,
        )


class KubeNode(msgspec.Struct, frozen=True, kw_only=True):
    """One node: its name and its labels."""

    metadata: ObjectMeta = ObjectMeta()

    @property
    def labels(self) -> dict[str, str]:
        """Its labels."""
        return self.metadata.labels or {}
