"""Coarse timeouts: one timer of the event loop checks all deadlines. They are not exact."""

from __future__ import annotations

import asyncio
from typing import Protocol

from kvroute.http.loop_lag import LoopLag

NEVER_S = float("inf")


class HasDeadline(Protocol):
    """An object with a deadline."""

    deadline_s: float
    """Time of the deadline, on the loop's clock; `NEVER_S` if there is none. The owner may change it at any time."""

    def expire(self, now: float) -> None:
        """Handle the end of the deadline: set another one, or end the wait."""
        ...


class Deadlines:
    """Calls `expire` of each object whose deadline has passed, at most `period_s` late.

    A deadline is an attribute, so that setting one costs almost nothing and a request needs no timer of its own. If the
    loop was late, all deadlines move by the same time: no peer times out because of data that the loop has not read.
    """

    def __init__(self, period_s: float = 0.25, lag: LoopLag | None = None) -> None:
        """Args: `period_s` between two checks, in seconds; `lag` of the loop, if it is measured."""
        self.lag = lag if lag is not None else LoopLag()
        self._period_s = period_s
        self._lag_s = 0.0
        """Total lag at the last check, in seconds."""
        self._waiting: dict[HasDeadline, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def watch(self, waiting: HasDeadline) -> None:
        """Check an object's deadline until `forget`; the timer runs only while there are such objects."""
        self._waiting[waiting] = None
        if self._timer is None:
            self._lag_s = self.lag.total_s()
            self._timer = asyncio.get_running_loop().call_later(self._period_s, self._check)

    def forget(self, waiting: HasDeadline) -> None:
        """Stop checking an object's deadline."""
        self._waiting.pop(waiting, None)
        if not self._waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        now = loop.time()
        before_s, self._lag_s = self._lag_s, self.lag.total_s()
        if (late_s := self._lag_s - before_s) > 0:
            for waiting in self._waiting:
                waiting.deadline_s += late_s
        for late in [waiting for waiting in self._waiting if waiting.deadline_s <= now]:
            late.expire(now)
        if self._waiting and self._timer is None:
            self._timer = loop.call_later(self._period_s, self._check)
