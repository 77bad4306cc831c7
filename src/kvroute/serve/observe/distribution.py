"""Distribution of times as counts of logarithmic bins: several can be added, and a quantile is right to 0.5 %.

Percentiles cannot be added. Workers therefore send these counts beside their own percentiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from kvroute.types import FloatArray

_LEAST_S = 1e-6
"""Times up to this one are in bin 0, whose value is 0."""
_GROWTH = math.log(1.01)
"""Logarithm of the ratio between two edges: the middle of a bin differs by at most 0.5 % from any time in it."""
_BIN_MAX = 2**16 - 1
_PAIR = np.dtype("<u2")


def counts_of(times_s: FloatArray) -> bytes:
    """Return the counts of times: for each bin that has any, ascending, bin and count as 16-bit integers.

    Args:
        times_s: at most 65,535 times in seconds, none negative.
    """
    logarithms = np.log(np.maximum(times_s, _LEAST_S) / _LEAST_S) / _GROWTH
    counts = np.bincount(np.minimum(np.ceil(logarithms), _BIN_MAX).astype(np.int64))
    bins = counts.nonzero()[0]
    return np.column_stack((bins, counts[bins])).astype(_PAIR).tobytes()


class Distribution:
    """The sum of several distributions."""

    def __init__(self, parts: Iterable[bytes]) -> None:
        """Args: `parts`: what `counts_of` has returned for each."""
        pairs = np.frombuffer(b"".join(parts), _PAIR).reshape(-1, 2).astype(np.int64)
        order = np.argsort(pairs[:, 0], kind="stable")
        self._bins, self._until = pairs[order, 0], pairs[order, 1].cumsum()

    @property
    def count(self) -> int:
        """Number of times."""
        return int(self._until[-1]) if len(self._until) else 0

    def quantile_s(self, share: float) -> float:
        """Return the quantile of a share in [0, 1], interpolated between two times; 0.0 if there are none."""
        if not self.count:
            return 0.0
        place = share * (self.count - 1)
        low_s, high_s = self._ordered_s(int(place)), self._ordered_s(math.ceil(place))
        return low_s + (place - int(place)) * (high_s - low_s)

    def least_above_s(self, share: float) -> float | None:
        """Return the shortest time that a share in (0, 1] of all times does not exceed; None: there are none."""
        return self._ordered_s(math.ceil(share * self.count) - 1) if self.count else None

    def _ordered_s(self, place: int) -> float:
        """Return the time at a place in ascending order, from 0."""
        number = int(self._bins[np.searchsorted(self._until, place, side="right")])
        return _LEAST_S * math.exp((number - 0.5) * _GROWTH) if number else 0.0
