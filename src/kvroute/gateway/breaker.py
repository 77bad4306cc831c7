"""A circuit breaker for one instance: when to stop sending, when to try again; pure, and it sends nothing itself.

Closed: all pass. Open: none pass until the open time is over. Half-open: one probe passes and decides. An attempt
counts only in the state it was started in, so that the late ends of old requests neither close nor reopen anything.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Literal, TypeAlias

BreakerState: TypeAlias = Literal["closed", "half-open", "open"]
Attempt: TypeAlias = int
"""What `started` gives and the end of that request gives back."""
Cause: TypeAlias = Literal["no_answer", "error", "unexplained"]
"""Why an attempt failed: the instance did not answer; it answered with an error, and the same request was answered
later; it answered with an error, and nothing shows whether the instance or the request is at fault."""

_SLICES = 10
"""The window moves on in steps of a tenth of itself."""
_VOLUME = 4
"""A share of failures says something after so many times `failures` outcomes. So many errors in a row weigh as much as
one failure without an answer, for one request that no engine can serve may cause an error."""


_GOOD, _BAD, _ACQUITTED = 1, 2, 3
"""Places in a slice of the window."""
_NOT_IMPLEMENTED = 501


def is_failure(status: int) -> bool:
    """Whether an answer speaks against the instance: a 5xx does, but for one that says what the engine cannot do at
    all (501); a 4xx is the client's own and counts as a success."""
    return status >= 500 and status != _NOT_IMPLEMENTED


def _no_jitter() -> float:
    return 0.0


class Breaker:
    """Opens after `failures` attempts in a row without an answer, after 4 * `failures` errors in a row, or when `share`
    of the last `window_s` seconds' outcomes are failures.

    An unexplained error does not count while most errors of the window were the requests' own fault (`acquitted`).
    Each opening that follows a failed probe lasts twice as long as the one before, up to `open_max_s`. A probe whose
    client leaves frees its place at once; one that does not end within `probe_s` lets another one pass beside it, so
    whatever becomes of a probe, the breaker never refuses for longer than max(open_max_s, probe_s).
    """

    __slots__ = (
        "_acquitted",
        "_bad",
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
            failures: so many in a row without an answer open it, 1 or more.
            window_s: outcomes count for so long, above 0.
            open_s: it stays open for so long at first, above 0.
            share: of failures that opens it, in (0, 1].
            open_max_s: it stays open for so long at most; less than `open_s` is `open_s`.
            probe_s: a probe keeps its place for so long, above 0.
            jitter: it stays open for up to this share longer, `open_max_s` too, 0 or more.
            draw: gives the numbers in [0, 1) that say how much longer; None: always 0.
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
        """The first attempt that was started in this state."""
        self._until = 0.0
        """Open: until then. Half-open: until then a probe has its place."""
        self._open_s = self.open_s
        self._probe: Attempt | None = None
        self._forget()

    def allows(self, now: float) -> bool:
        """Whether a request may be sent now. It changes nothing: say `started` when it is sent."""
        if self._state == "closed":
            return True
        return now >= self._until or (self._state == "half-open" and self._probe is None)

    def state(self, now: float) -> BreakerState:
        """The state; an open breaker whose time is over reads half-open."""
        return "half-open" if self._state == "open" and now >= self._until else self._state

    def refuses_until(self, now: float) -> float | None:
        """When `allows` turns true if nothing is reported before; None: it is true."""
        return None if self.allows(now) else self._until

    def started(self, now: float) -> Attempt:
        """A request is being sent; give the result back with its end, which must be told exactly once."""
        if self._state == "open" and now >= self._until:
            self._enter("half-open")
        attempt = self._next
        self._next += 1
        if self._state == "half-open" and (self._probe is None or now >= self._until):
            self._probe, self._until = attempt, now + self.probe_s
        return attempt

    def succeeded(self, attempt: Attempt, now: float) -> None:
        """The instance has answered, be it with a 4xx."""
        if not self._counts(attempt):
            return
        if self._state == "half-open":
            self._close()
            return
        self._run = 0
        self._record(now, _GOOD)

    def failed(self, attempt: Attempt, now: float, cause: Cause = "no_answer") -> None:
        """The instance has not answered, or with an error (5xx). An unexplained error of a probe opens the breaker
        again for as long as before, not for longer."""
        if not self._counts(attempt):
            return
        if self._state == "half-open":
            if cause != "unexplained":
                self._open_s = min(2 * self._open_s, self.open_max_s)
            self._open(now)
            return
        if now >= self._slice_until:
            self._move(now)
        if cause == "unexplained" and self._acquitted > self._bad:
            return
        self._run += _VOLUME if cause == "no_answer" else 1
        self._record(now, _BAD)
        outcomes = self._bad + self._good
        many = outcomes >= _VOLUME * self.failures and self._bad >= self.share * outcomes
        if many or self._run >= _VOLUME * self.failures:
            self._open(now)

    def acquitted(self, attempt: Attempt, now: float) -> None:
        """The instance has answered with an error, and the request was to blame: neither a success nor a failure."""
        self.cancelled(attempt, now)
        if self._counts(attempt) and self._state == "closed":
            self._record(now, _ACQUITTED)

    def cancelled(self, attempt: Attempt, now: float) -> None:
        """The client left before anybody could tell: neither a success nor a failure."""
        del now
        if self._probe == attempt:
            self._probe = None

    def _counts(self, attempt: Attempt) -> bool:
        assert attempt < self._next, "give back what `started` gave"
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
        self._run = self._good = self._bad = self._acquitted = 0
        """`_run`: weight of the failures since the last success."""
        self._slices: deque[list[int]] = deque()
        """[number of the slice, good, bad, acquitted], ascending."""
        self._slice_until = -math.inf
        """The newest slice takes what comes before then."""

    def _record(self, now: float, outcome: int) -> None:
        if now >= self._slice_until:
            self._move(now)
        self._slices[-1][outcome] += 1
        if outcome == _GOOD:
            self._good += 1
        elif outcome == _BAD:
            self._bad += 1
        else:
            self._acquitted += 1

    def _move(self, now: float) -> None:
        number = int(now * _SLICES / self.window_s)
        slices = self._slices
        if not slices or slices[-1][0] < number:
            slices.append([number, 0, 0, 0])
        self._slice_until = (number + 1) * self.window_s / _SLICES
        while slices[0][0] <= number - _SLICES:
            _, good, failed, acquitted = slices.popleft()
            self._good -= good
            self._bad -= failed
            self._acquitted -= acquitted
