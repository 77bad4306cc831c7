"""Event queue in virtual time: the pending actions in a total order. The caller runs the loop."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import TypeAlias

Action: TypeAlias = Callable[[int, int], None]
FOREVER = float("inf")


class Agenda:
    """Actions ordered by time; actions of equal time run in the order in which they were added."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due: list[tuple[float, int, Action, int, int]] = []
        """Heap of (time, sequence number, action, a, b); the next one is first. The event loop reads it."""
        self._sequence = 0

    def at(self, at: float, action: Action, a: int = 0, b: int = 0) -> None:
        """Schedule `action(a, b)` for a time that is not in the past."""
        heappush(self.due, (at, self._sequence, action, a, b))
        self._sequence += 1

    def act(self) -> None:
        """Run the next action."""
        _, _, action, a, b = heappop(self.due)
        action(a, b)
