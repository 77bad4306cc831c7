"""All objects of a gateway beside its Deployment: configuration, addresses, rights, limits of disruption and access."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvroute.kube.operator.actions import signed
from kvroute.kube.operator.gateway_workload import deployment, gateway_labels, metadata
from kvroute.kube.operator.observed import MANAGED_BY, MANAGED_BY_LABEL, Observed, OperatorSpec
from kvroute.kube.resources import KvRouterSpec, Object
from kvroute.kube.resources.cluster_file import cluster_file
from kvroute.kube.resources.resolution import ResolvedTopology

KINDS = (
    ("v1", "ConfigMap"),
    ("v1", "ServiceAccount"),
    ("rbac.authorization.k8s.io/v1", "RoleBinding"),
    ("v1", "Service"),
    ("networking.k8s.io/v1", "NetworkPolicy"),
    ("apps/v1", "Deployment"),
    ("policy/v1", "PodDisruptionBudget"),
    ("monitoring.coreos.com/v1", "ServiceMonitor"),
)
"""Kinds that belong to a KvRouter, in the order in which they are applied."""
OPTIONAL = frozenset({"PodDisruptionBudget", "ServiceMonitor"})
"""Kinds of which a KvRouter may have none. The operator deletes these; all others end with their KvRouter."""
METRICS_LABEL = "kvroute.io/metrics"
"""Label `true` of a namespace lets its pods read the metrics of gateways."""


def wanted_objects(
    router: Object, spec: KvRouterSpec, resolved: ResolvedTopology | None, observed: Observed
) -> list[Object]:
    """Return all objects that a KvRouter should own, in the order in which they are applied."""
    own = router["metadata"]
    name, namespace = own["name"], own["namespace"]
    config = cluster_file(name, namespace, spec, resolved)
    objects: list[dict[str, Any]] = [
        _object("v1", "ConfigMap", metadata(router, f"{name}-cluster"), data={"cluster.yaml": config}),
        _object("v1", "ServiceAccount", metadata(router, name)),
        _role_binding(router, observed.settings),
        _service(router, spec),
        _network_policy(router, spec),
        deployment(router, spec, observed.settings, config),
    ]
    if spec.replicas is None or spec.replicas > 1:
        limit = {"maxUnavailable": 1, "selector": {"matchLabels": gateway_labels(name)}}
        objects.append(_object("policy/v1", "PodDisruptionBudget", metadata(router, name), spec=limit))
    if spec.monitoring and observed.service_monitors:
        objects.append(_service_monitor(router))
    return [signed(manifest) for manifest in objects]


def nodes_binding(routers: Iterable[Object], settings: OperatorSpec) -> Object:
    """Return the ClusterRoleBinding that lets all gateways read nodes."""
    places = sorted((router["metadata"]["namespace"], router["metadata"]["name"]) for router in routers)
    subjects = [{"kind": "ServiceAccount", "namespace": namespace, "name": name} for namespace, name in places]
    body: dict[str, Any] = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": settings.nodes_binding, "labels": {MANAGED_BY_LABEL: MANAGED_BY}},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": settings.nodes_role},
        "subjects": subjects,
    }
    return signed(body)


def _object(api_version: str, kind: str, meta: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"apiVersion": api_version, "kind": kind, "metadata": meta, **fields}


def _role_binding(router: Object, settings: OperatorSpec) -> dict[str, Any]:
    name, namespace = router["metadata"]["name"], router["metadata"]["namespace"]
    return _object(
        "rbac.authorization.k8s.io/v1",
        "RoleBinding",
        metadata(router, name),
        roleRef={"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": settings.gateway_role},
        subjects=[{"kind": "ServiceAccount", "namespace": namespace, "name": name}],
    )


def _service(router: Object, spec: KvRouterSpec) -> dict[str, Any]:
    name = router["metadata"]["name"]
    ports = [
        {"name": "client", "port": spec.ports.client, "targetPort": "client", "protocol": "TCP"},
        {"name": "admin", "port": spec.ports.admin, "targetPort": "admin", "protocol": "TCP"},
    ]
    return _object("v1", "Service", metadata(router, name), spec={"selector": gateway_labels(name), "ports": ports})


def _network_policy(router: Object, spec: KvRouterSpec) -> dict[str, Any]:
    """Return rules for what may connect: everything to the client port; to the admin port only pods of the namespace
    and of namespaces with `METRICS_LABEL`."""
    name = router["metadata"]["name"]
    near = [{"podSelector": {}}, {"namespaceSelector": {"matchLabels": {METRICS_LABEL: "true"}}}]
    body = {
        "podSelector": {"matchLabels": gateway_labels(name)},
        "policyTypes": ["Ingress"],
        "ingress": [
            {"ports": [{"port": spec.ports.client, "protocol": "TCP"}]},
            {"from": near, "ports": [{"port": spec.ports.admin, "protocol": "TCP"}]},
        ],
    }
    return _object("networking.k8s.io/v1", "NetworkPolicy", metadata(router, name), spec=body)


def _service_monitor(router: Object) -> dict[str, Any]:
    """Return the ServiceMonitor; the alert rules and the dashboard expect the job `kvroute`."""
    name = router["metadata"]["name"]
    body = {
        "selector": {"matchLabels": gateway_labels(name)},
        "endpoints": [
            {
                "port": "admin",
                "path": "/metrics",
                "interval": "15s",
                "relabelings": [{"targetLabel": "job", "replacement": "kvroute"}],
            }
        ],
    }
    return _object("monitoring.coreos.com/v1", "ServiceMonitor", metadata(router, name), spec=body)
