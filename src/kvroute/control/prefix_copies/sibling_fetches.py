"""The cluster-wide prefix pool: a prefill instance may fetch a prefix from a sibling if that is faster than computing.

This module prices the fetches of one request and books nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from kvroute.control.state.pool import PrefillPool
from kvroute.control.view import ClusterView
from kvroute.oracle.formulas import effective_bytes_per_s
from kvroute.policies import PrefillCandidates
from kvroute.types import FloatArray, IntArray, Request

_HOLDERS_MAX = 4
"""Number of instances with the longest prefix whose transfers are priced."""


@dataclass(frozen=True, slots=True)
class SiblingFetches:
    """What each prefill candidate would fetch, and from which instance; arrays of length n."""

    own_tokens: IntArray
    """Tokens that the candidate itself has cached."""
    holder: IntArray
    """Index in the cluster of the instance to fetch from; -1: the candidate uses its own cache."""
    fetch_s: FloatArray
    """Seconds until the fetched prefix has arrived; 0 if nothing is fetched."""

    def source_of(self, position: int, index: int) -> int:
        """The instance that really holds the prefix of the candidate at `position` (`index` in the cluster)."""
        return index if self.holder[position] < 0 else int(self.holder[position])


class SiblingCaches:
    """The prefill instances of each datacenter as one pool of prefixes: each can fetch what a sibling has cached."""

    def __init__(self, view: ClusterView) -> None:
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
    ) -> tuple[PrefillCandidates, SiblingFetches]:
        """Return the candidates with what each could fetch: the longest cached prefix of its datacenter.

        A candidate fetches if waiting for the prefix and computing the rest take less time than prefilling with its own
        cache. The part of the wait that it spends in the queue anyway costs nothing.
        """
        pool = self._view.prefill[model]
        tokens, prefill_s = candidates.hit_tokens.copy(), candidates.prefill_s.copy()
        fetches = SiblingFetches(candidates.hit_tokens, np.full(len(tokens), -1, dtype=np.int64), np.zeros(len(tokens)))
        for members in self._members[model]:
            up = members[pool.up[members]]
            longest = int(tokens[up].max(initial=0))
            lacking = up[tokens[up] < longest]
            if not len(lacking):
                continue
            holders = pool.ids[up[tokens[up] == longest][:_HOLDERS_MAX]]
            transfer_s = self._transfer_s(pool, model, holders, lacking, longest, tokens[lacking], at)
            cheapest, fetch_s = transfer_s.argmin(axis=0), transfer_s.min(axis=0)
            warm_s = pool.prefill_s(request.input_tokens, np.full(len(tokens), longest, dtype=np.int64))[lacking]
            late_s = warm_s + np.maximum(fetch_s - candidates.pending_s[lacking], 0.0)
            worth = late_s < prefill_s[lacking]
            takers = lacking[worth]
            tokens[takers], prefill_s[takers] = longest, late_s[worth]
            fetches.holder[takers], fetches.fetch_s[takers] = holders[cheapest[worth]], fetch_s[worth]
        return msgspec.structs.replace(candidates, hit_tokens=tokens, prefill_s=prefill_s), fetches

    def _transfer_s(
        self,
        pool: PrefillPool,
        model: str,
        holders: IntArray,
        takers: IntArray,
        tokens: int,
        own_tokens: IntArray,
        at: float,
    ) -> FloatArray:
        """Seconds to transfer the part of `tokens` that each taker lacks, [holders, takers] (NetKV eq. 3 and 4)."""
        nbytes = self._view.models[model].kv_bytes(np.full(len(takers), tokens, dtype=np.int64), own_tokens)
        rows = []
        for holder in holders.tolist():
            costs = self._view.oracle.costs(holder, pool.ids[takers], at)
            uncontended = costs.bytes_per_s[costs.tier] if costs.pair_bytes_per_s is None else costs.pair_bytes_per_s
            paced = effective_bytes_per_s(uncontended, costs.congestion[costs.tier], costs.in_flight[costs.tier])
            rows.append(costs.latency_s[costs.tier] + nbytes / paced)
        return np.array(rows)
