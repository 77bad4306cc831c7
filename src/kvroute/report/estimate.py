"""The mean of a few measurements and its confidence interval: Student's t, 95 %."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kvroute.report.grid import UNKNOWN, GridEntry

_ROUNDING = 1e-9
"""Relative difference of values that are equal but for rounding errors."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A metric over seeds, in the metric's own unit."""

    mean: float
    std: float
    """Sample standard deviation; 0 with one seed."""
    half_width: float | None
    """Half of the 95 % confidence interval of the mean (Student's t); None with one seed."""
    seeds: int


def estimate(values: Iterable[float | None]) -> Estimate | None:
    """Return mean and spread of the measured values; None if there are none."""
    known = np.array([value for value in values if value is not None], dtype=np.float64)
    if not known.size:
        return None
    mean, count = float(known.mean()), int(known.size)
    if count == 1:
        return Estimate(mean, 0.0, None, 1)
    if float(np.ptp(known)) <= _ROUNDING * abs(mean):
        return Estimate(mean, 0.0, 0.0, count)
    from scipy.special import stdtrit  # its import takes half a second

    std = float(known.std(ddof=1))
    return Estimate(mean, std, float(stdtrit(count - 1, 0.975)) * std / float(np.sqrt(count)), count)


def estimate_entry(value: Estimate | None, digits: int, *, signed: bool = False) -> GridEntry:
    """Return a mean with its interval, if the values differ, as the entry of a grid."""
    if value is None:
        return GridEntry(UNKNOWN)
    width = f"±{value.half_width:.{digits}f}" if value.half_width else ""
    return GridEntry(f"{value.mean:{'+' if signed else ''}.{digits}f}", width)
