"""NetKV's arithmetic, compiled: one pass over the candidates replaces thirty array operations on a dozen numbers.

The functions take only arrays and numbers; `kvroute.policies.decode` explains their meaning.
"""

from __future__ import annotations

import numpy as np

from kvroute.compiled import compiled
from kvroute.types import BoolArray, FloatArray, IntArray, TierArray

TRANSFER_S, QUEUE_S, DECODE_S, HIT_TOKENS, EFFECTIVE, TIER, CONGESTION, OWN_TRANSFERS, COST = range(9)
"""Rows of `terms`."""
ROWS = COST + 1
NO_CANDIDATE = -1
NO_PAIRS: FloatArray = np.empty(0)
"""Value of `lone_bytes_per_s` if only the tiers' bandwidths are known."""


@compiled
def earliest_finish(pending_s: FloatArray, prefill_s: FloatArray, allowed: BoolArray, finish_s: FloatArray) -> int:
    """Fill `finish_s` [n]. Return the allowed candidate that finishes first, the first of equals, or NO_CANDIDATE."""
    best = NO_CANDIDATE
    for i in range(len(finish_s)):
        finish_s[i] = pending_s[i] + prefill_s[i]
        if allowed[i] and (best == NO_CANDIDATE or finish_s[i] < finish_s[best]):
            best = i
    return best


@compiled
def netkv_terms(
    kv_bytes: FloatArray,
    need_bytes: FloatArray,
    free_kv_bytes: FloatArray,
    hit_tokens: IntArray,
    batch: IntArray,
    queued: IntArray,
    batch_max: IntArray,
    iteration_base_s: FloatArray,
    iteration_per_request_s: FloatArray,
    tier: TierArray,
    lone_bytes_per_s: FloatArray,
    tier_bytes_per_s: FloatArray,
    tier_latency_s: FloatArray,
    tier_congestion: FloatArray,
    tier_in_flight: IntArray,
    sees_congestion: bool,
    sees_in_flight: bool,
    joins_queued: bool,
    feasible: BoolArray,
    terms: FloatArray,
) -> int:
    """Fill `feasible` [n] and `terms` [ROWS, n]. Return the feasible candidate of least cost, the first of equals, or
    NO_CANDIDATE.

    Args:
        lone_bytes_per_s: measured rate of a transfer alone to each candidate, [n], or NO_PAIRS.
        tier_bytes_per_s, tier_latency_s, tier_congestion, tier_in_flight: by tier.
        sees_congestion, sees_in_flight: whether NetKV eq. 4 counts other traffic and the router's own transfers.
        joins_queued: whether NetKV eq. 7 counts the queued requests, which will be in the batch by then.
        others: see `Candidates`.
    """
    best, best_s = NO_CANDIDATE, np.inf
    for i in range(len(tier)):
        t = tier[i]
        effective = lone_bytes_per_s[i] if len(lone_bytes_per_s) else tier_bytes_per_s[t]
        if sees_congestion:
            effective = effective * (1.0 - tier_congestion[t])
        if sees_in_flight:
            effective = effective / (1.0 + tier_in_flight[t])
        iteration_s = iteration_base_s[i] + iteration_per_request_s[i] * batch[i]
        transfer_s = kv_bytes[i] / effective + tier_latency_s[t]
        queue_s = max(queued[i] - batch_max[i] + batch[i], 0) * iteration_s
        joins = 1 + queued[i] if joins_queued else 1
        decode_s = iteration_s + iteration_per_request_s[i] * joins
        cost = transfer_s + queue_s + decode_s
        terms[TRANSFER_S, i], terms[QUEUE_S, i], terms[DECODE_S, i], terms[COST, i] = (
            transfer_s,
            queue_s,
            decode_s,
            cost,
        )
        terms[HIT_TOKENS, i], terms[EFFECTIVE, i], terms[TIER, i] = hit_tokens[i], effective, t
        terms[CONGESTION, i], terms[OWN_TRANSFERS, i], terms[COST, i] = tier_congestion[t], tier_in_flight[t], cost
        feasible[i] = need_bytes[i] <= free_kv_bytes[i]
        if feasible[i] and (best == NO_CANDIDATE or cost < best_s):
            best, best_s = i, cost
    return best
