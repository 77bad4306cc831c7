"""A circuit breaker for one instance: it decides when to stop sending requests and when to try again. Pure.

Closed: all requests pass. Open: none pass until the open time is over. Half-open: one probe passes, and its result
decides. An attempt counts only in the state in which it started, so that old requests that end late change nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Literal, TypeAlias

from kvroute.serve.observe.view import BreakerState

Attempt: TypeAlias = int
"""Number that `started` returns; the caller passes it back when the request ends."""
Cause: TypeAlias = Literal["no_answer", "error", "unexplained"]
"""Why an attempt failed. "no_answer": the instance did not respond. "error": it responded with an error, and the same
request succeeded later. "unexplained": it responded with an error, and the instance or the request may be at fault."""

_SLICES = 10
"""Number of slices of the window; the window moves one slice at a time."""
_VOLUME = 4
"""The share of failures is evaluated once there are `_VOLUME * failures` outcomes. A failure without a response weighs
as much as `_VOLUME` errors, because a request that no engine can serve may also cause an error."""


_GOOD, _BAD, _ACQUITTED = 1, 2, 3
"""Indices in a slice of the window."""


def _no_jitter() -> float:
    return 0.0


class Breaker:
    """Opens after `failures` attempts in a row without a response, after 4 * `failures` errors in a row, or when
    `share` of the outcomes in the last `window_s` seconds are failures.

    An unexplained error does not count while the requests themselves caused most errors of the window
    (`discount_failure`). Each opening after a failed probe lasts twice as long as the one before, up to `open_max_s`.
    If the client of a probe leaves, the next request becomes the probe. If a probe does not end within `probe_s`,
    another one may pass. The breaker therefore never rejects for longer than max(open_max_s, probe_s), plus jitter.
    """

    __slots__ = (
        "_bad",
        "_discounted",
        "_draw",
        "_first",
        "_good",
        "_jitter",
        "_next",
        "_open_s",
        "_probe",
        "_run",
        "_slice_until",
        "_slices",
        "_state",
        "_until",
        "failures",
        "open_max_s",
        "open_s",
        "probe_s",
        "share",
        "window_s",
    )

    def __init__(
        self,
        *,
        failures: int = 5,
        window_s: float = 30.0,
        open_s: float = 5.0,
        share: float = 0.5,
        open_max_s: float = 60.0,
        probe_s: float = 30.0,
        jitter: float = 0.0,
        draw: Callable[[], float] | None = None,
    ) -> None:
        """Start closed.

        Args:
            failures: number of attempts in a row without a response that open the breaker, 1 or more.
            window_s: time for which outcomes count, above 0.
            open_s: duration of the first opening, above 0.
            share: share of failures that opens the breaker, in (0, 1].
            open_max_s: longest duration of an opening; at least `open_s`.
            probe_s: time after which another probe may pass, above 0.
            jitter: largest share by which each opening is lengthened, even beyond `open_max_s`; 0 or more.
            draw: returns a number in [0, 1), which is multiplied by `jitter`; None: always 0.
        """
        assert failures >= 1
        assert 0 < share <= 1
        assert min(window_s, open_s, probe_s) > 0
        self._jitter, self._draw = jitter, draw if draw is not None else _no_jitter
        self.failures, self.window_s, self.share = failures, window_s, share
        self.open_s, self.open_max_s, self.probe_s = open_s, max(open_max_s, open_s), probe_s
        self._state: BreakerState = "closed"
        self._next: Attempt = 0
        self._first: Attempt = 0
        """The first attempt that started in the present state."""
        self._until = 0.0
        """Open: end of the opening. Half-open: time after which another probe may pass."""
        self._open_s = self.open_s
        self._probe: Attempt | None = None
        self._forget()

    def allows(self, now: float) -> bool:
        """Whether a request may be sent now. It changes nothing; call `started` when the request is sent."""
        if self._state == "closed":
            return True
        return now >= self._until or (self._state == "half-open" and self._probe is None)

    def state(self, now: float) -> BreakerState:
        """Return the state; an open breaker whose open time is over counts as half-open."""
        return "half-open" if self._state == "open" and now >= self._until else self._state

    def refuses_until(self, now: float) -> float | None:
        """Return when `allows` becomes true if nothing is reported before; None if it is true."""
        return None if self.allows(now) else self._until

    def started(self, now: float) -> Attempt:
        """Record that a request is sent, and return its attempt. Its end must be reported exactly once."""
        if self._state == "open" and now >= self._until:
            self._enter("half-open")
        attempt = self._next
        self._next += 1
        if self._state == "half-open" and (self._probe is None or now >= self._until):
            self._probe, self._until = attempt, now + self.probe_s
        return attempt

    def succeeded(self, attempt: Attempt, now: float) -> None:
        """Record that the instance has responded; a 4xx counts as a success."""
        if not self._counts(attempt):
            return
        if self._state == "half-open":
            self._close()
            return
        self._run = 0
        self._record(now, _GOOD)

    def failed(self, attempt: Attempt, now: float, cause: Cause = "no_answer") -> None:
        """Record that the instance has not responded, or has responded with an error (5xx). An unexplained error of a
        probe opens the breaker again for the same time as before."""
        if not self._counts(attempt):
            return
        if self._state == "half-open":
            if cause != "unexplained":
                self._open_s = min(2 * self._open_s, self.open_max_s)
            self._open(now)
            return
        if now >= self._slice_until:
            self._move(now)
        if cause == "unexplained" and self._discounted > self._bad:
            return
        self._run += _VOLUME if cause == "no_answer" else 1
        self._record(now, _BAD)
        outcomes = self._bad + self._good
        many = outcomes >= _VOLUME * self.failures and self._bad >= self.share * outcomes
        if many or self._run >= _VOLUME * self.failures:
            self._open(now)

    def discount_failure(self, attempt: Attempt, now: float) -> None:
        """Record an error response that the request caused: neither a success nor a failure."""
        self.cancelled(attempt, now)
        if self._counts(attempt) and self._state == "closed":
            self._record(now, _ACQUITTED)

    def cancelled(self, attempt: Attempt, now: float) -> None:
        """Record that the client closed the connection before the result was known: neither a success nor a failure."""
        del now
        if self._probe == attempt:
            self._probe = None

    def _counts(self, attempt: Attempt) -> bool:
        assert attempt < self._next, "pass the value that `started` returned"
        return attempt >= self._first and self._state != "open"

    def _close(self) -> None:
        self._enter("closed")
        self._open_s = self.open_s
        self._forget()

    def _open(self, now: float) -> None:
        self._enter("open")
        self._until = now + self._open_s * (1.0 + self._jitter * self._draw())

    def _enter(self, state: BreakerState) -> None:
        self._state, self._first, self._probe = state, self._next, None

    def _forget(self) -> None:
        self._run = self._good = self._bad = self._discounted = 0
        """`_run`: weight of the failures since the last success; the others: outcomes in the window."""
        self._slices: deque[list[int]] = deque()
        """[slice number, good, bad, discounted], in ascending order."""
        self._slice_until = -math.inf
        """End of the newest slice."""

    def _record(self, now: float, outcome: int) -> None:
        if now >= self._slice_until:
            self._move(now)
        self._slices[-1][outcome] += 1
        if outcome == _GOOD:
            self._good += 1
        elif outcome == _BAD:
            self._bad += 1
        else:
            self._discounted += 1

    def _move(self, now: float) -> None:
        number = int(now * _SLICES / self.window_s)
        slices = self._slices
        if not slices or slices[-1][0] < number:
            slices.append([number, 0, 0, 0])
        self._slice_until = (number + 1) * self.window_s / _SLICES
        while slices[0][0] <= number - _SLICES:
            _, good, failed, discounted = slices.popleft()
            self._good -= good
            self._bad -= failed
            self._discounted -= discounted
