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
TTFT_S_MIN = 5e-4
"""Minimum TTFT: a prefill reads the weights of the model, and 1 GB takes 0.1 ms on the fastest GPU (8 TB/s), before
kernels are launched and bytes are sent."""
TPOT_PER_TTFT_MAX = 5.0
"""Maximum TPOT as a multiple of TTFT: a prefill reads the same weights as a decode iteration."""
CONTRADICTION = 2.0
"""Factor between two values for one time from which on their units differ."""
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


def of_latencies(ttft_s: float, tpot_s: float) -> Doubt | None:
    """Check the typical TTFT and time per output token of a benchmark run."""
    if doubt := of_decode([tpot_s]):
        return doubt
    if ttft_s < TTFT_S_MIN:
        what = f"a TTFT of {_time(ttft_s)} is shorter than a GPU takes to read a model's weights"
        return Doubt(what, _unit_cause(slow=False))
    if tpot_s > TPOT_PER_TTFT_MAX * ttft_s:
        what = f"a TTFT of {_time(ttft_s)} is much shorter than the TPOT of {_time(tpot_s)}"
        return Doubt(what, "they may have different units")
    return None


def of_sum(latency_s: float, measured_s: float | None) -> Doubt | None:
    """Check the time of a request, computed from TTFT and TPOT, by the measured one; None: not measured."""
    if measured_s is None or 1 / CONTRADICTION < latency_s / measured_s < CONTRADICTION:
        return None
    what = f"TTFT and TPOT make requests of {_time(latency_s)}, but they take {_time(measured_s)}"
    return Doubt(what, "the values may have different units")


def of_concurrency(requests_per_s: float, latency_s: float, clients: float | None) -> Doubt | None:
    """Check rate and time of requests by the number of requests in progress (Little's law); None: not known."""
    running = requests_per_s * latency_s
    if clients is None or 1 / CONTRADICTION < running / clients < CONTRADICTION:
        return None
    rate = f"{requests_per_s:,.4g} requests/s that take {_time(latency_s)}"
    return Doubt(f"{rate} are {running:,.3g} at a time, not {clients:,.3g}", "TTFT or TPOT may have another unit")


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
