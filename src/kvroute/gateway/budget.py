"""A retry budget: retries stay a share of the requests, so that an overloaded cluster is not loaded again by them.

A token bucket in two parts, as Finagle's RetryBudget and Envoy's retry budgets have: every request brings a share of a
retry, every second a few more. Pure: the caller tells the time.
"""

from __future__ import annotations

import math

_FADES_S = 10.0
"""What requests brought fades with this time constant: a calm hour does not pay for a storm."""
_STEP_S = 0.1
"""Requests within this time fade together, a hundredth of their share at most too much or too little."""
_WHOLE = 1.0 - 1e-9
"""A hundred requests at a share of 0.01 bring one retry, whatever their floating-point sum is."""


class RetryBudget:
    """Up to any moment: retries <= share * requests + floor_per_s * (seconds + 1).

    The floor keeps at most one second's worth (but a whole retry, if it is above 0), the first of which is there from
    the start; it serves gateways with few requests.
    """

    __slots__ = ("_at", "_brought", "_floor", "floor_per_s", "share")

    def __init__(self, *, share: float = 0.2, floor_per_s: float = 10.0, now: float = 0.0) -> None:
        """Start at `now` seconds. `share` and `floor_per_s` are zero or more."""
        assert min(share, floor_per_s) >= 0
        self.share, self.floor_per_s = share, floor_per_s
        self._at = now
        self._brought = 0.0
        self._floor = floor_per_s

    def request(self, now: float) -> None:
        """A client's request (not a retry) has come in."""
        if now - self._at >= _STEP_S:
            self._pass(now)
        self._brought += self.share

    def spend(self, now: float) -> bool:
        """Take one retry; False: there is none, let the request fail."""
        self._pass(now)
        if self._brought + self._floor < _WHOLE:
            return False
        from_brought = min(self._brought, 1.0)
        self._brought -= from_brought
        self._floor = max(0.0, self._floor - (1.0 - from_brought))
        return True

    def left(self, now: float) -> float:
        """Retries that could be had now."""
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
