"""What a write may set: status and spec kept apart, generation, and validation before anything is stored."""

from __future__ import annotations

import copy
from typing import Any

from tests.kube.apiserver import crd_schema, events, metadata, openapi, rules, services
from tests.kube.apiserver.decode import ALWAYS, plain
from tests.kube.apiserver.pods import qos_class
from tests.kube.apiserver.requests import Request
from tests.kube.apiserver.resources import Resource
from tests.kube.apiserver.status import Cause, Object, quoted, unprocessable
from tests.kube.apiserver.store import Store
from tests.kube.apiserver.validation import validate_changes, validate_create

METADATA_BY_STATUS = frozenset({"Pod", "Node", "Namespace"})
"""Kinds whose labels and annotations can be changed through /status."""
KEEPS_STATUS_AT_CREATE = frozenset({"Node"})
BLOCKING = frozenset({
    "FieldValueNotSupported", "FieldValueRequired", "FieldValueTooLong", "FieldValueTooMany", "FieldValueTypeInvalid",
})  # fmt: skip
UNCHECKED = Cause(
    "FieldValueInvalid",
    "Invalid value: null: some validation rules were not checked because the object was invalid; correct the existing "
    "errors to complete validation",
    "<nil>",
)


def prepare_create(store: Store, resource: Resource, found: Object) -> Object:
    """Return a new object as its kind's rules make it: without a status of the client, with generation 1."""
    made = copy.deepcopy(found)
    if resource.generation or resource.custom:
        made["metadata"]["generation"] = 1
    has_status = resource.sub("status") is not None
    if has_status and resource.custom:
        made.pop("status", None)
    elif has_status and resource.kind not in KEEPS_STATUS_AT_CREATE:
        made["status"] = plain(ALWAYS.get(resource.kind, {}).get("status", {}))
    if resource.kind == "Namespace":
        made["spec"]["finalizers"] = ["kubernetes"]
        made["status"] = {"phase": "Active"}
    if resource.kind == "Pod":
        made["status"] = {"phase": "Pending", "qosClass": qos_class(made["spec"])}
    if resource.kind == "Service":
        services.allocate(store, made)
    if resource.kind == "CustomResourceDefinition":
        storage = [version["name"] for version in made["spec"].get("versions") or [] if version["storage"]]
        made["status"] = {
            "conditions": None, "acceptedNames": {"plural": "", "kind": ""}, "storedVersions": storage[:1],
        }  # fmt: skip
    return made


def prepare_update(resource: Resource, found: Object, before: Object, subresource: str) -> Object:
    """Return an updated object: what the part of the resource does not cover stays as it was."""
    made = {**found, "metadata": _kept_metadata(found["metadata"], before["metadata"])}
    if subresource == "status":
        managed = made["metadata"].get("managedFields")
        kept = {
            **before,
            "metadata": {**made["metadata"]} if resource.kind in METADATA_BY_STATUS else before["metadata"],
        }
        if resource.kind not in METADATA_BY_STATUS:
            kept["metadata"] = {**kept["metadata"], "managedFields": managed}
            if managed is None:
                del kept["metadata"]["managedFields"]
        return _with(kept, "status", found.get("status"))
    if resource.sub("status") is not None:
        made = _with(made, "status", before.get("status"))
    if resource.kind == "Namespace":
        made["spec"] = {**made["spec"], "finalizers": before["spec"].get("finalizers")}
        if made["spec"]["finalizers"] is None:
            del made["spec"]["finalizers"]
    if resource.kind == "Service":
        services.keep(made, before)
    if (resource.generation or resource.custom) and _counts(resource, made) != _counts(resource, before):
        made["metadata"]["generation"] = before["metadata"].get("generation", 0) + 1
    return made


def _with(found: Object, name: str, value: Any) -> Object:
    left = {key: part for key, part in found.items() if key != name}
    return left if value is None else {**left, name: value}


def _kept_metadata(found: Object, held: Object) -> Object:
    """Return metadata with what clients can not change, or left out, from the object before."""
    made = dict(found)
    if not made.get("uid"):
        made["uid"] = held["uid"]
    for name in ("deletionTimestamp", "deletionGracePeriodSeconds"):
        if name in held and name not in made:
            made[name] = held[name]
    if held.get("deletionTimestamp"):
        made["deletionTimestamp"] = held["deletionTimestamp"]
    made["creationTimestamp"] = held["creationTimestamp"]
    made.pop("generation", None)
    if "generation" in held:
        made["generation"] = held["generation"]
    return made


def _counts(resource: Resource, found: Object) -> Object:
    """Return the part of an object whose change raises the generation."""
    left = {name: part for name, part in found.items() if name not in ("metadata", "apiVersion")}
    if resource.sub("status") is not None:
        left.pop("status", None)
    if resource.kind == "Deployment":
        left["annotations"] = found["metadata"].get("annotations")
    return left


def validate_new(request: Request, found: Object) -> None:
    """Raise ApiError 422 for a new object that is invalid."""
    resource = request.resource
    if resource.custom and found.get("kind") != resource.kind:
        cause = Cause("FieldValueInvalid", f"Invalid value: {quoted(found['kind'])}: must be {resource.kind}", "kind")
        where = type(resource.where())(resource.group, found["kind"], found["metadata"].get("name", ""))
        raise unprocessable(where, [cause])
    causes = metadata.validate(found, resource.custom)
    if resource.custom:
        causes += _schema_causes(request, found, None, "")
    elif resource.kind == "CustomResourceDefinition":
        causes += crd_schema.validate_definition(found)
    elif resource.kind == "Event":
        causes += events.validate_new(resource, found)
    else:
        causes += validate_create(found)
    if causes:
        raise unprocessable(resource.of_kind(found["metadata"].get("name", "")), causes)


def validate_update(request: Request, found: Object, before: Object) -> None:
    """Raise ApiError 422 for an update that is invalid. Both the generic and the kind's checks cover metadata."""
    resource = request.resource
    generic = metadata.validate(found, resource.custom) + metadata.validate_update(found, before)
    if generic and request.subresource != "status":
        generic += metadata.validate_update(found, before) + metadata.validate(found, resource.custom)
    causes = generic
    if resource.custom:
        request.warnings += _finalizer_warnings(found, before)
        causes += _schema_causes(request, found, before, request.subresource)
    elif request.subresource == "status":
        pass
    elif resource.kind == "CustomResourceDefinition":
        causes += crd_schema.validate_definition(found)
    elif resource.kind == "Event":
        causes += events.validate_changes(resource, found, before)
    else:
        causes += validate_create(found) + validate_changes(found, before)
    if causes:
        raise unprocessable(resource.of_kind(found["metadata"].get("name", "")), causes)


def _finalizer_warnings(found: Object, before: Object) -> list[str]:
    """Return the warnings about new finalizers without a domain."""
    held = before["metadata"].get("finalizers") or []
    advice = "prefer a domain-qualified finalizer name to avoid accidental conflicts with other finalizer writers"
    return [
        f"metadata.finalizers: {quoted(name)}: {advice}"
        for name in found["metadata"].get("finalizers") or []
        if "/" not in name and name not in metadata.STANDARD_FINALIZERS and name not in held
    ]


def _schema_causes(request: Request, found: Object, before: Object | None, subresource: str) -> list[Cause]:
    """Return what is wrong with a custom object by its schema and rules. Values that were there before are excused."""
    schema = request.resource.schema or {}
    checked: Any = found
    place = openapi.Place("", "")
    if subresource == "status":
        checked, place = found.get("status"), openapi.Place("status", "")
        schema_part = (schema.get("properties") or {}).get("status") or {}
        causes = list(openapi.validate(schema_part, checked, place)) if checked is not None else []
    else:
        body = {name: part for name, part in found.items() if name not in openapi.ENVELOPE}
        causes = list(openapi.validate(schema, body, place))
    if before is not None:
        causes = [cause for cause in causes if not openapi.unchanged(cause, found, before)]
    if not _has_rules(schema):
        return causes
    if any(cause.reason in BLOCKING for cause in causes):
        return [*causes, UNCHECKED]
    for cause, excused in rules.check(schema, _for_rules(found), before and _for_rules(before), "", before is not None):
        if excused:
            request.warnings.append(cause.text())
        else:
            causes.append(cause)
    return causes


def _for_rules(found: Object) -> Object:
    """Return an object as rules see it: of metadata, the names alone."""
    names = {key: value for key, value in found["metadata"].items() if key in ("name", "generateName")}
    return {**found, "metadata": names}


def _has_rules(schema: Any) -> bool:
    if isinstance(schema, dict):
        return rules.RULES in schema or any(_has_rules(part) for part in schema.values())
    return isinstance(schema, list) and any(_has_rules(part) for part in schema)
