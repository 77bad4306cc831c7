"""Order in which large prompts are tokenized: lanes by size, shortest first with ageing. Pure: the caller gives time.

Each lane processes one prompt at a time and none larger than its limit, so that small prompts never wait for a large
one. A lane that has no prompt of its own size takes a smaller one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

Ticket: TypeAlias = int
"""Identifies a prompt for the caller; used once."""

LANE_LIMITS: Final = (64 * 1024, 1024 * 1024, math.inf)
"""Bytes of the largest prompt of each lane."""
AGEING_BYTES_PER_S = 1e6
"""Only prompts that arrive within b / AGEING_BYTES_PER_S seconds can overtake a waiting prompt of b bytes."""
RETRY_AFTER_MAX_S = 60
_PACE_FADES = 0.8
"""Weight of the earlier throughput when it is updated with a finished prompt."""


class QueueFull(Exception):
    """A prompt would wait longer than allowed; `retry_after_s` is the time after which a retry may succeed."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__("too many large prompts are waiting to be tokenized")
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class _Running:
    lane: int
    nbytes: int
    since: float


class PromptQueue:
    """Call `enter` once for every prompt, and `leave` once in any state; both return the prompts that start now."""

    def __init__(self, bytes_per_s: float, wait_max_s: float = math.inf, limits: Sequence[float] = LANE_LIMITS) -> None:
        """
        Args:
            bytes_per_s: throughput of one lane until it is measured.
            wait_max_s: prompts that would wait longer are rejected.
            limits: bytes of the largest prompt of each lane, ascending; the last lane takes any prompt.
        """
        assert list(limits) == sorted(limits), "lanes go from small to large"
        assert limits[-1] == math.inf, "some lane takes any prompt"
        self.wait_max_s = wait_max_s
        self._pace = bytes_per_s
        self._limits = tuple(limits)
        self._free = set(range(len(self._limits)))
        self._waiting: list[list[tuple[float, Ticket]]] = [[] for _ in self._limits]
        """One heap per size class: time at which a prompt would be done had it started on arrival, and its ticket."""
        self._sizes: dict[Ticket, int] = {}
        """Bytes of the waiting prompts."""
        self._waiting_bytes = [0] * len(self._limits)
        """Waiting bytes in each size class."""
        self._running: dict[Ticket, _Running] = {}

    @property
    def waiting(self) -> int:
        """Number of prompts that have not started."""
        return len(self._sizes)

    @property
    def running(self) -> int:
        """Number of prompts that have started."""
        return len(self._running)

    def lane(self, ticket: Ticket) -> int:
        """Return the lane of a prompt that has started; a lane takes no prompt larger than its limit."""
        return self._running[ticket].lane

    def size_class(self, nbytes: float) -> int:
        """Return the first lane that takes a prompt of this size."""
        return next(index for index, limit in enumerate(self._limits) if nbytes <= limit)

    def enter(self, ticket: Ticket, nbytes: int, now: float) -> list[Ticket]:
        """Add a prompt.

        Returns:
            the prompts that start now: this one or none.

        Raises:
            QueueFull: it would wait too long; the queue is unchanged.
        """
        assert ticket not in self._sizes, "a ticket is used once"
        assert ticket not in self._running, "a ticket is used once"
        size_class = self.size_class(nbytes)
        if self._free.isdisjoint(range(size_class, len(self._limits))):
            wait_s = self.wait_s(nbytes)
            if wait_s > self.wait_max_s:
                raise QueueFull(math.ceil(min(max(wait_s - self.wait_max_s, 1), RETRY_AFTER_MAX_S)))
        self._sizes[ticket] = nbytes
        self._waiting_bytes[size_class] += nbytes
        heapq.heappush(self._waiting[size_class], (now + nbytes / AGEING_BYTES_PER_S, ticket))
        return self._begin(now)

    def wait_s(self, nbytes: int) -> float:
        """Return the seconds until a prompt of this size would start, by its size class and the measured throughput."""
        return self._waiting_bytes[self.size_class(nbytes)] / self._pace

    def leave(self, ticket: Ticket, now: float) -> list[Ticket]:
        """Remove a prompt that is done or not needed any more; an unknown ticket changes nothing.

        Returns:
            the prompts that start now.
        """
        if ticket in self._sizes:
            self._taken(ticket)  # its heap entry is skipped later
            return []
        running = self._running.pop(ticket, None)
        if running is None:
            return []
        seconds = now - running.since
        if seconds > 0:
            self._pace = _PACE_FADES * self._pace + (1 - _PACE_FADES) * running.nbytes / seconds
        self._free.add(running.lane)
        return self._begin(now)

    def _begin(self, now: float) -> list[Ticket]:
        begun = []
        for lane in sorted(self._free):
            ticket = self._next(lane)
            if ticket is not None:
                self._free.remove(lane)
                self._running[ticket] = _Running(lane, self._taken(ticket), now)
                begun.append(ticket)
        return begun

    def _taken(self, ticket: Ticket) -> int:
        """Remove a prompt from those that wait; return its bytes."""
        nbytes = self._sizes.pop(ticket)
        self._waiting_bytes[self.size_class(nbytes)] -= nbytes
        return nbytes

    def _next(self, lane: int) -> Ticket | None:
        """Remove the next prompt for a lane: of its own size first, then of the smaller ones."""
        for heap in reversed(self._waiting[: lane + 1]):
            while heap:
                _, ticket = heapq.heappop(heap)
                if ticket in self._sizes:
                    return ticket
        return None
