"""Nodes, pods and other objects of the operator's tests."""

from __future__ import annotations

from typing import Any

from tests.kube.resources.router_examples import Manifest

from kvroute.kube.operator.gateway_workload import gateway_labels


def node(name: str, **labels: str) -> Manifest:
    """Return a node; `zone` and `rack` become the labels that the example topology names."""
    keys = {"zone": "topology.kubernetes.io/zone", "rack": "example.com/rack"}
    given = {keys.get(key, key): value for key, value in labels.items()}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": given}}


def pod(
    name: str, role: str = "prefill", on: str = "", *, ready: bool = True, namespace: str = "serving", **metadata: Any
) -> Manifest:
    """Return an engine pod; `labels` and `annotations` are added to those that it has."""
    labels = {"app": "engine", "kvroute.io/role": role} | metadata.pop("labels", {})
    status = {"conditions": [{"type": "Ready", "status": "True" if ready else "False"}]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "uid": f"pod-{name}", "labels": labels} | metadata,
        "spec": {"containers": [{"name": "engine", "image": "x"}]} | ({"nodeName": on} if on else {}),
        "status": status,
    }


def gateway_pod(router: str, name: str = "", *, ready: bool = True, namespace: str = "serving") -> Manifest:
    """Return a pod of a gateway, as the controllers of its Deployment make it."""
    made = pod(name or f"{router}-gateway", ready=ready, namespace=namespace)
    made["metadata"]["labels"] = gateway_labels(router)
    return made


def engines(on: str = "n1") -> list[Manifest]:
    """Return two engines of each phase on one node."""
    return [pod(f"{role}-{index}", role, on) for role in ("prefill", "decode") for index in range(2)]
