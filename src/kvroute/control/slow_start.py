"""Slow start: an instance that has returned takes a share of its pool's requests that rises over a window, as in Envoy.

An instance that comes back is idle, so a policy that prices queues would send it every request at once, before its
caches are warm. During the window it is a candidate only while it has credit: each request of the pool earns it its
fair share times a factor that rises from LEAST to 1, and each request that it takes costs one. No request is refused
for this.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvroute.types import BoolArray

LEAST = 0.1
"""Of its fair share, what an instance takes right after its return."""


@dataclass(slots=True)
class SlowStart:
    """The instances of one pool that have returned of late, by position."""

    window_s: float = 0.0
    """0: there is no slow start."""
    started: dict[int, float] = field(default_factory=dict)
    """When each returned."""
    credit: dict[int, float] = field(default_factory=dict)
    """Requests that each may take now, at most 1."""

    def returned(self, position: int, at: float) -> None:
        """An instance takes requests again; the first one at once, for it may be a circuit breaker's probe."""
        if self.window_s > 0:
            self.started[position] = at
            self.credit[position] = 1.0

    def left(self, position: int) -> None:
        """An instance takes no requests any more."""
        if self.started.pop(position, None) is not None:
            del self.credit[position]

    def factor(self, position: int, at: float) -> float:
        """Share of its fair share that an instance takes at a time: LEAST to 1."""
        started = self.started.get(position)
        return 1.0 if started is None else min(max((at - started) / self.window_s, LEAST), 1.0)

    def booked(self, chosen: int, at: float, instances: int) -> None:
        """A request of the pool, which has so many instances that are up, was sent to this position."""
        for position in list(self.started):
            factor = self.factor(position, at)
            if factor >= 1.0:
                self.left(position)
                continue
            credit = min(self.credit[position] + factor / max(instances, 1), 1.0)
            self.credit[position] = max(credit - 1.0, 0.0) if position == chosen else credit

    def without_limited(self, usable: BoolArray, site: tuple[str, ...], at: float) -> BoolArray | None:
        """`usable` without the instances that have no credit, where others of the same site can take their place; None
        where nobody is left out. Args: `site` of each instance."""
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
