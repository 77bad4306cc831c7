"""DualPath's choice of a decode engine, over the instances that the router sees."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kvroute.policies.decode import cheapest, feasible_mask, no_room
from kvroute.policies.storage.dualpath_kernels import BALANCE
from kvroute.types import Candidates, Choice, FloatArray, InputError, NetworkCosts, Reject, Request


@dataclass(frozen=True, slots=True)
class BalancedTokens:
    """The group of instances with the smallest share of its KV memory in use; within the group, fewest requests among
    the instances whose memory in use stays near the mean, then least memory in use (DualPath 6.1, phases 1 and 2, with
    bytes in place of tokens).

    An instance stays near the mean if it has, with the request, at most `balance` times the mean over its group. Groups
    come from the cluster file; without any, all instances are one group. Groups without room for the request come last,
    where DualPath lets the request wait. The queue that is placed has one request, because each request is placed when
    it is due. Ranks of one instance are a group of their own, which the engine balances. The cost is the rank of a
    candidate.
    """

    balance: float = BALANCE

    def __post_init__(self) -> None:
        if not 1 <= self.balance < math.inf:
            raise InputError(f"{self.balance} is not a valid factor", where="balance", hint="use 1 or more")

    def choose(self, request: Request, candidates: Candidates, costs: NetworkCosts, turn: int) -> Choice | Reject:
        """See DecodePolicy. Without known capacities, the largest free memory counts as the capacity of all."""
        feasible = feasible_mask(candidates)
        if not len(feasible):
            return no_room(request, candidates)
        free = candidates.free_kv_bytes
        capacity = (
            candidates.capacity_bytes if candidates.capacity_bytes is not None else np.full(len(free), free.max())
        )
        used_bytes: FloatArray = np.maximum(capacity - free, 0.0)
        # An instance that takes no requests needs infinite memory.
        need_bytes = float(candidates.need_bytes[feasible].min()) if feasible.any() else 0.0
        group = candidates.group if candidates.group is not None else np.zeros(len(free), dtype=np.int64)
        group_used_bytes = np.bincount(group, used_bytes)
        limit_bytes = self.balance * (group_used_bytes + need_bytes) / np.maximum(np.bincount(group), 1)
        light = used_bytes + need_bytes <= limit_bytes[group]
        group_share = group_used_bytes[group] / np.maximum(np.bincount(group, capacity)[group], 1.0)
        requests = (candidates.batch + candidates.queued).astype(np.float64)
        load = np.where(light, requests, used_bytes)
        rank: FloatArray = np.empty(len(load))
        # Equal groups in the order of their numbers, so that their instances do not mix.
        rank[np.lexsort((load, ~light, group, group_share, ~feasible))] = np.arange(len(load), dtype=np.float64)
        parts = {"used_bytes": used_bytes, "requests": requests, "light": light.astype(np.float64)}
        if candidates.group is not None:
            parts["group_used_share"] = group_share
        return cheapest(candidates.names, rank, feasible, parts, "rank") or no_room(request, candidates)
