"""Leader election by a Lease: one operator acts, others wait. The decisions do no I/O.

Times of the Lease are those of other machines' clocks, so they are never compared with the own clock. A Lease counts as
expired when it has not changed for its duration, measured by the own clock since it was first seen in that state.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from kvroute.kube.resources import Object

DURATION_S = 15.0
RENEW_S = 4.0
"""Time between two renewals, and between two looks of an operator that waits."""
GIVE_UP_S = 10.0
"""Time without a renewal after which the leader stops to act. It is shorter than the duration, so no other operator
leads before."""


@dataclass(frozen=True, slots=True)
class Create:
    """Create the Lease; it fails if another operator has created it."""

    spec: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Update:
    """Replace the Lease's spec by a PUT with the resourceVersion that was read; it fails if another operator wrote."""

    spec: dict[str, Any]


Step: TypeAlias = Create | Update | Literal["wait"]


class LeaderCandidate:
    """One operator that wants to lead."""

    def __init__(self, identity: str, give_up_s: float = GIVE_UP_S) -> None:
        self._identity, self._give_up_s = identity, give_up_s
        self._seen: Object | None = None
        self._seen_s = 0.0
        self._renewed_s: float | None = None

    def leads(self, now: float) -> bool:
        """Return True if this operator may act at `now` (monotonic seconds)."""
        return self._renewed_s is not None and now < self._renewed_s + self._give_up_s

    def step(self, lease: Object | None, now: float, clock: float) -> Step:
        """Return what to do with the Lease as it was read.

        Args:
            lease: None: there is none.
            now: monotonic seconds.
            clock: Unix seconds, written into the Lease for people.
        """
        if lease is None:
            return Create(self._spec({}, clock, taken=True))
        spec = lease.get("spec") or {}
        if spec != self._seen:
            self._seen, self._seen_s = spec, now
        holder = spec.get("holderIdentity") or ""
        if holder == self._identity:
            return Update(self._spec(spec, clock, taken=False))
        duration_s = float(spec.get("leaseDurationSeconds") or DURATION_S)
        if not holder or now >= self._seen_s + duration_s:
            return Update(self._spec(spec, clock, taken=True))
        return "wait"

    def written(self, before: float) -> None:
        """Note that the Lease was written; `before` is the monotonic time before the request was sent."""
        self._renewed_s = before

    def lost(self) -> None:
        """Note that another operator has written the Lease."""
        self._renewed_s = None

    def release(self, lease: Object | None, clock: float) -> Step:
        """Return how to give up the Lease at the end, so that another operator leads at once."""
        spec = (lease or {}).get("spec") or {}
        if spec.get("holderIdentity") != self._identity:
            return "wait"
        return Update(dict(spec) | {"holderIdentity": "", "renewTime": micro_time(clock)})

    def _spec(self, old: Object, clock: float, *, taken: bool) -> dict[str, Any]:
        transitions = int(old.get("leaseTransitions") or 0)
        return dict(old) | {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": int(DURATION_S),
            "acquireTime": micro_time(clock) if taken or not old.get("acquireTime") else old["acquireTime"],
            "renewTime": micro_time(clock),
            "leaseTransitions": transitions + 1 if taken and old else transitions,
        }


def micro_time(clock: float) -> str:
    """Return Unix seconds as a MicroTime: the API server rejects any other number of digits than six."""
    moment = datetime.datetime.fromtimestamp(clock, datetime.UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
