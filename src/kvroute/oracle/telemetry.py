"""Congestion per tier over time: the last measurement, optionally smoothed or extrapolated, fading with age."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Literal, get_args

import numpy as np

from kvroute.types import TIER_COUNT, FloatArray, InputError

Prediction = Literal["smooth", "trend"]

CONGESTION_MAX = 0.99
"""Upper bound of telemetry: a full link still carries a hundredth, so every cost is finite."""

_ROUNDING = 1e-9
"""Utilisation slightly below zero is a rounding error of a subtraction, not an input error."""


@dataclass(frozen=True, slots=True)
class OracleSpec:
    """How the oracle uses its counters and its telemetry."""

    in_flight_max: int = 16
    """Maximum count of own transfers, about the number of flows that saturates a NIC (NetKV V-C)."""
    separates_own_traffic: bool = True
    """Whether telemetry excludes the router's own transfers. If not, they are part of the congestion and the counters
    are taken as zero (NetKV III-D)."""
    prediction: Prediction | None = None
    """`smooth`: exponential smoothing. `trend`: Holt's level and slope, extrapolated by one measuring interval at
    most."""
    alpha: float = 0.5
    """Weight of the newest measurement, in (0, 1]."""
    beta: float = 0.3
    """Weight of the newest slope, in [0, 1]; only `trend` uses it."""
    stale_after_s: float | None = None
    """Age above which telemetry fades to the static view as exp(1 - age / stale_after_s); None: it never fades."""
    self_measured: bool = False
    """Whether the measured rates of own transfers correct the static bandwidths, by tier and by pair."""

    def __post_init__(self) -> None:
        known = get_args(Prediction)
        if self.prediction is not None and self.prediction not in known:
            near = get_close_matches(str(self.prediction), known, 1) or known
            raise InputError(
                f"unknown prediction {self.prediction!r}",
                where="oracle.prediction",
                hint=f"did you mean {near[0]!r}?",
            )
        if self.in_flight_max < 0:
            raise InputError(f"{self.in_flight_max} is negative", where="oracle.in_flight_max", hint="use 0 or more")
        if not 0 < self.alpha <= 1:
            raise InputError(f"{self.alpha} is outside (0, 1]", where="oracle.alpha", hint="try 0.5")
        if not 0 <= self.beta <= 1:
            raise InputError(f"{self.beta} is outside [0, 1]", where="oracle.beta", hint="try 0.3")
        if self.stale_after_s is not None and not 0 < self.stale_after_s < math.inf:
            raise InputError(
                f"{self.stale_after_s} is not a positive time", where="oracle.stale_after_s", hint="try 60"
            )


def utilisation_array(values: Sequence[float] | FloatArray, length: int, where: str) -> FloatArray:
    """Measured utilisation as a read-only array, clamped to [0, CONGESTION_MAX].

    Raises:
        InputError: wrong number of values, or a value that is negative, infinite or not a number.
    """
    measured = np.array(values, dtype=np.float64)
    if measured.shape != (length,):
        raise InputError(f"{measured.size} values instead of {length}", where=where, hint="give one value for each")
    wrong = ~(np.isfinite(measured) & (measured >= -_ROUNDING))
    if wrong.any():
        first = int(np.argmax(wrong))
        raise InputError(
            f"{measured[first]} is not a utilisation", where=f"{where}[{first}]", hint="give a number in [0, 1)"
        )
    np.clip(measured, 0.0, CONGESTION_MAX, out=measured)
    return _read_only(measured)


def _read_only(array: FloatArray) -> FloatArray:
    """Make an array of congestion read-only, as all of them are: numba compiles again for another type of array."""
    array.flags.writeable = False
    return array


@dataclass(slots=True)
class Congestion:
    """Estimated congestion of every tier; arrays of length TIER_COUNT, never written in place."""

    settings: OracleSpec
    measured_at: float | None = None
    _level: FloatArray = field(default_factory=lambda: _read_only(np.zeros(TIER_COUNT)))
    _slope_per_s: FloatArray = field(default_factory=lambda: np.zeros(TIER_COUNT))
    _interval_s: float = 0.0

    def measured(self, at: float, per_tier: FloatArray) -> bool:
        """Process a measurement. Return False for one older than the last, which is ignored (messages can be
        reordered)."""
        if self.measured_at is None:
            self._level = per_tier
        elif at < self.measured_at:
            return False
        elif self.settings.prediction is None:
            self._level = per_tier
        else:
            self._blend(at - self.measured_at, per_tier)
        self.measured_at = at
        return True

    def _blend(self, interval_s: float, per_tier: FloatArray) -> None:
        """Apply Holt's two equations for uneven intervals; without a slope this is exponential smoothing."""
        alpha, beta = self.settings.alpha, self.settings.beta
        level = alpha * per_tier + (1.0 - alpha) * (self._level + self._slope_per_s * interval_s)
        if self.settings.prediction == "trend" and interval_s > 0:
            self._slope_per_s = beta * (level - self._level) / interval_s + (1.0 - beta) * self._slope_per_s
            self._interval_s = interval_s
        self._level = _read_only(level)

    def age_s(self, at: float) -> float | None:
        """Age of the last measurement, in seconds; None before the first one."""
        return None if self.measured_at is None else max(0.0, at - self.measured_at)

    def fading(self, at: float) -> float:
        """Weight of the last measurement: 1 while it is fresh, then falling to 0."""
        age_s, stale_s = self.age_s(at), self.settings.stale_after_s
        if age_s is None or stale_s is None or age_s <= stale_s:
            return 1.0
        return math.exp(1.0 - age_s / stale_s)

    def at(self, at: float) -> FloatArray:
        """Estimated congestion per tier at this time, in [0, CONGESTION_MAX]; zero before the first measurement."""
        level = self._level
        if self.measured_at is None:
            return level
        if self.settings.prediction == "trend":
            # A slope says nothing beyond one interval: the extrapolation would reach a bound and stay there.
            ahead_s = min(max(0.0, at - self.measured_at), self._interval_s)
            level = _read_only(np.clip(level + self._slope_per_s * ahead_s, 0.0, CONGESTION_MAX))
        share = self.fading(at)
        return level if share == 1.0 else _read_only(level * share)
