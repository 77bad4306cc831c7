"""A retry budget: it limits retries to a share of the requests, so that they do not overload a cluster further.

It is a token bucket in two parts, like Finagle's RetryBudget and Envoy's retry budgets: every request adds a fraction
of a retry, and every second adds a few more. Pure: the caller passes the time.
"""

from __future__ import annotations

import math

_FADES_S = 10.0
"""Time constant with which the retries that requests have added decay, in seconds. A long calm time therefore does not
allow a retry storm."""
_STEP_S = 0.1
"""Step of the decay, in seconds. Requests within one step decay together, with an error of at most 1 %."""
_WHOLE = 1.0 - 1e-9
"""One retry, less the rounding error of sums: 100 requests at a share of 0.01 must add one retry."""


class RetryBudget:
    """At any time, retries <= share * requests + floor_per_s * (seconds + 1).

    The floor is for gateways with few requests. It accumulates the retries of one second at most (at least one retry,
    if it is above 0) and is full at the start.
    """

    __slots__ = ("_at", "_brought", "_floor", "floor_per_s", "share")

    def __init__(self, *, share: float = 0.2, floor_per_s: float = 10.0, now: float = 0.0) -> None:
        """Start at time `now`. `share` and `floor_per_s` are zero or more."""
        assert min(share, floor_per_s) >= 0
        self.share, self.floor_per_s = share, floor_per_s
        self._at = now
        self._brought = 0.0
        self._floor = floor_per_s

    def request(self, now: float) -> None:
        """Record a client's request (not a retry)."""
        if now - self._at >= _STEP_S:
            self._pass(now)
        self._brought += self.share

    def spend(self, now: float) -> bool:
        """Take one retry from the budget; False if there is none, so that the request must fail."""
        self._pass(now)
        if self._brought + self._floor < _WHOLE:
            return False
        from_brought = min(self._brought, 1.0)
        self._brought -= from_brought
        self._floor = max(0.0, self._floor - (1.0 - from_brought))
        return True

    def left(self, now: float) -> float:
        """Return the number of retries in the budget now."""
        self._pass(now)
        return self._brought + self._floor

    def _pass(self, now: float) -> None:
        elapsed_s = now - self._at
        if elapsed_s <= 0:
            return
        self._at = now
        self._brought *= math.exp(-elapsed_s / _FADES_S)
        most = max(1.0, self.floor_per_s) if self.floor_per_s else 0.0
        self._floor = min(most, self._floor + self.floor_per_s * elapsed_s)
