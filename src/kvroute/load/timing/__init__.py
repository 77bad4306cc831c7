"""Measures the prefill and decode times of a running engine through its API."""

from kvroute.load.timing.client import EngineApi
from kvroute.load.timing.measurement import (
    MeasuredTimes,
    PrefixCheck,
    measure_cached,
    measure_decode,
    measure_prefill,
    measure_scheduling,
    profile_csv,
)
from kvroute.load.timing.plan import MeasurementLimits, batches_of, lengths_of
from kvroute.load.timing.scheduler import (
    CachedPrompt,
    FittedEngine,
    Scheduling,
    Together,
    fit_engine,
)

__all__ = [
    "CachedPrompt",
    "EngineApi",
    "FittedEngine",
    "MeasuredTimes",
    "MeasurementLimits",
    "PrefixCheck",
    "Scheduling",
    "Together",
    "batches_of",
    "fit_engine",
    "lengths_of",
    "measure_cached",
    "measure_decode",
    "measure_prefill",
    "measure_scheduling",
    "profile_csv",
]
