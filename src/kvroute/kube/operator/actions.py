"""Changes that a reconcile asks for, and the comparison that decides whether an object needs one."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, TypeAlias

import msgspec

from kvroute.kube.discovery.labels import PREFIX
from kvroute.kube.operator.observed import Ref, annotations_of
from kvroute.kube.resources import Object

APPLIED = f"{PREFIX}applied"
"""Annotation with the digest of what was applied: fields that were removed since then are found by it."""


@dataclass(frozen=True, slots=True)
class Apply:
    """Server-side apply of an object, with force: the operator is the only manager of what it makes."""

    obj: Object


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete an object if it still has this UID."""

    ref: Ref
    uid: str


@dataclass(frozen=True, slots=True)
class PatchMetadata:
    """JSON merge patch of labels, annotations and finalizers (None: unchanged), which fails if the object has changed
    since it was observed; a value of None removes a label or an annotation."""

    ref: Ref
    resource_version: str
    labels: Mapping[str, str | None] | None = None
    annotations: Mapping[str, str | None] | None = None
    finalizers: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class SetStatus:
    """Server-side apply of the status of a KvRouter."""

    ref: Ref
    status: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Emit:
    """Record an Event about an object. Equal events have equal names, so one that is repeated is recorded once."""

    ref: Ref
    uid: str
    type: Literal["Normal", "Warning"]
    reason: str
    message: str
    occasion: str = ""
    """Makes events of equal text different."""

    @property
    def name(self) -> str:
        """Name of the Event."""
        text = "\n".join((self.uid, self.reason, self.message, self.occasion))
        return f"{self.ref.name[:200]}.{hashlib.sha256(text.encode()).hexdigest()[:16]}"


Action: TypeAlias = Apply | Delete | PatchMetadata | SetStatus | Emit


def signed(obj: Mapping[str, Any]) -> Object:
    """Return an object with the annotation `APPLIED`, the digest of its content."""
    digest = hashlib.sha256(msgspec.json.encode(obj, order="deterministic")).hexdigest()[:32]
    metadata = dict(obj["metadata"])
    metadata["annotations"] = dict(metadata.get("annotations") or {}) | {APPLIED: digest}
    return dict(obj) | {"metadata": metadata}


def up_to_date(wanted: Object, actual: Object) -> bool:
    """Return True if `wanted` was the last object applied, and none of its fields has changed since."""
    return annotations_of(wanted).get(APPLIED) == annotations_of(actual).get(APPLIED) and covers(wanted, actual)


def covers(wanted: Any, actual: Any) -> bool:
    """Return True if `actual` has every field of `wanted`; it may have more, such as defaults of the server.

    Lists of named items are compared by name, other lists item by item. Quantities count by their value.
    """
    if isinstance(wanted, Mapping):
        return isinstance(actual, Mapping) and all(key in actual and covers(wanted[key], actual[key]) for key in wanted)
    if isinstance(wanted, (list, tuple)):
        return isinstance(actual, (list, tuple)) and _covers_items(wanted, actual)
    return bool(wanted == actual) or _same_quantity(wanted, actual)


def _covers_items(wanted: Sequence[Any], actual: Sequence[Any]) -> bool:
    for key in ("name", "uid", "type"):
        if wanted and all(isinstance(item, Mapping) and key in item for item in (*wanted, *actual)):
            known = {item[key]: item for item in actual}
            return all(item[key] in known and covers(item, known[item[key]]) for item in wanted)
    return len(wanted) == len(actual) and all(map(covers, wanted, actual))


_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
_FACTORS = {
    "m": Decimal("0.001"),
    **{prefix: Decimal(1000) ** power for power, prefix in enumerate("kMGT", 1)},
    **{f"{prefix}i": Decimal(1024) ** power for power, prefix in enumerate("KMGT", 1)},
}


def _same_quantity(wanted: object, actual: object) -> bool:
    first, second = (
        _QUANTITY.fullmatch(str(value)) if isinstance(value, (str, int)) and not isinstance(value, bool) else None
        for value in (wanted, actual)
    )
    return first is not None and second is not None and _amount(first) == _amount(second)


def _amount(match: re.Match[str]) -> Decimal:
    return Decimal(match[1]) * _FACTORS.get(match[2] or "", Decimal(1))
