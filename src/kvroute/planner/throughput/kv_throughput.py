"""KV throughput of an instance (PrfaaS eq. 1) and the egress that a cluster of them needs (eq. 2)."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from kvroute.policies.fleet.throughput import Curve, Mix, Reading
from kvroute.types import FloatArray, InputError

PUBLISHED_TOKENS = (1_024, 8_192, 32_768, 131_072)
PUBLISHED_GBPS: dict[str, tuple[float, float, float, float]] = {
    "kimi-linear-48b": (1.19, 2.29, 3.87, 4.88),
    "mimo-v2-flash": (0.82, 2.85, 4.66, 4.71),
    "minimax-m2.5": (4.94, 32.87, 59.93, 47.82),
    "qwen3-235b": (4.12, 22.42, 33.35, 21.50),
    "qwen3.5-397b": (4.13, 6.28, 8.25, 7.47),
    "ring-2.5-1t": (7.27, 4.47, 2.59, 1.46),
}
"""KV throughput in Gbps, measured on 8 H200 with SGLang 0.5.9 (PrfaaS Table 3), at PUBLISHED_TOKENS."""


def kv_bytes_per_s(kv_bytes: Curve, prefill_s: Curve, tokens: FloatArray) -> FloatArray:
    """Return Phi_kv(l) = S_kv(l) / T_prefill(l) for prompts of these lengths (eq. 1)."""
    return kv_bytes(tokens) / prefill_s(tokens)


def mean_kv_bytes_per_s(
    mix: Mix, threshold_tokens: float, kv_bytes: Curve, prefill_s: Curve, reading: Reading
) -> float:
    """Return E[S_kv] / E[T_prefill] of prompts longer than a threshold (eq. 2), or Phi_kv of their mean length, which
    eq. 2 treats as approximately equal; 0 if no prompt is longer."""
    cut = mix.cut(np.array([threshold_tokens]))
    if not cut.long_share[0]:
        return 0.0
    return float(cut.long_mean(kv_bytes, reading)[0] / cut.long_mean(prefill_s, reading)[0])


def egress_bytes_per_s(gpus: float, gpus_per_instance: int, instance_kv_bytes_per_s: float) -> float:
    """Return B_out = N / P * Phi_kv: the smallest egress at which N prefill-only GPUs never wait for the link
    (eq. 2)."""
    return gpus / gpus_per_instance * instance_kv_bytes_per_s


def published_kv_bytes_per_s(model: str, tokens: float) -> float:
    """Return the value of PrfaaS Table 3, interpolated linearly over the logarithm of the length.

    Raises:
        InputError: the table does not contain the model, or does not cover this prompt length.
    """
    if model not in PUBLISHED_GBPS:
        hint = f"give --prefill, or choose one of {', '.join(PUBLISHED_GBPS)}"
        raise InputError(f"the published table has no KV throughput of {model!r}", where="--model", hint=hint)
    if not PUBLISHED_TOKENS[0] <= tokens <= PUBLISHED_TOKENS[-1]:
        hint = f"use {PUBLISHED_TOKENS[0]} to {PUBLISHED_TOKENS[-1]}, or measure one prompt and give --prefill"
        raise InputError(f"the published table does not cover {tokens:,.0f} tokens", where="--tokens", hint=hint)
    points = zip(PUBLISHED_TOKENS, PUBLISHED_GBPS[model], strict=True)
    for (low, low_gbps), (high, high_gbps) in pairwise(points):
        if tokens <= high:
            part = math.log(tokens / low) / math.log(high / low)
            return (low_gbps + part * (high_gbps - low_gbps)) * 1e9 / 8
    raise AssertionError("the range was checked")
