"""Role switches of engine pods: a label asks for a role; the engine is drained, re-labelled, and used when it is ready.

The state is in the pod's labels and annotations alone, so an operator that restarts continues where the last one
ended. While an engine is drained its role is `none`, and gateways send it no new requests.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from kvroute.kube.discovery.labels import NOT_AN_ENGINE, PREFIX, ROLE
from kvroute.kube.operator.actions import Action, Emit, PatchMetadata
from kvroute.kube.operator.observed import annotations_of, is_ready, labels_of, ref_of
from kvroute.kube.resources import Object
from kvroute.kube.resources.engines import role_of
from kvroute.types import Role

TARGET_ROLE = f"{PREFIX}target-role"
"""Label that asks for a role."""
ROLE_BEFORE = f"{PREFIX}role-before"
DRAINED_SINCE = f"{PREFIX}drained-since"
"""Annotations of a pod that is drained: its role before, and the time of the begin."""
OBSTACLE = f"{PREFIX}role-change"
"""Annotation with the reason why a role change does not begin; an Event has reported it once."""

Phase = Literal["serving", "asked", "refused", "draining", "changed"]


@dataclass(frozen=True, slots=True)
class SwitchLimits:
    """When an engine counts as drained."""

    drain_s: float
    idle: frozenset[str]
    """UIDs of pods without requests in flight; they need not wait for `drain_s`."""


def phase_of(pod: Object) -> Phase:
    """Return the state of a pod's role switch."""
    target = labels_of(pod).get(TARGET_ROLE)
    before = annotations_of(pod).get(ROLE_BEFORE)
    if target is None:
        return "serving" if before is None else "draining"
    if target not in get_args(Role):
        return "refused"
    if before is not None:
        return "draining"
    return "changed" if labels_of(pod).get(ROLE) == target else "asked"


def switch_roles(pods: Sequence[Object], limits: SwitchLimits, now: float) -> Iterator[Action]:
    """Yield the next step of each role switch among the engines of one KvRouter.

    At most one engine is drained at a time, and none that is the last ready one of its role.

    Args:
        pods: engine pods in the order of their names.
        limits: when an engine counts as drained.
        now: Unix time in seconds.
    """
    draining = any(phase_of(pod) == "draining" for pod in pods)
    for pod in pods:
        if pod["metadata"].get("deletionTimestamp"):
            continue
        match phase_of(pod):
            case "draining":
                yield from _end_of_drain(pod, limits, now)
            case "changed" if is_ready(pod):
                yield _patch(pod, {TARGET_ROLE: None}, None)
                yield _event(pod, "RoleChanged", f"The engine is ready as {labels_of(pod)[ROLE]}.")
            case "asked" if not draining and _replaceable(pod, pods):
                draining = True
                yield from _begin_of_drain(pod, now)
            case "asked" if not draining:
                what = f"It stays {role_of(labels_of(pod))}: it is the last ready engine of that role."
                yield from _obstacle(pod, "RoleChangeWaits", what)
            case "refused":
                what = f"{labels_of(pod)[TARGET_ROLE]!r} is no role; set {TARGET_ROLE} to prefill, decode or both."
                yield from _obstacle(pod, "RoleChangeRefused", what)
            case "serving" if OBSTACLE in annotations_of(pod):
                yield _patch(pod, {}, {OBSTACLE: None})


def _obstacle(pod: Object, reason: str, message: str) -> Iterator[Action]:
    if annotations_of(pod).get(OBSTACLE) != reason:
        yield _patch(pod, {}, {OBSTACLE: reason})
        yield _event(pod, reason, message, warning=True)


def _begin_of_drain(pod: Object, now: float) -> Iterator[Action]:
    role = role_of(labels_of(pod)) or "both"
    yield _patch(pod, {ROLE: NOT_AN_ENGINE}, {ROLE_BEFORE: role, DRAINED_SINCE: timestamp(now)})
    yield _event(
        pod, "RoleChangeBegins", f"The engine is drained as {role}, and becomes {labels_of(pod)[TARGET_ROLE]}."
    )


def _end_of_drain(pod: Object, limits: SwitchLimits, now: float) -> Iterator[Action]:
    """Give the engine its new role, or its old one if nothing asks for a new one any more."""
    notes = annotations_of(pod)
    target = labels_of(pod).get(TARGET_ROLE)
    begin = _seconds(notes.get(DRAINED_SINCE, ""))
    drained = pod["metadata"].get("uid") in limits.idle or begin is None or now >= begin + limits.drain_s
    if target is not None and target in get_args(Role) and not drained:
        return
    role = target if target in get_args(Role) else notes.get(ROLE_BEFORE)
    yield _patch(pod, {ROLE: role}, {ROLE_BEFORE: None, DRAINED_SINCE: None})


def _replaceable(pod: Object, pods: Sequence[Object]) -> bool:
    """Return True if another ready engine has the role of this one, or if this one is not ready."""
    role = role_of(labels_of(pod))
    others = (other for other in pods if other is not pod and is_ready(other))
    return not is_ready(pod) or any(role_of(labels_of(other)) == role for other in others)


def timestamp(now: float) -> str:
    """Return Unix seconds as the API server writes times: whole seconds, UTC."""
    return datetime.datetime.fromtimestamp(int(now), datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _seconds(text: str) -> float | None:
    try:
        return datetime.datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None


def _patch(pod: Object, labels: dict[str, str | None], annotations: dict[str, str | None] | None) -> PatchMetadata:
    return PatchMetadata(ref_of(pod), pod["metadata"].get("resourceVersion", ""), labels, annotations)


def _event(pod: Object, reason: str, message: str, *, warning: bool = False) -> Emit:
    occasion = labels_of(pod).get(TARGET_ROLE, "")
    kind: Literal["Normal", "Warning"] = "Warning" if warning else "Normal"
    return Emit(ref_of(pod), pod["metadata"].get("uid", ""), kind, reason, message, occasion)
