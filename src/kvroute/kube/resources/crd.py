"""CustomResourceDefinitions of kvroute's resources, from their types: structural schemas, defaults and CEL rules."""

from __future__ import annotations

import inspect
from typing import Any, TypeAlias

import msgspec
import yaml
from msgspec import NODEFAULT
from msgspec import inspect as types

from kvroute.files.json_schema import attribute_docstrings, quantity_schema
from kvroute.kube.resources.fields import GROUP, VERSION, plain_values
from kvroute.kube.resources.router import KvRouterSpec
from kvroute.kube.resources.status import KvRouterStatus
from kvroute.kube.resources.topology import ClusterTopologySpec
from kvroute_engine.files.units import Quantity

Schema: TypeAlias = dict[str, Any]

RULES: dict[str, dict[tuple[str, ...], list[dict[str, str]]]] = {
    "ClusterTopology": {
        ("spec", "levels"): [
            {
                "rule": "self.all(a, self.exists_one(b, a.domain == b.domain))",
                "message": "two levels have the same domain; give each level a name of its own",
            },
            {
                "rule": "self.all(a, self.exists_one(b, a.labelKey == b.labelKey))",
                "message": "two levels have the same labelKey; give each level a node label of its own",
            },
        ]
    },
    "KvRouter": {
        ("spec", "kvCacheTransferTopology"): [
            {
                "rule": "!(has(self.label) && has(self.clusterTopologyName))",
                "message": "label and clusterTopologyName exclude each other; remove one of them",
            },
            {
                "rule": "has(self.label) || has(self.clusterTopologyName)",
                "message": "the level has no meaning yet; set clusterTopologyName, or set label to a label of nodes",
            },
            {
                "rule": "!has(self.place) || has(self.label)",
                "message": "place is only for label; set place in the ClusterTopology",
            },
        ],
        ("spec", "ports"): [
            {
                "rule": "self.client != self.admin",
                "message": "client and admin are the same port; choose two ports",
            }
        ],
        ("spec",): [
            {
                "rule": "self.defaults.timing in self.timing",
                "message": "defaults.timing names no entry of timing; add the entry, or name another one",
            }
        ],
        ("spec", "timing"): [
            {
                "rule": "self.all(name, self[name].prefill.kind == 'piecewise' || has(self[name].prefill.perToken))",
                "message": "a linear or quadratic prefill needs perToken; add it",
            },
            {
                "rule": "self.all(name, self[name].prefill.kind != 'quadratic' || has(self[name].prefill.perToken2))",
                "message": "a quadratic prefill needs perToken2; add it, or set kind to linear",
            },
            {
                "rule": (
                    "self.all(name, self[name].prefill.kind != 'piecewise' || (size(self[name].prefill.tokens) > 1 && "
                    "size(self[name].prefill.tokens) == size(self[name].prefill.times)))"
                ),
                "message": "a piecewise prefill needs two or more tokens and as many times; give one time for each",
            },
        ],
        (): [
            {
                "rule": "self.metadata.name.matches('^[a-z][-a-z0-9]{0,54}$')",
                "message": (
                    "the name also names a Service; begin it with a letter, and use at most 55 letters, digits and -"
                ),
            }
        ],
    },
}
"""CEL rules by kind and path. They use no library that only Kubernetes has, so that any CEL program can check them."""

_COLUMNS = {
    "ClusterTopology": [
        {"name": "Broadest", "type": "string", "jsonPath": ".spec.levels[0].domain"},
        {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
    ],
    "KvRouter": [
        {"name": "Ready", "type": "string", "jsonPath": ".status.conditions[?(@.type=='Ready')].status"},
        {"name": "Gateways", "type": "integer", "jsonPath": ".status.readyReplicas"},
        {"name": "Prefill", "type": "integer", "jsonPath": ".status.engines.prefill"},
        {"name": "Decode", "type": "integer", "jsonPath": ".status.engines.decode"},
        {"name": "Level", "type": "string", "jsonPath": ".spec.kvCacheTransferTopology.level"},
        {"name": "Policy", "type": "string", "jsonPath": ".spec.policy", "priority": 1},
        {
            "name": "Reason",
            "type": "string",
            "jsonPath": ".status.conditions[?(@.type=='Ready')].message",
            "priority": 1,
        },
        {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
    ],
}
_MAP_LISTS = {"levels": ["domain"], "conditions": ["type"]}
"""Lists whose items have a key: two managers can own items of the same list."""


def definitions() -> tuple[Schema, Schema]:
    """Return both CustomResourceDefinitions."""
    return (
        _definition("ClusterTopology", "clustertopologies", "Cluster", [], ClusterTopologySpec, None),
        _definition("KvRouter", "kvrouters", "Namespaced", ["kvr"], KvRouterSpec, KvRouterStatus),
    )


def definition_text(definition: Schema) -> str:
    """Return a definition as YAML."""
    text: str = yaml.dump(definition, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)
    return text


class _Dumper(yaml.SafeDumper):
    """A dumper without aliases: the API server reads them, people do not."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _definition(
    kind: str,
    plural: str,
    scope: str,
    short: list[str],
    spec: type[msgspec.Struct],
    status: type[msgspec.Struct] | None,
) -> Schema:
    properties: Schema = {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {"type": "object"},
        "spec": structural(spec),
    }
    if status is not None:
        properties["status"] = structural(status)
    root: Schema = {
        "type": "object",
        "description": (inspect.getmodule(spec).__doc__ or "").partition("\n")[0],
        "required": ["spec"],
        "properties": properties,
    }
    for path, rules in RULES[kind].items():
        place = root
        for name in path:
            place = place["properties"][name]
        place["x-kubernetes-validations"] = rules
    names: Schema = {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower()}
    version: Schema = {"name": VERSION, "served": True, "storage": True}
    if status is not None:
        version["subresources"] = {"status": {}}
    version |= {"additionalPrinterColumns": _COLUMNS[kind], "schema": {"openAPIV3Schema": root}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{GROUP}",
            "labels": {"app.kubernetes.io/name": "kvroute", "app.kubernetes.io/part-of": "kvroute"},
        },
        "spec": {
            "group": GROUP,
            "scope": scope,
            "names": names | ({"shortNames": short} if short else {}),
            "versions": [version],
        },
    }


def structural(struct: type[msgspec.Struct]) -> Schema:
    """Return the structural schema of a Struct: no references, every node with a type, defaults filled in."""
    return _node(types.type_info(struct))


def _node(kind: types.Type) -> Schema:
    match kind:
        case types.Metadata():
            return _node(kind.type)
        case types.StructType():
            return _mapping(kind)
        case types.CustomType():
            assert issubclass(kind.cls, Quantity), kind.cls
            text = quantity_schema(kind.cls)
            return {"type": "string", "maxLength": 60, "pattern": text["pattern"], "description": text["description"]}
        case types.UnionType():
            return _union([choice for choice in kind.types if not isinstance(choice, types.NoneType)])
        case types.LiteralType():
            return {"type": "string", "enum": list(kind.values)}
        case types.BoolType():
            return {"type": "boolean"}
        case types.IntType() | types.FloatType():
            number = {"type": "integer"} if isinstance(kind, types.IntType) else {"type": "number"}
            return number | _bounds(minimum=kind.ge, maximum=kind.le)
        case types.StrType():
            pattern = kind.pattern.replace(r"\Z", "$") if kind.pattern else None
            return {"type": "string"} | _bounds(minLength=kind.min_length, maxLength=kind.max_length, pattern=pattern)
        case types.ListType():
            limits = _bounds(minItems=kind.min_length, maxItems=kind.max_length)
            return {"type": "array", "items": _node(kind.item_type)} | limits
        case types.DictType(value_type=types.AnyType()):
            return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        case types.DictType():
            limits = _bounds(minProperties=kind.min_length, maxProperties=kind.max_length)
            return {"type": "object", "additionalProperties": _node(kind.value_type)} | limits
    raise AssertionError(kind)


def _union(choices: list[types.Type]) -> Schema:
    """Return the schema of an optional value, or of text that may be a number."""
    if len(choices) == 1:
        return _node(choices[0])
    [text] = [node for node in map(_node, choices) if node["type"] == "string"]
    either: Schema = {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True}
    return either | {name: value for name, value in text.items() if name != "type"}


def _mapping(kind: types.StructType) -> Schema:
    texts = attribute_docstrings(kind.cls)
    properties: Schema = {}
    for field in kind.fields:
        entry = _node(field.type)
        if field.name in texts:
            entry = {"description": _one_line(f"{texts[field.name]} {entry.pop('description', '')}")} | entry
        default = field.default if field.default_factory is NODEFAULT else field.default_factory()
        if default is not NODEFAULT and default is not None:
            entry["default"] = plain_values(default)  # complete: the API server runs rules on it as it is
        if field.encode_name in _MAP_LISTS:
            entry |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": _MAP_LISTS[field.encode_name]}
        properties[field.encode_name] = entry
    described: Schema = {"type": "object", "description": _one_line(kind.cls.__doc__ or "")}
    required = [field.encode_name for field in kind.fields if field.required]
    return described | ({"required": required} if required else {}) | {"properties": properties}


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _bounds(**limits: Any) -> Schema:
    return {name: value for name, value in limits.items() if value is not None}
