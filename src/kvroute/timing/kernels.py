"""Prefill times of many caches at once, compiled; `kvroute.timing.formulas` says which formula is whose."""

from __future__ import annotations

from kvroute.compiled import compiled
from kvroute.types import FloatArray, IntArray


@compiled
def linear_each_s(base_s: float, per_token_s: float, tokens: int, cached_tokens: IntArray, seconds: FloatArray) -> None:
    """Fill `seconds` [n] for a prompt of `tokens` of which so many are cached, [n]."""
    for i in range(len(seconds)):
        seconds[i] = base_s + per_token_s * max(tokens - cached_tokens[i], 0)
