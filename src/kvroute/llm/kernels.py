"""Compiled KV sizes for many cache sizes at once; `kvroute.llm.geometry` has the formula and its source."""

from __future__ import annotations

from kvroute.compiled import compiled
from kvroute.types import FloatArray, IntArray


@compiled
def kv_bytes_each(
    tokens: int,
    cached_tokens: IntArray,
    bytes_per_token: float,
    state_bytes: float,
    window_tokens: IntArray,
    window_bytes: FloatArray,
    nbytes: FloatArray,
) -> None:
    """Fill `nbytes` [n] with the bytes to send for a context of `tokens`, `cached_tokens` [n] of which the receiver
    caches. `window_bytes` [w] are sent for each of at most `window_tokens` [w] tokens."""
    for i in range(len(nbytes)):
        new = max(tokens - cached_tokens[i], 0)
        nbytes[i] = new * bytes_per_token + state_bytes
        for w in range(len(window_tokens)):
            nbytes[i] += min(new, window_tokens[w]) * window_bytes[w]
