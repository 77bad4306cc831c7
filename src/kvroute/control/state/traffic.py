"""Counts recent requests, responses and work: the input of the search for thresholds and role switches."""

from __future__ import annotations

import math
from bisect import bisect_left

import numpy as np

from kvroute.policies.fleet.throughput import Mix
from kvroute.types import FloatArray

_EDGES: list[float] = [2.0 ** (step / 16) for step in range(16 * 24 + 1)]
"""Upper edges of the bins of lengths, in tokens. An edge belongs to its bin, as a threshold does to the short side."""
_SLOTS = 8
"""Number of parts of a window; expired data is dropped in whole parts."""


class TrafficLengths:
    """Lengths in the last `window_s`, in bins of a sixteenth of an octave, so memory is bounded.

    The mean within a bin is exact. Times must not decrease.
    """

    __slots__ = ("_answers", "_began", "_count", "_longest", "_slot", "_slot_s", "_tokens")

    def __init__(self, window_s: float) -> None:
        self._slot_s = window_s / _SLOTS
        self._count = np.zeros((_SLOTS, len(_EDGES)))
        self._tokens = np.zeros((_SLOTS, len(_EDGES)))
        self._answers = np.zeros((_SLOTS, 2))
        self._longest = np.zeros(_SLOTS)
        self._began: float | None = None
        self._slot = 0

    def arrived(self, at: float, incremental_tokens: int) -> None:
        """Count one request with its uncached tokens; at least the last token is computed."""
        tokens = max(incremental_tokens, 1)
        row, column = self._row(at), min(bisect_left(_EDGES, tokens), len(_EDGES) - 1)
        self._count[row, column] += 1.0
        self._tokens[row, column] += tokens

    def answered(self, at: float, output_tokens: int) -> None:
        """Count one response of this length."""
        row = self._row(at)
        self._answers[row] += (1.0, output_tokens)
        self._longest[row] = max(self._longest[row], output_tokens)

    def requests(self, at: float) -> int:
        """Number of arrivals in the window."""
        self._forget(at)
        return int(self._count.sum())

    def rate_per_s(self, at: float) -> float:
        """Arrivals per second in the window, or since the first event."""
        requests, seen_s = self.requests(at), self.seen_s(at)
        return requests / seen_s if seen_s else 0.0

    def seen_s(self, at: float) -> float:
        """Present length of the window in seconds, at most the time since the first event."""
        self._forget(at)
        if self._began is None:
            return 0.0
        return max(at - max(self._began, (self._slot - _SLOTS + 1) * self._slot_s), 0.0)

    def recent_per_s(self, at: float) -> float:
        """Arrivals per second in the last two parts of the window, up to now; it follows a burst sooner."""
        self._forget(at)
        if self._began is None:
            return 0.0
        since = max((self._slot - 1) * self._slot_s, self._began)
        requests = self._count[[self._slot % _SLOTS, (self._slot - 1) % _SLOTS]].sum()
        return float(requests) / (at - since) if at > since else 0.0

    def peak_per_s(self, at: float) -> float:
        """Arrivals per second in the window's busiest part; the present and the previous part count as one."""
        recent_per_s = self.recent_per_s(at)  # also drops expired data
        return max(recent_per_s, float(self._count.sum(axis=1)[_over(self._slot)].max()) / self._slot_s)

    def median_tokens(self, at: float) -> float:
        """Upper edge of the bin that contains the median of uncached tokens in the window; inf without requests."""
        self._forget(at)
        requests = self._count.sum(axis=0).cumsum()
        return _EDGES[int(np.searchsorted(requests, requests[-1] / 2))] if requests[-1] else math.inf

    def output_tokens(self, at: float) -> float | None:
        """Mean length of a response; None if there were none."""
        self._forget(at)
        count, tokens = self._answers.sum(axis=0).tolist()
        return tokens / count if count and tokens else None

    def longest_tokens(self, at: float) -> float:
        """Longest response in the window; 0 if there were none."""
        self._forget(at)
        return float(self._longest.max())

    def mix(self, at: float) -> tuple[Mix, FloatArray] | None:
        """Lengths with their shares, and the thresholds between them, ascending from 0; None without traffic."""
        self._forget(at)
        count, tokens = self._count.sum(axis=0), self._tokens.sum(axis=0)
        filled = np.flatnonzero(count)
        if not len(filled):
            return None
        thresholds = np.concatenate(([0.0], np.array(_EDGES)[filled]))
        return Mix.of(tokens[filled] / count[filled], count[filled]), thresholds

    def _row(self, at: float) -> int:
        """Row that counts events at this time."""
        if self._began is None:
            self._began, self._slot = at, math.floor(at / self._slot_s)
        self._forget(at)
        return self._slot % _SLOTS

    def _forget(self, at: float) -> None:
        """Clear the slots that have expired."""
        slot = math.floor(at / self._slot_s)
        for gone in range(max(self._slot + 1, slot - _SLOTS + 1), slot + 1):
            for array in (self._count, self._tokens, self._answers, self._longest):
                array[gone % _SLOTS] = 0.0
        self._slot = max(self._slot, slot)


class Tally:
    """Sums over the last `window_s`, one column for each quantity; data expires in whole eighths of the window.

    Times must not decrease.
    """

    __slots__ = ("_slot", "_slot_s", "_sums")

    def __init__(self, window_s: float, columns: int) -> None:
        self._slot_s = window_s / _SLOTS
        self._sums = np.zeros((_SLOTS, columns))
        self._slot = 0

    def add(self, at: float, amounts: FloatArray) -> None:
        """Add an amount to every column, [columns]."""
        self._forget(at)
        self._sums[self._slot % _SLOTS] += amounts

    def add_one(self, at: float, column: int, amount: float) -> None:
        """Add an amount to one column."""
        self._forget(at)
        self._sums[self._slot % _SLOTS, column] += amount

    def window(self, at: float) -> FloatArray:
        """Sums over the window, [columns]."""
        self._forget(at)
        return np.asarray(self._sums.sum(axis=0))

    def recent(self, at: float) -> FloatArray:
        """Sums over the present and the previous part of the window, [columns]."""
        self._forget(at)
        return np.asarray(self._sums[self._slot % _SLOTS] + self._sums[(self._slot - 1) % _SLOTS])

    def parts(self, at: float) -> FloatArray:
        """Sums over each completed part of the window, [parts, columns]."""
        self._forget(at)
        return self._sums[_over(self._slot)]

    def _forget(self, at: float) -> None:
        slot = math.floor(at / self._slot_s)
        for gone in range(max(self._slot + 1, slot - _SLOTS + 1), slot + 1):
            self._sums[gone % _SLOTS] = 0.0
        self._slot = max(self._slot, slot)


def _over(slot: int) -> list[int]:
    """Rows of the completed parts of the window."""
    return [earlier % _SLOTS for earlier in range(slot - _SLOTS + 1, slot)]
