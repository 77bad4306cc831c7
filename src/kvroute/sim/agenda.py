"""Virtual time: what is due next, in a total order; it does nothing by itself."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import TypeAlias

Action: TypeAlias = Callable[[int, int], None]
FOREVER = float("inf")


class Agenda:
    """Actions by time; those of one instant in the order in which they were noted."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due: list[tuple[float, int, Action, int, int]] = []
        """A heap: what is due next stands first, its time in front. For the loop to look at."""
        self._sequence = 0

    def at(self, at: float, action: Action, a: int = 0, b: int = 0) -> None:
        """Note `action(a, b)` for a time that is not over."""
        heappush(self.due, (at, self._sequence, action, a, b))
        self._sequence += 1

    def act(self) -> None:
        """Do what is due next."""
        _, _, action, a, b = heappop(self.due)
        action(a, b)
