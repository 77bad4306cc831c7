"""Prefill and decode times: functions from a `TimingSpec`, and specs fitted to measured profiles."""

from kvroute.timing.fit import Fit, FitError, fit_decode, fit_prefill, fit_profile
from kvroute.timing.formulas import (
    IterationTime,
    PrefillTime,
    prefill_each_s,
    prefill_time,
    step_base_s,
    tokens_of_step_s,
)
from kvroute.timing.profile import Profile, read_profile

__all__ = [
    "Fit",
    "FitError",
    "IterationTime",
    "PrefillTime",
    "Profile",
    "fit_decode",
    "fit_prefill",
    "fit_profile",
    "prefill_each_s",
    "prefill_time",
    "read_profile",
    "step_base_s",
    "tokens_of_step_s",
]
