"""Types of the fields of custom resources, and the check of an object against a type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from kvroute.types import InputError, InputErrors
from kvroute_engine.files.form import Lines, form_faults
from kvroute_engine.files.units import Quantity, quantity_text, read_quantity

GROUP = "kvroute.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

Object: TypeAlias = Mapping[str, Any]
"""An object of the Kubernetes API as decoded JSON."""

DomainName: TypeAlias = Annotated[
    str, Meta(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?\Z", max_length=40, examples=["zone", "rack"])
]
LabelKey: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?\Z",
        max_length=317,
        examples=["topology.kubernetes.io/zone"],
    ),
]
LabelValue: TypeAlias = Annotated[
    str, Meta(pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?\Z", max_length=63, examples=["prefill"])
]
ObjectName: TypeAlias = Annotated[
    str, Meta(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?\Z", max_length=253, examples=["my-topology"])
]
Port: TypeAlias = Annotated[int, Meta(ge=1024, le=65535)]

T = TypeVar("T")


class Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, rename="camel"):
    """One mapping of a custom resource; an unknown key is an error."""


def camel_case(name: str) -> str:
    """Return a name in the form of `Part`: `per_request` is `perRequest`."""
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))


def name_of(obj: Object) -> str:
    """Return `namespace/name`, or the name of an object without a namespace."""
    metadata = obj.get("metadata") or {}
    namespace = metadata.get("namespace")
    name = metadata.get("name") or metadata.get("generateName") or ""
    return f"{namespace}/{name}" if namespace else str(name)


def read_spec(obj: Object, kind: type[T]) -> T:
    """Return the `spec` of a custom resource as a `kind`; null counts as absent, as in the API server.

    Raises:
        InputErrors: every fault of form, each with its field and the fix.
    """
    spec = _without_nulls(obj.get("spec"))
    try:
        return msgspec.convert(spec, kind, dec_hook=read_quantity)
    except (msgspec.ValidationError, InputError) as error:
        found: list[InputError] = list(_faults(spec, kind))
        raise InputErrors(found or [InputError(str(error), where="spec")]) from None


def plain_values(value: Any) -> Any:
    """Return a `Part` as plain values with all its fields, also those at their default; fields that are None are left
    out, and quantities are text with a unit."""
    if isinstance(value, Struct):
        given = ((field.encode_name, getattr(value, field.name)) for field in msgspec.structs.fields(value))
        return {name: plain_values(item) for name, item in given if item is not None}
    if isinstance(value, Mapping):
        return {key: plain_values(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain_values(item) for item in value]
    return quantity_text(value) if isinstance(value, Quantity) else value


def _faults(spec: object, kind: Any) -> Iterator[InputError]:
    if spec is None:
        yield InputError("`spec` is missing", hint="add `spec: ...`")
        return
    for fault in form_faults(spec, kind, ("spec",), Lines("")):
        yield InputError(fault.what, where=fault.field, hint=fault.hint)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
