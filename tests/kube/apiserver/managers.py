"""Field ownership: metadata.managedFields after updates, and server-side apply with its conflicts."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from tests.kube.apiserver.fieldsets import (
    UNTRACKED,
    FieldSet,
    Path,
    all_paths,
    applied_set,
    changed_set,
    from_fields,
    item_step,
    parts,
    shown_path,
    to_fields,
    within,
)  # fmt: skip
from tests.kube.apiserver.status import ApiError, Object
from tests.kube.apiserver.types import Type

UNRECORDED = "before-first-apply"


@dataclass(frozen=True, slots=True)
class Entry:
    """One manager's fields."""

    manager: str
    operation: str
    api_version: str
    fields: FieldSet
    subresource: str = ""
    time: str = ""

    def same(self, other: Entry) -> bool:
        """Return whether both entries are of one manager."""
        return (self.manager, self.operation, self.subresource) == (other.manager, other.operation, other.subresource)

    def shown(self) -> str:
        """Return the manager as conflict messages name it."""
        text = f'"{self.manager}"'
        if self.subresource:
            text += f' with subresource "{self.subresource}"'
        return text + (f" using {self.api_version}" if self.operation == "Update" else "")


def read(found: Object) -> list[Entry]:
    """Return the entries of an object; entries without a manager are left out."""
    return [
        Entry(
            entry["manager"], entry["operation"], entry["apiVersion"],
            frozenset(from_fields(entry.get("fieldsV1", {}))),
            entry.get("subresource", ""), entry.get("time", ""),
        )
        for entry in found["metadata"].get("managedFields") or []
        if isinstance(entry, dict) and entry.get("manager")
    ]  # fmt: skip


def write(found: Object, entries: Iterable[Entry]) -> Object:
    """Return the object with the entries that have fields, in the order of the API server."""
    listed = []
    kept = [entry for entry in entries if entry.fields]
    for entry in sorted(kept, key=lambda e: (e.operation, e.time, e.manager, e.api_version, e.subresource)):
        made = {"manager": entry.manager, "operation": entry.operation, "apiVersion": entry.api_version}
        if entry.time:
            made["time"] = entry.time
        body: Object = {**made, "fieldsType": "FieldsV1", "fieldsV1": to_fields(entry.fields)}
        if entry.subresource:
            body["subresource"] = entry.subresource
        listed.append(body)
    metadata = {name: value for name, value in found["metadata"].items() if name != "managedFields"}
    if listed:
        metadata["managedFields"] = listed
    return {**found, "metadata": metadata}


@dataclass(frozen=True, slots=True)
class Writer:
    """Who writes, through which part of the resource, and when."""

    manager: str
    api_version: str
    subresource: str = ""
    time: str = ""


def ignored(subresource: str, custom: bool, kind: str) -> tuple[Path, ...]:
    """Return the roots of the fields that a write through a part of the resource does not change."""
    if subresource == "status":
        return (("f:spec",), ("f:metadata",)) if custom or kind not in ("Pod", "Node") else (("f:spec",),)
    return () if subresource else (("f:status",),)


def _tracked(found: Iterable[Path], roots: tuple[Path, ...]) -> FieldSet:
    return frozenset(path for path in found if path not in UNTRACKED and not within(path, roots))


def update(type_: Type, before: Object, after: Object, writer: Writer, roots: tuple[Path, ...]) -> Object:
    """Return the object after an update, with its managers: the writer owns what has changed.

    Managers of an object that has none are recorded when it is applied for the first time, not before.
    """
    given = after["metadata"].get("managedFields")
    cleared = isinstance(given, list) and given and not any(entry for entry in given)
    entries = [] if cleared else read(after) if given else read(before)
    if cleared or (not entries and before["metadata"].get("uid")):
        return write(after, [])
    changed = _tracked(changed_set(type_, before, after), roots)
    left = frozenset(all_paths(type_, after))
    mine = Entry(writer.manager, "Update", writer.api_version, changed, writer.subresource, writer.time)
    kept = []
    for entry in entries:
        if entry.same(mine):
            mine = replace(mine, fields=changed | (entry.fields & left), time=mine.time if changed else entry.time)
        else:
            kept.append(replace(entry, fields=(entry.fields - changed) & left))
    return write(after, [*kept, mine])


@dataclass(frozen=True, slots=True)
class Applied:
    """The result of an apply: the merged object and its managers, before they are written into it."""

    merged: Object
    entries: list[Entry]


def apply(type_: Type, live: Object, config: Object, writer: Writer, force: bool, roots: tuple[Path, ...]) -> Applied:
    """Merge an applied configuration into an object; raise ApiError 409 for fields of other managers."""
    config = {name: part for name, part in config.items() if (f"f:{name}",) not in roots}
    fields = _tracked(applied_set(type_, config), roots)
    mine = Entry(writer.manager, "Apply", writer.api_version, fields, writer.subresource, writer.time)
    entries = read(live)
    if not entries and live["metadata"].get("uid"):
        owned = _tracked(changed_set(type_, {}, live), ())
        entries = [Entry(UNRECORDED, "Update", writer.api_version, owned, time=writer.time)]
    last = next((entry for entry in entries if entry.same(mine)), None)
    others = [entry for entry in entries if not entry.same(mine)]
    merged = merge(type_, live, config)
    changed = frozenset(changed_set(type_, live, merged))
    clashes = [(entry, sorted(entry.fields & changed & fields)) for entry in others]
    if not force and any(paths for _, paths in clashes):
        raise _conflict(clashes)
    others = [replace(entry, fields=entry.fields - (changed & fields)) for entry in others]
    if last is not None:
        gone = last.fields - fields
        owned_elsewhere = [path for entry in others for path in entry.fields]
        removed = {path for path in gone if not any(other[: len(path)] == path for other in owned_elsewhere)}
        removed -= {path for path in removed if any(kept[: len(path)] == path for kept in fields)}
        merged = remove(type_, merged, removed, fields)
    left = frozenset(all_paths(type_, merged))
    others = [replace(entry, fields=entry.fields & left) for entry in others]
    if _unmanaged(merged) == _unmanaged(live):
        mine = replace(mine, time=last.time if last else "")
    return Applied(merged, [*others, mine])


def _unmanaged(found: Object) -> Object:
    metadata = {name: value for name, value in found["metadata"].items() if name != "managedFields"}
    return {**found, "metadata": metadata}


def _conflict(clashes: list[tuple[Entry, list[Path]]]) -> ApiError:
    """Return 409 with every field that another manager owns."""
    found = [(entry, paths) for entry, paths in clashes if paths]
    count = sum(len(paths) for _, paths in found)
    causes = [
        {"reason": "FieldManagerConflict", "message": f"conflict with {entry.shown()}", "field": shown_path(path)}
        for entry, paths in found
        for path in paths
    ]
    if count == 1:
        text = f"Apply failed with 1 conflict: conflict with {found[0][0].shown()}: {causes[0]['field']}"
    else:
        blocks = []
        for entry, paths in found:
            word = "conflict" if len(paths) == 1 else "conflicts"
            blocks.append(f"{word} with {entry.shown()}:" + "".join(f"\n- {shown_path(path)}" for path in paths))
        text = f"Apply failed with {count} conflicts: " + "\n".join(blocks)
    return ApiError(409, "Conflict", text, {"causes": causes})


def merge(type_: Type, live: Any, config: Any) -> Any:
    """Return the live value with the configuration laid over it; lists with keys are merged item by item."""
    if parts(type_, config) is None or parts(type_, live) is None:
        return copy.deepcopy(config)
    if type_.kind == "list":
        assert type_.items is not None
        wanted = {item_step(type_, item): item for item in config}
        merged = []
        for item in live:
            step = item_step(type_, item)
            merged.append(merge(type_.items, item, wanted.pop(step)) if step in wanted else item)
        return merged + [copy.deepcopy(item) for item in wanted.values()]
    made = dict(live)
    for name, part in config.items():
        inner = type_.child(name)
        assert inner is not None or type_.kind == "any"
        made[name] = merge(inner or type_, live[name], part) if name in live else copy.deepcopy(part)
    return made


def remove(type_: Type, value: Any, gone: set[Path], kept: FieldSet, path: Path = ()) -> Any:
    """Return the value without the paths; containers that become empty go too, unless they are to be kept."""
    found = parts(type_, value)
    if found is None or not gone:
        return value
    if type_.kind == "list":
        return [
            remove(inner, item, gone, kept, (*path, step)) for step, inner, item in found if (*path, step) not in gone
        ]
    made: Object = {}
    for step, inner, part in found:
        where = (*path, step)
        if where in gone:
            continue
        left = remove(inner, part, gone, kept, where)
        if left in ({}, []) and part not in ({}, []) and where not in kept:
            continue
        made[step[2:]] = left
    return made
