"""Autoscaling over time: its configuration, when instances are added or taken away, and which role should grow.

`replicas` computes what is needed at one moment; the functions here keep the result steady.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import msgspec

from kvroute.policies.fleet.replicas import ReplicaTarget, ScaledRole
from kvroute.types import InputError

Manages: TypeAlias = Literal["nothing", "instances", "roles"]
"""What the core decides besides the number of instances. `nothing`: another system reads the number; `instances`: which
instances start and stop; `roles`: which instances switch between prefill and decode, of which the total is fixed."""
_SWITCH_GAIN = 0.1
"""Part by which a role switch must relieve the role that lacks most."""


class ScalingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of autoscaling."""

    target: ReplicaTarget = ReplicaTarget()
    manages: Manages = "nothing"
    window_s: float = 300.0
    """Length of the traffic window, in seconds."""
    startup_s: float = 60.0
    """Time from the order of an instance to its first request; a rising rate is extrapolated so far."""
    scale_in_s: float = 300.0
    """Instances are only taken away if they were not needed at any time within this period."""
    margin: float = 0.1
    """Share by which the rate may rise without need for an instance that has just been taken away."""

    def __post_init__(self) -> None:
        for name, seconds in (
            ("window_s", self.window_s),
            ("startup_s", self.startup_s),
            ("scale_in_s", self.scale_in_s),
        ):
            least = 0.0 if name != "window_s" else 1e-3
            if not least <= seconds < math.inf:
                raise InputError(f"{name} is {seconds}", where="autoscaling", hint="give finite seconds above 0")
        if not 0.0 <= self.margin <= 1.0:
            raise InputError(f"margin is {self.margin}", where="autoscaling", hint="give a share from 0 to 1")


@dataclass(slots=True)
class Stabiliser:
    """Desired number of instances of one role over time: more at once, fewer only after a period without need."""

    period_s: float
    desired: int = 0
    """The present result."""
    _kept: deque[tuple[float, int]] = field(default_factory=deque)
    """Times and numbers of the period, of which the numbers fall: the first one is the largest."""

    def update(self, at: float, needed: int, keeps: int) -> int:
        """Return the number of instances to have.

        Args:
            at: now, never decreasing.
            needed: number that is needed now.
            keeps: number that is not taken away if it is there, at least `needed`.
        """
        self._add(at, max(needed, min(keeps, self.desired)))
        while self._kept[0][0] < at - self.period_s:
            self._kept.popleft()
        self.desired = self._kept[0][1]
        return self.desired

    def begin(self, at: float, present: int) -> None:
        """Count the present number as needed now."""
        self.desired = present
        self._add(at, present)

    def _add(self, at: float, count: int) -> None:
        while self._kept and self._kept[-1][1] <= count:
            self._kept.pop()
        self._kept.append((at, count))


def best_split(needed: tuple[int, int], total: int, target: ReplicaTarget) -> int | None:
    """Return the number of prefill instances, of `total`, at which the role that lacks most lacks least; None if no
    split keeps the bounds. Args: `needed` instances of prefill and decode."""
    least, most = max(target.prefill.least, 1), total - max(target.decode.least, 1)
    if least > most:
        return None
    return min(range(least, most + 1), key=lambda count: (shortage(needed, count, total), count))


def shortage(needed: tuple[int, int], prefill: int, total: int) -> float:
    """Return the number of needed over present instances of the role that lacks most; infinite without instances."""
    if not 0 < prefill < total:
        return math.inf
    return max(needed[0] / prefill, needed[1] / (total - prefill))


def one_switch(needed: tuple[int, int], prefill: int, total: int, target: ReplicaTarget) -> ScaledRole | None:
    """Return the role that one instance should switch to; None: none should, or it would relieve too little."""
    best, here = best_split(needed, total, target), shortage(needed, prefill, total)
    if best is None or best == prefill or here <= 1.0:
        return None
    after = prefill + (1 if best > prefill else -1)
    if shortage(needed, after, total) > here * (1.0 - _SWITCH_GAIN):
        return None
    return "prefill" if best > prefill else "decode"
