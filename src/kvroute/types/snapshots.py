"""Inputs and outputs of a policy: arrays over candidates, and the terms of its choice.

They are Structs although they are internal: a decision creates several of them, and a frozen dataclass takes ten times
as long to create.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from kvroute_engine.arrays import FloatArray, IntArray, TierArray


class Candidates(msgspec.Struct, frozen=True, gc=False):
    """Candidate instances, ascending by name, as arrays of length n; a lower index wins a tie."""

    names: tuple[str, ...]
    batch: IntArray
    """Requests in the decode batch now (NetKV beta_d)."""
    queued: IntArray
    """Requests that wait for a slot, with their KV arrived or in transfer (NetKV q_d)."""
    batch_max: IntArray
    free_kv_bytes: FloatArray
    hit_tokens: IntArray
    """Longest cached block prefix of the request, in tokens (NetKV lambda)."""
    kv_bytes: FloatArray
    """KV bytes to transfer to this candidate (NetKV s_eff, eq. 2)."""
    need_bytes: FloatArray
    """Free KV memory that the candidate needs: the transferred KV plus space for the output."""
    iteration_base_s: FloatArray
    iteration_per_request_s: FloatArray
    capacity_bytes: FloatArray | None = None
    """KV memory of each candidate, used or free; None: not known."""
    group: IntArray | None = None
    """Number of each candidate's group of engines, from 0 on; None: all are one group."""
    prompts_s: FloatArray | None = None
    """Seconds until each candidate has computed the prompts of its aggregated requests; None: there are
    none."""


class NetworkCosts(msgspec.Struct, frozen=True, gc=False):
    """Network costs between one source and the candidates, as the oracle reports them."""

    tier: TierArray
    """Tier of each candidate, length n; the arrays below are per tier, length TIER_COUNT."""
    bytes_per_s: FloatArray
    latency_s: FloatArray
    congestion: FloatArray
    in_flight: IntArray
    """Own transfers in flight from this source, per tier."""
    pair_bytes_per_s: FloatArray | None = None
    """Measured rate of a single transfer from the source to each candidate, length n; None: only rates per tier are
    available."""


class Terms(msgspec.Struct, frozen=True, gc=False):
    """Cost terms of every candidate, in the candidates' order; lower cost is better.

    `cost` is in seconds if the policy uses seconds, otherwise in the policy's own unit (`unit`).
    """

    names: tuple[str, ...]
    cost: FloatArray
    feasible: npt.NDArray[np.bool_]
    parts: dict[str, FloatArray]
    unit: str = "s"
    left_out: int = 0
    """Number of candidates omitted in a log. None of them is cheaper than the kept ones, except possibly the chosen
    one."""


class Choice(msgspec.Struct, frozen=True, gc=False):
    """The chosen candidate (index into `Candidates`) and the terms of the choice."""

    index: int
    terms: Terms
