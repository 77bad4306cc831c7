"""The cluster-wide prefix pool: a prefill instance may fetch a prefix that a sibling has, where that is sooner there
than computed. It prices the fetches of one request and books nothing."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from kvroute.control.pool import PrefillPool
from kvroute.control.view import View
from kvroute.oracle.formulas import effective_bytes_per_s
from kvroute.policies import PrefillCandidates
from kvroute.types import FloatArray, IntArray, Request

_HOLDERS_MAX = 4
"""Of those that have the longest prefix, so many are asked for their price."""


@dataclass(frozen=True, slots=True)
class Fetches:
    """By prefill candidate, arrays of length n: what it would fetch, and from whom."""

    own_tokens: IntArray
    """Cached on itself."""
    holder: IntArray
    """Index in the cluster; -1: it does with its own."""
    fetch_s: FloatArray
    """Until the fetched prefix is there; 0 where none is."""

    def true_holder(self, position: int, index: int) -> int:
        """Who really has what the candidate at `position`, instance `index`, is said to have."""
        return index if self.holder[position] < 0 else int(self.holder[position])


class ClusterPool:
    """The prefill instances of each datacenter as one pool of prefixes: what one has, its siblings can have."""

    def __init__(self, view: View) -> None:
        self._view = view
        datacenters = sorted({instance.datacenter for instance in view.cluster.instances})
        number = {name: site for site, name in enumerate(datacenters)}
        sites = np.array([number[instance.datacenter] for instance in view.cluster.instances], dtype=np.int64)
        self._members = {
            model: [np.flatnonzero(sites[pool.ids] == site) for site in range(len(datacenters))]
            for model, pool in view.prefill.items()
        }

    def offer(
        self, request: Request, model: str, candidates: PrefillCandidates, at: float
    ) -> tuple[PrefillCandidates, Fetches]:
        """The candidates with what each could fetch: the longest prefix of its datacenter, where the wait for it (the
        queue's share of it is free) and the prefill after it are sooner over than the prefill with its own."""
        pool = self._view.prefill[model]
        tokens, prefill_s = candidates.hit_tokens.copy(), candidates.prefill_s.copy()
        fetches = Fetches(candidates.hit_tokens, np.full(len(tokens), -1, dtype=np.int64), np.zeros(len(tokens)))
        for members in self._members[model]:
            up = members[pool.up[members]]
            longest = int(tokens[up].max(initial=0))
            lacking = up[tokens[up] < longest]
            if not len(lacking):
                continue
            holders = pool.ids[up[tokens[up] == longest][:_HOLDERS_MAX]]
            way_s = self._way_s(pool, model, holders, lacking, longest, tokens[lacking], at)
            cheapest, fetch_s = way_s.argmin(axis=0), way_s.min(axis=0)
            warm_s = pool.prefill_s(request.input_tokens, np.full(len(tokens), longest, dtype=np.int64))[lacking]
            late_s = warm_s + np.maximum(fetch_s - candidates.pending_s[lacking], 0.0)
            worth = late_s < prefill_s[lacking]
            takers = lacking[worth]
            tokens[takers], prefill_s[takers] = longest, late_s[worth]
            fetches.holder[takers], fetches.fetch_s[takers] = holders[cheapest[worth]], fetch_s[worth]
        return msgspec.structs.replace(candidates, hit_tokens=tokens, prefill_s=prefill_s), fetches

    def _way_s(
        self,
        pool: PrefillPool,
        model: str,
        holders: IntArray,
        takers: IntArray,
        tokens: int,
        own_tokens: IntArray,
        at: float,
    ) -> FloatArray:
        """[holders, takers] seconds for what each taker lacks of `tokens` (NetKV eq. 3 and 4)."""
        nbytes = self._view.models[model].kv_bytes(np.full(len(takers), tokens, dtype=np.int64), own_tokens)
        rows = []
        for holder in holders.tolist():
            costs = self._view.oracle.costs(holder, pool.ids[takers], at)
            alone = costs.bytes_per_s[costs.tier] if costs.pair_bytes_per_s is None else costs.pair_bytes_per_s
            paced = effective_bytes_per_s(alone, costs.congestion[costs.tier], costs.in_flight[costs.tier])
            rows.append(costs.latency_s[costs.tier] + nbytes / paced)
        return np.array(rows)
