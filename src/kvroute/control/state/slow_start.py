"""Slow start: an instance that returns gets a share of its pool's requests that rises over a window, as in Envoy.

A returned instance is idle, so a policy that prices queues would send it every request at once, before its caches are
warm. During the window it is a candidate only while it has credit. Each request of the pool adds to the credit the fair
share of the instance times a factor that rises from LEAST to 1. Each request that the instance takes costs a credit of
1. Slow start never causes a rejection.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvroute.types import BoolArray

LEAST = 0.1
"""Fraction of its fair share that an instance takes right after its return."""


@dataclass(slots=True)
class SlowStart:
    """The instances of one pool that returned recently, by position."""

    window_s: float = 0.0
    """Length of the window, in seconds; 0: no slow start."""
    started: dict[int, float] = field(default_factory=dict)
    """Time of each return."""
    credit: dict[int, float] = field(default_factory=dict)
    """Number of requests that each may take now, at most 1."""

    def returned(self, position: int, at: float) -> None:
        """Start the window of an instance. Its first request may come at once: it can be a circuit breaker's probe."""
        if self.window_s > 0:
            self.started[position] = at
            self.credit[position] = 1.0

    def take_over(self, old: SlowStart, after: dict[int, int]) -> None:
        """Continue with the windows of the instances that stay. Args: `after`: position of each of them here, by its
        position there."""
        self.started = {after[position]: at for position, at in old.started.items() if position in after}
        self.credit = {after[position]: credit for position, credit in old.credit.items() if position in after}

    def left(self, position: int) -> None:
        """End the window of an instance that no longer takes requests, or that takes its full share."""
        if self.started.pop(position, None) is not None:
            del self.credit[position]

    def factor(self, position: int, at: float) -> float:
        """Fraction of its fair share that an instance takes at this time: LEAST to 1."""
        started = self.started.get(position)
        return 1.0 if started is None else min(max((at - started) / self.window_s, LEAST), 1.0)

    def booked(self, chosen: int, at: float, instances: int) -> None:
        """Update the credits after a request of the pool was sent to `chosen`; `instances` of the pool are up."""
        for position in list(self.started):
            factor = self.factor(position, at)
            if factor >= 1.0:
                self.left(position)
                continue
            credit = min(self.credit[position] + factor / max(instances, 1), 1.0)
            self.credit[position] = max(credit - 1.0, 0.0) if position == chosen else credit

    def without_limited(self, usable: BoolArray, site: tuple[str, ...], at: float) -> BoolArray | None:
        """`usable` without the instances that have no credit, if others of the same site can take their place; None if
        no instance is left out. Args: `site` of each instance."""
        limited = [
            position
            for position in self.started
            if usable[position] and self.credit[position] < 1.0 and self.factor(position, at) < 1.0
        ]
        if not limited:
            return None
        rest = usable.copy()
        rest[limited] = False
        others = {site[position] for position in np.flatnonzero(rest).tolist()}
        for position in limited:
            rest[position] = site[position] not in others
        return rest if (rest != usable).any() else None
