"""Clock of an engine: the current time and alarms at absolute times, in real time here and virtual in tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

EARLY_S = 0.5e-3
"""An alarm may fire this many seconds early, because some event loops have a resolution of one millisecond."""


class Alarm(Protocol):
    """A scheduled call."""

    def cancel(self) -> None:
        """Cancel the call. No effect if it has already run."""
        ...


class Clock(Protocol):
    """Seconds since a fixed start, and alarms at absolute times, so that delays do not add up."""

    def now(self) -> float:
        """Return the time in seconds. It never decreases."""
        ...

    def at(self, when_s: float, ring: Callable[[], None]) -> Alarm:
        """Call `ring` at `when_s`, or right after this returns if that time has passed."""
        ...


class WallClock:
    """The machine's monotonic clock with the running event loop.

    The loop's own clock is not used: some loops count in milliseconds and do not advance while a callback runs.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._start_s = time.monotonic()

    def now(self) -> float:
        """Return the seconds since this clock was created."""
        return time.monotonic() - self._start_s

    def at(self, when_s: float, ring: Callable[[], None]) -> Alarm:
        """See `Clock`."""
        return _WallAlarm(self, when_s, ring)

    def later(self, delay_s: float, ring: Callable[[], None]) -> asyncio.TimerHandle:
        """Schedule `ring` with the loop's own timer, at the loop's resolution."""
        return self._loop.call_later(max(delay_s, 0.0), ring)


class _WallAlarm:
    __slots__ = ("_clock", "_handle", "_ring", "_when_s")

    def __init__(self, clock: WallClock, when_s: float, ring: Callable[[], None]) -> None:
        self._clock, self._when_s, self._ring = clock, when_s, ring
        self._handle = clock.later(when_s - clock.now(), self._due)

    def _due(self) -> None:
        left_s = self._when_s - self._clock.now()
        if left_s > EARLY_S:
            self._handle = self._clock.later(left_s, self._due)
        else:
            self._ring()

    def cancel(self) -> None:
        self._handle.cancel()
