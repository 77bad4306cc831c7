"""Label and field selectors: parsing with the API server's error texts, and matching."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.kube.apiserver.names import label_key_errors, label_value_errors
from tests.kube.apiserver.resources import Resource
from tests.kube.apiserver.status import ApiError, Object, bad_request, quoted

TOKENS = re.compile(r"\s*(=>|==|!=|=|!|<|>|\(|\)|,|[^\s=!<>(),]+)")
OPERATORS = ("in", "notin", "=", "==", "!=", ">", "<")


@dataclass(frozen=True, slots=True)
class Requirement:
    """One condition on a label."""

    key: str
    operator: str
    values: tuple[str, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Return whether the labels meet the condition."""
        value = labels.get(self.key)
        match self.operator:
            case "exists":
                return value is not None
            case "!":
                return value is None
            case "in":
                return value in self.values
            case "notin":
                return value is None or value not in self.values
            case _:
                return _compare(value, self.operator, self.values[0])


def _compare(value: str | None, operator: str, bound: str) -> bool:
    if value is None or not re.fullmatch(r"-?\d+", value):
        return False
    return int(value) > int(bound) if operator == ">" else int(value) < int(bound)


@dataclass(frozen=True, slots=True)
class LabelSelector:
    """A conjunction of conditions; without any it matches everything."""

    requirements: tuple[Requirement, ...] = ()

    def matches(self, labels: Mapping[str, str] | None) -> bool:
        """Return whether the labels meet all conditions."""
        return all(requirement.matches(labels or {}) for requirement in self.requirements)


class _Parser:
    """Reads the text of a label selector, token by token."""

    def __init__(self, text: str) -> None:
        self.tokens = [found[1] for found in TOKENS.finditer(text)]
        for at, token in enumerate(self.tokens):
            if token == "=>":
                self.tokens[at : at + 1] = ["=", ">"]
        self.at = 0

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self) -> str:
        token = self.peek()
        self.at += 1
        return token

    def requirements(self) -> tuple[Requirement, ...]:
        found: list[Requirement] = []
        if not self.peek():
            return ()
        while True:
            token = self.peek()
            if token != "!" and not _identifier(token):
                raise bad_request(f"found '{token}', expected: !, identifier, or 'end of string'")
            found.append(self._requirement())
            token = self.take()
            if not token:
                return tuple(found)
            if token != ",":
                raise bad_request(f"found '{token}', expected: ',' or 'end of string'")
            if self.peek() != "!" and not _identifier(self.peek()):
                raise bad_request(f"found '{self.peek()}', expected: identifier after ','")

    def _requirement(self) -> Requirement:
        if self.peek() == "!":
            self.take()
            return _checked(self.take(), "!", ())
        key, operator = self.take(), self.peek()
        if operator in ("", ","):
            return _checked(key, "exists", ())
        if operator not in OPERATORS:
            wanted = "in, notin, =, ==, !=, gt, lt"
            raise bad_request(f"unable to parse requirement: found '{operator}', expected: {wanted}")
        self.take()
        if operator in ("in", "notin"):
            return _checked(key, operator, self._values())
        value = ""
        if self.peek() not in ("", ","):
            value = self.take()
            if not _identifier(value):
                raise bad_request(f"unable to parse requirement: found '{value}', expected: identifier")
        names = {"=": "in", "==": "in", "!=": "notin"}
        return _checked(key, names.get(operator, operator), (value,))

    def _values(self) -> tuple[str, ...]:
        begin = self.take()
        if begin != "(":
            raise bad_request(f"unable to parse requirement: found '{begin}' expected: '('")
        found: list[str] = []
        if self.peek() == ")":
            self.take()
            return ("",)
        while True:
            found.append(self.take())
            token = self.take()
            if token == ")":
                return tuple(found)
            if token != ",":
                raise bad_request(f"unable to parse requirement: found '{token}', expected: ',' or ')'")


def _identifier(token: str) -> bool:
    return bool(token) and token not in ("=", "==", "!=", "!", "<", ">", "(", ")", ",")


def _checked(key: str, operator: str, values: tuple[str, ...]) -> Requirement:
    """Return a requirement with a valid key and valid values."""
    prefix = "unable to parse requirement: "
    if errors := label_key_errors(key):
        raise bad_request(f"{prefix}key: Invalid value: {quoted(key)}: {errors[0]}")
    for at, value in enumerate(values):
        if operator in ("<", ">"):
            if not re.fullmatch(r"-?\d+", value):
                detail = "for 'Gt', 'Lt' operators, the value must be an integer"
                raise bad_request(f"{prefix}values[{at}]: Invalid value: {quoted(value)}: {detail}")
        elif errors := label_value_errors(value):
            raise bad_request(f"{prefix}values[{at}][{key}]: Invalid value: {quoted(value)}: {errors[0]}")
    return Requirement(key, operator, values)


def parse_labels(text: str) -> LabelSelector:
    """Return the selector of a query parameter; raise ApiError 400."""
    return LabelSelector(_Parser(text).requirements())


def from_object(selector: Object | None) -> LabelSelector:
    """Return the selector of a LabelSelector object."""
    found = [Requirement(key, "in", (value,)) for key, value in ((selector or {}).get("matchLabels") or {}).items()]
    names = {"In": "in", "NotIn": "notin", "Exists": "exists", "DoesNotExist": "!"}
    found += [
        Requirement(part["key"], names[part["operator"]], tuple(part.get("values") or ()))
        for part in (selector or {}).get("matchExpressions") or []
    ]
    return LabelSelector(tuple(found))


POD_FIELDS = (
    "metadata.name", "metadata.namespace", "spec.nodeName", "spec.restartPolicy", "spec.schedulerName",
    "spec.serviceAccountName", "spec.hostNetwork", "status.phase", "status.podIP", "status.podIPs",
    "status.nominatedNodeName",
)  # fmt: skip
EVENT_FIELDS = (
    "involvedObject.kind", "involvedObject.namespace", "involvedObject.name", "involvedObject.uid",
    "involvedObject.apiVersion", "involvedObject.resourceVersion", "involvedObject.fieldPath", "reason",
    "reportingComponent", "source", "type", "metadata.name", "metadata.namespace",
)  # fmt: skip
SUPPORTED: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("", "pods"): POD_FIELDS,
    ("", "nodes"): ("metadata.name", "spec.unschedulable"),
    ("", "namespaces"): ("metadata.name", "status.phase", "name"),
    ("", "secrets"): ("metadata.name", "metadata.namespace", "type"),
    ("", "events"): EVENT_FIELDS,
    ("", "services"): ("metadata.name", "metadata.namespace", "spec.clusterIP", "spec.type"),
}
RENAMED = {
    "regarding": "involvedObject", "reportingController": "reportingComponent", "deprecatedSource": "source",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FieldSelector:
    """A conjunction of (path, equal, value)."""

    terms: tuple[tuple[str, bool, str], ...] = ()

    def matches(self, found: Object) -> bool:
        """Return whether the object meets all terms."""
        return all((_value(found, path) == value) == equal for path, equal, value in self.terms)

    def name(self) -> str | None:
        """Return the name that the selector asks for, if it asks for one."""
        return next((value for path, equal, value in self.terms if path == "metadata.name" and equal), None)


def _value(found: Object, path: str) -> str:
    """Return the value at a path as text; absent and null are empty."""
    value: Any = found
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if path == "source" and isinstance(value, dict):
        value = value.get("component") or found.get("reportingComponent")
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "false" if path in ("spec.unschedulable", "spec.hostNetwork") else ""
    return str(value)


def parse_fields(text: str, resource: Resource) -> FieldSelector:
    """Return the selector of a query parameter; raise ApiError 400 for another syntax or an unknown field."""
    terms: list[tuple[str, bool, str]] = []
    for part in filter(None, re.split(r"(?<!\\),", text)):
        found = re.match(r"([^=!]+?)(==|!=|=)(.*)$", part)
        if found is None:
            raise bad_request(f"invalid selector: '{text}'; can't understand '{part}'")
        path, value = found[1], re.sub(r"\\(.)", r"\1", found[3])
        first, _, rest = path.partition(".")
        if resource.group == "events.k8s.io":
            path = ".".join(filter(None, (RENAMED.get(first, first), rest)))
        if problem := _unsupported(path, resource):
            raise problem
        terms.append((path, found[2] != "!=", value))
    return FieldSelector(tuple(terms))


def _unsupported(path: str, resource: Resource) -> ApiError | None:
    """Return the error for a field that the resource can not be selected by."""
    common = ("metadata.name", "metadata.namespace") if resource.namespaced else ("metadata.name",)
    if resource.custom:
        known: tuple[str, ...] = (*common, *(selected.lstrip(".") for selected in resource.selectable))
        return None if path in known else bad_request(f"field label not supported: {path}")
    listed = SUPPORTED.get(resource.stored_in)
    if listed is not None:
        return None if path in listed else bad_request(f"field label not supported: {path}")
    if path in ("metadata.name", "metadata.namespace"):
        return None
    text = f'{quoted(path)} is not a known field selector: only "metadata.name", "metadata.namespace"'
    return bad_request(text)


@dataclass(frozen=True, slots=True)
class Selection:
    """What a list or watch asks for."""

    labels: LabelSelector = LabelSelector()
    fields: FieldSelector = FieldSelector()

    def matches(self, found: Object) -> bool:
        """Return whether the object belongs to the selection."""
        return self.labels.matches(found["metadata"].get("labels")) and self.fields.matches(found)


Matcher = Callable[[Object], bool]
