"""Refusals of CEL rules in a CustomResourceDefinition: syntax, names, types, and the estimated cost."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from tests.kube.apiserver.rules import FUNCTIONS, REASONS, RULES, calls, evaluate, syntax_error, uses_old
from tests.kube.apiserver.status import (
    Cause,
    Object,
    forbidden_field,
    go_json,
    invalid,
    required,
    unsupported,
)  # fmt: skip

RULE_COST_MAX = 10_000_000
SCHEMA_COST_MAX = 100_000_000
BODY_MAX_BYTES = 3_145_728
LOOP_COST = 6.0
COMPARE_COST = 4.0
COMPARE_COST_PER_CHARACTER = 0.4
"""Of a text of the largest length: four bytes a character, a tenth of a unit a byte."""
MACROS = re.compile(r"\.(all|exists|exists_one|map|filter)\s*\(")
HINT = (
    "(try simplifying the rule, or adding maxItems, maxProperties, and maxLength where arrays, maps, and strings are "
    "declared)"
)
KINDS = {"integer": "int", "string": "string", "boolean": "bool", "number": "double"}
SAMPLES: dict[str, Any] = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}


@dataclass(slots=True)
class Scope:
    """Where a rule stands: how often it runs for one object, and the atomic list around it."""

    path: str
    times: int = 1
    atomic_list: str = ""


@dataclass(slots=True)
class Costs:
    """The estimated costs of a schema's rules."""

    total: float = 0.0
    by_rule: list[tuple[str, float]] = field(default_factory=list)


def check_rules(schema: Object, scope: Scope, costs: Costs, root: bool = True) -> list[Cause]:
    """Return what is wrong with the rules of a schema and its parts."""
    errors: list[Cause] = []
    for number, rule in enumerate(schema.get(RULES) or []):
        path = f"{scope.path}.{RULES}[{number}]"
        found = _check_rule(schema, rule, path, root)
        errors += found
        if not found:
            errors += _cost(schema, rule, path, scope, costs)
            errors += _uncorrelatable(rule, path, scope)
    for name, part in (schema.get("properties") or {}).items():
        errors += check_rules(
            part, Scope(f"{scope.path}.properties[{name}]", scope.times, scope.atomic_list), costs, False
        )
    if isinstance(schema.get("items"), dict):
        atomic = scope.atomic_list or ("" if schema.get("x-kubernetes-list-type") == "map" else scope.path)
        inner = Scope(f"{scope.path}.items", scope.times * most_items(schema), atomic)
        errors += check_rules(schema["items"], inner, costs, False)
    if isinstance(schema.get("additionalProperties"), dict):
        times = scope.times * int(schema.get("maxProperties", BODY_MAX_BYTES // 6))
        inner = Scope(f"{scope.path}.additionalProperties", times, scope.atomic_list)
        errors += check_rules(schema["additionalProperties"], inner, costs, False)
    return errors


def most_items(schema: Object) -> int:
    """Return the largest number of items of a list: as declared, or as a request body can hold."""
    return int(schema.get("maxItems", BODY_MAX_BYTES // 3))


def shown_rule(rule: Object) -> Object:
    """Return a rule as Go's internal struct is shown in causes."""
    return {
        "Rule": rule.get("rule", ""), "Message": rule.get("message", ""),
        "MessageExpression": rule.get("messageExpression", ""), "Reason": rule.get("reason"),
        "FieldPath": rule.get("fieldPath", ""), "OptionalOldSelf": rule.get("optionalOldSelf"),
    }  # fmt: skip


def _check_rule(schema: Object, rule: Object, path: str, root: bool) -> list[Cause]:
    text = rule.get("rule", "")
    if not text.strip():
        return [required(f"{path}.rule", "rule is not specified")]
    if "\n" in rule.get("message", ""):
        return [invalid(f"{path}.message", rule["message"], "must not contain line breaks")]
    if "\n" in text.strip() and not rule.get("message"):
        return [required(f"{path}.message", "message must be specified if rule contains line breaks")]
    if rule.get("reason") is not None and rule["reason"] not in REASONS:
        return [unsupported(f"{path}.reason", rule["reason"], REASONS)]
    if rule.get("fieldPath") and not _path_exists(schema, rule["fieldPath"]):
        return [invalid(f"{path}.fieldPath", rule["fieldPath"], "must be a valid path")]
    if problem := _problem(schema, text, root):
        return [Cause("FieldValueInvalid", f"Invalid value: {go_json(shown_rule(rule))}: {problem}", f"{path}.rule")]
    if rule.get("messageExpression") and not isinstance(_sampled(schema, rule["messageExpression"]), str | None):
        detail = "messageExpression must evaluate to a string"
        text = f"Invalid value: {go_json(shown_rule(rule))}: {detail}"
        return [Cause("FieldValueInvalid", text, f"{path}.messageExpression")]
    return []


def _uncorrelatable(rule: Object, path: str, scope: Scope) -> list[Cause]:
    """Return the refusal of a rule that compares items with items of a list without keys."""
    if not uses_old(rule) or not scope.atomic_list:
        return []
    detail = f"oldSelf cannot be used on the uncorrelatable portion of the schema within {scope.atomic_list}"
    return [invalid(f"{path}.rule", rule["rule"], detail)]


def _path_exists(schema: Object, path: str) -> bool:
    for name in path.lstrip(".").split("."):
        schema = (schema.get("properties") or {}).get(name, {})
    return bool(schema)


def _problem(schema: Object, text: str, root: bool) -> str:
    """Return the compiler's refusal of a rule, or an empty text."""
    if error := syntax_error(text):
        return f"compilation failed: {error}"
    for name, column in calls(text):
        if name not in FUNCTIONS:
            detail = f"undeclared reference to '{name}' (in container '')"
            return f"compilation failed: {_at(text, column, detail)}"
    for found in re.finditer(r"\b(?:self|oldSelf)((?:\.\w+)+)(?!\w*\s*\()", text):
        if problem := _undefined(schema, text, found, root):
            return problem
    for found in re.finditer(r"\bself\.(\w+)\s*(==|!=)\s*('[^']*'|\d+\b)", text):
        kind = KINDS.get((schema.get("properties") or {}).get(found[1], {}).get("type", ""), "")
        other = "string" if found[3].startswith("'") else "int"
        if kind in ("int", "string", "bool") and kind != other:
            detail = f"found no matching overload for '_{found[2]}_' applied to '({kind}, {other})'"
            return f"compilation failed: {_at(text, found.start(2) + 1, detail)}"
    sampled = _sampled(schema, text)
    return "" if sampled is None or isinstance(sampled, bool) else "cel expression must evaluate to a bool"


def _undefined(schema: Object, text: str, found: re.Match[str], root: bool) -> str:
    """Return the refusal of a field that the schema does not have."""
    column = found.start(1)
    for at, name in enumerate(found[1].lstrip(".").split(".")):
        properties = schema.get("properties") or {}
        if root and at == 0 and name in ("metadata", "apiVersion", "kind"):
            return ""
        escaped = re.sub(r"^__(\w+)__$", r"\1", name)
        if schema.get("type") != "object" or isinstance(schema.get("additionalProperties"), dict):
            return ""
        if escaped not in properties:
            detail = f"undefined field '{name}'"
            return f"compilation failed: {_at(text, column + 1, detail)}"
        schema = properties[escaped]
        column += len(name) + 1
    return ""


def _at(text: str, column: int, detail: str) -> str:
    """Return an error with the line and a mark below the column."""
    return f"ERROR: <input>:1:{column}: {detail}\n | {text}\n | {'.' * (column - 1)}^"


def _sampled(schema: Object, text: str) -> Any:
    """Return the value of an expression on a sample object, or None if it has none there."""
    sample = _sample(schema)
    try:
        return evaluate(text, {"self": sample, "oldSelf": sample})
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError):
        return None


def _sample(schema: Object) -> Any:
    if schema.get("type") == "object":
        return {name: _sample(part) for name, part in (schema.get("properties") or {}).items()}
    return SAMPLES.get(schema.get("type", ""), "x")


def _cost(schema: Object, rule: Object, path: str, scope: Scope, costs: Costs) -> list[Cause]:
    """Return the refusal of a rule that may take too long; add its cost to the total."""
    text = rule["rule"]
    loops = len(MACROS.findall(text)) if schema.get("type") == "array" else 0
    compared = schema if schema.get("type") == "string" else schema.get("items") or {}
    cost = 0.0
    if "==" in text:
        length = int(compared.get("maxLength", BODY_MAX_BYTES)) if compared.get("type") == "string" else 0
        length = length or (BODY_MAX_BYTES if compared.get("type") == "object" and "maxItems" not in schema else 0)
        cost = COMPARE_COST + COMPARE_COST_PER_CHARACTER * length
    for _ in range(loops):
        cost = most_items(schema) * (cost or LOOP_COST)
    cost = (cost + (LOOP_COST * most_items(schema) if loops > 1 else 0.0)) * scope.times
    costs.total += cost
    costs.by_rule.append((f"{path}.rule", cost))
    if cost <= RULE_COST_MAX:
        return []
    return [
        forbidden_field(f"{path}.rule", f"estimated rule cost exceeds budget {_factor(cost / RULE_COST_MAX)} {HINT}")
    ]


def _factor(factor: float) -> str:
    return "by factor of more than 100x" if factor > 100 else f"by factor of {factor:.6f}x"


def total_cost(costs: Costs, path: str) -> list[Cause]:
    """Return the refusals of a schema whose rules together may take too long."""
    if costs.total <= SCHEMA_COST_MAX:
        return []
    detail = "contributed to estimated rule cost total exceeding cost limit for entire OpenAPIv3 schema"
    errors = [forbidden_field(where, detail) for where, cost in costs.by_rule if cost > RULE_COST_MAX]
    factor = _factor(costs.total / SCHEMA_COST_MAX)
    text = (
        f"x-kubernetes-validations estimated rule cost total for entire OpenAPIv3 schema exceeds budget {factor} {HINT}"
    )
    return [*errors, forbidden_field(path, text)]
