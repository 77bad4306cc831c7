"""Custom resources that tests use."""

from __future__ import annotations

from typing import Any

Manifest = dict[str, Any]


def topology(name: str = "cluster", **levels: str) -> Manifest:
    """Return a ClusterTopology; levels are domains and their label keys, from the broadest to the narrowest."""
    chosen = levels or {"zone": "topology.kubernetes.io/zone", "rack": "example.com/rack"}
    return {
        "apiVersion": "kvroute.io/v1alpha1",
        "kind": "ClusterTopology",
        "metadata": {"name": name, "uid": f"topology-{name}"},
        "spec": {"levels": [{"domain": domain, "labelKey": key} for domain, key in chosen.items()]},
    }


def router(name: str = "chat", namespace: str = "serving", **spec: Any) -> Manifest:
    """Return a KvRouter with these fields of `spec` beside the required ones."""
    required = {"model": "llama-3-70b", "engines": {"selector": {"matchLabels": {"app": "engine"}}}}
    metadata = {"name": name, "namespace": namespace, "uid": f"router-{name}", "generation": 1}
    return {
        "apiVersion": "kvroute.io/v1alpha1",
        "kind": "KvRouter",
        "metadata": metadata,
        "spec": required | spec,
    }


def constrained(level: str = "rack", **fields: Any) -> Manifest:
    """Return a KvRouter whose KV transfers stay inside a level of the ClusterTopology `cluster`."""
    given = {"level": level, "clusterTopologyName": "cluster"} | fields
    kept = {name: value for name, value in given.items() if value is not None}
    return router(kvCacheTransferTopology=kept)
