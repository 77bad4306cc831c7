"""InferencePools for tests: their definition, with the rules of the Gateway API inference extension, and objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.kube.client import ApiClient

GROUP = "inference.networking.k8s.io"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
NAME = f"inferencepools.{GROUP}"
POOLS = f"/apis/{GROUP}/v1/namespaces/llm/inferencepools"
_PORT = {
    "type": "object",
    "required": ["number"],
    "properties": {"number": {"type": "integer", "format": "int32", "minimum": 1, "maximum": 65535}},
}
_REFERENCE = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "group": {"type": "string", "default": "", "maxLength": 253},
        "kind": {"type": "string", "default": "Service", "minLength": 1, "maxLength": 63},
        "name": {"type": "string", "minLength": 1, "maxLength": 253},
        "port": _PORT,
        "failureMode": {"type": "string", "default": "FailClose", "enum": ["FailOpen", "FailClose"]},
    },
    "x-kubernetes-validations": [
        {"rule": "self.kind != 'Service' || has(self.port)", "message": "port is required when kind is 'Service'"}
    ],
}
_SELECTOR = {
    "type": "object",
    "required": ["matchLabels"],
    "properties": {
        "matchLabels": {
            "type": "object",
            "minProperties": 1,
            "maxProperties": 64,
            "additionalProperties": {"type": "string", "maxLength": 63},
        }
    },
}
_SPEC = {
    "type": "object",
    "required": ["selector", "targetPorts"],
    "properties": {
        "selector": _SELECTOR,
        "targetPorts": {
            "type": "array",
            "minItems": 1,
            "maxItems": 8,
            "items": _PORT,
            "x-kubernetes-list-type": "atomic",
        },
        "appProtocol": {"type": "string", "default": "http", "enum": ["http", "kubernetes.io/h2c"]},
        "endpointPickerRef": _REFERENCE,
    },
}
DEFINITION: Mapping[str, Any] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {
        "name": NAME,
        "annotations": {
            "api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/gateway-api-inference-extension/pull/1173"
        },
    },
    "spec": {
        "group": GROUP,
        "scope": "Namespaced",
        "names": {
            "kind": "InferencePool",
            "listKind": "InferencePoolList",
            "plural": "inferencepools",
            "singular": "inferencepool",
        },
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "required": ["spec"],
                        "properties": {
                            "spec": _SPEC,
                            "status": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
                        },
                    }
                },
            }
        ],
    },
}


def pool_document(name: str, labels: Mapping[str, str], ports: Sequence[int] = (8000,), **spec: Any) -> dict[str, Any]:
    """Return a pool. Args: `spec`: further fields of it."""
    return {
        "apiVersion": f"{GROUP}/v1",
        "kind": "InferencePool",
        "metadata": {"name": name},
        "spec": {
            "selector": {"matchLabels": dict(labels)},
            "targetPorts": [{"number": port} for port in ports],
            **spec,
        },
    }


async def install(client: ApiClient) -> None:
    """Install the definition, and wait until the server serves it."""
    await client.must("POST", DEFINITIONS, DEFINITION)
    while (await client.send("GET", POOLS))[0] != 200:
        pass
