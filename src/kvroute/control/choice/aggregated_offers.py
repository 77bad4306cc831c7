"""Offers instances that may serve an aggregated request to the policy that compares them with pairs."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from kvroute.control.booking import Avoided
from kvroute.control.state.pool import DecodePool
from kvroute.control.view import ClusterView, PoolKey
from kvroute.policies import AggregatedCandidates, AggregatedOffer, PrefillCandidates
from kvroute.timing import PrefillTime, prefill_each_s, prefill_time
from kvroute.types import TRAITS, BoolArray, Candidates, FloatArray, IntArray, Request, Role


class AggregatedOfferBuilder:
    """Offers decode instances that compute a prompt, and prefill instances that go on to decode. It books nothing.

    Both compute a prompt in chunks beside their batch, whose steps have the base of a prefill.
    """

    def __init__(self, view: ClusterView, roles: frozenset[Role]) -> None:
        """Args: `roles`: of the instances that are offered."""
        self._view = view
        self._times: dict[PoolKey, list[tuple[PrefillTime, IntArray]]] = {}
        """For each pool whose engines can compute prompts: each timing, and the positions of its instances."""
        timing, instances = view.cluster.timing, view.cluster.instances
        for key, pool in view.decode.items():
            if "decode" in roles and TRAITS[key[1]].decode_prefills:
                members = [instances[index] for index in pool.ids.tolist()]
                names = np.array([member.timing for member in members])
                self._times[key] = [
                    (prefill_time(timing[name].prefill), np.flatnonzero(names == name))
                    for name in sorted(set(names.tolist()))
                ]
        self._prefill_positions: Mapping[PoolKey, IntArray] = view.kept_positions if "prefill" in roles else {}

    @property
    def ids(self) -> list[int]:
        """The instances that may serve an aggregated request, ascending."""
        view = self._view
        pools = [*(view.decode[key] for key in self._times), *(view.kept[key] for key in self._prefill_positions)]
        return sorted(index for pool in pools for index in pool.ids.tolist())

    def offer(
        self,
        request: Request,
        model: str,
        prefill: PrefillCandidates,
        at: float,
        avoid: Avoided,
        output_tokens: float,
    ) -> tuple[tuple[DecodePool, ...], AggregatedOffer]:
        """Return the pools with an instance that may serve the request aggregated, and the offer, whose pools are in
        the same order.

        Instances that have failed the request are offered only if no other is left.
        """
        view, own = self._view, self._view.prefill[model]
        decoding = [(view.decode[key], key) for key in self._times if key[0] == model]
        kept = [(view.kept[key], key) for key in self._prefill_positions if key[0] == model]
        masks = self._usable([pool for pool, _ in (*decoding, *kept)], at, avoid)
        shares, own_share = [pool.share.share(at) for pool, _ in decoding], own.share.share(at)
        pools, offered = list[DecodePool](), list[AggregatedCandidates]()
        for number, (pool, key) in enumerate((*decoding, *kept)):
            if masks[number].any():
                pools.append(pool)
                offered.append(
                    self._decoding(request, key, masks[number], shares[number], at)
                    if number < len(decoding)
                    else self._kept(request, key, prefill, masks[number], own_share)
                )
        running = np.zeros(len(own.ids), dtype=np.int64)
        for pool, key in kept:
            running[self._prefill_positions[key]] = pool.batch
        busy = sum(float(share.sum()) for share in (*shares, own_share))
        return tuple(pools), AggregatedOffer(
            pools=tuple(offered),
            waiting=own.assigned + own.others,
            decoding=running,
            busy=min(busy / max(int(own.up.sum()), 1), 1.0),
            output_tokens=output_tokens,
            layerwise=view.options.layerwise,
        )

    def _usable(self, pools: list[DecodePool], at: float, avoid: Avoided) -> list[BoolArray]:
        masks: list[BoolArray] = [pool.up & pool.partner for pool in pools]
        for shunned in avoid.rounds() if avoid else ():
            fresh = [pool.up & pool.partner & ~np.isin(pool.ids, shunned) for pool in pools]
            if any(mask.any() for mask in fresh):
                masks = fresh
                break
        else:
            if avoid.barred:
                masks = [mask & ~np.isin(pool.ids, avoid.barred) for pool, mask in zip(pools, masks, strict=True)]
        for number, pool in enumerate(pools):
            if pool.slow_start.started:
                rest = pool.slow_start.without_limited(masks[number], pool.sites, at)
                masks[number] = masks[number] if rest is None else rest
        return masks

    def _decoding(
        self, request: Request, key: PoolKey, usable: BoolArray, share: FloatArray, at: float
    ) -> AggregatedCandidates:
        """The decode instances of a pool."""
        view, pool = self._view, self._view.decode[key]
        # The last token is always computed: its output is the first logits.
        most = max(request.input_tokens - 1, 0)
        hit_tokens = view.caches.reusable_tokens(request, key[0], pool.ids, most)
        candidates = self._candidates(request, key, pool, hit_tokens, usable)
        prefill_s = self._prefill_s(key, request.input_tokens, hit_tokens)
        return AggregatedCandidates(
            candidates,
            pool.prompts_s(at),
            prefill_s - pool.shared_base_s(),
            pool.chunks(request.input_tokens - hit_tokens),
            pool.batch + pool.queued,
            share,
            np.zeros(len(pool.ids)),
            session_s=view.sessions.term_s(request.session, "decode", pool.names),
        )

    def _kept(
        self, request: Request, key: PoolKey, prefill: PrefillCandidates, usable: BoolArray, share: FloatArray
    ) -> AggregatedCandidates:
        """The prefill instances of a pool, whose times to compute the prompt contain the steps beside it."""
        pool, own, positions = self._view.kept[key], self._view.prefill[key[0]], self._prefill_positions[key]
        candidates = self._candidates(request, key, pool, prefill.hit_tokens[positions], usable)
        tokens = request.input_tokens - prefill.hit_tokens[positions]
        delayed = pool.batch + own.assigned[positions] + own.others[positions]
        return AggregatedCandidates(
            candidates,
            prefill.pending_s[positions],
            prefill.prefill_s[positions] - pool.beside_s(tokens) - pool.shared_base_s(),
            pool.chunks(tokens),
            delayed,
            share[positions],
            pool.stretch_s(tokens),
            kept=True,
            session_s=self._view.sessions.term_s(request.session, "decode", pool.names),
        )

    def _candidates(
        self, request: Request, key: PoolKey, pool: DecodePool, hit_tokens: IntArray, usable: BoolArray
    ) -> Candidates:
        view = self._view
        candidates = pool.candidates(request, view.models[key[0]], hit_tokens, view.options.reserve_bytes, usable)
        return msgspec.structs.replace(candidates, kv_bytes=np.zeros(len(pool.ids)))

    def _prefill_s(self, key: PoolKey, tokens: int, hit_tokens: IntArray) -> FloatArray:
        times = self._times[key]
        if len(times) == 1:
            return prefill_each_s(times[0][0], tokens, hit_tokens)
        seconds = np.empty(len(hit_tokens))
        for time, members in times:
            seconds[members] = prefill_each_s(time, tokens, hit_tokens[members])
        return seconds
