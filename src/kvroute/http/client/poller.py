"""Sends the same GET to every engine once per interval over the gateway's connections; does not interpret responses."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappush, heapreplace

from kvroute.http.client.call import Call, Failure
from kvroute.http.client.pool import UpstreamPool, request_bytes
from kvroute.http.headers import Headers
from kvroute.http.loop_lag import LoopLag, judge

_TICK_MIN_S = 0.01
_GOLDEN = 0.6180339887498949
"""Its multiples without their whole parts are spread evenly over [0, 1), however many there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PollSpec:
    """What is polled, how often, and with which limits."""

    path: str
    """Path with its query."""
    interval_s: float
    """Time between two polls of the same engine."""
    timeout_s: float
    """Time limit for a complete response."""
    at_once: int = 64
    """Maximum number of polls in progress."""
    body_max_bytes: int = 8 << 20
    """A longer response is a failure."""
    headers: Headers = field(default_factory=list)
    """Headers of the request."""
    lag: LoopLag = field(default_factory=LoopLag)
    """Lag of the event loop; time during which the loop was late does not count against the engine."""
    on_discard: Callable[[str], None] | None = None
    """Called for each poll without a verdict because the loop was late; must not raise."""
    jitter: float = 0.0
    """The time between two polls is up to this share longer than `interval_s`; 0 or more."""
    draw: Callable[[], float] | None = None
    """Returns random numbers in [0, 1) that scale `jitter`; None: always 0."""


@dataclass(frozen=True, slots=True)
class PollResult:
    """Result of one poll. `status` is 0 if no complete response came; `failure` then gives the reason."""

    status: int
    body: bytes = b""
    failure: str = ""
    refused: bool = False
    """Whether the connection was refused: the engine's process has ended or not started yet."""


class _Poll:
    """One GET in progress: the sink of its call."""

    __slots__ = ("_body_bytes", "_lag_s", "_loop", "_parts", "_poller", "_sent_s", "_status", "_timer", "call", "name")

    def __init__(self, poller: Poller, name: str, pool: UpstreamPool, loop: asyncio.AbstractEventLoop) -> None:
        self.name = name
        self._poller, self._loop = poller, loop
        self._status = 0
        self._sent_s, self._lag_s = time.monotonic(), poller.settings.lag.total_s()
        self._parts: list[bytes] = []
        self._body_bytes = 0
        settings = poller.settings
        timeout_s = settings.timeout_s
        request = request_bytes(b"GET", settings.path.encode(), pool.host, settings.headers, b"")
        self.call: Call | None = pool.send(request, self, first_byte_s=timeout_s, idle_s=timeout_s)
        self._timer = loop.call_later(timeout_s, self._too_late)

    def on_head(self, status: int, headers: Headers) -> None:
        self._status = status

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)
        self._body_bytes += len(data)
        if self._body_bytes > self._poller.settings.body_max_bytes:
            self._abort()
            self._done(
                PollResult(0, failure=f"the response is longer than {self._poller.settings.body_max_bytes} bytes")
            )

    def on_end(self) -> None:
        self._done(PollResult(self._status, b"".join(self._parts)))

    def on_failure(self, failure: Failure) -> None:
        if failure.kind == "out_of_files":  # not a fault of the engine
            self.call = None
            self._timer.cancel()
            self._poller.discard(self)
            return
        self._done(PollResult(0, failure=failure.text, refused=failure.kind == "refused"))

    def give_up(self) -> None:
        """Cancel the poll: its response is no longer needed."""
        self._timer.cancel()
        self._abort()

    def _too_late(self) -> None:
        timeout_s = self._poller.settings.timeout_s
        elapsed_s, lag_s = time.monotonic() - self._sent_s, self._poller.settings.lag.total_s() - self._lag_s
        match judge(timeout_s, elapsed_s, lag_s):
            case "failed":
                self._abort()
                self._done(PollResult(0, failure=f"no complete response within {timeout_s:g} s"))
            case "wait":
                rest_s = max(timeout_s - (elapsed_s - lag_s), _TICK_MIN_S)
                self._timer = self._loop.call_later(rest_s, self._too_late)
            case "discarded":
                self._abort()
                self._poller.discard(self)

    def _abort(self) -> None:
        """End the call and drop the mutual references of call and poll, so that memory is freed at once."""
        call, self.call = self.call, None
        if call is not None:
            call.abort()

    def _done(self, answer: PollResult) -> None:
        self.call = None
        self._timer.cancel()
        self._poller.done(self, answer)


class Poller:
    """Polls each engine at once, then once per interval, never the same engine twice at a time.

    The second polls come at different times within the second interval, so that polls are spread. If responses take too
    long, polls are skipped and not made up for.
    """

    def __init__(
        self,
        names: Sequence[str],
        pool_of: Callable[[str], UpstreamPool | None],
        on_answer: Callable[[str, PollResult], None],
        settings: PollSpec,
    ) -> None:
        """
        Args:
            names: instances to poll.
            pool_of: returns the connection pool of an instance; None: skip it now.
            on_answer: called once for each poll that is not discarded; must not raise.
            settings: what is polled, how often, and with which limits.
        """
        self.settings = settings
        self._due: list[tuple[float, str]] = [(-math.inf, name) for name in names]
        """Heap of the time of the next poll of each engine; minus infinity: the first one."""
        self._pool_of = pool_of
        self._on_answer = on_answer
        self._in_progress: dict[str, _Poll] = {}
        self._tick_handle: asyncio.TimerHandle | None = None
        self._first = 0
        """Number of first polls."""
        self._running = False

    def add(self, name: str) -> None:
        """Poll another engine from now on, the first time at once."""
        heappush(self._due, (-math.inf, name))
        if self._running:
            self._tick()

    def remove(self, name: str) -> None:
        """Poll an engine no more, and cancel its poll in progress."""
        self._due = [entry for entry in self._due if entry[1] != name]
        heapify(self._due)
        poll = self._in_progress.pop(name, None)
        if poll is not None:
            poll.give_up()

    def start(self) -> None:
        """Start, from within the loop."""
        self._running = True
        self._loop = asyncio.get_running_loop()
        self._tick()

    def close(self) -> None:
        """Stop polling and cancel the polls in progress."""
        self._running = False
        if self._tick_handle is not None:
            self._tick_handle.cancel()
            self._tick_handle = None
        for poll in self._in_progress.values():
            poll.give_up()
        self._in_progress.clear()

    def done(self, poll: _Poll, answer: PollResult) -> None:
        """Complete a poll."""
        del self._in_progress[poll.name]
        self._on_answer(poll.name, answer)

    def discard(self, poll: _Poll) -> None:
        """End a poll without a verdict on its engine."""
        del self._in_progress[poll.name]
        if self.settings.on_discard is not None:
            self.settings.on_discard(poll.name)

    def _tick(self) -> None:
        """Send the polls that are due, and schedule those that follow."""
        if self._tick_handle is not None:
            self._tick_handle.cancel()
            self._tick_handle = None
        due, now = self._due, self._loop.time()
        while due and due[0][0] <= now and len(self._in_progress) < self.settings.at_once:
            due_s, name = due[0]
            heapreplace(due, (self._next_s(due_s, now), name))
            self._ask(name)
        if due:
            full = due[0][0] <= now
            wait_s = self.settings.interval_s / len(due) if full else due[0][0] - now
            self._tick_handle = self._loop.call_later(max(wait_s, _TICK_MIN_S), self._tick)

    def _next_s(self, due_s: float, now: float) -> float:
        """Return the time of an engine's poll after the one that was due at `due_s`."""
        settings = self.settings
        if due_s == -math.inf:
            self._first += 1
            return now + settings.interval_s * (1.0 + self._first * _GOLDEN % 1.0)
        longer = settings.jitter * settings.draw() if settings.draw is not None else 0.0
        lasts_s = settings.interval_s * (1.0 + longer)
        return due_s + lasts_s * (math.floor((now - due_s) / lasts_s) + 1)

    def _ask(self, name: str) -> None:
        pool = None if name in self._in_progress else self._pool_of(name)
        if pool is not None:
            self._in_progress[name] = _Poll(self, name, pool, asyncio.get_running_loop())
