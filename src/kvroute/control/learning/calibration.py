"""Compares predicted times to the first token with those that came, by deciles of the prediction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from kvroute.types import FloatArray

DECILES = 10


class CalibrationRow(msgspec.Struct, frozen=True, kw_only=True):
    """Requests with similar predictions."""

    requests: int
    predicted_s: float
    """Mean of the predictions."""
    actual_s: float
    """Mean of the times that came."""
    actual_p50_s: float
    actual_p90_s: float

    @property
    def ratio(self) -> float:
        """Actual over predicted; 1 is exact, more is slower than predicted."""
        return self.actual_s / self.predicted_s if self.predicted_s else 0.0


class Calibration:
    """The last predictions and what came of them."""

    def __init__(self, most: int = 2048) -> None:
        """Args: `most`: number of requests that are kept."""
        self._predicted, self._actual = np.empty(most), np.empty(most)
        self._count = 0

    def add(self, predicted_s: float, actual_s: float) -> None:
        """Add a request."""
        place = self._count % len(self._predicted)
        self._predicted[place], self._actual[place] = predicted_s, actual_s
        self._count += 1

    @property
    def count(self) -> int:
        """Number of requests that were added."""
        return self._count

    def rows(self) -> tuple[CalibrationRow, ...]:
        """Return the deciles of the requests that are kept."""
        kept = min(self._count, len(self._predicted))
        return deciles(self._predicted[:kept], self._actual[:kept])


def deciles(predicted_s: FloatArray, actual_s: FloatArray) -> tuple[CalibrationRow, ...]:
    """Return ten groups of equal size by ascending prediction; fewer if there are fewer than ten requests.

    Args:
        predicted_s: predictions in seconds, [n].
        actual_s: what came, [n].
    """
    order = np.argsort(predicted_s, kind="stable")
    groups = [group for group in np.array_split(order, DECILES) if len(group)]
    return tuple([_row(predicted_s[group], actual_s[group]) for group in groups])


def _row(predicted_s: FloatArray, actual_s: FloatArray) -> CalibrationRow:
    p50_s, p90_s = np.quantile(actual_s, (0.5, 0.9)).tolist()
    return CalibrationRow(
        requests=len(predicted_s),
        predicted_s=float(predicted_s.mean()),
        actual_s=float(actual_s.mean()),
        actual_p50_s=p50_s,
        actual_p90_s=p90_s,
    )


def joined(parts: Iterable[Sequence[CalibrationRow]]) -> tuple[CalibrationRow, ...]:
    """Return the rows of several processes as about ten rows. Their percentiles are means by the number of requests."""
    rows = sorted([row for part in parts for row in part], key=lambda row: row.predicted_s)
    total = sum(row.requests for row in rows)
    groups: list[list[CalibrationRow]] = [[] for _ in range(DECILES)]
    before = 0
    for row in rows:
        groups[min(DECILES * before // max(total, 1), DECILES - 1)].append(row)
        before += row.requests
    return tuple([_joined(group) for group in groups if group])


def _joined(rows: Sequence[CalibrationRow]) -> CalibrationRow:
    weights = [row.requests for row in rows]
    predicted_s, actual_s, p50_s, p90_s = (
        float(np.average([getattr(row, name) for row in rows], weights=weights))
        for name in ("predicted_s", "actual_s", "actual_p50_s", "actual_p90_s")
    )
    return CalibrationRow(
        requests=sum(weights), predicted_s=predicted_s, actual_s=actual_s, actual_p50_s=p50_s, actual_p90_s=p90_s
    )
