"""Validation of object metadata: names, labels, annotations, owners, finalizers, and what an update may not change."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.kube.apiserver.names import (
    is_path_segment,
    label_1035_errors,
    label_errors,
    label_key_errors,
    label_value_errors,
    subdomain_errors,
)  # fmt: skip
from tests.kube.apiserver.status import Cause, Object, forbidden_field, go_json, invalid, required, too_long

ANNOTATIONS_MAX_BYTES = 262_144
STANDARD_FINALIZERS = ("foregroundDeletion", "orphan", "kubernetes")
NAME_RULES: Mapping[str, Callable[[str], list[str]]] = {
    "Namespace": label_errors,
    "Service": label_1035_errors,
    **dict.fromkeys(("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"), is_path_segment),
}
IMMUTABLE = ("name", "namespace", "uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds")


def validate(found: Object, custom: bool = False) -> list[Cause]:
    """Return what is wrong with the metadata of an object."""
    metadata = found["metadata"]
    errors: list[Cause] = []
    rule = NAME_RULES.get(found.get("kind", ""), subdomain_errors)
    name = metadata.get("name", "")
    if not name:
        errors.append(required("metadata.name", "name or generateName is required"))
    else:
        errors += [invalid("metadata.name", name, text) for text in rule(name)]
    errors += labels(metadata.get("labels") or {}, "metadata.labels")
    errors += annotation_errors(metadata.get("annotations") or {})
    errors += owners(metadata.get("ownerReferences") or [])
    return errors + finalizers(metadata.get("finalizers") or [], custom)


def labels(found: Mapping[str, str], path: str) -> list[Cause]:
    """Return what is wrong with labels."""
    errors = []
    for key, value in found.items():
        errors += [invalid(path, key, text) for text in label_key_errors(key)]
        errors += [invalid(path, value, text) for text in label_value_errors(value)]
    return errors


def annotation_errors(found: Mapping[str, str]) -> list[Cause]:
    """Return what is wrong with annotations."""
    path = "metadata.annotations"
    errors = [invalid(path, key, text) for key in found for text in label_key_errors(key.lower())]
    if sum(len(key.encode()) + len(value.encode()) for key, value in found.items()) > ANNOTATIONS_MAX_BYTES:
        errors.append(too_long(path, ANNOTATIONS_MAX_BYTES))
    return errors


def owners(found: list[Object]) -> list[Cause]:
    """Return what is wrong with owner references."""
    path = "metadata.ownerReferences"
    errors: list[Cause] = []
    controllers: list[Object] = []
    for owner in found:
        if not owner.get("apiVersion"):
            errors.append(invalid(f"{path}.apiVersion", "", "version must not be empty"))
        errors += [
            invalid(f"{path}.{name}", "", "must not be empty")
            for name in ("kind", "name", "uid")
            if not owner.get(name)
        ]
        if owner.get("controller"):
            controllers.append(owner)
    if len(controllers) > 1:
        first, second = (f"{owner['kind']}/{owner['name']}" for owner in controllers[:2])
        detail = (
            f'Only one reference can have Controller set to true. Found "true" in references for {first} and {second}'
        )
        errors.append(Cause("FieldValueInvalid", f"Invalid value: {go_json(found)}: {detail}", path))
    return errors


def finalizers(found: list[str], custom: bool) -> list[Cause]:
    """Return what is wrong with finalizers. Custom resources may have names without a domain."""
    path = "metadata.finalizers"
    errors: list[Cause] = []
    for at, name in enumerate(found):
        errors += [invalid(path, name, text) for text in label_key_errors(name)]
        if not custom and "/" not in name and name not in STANDARD_FINALIZERS:
            detail = "name is neither a standard finalizer name nor is it fully qualified"
            errors.append(invalid(f"{path}[{at}]", name, detail))
    return errors


def validate_update(found: Object, before: Object) -> list[Cause]:
    """Return what an update changes without permission, and the errors that updates repeat."""
    metadata, held = found["metadata"], before["metadata"]
    errors: list[Cause] = []
    if held.get("deletionTimestamp"):
        added = [name for name in metadata.get("finalizers") or [] if name not in (held.get("finalizers") or [])]
        if added:
            listed = ", ".join(f'"{name}"' for name in added)
            detail = "no new finalizers can be added if the object is being deleted, found new finalizers "
            errors.append(forbidden_field("metadata.finalizers", f"{detail}[]string{{{listed}}}"))
    errors += [
        invalid(f"metadata.{name}", metadata.get(name), "field is immutable")
        for name in IMMUTABLE
        if metadata.get(name) != held.get(name)
    ]
    errors += labels(metadata.get("labels") or {}, "metadata.labels")
    return errors + annotation_errors(metadata.get("annotations") or {})
