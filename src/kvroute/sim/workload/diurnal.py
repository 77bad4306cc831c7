"""Request rates over a day: a declared profile, the times of arrivals that follow it, and the hours of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import fsum, isfinite

import msgspec
import numpy as np

from kvroute.sim.workload.trace import Trace
from kvroute.types import InputError

HOUR_S = 3600.0
DIURNAL: tuple[float, ...] = (
    0.42, 0.35, 0.31, 0.30, 0.32, 0.38, 0.52, 0.78, 1.12, 1.45, 1.62, 1.66,
    1.50, 1.58, 1.70, 1.68, 1.55, 1.35, 1.15, 1.05, 0.98, 0.88, 0.72, 0.63,
)  # fmt: skip
"""Relative rates of the hours of a working day, with a mean of 1. A declared shape, not a measurement: lowest at night,
two peaks around noon, and a highest rate of 5.7 times the lowest."""


def hourly_rates(mean_per_s: float, shape: Sequence[float] = DIURNAL) -> tuple[float, ...]:
    """Return the rates of the hours in requests per second."""
    mean = fsum(shape) / len(shape)
    return tuple(mean_per_s * relative / mean for relative in shape)


def shape_of(trace: Trace, hours: int = 24) -> tuple[float, ...]:
    """Return the number of requests of a trace in each of `hours` equal parts of its duration."""
    times = np.array([request.at_s for request in trace.requests])
    if not len(times) or times[-1] <= times[0]:
        raise InputError("the trace has no duration", where=trace.name, hint="use a longer trace")
    counts, _ = np.histogram(times, bins=hours, range=(float(times[0]), float(times[-1])))
    return tuple(float(count) for count in counts)


def with_rates(trace: Trace, rates_per_s: Sequence[float], slot_s: float) -> Trace:
    """Return the requests of a trace, from its start, at other times: part k of `slot_s` seconds has rate k.

    Each time between two arrivals keeps its relative length, so that bursts stay bursts: the trace's own time is
    mapped to the time in which the new rates have let as many requests arrive. Requests after the last part are left
    out.

    Raises:
        InputError: the trace is too short, has no duration, or a rate is not finite and above 0.
    """
    if not all(isfinite(rate) and rate > 0.0 for rate in rates_per_s) or not slot_s > 0.0:
        raise InputError("a rate is not above 0", where=trace.name, hint="give finite rates above 0")
    own_per_s = trace.rate_per_s
    if not own_per_s:
        raise InputError("the trace has no duration", where=trace.name, hint="use a longer trace")
    edges = np.concatenate(([0.0], np.cumsum(np.array(rates_per_s) * slot_s)))
    counted = np.array([request.at_s for request in trace.requests]) * own_per_s
    if counted[-1] < edges[-1] * 0.98:
        what = f"{len(trace.requests):,} requests are too few for {edges[-1]:,.0f} arrivals"
        raise InputError(what, where=trace.name, hint="use a longer trace, a lower rate or a shorter time")
    times = np.interp(counted, edges, np.arange(len(edges)) * slot_s)
    kept = counted < edges[-1]
    moved = [
        msgspec.structs.replace(request, at_s=at)
        for request, at, inside in zip(trace.requests, times.tolist(), kept.tolist(), strict=True)
        if inside
    ]
    return replace(trace, requests=tuple(moved))
