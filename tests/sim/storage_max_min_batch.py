"""The decode batch of a GPU in the max-min mode: all sequences progress equally."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from tests.sim.storage_max_min_events import TimedActions

Sequence = TypeVar("Sequence")


class DecodeBatch(Generic[Sequence]):
    """Sequences with the tokens that each has left."""

    def __init__(self, events: TimedActions, step_s: Callable[[int], float], ended: Callable[[Sequence], None]) -> None:
        """`step_s` returns the time of a step by the size of the batch; `ended` receives each sequence at its end."""
        self._events, self._step_s, self._ended = events, step_s, ended
        self._left: dict[Sequence, float] = {}
        self._since = 0.0
        self._version = 0

    def join(self, sequence: Sequence, tokens: float) -> None:
        """Add a sequence that has this many tokens left."""
        self._advance()
        self._left[sequence] = tokens
        self._plan()

    def _advance(self) -> None:
        """Bring all sequences to the present."""
        now = self._events.now
        tokens = (now - self._since) / self._step_s(len(self._left)) if self._left else 0.0
        for sequence in self._left:
            self._left[sequence] -= tokens
        self._since = now

    def _plan(self) -> None:
        """Schedule the next end; an earlier plan is void."""
        self._version += 1
        if self._left:
            tokens = max(min(self._left.values()), 0.0)
            at = self._events.now + tokens * self._step_s(len(self._left))
            self._events.at(at, partial(self._end, self._version))

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        sequence = min(self._left, key=self._left.__getitem__)
        del self._left[sequence]
        self._plan()
        self._ended(sequence)
