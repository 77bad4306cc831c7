"""Prompt lengths of a plan: a distribution or a trace, grouped in steps, and the thresholds between the groups."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kvroute.policies.fleet.throughput import Mix
from kvroute.prefix import PrefixIndex
from kvroute.sim.workload import Trace
from kvroute.types import FloatArray, InputError

_LEAST_MASS = 1e-9
"""Smallest accepted mass of a log-normal distribution within its limits; less cannot be told from rounding errors."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A mix with one length per group, which is the mean of the group, and a description of its source."""

    mix: Mix
    thresholds: FloatArray
    """[T] ascending, in tokens. They lie between the groups; the first is below all groups, the last above all."""
    about: str

    def scaled(self, factor: float) -> Lengths:
        """Return these lengths with every prompt multiplied by `factor`."""
        mix = Mix(self.mix.tokens * factor, self.mix.share)
        return Lengths(mix, self.thresholds * factor, f"{self.about}, times {factor:g}")

    def spread(self, factor: float) -> Lengths:
        """Return lengths with the same mean and another spread: the logarithm of every length is `factor` times (above
        0) as far from the mean logarithm. A log-normal distribution gets sigma times `factor`. The limits move with the
        lengths."""
        tokens, share = self.mix.tokens, self.mix.share
        middle = math.exp(float(share @ np.log(tokens)))
        moved, edges = (middle * (length / middle) ** factor for length in (tokens, self.thresholds))
        back = self.mix.mean_tokens / float(share @ moved)
        edges *= back
        # Rounding must not move a length across the edge of its own group.
        mix = Mix(np.minimum(back * moved, edges[1:]), share)
        return Lengths(mix, edges, f"{self.about}, spread times {factor:g}")


def grouped(tokens: FloatArray, weights: FloatArray, step_tokens: int, about: str) -> Lengths:
    """Group lengths above 0 and their weights in (k * step, (k + 1) * step]; E[L] does not change.

    Raises:
        InputError: see `Mix.of`.
    """
    mix = Mix.of(tokens, weights)
    group = np.maximum(np.ceil(mix.tokens / step_tokens).astype(np.int64), 1)
    kept, where = np.unique(group, return_inverse=True)
    share: FloatArray = np.bincount(where, weights=mix.share).astype(np.float64)
    mean = np.bincount(where, weights=mix.tokens * mix.share) / share
    # Rounding must not move a mean across the edge of its own group.
    upper = np.minimum(kept * float(step_tokens), mix.tokens[-1])
    first = max(float(kept[0] - 1) * step_tokens, 0.0)
    return Lengths(Mix(np.minimum(mean, upper), share), np.concatenate(([first], upper)), about)


def log_normal(mu: float, sigma: float, least: int, most: int, step_tokens: int) -> Lengths:
    """Return exp(N(mu, sigma)) between `least` and `most` tokens, with the exact mass and mean of every group.

    Raises:
        InputError: `most` is not above `least`, or almost no mass lies between them.
    """
    if most <= least:
        raise InputError(f"`most` ({most} tokens) is not above `least` ({least} tokens)", hint="increase `most`")
    inner = np.arange(least // step_tokens + 1, -(-most // step_tokens)) * float(step_tokens)
    edges = np.concatenate(([float(least)], inner, [float(most)]))
    z = (np.log(edges) - mu) / sigma
    mass = np.diff(_normal_cdf(z))
    if mass.sum() < _LEAST_MASS:
        what = f"almost no log-normal prompts with mu {mu:g} and sigma {sigma:g} have {least} to {most} tokens"
        raise InputError(what, hint="mu is the logarithm of the median length")
    kept = mass > 0
    moment = math.exp(mu + sigma * sigma / 2) * np.diff(_normal_cdf(z - sigma))
    means = np.clip(moment[kept] / mass[kept], edges[:-1][kept], edges[1:][kept])
    about = f"log-normal, mu {mu:g}, sigma {sigma:g}, {least:,} to {most:,} tokens"
    return grouped(means, mass[kept], step_tokens, about)


def incremental(trace: Trace, cache_tokens: int | None) -> tuple[FloatArray, float]:
    """Return the prompt tokens that one cache does not hold, [requests], and the share of all tokens that it holds.

    The cache keeps `cache_tokens` (None: no limit) and evicts the least recently used blocks first. At least one token
    of each prompt is always computed.
    """
    block_tokens = max((request.block_tokens for request in trace.requests if request.blocks), default=1)
    cache = PrefixIndex(1, None if cache_tokens is None else cache_tokens // block_tokens)
    new = np.empty(len(trace.requests))
    for number, request in enumerate(trace.requests):
        hit_tokens = 0
        if request.blocks:
            hit_tokens = cache.match_one(0, request.blocks) * request.block_tokens
            cache.store(0, request.blocks)
        new[number] = max(request.input_tokens - hit_tokens, 1)
    return new, 1 - float(new.sum()) / sum(request.input_tokens for request in trace.requests)


def _normal_cdf(z: FloatArray) -> FloatArray:
    return np.array([0.5 * math.erfc(-quantile / math.sqrt(2)) for quantile in z.tolist()])
