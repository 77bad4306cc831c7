"""The Deployment of a gateway: unprivileged, without a writable root file system, drained before it ends."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from kvroute.kube.discovery.labels import PREFIX
from kvroute.kube.operator.observed import MANAGED_BY, MANAGED_BY_LABEL, OperatorSpec
from kvroute.kube.resources import KvRouterSpec, Object
from kvroute.kube.resources.cluster_file import KEYS_FOLDER

CONFIG_HASH = f"{PREFIX}config"
"""Annotation of the gateway's pods: a changed cluster file replaces them one after another."""
_FOLDER = "/etc/kvroute"
_CACHE = "/var/cache/kvroute"
_USER = 65532
_ENDPOINTS_LAG_S = 5
"""Time that a gateway continues to accept connections after it is taken out of the Service."""


GATEWAY_CONTAINER = "gateway"
GATEWAY_LABEL = {"app.kubernetes.io/name": "kvroute-gateway"}
"""Label of the pods of all gateways."""


def gateway_labels(name: str) -> dict[str, str]:
    """Return the labels that select the pods of a gateway."""
    return GATEWAY_LABEL | {"app.kubernetes.io/instance": name}


def metadata(router: Object, name: str) -> dict[str, Any]:
    """Return the metadata of an object that a KvRouter owns."""
    own = router["metadata"]
    reference = {
        "apiVersion": router["apiVersion"],
        "kind": router["kind"],
        "name": own["name"],
        "uid": own["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {
        "name": name,
        "namespace": own["namespace"],
        "labels": gateway_labels(own["name"]) | {MANAGED_BY_LABEL: MANAGED_BY, "app.kubernetes.io/part-of": "kvroute"},
        "ownerReferences": [reference],
    }


def used_pull_secrets(spec: KvRouterSpec, settings: OperatorSpec) -> Sequence[str]:
    """Return the names of the Secrets with which the image of a gateway is pulled."""
    return spec.image_pull_secrets or (() if spec.image else settings.pull_secrets)


def deployment(router: Object, spec: KvRouterSpec, settings: OperatorSpec, config: str) -> dict[str, Any]:
    """Return the Deployment; `config` is the cluster file, whose digest becomes an annotation of the pods."""
    image = spec.image or settings.image
    pull_secrets = used_pull_secrets(spec, settings)
    name = router["metadata"]["name"]
    selector = gateway_labels(name)
    digest = hashlib.sha256(config.encode()).hexdigest()[:32]
    template = {
        "metadata": {"labels": selector, "annotations": {CONFIG_HASH: digest}},
        "spec": _pod(name, spec, image, pull_secrets),
    }
    body: dict[str, Any] = {
        "selector": {"matchLabels": selector},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "template": template,
    }
    if spec.replicas is not None:
        body["replicas"] = spec.replicas
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata(router, name), "spec": body}


def _pod(name: str, spec: KvRouterSpec, image: str, pull_secrets: Sequence[str]) -> dict[str, Any]:
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": f"{name}-cluster"}},
        {"name": "cache", "emptyDir": {"sizeLimit": "1Gi"}},
        {"name": "tmp", "emptyDir": {"sizeLimit": "256Mi"}},
    ]
    if spec.keys_secret_ref is not None:
        key = spec.keys_secret_ref
        volumes.append(
            {
                "name": "keys",
                "secret": {"secretName": key.name, "defaultMode": 0o440, "items": [{"key": key.key, "path": key.key}]},
            }
        )
    pod: dict[str, Any] = {
        "serviceAccountName": name,
        "terminationGracePeriodSeconds": spec.drain_seconds + _ENDPOINTS_LAG_S + 25,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(spec, image)],
        "volumes": volumes,
        "topologySpreadConstraints": [
            _spread(name, "kubernetes.io/hostname"),
            _spread(name, "topology.kubernetes.io/zone"),
        ],
    }
    if pull_secrets:
        pod["imagePullSecrets"] = [{"name": secret} for secret in pull_secrets]
    if spec.node_selector:
        pod["nodeSelector"] = dict(spec.node_selector)
    return pod


def _container(spec: KvRouterSpec, image: str) -> dict[str, Any]:
    mounts = [
        {"name": "config", "mountPath": _FOLDER, "readOnly": True},
        {"name": "cache", "mountPath": _CACHE},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    if spec.keys_secret_ref is not None:
        mounts.append({"name": "keys", "mountPath": KEYS_FOLDER, "readOnly": True})
    return {
        "name": GATEWAY_CONTAINER,
        "image": image,
        "args": ["serve", f"{_FOLDER}/cluster.yaml", "--host", "0.0.0.0"],
        "ports": [
            {"name": "client", "containerPort": spec.ports.client},
            {"name": "admin", "containerPort": spec.ports.admin},
        ],
        "resources": {"requests": dict(spec.resources.requests), "limits": dict(spec.resources.limits)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "startupProbe": _probe("/health") | {"periodSeconds": 2, "failureThreshold": 60},
        "livenessProbe": _probe("/health") | {"periodSeconds": 10, "failureThreshold": 3},
        "readinessProbe": _probe("/ready") | {"periodSeconds": 2, "failureThreshold": 2},
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(_ENDPOINTS_LAG_S)]}}},
        "volumeMounts": mounts,
    }


def _probe(path: str) -> dict[str, Any]:
    return {"httpGet": {"path": path, "port": "client"}, "timeoutSeconds": 3}


def _spread(name: str, key: str) -> dict[str, Any]:
    return {
        "maxSkew": 1,
        "topologyKey": key,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": gateway_labels(name)},
    }
