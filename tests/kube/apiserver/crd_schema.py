"""Validation of a CustomResourceDefinition: names, versions, and that its schemas are structural."""

from __future__ import annotations

from tests.kube.apiserver.crd_rules import Costs, Scope, check_rules, total_cost
from tests.kube.apiserver.openapi import Place, validate
from tests.kube.apiserver.status import Cause, Object, forbidden_field, go_json, invalid, required, unsupported

PROTECTED = ("k8s.io", "kubernetes.io")
APPROVAL = "api-approved.kubernetes.io"


def validate_definition(found: Object) -> list[Cause]:
    """Return what is wrong with a definition, apart from its metadata."""
    spec = found["spec"]
    group = spec["group"]
    errors: list[Cause] = []
    name = f"{spec['names']['plural']}.{group}"
    if found["metadata"].get("name") != name:
        text = 'must be spec.names.plural+"."+spec.group'
        errors.append(invalid("metadata.name", found["metadata"].get("name", ""), text))
    if group.endswith(tuple(f".{domain}" for domain in PROTECTED)) and APPROVAL not in found["metadata"].get(
        "annotations", {}
    ):
        detail = (
            f'protected groups must have approval annotation "{APPROVAL}", '
            "see https://github.com/kubernetes/enhancements/pull/1111"
        )
        errors.append(required(f"metadata.annotations[{APPROVAL}]", detail))
    if spec["scope"] not in ("Cluster", "Namespaced"):
        errors.append(unsupported("spec.scope", spec["scope"], ("Cluster", "Namespaced")))
    return errors + _versions(found)


def _versions(found: Object) -> list[Cause]:
    versions = found["spec"].get("versions") or []
    errors: list[Cause] = []
    storage = [version["name"] for version in versions if version["storage"]]
    if len(storage) != 1:
        listed = [_shown_version(version) for version in versions]
        text = f"Invalid value: {go_json(listed)}: must have exactly one version marked as storage version"
        errors.append(Cause("FieldValueInvalid", text, "spec.versions"))
        stored = found["status"]["storedVersions"]
        errors += [
            invalid("status.storedVersions", stored, f"must have the storage version {name}")
            for name in storage if name not in stored
        ]  # fmt: skip
    schemas = [(version.get("schema") or {}).get("openAPIV3Schema") for version in versions]
    same = all(schema == schemas[0] for schema in schemas)
    for at, schema in enumerate(schemas):
        if schema is None:
            errors.append(required(f"spec.versions[{at}].schema.openAPIV3Schema"))
        elif not same or at == 0:
            place = "spec.validation" if same else f"spec.versions[{at}].schema"
            errors += _schema_errors(schema, f"{place}.openAPIV3Schema")
    return errors


def _shown_version(version: Object) -> Object:
    """Return a version as Go's internal struct is shown in causes."""
    absent = ("DeprecationWarning", "Schema", "Subresources", "AdditionalPrinterColumns", "SelectableFields")
    made = {"Name": version["name"], "Served": version["served"], "Storage": version["storage"], "Deprecated": False}
    return {**made, **dict.fromkeys(absent)}


def _schema_errors(schema: Object, path: str) -> list[Cause]:
    errors = _structural(schema, path, root=True)
    if errors:
        return errors
    costs = Costs()
    return check_rules(schema, Scope(path), costs) + total_cost(costs, path)


def _structural(schema: Object, path: str, root: bool = False) -> list[Cause]:
    """Return what keeps a schema from being structural, and what is not supported."""
    if "$ref" in schema:
        return [forbidden_field(f"{path}.$ref", "$ref is not supported")]
    errors: list[Cause] = []
    free = schema.get("x-kubernetes-int-or-string") or schema.get("x-kubernetes-preserve-unknown-fields")
    if not schema.get("type") and not free:
        detail = "must not be empty at the root" if root else "must not be empty for specified object fields"
        errors.append(required(f"{path}.type", detail))
    properties = schema.get("properties") or {}
    additional = schema.get("additionalProperties")
    if properties and additional is not None:
        detail = "additionalProperties and properties are mutual exclusive"
        return [*errors, forbidden_field(f"{path}.additionalProperties", detail)]
    if schema.get("uniqueItems"):
        detail = "uniqueItems cannot be set to true since the runtime complexity becomes quadratic"
        errors.append(forbidden_field(f"{path}.uniqueItems", detail))
    if schema.get("type") == "array" and "items" not in schema:
        errors.append(required(f"{path}.items", "must be specified"))
    for word in ("anyOf", "allOf", "oneOf"):
        for at, part in enumerate(schema.get(word) or []):
            if part.get("type") and not schema.get("x-kubernetes-int-or-string"):
                errors.append(forbidden_field(f"{path}.{word}[{at}].type", "must be empty to be structural"))
    if "default" in schema:
        errors += _default(schema, f"{path}.default")
    errors += _list_keys(schema, path)
    for name, part in properties.items():
        where = f"{path}.properties[{name}]"
        if root and name == "metadata":
            errors += _metadata(part, where)
        else:
            errors += _structural(part, where)
    if isinstance(schema.get("items"), dict):
        errors += _structural(schema["items"], f"{path}.items")
    if isinstance(additional, dict):
        errors += _structural(additional, f"{path}.additionalProperties")
    return errors


def _metadata(schema: Object, path: str) -> list[Cause]:
    if set(schema.get("properties") or {}) <= {"name", "generateName"}:
        return []
    detail = "must not specify anything other than name and generateName, but metadata is implicitly specified"
    return [forbidden_field(path, detail)]


def _default(schema: Object, path: str) -> list[Cause]:
    if schema["default"] is None and schema.get("nullable"):
        return []
    return list(validate(schema, schema["default"], Place(path, "")))


def _list_keys(schema: Object, path: str) -> list[Cause]:
    """Return the keys of a list of type map that may be absent."""
    if schema.get("x-kubernetes-list-type") != "map":
        return []
    items = schema.get("items") or {}
    detail = "this property is in x-kubernetes-list-map-keys, so it must have a default or be a required property"
    return [
        required(f"{path}.items.properties[{key}].default", detail)
        for key in schema.get("x-kubernetes-list-map-keys") or []
        if key not in (items.get("required") or []) and "default" not in (items.get("properties") or {}).get(key, {})
    ]
