"""Rules of pods: validation, what an update may change, quality of service, and what admission adds."""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from tests.kube.apiserver.names import label_errors
from tests.kube.apiserver.status import (
    Cause,
    Object,
    duplicate,
    forbidden_field,
    invalid,
    missing,
    required,
    unsupported,
)  # fmt: skip

IMAGE_POLICIES = ("Always", "IfNotPresent", "Never")
RESTART_POLICIES = ("Always", "OnFailure", "Never")
FIELD_PATHS = ("metadata.annotations", "metadata.labels", "metadata.name", "metadata.namespace", "metadata.uid")
RANDOM_LETTERS = "bcdfghjklmnpqrstvwxz2456789"
TOKEN_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"
UPDATE_TEXT = (
    "pod updates may not change fields other than `spec.containers[*].image`,`spec.initContainers[*].image`,"
    "`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),"
    "`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)\n"
)
GATED = {
    "type": "PodScheduled", "status": "False", "lastProbeTime": None, "reason": "SchedulingGated",
    "message": "Scheduling is blocked due to non-empty scheduling gates",
}  # fmt: skip


def random_suffix(length: int = 5) -> str:
    """Return the random end of a generated name."""
    return "".join(secrets.choice(RANDOM_LETTERS) for _ in range(length))


def validate_spec(spec: Object, path: str) -> list[Cause]:
    """Return what is wrong with a pod spec at a path."""
    errors: list[Cause] = []
    volumes: set[str] = set()
    for at, volume in enumerate(spec.get("volumes") or []):
        found = _volume(volume, f"{path}.volumes[{at}]")
        name = volume.get("name", "")
        if not found and name in volumes:
            found = [duplicate(f"{path}.volumes[{at}].name", name)]
        elif not found:
            volumes.add(name)
        errors += found
    containers = spec.get("containers") or []
    if not containers:
        errors.append(required(f"{path}.containers"))
    names: set[str] = set()
    for kind in ("containers", "initContainers"):
        for at, container in enumerate(spec.get(kind) or []):
            errors += _container(container, f"{path}.{kind}[{at}]", volumes, names)
    if spec.get("restartPolicy") not in RESTART_POLICIES:
        errors.append(unsupported(f"{path}.restartPolicy", spec.get("restartPolicy", ""), RESTART_POLICIES))
    if spec.get("schedulingGates") and spec.get("nodeName"):
        detail = "cannot be set until all schedulingGates have been cleared"
        errors.append(forbidden_field(f"{path}.nodeName", detail))
    return errors


def _volume(volume: Object, path: str) -> list[Cause]:
    name = volume.get("name", "")
    errors = (
        [invalid(f"{path}.name", name, text) for text in label_errors(name)] if name else [required(f"{path}.name")]
    )
    for kind in list(volume.keys() - {"name"})[1:]:
        other = sorted(volume.keys() - {"name", "emptyDir"})[-1] if "emptyDir" in volume else kind
        errors.append(forbidden_field(f"{path}.{other}", "may not specify more than 1 volume type"))
        break
    for item in volume.get("downwardAPI", {}).get("items") or []:
        where = f"{path}.downwardAPI"
        if ".." in item.get("path", "").split("/"):
            errors.append(invalid(f"{where}.path", item["path"], "must not contain '..'"))
        field = item.get("fieldRef", {}).get("fieldPath", "")
        if "fieldRef" in item and field.partition("[")[0] not in FIELD_PATHS:
            errors.append(unsupported(f"{where}.fieldRef.fieldPath", field, FIELD_PATHS))
    return errors


def _container(container: Object, path: str, volumes: set[str], names: set[str]) -> list[Cause]:
    name = container.get("name", "")
    errors: list[Cause] = []
    if not name:
        errors.append(required(f"{path}.name"))
    else:
        errors += [invalid(f"{path}.name", name, text) for text in label_errors(name)]
    if name and name in names:
        errors.append(duplicate(f"{path}.name", name))
    names.add(name)
    if not container.get("image"):
        errors.append(required(f"{path}.image"))
    for at, port in enumerate(container.get("ports") or []):
        number = port.get("containerPort", 0)
        if not 0 < number < 65_536:
            errors.append(
                invalid(f"{path}.ports[{at}].containerPort", number, "must be between 1 and 65535, inclusive")
            )
    for at, mount in enumerate(container.get("volumeMounts") or []):
        if mount.get("name") not in volumes:
            errors.append(missing(f"{path}.volumeMounts[{at}].name", mount.get("name", "")))
    if container.get("imagePullPolicy") not in IMAGE_POLICIES:
        errors.append(unsupported(f"{path}.imagePullPolicy", container.get("imagePullPolicy", ""), IMAGE_POLICIES))
    return errors


def validate_pod(found: Object) -> list[Cause]:
    """Return what is wrong with a pod, apart from its metadata."""
    return validate_spec(found["spec"], "spec")


def validate_pod_update(found: Object, before: Object) -> list[Cause]:
    """Return what an update changes that it may not change."""
    spec, held = found["spec"], before["spec"]
    for kind in ("containers", "initContainers"):
        if len(spec.get(kind) or []) != len(held.get(kind) or []):
            text = "pod updates may not add or remove " + ("containers" if kind == "containers" else "initContainers")
            return [forbidden_field(f"spec.{kind}", text)]
    gates = [gate["name"] for gate in held.get("schedulingGates") or []]
    for at, gate in enumerate(spec.get("schedulingGates") or []):
        if gate["name"] not in gates:
            text = f"only deletion is allowed, but found new scheduling gate '{gate['name']}'"
            return [forbidden_field(f"spec.schedulingGates[{at}].name", text)]
    if _fixed(spec, held, bool(gates)) != _fixed(held, held, bool(gates)):
        return [forbidden_field("spec", UPDATE_TEXT)]
    return []


def _fixed(spec: Object, held: Object, gated: bool) -> Object:
    """Return the part of a spec that updates may not change."""
    left = {name: value for name, value in spec.items() if name not in ("activeDeadlineSeconds", "schedulingGates")}
    for kind in ("containers", "initContainers"):
        if kind in left:
            left[kind] = [{**container, "image": ""} for container in left[kind]]
    kept = held.get("tolerations") or []
    if all(toleration in (left.get("tolerations") or []) for toleration in kept):
        left.pop("tolerations", None)
    if gated:
        selector, wanted = left.get("nodeSelector") or {}, held.get("nodeSelector") or {}
        if all(selector.get(key) == value for key, value in wanted.items()):
            left.pop("nodeSelector", None)
    return left


def qos_class(spec: Object) -> str:
    """Return the quality of service that requests and limits of the containers give."""
    containers = [*(spec.get("containers") or []), *(spec.get("initContainers") or [])]
    resources = [container.get("resources", {}) for container in containers]
    counted = [
        {name for name in (*part.get("limits", {}), *part.get("requests", {})) if name in ("cpu", "memory")}
        for part in resources
    ]
    if not any(counted):
        return "BestEffort"
    for part in resources:
        limits, requests = part.get("limits", {}), part.get("requests", {})
        if {"cpu", "memory"} - limits.keys() or any(
            requests.get(name, limits[name]) != limits[name] for name in ("cpu", "memory")
        ):
            return "Burstable"
    return "Guaranteed"


def initial_status(spec: Object, now: str) -> Object:
    """Return the status of a new pod."""
    status: Object = {"phase": "Pending"}
    if spec.get("schedulingGates"):
        status["conditions"] = [{**GATED, "lastTransitionTime": now}]
    return {**status, "qosClass": qos_class(spec)}


def admit(found: Object) -> None:
    """Add what the admission plugins ServiceAccount, Priority and DefaultTolerationSeconds add to a new pod."""
    spec = found["spec"]
    account = spec.get("serviceAccountName", "default")
    spec["serviceAccountName"] = spec["serviceAccount"] = account
    if spec.get("automountServiceAccountToken", True):
        _mount_token(spec)
    tolerations = spec.setdefault("tolerations", [])
    for condition in ("not-ready", "unreachable"):
        key = f"node.kubernetes.io/{condition}"
        if not _tolerated(tolerations, key):
            tolerations.append({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300})
    spec.setdefault("priority", PRIORITIES.get(spec.get("priorityClassName", ""), 0))
    spec.setdefault("preemptionPolicy", "PreemptLowerPriority")


PRIORITIES = {"system-node-critical": 2_000_001_000, "system-cluster-critical": 2_000_000_000}


def _tolerated(tolerations: Iterable[Object], key: str) -> bool:
    return any(
        found.get("key", key) == key and found.get("effect", "NoExecute") == "NoExecute"
        and found.get("operator") == "Exists" and found.get("key") in (key, None)
        for found in tolerations
    )  # fmt: skip


def _mount_token(spec: Object) -> None:
    """Add the projected volume of the ServiceAccount's token, and its mounts."""
    name = f"kube-api-access-{random_suffix()}"
    field = {"path": "namespace", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}}
    sources = [
        {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [field]}},
    ]
    spec.setdefault("volumes", []).append({"name": name, "projected": {"sources": sources, "defaultMode": 420}})
    for container in [*(spec.get("containers") or []), *(spec.get("initContainers") or [])]:
        mounts = container.setdefault("volumeMounts", [])
        if all(mount.get("mountPath") != TOKEN_PATH for mount in mounts):
            mounts.append({"name": name, "readOnly": True, "mountPath": TOKEN_PATH})
