"""Injection: engine pods get one file for each topology level, an init container that waits for them, and variables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvroute.kube.admission.review import AdmissionRequest, ReviewResponse
from kvroute.kube.admission.validation import AdmissionView
from kvroute.kube.discovery.labels import CONTAINER, TOPOLOGY_PREFIX
from kvroute.kube.resources import KvRouterSpec, Object, TransferTopology, name_of, read_spec
from kvroute.kube.resources.engines import role_of, selecting_routers
from kvroute.kube.resources.resolution import ResolvedTopology, resolve
from kvroute.types import InputError
from kvroute_engine.topology_labels.worker import ENABLED, LEVEL, MOUNT_PATH, POLICIES, POLICY, WAIT_S

VOLUME = "kvroute-topology"
INIT_CONTAINER = "kvroute-topology"
MOUNTED_AT = "/etc/kvroute/topology"
WAIT_LIMIT_S = 300
"""How long the init container waits before it fails and is started again."""


@dataclass(frozen=True, slots=True)
class InjectionSpec:
    """What the init container runs."""

    image: str
    """Image of kvroute."""
    pull_secrets: tuple[str, ...] = ()
    """Names of the Secrets with which the kubelet pulls it; they must exist in the namespace of the pod."""
    command: tuple[str, ...] = ("kvroute", "kube", "run-worker", "--wait")
    """Waits until the file of the level in the environment has a value, and fails with one sentence if none comes."""


def inject(request: AdmissionRequest, view: AdmissionView, settings: InjectionSpec) -> ReviewResponse:
    """Return the patch for a pod that is created; no patch if no KvRouter with a constraint selects it.

    A KvRouter that cannot be resolved does not stop pods from being created: the verdict then has a warning.
    """
    pod = request.object or {}
    labels = (pod.get("metadata") or {}).get("labels") or {}
    if request.operation != "CREATE" or role_of(labels) is None:
        return ReviewResponse()
    warnings: list[str] = []
    for router in selecting_routers(request.namespace, labels, view.routers):
        try:
            spec = read_spec(router, KvRouterSpec)
            if spec.kv_cache_transfer_topology is None:
                continue
            transfer = spec.kv_cache_transfer_topology
            resolved = resolve(transfer, view.catalog)
        except InputError as error:
            warnings.append(f"no topology files: KvRouter {name_of(router)}: {error}".replace("\n", " "))
            continue
        return ReviewResponse(patch=tuple(_patch(pod, transfer, resolved, settings)), warnings=tuple(warnings))
    return ReviewResponse(warnings=tuple(warnings))


def _patch(
    pod: Object, transfer: TransferTopology, resolved: ResolvedTopology, settings: InjectionSpec
) -> Iterator[dict[str, Any]]:
    spec = pod.get("spec") or {}
    variables = topology_variables(transfer)
    mount = {"name": VOLUME, "mountPath": MOUNTED_AT, "readOnly": True}
    secrets = [{"name": name} for name in settings.pull_secrets]
    yield from _appended_all(spec, "/spec", "imagePullSecrets", secrets)
    yield from _appended(spec, "/spec", "volumes", _volume(resolved))
    yield from _appended(spec, "/spec", "initContainers", _init_container(settings, variables, mount))
    only = ((pod.get("metadata") or {}).get("annotations") or {}).get(CONTAINER)
    for index, container in enumerate(spec.get("containers") or ()):
        if only in (None, container.get("name")):
            place = f"/spec/containers/{index}"
            yield from _appended(container, place, "volumeMounts", mount)
            yield from _appended_all(container, place, "env", variables)


def topology_variables(transfer: TransferTopology) -> list[dict[str, str]]:
    """Return the environment of an engine: kvroute's names, those of the proposal, and those that Dynamo shipped."""
    policy = POLICIES[transfer.mismatch_policy]
    values = dict.fromkeys(ENABLED, "true") | dict.fromkeys(MOUNT_PATH, MOUNTED_AT)
    values |= dict.fromkeys(LEVEL, transfer.level) | dict.fromkeys(POLICY, policy)
    values["DYN_KV_TRANSFER_ENFORCEMENT"] = "preferred" if policy == "fallback" else "required"
    return [{"name": name, "value": value} for name, value in values.items()]


def _volume(resolved: ResolvedTopology) -> dict[str, Any]:
    """Return a Downward API volume with one file for each level; a label that is missing gives an empty file."""
    files = [
        {"path": level.domain, "fieldRef": {"fieldPath": f"metadata.labels['{TOPOLOGY_PREFIX}{level.domain}']"}}
        for level in resolved.levels
    ]
    return {"name": VOLUME, "downwardAPI": {"items": files}}


def _init_container(settings: InjectionSpec, variables: list[dict[str, str]], mount: dict[str, Any]) -> dict[str, Any]:
    amounts = {"cpu": "100m", "memory": "128Mi"}
    return {
        "name": INIT_CONTAINER,
        "image": settings.image,
        "command": list(settings.command),
        "env": [*variables, *({"name": name, "value": str(WAIT_LIMIT_S)} for name in WAIT_S)],
        "resources": {"requests": amounts, "limits": {"memory": amounts["memory"]}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [mount],
    }


def _appended(owner: Object, place: str, key: str, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return _appended_all(owner, place, key, [item])


def _appended_all(owner: Object, place: str, key: str, items: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield operations that append the items of new names to a list; the list is created if there is none."""
    present = owner.get(key)
    names = {item.get("name") for item in present or ()}
    missing = [item for item in items if item["name"] not in names]
    if present is None and missing:
        yield {"op": "add", "path": f"{place}/{key}", "value": missing}
        return
    for item in missing:
        yield {"op": "add", "path": f"{place}/{key}/-", "value": item}
