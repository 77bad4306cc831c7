"""Chooses decode instances by the policies, a topology constraint, slow start and the preferences of a request.

It books nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from kvroute.control.booking import Avoided
from kvroute.control.offers import DecodePick, Feature
from kvroute.control.state.pool import DecodePool
from kvroute.control.view import ClusterView, PoolKey
from kvroute.oracle import at_home
from kvroute.policies import DecodePolicy, constrain, preferred
from kvroute.types import SAME_NODE, TRAITS, BoolArray, Candidates, Choice, FloatArray, NetworkCosts, Reject, Request


class DecodeChoice:
    """The decode instances of a view as the candidates of a request, and the choice among them. It changes nothing."""

    def __init__(self, view: ClusterView, features: Sequence[Feature[Any]]) -> None:
        """Args: `features`: those that add terms to decode instances."""
        self._features = features
        self._view, self._settings, self._options = view, view.settings, view.options

    def choose(self, request: Request, key: PoolKey, source: int, at: float, avoid: Avoided) -> DecodePick | Reject:
        """Choose the decode instance for a request whose KV is (or will be) on instance `source`."""
        pool = self._view.decode[key]
        usable = None if pool.open and not avoid else self._usable(pool, source, avoid)
        if usable is not None and not usable.any():
            return Reject(request.id, "no decode instance is up")
        hit_tokens = self._view.caches.hit_tokens(request, pool.ids, request.input_tokens)
        reserve_bytes = self._options.reserve_bytes
        refused: Reject | None = None
        outside: DecodePick | None = None
        for mask in self._slowly(pool, usable, at) if pool.slow_start.started else (usable,):
            candidates = pool.candidates(request, self._view.models[key[0]], hit_tokens, reserve_bytes, mask)
            candidates = pool.with_prompts(candidates, at)
            if mask is not usable and not (candidates.need_bytes <= candidates.free_kv_bytes).any():
                continue
            choice = self.by_policy(self._settings.decode_policy, request, key, source, candidates, at, mask)
            if isinstance(choice, Reject):
                refused = choice
                continue
            tier = int(self._view.cluster.tier[source, pool.ids[choice.index]])
            pick = DecodePick(choice, candidates, tier, mask)
            if not self._falls_back(tier):
                return pick
            outside = outside or pick
        if outside is not None:
            return outside
        assert refused is not None
        return refused

    def _falls_back(self, tier: int) -> bool:
        """Whether a transfer of this tier leaves the domain under `fallback`: slow start is no reason for that."""
        constraint = self._settings.constraint
        return (
            constraint is not None
            and (constraint.enforcement, constraint.weight) == ("preferred", None)
            and tier > constraint.tier_max
        )

    def _slowly(self, pool: DecodePool, usable: BoolArray | None, at: float) -> tuple[BoolArray | None, ...]:
        """The masks to try in order: usable instances without those that slow start excludes, then all usable
        instances. Slow start therefore never causes a rejection."""
        if not pool.slow_start.started:
            return (usable,)
        rest = pool.slow_start.without_limited(pool.up & pool.partner if usable is None else usable, pool.sites, at)
        return (usable,) if rest is None else (rest, usable)

    def by_policy(
        self,
        policy: DecodePolicy,
        request: Request,
        key: PoolKey,
        source: int,
        candidates: Candidates,
        at: float,
        usable: BoolArray | None,
    ) -> Choice | Reject:
        """The choice of a policy among these candidates of a pool now. `policy`: the acting or the shadow policy;
        `usable` None: all candidates may be chosen."""
        pool = self._view.decode[key]
        state = self._view.states.acting if policy is self._settings.decode_policy else self._view.states.shadow
        costs = self._view.oracle.costs(source, pool.ids, at, own_transfers=state is None)
        if state is not None:
            policy = state.policy(source, pool.ids, costs, at)
        choice = self._constrained(policy, request, candidates, costs, pool.decisions, usable)
        return self._preferred(choice, request, pool)

    def _preferred(self, choice: Choice | Reject, request: Request, pool: DecodePool) -> Choice | Reject:
        """The choice with the terms of features, which no policy has."""
        if isinstance(choice, Reject):
            return choice
        further_s: dict[str, FloatArray] = {}
        for feature in self._features:
            term = feature.decode_term(request, pool.names)
            if term is not None:
                further_s[term[0]] = term[1]
        return preferred(choice, further_s) if further_s else choice

    def choose_aggregated(
        self, request: Request, model: str, at: float, avoid: Avoided
    ) -> tuple[PoolKey, DecodePick] | Reject:
        """Choose the instance that serves a request aggregated: it prefills and decodes, without a KV transfer.

        The instances of a protocol are tried if those of the protocols before are down or full. Those that have failed
        the request come last.
        """
        refused = Reject(request.id, "no decode instance is up")
        keys = [key for key in self._view.decode if key[0] == model]
        for key, shunned in [(key, shunned) for shunned in avoid.rounds() for key in keys]:
            pool = self._view.decode[key]
            usable = pool.up & ~np.isin(pool.ids, shunned)
            if not TRAITS[key[1]].decode_prefills:
                usable &= ~pool.partner
            if not usable.any():
                continue
            hit_tokens = self._view.caches.hit_tokens(request, pool.ids, request.input_tokens)
            for mask in self._slowly(pool, usable, at) if pool.slow_start.started else (usable,):
                candidates = pool.candidates(
                    request, self._view.models[model], hit_tokens, self._options.reserve_bytes, mask
                )
                if mask is not usable and not (candidates.need_bytes <= candidates.free_kv_bytes).any():
                    continue
                candidates = msgspec.structs.replace(candidates, kv_bytes=np.zeros(len(pool.ids)))
                policy = self._settings.decode_policy
                choice = self._roomy(policy, request, candidates, at_home(len(pool.ids)), pool.decisions, mask)
                choice = self._preferred(choice, request, pool)
                if not isinstance(choice, Reject):
                    return key, DecodePick(choice, candidates, SAME_NODE)
                refused = choice
        return refused

    def _usable(self, pool: DecodePool, source: int, avoid: Avoided) -> BoolArray:
        """Mask of the instances that are up and take KV. Those that have failed the request are a last resort."""
        usable: BoolArray = pool.up & pool.partner
        constraint = self._settings.constraint
        fresh = usable
        for shunned in avoid.rounds() if avoid else ():
            fresh = eligible = usable & ~np.isin(pool.ids, shunned)
            if constraint is not None and constraint.enforcement == "required":
                eligible = fresh & (self._view.cluster.tier[source].take(pool.ids) <= constraint.tier_max)
            if eligible.any():
                break
        return fresh

    def _constrained(
        self,
        policy: DecodePolicy,
        request: Request,
        candidates: Candidates,
        costs: NetworkCosts,
        turn: int,
        usable: BoolArray | None,
    ) -> Choice | Reject:
        constraint = self._settings.constraint
        if constraint is None:
            return self._roomy(policy, request, candidates, costs, turn, usable)
        choice = constrain(policy, constraint, request, candidates, costs, turn)
        if not isinstance(choice, Reject):
            return choice
        inside = costs.tier <= constraint.tier_max
        required = constraint.enforcement == "required"
        if required and inside.any() and usable is not None and not (inside & usable).any():
            where = f"in the prefill instance's {constraint.level}"
            return Reject(request.id, f"no decode instance {where} is up, and {constraint} allows no other")
        if not self._options.overcommit:
            return choice
        room = _with_room(candidates, usable)
        return constrain(policy, constraint, request, room, costs, turn)

    def _roomy(
        self,
        policy: DecodePolicy,
        request: Request,
        candidates: Candidates,
        costs: NetworkCosts,
        turn: int,
        usable: BoolArray | None,
    ) -> Choice | Reject:
        choice = policy.choose(request, candidates, costs, turn)
        if not isinstance(choice, Reject) or not self._options.overcommit:
            return choice
        return policy.choose(request, _with_room(candidates, usable), costs, turn)


def _with_room(candidates: Candidates, usable: BoolArray | None) -> Candidates:
    """The candidates as if every usable instance had room."""
    needs = np.minimum(candidates.need_bytes, candidates.free_kv_bytes)
    return msgspec.structs.replace(candidates, need_bytes=needs if usable is None else np.where(usable, needs, np.inf))
