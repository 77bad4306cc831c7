"""JSON values that are valid under a JSON schema (draft 2020-12)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count
from typing import Any
from urllib.parse import unquote

from kvroute.emulator.errors import ApiError
from kvroute.emulator.generation.patterns import TRIES, matching_text
from kvroute.emulator.generation.words import Draws

DEPTH_MAX = 32
SHALLOW = 3
"""Deeper values have no optional property and no item beyond the smallest number."""
VALUES_MAX = 20_000
_LENGTH_MAX = 100_000
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_UNSUPPORTED = ("not", "if", "contains", "dependentSchemas", "dependentRequired", "dependencies", "$dynamicRef")
_BY_KEYWORD = {
    **dict.fromkeys(("properties", "required", "additionalProperties", "patternProperties", "minProperties"), "object"),
    **dict.fromkeys(("items", "prefixItems", "minItems", "maxItems", "uniqueItems"), "array"),
    **dict.fromkeys(("pattern", "minLength", "maxLength", "format"), "string"),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), "number"),
}
"""Type of a value under a schema that names no type."""
_HEX = "[0-9a-f]"
_FORMATS = {
    "date-time": r"20[0-2][0-9]-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]Z",
    "date": r"20[0-2][0-9]-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])",
    "time": r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]Z",
    "duration": r"P[1-9]D",
    "email": r"[a-z]{3,8}@[a-z]{3,8}\.org",
    "idn-email": r"[a-z]{3,8}@[a-z]{3,8}\.org",
    "hostname": r"[a-z]{3,8}\.[a-z]{3,8}\.org",
    "idn-hostname": r"[a-z]{3,8}\.[a-z]{3,8}\.org",
    "ipv4": r"10\.[1-9][0-9]?\.[1-9][0-9]?\.[1-9][0-9]?",
    "ipv6": rf"2001:db8::[1-9a-f]{_HEX}{{0,3}}",
    "uri": r"https://[a-z]{3,8}\.org/[a-z]{3,8}",
    "uri-reference": r"https://[a-z]{3,8}\.org/[a-z]{3,8}",
    "iri": r"https://[a-z]{3,8}\.org/[a-z]{3,8}",
    "iri-reference": r"https://[a-z]{3,8}\.org/[a-z]{3,8}",
    "uri-template": r"https://[a-z]{3,8}\.org/[a-z]{3,8}",
    "uuid": rf"{_HEX}{{8}}-{_HEX}{{4}}-4{_HEX}{{3}}-[89ab]{_HEX}{{3}}-{_HEX}{{12}}",
    "json-pointer": r"/[a-z]{3,8}",
    "relative-json-pointer": r"[0-9]/[a-z]{3,8}",
    "regex": r"[a-z]{3,8}",
}


class Unsatisfiable(Exception):
    """No value was found under one part of a schema; another choice may have one."""


def json_text(schema: Any, draws: Draws) -> str:
    """Return the text of a JSON value, in ASCII, that is valid under a schema.

    Raises:
        ApiError: the schema is not valid, has an unsupported keyword, or no value was found.
    """
    try:
        value = _Values(schema, draws).value(schema, 0)
    except (Unsatisfiable, RecursionError) as error:
        what = str(error) or "it is too deep"
        raise ApiError(f"no value was found for the JSON schema: {what}", param="response_format") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ApiError(f"the JSON schema is not valid: {error}", param="response_format") from None
    return json.dumps(value)


@dataclass(slots=True)
class _Values:
    """Values under one schema document."""

    root: Any
    draws: Draws
    made: int = 0

    def value(self, schema: Any, depth: int) -> Any:
        """Return a value: the first one that is found among the alternatives of the schema."""
        self.made += 1
        if depth > DEPTH_MAX or self.made > VALUES_MAX:
            raise Unsatisfiable("it is nested too deeply; give a smaller one")
        reason = Unsatisfiable("no alternative fits the others")
        for flat in self._flat(schema, depth, ()):
            try:
                return self._plain(flat, depth)
            except Unsatisfiable as error:
                reason = error
        raise reason

    def _flat(self, schema: Any, depth: int, followed: tuple[str, ...]) -> Iterator[dict[str, Any]]:
        """Yield the alternatives of a schema, without references and combinations. `followed`: references so far."""
        if isinstance(schema, bool):
            if schema:
                yield {}
            return
        if not isinstance(schema, dict):
            raise ApiError(f"{schema!r} is not a JSON schema; give an object", param="response_format")
        for name in _UNSUPPORTED:
            if name in schema:
                what = f"the JSON schema has `{name}`, which emulated engines do not support; leave it out"
                raise ApiError(what, param="response_format")
        own = {name: value for name, value in schema.items() if name not in ("$ref", "allOf", "anyOf", "oneOf")}
        groups: list[Sequence[Any]] = [[part] for part in schema.get("allOf", ())]
        reference = schema.get("$ref")
        if reference is not None:
            if reference in followed:
                return
            followed = (*followed, reference)
            groups.append([self._target(reference)])
        groups += [self._ordered(schema[name], depth) for name in ("anyOf", "oneOf") if name in schema]
        yield from self._merged(own, groups, depth, followed)

    def _merged(
        self, own: dict[str, Any], groups: Sequence[Sequence[Any]], depth: int, followed: tuple[str, ...]
    ) -> Iterator[dict[str, Any]]:
        """Yield `own` together with one alternative of each group."""
        if not groups:
            yield own
            return
        for option in groups[0]:
            for flat in self._flat(option, depth, followed):
                both = _both(own, flat)
                if both is not None:
                    yield from self._merged(both, groups[1:], depth, followed)

    def _ordered(self, options: Sequence[Any], depth: int) -> list[Any]:
        """Return alternatives from a drawn one on; deep in a value those without references come first."""
        first = self.draws.below(len(options)) if options else 0
        turned = [*options[first:], *options[:first]]
        return turned if depth <= SHALLOW else sorted(turned, key=lambda option: "$ref" in json.dumps(option))

    def _target(self, reference: str) -> Any:
        found: Any = self.root
        if not reference.startswith("#"):
            what = f"the JSON schema refers to {reference!r}, which is outside it; give the whole schema"
            raise ApiError(what, param="response_format")
        for part in unquote(reference[1:]).split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(name)] if isinstance(found, list) else found[name]
            except (KeyError, IndexError, TypeError, ValueError):
                what = f"the JSON schema refers to {reference!r}, which it does not have"
                raise ApiError(what, param="response_format") from None
        return found

    def _plain(self, schema: Mapping[str, Any], depth: int) -> Any:
        types = _types(schema)
        if "const" in schema or "enum" in schema:
            given = schema["enum"] if "enum" in schema else [schema["const"]]
            known = [value for value in given if "const" not in schema or _same(value, schema["const"])]
            known = [value for value in known if types is None or any(_is(value, name) for name in types)]
            if not known:
                raise Unsatisfiable("its `enum` has no value of its `type`")
            return known[self.draws.below(len(known))]
        if types is None:
            types = (next((_BY_KEYWORD[name] for name in schema if name in _BY_KEYWORD), "string"),)
        if depth > SHALLOW and "null" in types:
            return None
        match types[self.draws.below(len(types))]:
            case "object":
                return self._object(schema, depth)
            case "array":
                return self._array(schema, depth)
            case "string":
                return self._string(schema)
            case "number":
                return self._number(schema, whole=False)
            case "integer":
                return self._number(schema, whole=True)
            case "boolean":
                return bool(self.draws.below(2))
        return None

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        known, required = schema.get("properties", {}), list(schema.get("required", ()))
        least, most = schema.get("minProperties", 0), schema.get("maxProperties", math.inf)
        found: dict[str, Any] = {}
        names = [*known, *(name for name in dict.fromkeys(required) if name not in known)]
        room = most - len(set(required))
        for name in names:
            if name in required:
                found[name] = self.value(self._of_property(schema, name), depth + 1)
            elif depth <= SHALLOW and room > 0:
                try:
                    found[name] = self.value(self._of_property(schema, name), depth + 1)
                    room -= 1
                except Unsatisfiable:
                    continue
        if not known and not required and depth <= SHALLOW and most > 0:
            least = max(least, 1 if schema.get("additionalProperties", True) is not False else 0)
        for _ in range(TRIES):
            if len(found) >= least:
                break
            name = self.value(_both({"type": "string"}, schema.get("propertyNames", {})) or False, depth + 1)
            if name not in found and name not in known:
                found[name] = self.value(self._of_property(schema, name), depth + 1)
        if not least <= len(found) <= most:
            raise Unsatisfiable("an object cannot have so many properties")
        return found

    def _of_property(self, schema: Mapping[str, Any], name: str) -> Any:
        """Return the schema of a property."""
        patterns = schema.get("patternProperties", {})
        parts = [value for pattern, value in patterns.items() if re.search(pattern, name)]
        if name in schema.get("properties", {}):
            parts.append(schema["properties"][name])
        return {"allOf": parts} if parts else schema.get("additionalProperties", True)

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        least, most = schema.get("minItems", 0), schema.get("maxItems", math.inf)
        first, others = schema.get("prefixItems", []), schema.get("items", True)
        if isinstance(others, list):  # as before draft 2020-12
            first, others = others, schema.get("additionalItems", True)
        wanted = least if depth > SHALLOW else min(max(least, len(first), 1 + self.draws.below(3)), most)
        found: list[Any] = []
        seen: set[str] = set()
        for place in count():
            if len(found) >= wanted or place >= wanted + TRIES:
                break
            of_item = first[len(found)] if len(found) < len(first) else others
            try:
                item = self.value(of_item, depth + 1)
            except Unsatisfiable:
                break
            if schema.get("uniqueItems") and json.dumps(item, sort_keys=True) in seen:
                continue
            seen.add(json.dumps(item, sort_keys=True))
            found.append(item)
        if len(found) < least:
            raise Unsatisfiable("an array has too few different items")
        return found

    def _string(self, schema: Mapping[str, Any]) -> str:
        least, most = schema.get("minLength", 0), schema.get("maxLength", _LENGTH_MAX)
        if least > min(most, _LENGTH_MAX):
            raise Unsatisfiable(f"no string has {least} to {min(most, _LENGTH_MAX)} characters")
        if "pattern" in schema:
            return matching_text(schema["pattern"], self.draws, least, most)
        if schema.get("format") in _FORMATS:
            return matching_text(_FORMATS[schema["format"]], self.draws, least, most)
        words = [self.draws.word() for _ in range(1 + self.draws.below(3))]
        while len(text := " ".join(words)) < least:
            words += [self.draws.word() for _ in range(1 + (least - len(text)) // 4)]
        return text[:most]

    def _number(self, schema: Mapping[str, Any], *, whole: bool) -> int | float:
        low = max((_exact(schema[name]) for name in ("minimum", "exclusiveMinimum") if name in schema), default=None)
        high = min((_exact(schema[name]) for name in ("maximum", "exclusiveMaximum") if name in schema), default=None)
        step = _exact(schema["multipleOf"]) if "multipleOf" in schema else Fraction(1)
        if whole and step.denominator > 1:
            step = Fraction(step.numerator)  # the smallest whole number that is a multiple
        low = low if low is not None else (high - 100 * step if high is not None else Fraction(0))
        high = high if high is not None else low + 100 * step
        if not whole and "multipleOf" not in schema:
            while step > 0 and math.floor(high / step) - math.ceil(low / step) < 2 and step > Fraction(1, 10**12):
                step /= 10
        first, last = math.ceil(low / step), math.floor(high / step)
        if "exclusiveMinimum" in schema and first * step <= _exact(schema["exclusiveMinimum"]):
            first += 1
        if "exclusiveMaximum" in schema and last * step >= _exact(schema["exclusiveMaximum"]):
            last -= 1
        if first > last:
            raise Unsatisfiable("no number is within its bounds")
        value = (first + self.draws.below(last - first + 1)) * step
        return int(value) if value.denominator == 1 else float(value)


def _exact(number: float) -> Fraction:
    """Return the decimal that a number of a JSON text stands for."""
    return Fraction(repr(number))


def _types(schema: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the types of a schema; None: it names none."""
    if "type" not in schema:
        return None
    types = schema["type"]
    found = (types,) if isinstance(types, str) else tuple(types)
    unknown = [name for name in found if name not in _TYPES]
    if unknown:
        what = f"the JSON schema has the type {unknown[0]!r}; give one of {', '.join(_TYPES)}"
        raise ApiError(what, param="response_format")
    if not found:
        raise Unsatisfiable("two of its parts have no type in common")
    return found


def _is(value: Any, name: str) -> bool:
    """Whether a JSON value has a type."""
    if isinstance(value, bool):
        return name == "boolean"
    if isinstance(value, int | float):
        return name == "number" or (name == "integer" and float(value).is_integer())
    kinds: dict[str, type] = {"object": dict, "array": list, "string": str, "null": type(None)}
    return name in kinds and isinstance(value, kinds[name])


def _same(one: Any, other: Any) -> bool:
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


_LOWER = frozenset(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"))
_HIGHER = frozenset(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"))


def _both(one: Mapping[str, Any], other: Any) -> dict[str, Any] | None:
    """Return a schema under which values are valid under both of two flat ones; None: there is none."""
    if isinstance(other, bool):
        return dict(one) if other else None
    found = dict(one)
    for name, value in other.items():
        if name not in found or _same(found[name], value):
            found[name] = value
        elif name in _LOWER:
            found[name] = min(found[name], value)
        elif name in _HIGHER:
            found[name] = max(found[name], value)
        elif name == "type":
            found[name] = _common_types(found, other)
        elif name == "enum":
            found[name] = [allowed for allowed in found[name] if any(_same(allowed, known) for known in value)]
        elif name == "required":
            found[name] = list(dict.fromkeys([*found[name], *value]))
        elif name in ("properties", "patternProperties"):
            found[name] = _both_by_name(found[name], value)
        elif name in ("items", "additionalProperties", "propertyNames"):
            found[name] = {"allOf": [found[name], value]}
        elif name in ("const", "multipleOf", "pattern", "prefixItems"):
            return None
    return found


def _both_by_name(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    shared = {name: {"allOf": [one[name], other[name]]} for name in one if name in other}
    return {**one, **other, **shared}


def _common_types(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    first, second = _types(one) or (), _types(other) or ()
    common = [name for name in first if name in second]
    whole = "integer" in first + second and "number" in first + second and "integer" not in common
    return [*common, "integer"] if whole else common
