"""Event loop lag: how late the event loop runs what is due, measured by a periodic timer.

A timeout that elapses while the loop is late does not prove that the engine is slow: its response may wait in a socket
that the loop has not read yet. Timeouts therefore count only the time during which the loop was on time (`judge`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Literal, TypeAlias

Verdict: TypeAlias = Literal["failed", "wait", "discarded"]

DISCARD_AFTER = 3.0
"""A check that is undecided after this many times its timeout is discarded."""
_PERIOD_S = 0.05
_TOLERANCE_S = 0.01
"""The timer of an idle loop is late by less than this: timers have a resolution of a millisecond."""


def judge(timeout_s: float, elapsed_s: float, lag_s: float) -> Verdict:
    """Decide what a missing response means for the engine.

    Args:
        timeout_s: seconds that the engine has, above 0.
        elapsed_s: seconds since the request was sent.
        lag_s: seconds of `elapsed_s` during which the loop was late.

    Returns:
        `failed` once the engine has had `timeout_s` while the loop was on time; before that `wait`, and `discarded`
        (neither a success nor a failure) if the loop was late for most of DISCARD_AFTER times `timeout_s`.
    """
    if elapsed_s - lag_s >= timeout_s:
        return "failed"
    return "discarded" if elapsed_s >= DISCARD_AFTER * timeout_s else "wait"


class LoopLag:
    """Measures the lag of the running loop between `start` and `close`; before `start` the lag is 0."""

    def __init__(
        self,
        observe: Callable[[float], None] | None = None,
        *,
        period_s: float = _PERIOD_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            observe: receives the delay of each tick, in seconds.
            period_s: seconds between two ticks.
            now: the clock, in seconds. The loop's own clock is unsuitable: uvloop's does not advance within a callback.
        """
        self._observe, self._period_s, self._now = observe, period_s, now
        self._total_s = 0.0
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start, from within the loop."""
        if self._timer is None:
            self._schedule()

    def close(self) -> None:
        """Stop measuring."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def total_s(self) -> float:
        """Return the seconds since `start` during which the loop was late; never decreases. The difference of two
        values is the lag between them, including a tick that is overdue now."""
        overdue_s = self._now() - self._due_s if self._timer is not None else 0.0
        return self._total_s + (overdue_s if overdue_s > _TOLERANCE_S else 0.0)

    def _schedule(self) -> None:
        self._due_s = self._now() + self._period_s
        self._timer = asyncio.get_running_loop().call_later(self._period_s, self._tick)

    def _tick(self) -> None:
        late_s = max(self._now() - self._due_s, 0.0)
        if late_s > _TOLERANCE_S:
            self._total_s += late_s
        if self._observe is not None:
            self._observe(late_s)
        self._schedule()
