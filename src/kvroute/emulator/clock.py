"""Time as an engine sees it: now, and something to do at an absolute moment; on the wall here, virtual in tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

EARLY_S = 0.5e-3
"""An event loop that counts in milliseconds may call so much too early without being asked again."""


class Alarm(Protocol):
    """Something that is going to happen."""

    def cancel(self) -> None:
        """It does not happen any more; nothing if it has."""
        ...


class Clock(Protocol):
    """Seconds since some start, and alarms at absolute ones, so that lateness never adds up."""

    def now(self) -> float:
        """Seconds, never going back."""
        ...

    def at(self, when_s: float, ring: Callable[[], None]) -> Alarm:
        """Call `ring` at `when_s`, at once (but not before this returns) if that is over."""
        ...


class WallClock:
    """The monotonic clock of the machine and the running event loop.

    The loop's own clock is not used: some count in milliseconds and stand still while a callback runs.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._start_s = time.monotonic()

    def now(self) -> float:
        """Seconds since this clock was made."""
        return time.monotonic() - self._start_s

    def at(self, when_s: float, ring: Callable[[], None]) -> Alarm:
        """See `Clock`."""
        return _WallAlarm(self, when_s, ring)

    def later(self, delay_s: float, ring: Callable[[], None]) -> asyncio.TimerHandle:
        """The loop's own timer, as exact as the loop is."""
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
