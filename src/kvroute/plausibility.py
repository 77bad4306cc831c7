"""Checks for implausible values, mostly caused by a wrong unit: pure rules with wide bounds, for warnings.

The bounds are far beyond real hardware and published traces, so that a warning is nearly always correct.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

GPU_BYTES_MAX = 1e12
"""Maximum KV memory of one GPU: the largest have 0.3 TB, and some engines add host memory."""
CONTEXT_TOKENS_MIN = 500
"""Minimum number of tokens in the KV memory of an instance."""
TOKEN_S_MIN, TOKEN_S_MAX = 5e-8, 0.05
"""Bounds of the prefill time of one prompt token: 20 million to 20 tokens per second."""
STEP_S_MIN, STEP_S_MAX = 2e-5, 5.0
"""Bounds of one decode iteration, which produces one token per request or more."""
RATE_MAX_PER_S = 500.0
"""Maximum mean request rate of a trace file; the busiest published one has 50."""
SPAN_MAX_S = 31 * 86400.0
REQUESTS_MIN = 20
"""Minimum number of requests for a meaningful rate."""
TYPICAL_TOKENS = 1000


class Doubt(NamedTuple):
    """An implausible value with its text, and the likely cause."""

    what: str
    cause: str


def of_kv_memory(kv_bytes: float, gpus: int, token_bytes: float) -> Doubt | None:
    """Check the KV memory of an instance with `gpus` GPUs; `token_bytes` 0: its model keeps nothing per token."""
    if kv_bytes > GPU_BYTES_MAX * gpus:
        where = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
        what = f"{_size(kv_bytes)} of KV memory on {where} are {_size(kv_bytes / gpus)} per GPU"
        return Doubt(what, "the unit may be too large, such as TB instead of GB")
    if token_bytes and kv_bytes < CONTEXT_TOKENS_MIN * token_bytes:
        what = f"{_size(kv_bytes)} of KV memory hold {int(kv_bytes / token_bytes)} tokens of this model"
        return Doubt(what, "the unit may be too small, such as MB instead of GB")
    return None


def of_prefill(points: Sequence[tuple[float, float]]) -> Doubt | None:
    """Check prefill times of prompts, given as (tokens, seconds)."""
    pace_s = median(seconds / tokens for tokens, seconds in points) if points else TOKEN_S_MAX
    if TOKEN_S_MIN <= pace_s <= TOKEN_S_MAX:
        return None
    what = f"prefill takes {_time(pace_s)} per prompt token"
    return Doubt(what, _unit_cause(pace_s > TOKEN_S_MAX))


def of_decode(steps_s: Sequence[float]) -> Doubt | None:
    """Check the seconds of decode iterations."""
    step_s = median(steps_s) if steps_s else STEP_S_MAX
    if STEP_S_MIN <= step_s <= STEP_S_MAX:
        return None
    return Doubt(f"a decode iteration takes {_time(step_s)}, and so does each token", _unit_cause(step_s > STEP_S_MAX))


def of_arrivals(requests: int, span_s: float) -> Doubt | None:
    """Check `requests` requests within `span_s`, according to timestamps in milliseconds."""
    if requests < REQUESTS_MIN or not span_s:
        return None
    if requests > RATE_MAX_PER_S * span_s:
        what = f"{requests:,} requests in {span_s:,.3g} s are {requests / span_s:,.0f} per second"
        return Doubt(what, "timestamps must be in milliseconds; this file may use seconds")
    if span_s > SPAN_MAX_S:
        what = f"{requests:,} requests in {span_s / 86400:,.0f} days are one in {span_s / requests:,.0f} s"
        return Doubt(what, "timestamps must be in milliseconds; this file may use microseconds")
    return None


def _unit_cause(slow: bool) -> str:
    return "milliseconds may be given as seconds" if slow else "seconds may be given as milliseconds"


def _size(nbytes: float) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if nbytes >= factor:
            return f"{nbytes / factor:,.4g} {unit}"
    return f"{nbytes:,.0f} B"


def _time(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= factor:
            return f"{seconds / factor:,.4g} {unit}"
    return f"{seconds / 1e-9:,.3g} ns"
