"""Long work on the event loop in slices: generators that yield whenever other callbacks should run."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeAlias, TypeVar

SLICE_BYTES = 16 * 1024
"""Bytes of a response that are parsed at once."""
_TURN_BYTES_MAX, _TURN_S = 256 * 1024, 0.002

T = TypeVar("T")
Slices: TypeAlias = Generator[None, None, T]
"""A computation that yields after each slice, so that other callbacks can run; T is the type of its result."""


class Meter:
    """Counts units of work and reports when a slice is used up."""

    __slots__ = ("_left", "_slice")

    def __init__(self, slice_units: int) -> None:
        self._slice = self._left = slice_units

    def spend(self, units: int) -> bool:
        """Count units of work; return whether it is time to yield."""
        self._left -= units
        if self._left > 0:
            return False
        self._left = self._slice
        return True


class TurnBudget:
    """How much of a response one turn of the loop handles: fewer bytes, if they take long."""

    __slots__ = ("nbytes",)

    def __init__(self) -> None:
        self.nbytes = SLICE_BYTES
        """Bytes after which the rest waits for the next turn."""

    def handled(self, nbytes: int, seconds: float) -> None:
        """Learn from the last part. Args: `nbytes`: its size; `seconds`: how long it took."""
        if seconds > _TURN_S:
            self.nbytes = max(self.nbytes // 2, SLICE_BYTES)
        elif nbytes > self.nbytes // 2:
            self.nbytes = min(self.nbytes * 2, _TURN_BYTES_MAX)


def whole(slices: Slices[T]) -> T:
    """Run all slices without a break and return the result."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            result: T = end.value
            return result
