"""Measures the prefill and decode times of a running engine through its API."""

from kvroute.engine_timing.client import EngineApi
from kvroute.engine_timing.measurement import Measured, PrefixCheck, measure_decode, measure_prefill, profile_csv
from kvroute.engine_timing.plan import Limits, batches_of, lengths_of

__all__ = [
    "EngineApi",
    "Limits",
    "Measured",
    "PrefixCheck",
    "batches_of",
    "lengths_of",
    "measure_decode",
    "measure_prefill",
    "profile_csv",
]
