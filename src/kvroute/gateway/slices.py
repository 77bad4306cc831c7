"""Long work on the event loop in slices: generators that yield whenever others should have their turn."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Slices: TypeAlias = Generator[None, None, T]
"""After each `yield` others may have their turn; the result is what it returns."""


class Meter:
    """Counts units of work and says when a slice is used up."""

    __slots__ = ("_left", "_slice")

    def __init__(self, slice_units: int) -> None:
        self._slice = self._left = slice_units

    def spend(self, units: int) -> bool:
        """Note so many units; whether it is time to yield."""
        self._left -= units
        if self._left > 0:
            return False
        self._left = self._slice
        return True


def whole(slices: Slices[T]) -> T:
    """The result of all slices, one after the other without a break."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            result: T = end.value
            return result
