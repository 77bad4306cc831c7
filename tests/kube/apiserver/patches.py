"""JSON merge patch, JSON patch and strategic merge patch, with the API server's errors and its leniency."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from tests.kube.apiserver.status import ApiError, Object, internal
from tests.kube.apiserver.types import Type

OPERATIONS_MAX = 10_000
SMP_KEYS: Mapping[str, str] = {
    "Container.ports": "containerPort", "ServiceSpec.ports": "port", "PodSpec.topologySpreadConstraints": "topologyKey",
}  # fmt: skip
"""Merge keys of strategic merge patches where they differ from those of server-side apply."""
DIRECTIVES = ("$patch", "$retainKeys")


class PatchFailed(Exception):
    """A JSON patch that does not apply; the text says why."""


def merge_patch(target: Any, patch: Any) -> Any:
    """Return the target after a JSON merge patch (RFC 7386)."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    made = dict(target) if isinstance(target, dict) else {}
    for name, part in patch.items():
        if part is None:
            made.pop(name, None)
        else:
            made[name] = merge_patch(made.get(name), part)
    return made


def json_patch(target: Object, operations: list[Any]) -> Object:
    """Return the target after a JSON patch (RFC 6902). Replacing a missing key of a map adds it, as in Go's library."""
    made: Any = copy.deepcopy(target)
    for operation in operations:
        _operate(made, operation)
    found: Object = made
    return found


def _operate(target: Object, operation: Any) -> None:
    kind = operation.get("op") if isinstance(operation, dict) else None
    if kind not in ("add", "remove", "replace", "move", "copy", "test"):
        raise PatchFailed(f"Unexpected kind: {kind}")
    path = _steps(operation.get("path", ""))
    if kind == "test":
        if _lookup(target, path) != operation.get("value"):
            raise PatchFailed(f"testing value {operation.get('path')} failed: test failed")
        return
    if kind in ("move", "copy"):
        source = _steps(operation.get("from", ""))
        value = copy.deepcopy(_lookup(target, source, strict=True))
        if kind == "move":
            _remove(target, source)
        _add(target, path, value, operation, replacing=False)
    elif kind == "remove":
        _remove(target, path)
    else:
        _add(target, path, copy.deepcopy(operation.get("value")), operation, replacing=kind == "replace")


def _steps(pointer: str) -> list[str]:
    return [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]


def _lookup(target: Any, path: list[str], strict: bool = False) -> Any:
    for step in path:
        if isinstance(target, dict) and step in target:
            target = target[step]
        elif isinstance(target, list) and step.isdigit() and int(step) < len(target):
            target = target[int(step)]
        elif strict:
            raise PatchFailed(f"missing value at {'/'.join(path)}")
        else:
            return None
    return target


def _parent(target: Any, path: list[str], operation: Any) -> tuple[Any, str]:
    if not path:
        raise PatchFailed("the root can not be patched")
    parent = _lookup(target, path[:-1])
    if not isinstance(parent, dict | list):
        name = operation.get("op", "remove") if isinstance(operation, dict) else "remove"
        where = operation.get("path") if isinstance(operation, dict) else "/" + "/".join(path)
        raise PatchFailed(f"{name} operation does not apply: doc is missing path: {where}: missing value")
    return parent, path[-1]


def _add(target: Any, path: list[str], value: Any, operation: Any, replacing: bool) -> None:
    parent, last = _parent(target, path, operation)
    if isinstance(parent, dict):
        parent[last] = value
    elif last == "-" and not replacing:
        parent.append(value)
    elif last.isdigit() and int(last) <= len(parent) - replacing:
        parent[int(last) : int(last) + replacing] = [value]
    else:
        raise PatchFailed(f"invalid index {last}")


def _remove(target: Any, path: list[str]) -> None:
    parent, last = _parent(target, path, None)
    if isinstance(parent, dict) and last in parent:
        del parent[last]
    elif isinstance(parent, list) and last.isdigit() and int(last) < len(parent):
        del parent[int(last)]
    else:
        raise PatchFailed(f"unable to remove nonexistent key: {last}")


def strategic(type_: Type, target: Any, patch: Object) -> Object:
    """Return the target after a strategic merge patch, by the merge keys of its type."""
    if patch.get("$patch") == "delete":
        return {}
    if patch.get("$patch") == "replace":
        return {name: copy.deepcopy(part) for name, part in patch.items() if name != "$patch"}
    made: Object = dict(target) if isinstance(target, dict) else {}
    if "$retainKeys" in patch:
        made = {name: part for name, part in made.items() if name in patch["$retainKeys"]}
    for name, part in patch.items():
        if name in DIRECTIVES or name.startswith("$setElementOrder/"):
            continue
        if name.startswith("$deleteFromPrimitiveList/"):
            field = name.partition("/")[2]
            made[field] = [item for item in made.get(field, []) if item not in part]
            continue
        if part is None:
            made.pop(name, None)
            continue
        if isinstance(part, dict) and "$patch" in part and name not in made:
            continue
        inner = type_.child(name)
        if isinstance(part, list) and inner is not None and inner.kind == "list":
            made[name] = _strategic_list(type_.name, name, inner, made.get(name) or [], part)
        elif isinstance(part, dict) and inner is not None:
            made[name] = strategic(inner, made.get(name), part)
        else:
            made[name] = copy.deepcopy(part)
    return made


def _strategic_list(struct: str, name: str, type_: Type, target: list[Any], patch: list[Any]) -> list[Any]:
    """Return a list after a patch: items with a merge key are merged, new ones come first."""
    if type_.merge == "set":
        return [*(item for item in patch), *(item for item in target if item not in patch)]
    key = SMP_KEYS.get(f"{struct}.{name}") or (type_.keys[0] if type_.merge == "map" else "")
    if {"$patch": "replace"} in patch:
        return [copy.deepcopy(item) for item in patch if item != {"$patch": "replace"}]
    if not key:
        return copy.deepcopy(patch)
    assert type_.items is not None
    made = list(target)
    added: list[Any] = []
    for item in patch:
        if key not in item:
            raise internal(f"map: {go_map(item)} does not contain declared merge key: {key}")
        at = next((at for at, held in enumerate(made) if held.get(key) == item[key]), None)
        if item.get("$patch") == "delete":
            if at is not None:
                del made[at]
        elif at is None:
            added.append(strategic(type_.items, {}, item))
        else:
            made[at] = strategic(type_.items, made[at], item)
    return added + made


def go_map(value: Any) -> str:
    """Return a value as Go's %v prints it."""
    if isinstance(value, dict):
        return "map[" + " ".join(f"{name}:{go_map(value[name])}" for name in sorted(value)) + "]"
    if isinstance(value, list):
        return "[" + " ".join(go_map(item) for item in value) + "]"
    return {True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def too_many_operations(count: int) -> ApiError:
    """Return 413 for a JSON patch above the limit."""
    text = f"The allowed maximum operations in a JSON patch is {OPERATIONS_MAX}, got {count}"
    return ApiError(413, "RequestEntityTooLarge", f"Request entity too large: {text}")
