"""The pools' arithmetic, compiled: the cached tokens of a prompt on each instance, and the work ahead of it.

One numpy operation on an array of sixteen numbers takes about as long as one complete call of these functions.
"""

from __future__ import annotations

from kvroute.compiled import compiled
from kvroute.types import FloatArray, IntArray


@compiled
def cached_tokens(depths: IntArray, ids: IntArray, block_tokens: int, most: int, tokens: IntArray) -> None:
    """Fill `tokens` [m] with the cached tokens of a prompt on each of `ids` [m], at most `most`. `depths` [n] gives the
    cached blocks by instance."""
    for i in range(len(ids)):
        tokens[i] = min(depths[ids[i]] * block_tokens, most)


@compiled
def work_ahead(busy_until_s: FloatArray, others: IntArray, mean_s: float, at: float, pending_s: FloatArray) -> None:
    """Fill `pending_s` [n] with the rest of the work booked on each instance and `mean_s` per request of `others`."""
    for i in range(len(pending_s)):
        pending_s[i] = max(busy_until_s[i] - at, 0.0) + others[i] * mean_s
