"""Offers decode instances that may prefill and decode a request alone to the policy that compares them with pairs."""

from __future__ import annotations

import msgspec
import numpy as np

from kvroute.control.pool import DecodePool
from kvroute.control.view import Avoided, ClusterView, PoolKey
from kvroute.policies import AloneCandidates, AloneOffer
from kvroute.timing import PrefillTime, prefill_each_s, prefill_time
from kvroute.types import TRAITS, BoolArray, FloatArray, IntArray, Request


class AloneOffers:
    """Prompt times of the decode pools. It books nothing."""

    def __init__(self, view: ClusterView) -> None:
        self._view = view
        self._times: dict[PoolKey, list[tuple[PrefillTime, IntArray]]] = {}
        """For each pool whose engines can compute prompts: each timing, and the positions of its instances."""
        self._chunk_tokens: dict[PoolKey, IntArray] = {}
        timing, instances = view.cluster.timing, view.cluster.instances
        for key, pool in view.decode.items():
            if TRAITS[key[1]].decode_prefills:
                members = [instances[index] for index in pool.ids.tolist()]
                self._chunk_tokens[key] = np.array([each.chunk_tokens for each in members], dtype=np.int64)
                names = np.array([each.timing for each in members])
                self._times[key] = [
                    (prefill_time(timing[name].prefill), np.flatnonzero(names == name))
                    for name in sorted(set(names.tolist()))
                ]

    def offer(
        self, request: Request, model: str, at: float, avoid: Avoided, output_tokens: float
    ) -> tuple[tuple[PoolKey, ...], AloneOffer]:
        """Return the pools with an instance that may serve the request alone, and the offer, whose pools are in the
        same order.

        Instances that have failed the request are offered only if no other is left.
        """
        view = self._view
        keys, pools = list[PoolKey](), list[AloneCandidates]()
        for key in self._times:
            usable = self._usable(view.decode[key], at, avoid) if key[0] == model else None
            if usable is not None and usable.any():
                keys.append(key)
                pools.append(self._candidates(request, key, usable, at))
        prefill = view.prefill[model]
        waiting = prefill.assigned + prefill.others
        return tuple(keys), AloneOffer(tuple(pools), waiting, output_tokens, view.options.layerwise)

    def _usable(self, pool: DecodePool, at: float, avoid: Avoided) -> BoolArray:
        up: BoolArray = pool.up & pool.partner
        usable = up
        for shunned in avoid.rounds() if avoid else ():
            usable = up & ~np.isin(pool.ids, shunned)
            if usable.any():
                break
        if pool.slow_start.started:
            rest = pool.slow_start.without_limited(usable, pool.sites, at)
            usable = usable if rest is None else rest
        return usable

    def _candidates(self, request: Request, key: PoolKey, usable: BoolArray, at: float) -> AloneCandidates:
        view, pool = self._view, self._view.decode[key]
        # The last token is always computed: its output is the first logits.
        most = max(request.input_tokens - 1, 0)
        hit_tokens = view.caches.reusable_tokens(request, key[0], pool.ids, most)
        candidates = pool.candidates(request, view.models[key[0]], hit_tokens, view.options.reserve_bytes, usable)
        candidates = msgspec.structs.replace(candidates, kv_bytes=np.zeros(len(pool.ids)))
        room = np.maximum(self._chunk_tokens[key] - pool.batch, 1)
        chunks = -(-(request.input_tokens - hit_tokens) // room)
        prefill_s = self._prefill_s(key, request.input_tokens, hit_tokens)
        return AloneCandidates(candidates, pool.prompts_s(at), prefill_s, chunks)

    def _prefill_s(self, key: PoolKey, tokens: int, hit_tokens: IntArray) -> FloatArray:
        times = self._times[key]
        if len(times) == 1:
            return prefill_each_s(times[0][0], tokens, hit_tokens)
        seconds = np.empty(len(hit_tokens))
        for time, members in times:
            seconds[members] = prefill_each_s(time, tokens, hit_tokens[members])
        return seconds
