"""Custom resources against their OpenAPI schema: unknown fields are dropped, defaults filled, values validated."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.kube.apiserver.golang import GoError, parse_time
from tests.kube.apiserver.status import (
    Cause,
    Object,
    duplicate,
    invalid,
    required,
    too_long,
    too_many,
    type_invalid,
    unsupported,
)  # fmt: skip

ENVELOPE = ("apiVersion", "kind", "metadata")


def open_ended(schema: Object) -> bool:
    """Return whether fields outside the schema are kept."""
    return bool(schema.get("x-kubernetes-preserve-unknown-fields")) or schema.get("additionalProperties") is True


def prune(schema: Object, value: Any, path: str = "", envelope: bool = True) -> list[str]:
    """Drop the fields that the schema does not have, in place; return their paths."""
    if isinstance(value, list):
        items = schema.get("items", {})
        return [found for at, item in enumerate(value) for found in prune(items, item, f"{path}[{at}]", False)]
    if not isinstance(value, dict):
        return []
    embedded = envelope or bool(schema.get("x-kubernetes-embedded-resource"))
    properties = schema.get("properties", {})
    additional = schema.get("additionalProperties")
    dropped: list[str] = []
    for name in list(value):
        where = f"{path}.{name}" if path else name
        if embedded and name in ENVELOPE:
            continue
        if name in properties:
            dropped += prune(properties[name], value[name], where, False)
        elif isinstance(additional, dict):
            dropped += prune(additional, value[name], where, False)
        elif not open_ended(schema) and additional is None:
            del value[name]
            dropped.append(where)
    return dropped


def fill(schema: Object, value: Any) -> None:
    """Drop nulls that the schema does not allow, and fill defaults, in place."""
    if isinstance(value, list):
        for item in value:
            fill(schema.get("items", {}), item)
        return
    if not isinstance(value, dict):
        return
    properties: Mapping[str, Object] = schema.get("properties", {})
    for name, part in properties.items():
        if name in value and value[name] is None and not part.get("nullable"):
            del value[name]
        if name not in value and "default" in part:
            value[name] = copy.deepcopy(part["default"])
        if name in value:
            fill(part, value[name])
    additional = schema.get("additionalProperties")
    if isinstance(additional, dict):
        for name in value.keys() - properties.keys():
            fill(additional, value[name])


def json_type(value: Any) -> str:
    """Return the OpenAPI type of a value."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    for kind, name in ((str, "string"), (dict, "object"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "null"


@dataclass(frozen=True, slots=True)
class Place:
    """A place in an object: the path of causes, and the path of their texts, which is relative for /status."""

    field: str
    text: str

    def at(self, suffix: str) -> Place:
        """Return a place below."""
        text = self.text + suffix if self.text else suffix.lstrip(".")
        return Place((self.field + suffix).lstrip("."), text)


def validate(schema: Object, value: Any, place: Place) -> Iterator[Cause]:
    """Yield what is wrong with a value."""
    if value is None and schema.get("nullable"):
        return
    if wrong := _wrong_type(schema, value, place):
        yield from wrong
        return
    if "enum" in schema and value not in schema["enum"]:
        yield unsupported(place.field, value, [str(allowed) for allowed in schema["enum"]])
    if isinstance(value, str):
        yield from _text(schema, value, place)
    elif isinstance(value, list):
        yield from _list(schema, value, place)
    elif isinstance(value, dict):
        yield from _object(schema, value, place)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield from _number(schema, value, place)


def _wrong_type(schema: Object, value: Any, place: Place) -> list[Cause]:
    found = json_type(value)
    wanted = schema.get("type", "")
    if schema.get("x-kubernetes-int-or-string"):
        wanted = "" if found in ("integer", "string") else "integer,string"
    if not wanted or wanted == found or (wanted, found) == ("number", "integer"):
        return []
    if wanted == "integer" and isinstance(value, float) and value.is_integer():
        return []
    text = f'{place.text} in body must be of type {wanted}: "{found}"'
    causes = [type_invalid(place.field, found, text)]
    if (wanted, found) == ("integer", "number"):
        text = f"Checked value must be of type integer (default format) in {place.text}"
        causes.append(invalid("<nil>", "", text))
    return causes


def _number(schema: Object, value: float, place: Place) -> Iterator[Cause]:
    bounds: tuple[tuple[str, str, str, Callable[[float, float], bool]], ...] = (
        ("minimum", "exclusiveMinimum", "greater than", lambda number, bound: number > bound),
        ("maximum", "exclusiveMaximum", "less than", lambda number, bound: number < bound),
    )
    for name, exclusive, words, inside in bounds:
        if name not in schema:
            continue
        bound = schema[name]
        if inside(value, bound) or (value == bound and not schema.get(exclusive)):
            continue
        equal = "" if schema.get(exclusive) else " or equal to"
        yield invalid(place.field, value, f"{place.text} in body should be {words}{equal} {bound}")


def _text(schema: Object, value: str, place: Place) -> Iterator[Cause]:
    if len(value) > schema.get("maxLength", len(value)):
        yield too_long(place.field, schema["maxLength"])
    if len(value) < schema.get("minLength", 0):
        yield invalid(place.field, value, f"{place.text} in body should be at least {schema['minLength']} chars long")
    if "pattern" in schema and not re.search(schema["pattern"], value):
        yield invalid(place.field, value, f"{place.text} in body should match '{schema['pattern']}'")
    if schema.get("format") == "date-time":
        try:
            parse_time(value, micro=False)
        except (GoError, ValueError):
            text = f'{place.text} in body must be of type date-time: "{value}"'
            yield type_invalid(place.field, value, text)


def _list(schema: Object, value: list[Any], place: Place) -> Iterator[Cause]:
    if len(value) > schema.get("maxItems", len(value)):
        yield too_many(place.field, len(value), schema["maxItems"])
    if len(value) < schema.get("minItems", 0):
        yield invalid(place.field, len(value), f"{place.text} in body should have at least {schema['minItems']} items")
    for at, item in enumerate(value):
        yield from validate(schema.get("items", {}), item, place.at(f"[{at}]"))
    yield from _repeated(schema, value, place)


def _repeated(schema: Object, value: list[Any], place: Place) -> Iterator[Cause]:
    """Yield the second and later items of a set or map that are there already."""
    kind = schema.get("x-kubernetes-list-type")
    if kind not in ("set", "map"):
        return
    seen: list[Any] = []
    for at, item in enumerate(value):
        key = item
        if kind == "map" and isinstance(item, dict):
            key = {name: item.get(name) for name in schema["x-kubernetes-list-map-keys"]}
        if key in seen:
            yield duplicate(place.at(f"[{at}]").field, key)
        seen.append(key)


def _object(schema: Object, value: Object, place: Place) -> Iterator[Cause]:
    properties: Mapping[str, Object] = schema.get("properties", {})
    additional = schema.get("additionalProperties")
    for name in schema.get("required", ()):
        if name not in value:
            yield required(place.at(f".{name}").field)
    if schema.get("x-kubernetes-embedded-resource"):
        for name in ("apiVersion", "kind"):
            if not value.get(name):
                yield required(place.at(f".{name}").field)
    if len(value) > schema.get("maxProperties", len(value)):
        yield too_many(place.field, len(value), schema["maxProperties"])
    for name, part in value.items():
        if name in properties:
            yield from validate(properties[name], part, place.at(f".{name}"))
        elif isinstance(additional, dict):
            yield from validate(additional, part, place.at(f".{name}"))


def value_at(found: Any, path: str) -> Any:
    """Return the value at a path such as `spec.levels[0].domain`, or None."""
    for name, number in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        if number:
            found = found[int(number)] if isinstance(found, list) and int(number) < len(found) else None
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found


def unchanged(cause: Cause, found: Object, before: Object) -> bool:
    """Return whether the value that a cause is about was there before, so that the update is not to blame."""
    if cause.field == "<nil>" or cause.reason == "FieldValueRequired":
        return False
    return bool(value_at(found, cause.field) == value_at(before, cause.field))
