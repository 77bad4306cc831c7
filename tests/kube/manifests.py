"""Pods and nodes as the API server sends them, for tests."""

from __future__ import annotations

from typing import Any

import msgspec

from kvroute.kube.api.objects import KubeNode, KubePod

NIXL = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'


def pod_document(
    name: str = "prefill-0",
    *,
    args: list[str] | None = None,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    container: dict[str, Any] | None = None,
    **status: Any,
) -> dict[str, Any]:
    """Return a running vLLM pod on node-1 with address 10.0.0.1.

    Args:
        container: replaces fields of the container.
        status: replaces fields of the status; `ready`, `uid`, `node`, `restarts` and `deleted` are shorthands.
    """
    ready, deleted = status.pop("ready", True), status.pop("deleted", False)
    uid, node, restarts = status.pop("uid", f"uid-{name}"), status.pop("node", "node-1"), status.pop("restarts", 0)
    engine = {
        "name": "engine",
        "image": "vllm/vllm-openai:v0.32.0",
        "command": ["vllm", "serve"],
        "args": args if args is not None else ["meta-llama/Llama-3.1-8B", "--kv-transfer-config", NIXL],
        **(container or {}),
    }
    metadata: dict[str, Any] = {"name": name, "namespace": "llm", "uid": uid, "resourceVersion": "1"}
    metadata |= {"labels": labels if labels is not None else {"kvroute.io/role": "prefill"}}
    metadata |= {"annotations": annotations} if annotations else {}
    metadata |= {"deletionTimestamp": "2026-01-01T00:00:00Z"} if deleted else {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"nodeName": node, "containers": [engine]},
        "status": {
            "phase": "Running",
            "podIP": "10.0.0.1",
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
            "containerStatuses": [{"name": "engine", "restartCount": restarts}],
            **status,
        },
    }


def pod(name: str = "prefill-0", **changes: Any) -> KubePod:
    """Return `pod_document` as discovery reads it."""
    return msgspec.convert(pod_document(name, **changes), KubePod)


def node_document(name: str = "node-1", labels: dict[str, str] | None = None) -> dict[str, Any]:
    """Return a node with labels."""
    metadata = {"name": name, "uid": f"uid-{name}", "resourceVersion": "1", "labels": labels or {}}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata}


def node(name: str = "node-1", labels: dict[str, str] | None = None) -> KubeNode:
    """Return `node_document` as discovery reads it."""
    return msgspec.convert(node_document(name, labels), KubeNode)
