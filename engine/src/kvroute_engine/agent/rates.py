"""Counters that can wrap around or begin again, and their rates over the last periods."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

_WRAP = 1 << 32
"""Counters of some drivers have 32 bits."""


def increase(before: int, now: int) -> int:
    """Return what was counted between two readings of a counter.

    A counter that is lower than before has wrapped around if it was in the upper half of 32 bits and is in the lower
    half; otherwise it began again with 0.
    """
    if now >= before:
        return now - before
    if _WRAP // 2 <= before < _WRAP and now < _WRAP // 2:
        return now + _WRAP - before
    return now


@dataclass(slots=True)
class Total:
    """What a counter has counted since its first reading."""

    value: int = 0
    _last: int | None = None

    def read(self, reading: int) -> None:
        """Take a reading."""
        if self._last is not None:
            self.value += increase(self._last, reading)
        self._last = reading


@dataclass(slots=True)
class CounterRate:
    """Rate of a counter over a window; readings of another incarnation begin with 0."""

    window_s: float
    _incarnation: int = 0
    _last: int | None = None
    _total: int = 0
    _points: deque[tuple[float, int]] = field(default_factory=deque)
    """Clock and total, ascending by clock."""

    def read(self, clock_s: float, value: int, incarnation: int = 0) -> None:
        """Take a reading; one of the same time is ignored, and an earlier clock begins anew (a reboot).

        The first reading shows nothing, because the time in which it was counted is unknown.
        """
        if self._points and clock_s == self._points[-1][0]:
            return
        if self._points and clock_s < self._points[-1][0]:
            self._points.clear()
            self._last = None
        if self._last is not None:
            same = incarnation == self._incarnation
            self._total += increase(self._last, value) if same else value
        self._last, self._incarnation = value, incarnation
        self._points.append((clock_s, self._total))
        while len(self._points) > 2 and self._points[1][0] <= clock_s - self.window_s:
            self._points.popleft()

    @property
    def per_s(self) -> float:
        """Return the mean rate over the window; 0 with fewer than two readings."""
        if len(self._points) < 2:
            return 0.0
        (begin_s, first), (end_s, last) = self._points[0], self._points[-1]
        return (last - first) / (end_s - begin_s)
