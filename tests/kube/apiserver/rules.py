"""Rules in CEL: their compilation, with the API server's refusals, and their evaluation on custom resources."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import cel
from tests.kube.apiserver.golang import GoError, quantity_value
from tests.kube.apiserver.status import Cause, Object, shown

RULES = "x-kubernetes-validations"
FUNCTIONS = frozenset({
    "size", "has", "all", "exists", "exists_one", "map", "filter", "matches", "startsWith", "endsWith", "contains",
    "int", "uint", "double", "string", "bool", "bytes", "type", "duration", "timestamp", "min", "max", "sum", "dyn",
    "isQuantity", "quantity", "isGreaterThan", "isLessThan", "compareTo", "asInteger", "isInteger",
    "asApproximateFloat", "isURL", "url", "getScheme", "getHost", "getHostname", "getPort", "getEscapedPath",
    "getQuery", "find", "findAll", "isSorted", "indexOf", "lastIndexOf", "lowerAscii", "upperAscii", "split", "join",
    "replace", "substring", "trim", "isIP", "ip", "isCIDR", "cidr", "hasValue", "value", "orValue", "of",
    "ofNonZeroValue", "none", "validate", "dns1123Label", "dns1123Subdomain", "isSemver", "semver", "charAt",
    "format", "authorizer", "transformList", "transformMap", "family", "or", "optional", "optMap", "optFlatMap",
    "slice", "flatten", "reverse", "distinct",
})  # fmt: skip
"""Functions that a rule may name. Those of the Kubernetes libraries that `_context` lacks fail when a rule runs."""
REASONS = ("FieldValueDuplicate", "FieldValueForbidden", "FieldValueInvalid", "FieldValueRequired")


@cache
def compiled(expression: str) -> cel.Program:
    """Return a compiled expression; raise ValueError."""
    return cel.compile(expression)


def syntax_error(expression: str) -> str:
    """Return the compiler's error for an expression, or an empty text."""
    try:
        compiled(expression)
    except ValueError as error:
        text = str(error).partition("ERROR: ")[2] or str(error)
        return "ERROR: " + text.replace("\n| ", "\n | ")
    return ""


def _is_quantity(text: str) -> bool:
    try:
        quantity_value(text)
    except GoError:
        return False
    return True


def _quantity(text: str) -> Object:
    return {"quantity": text}


def _greater(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    return quantity_value(one["quantity"]) > quantity_value(other["quantity"])


def _less(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    return quantity_value(one["quantity"]) < quantity_value(other["quantity"])


def _is_url(text: str) -> bool:
    parts = urlsplit(text)
    return bool(parts.scheme) or text.startswith("/")


def evaluate(expression: str, variables: Mapping[str, Any]) -> Any:
    """Return the value of an expression; raise an exception of the interpreter."""
    context = cel.Context(dict(variables))
    for name, function in (
        ("isQuantity", _is_quantity), ("quantity", _quantity), ("isGreaterThan", _greater), ("isLessThan", _less),
        ("isURL", _is_url), ("lowerAscii", str.lower), ("upperAscii", str.upper), ("split", str.split),
    ):  # fmt: skip
        context.add_function(name, function)
    return compiled(expression).execute(context)


def _failed(rule: Object, self_: Any, old: Any, known_old: bool) -> str | None:
    """Return the message of a rule that does not hold, or None."""
    variables: dict[str, Any] = {"self": self_}
    if rule.get("optionalOldSelf"):
        variables["oldSelf"] = cel.OptionalValue.of(old) if known_old else cel.OptionalValue.none()
    elif known_old:
        variables["oldSelf"] = old
    try:
        if evaluate(rule["rule"], variables) is True:
            return None
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError) as error:
        return f"rule evaluation error: {error}"
    if rule.get("messageExpression"):
        return str(evaluate(rule["messageExpression"], variables))
    text: str = rule.get("message", "")
    return text or f"failed rule: {rule['rule'].strip()}"


def uses_old(rule: Object) -> bool:
    """Return whether a rule compares with the object before the update."""
    return "oldSelf" in rule["rule"]


def check(
    schema: Object, value: Any, old: Any, path: str = "", known_old: bool = False
) -> Iterator[tuple[Cause, bool]]:
    """Yield each rule that does not hold, and whether it is excused because its value is as it was before."""
    for rule in schema.get(RULES, ()):
        if uses_old(rule) and not known_old and not rule.get("optionalOldSelf"):
            continue
        message = _failed(rule, value, old, known_old)
        if message is not None:
            yield _cause(rule, value, message, path), known_old and old == value and not uses_old(rule)
    if isinstance(value, dict):
        additional = schema.get("additionalProperties")
        properties = schema.get("properties", {})
        for name, part in value.items():
            inner = properties.get(name) or (additional if isinstance(additional, dict) else None)
            if inner is None:
                continue
            step = f".{name}" if name in properties else f"[{name}]"
            held = old.get(name) if isinstance(old, dict) else None
            has_old = isinstance(old, dict) and name in old
            yield from check(inner, part, held, (path + step).lstrip("."), has_old)
    elif isinstance(value, list):
        for at, item in enumerate(value):
            held = _correlated(schema, item, old)
            yield from check(schema.get("items", {}), item, held, f"{path}[{at}]", held is not None)


def _correlated(schema: Object, item: Any, old: Any) -> Any:
    """Return the item that had the same keys before the update, or None."""
    if schema.get("x-kubernetes-list-type") != "map" or not isinstance(old, list) or not isinstance(item, dict):
        return None
    keys = schema["x-kubernetes-list-map-keys"]
    return next((held for held in old if all(held.get(key) == item.get(key) for key in keys)), None)


def _cause(rule: Object, value: Any, message: str, path: str) -> Cause:
    reason = rule.get("reason", "FieldValueInvalid")
    where = path + rule.get("fieldPath", "") or "<nil>"
    if reason == "FieldValueForbidden":
        return Cause(reason, f"Forbidden: {message}", where)
    if reason == "FieldValueRequired":
        return Cause(reason, f"Required value: {message}", where)
    scalar = not isinstance(value, dict | list)
    word = "Duplicate value" if reason == "FieldValueDuplicate" else "Invalid value"
    return Cause(reason, f"{word}: {shown(value)}: {message}" if scalar else f"{word}: {message}", where)


def calls(expression: str) -> list[tuple[str, int]]:
    """Return name and column of the opening bracket of each call in an expression."""
    return [(found[1], found.end()) for found in re.finditer(r"\b([A-Za-z_]\w*)\s*\(", expression)]
