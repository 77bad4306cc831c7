"""The equations of HeroServe III-C as published, errors included: pure functions of numbers.

`docs/placement.md` lists what is wrong with each and what kvroute computes instead. Symbols are those of the
publication: K_in and K_out are tokens of a batch of Q requests, h the hidden size, m the feed-forward size, A the
heads, L the layers, R the bytes of all weights, M a GPU's memory. Where the publication divides a number of elements by
bits per second, so do these functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

AGGREGATION_S = 1e-6
"""T_agg: time in the switch."""
STEPS = 2
"""Synchronisations that eq. 5 counts: attention output and feed-forward network, of one layer."""


def scalability_per_s(request_s: float) -> float:
    """Return H = 1 / T_req (eq. 1)."""
    return 1.0 / request_s


def queueing_s(rate_per_s: float, serve_s: float) -> float:
    """Return T_queue = lambda T^2 / 2(1 - rho); negative above a utilisation of 1."""
    return rate_per_s * serve_s**2 / (2.0 * (1.0 - rate_per_s * serve_s))


def prefill_latency_s(network_s: float, compute_s: float) -> float:
    """Return T_pre (eq. 3)."""
    return network_s + compute_s


def decode_latency_s(network_s: float, compute_s: float, transfer_s: float) -> float:
    """Return T_dec (eq. 4): the KV transfer counts in full for every token."""
    return network_s + compute_s + transfer_s


def network_s(pipeline_s: Sequence[float], step_s: float) -> float:
    """Return T_n (eq. 5): sends between stages, and two synchronisations."""
    return sum(pipeline_s) + STEPS * step_s


def hops_s(elements: float, hops_bits_per_s: Sequence[float]) -> float:
    """Return T_k,a (eq. 6 and 10): the times of the hops one after another, in elements over bits per second."""
    return sum(elements / bits_per_s for bits_per_s in hops_bits_per_s)


def pipeline_elements(tokens: float, hidden: int, *, decode: bool) -> float:
    """Return the elements that a stage sends on (eq. 6): K_in h, or h in the decode phase."""
    return float(hidden) if decode else tokens * hidden


def aggregation_s(elements: float, paths_bits_per_s: Sequence[Sequence[float]]) -> float:
    """Return T_ina (eq. 8 to 10): collection over the slowest path, aggregation, distribution over the same path."""
    slowest_s = max(hops_s(elements, path) for path in paths_bits_per_s)
    return slowest_s + AGGREGATION_S + slowest_s


def ring_s(elements: float, gpus: int, least_bits_per_s: float) -> float:
    """Return T_ring (eq. 11) for a tensor of `elements`: 2(P - 1) parts of 1 / P."""
    return 2.0 * (gpus - 1) * (elements / gpus) / least_bits_per_s


def decode_elements(tokens_in: float, hidden: int) -> float:
    """Return the elements that a decode iteration synchronises: K_in h as for a prefill (section III-C 2)."""
    return tokens_in * hidden


def prefill_compute_s(
    fit: tuple[float, float, float], tp: int, hidden: int, width: int, tokens: float, tokens2: float, block: int = 16
) -> float:
    """Return T_c^pre (eq. 12) of fitted parameters C1 to C3."""
    c1, c2, c3 = fit
    return c1 / tp * (4 * hidden**2 + 2 * hidden * width) * tokens + c2 / (block * tp) * 3 * hidden * tokens2 + c3


def decode_compute_s(
    fit: tuple[float, float, float], tp: int, pp: int, hidden: int, width: int, tokens_in: float
) -> float:
    """Return T_c^dec (eq. 13) of fitted parameters C4 to C6: divided by the number of pipeline stages."""
    c4, c5, c6 = fit
    return c4 / (tp * pp) * (4 * hidden**2 + 2 * hidden * width) + c5 / (tp * pp) * 3 * hidden * tokens_in + c6


def kv_elements(tokens_in: float, hidden: int, heads: int, tp: int) -> float:
    """Return D_ij, the elements of one layer and tensor segment: 2 K_in h / A * ceil(P / A)."""
    return 2.0 * tokens_in * hidden / heads * math.ceil(tp / heads)


def transfer_s(elements_of_pairs: Sequence[float], hops_bits_per_s: Sequence[Sequence[float]]) -> float:
    """Return T_f (eq. 14 and 15) of the pairs of one prefill GPU that is the slowest: the sum over its pairs, without
    sharing of links."""
    return sum(hops_s(elements, hops) for elements, hops in zip(elements_of_pairs, hops_bits_per_s, strict=True))


def least_gpus(weights_bytes: float, memory_bytes: Sequence[float], share: float) -> float:
    """Return R / sum(M_g) R_frac (III-C 3): a ratio of bytes, not a number of GPUs."""
    return weights_bytes / (sum(memory_bytes) * share)


def least_memory_bytes(weights_bytes: float, tp: int, pp: int, share: float) -> float:
    """Return m_req (algorithm 1): the memory that a GPU needs, without KV cache."""
    return weights_bytes / (tp * pp * share)
