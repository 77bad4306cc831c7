"""Validation of built-in objects other than pods, with the API server's causes."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping

from tests.kube.apiserver.names import config_key_errors, label_key_errors
from tests.kube.apiserver.pods import validate_pod, validate_pod_update, validate_spec
from tests.kube.apiserver.selectors import from_object
from tests.kube.apiserver.status import (
    Cause,
    Object,
    forbidden_field,
    go_json,
    invalid,
    required,
    too_long,
    unsupported,
)  # fmt: skip
from tests.kube.apiserver.webhook_rules import validate_webhooks

CONFIG_MAX_BYTES = 1_048_576
TAINT_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


def _config(found: Object) -> list[Cause]:
    errors: list[Cause] = []
    total = 0
    for part in ("data", "binaryData"):
        for key, value in (found.get(part) or {}).items():
            errors += [invalid(f"{part}[{key}]", key, text) for text in config_key_errors(key)]
            total += len(value.encode())
    if total > CONFIG_MAX_BYTES:
        errors.append(too_long("[]", CONFIG_MAX_BYTES))
    return errors


def _config_update(found: Object, before: Object) -> list[Cause]:
    if not before.get("immutable"):
        return []
    detail = "field is immutable when `immutable` is set"
    return [
        forbidden_field(part, detail)
        for part in ("immutable", "data", "binaryData")
        if found.get(part) != before.get(part)
    ]


def _lease(found: Object) -> list[Cause]:
    spec = found["spec"]
    errors = []
    if spec.get("leaseDurationSeconds", 1) <= 0:
        errors.append(invalid("spec.leaseDurationSeconds", spec["leaseDurationSeconds"], "must be greater than 0"))
    if spec.get("leaseTransitions", 0) < 0:
        detail = "must be greater than or equal to 0"
        errors.append(invalid("spec.leaseTransitions", spec["leaseTransitions"], detail))
    return errors


def _node(found: Object) -> list[Cause]:
    errors: list[Cause] = []
    for at, taint in enumerate(found["spec"].get("taints") or []):
        path = f"metadata.taints[{at}]"
        errors += [
            invalid(f"{path}.key", taint.get("key", ""), text) for text in label_key_errors(taint.get("key", ""))
        ]
        if taint.get("effect") not in TAINT_EFFECTS:
            errors.append(unsupported(f"{path}.effect", taint.get("effect", ""), TAINT_EFFECTS))
    return errors


def _node_update(found: Object, before: Object) -> list[Cause]:
    held = before["spec"].get("podCIDRs")
    if held and found["spec"].get("podCIDRs") != held:
        return [forbidden_field("spec.podCIDRs", 'node updates may not change podCIDR except from "" to valid')]
    return []


def _deployment(found: Object) -> list[Cause]:
    spec = found["spec"]
    template = spec["template"]
    labels = template["metadata"].get("labels")
    errors = []
    if spec.get("replicas", 0) < 0:
        errors.append(invalid("spec.replicas", spec["replicas"], "must be greater than or equal to 0"))
    if not spec.get("selector"):
        errors.append(required("spec.selector"))
    if not spec.get("selector") or not from_object(spec["selector"]).matches(labels):
        text = f"Invalid value: {go_json(labels)}: `selector` does not match template `labels`"
        errors.append(Cause("FieldValueInvalid", text, "spec.template.metadata.labels"))
    return errors + validate_spec(template["spec"], "spec.template.spec")


def _deployment_update(found: Object, before: Object) -> list[Cause]:
    if found["spec"].get("selector") != before["spec"].get("selector"):
        return [invalid("spec.selector", found["spec"].get("selector"), "field is immutable")]
    return []


def _endpoint_slice(found: Object) -> list[Cause]:
    kind = found.get("addressType")
    if not kind:
        return [required("addressType")]
    errors: list[Cause] = []
    for at, endpoint in enumerate(found.get("endpoints") or []):
        for number, address in enumerate(endpoint.get("addresses") or []):
            errors += _address(kind, address, f"endpoints[{at}].addresses", number)
    return errors


def _address(kind: str, address: str, path: str, number: int) -> list[Cause]:
    if kind == "FQDN":
        return []
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return [invalid(f"{path}[{number}]", address, "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)")]
    errors = []
    if (parsed.version == 4) != (kind == "IPv4"):
        errors.append(invalid(path, address, f"must be an {kind} address"))
    if parsed.is_loopback:
        detail = "may not be in the loopback range (127.0.0.0/8, ::1/128)"
        errors.append(invalid(f"{path}[{number}]", address, detail))
    return errors


def _endpoint_slice_update(found: Object, before: Object) -> list[Cause]:
    if found["addressType"] != before["addressType"]:
        return [invalid("addressType", found["addressType"], "field is immutable")]
    return []


def _binding_update(found: Object, before: Object) -> list[Cause]:
    if found["roleRef"] == before["roleRef"]:
        return []
    role = {name[0].upper() + name[1:]: value for name, value in found["roleRef"].items()}
    shown = {"APIGroup": role["ApiGroup"], "Kind": role["Kind"], "Name": role["Name"]}
    return [invalid("roleRef", shown, "cannot change roleRef")]


def _service_update(found: Object, before: Object) -> list[Cause]:
    held, now = before["spec"].get("clusterIP"), found["spec"].get("clusterIP")
    if held and now != held and found["spec"].get("type") != "ExternalName":
        return [invalid("spec.clusterIPs[0]", found["spec"].get("clusterIPs"), "may not change once set")]
    return []


CREATE: Mapping[str, Callable[[Object], list[Cause]]] = {
    "ConfigMap": _config, "Secret": _config, "Lease": _lease, "Node": _node, "Deployment": _deployment,
    "EndpointSlice": _endpoint_slice, "Pod": validate_pod, "ValidatingWebhookConfiguration": validate_webhooks,
    "MutatingWebhookConfiguration": validate_webhooks,
}  # fmt: skip
UPDATE: Mapping[str, Callable[[Object, Object], list[Cause]]] = {
    "ConfigMap": _config_update, "Secret": _config_update, "Node": _node_update, "Deployment": _deployment_update,
    "EndpointSlice": _endpoint_slice_update, "Pod": validate_pod_update, "RoleBinding": _binding_update,
    "ClusterRoleBinding": _binding_update, "Service": _service_update,
}  # fmt: skip


def validate_create(found: Object) -> list[Cause]:
    """Return what is wrong with a new object, apart from its metadata."""
    validator = CREATE.get(found["kind"])
    return validator(found) if validator else []


def validate_changes(found: Object, before: Object) -> list[Cause]:
    """Return what an update may not change, apart from metadata."""
    validator = UPDATE.get(found["kind"])
    return validator(found, before) if validator else []
