"""Every kind of object that the operator uses, and what it does with it: the rights that an installation must grant."""

from __future__ import annotations

from dataclasses import dataclass

from kvroute.kube.operator.gateway_objects import KINDS, OPTIONAL

OWNED_VERBS = ("get", "create", "patch")
"""`create` belongs to server-side apply: a patch that creates an object needs it."""
LEASE = "kvroute-operator"
SECRET = "kvroute-webhook"
WEBHOOKS = "kvroute"
"""Names of objects in the operator's namespace, and of both webhook configurations."""


@dataclass(frozen=True, slots=True)
class ResourceKind:
    """Where the API server has objects of one kind."""

    api_version: str
    kind: str
    plural: str
    namespaced: bool = True

    @property
    def group(self) -> str:
        """API group; empty: the core group."""
        return self.api_version.rpartition("/")[0]

    def path(self, namespace: str = "", name: str = "", sub: str = "") -> str:
        """Return the path of an object, or of all objects, relative to the server."""
        parts = ["apis" if self.group else "api", self.api_version]
        parts += ["namespaces", namespace] if namespace and self.namespaced else []
        return "/".join([*parts, self.plural, *filter(None, (name, sub))])


_PLURALS = {
    "ConfigMap": "configmaps",
    "ServiceAccount": "serviceaccounts",
    "RoleBinding": "rolebindings",
    "Service": "services",
    "NetworkPolicy": "networkpolicies",
    "Deployment": "deployments",
    "PodDisruptionBudget": "poddisruptionbudgets",
    "ServiceMonitor": "servicemonitors",
}
OWNED = tuple(ResourceKind(api_version, kind, _PLURALS[kind]) for api_version, kind in KINDS)
"""Kinds that belong to a KvRouter."""
ROUTERS = ResourceKind("kvroute.io/v1alpha1", "KvRouter", "kvrouters")
TOPOLOGIES = ResourceKind("kvroute.io/v1alpha1", "ClusterTopology", "clustertopologies", namespaced=False)
GROVE = (
    ResourceKind("grove.io/v1alpha1", "ClusterTopologyBinding", "clustertopologybindings", namespaced=False),
    ResourceKind("grove.io/v1alpha1", "ClusterTopology", "clustertopologies", namespaced=False),
)
NODES = ResourceKind("v1", "Node", "nodes", namespaced=False)
PODS = ResourceKind("v1", "Pod", "pods")
EVENTS = ResourceKind("v1", "Event", "events")
BINDINGS = ResourceKind("rbac.authorization.k8s.io/v1", "ClusterRoleBinding", "clusterrolebindings", namespaced=False)
LEASES = ResourceKind("coordination.k8s.io/v1", "Lease", "leases")
SECRETS = ResourceKind("v1", "Secret", "secrets")
VALIDATING = ResourceKind(
    "admissionregistration.k8s.io/v1",
    "ValidatingWebhookConfiguration",
    "validatingwebhookconfigurations",
    namespaced=False,
)
MUTATING = ResourceKind(
    "admissionregistration.k8s.io/v1", "MutatingWebhookConfiguration", "mutatingwebhookconfigurations", namespaced=False
)

RIGHTS: dict[tuple[str, str], tuple[str, ...]] = {
    (TOPOLOGIES.group, TOPOLOGIES.plural): ("list", "watch"),
    (ROUTERS.group, ROUTERS.plural): ("list", "watch", "patch"),
    (ROUTERS.group, f"{ROUTERS.plural}/status"): ("patch",),
    **{(kind.group, kind.plural): ("list", "watch") for kind in GROVE},
    (NODES.group, NODES.plural): ("list", "watch"),
    (PODS.group, PODS.plural): ("list", "watch", "patch"),
    (EVENTS.group, EVENTS.plural): ("create",),
    **{(kind.group, kind.plural): (*OWNED_VERBS, "delete") if kind.kind in OPTIONAL else OWNED_VERBS for kind in OWNED},
    (BINDINGS.group, BINDINGS.plural): ("get", "create", "patch"),
    (LEASES.group, LEASES.plural): ("get", "create", "update"),
    (SECRETS.group, SECRETS.plural): ("get", "update"),
    (VALIDATING.group, VALIDATING.plural): ("get", "patch"),
    (MUTATING.group, MUTATING.plural): ("get", "patch"),
}
"""Verbs by API group and resource. Nothing else is sent: `api_calls` refuses a call that is not listed."""
IMPLIED = {
    (ROUTERS.group, f"{ROUTERS.plural}/finalizers"): ("update",),
    ("rbac.authorization.k8s.io", "clusterroles"): ("bind",),
}
"""Rights that the API server asks for when the operator sets owners and makes role bindings."""
NAMED = {
    (BINDINGS.group, BINDINGS.plural): ("kvroute-gateways",),
    ("rbac.authorization.k8s.io", "clusterroles"): ("kvroute-gateway", "kvroute-gateway-nodes"),
    (LEASES.group, LEASES.plural): (LEASE,),
    (SECRETS.group, SECRETS.plural): (SECRET,),
    (VALIDATING.group, VALIDATING.plural): (WEBHOOKS,),
    (MUTATING.group, MUTATING.plural): (WEBHOOKS,),
}
"""Names to which all verbs but `create` are limited."""
