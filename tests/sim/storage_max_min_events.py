"""Events and copies of the max-min mode: one time for a queue of actions and a flow network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from kvroute.flows import FlowNetwork
from kvroute.types import FloatArray

Action = Callable[[], None]
Copy = tuple[Sequence[int], float]
"""Links, and bytes."""


class TimedActions:
    """Actions at their times, in the order of their insertion if times are equal; copies end when their flows do."""

    def __init__(self, link_bytes_per_s: FloatArray) -> None:
        self.now = 0.0
        self._network = FlowNetwork(link_bytes_per_s)
        self._due = list[tuple[float, int, Action]]()
        self._landed: dict[int, Action] = {}
        self._sequence = 0

    def at(self, at: float, action: Action) -> None:
        """Schedule an action for a time that is not in the past."""
        self._sequence += 1
        heappush(self._due, (at, self._sequence, action))

    def copy(self, path: Sequence[int], nbytes: float, landed: Action) -> None:
        """Move bytes over links, then act; without bytes act now."""
        if nbytes <= 0:
            self.at(self.now, landed)
            return
        self._sequence += 1
        self._landed[self._sequence] = landed
        self._network.start(self._sequence, path, nbytes)

    def after_all(self, copies: Sequence[Copy], seconds: float, action: Action) -> None:
        """Act when all copies have ended and this time has passed."""
        left = 1 + len(copies)

        def end() -> None:
            nonlocal left
            left -= 1
            if not left:
                action()

        for path, nbytes in copies:
            self.copy(path, nbytes, end)
        self.at(self.now + seconds, end)

    def step(self) -> None:
        """Handle the next event; there must be one."""
        flow = self._network.next_finish()
        if flow is not None and (not self._due or flow[0] <= self._due[0][0]):
            self._advance(flow[0])
            return
        at, _, action = heappop(self._due)
        self._advance(at)
        action()

    def _advance(self, to: float) -> None:
        self.now = to
        for flow in self._network.advance(to):
            self._landed.pop(flow)()
