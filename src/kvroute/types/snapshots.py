"""What a policy is given and what it says: arrays over candidates, and the terms of its choice.

Structs, though they stay inside: a decision makes half a dozen, and a frozen dataclass takes ten times as long to make.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from kvroute.types.arrays import FloatArray, IntArray, TierArray


class Candidates(msgspec.Struct, frozen=True, gc=False):
    """Instances to choose from, ascending by name, as arrays of length n: a lower index wins a tie."""

    names: tuple[str, ...]
    batch: IntArray
    """Requests decoding now (NetKV beta_d)."""
    queued: IntArray
    """Requests whose KV has landed or is under way, waiting for a slot (NetKV q_d)."""
    batch_max: IntArray
    free_kv_bytes: FloatArray
    hit_tokens: IntArray
    """Longest cached block prefix of the request, tokens (NetKV lambda)."""
    kv_bytes: FloatArray
    """KV bytes that would cross the network to this candidate (NetKV s_eff, eq. 2)."""
    need_bytes: FloatArray
    """KV memory that the candidate must have free: what crosses plus room for the answer."""
    iteration_base_s: FloatArray
    iteration_per_request_s: FloatArray


class NetworkCosts(msgspec.Struct, frozen=True, gc=False):
    """What the oracle says of the network between one source and the candidates."""

    tier: TierArray
    """Tier of each candidate, length n; the arrays below are per tier, length TIER_COUNT."""
    bytes_per_s: FloatArray
    latency_s: FloatArray
    congestion: FloatArray
    in_flight: IntArray
    """Own transfers in flight from this source per tier."""
    pair_bytes_per_s: FloatArray | None = None
    """What a lone transfer from the source to each candidate gets, as measured, length n; None: only the tiers' are
    known."""


class Terms(msgspec.Struct, frozen=True, gc=False):
    """Why: the cost terms of every candidate, in the candidates' order; lower cost is better.

    `cost` is in seconds where the policy prices in seconds, else in the policy's own unit (`unit`).
    """

    names: tuple[str, ...]
    cost: FloatArray
    feasible: npt.NDArray[np.bool_]
    parts: dict[str, FloatArray]
    unit: str = "s"
    left_out: int = 0
    """Candidates that a log has left out, none of them cheaper than those it keeps but the chosen one."""


class Choice(msgspec.Struct, frozen=True, gc=False):
    """A chosen candidate (index into `Candidates`) and the terms that led there."""

    index: int
    terms: Terms
