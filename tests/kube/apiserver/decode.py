"""Decoding of request bodies: JSON with duplicate fields, types, unknown fields, and the form that Go writes back."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.kube.apiserver.golang import (
    GoError,
    canonical_quantity,
    format_time,
    json_error,
    json_kind,
    parse_time,
)  # fmt: skip
from tests.kube.apiserver.status import Object
from tests.kube.apiserver.types import Type

POINTERS = frozenset({
    "holderIdentity", "leaseTransitions", "leaseDurationSeconds", "replicas", "terminationGracePeriodSeconds",
    "progressDeadlineSeconds", "revisionHistoryLimit", "defaultMode", "tolerationSeconds", "priority",
    "expirationSeconds", "timeoutSeconds", "automountServiceAccountToken", "enableServiceLinks", "optional",
    "controller", "blockOwnerDeletion", "immutable", "ready", "serving", "terminating", "runAsNonRoot",
    "allowPrivilegeEscalation", "privileged", "readOnlyRootFilesystem", "hostUsers", "deletionGracePeriodSeconds",
    "activeDeadlineSeconds", "runAsUser", "maxLength", "minLength", "maxItems", "minItems", "minimum", "maximum",
    "optionalOldSelf", "nominalConcurrencyShares", "lendablePercent", "borrowingLimitPercent",
    "x-kubernetes-preserve-unknown-fields",
})  # fmt: skip
"""Optional scalars that are pointers in Go, so that a zero value is kept."""

NODE_INFO: Object = dict.fromkeys((
    "machineID", "systemUUID", "bootID", "kernelVersion", "osImage", "containerRuntimeVersion", "kubeletVersion",
    "kubeProxyVersion", "operatingSystem", "architecture",
), "")  # fmt: skip
NODE_STATUS: Object = {"daemonEndpoints": {"kubeletEndpoint": {"Port": 0}}, "nodeInfo": NODE_INFO}
ALWAYS: dict[str, Object] = {
    "Pod": {"metadata": {}, "spec": {"containers": None}, "status": {}},
    "PodTemplateSpec": {"metadata": {}, "spec": {"containers": None}},
    "PodSpec": {"containers": None},
    "Container": {"name": "", "resources": {}},
    "EphemeralContainer": {"name": "", "resources": {}},
    "PodCondition": {"type": "", "status": "", "lastProbeTime": None, "lastTransitionTime": None},
    "Node": {"metadata": {}, "spec": {}, "status": NODE_STATUS},
    "NodeStatus": NODE_STATUS,
    "NodeDaemonEndpoints": {"kubeletEndpoint": {"Port": 0}},
    "DaemonEndpoint": {"Port": 0},
    "NodeSystemInfo": NODE_INFO,
    "NodeCondition": {"type": "", "status": "", "lastHeartbeatTime": None, "lastTransitionTime": None},
    "DeploymentCondition": {"type": "", "status": "", "lastUpdateTime": None, "lastTransitionTime": None},
    "Deployment": {"metadata": {}, "spec": {
        "selector": None, "template": {"metadata": {}, "spec": {"containers": None}}, "strategy": {},
    }, "status": {}},
    "DeploymentSpec": {"selector": None, "template": {"metadata": {}, "spec": {"containers": None}}, "strategy": {}},
    "Service": {"metadata": {}, "spec": {}, "status": {"loadBalancer": {}}},
    "ServicePort": {"port": 0, "targetPort": 0},
    "Namespace": {"metadata": {}, "spec": {}, "status": {}},
    "Lease": {"metadata": {}, "spec": {}},
    "LimitRange": {"metadata": {}, "spec": {"limits": None}},
    "ResourceQuota": {"metadata": {}, "spec": {}, "status": {}},
    "EndpointSlice": {"metadata": {}, "addressType": "", "endpoints": None, "ports": None},
    "Endpoint": {"addresses": None, "conditions": {}},
    "PodDisruptionBudget": {"metadata": {}, "spec": {}, "status": {
        "disruptionsAllowed": 0, "currentHealthy": 0, "desiredHealthy": 0, "expectedPods": 0,
    }},
    "PodDisruptionBudgetStatus": {
        "disruptionsAllowed": 0, "currentHealthy": 0, "desiredHealthy": 0, "expectedPods": 0,
    },
    "Role": {"metadata": {}, "rules": None},
    "ClusterRole": {"metadata": {}, "rules": None},
    "RoleBinding": {"metadata": {}, "roleRef": {"apiGroup": "", "kind": "", "name": ""}},
    "ClusterRoleBinding": {"metadata": {}, "roleRef": {"apiGroup": "", "kind": "", "name": ""}},
    "OwnerReference": {"apiVersion": "", "kind": "", "name": "", "uid": ""},
    "CustomResourceDefinition": {"metadata": {}, "spec": {}, "status": {}},
    "CustomResourceDefinitionSpec": {"group": "", "names": {"plural": "", "kind": ""}, "scope": "", "versions": None},
    "CustomResourceDefinitionNames": {"plural": "", "kind": ""},
    "CustomResourceDefinitionVersion": {"name": "", "served": False, "storage": False},
    "CustomResourceDefinitionStatus": {
        "conditions": None, "acceptedNames": {"plural": "", "kind": ""}, "storedVersions": None,
    },
    "ValidationRule": {"rule": ""},
    "ValidatingWebhook": {"name": "", "clientConfig": {}, "sideEffects": None, "admissionReviewVersions": None},
    "MutatingWebhook": {"name": "", "clientConfig": {}, "sideEffects": None, "admissionReviewVersions": None},
    "CustomResourceColumnDefinition": {"name": "", "type": "", "jsonPath": ""},
}  # fmt: skip
"""Fields that Go writes even when they are empty, by struct."""
EVENT: Object = {
    "metadata": {}, "involvedObject": {}, "source": {}, "firstTimestamp": None, "lastTimestamp": None,
    "eventTime": None, "reportingComponent": "", "reportingInstance": "",
}  # fmt: skip


class Pairs(dict[str, Any]):
    """A JSON object that remembers the names that came more than once."""

    repeated: list[str]


def _pairs(found: list[tuple[str, Any]]) -> Pairs:
    made = Pairs()
    made.repeated = []
    for name, value in found:
        if name in made:
            made.repeated.append(name)
            if isinstance(made[name], Pairs) and isinstance(value, Pairs):
                made[name].repeated += value.repeated
                made[name].update(value)
                continue
        made[name] = value
    return made


def parse_json(text: str) -> Any:
    """Return the value of a JSON text; raise GoError with Go's text."""
    try:
        return json.loads(text, object_pairs_hook=_pairs, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise GoError(json_error(error)) from None
    except RecursionError:
        raise GoError("exceeded max depth") from None


def _no_constant(name: str) -> Any:
    raise GoError(f"invalid character '{name[0]}' looking for beginning of value")


def duplicates(value: object, path: str = "") -> list[str]:
    """Return the paths of fields that came more than once, inner ones first."""
    if isinstance(value, list):
        return [found for at, item in enumerate(value) for found in duplicates(item, f"{path}[{at}]")]
    if not isinstance(value, dict):
        return []
    inner = [found for name, part in value.items() for found in duplicates(part, _join(path, name))]
    return inner + [_join(path, name) for name in getattr(value, "repeated", ())]


def plain(value: Any) -> Any:
    """Return the value with ordinary dicts."""
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


@dataclass(slots=True)
class Decoder:
    """Converts a JSON value to the form that Go's struct of a type would be written as."""

    unknown: list[str] = field(default_factory=list)
    """Paths of fields that the type does not have."""

    def decode(self, type_: Type, value: Any) -> Any:
        """Return the converted object; raise GoError with Go's text for a value of another type."""
        return self._convert(type_, value if value is not None else {}, type_.name, (), "")

    def _convert(self, type_: Type, value: Any, struct: str, names: Sequence[str], path: str) -> Any:
        if type_.kind == "any":
            return value
        if type_.kind == "object":
            return self._object(type_, value, struct, names, path)
        if type_.kind == "map":
            self._expect(isinstance(value, dict), value, struct, names, "map[string]string")
            assert type_.items is not None
            empty = "" if type_.items.kind in ("string", "bytes") else None
            return {
                name: empty if part is None
                else self._convert(type_.items, part, struct, names, _join(path, name))
                for name, part in value.items()
            }  # fmt: skip
        if type_.kind == "list":
            self._expect(isinstance(value, list), value, struct, names, f"[]{_go_type(type_.items)}")
            assert type_.items is not None
            return [
                self._convert(type_.items, item, struct, names, f"{path}[{at}]")
                for at, item in enumerate(value) if item is not None
            ]  # fmt: skip
        return self._scalar(type_, value, struct, names)

    def _object(self, type_: Type, value: Any, struct: str, names: Sequence[str], path: str) -> Object:
        self._expect(isinstance(value, dict), value, struct, names, f"v1.{type_.name}")
        made: Object = {}
        always = EVENT if type_.name == "Event" and "involvedObject" in type_.fields else ALWAYS.get(type_.name, {})
        for name, part in value.items():
            inner = type_.fields.get(name)
            if inner is None:
                self.unknown.append(_join(path, name))
                continue
            if part is None and inner.kind != "any":
                continue
            converted = self._convert(inner, part, type_.name, (*names, name), _join(path, name))
            if name in always or name in POINTERS or not _empty(inner, converted):
                made[name] = None if name in always and converted == [] else converted
        for name, empty in always.items():
            if name not in made:
                made[name] = plain(empty)
            elif isinstance(empty, dict) and isinstance(made[name], dict):
                made[name] = {**plain(empty), **made[name]}
        return made

    def _scalar(self, type_: Type, value: Any, struct: str, names: Sequence[str]) -> Any:
        kind = type_.kind
        if kind == "integer":
            whole = isinstance(value, int) and not isinstance(value, bool)
            self._expect(whole, value, struct, names, type_.name or "int64")
            return value
        if kind == "number":
            self._expect(json_kind(value) == "number", value, struct, names, "float64")
            return value
        if kind == "boolean":
            self._expect(isinstance(value, bool), value, struct, names, "bool")
            return value
        if kind == "int-or-string":
            self._expect(json_kind(value) in ("number", "string"), value, struct, names, "string")
            return value
        if kind == "quantity" and json_kind(value) == "number":
            return canonical_quantity(str(value))
        self._expect(isinstance(value, str), value, struct, names, "string")
        return _text(kind, value)

    def _expect(self, right: bool, value: Any, struct: str, names: Sequence[str], go_type: str) -> None:
        if not right:
            found = json_kind(value)
            if found == "number" and go_type.startswith("int"):
                found = f"number {value}"
            raise GoError(
                f"json: cannot unmarshal {found} into Go struct field {struct}.{'.'.join(names)} of type {go_type}"
            )


def _go_type(type_: Type | None) -> str:
    return "string" if type_ is None or type_.kind == "string" else f"v1.{type_.name}"


def _text(kind: str, value: str) -> str:
    """Return a text of a kind in its canonical form."""
    if kind in ("time", "microtime"):
        return format_time(parse_time(value, kind == "microtime"), kind == "microtime")
    if kind == "quantity":
        return canonical_quantity(value)
    if kind == "bytes":
        try:
            base64.b64decode(value, validate=True)
        except binascii.Error:
            wrong = next((at for at, sign in enumerate(value) if not (sign.isalnum() or sign in "+/=")), 0)
            raise GoError(f"illegal base64 data at input byte {wrong}") from None
    return value


def _empty(type_: Type, value: Any) -> bool:
    """Return whether Go leaves the value out (omitempty); pointers to structs are kept."""
    if type_.kind in ("object", "int-or-string", "any"):
        return False
    return value in ("", 0, False) or value == [] or value == {}
