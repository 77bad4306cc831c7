"""Status of a KvRouter: conditions with the time of their last change, counts of engines, and Events for changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from kvroute.kube.operator.actions import Action, Emit, SetStatus, covers
from kvroute.kube.operator.gateway_workload import gateway_labels
from kvroute.kube.operator.observed import is_ready, labels_of, ref_of
from kvroute.kube.operator.role_switch import timestamp
from kvroute.kube.resources import Object, name_of
from kvroute.kube.resources.engines import role_of
from kvroute.kube.resources.status import Condition, EngineCounts, KvRouterStatus


@dataclass(frozen=True, slots=True)
class ConditionFinding:
    """One condition before it is compared with the last one."""

    type: Literal["Ready", "TopologyResolved", "EnginesLabelled"]
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class StatusCounts:
    """Numbers of the status."""

    ready_replicas: int
    engines: EngineCounts
    labelled_pods: int


def engine_counts(pods: Sequence[Object]) -> EngineCounts:
    """Return the numbers of ready engines by role."""
    roles = [role_of(labels_of(pod)) for pod in pods if is_ready(pod)]
    return EngineCounts(prefill=roles.count("prefill"), decode=roles.count("decode"), both=roles.count("both"))


def gateway_pods(router: Object, pods: Sequence[Object]) -> list[Object]:
    """Return the pods of a KvRouter's gateway, in the order of their names. Their readiness is known as soon as it
    changes; the number in the Deployment's status comes later, and is not watched."""
    metadata = router["metadata"]
    wanted = gateway_labels(metadata["name"]).items()
    near = (pod for pod in pods if pod["metadata"].get("namespace") == metadata["namespace"])
    return sorted((pod for pod in near if wanted <= labels_of(pod).items()), key=name_of)


def status_changes(
    router: Object, findings: Sequence[ConditionFinding], counts: StatusCounts, now: float
) -> Iterator[Action]:
    """Yield Events for conditions that have changed, then the new status; nothing if the status is as it should be.

    Args:
        router: as observed.
        findings: all conditions that the KvRouter should have.
        counts: numbers of the status.
        now: Unix time in seconds, used for conditions that change.
    """
    before = {condition["type"]: condition for condition in (router.get("status") or {}).get("conditions") or ()}
    generation = int(router["metadata"].get("generation") or 0)
    conditions = []
    for finding in findings:
        old = before.get(finding.type, {})
        same = old.get("status") == finding.status
        if not same or old.get("reason") != finding.reason:
            yield _event(router, finding, old)
        conditions.append(
            Condition(
                type=finding.type,
                status=finding.status,
                reason=finding.reason,
                message=finding.message[:2000],
                last_transition_time=str(old["lastTransitionTime"]) if same else timestamp(now),
                observed_generation=generation,
            )
        )
    status = KvRouterStatus(
        observed_generation=generation,
        ready_replicas=counts.ready_replicas,
        engines=counts.engines,
        labelled_pods=counts.labelled_pods,
        conditions=conditions,
    )
    wanted = _with_zeros(status)
    if not covers(wanted, router.get("status") or {}) or before.keys() != {finding.type for finding in findings}:
        yield SetStatus(ref_of(router), wanted)


def _with_zeros(value: msgspec.Struct) -> dict[str, Any]:
    """Return a Struct as JSON with the fields that are at their default: an absent field would keep its old value."""
    found: dict[str, Any] = {}
    for entry in msgspec.structs.fields(value):
        part = getattr(value, entry.name)
        if isinstance(part, list):
            found[entry.encode_name] = [_with_zeros(condition) for condition in part]
        else:
            found[entry.encode_name] = _with_zeros(part) if isinstance(part, msgspec.Struct) else part
    return found


def _event(router: Object, finding: ConditionFinding, old: Object) -> Emit:
    good = finding.status == "True" or finding.reason == "NoConstraint"
    occasion = f"{router['metadata'].get('generation')} {old.get('lastTransitionTime', '')}"
    kind: Literal["Normal", "Warning"] = "Normal" if good else "Warning"
    return Emit(ref_of(router), router["metadata"].get("uid", ""), kind, finding.reason, finding.message, occasion)
