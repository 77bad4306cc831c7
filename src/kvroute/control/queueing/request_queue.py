"""Requests that wait before they are placed: in turn by `FairQueue`, or because their first token would come too late.

Pure: the caller passes the time, says whether the cluster has room, and places the requests that are returned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from kvroute.control.queueing.fair_queue import FairQueue, WaitingRequest

RETRIES = 4
"""Number of deferred requests that are tried again at one time."""


@dataclass(slots=True)
class QueuedRequest:
    """A request in the queue, and how long it may stay there."""

    waiting: WaitingRequest
    expires_at: float
    """Time at which it has waited too long."""
    deadline: float = math.inf
    """Time by which its first token must come."""
    least_s: float = 0.0
    """Shortest predicted time to its first token, without waiting for others."""
    deferred: bool = False

    @property
    def gives_up_at(self) -> float:
        """Time from which it is of no use that it waits."""
        return min(self.expires_at, self.deadline - self.least_s)

    @property
    def hopeless_at_deadline(self) -> bool:
        """Whether its deadline ends its wait, and not the limit on waiting."""
        return self.deadline - self.least_s <= self.expires_at


class RequestQueue:
    """The waiting requests of one model."""

    def __init__(self) -> None:
        self.fair = FairQueue()
        """Requests that wait for their turn."""
        self._requests: dict[int, QueuedRequest] = {}
        self._deferred: dict[int, QueuedRequest] = {}
        self._ends: list[tuple[float, int]] = []
        """Time at which each request gives up, and outdated entries."""

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def deferred(self) -> int:
        """Number of requests that wait because their first token would come too late."""
        return len(self._deferred)

    def push(self, request: QueuedRequest) -> None:
        """Add a request that waits for its turn."""
        self._requests[request.waiting.number] = request
        self.fair.push(request.waiting)
        self._watch(request)

    def defer(self, request: QueuedRequest, least_s: float) -> None:
        """Add a request whose first token would come too late. Args: `least_s`: see QueuedRequest."""
        number = request.waiting.number
        request.least_s, request.deferred = least_s, True
        self._requests[number] = self._deferred[number] = request
        self._watch(request)

    def pop(self) -> QueuedRequest | None:
        """Remove and return the request whose turn it is; None if none waits for its turn."""
        waiting = self.fair.pop()
        return None if waiting is None else self._requests.pop(waiting.number)

    def take_deferred(self) -> list[QueuedRequest]:
        """Remove and return the deferred requests to try again: higher bands first, then the earliest deadlines."""
        if not self._deferred:
            return []
        order = sorted(
            self._deferred.values(),
            key=lambda deferred: (-deferred.waiting.band, deferred.deadline, deferred.waiting.number),
        )
        for request in order[:RETRIES]:
            self.remove(request.waiting.number)
        return order[:RETRIES]

    def remove(self, number: int) -> bool:
        """Remove a request that does not wait any more. Return whether it was in the queue."""
        request = self._requests.pop(number, None)
        if request is None:
            return False
        if self._deferred.pop(number, None) is None:
            self.fair.remove(number)
        return True

    def expire(self, now: float) -> list[QueuedRequest]:
        """Remove and return the requests that give up by now."""
        ended = []
        while self._ends and self._ends[0][0] <= now:
            at, number = heappop(self._ends)
            request = self._requests.get(number)
            if request is not None and request.gives_up_at == at:
                self.remove(number)
                ended.append(request)
        return ended

    @property
    def next_end(self) -> float:
        """Time at which the next request gives up, or an earlier one; infinite if none waits."""
        return self._ends[0][0] if self._requests and self._ends else math.inf

    def _watch(self, request: QueuedRequest) -> None:
        heappush(self._ends, (request.gives_up_at, request.waiting.number))
        if len(self._ends) > 64 + 2 * len(self._requests):
            self._ends = [(request.gives_up_at, number) for number, request in self._requests.items()]
            heapify(self._ends)
