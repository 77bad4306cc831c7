"""Types of objects as trees, from lightkube's models or an OpenAPI schema: structs, maps, lists with merge keys."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping
from functools import cache

from tests.kube.apiserver.resources import Resource
from tests.kube.apiserver.status import Object

MODELS = {
    "": "core_v1", "apps": "apps_v1", "coordination.k8s.io": "coordination_v1", "discovery.k8s.io": "discovery_v1",
    "events.k8s.io": "events_v1", "policy": "policy_v1", "rbac.authorization.k8s.io": "rbac_v1",
    "admissionregistration.k8s.io": "admissionregistration_v1", "apiextensions.k8s.io": "apiextensions_v1",
    "flowcontrol.apiserver.k8s.io": "flowcontrol_v1", "authentication.k8s.io": "authentication_v1",
    "authorization.k8s.io": "authorization_v1", "autoscaling": "autoscaling_v1",
}  # fmt: skip
"""The module of lightkube's models for each group."""

LIST_KEYS: Mapping[str, tuple[str, ...]] = {
    "Container.env": ("name",), "Container.ports": ("containerPort", "protocol"),
    "Container.volumeMounts": ("mountPath",), "Container.volumeDevices": ("devicePath",),
    "PodSpec.containers": ("name",), "PodSpec.initContainers": ("name",), "PodSpec.ephemeralContainers": ("name",),
    "PodSpec.volumes": ("name",), "PodSpec.hostAliases": ("ip",), "PodSpec.imagePullSecrets": ("name",),
    "PodSpec.schedulingGates": ("name",), "PodSpec.resourceClaims": ("name",),
    "PodSpec.topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"), "PodStatus.conditions": ("type",),
    "PodStatus.podIPs": ("ip",), "PodStatus.hostIPs": ("ip",), "NodeStatus.conditions": ("type",),
    "NodeStatus.addresses": ("type",), "ServiceSpec.ports": ("port", "protocol"),
    "ServiceStatus.conditions": ("type",), "ObjectMeta.ownerReferences": ("uid",),
    "DeploymentStatus.conditions": ("type",), "NamespaceStatus.conditions": ("type",),
    "ServiceAccount.secrets": ("name",), "PodDisruptionBudgetStatus.conditions": ("type",),
    "CustomResourceDefinitionStatus.conditions": ("type",), "ValidatingWebhookConfiguration.webhooks": ("name",),
    "MutatingWebhookConfiguration.webhooks": ("name",), "ValidatingWebhook.matchConditions": ("name",),
    "MutatingWebhook.matchConditions": ("name",),
}  # fmt: skip
"""Keys of lists that are merged item by item (x-kubernetes-list-map-keys of the API's OpenAPI)."""
SETS = frozenset({"ObjectMeta.finalizers", "NodeSpec.podCIDRs"})
ATOMIC = frozenset({
    "LabelSelector", "ObjectReference", "LocalObjectReference", "ConfigMapKeySelector", "SecretKeySelector",
    "ObjectFieldSelector", "ResourceFieldSelector", "SecretReference", "NodeSelector", "NodeSelectorTerm", "RoleRef",
    "Subject", "TypedLocalObjectReference", "ScopeSelector",
})  # fmt: skip
"""Structs that one manager owns as a whole (x-kubernetes-map-type: atomic)."""
ATOMIC_FIELDS = frozenset({"ServiceSpec.selector", "PodSpec.nodeSelector"})
OPAQUE = frozenset({"JSON", "RawExtension", "JSONSchemaPropsOrBool", "JSONSchemaPropsOrArray", "FieldsV1"})
INT64 = frozenset({
    "terminationGracePeriodSeconds", "activeDeadlineSeconds", "generation", "observedGeneration", "runAsUser",
    "runAsGroup", "fsGroup", "tolerationSeconds", "expirationSeconds", "deletionGracePeriodSeconds", "maxLength",
    "minLength", "maxItems", "minItems", "maxProperties", "minProperties",
})  # fmt: skip
MAP_VALUES = {
    "binaryData": "bytes", "limits": "quantity", "requests": "quantity", "capacity": "quantity", "overhead": "quantity",
    "allocatable": "quantity", "hard": "quantity", "used": "quantity", "default": "quantity", "max": "quantity",
    "defaultRequest": "quantity", "min": "quantity", "maxLimitRequestRatio": "quantity", "disruptedPods": "time",
    "properties": "JSONSchemaProps", "patternProperties": "any", "definitions": "any", "dependencies": "any",
    "extra": "any",
}  # fmt: skip
"""Types of the values of untyped dicts in the models, by field; the others are strings."""


class Type:
    """A node of a type tree. `kind` is object, map, list, or that of a scalar (`string`, `time`, `quantity`, ...)."""

    def __init__(
        self,
        kind: str,
        name: str = "",
        items: Type | None = None,
        keys: tuple[str, ...] = (),
        merge: str = "",
    ) -> None:
        self.kind = kind
        self.name = name
        self.items = items
        self.keys = keys
        self.merge = merge
        """`atomic`, `set` or `map` of a list; `atomic` or "" of an object or map."""
        self.fields: Mapping[str, Type] = {}
        self.open = False
        """Whether unknown fields are kept."""

    @property
    def container(self) -> bool:
        """Return whether parts of a value have owners of their own."""
        if self.kind == "list":
            return self.merge in ("set", "map")
        return self.kind in ("object", "map") and self.merge != "atomic"

    def child(self, name: str) -> Type | None:
        """Return the type of a field or map value, or None if there is no such field."""
        if self.kind == "map":
            return self.items
        found = self.fields.get(name)
        return found or (ANY if self.open else None)


class LazyFields(Mapping[str, Type]):
    """Fields of a model, made when first used, because models refer to themselves."""

    def __init__(self, module: str, model: str) -> None:
        self._source = (module, model)
        self._made: dict[str, Type] | None = None

    def _fields(self) -> dict[str, Type]:
        if self._made is None:
            self._made = dict(_model_fields(*self._source))
        return self._made

    def __getitem__(self, name: str) -> Type:
        return self._fields()[name]

    def __iter__(self) -> Iterable[str]:  # type: ignore[override]
        return iter(self._fields())

    def __len__(self) -> int:
        return len(self._fields())


ANY = Type("any")
ANY.open = True
STRING = Type("string")


def _model_fields(module: str, model: str) -> Iterable[tuple[str, Type]]:
    """Yield JSON name and type of each field of a model."""
    loaded = getattr(importlib.import_module(f"lightkube.models.{module}"), model)
    annotations: Mapping[str, str] = loaded.__annotations__
    for name, encoded in zip(loaded.__struct_fields__, loaded.__struct_encode_fields__, strict=True):
        yield encoded, _parse(module, model, encoded, annotations[name])


def _parse(module: str, model: str, field: str, annotation: str) -> Type:
    """Return the type that an annotation of a model names."""
    text = re.sub(r"^Optional\[(.*)\]$", r"\1", annotation)
    where = f"{'Container' if model == 'EphemeralContainer' else model}.{field}"
    if listed := re.fullmatch(r"List\[(.*)\]", text):
        keys = LIST_KEYS.get(where, ())
        merge = "map" if keys else "set" if where in SETS else "atomic"
        return Type("list", items=_parse(module, model, field, listed[1]), keys=keys, merge=merge)
    if text == "dict":
        kind = "bytes" if where == "Secret.data" else MAP_VALUES.get(field, "string")
        items = ANY if kind == "any" else model_type(module, kind) if kind[0].isupper() else Type(kind)
        return Type("map", items=items, merge="atomic" if where in ATOMIC_FIELDS else "")
    scalars = {"str": "string", "bool": "boolean", "float": "number"}
    if text in scalars:
        return Type("bytes") if field == "caBundle" else Type(scalars[text])
    if text == "int":
        return Type("integer", name="int64" if field in INT64 else "int32")
    owner, _, name = text.rpartition(".")
    named = {"Time": "time", "MicroTime": "microtime", "Quantity": "quantity", "IntOrString": "int-or-string"}
    if name in named:
        return Type(named[name])
    return ANY if name in OPAQUE else model_type(owner or module, name)


@cache
def model_type(module: str, model: str) -> Type:
    """Return the type of one of lightkube's models."""
    made = Type("object", name=model, merge="atomic" if model in ATOMIC else "")
    made.fields = LazyFields(module, model)
    return made


METADATA = model_type("meta_v1", "ObjectMeta")


def structural(schema: Object, root: bool = False) -> Type:
    """Return the type of a structural OpenAPI schema; the root has apiVersion, kind and metadata."""
    kind = schema.get("type", "any")
    if schema.get("x-kubernetes-int-or-string"):
        return Type("int-or-string")
    if kind == "array":
        merge = schema.get("x-kubernetes-list-type", "atomic")
        keys = tuple(schema.get("x-kubernetes-list-map-keys", ()))
        return Type("list", items=structural(schema.get("items", {})), keys=keys, merge=merge)
    merge = "atomic" if schema.get("x-kubernetes-map-type") == "atomic" else ""
    additional = schema.get("additionalProperties")
    if kind == "object" and isinstance(additional, dict):
        return Type("map", items=structural(additional), merge=merge)
    made = Type(kind, merge=merge)
    embedded = bool(schema.get("x-kubernetes-embedded-resource"))
    made.open = bool(schema.get("x-kubernetes-preserve-unknown-fields")) or kind == "any" or additional is True
    fields = {name: structural(part) for name, part in schema.get("properties", {}).items()}
    if root or embedded:
        fields |= {"apiVersion": STRING, "kind": STRING, "metadata": METADATA}
    made.fields = fields
    return made


def resource_type(resource: Resource) -> Type:
    """Return the type of the objects of a resource."""
    if resource.schema is not None:
        return structural(resource.schema, root=True)
    return model_type(MODELS[resource.group], resource.kind)
