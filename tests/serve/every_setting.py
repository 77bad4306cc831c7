"""A `gateway:` section that gives every setting. It is built from the types of the settings, so that it cannot omit
one."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect

from kvroute.serve.config.settings import GatewaySettings
from kvroute.serve.observe.redaction import is_secret
from kvroute.types import InputError
from kvroute_engine.files.units import Duration, Size, quantity, read_quantity

SECRETS = ("SECRET-0123456789abcdef", "sha256:" + "5ec7e7" * 10 + "5ec7")
"""A text that is a valid token, and a text that is a valid hash of a key."""
QUANTITIES: dict[type, tuple[str, ...]] = {
    Duration: ("1.25 s", "1.25 h", "1.25 ms"),
    Size: ("1.5 MB", "1.5 GB", "1.5 TB", "1.5 KB"),
}


def every_setting() -> dict[str, Any]:
    """Return the section as a file has it, with a non-default value for each setting."""
    section: dict[str, Any] = _value(inspect.type_info(GatewaySettings), "gateway")
    return section


def read(section: dict[str, Any]) -> GatewaySettings:
    """Convert a section to its settings."""
    return msgspec.convert(section, GatewaySettings, dec_hook=read_quantity)


def leaves(known: inspect.Type, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], inspect.Type]]:
    """Yield the path and the type of each setting; `*` stands for an item of a mapping or a list."""
    for form in _forms(known):
        if isinstance(form, inspect.StructType):
            for field in form.fields:
                yield from leaves(field.type, (*path, field.encode_name))
        elif isinstance(form, inspect.DictType):
            yield from leaves(form.value_type, (*path, "*"))
        elif isinstance(form, inspect.ListType):
            yield from leaves(form.item_type, (*path, "*"))
        elif not isinstance(form, inspect.NoneType):
            yield path, known


def _value(known: inspect.Type, name: str) -> Any:
    """Return the first candidate within the bounds of the type."""
    for candidate in _candidates(known, name):
        if any(_fits(candidate, form) for form in _forms(known)):
            return candidate
    raise AssertionError(f"no example is known for the setting {name}: {known}")


def _fits(value: Any, form: inspect.Type) -> bool:
    if isinstance(form, inspect.StrType):
        return isinstance(value, str) and bool(re.search(form.pattern or "", value))
    if isinstance(form, inspect.IntType | inspect.FloatType):
        whole = isinstance(form, inspect.FloatType) or isinstance(value, int)
        at_least = form.ge if form.ge is not None else -math.inf
        at_most = form.le if form.le is not None else math.inf
        return isinstance(value, int | float) and whole and at_least <= value <= at_most
    if isinstance(form, inspect.CustomType):
        try:
            quantity(form.cls, value)
        except InputError:
            return False
    return not isinstance(form, inspect.NoneType)


def _candidates(known: inspect.Type, name: str) -> Iterator[Any]:
    """Yield values that a type may accept, the most specific first."""
    if is_secret(known):
        yield from SECRETS
    for form in _forms(known):
        match form:
            case inspect.StructType():
                yield {field.encode_name: _value(field.type, field.encode_name) for field in form.fields}
            case inspect.DictType():
                yield {_value(form.key_type, name): _value(form.value_type, name)}
            case inspect.ListType():
                yield [_value(form.item_type, name)]
            case inspect.CustomType():
                yield from (text for kind, texts in QUANTITIES.items() if issubclass(form.cls, kind) for text in texts)
            case inspect.LiteralType():
                yield from reversed(form.values)
            case inspect.BoolType():
                yield from (True, False)
            case inspect.IntType() | inspect.FloatType():
                yield from (0.375, 3, 17, 0.5, 2_000)
            case inspect.StrType():
                yield from _examples(known)
                yield from ("example", "/example", "http://example:1/x", "5 ms")


def _examples(known: inspect.Type) -> list[Any]:
    if isinstance(known, inspect.Metadata):
        return list((known.extra_json_schema or {}).get("examples", []))
    if isinstance(known, inspect.UnionType):
        return [example for alternative in known.types for example in _examples(alternative)]
    return []


def _forms(known: inspect.Type) -> list[inspect.Type]:
    if isinstance(known, inspect.Metadata):
        return _forms(known.type)
    if isinstance(known, inspect.UnionType):
        return [form for alternative in known.types for form in _forms(alternative)]
    return [known]
