"""Resources that the API server has: built-in ones in a table, custom ones from their definitions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.kube.apiserver.status import Object, Where

ALL_VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")
CUSTOM_VERBS = ("delete", "deletecollection", "get", "list", "patch", "create", "update", "watch")
READ_WRITE = ("get", "patch", "update")

Key = tuple[str, str, str, str]
"""Group, plural, namespace ("" for a cluster resource) and name of a stored object."""


@dataclass(frozen=True, slots=True)
class Sub:
    """A subresource as discovery lists it."""

    name: str
    kind: str
    verbs: tuple[str, ...] = READ_WRITE
    group: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class Resource:
    """One version of a resource."""

    group: str
    version: str
    kind: str
    plural: str
    namespaced: bool = True
    verbs: tuple[str, ...] = ALL_VERBS
    subresources: tuple[Sub, ...] = ()
    short_names: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    storage_hash: str = ""
    singular: str = ""
    list_kind: str = ""
    generation: bool = False
    """Whether the server keeps metadata.generation."""
    created_by_put: bool = False
    schema: Object | None = None
    """The OpenAPI schema of a custom resource; None for a built-in one."""
    printer_columns: tuple[Object, ...] = ()
    selectable: tuple[str, ...] = ()
    scale: Object | None = field(default=None, hash=False)
    warning: str = ""
    """Warning of every request to a deprecated version."""
    storage_version: str = ""

    @property
    def api_version(self) -> str:
        """Return apiVersion of the objects."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def custom(self) -> bool:
        """Return whether a definition made the resource."""
        return self.schema is not None

    @property
    def stored_in(self) -> tuple[str, str]:
        """Return group and plural of the storage: both Event APIs have one."""
        return ("", "events") if self.plural == "events" else (self.group, self.plural)

    def where(self, name: str = "") -> Where:
        """Return what answers name: resource and object."""
        return Where(self.group, self.plural, name)

    def of_kind(self, name: str = "") -> Where:
        """Return what answers about invalid objects name: kind and object."""
        return Where("" if self.plural == "events" else self.group, self.kind, name)

    def key(self, namespace: str, name: str) -> Key:
        """Return the storage key of an object."""
        return (*self.stored_in, namespace if self.namespaced else "", name)

    def sub(self, name: str) -> Sub | None:
        """Return a subresource, or None."""
        return next((sub for sub in self.subresources if sub.name == name), None)


POD_SUBRESOURCES = (
    Sub("attach", "PodAttachOptions", ("create", "get")),
    Sub("binding", "Binding", ("create",)),
    Sub("ephemeralcontainers", "Pod"),
    Sub("eviction", "Eviction", ("create",), "policy", "v1"),
    Sub("exec", "PodExecOptions", ("create", "get")),
    Sub("log", "Pod", ("get",)),
    Sub("portforward", "PodPortForwardOptions", ("create", "get")),
    Sub("proxy", "PodProxyOptions", ("create", "delete", "get", "patch", "update")),
    Sub("resize", "Pod"),
    Sub("status", "Pod"),
)
SCALE = Sub("scale", "Scale", READ_WRITE, "autoscaling", "v1")
NO_COLLECTION = tuple(verb for verb in ALL_VERBS if verb != "deletecollection")
RBAC = "rbac.authorization.k8s.io"
ADMISSION = "admissionregistration.k8s.io"
FLOW = "flowcontrol.apiserver.k8s.io"
CRDS = "apiextensions.k8s.io"


def workload(kind: str, plural: str, short: str, storage_hash: str, scaled: bool = True) -> Resource:
    """Return a resource of group apps that runs pods."""
    subresources = (*((SCALE,) if scaled else ()), Sub("status", kind))
    return Resource(
        "apps", "v1", kind, plural, subresources=subresources, short_names=(short,), categories=("all",),
        storage_hash=storage_hash, generation=True,
    )  # fmt: skip


def core(kind: str, plural: str, short: str = "", storage_hash: str = "", status: bool = False) -> Resource:
    """Return a namespaced resource of the core group."""
    subresources = (Sub("status", kind),) if status else ()
    short_names = (short,) if short else ()
    return Resource(
        "", "v1", kind, plural, subresources=subresources, short_names=short_names, storage_hash=storage_hash
    )


def cluster(group: str, kind: str, plural: str, status: bool = False, generation: bool = True) -> Resource:
    """Return a cluster resource of a group."""
    subresources = (Sub("status", kind),) if status else ()
    return Resource(group, "v1", kind, plural, False, subresources=subresources, generation=generation)


BUILT_IN = (
    Resource("", "v1", "Binding", "bindings", verbs=("create",)),
    core("ConfigMap", "configmaps", "cm", "qFsyl6wFWjQ="),
    Resource("", "v1", "Event", "events", short_names=("ev",), storage_hash="r2yiGXH7wu8=", created_by_put=True),
    core("LimitRange", "limitranges", "limits"),
    Resource(
        "", "v1", "Namespace", "namespaces", False, NO_COLLECTION,
        (Sub("finalize", "Namespace", ("update",)), Sub("status", "Namespace")), ("ns",), storage_hash="Q3oi5N2YM8M=",
    ),
    Resource(
        "", "v1", "Node", "nodes", False, ALL_VERBS,
        (Sub("proxy", "NodeProxyOptions", ("create", "delete", "get", "patch", "update")), Sub("status", "Node")),
        ("no",), storage_hash="XwShjMxG9Fs=",
    ),
    Resource(
        "", "v1", "Pod", "pods", True, ALL_VERBS, POD_SUBRESOURCES, ("po",), ("all",), "xPOwRZ+Yhw8=", generation=True
    ),
    core("ResourceQuota", "resourcequotas", "quota", status=True),
    core("Secret", "secrets"),
    Resource(
        "", "v1", "ServiceAccount", "serviceaccounts", True, ALL_VERBS,
        (Sub("token", "TokenRequest", ("create",), "authentication.k8s.io", "v1"),), ("sa",),
        storage_hash="pbx9ZvyFpBE=",
    ),
    core("Service", "services", "svc", status=True),
    Resource(
        "apps", "v1", "ControllerRevision", "controllerrevisions", storage_hash="85nkx63pcBU="
    ),
    workload("DaemonSet", "daemonsets", "ds", "dd7pWHUlMKQ=", scaled=False),
    workload("Deployment", "deployments", "deploy", "8aSe+NMegvE="),
    workload("ReplicaSet", "replicasets", "rs", "P1RzHs8/mWQ="),
    workload("StatefulSet", "statefulsets", "sts", "H+vl74LkKdo="),
    Resource("events.k8s.io", "v1", "Event", "events", short_names=("ev",), storage_hash="r2yiGXH7wu8=",
             created_by_put=True),
    Resource("authentication.k8s.io", "v1", "SelfSubjectReview", "selfsubjectreviews", False, ("create",)),
    Resource("authentication.k8s.io", "v1", "TokenReview", "tokenreviews", False, ("create",)),
    Resource("authorization.k8s.io", "v1", "SelfSubjectAccessReview", "selfsubjectaccessreviews", False, ("create",)),
    Resource("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets", short_names=("pdb",),
             subresources=(Sub("status", "PodDisruptionBudget"),), generation=True),
    cluster(RBAC, "ClusterRoleBinding", "clusterrolebindings", generation=False),
    cluster(RBAC, "ClusterRole", "clusterroles", generation=False),
    Resource(RBAC, "v1", "RoleBinding", "rolebindings", created_by_put=True),
    Resource(RBAC, "v1", "Role", "roles", created_by_put=True),
    cluster(ADMISSION, "MutatingWebhookConfiguration", "mutatingwebhookconfigurations"),
    cluster(ADMISSION, "ValidatingWebhookConfiguration", "validatingwebhookconfigurations"),
    Resource(
        CRDS, "v1", "CustomResourceDefinition", "customresourcedefinitions", False, ALL_VERBS,
        (Sub("status", "CustomResourceDefinition"),), ("crd", "crds"), ("api-extensions",), "jfWCUB31mvA=",
        generation=True,
    ),
    Resource(
        "coordination.k8s.io", "v1", "Lease", "leases", storage_hash="gqkMMb/YqFM=", created_by_put=True
    ),
    Resource(
        "discovery.k8s.io", "v1", "EndpointSlice", "endpointslices", storage_hash="qgS0xkrxYAI=", generation=True
    ),
    cluster(FLOW, "FlowSchema", "flowschemas", status=True),
    cluster(FLOW, "PriorityLevelConfiguration", "prioritylevelconfigurations", status=True),
)  # fmt: skip


@dataclass(slots=True)
class Catalogue:
    """The resources that are served now. Built-in groups stay; custom ones come and go."""

    custom: dict[tuple[str, str, str], Resource] = field(default_factory=dict)
    built_in: dict[tuple[str, str, str], Resource] = field(
        default_factory=lambda: {(r.group, r.version, r.plural): r for r in BUILT_IN}
    )

    def find(self, group: str, version: str, plural: str) -> Resource | None:
        """Return a served resource, or None."""
        key = (group, version, plural)
        return self.built_in.get(key) or self.custom.get(key)

    def __iter__(self) -> Iterator[Resource]:
        yield from self.built_in.values()
        yield from self.custom.values()

    def has_built_in_group(self, group: str) -> bool:
        """Return whether the group is one of the server's own."""
        return any(resource.group == group for resource in self.built_in.values())

    def versions(self, group: str) -> list[str]:
        """Return the versions of a group, the preferred one first."""
        found = {resource.version for resource in self if resource.group == group}
        return sorted(found, key=_version_rank)


def _version_rank(version: str) -> tuple[int, int, int, str]:
    """Return the sort key of a version: stable before beta before alpha, newer before older."""
    digits, stage = version.removeprefix("v"), 0
    for rank, name in ((1, "beta"), (2, "alpha")):
        if name in digits:
            digits, _, minor = digits.partition(name)
            return (rank, -int(digits or 0), -int(minor or 0), version)
    return (stage, -int(digits), 0, version) if digits.isdigit() else (3, 0, 0, version)
