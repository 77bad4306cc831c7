"""The soft topology cost that Dynamo's proposal publishes as future work: decode load plus weighted transfer time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kvroute.policies.decode import cheapest, feasible_mask, no_room
from kvroute.types import Candidates, Choice, FloatArray, InputError, NetworkCosts, Reject, Request

_WEIGHT = 50.0
"""Value of the proposal's example, in KV blocks per second."""


@dataclass(frozen=True, slots=True)
class SoftTopology:
    """Least `decode_blocks + kv_transfer_weight * (latency + kv_bytes / bandwidth)` (ai-dynamo/dynamo#9118, "KV
    Transfer Cost Scoring").

    Latency and bandwidth are those of the tier, from the cluster file. `kv_bytes` is the KV cache of the whole prompt,
    without credit for cached prefixes, as in the proposal. `decode_blocks` is the KV memory in use on the candidate, in
    blocks of this request; where its size is not known, requests times the blocks of this request. A hard boundary is
    a topology constraint.
    """

    kv_transfer_weight: float = _WEIGHT
    """Blocks of load that one second of transfer is worth; 0: distance does not count."""

    def __post_init__(self) -> None:
        if not 0 <= self.kv_transfer_weight < math.inf:
            raise InputError(
                f"{self.kv_transfer_weight} is not a valid weight", where="kv_transfer_weight", hint="use 0 or more"
            )

    def choose(self, request: Request, candidates: Candidates, costs: NetworkCosts, turn: int) -> Choice | Reject:
        """See DecodePolicy."""
        feasible = feasible_mask(candidates)
        if not len(feasible):
            return no_room(request, candidates)
        token_bytes = _token_bytes(request, candidates)
        bytes_per_s = np.maximum(costs.bytes_per_s, 1.0)[costs.tier]
        latency_s = costs.latency_s[costs.tier]
        transfer_s: FloatArray = latency_s + token_bytes * request.input_tokens / bytes_per_s
        blocks = _decode_blocks(request, candidates, token_bytes)
        cost: FloatArray = blocks + self.kv_transfer_weight * transfer_s
        parts = {"decode_blocks": blocks, "transfer_s": transfer_s, "tier": costs.tier.astype(np.float64)}
        return cheapest(candidates.names, cost, feasible, parts, "blocks") or no_room(request, candidates)


def _token_bytes(request: Request, candidates: Candidates) -> float:
    """Return the KV bytes of one token; 0 if all candidates have the whole prompt cached."""
    missing = request.input_tokens - candidates.hit_tokens
    sizes = candidates.kv_bytes / np.maximum(missing, 1)
    return float(sizes.max(where=missing > 0, initial=0.0))


def _decode_blocks(request: Request, candidates: Candidates, token_bytes: float) -> FloatArray:
    """Return the load of each candidate in KV blocks, [n]."""
    if candidates.capacity_bytes is not None and token_bytes > 0:
        used_bytes = np.maximum(candidates.capacity_bytes - candidates.free_kv_bytes, 0.0)
        return np.asarray(used_bytes / (token_bytes * request.block_tokens), dtype=np.float64)
    own = math.ceil(request.input_tokens / request.block_tokens)
    return np.asarray((candidates.batch + candidates.queued) * max(own, 1), dtype=np.float64)
