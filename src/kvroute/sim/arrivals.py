"""Order of arrivals of a trace: each request at its own time, or after the requests that it waits for have ended."""

from __future__ import annotations

from heapq import heappop, heappush

from kvroute.sim.agenda import FOREVER
from kvroute.sim.workload import Trace


class Arrivals:
    """Yields every request once, except those that would arrive after their deadline; equal times in the trace's
    order."""

    def __init__(self, trace: Trace) -> None:
        self._at_s, self._loop = [request.at_s for request in trace.requests], trace.loop
        self._came = 0
        self._due: list[tuple[float, int]] = []
        self._waits_for: list[int] = []
        self._followers: dict[int, list[int]] = {}
        self.next_s = self._at_s[0] if self._at_s else FOREVER
        """Time of the next known arrival; infinity where none is known. Read-only for callers."""
        if trace.loop is not None:
            self._begin(trace.loop.after)

    def take(self) -> int:
        """Return the next request and remove it; it arrives at `next_s`."""
        if self._loop is not None:
            _, request = heappop(self._due)
            self.next_s = self._due[0][0] if self._due else FOREVER
            return request
        request = self._came
        self._came += 1
        self.next_s = self._at_s[self._came] if self._came < len(self._at_s) else FOREVER
        return request

    def ended(self, at: float, request: int) -> None:
        """Record that a request has finished or was rejected, and schedule the requests that waited for it."""
        for follower in self._followers.pop(request, ()):
            self._waits_for[follower] -= 1
            if not self._waits_for[follower]:
                self._note(at, follower)

    def _begin(self, after: tuple[tuple[int, ...], ...]) -> None:
        self.next_s = FOREVER
        self._waits_for = [len(awaited) for awaited in after]
        for request, awaited in enumerate(after):
            for leader in awaited:
                self._followers.setdefault(leader, []).append(request)
            if not awaited:
                self._note(0.0, request)

    def _note(self, at: float, request: int) -> None:
        assert self._loop is not None
        comes_s = at + self._loop.think_s[request]
        if comes_s <= self._loop.until_s[request]:
            heappush(self._due, (comes_s, request))
            self.next_s = self._due[0][0]
