"""Compiled prefill times for many cache sizes at once; `kvroute.timing.formulas` has the formulas and their sources."""

from __future__ import annotations

from kvroute.compiled import compiled
from kvroute.types import FloatArray, IntArray


@compiled
def linear_each_s(base_s: float, per_token_s: float, tokens: int, cached_tokens: IntArray, seconds: FloatArray) -> None:
    """Fill `seconds` [n] for a prompt of `tokens` with `cached_tokens` [n] of them cached."""
    for i in range(len(seconds)):
        seconds[i] = base_s + per_token_s * max(tokens - cached_tokens[i], 0)
