"""Long work on the event loop in slices: generators that yield whenever other callbacks should run."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeAlias, TypeVar

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


def whole(slices: Slices[T]) -> T:
    """Run all slices without a break and return the result."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            result: T = end.value
            return result
