"""The cache-compute ratio: KV to read from storage per operation of the prefill (DualPath section 3, table 1)."""

from __future__ import annotations

from dataclasses import dataclass

from kvroute.llm import Model


@dataclass(frozen=True, slots=True)
class CacheCompute:
    """What one turn reads and computes."""

    model: str
    cached_tokens: int
    appended_tokens: int
    cached_bytes: float
    """KV of the cached tokens, with the state of layers that keep one."""
    token_flop: float
    """Operations for one appended token at the mean context."""
    cached_bytes_per_flop: float


def mean_context(cached_tokens: int, appended_tokens: int) -> float:
    """Return the mean number of tokens to which an appended token attends: all cached ones, those before it, itself."""
    return cached_tokens + (appended_tokens + 1) / 2.0


def cache_compute(model: Model, cached_tokens: int, appended_tokens: int) -> CacheCompute:
    """Return the cache-compute ratio of a turn.

    Operations are those of the appended tokens at their mean context (`Compute.token_flop`), which is exact where
    attention grows linearly with the context.

    Raises:
        InputError: the operations of the model are not known.
    """
    cached_bytes = model.kv_bytes(cached_tokens)
    token_flop = model.token_flop(mean_context(cached_tokens, appended_tokens))
    ratio = cached_bytes / (appended_tokens * token_flop)
    return CacheCompute(model.name, cached_tokens, appended_tokens, cached_bytes, token_flop, ratio)
