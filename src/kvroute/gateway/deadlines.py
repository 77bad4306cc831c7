"""Coarse timeouts: one timer of the loop looks over everything that waits; refuses to be exact."""

from __future__ import annotations

import asyncio
from typing import Protocol

from kvroute.gateway.loop_lag import LoopLag

NEVER_S = float("inf")


class Waiting(Protocol):
    """What may wait too long."""

    deadline_s: float
    """By the loop's clock; `NEVER_S` while it waits for nothing. Set by its owner as often as it likes."""

    def expire(self, now: float) -> None:
        """The deadline has passed; sets another one, or ends the wait."""
        ...


class Deadlines:
    """Calls `expire` of what waits past its deadline, late by `period_s` at most.

    A deadline is an attribute, so that setting one costs nothing: requests come and go without a timer of their own.
    Where the loop was late, all deadlines move on by as much: nobody is blamed for what the loop has not read yet.
    """

    def __init__(self, period_s: float = 0.25, lag: LoopLag | None = None) -> None:
        """Args: `period_s`: seconds between two looks; `lag` of the loop, if it is measured."""
        self.lag = lag if lag is not None else LoopLag()
        self._period_s = period_s
        self._lag_s = 0.0
        """Total lag at the last look."""
        self._waiting: dict[Waiting, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def watch(self, waiting: Waiting) -> None:
        """Look at it until `forget`; the timer runs only while there is something to look at."""
        self._waiting[waiting] = None
        if self._timer is None:
            self._lag_s = self.lag.total_s()
            self._timer = asyncio.get_running_loop().call_later(self._period_s, self._look)

    def forget(self, waiting: Waiting) -> None:
        """Look at it no more."""
        self._waiting.pop(waiting, None)
        if not self._waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
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
            self._timer = loop.call_later(self._period_s, self._look)
