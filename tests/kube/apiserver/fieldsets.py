"""Sets of field paths: what an applied configuration names, what an update changes, and their FieldsV1 form."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from tests.kube.apiserver.status import Object, internal, quoted
from tests.kube.apiserver.types import ANY, Type

Path = tuple[str, ...]
"""Steps to a field, in FieldsV1's notation: `f:name`, `k:{"name":"w"}` for a list item, `v:"x"` for a set member."""
FieldSet = frozenset[Path]
KEY_DEFAULTS = {"protocol": "TCP"}
UNTRACKED: FieldSet = frozenset(
    [("f:apiVersion",), ("f:kind",), ("f:metadata",)]
    + [
        ("f:metadata", f"f:{name}")
        for name in (
            "name", "namespace", "creationTimestamp", "selfLink", "uid", "generation", "managedFields",
            "resourceVersion", "deletionTimestamp", "deletionGracePeriodSeconds",
        )
    ]
)  # fmt: skip


def compact(value: Any) -> str:
    """Return JSON as FieldsV1 keys have it."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def item_step(type_: Type, item: Any) -> str:
    """Return the step to a list item."""
    if type_.merge == "set":
        return f"v:{compact(item)}"
    keys = {key: item.get(key, KEY_DEFAULTS.get(key)) for key in sorted(type_.keys)}
    return f"k:{compact({key: value for key, value in keys.items() if value is not None})}"


def parts(type_: Type, value: Any) -> Iterator[tuple[str, Type, Any]] | None:
    """Return step, type and value of the parts that have owners of their own, or None for a leaf."""
    if type_.kind == "any" and isinstance(value, dict):
        return ((f"f:{name}", ANY, part) for name, part in value.items())
    if not type_.container or value is None:
        return None
    if type_.kind == "list" and isinstance(value, list):
        assert type_.items is not None
        inner = type_.items
        return ((item_step(type_, item), inner, item) for item in value)
    if isinstance(value, dict):
        return ((f"f:{name}", type_.child(name) or ANY, part) for name, part in value.items())
    return None


def applied_set(type_: Type, value: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the fields that an applied configuration names."""
    found = parts(type_, value)
    if found is None:
        yield path
        return
    for step, inner, part in found:
        where = (*path, step)
        named = type_.kind in ("map", "any") or step.startswith(("k:", "v:")) or part in (None, {})
        if named:
            yield where
        if not (named and part in (None, {})):
            yield from applied_set(inner, part, where)


def changed_set(type_: Type, before: Any, after: Any, path: Path = (), absent: bool = False) -> Iterator[Path]:
    """Yield the fields that are in `after` and are new or different from `before`."""
    found = parts(type_, after)
    if found is None:
        if absent or before != after:
            yield path
        return
    if absent:
        yield path
    held = {step: part for step, _, part in parts(type_, before) or ()} if not absent else {}
    for step, inner, part in found:
        yield from changed_set(inner, held.get(step), part, (*path, step), absent=step not in held)


def all_paths(type_: Type, value: Any, path: Path = ()) -> Iterator[Path]:
    """Yield every path of a value, containers included."""
    yield path
    for step, inner, part in parts(type_, value) or ():
        yield from all_paths(inner, part, (*path, step))


def within(path: Path, roots: Iterable[Path]) -> bool:
    """Return whether a path is one of the roots or below one."""
    return any(path[: len(root)] == root for root in roots)


def to_fields(found: Iterable[Path]) -> Object:
    """Return the FieldsV1 object of a set."""
    made: Object = {}
    members = set(found)
    for path in sorted(members):
        node = made
        for step in path:
            node = node.setdefault(step, {})
    for path in members:
        node = made
        for step in path:
            node = node[step]
        if node:
            node["."] = {}
    return made


def from_fields(fields: Object, path: Path = ()) -> Iterator[Path]:
    """Yield the paths of a FieldsV1 object."""
    if path and (not fields or "." in fields):
        yield path
    for step, inner in fields.items():
        if step != ".":
            yield from from_fields(inner, (*path, step))


def shown_path(path: Path) -> str:
    """Return a path as conflict messages show it."""
    text = ""
    for step in path:
        kind, _, rest = step.partition(":")
        if kind == "f":
            text += f".{rest}"
        elif kind == "v":
            text += f"[={rest}]"
        else:
            text += "[" + ",".join(f"{name}={compact(value)}" for name, value in json.loads(rest).items()) + "]"
    return text


def check_types(type_: Type, value: Any, subject: str, path: str = "") -> None:
    """Raise ApiError 500 for an applied configuration that the schema does not fit."""
    problem = _misfit(type_, value, path)
    if problem:
        raise internal(f"failed to create typed patch object ({subject}): {problem}")


def _misfit(type_: Type, value: Any, path: str) -> str:
    scalars = {"string": str, "bytes": str, "time": str, "microtime": str, "integer": int, "boolean": bool}
    if value is None or type_.kind == "any":
        return ""
    if type_.kind in scalars:
        wanted = "numeric" if type_.kind == "integer" else type_.kind if type_.kind == "boolean" else "string"
        right = isinstance(value, scalars[type_.kind]) and (type_.kind == "boolean" or not isinstance(value, bool))
        shown = value if not isinstance(value, str) else quoted(value)
        return "" if right else f"{path}: expected {wanted}, got &value.valueUnstructured{{Value:{shown}}}"
    if type_.kind == "list" and isinstance(value, list):
        return _misfit_list(type_, value, path)
    if type_.kind in ("object", "map") and isinstance(value, dict):
        for name, part in value.items():
            inner = type_.child(name)
            if inner is None:
                return f"{path}.{name}: field not declared in schema"
            if problem := _misfit(inner, part, f"{path}.{name}"):
                return problem
    return ""


def _misfit_list(type_: Type, value: list[Any], path: str) -> str:
    assert type_.items is not None
    seen: set[str] = set()
    for at, item in enumerate(value):
        step = item_step(type_, item) if type_.merge in ("set", "map") else ""
        where = f"{path}{shown_path((step,))}" if step else f"{path}[{at}]"
        if problem := _misfit(type_.items, item, where):
            return problem
        if step and step in seen:
            return f"{path}: duplicate entries for key {shown_path((step,))}"
        seen.add(step)
    return ""
