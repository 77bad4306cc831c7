"""The router's view of the cluster: usable instances, cached prefixes and network costs. It books nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from kvroute import llm
from kvroute.control.affinity.adapters import LoadedAdapters
from kvroute.control.affinity.sessions import Sessions
from kvroute.control.booking import Avoided
from kvroute.control.settings import CoreSpec
from kvroute.control.state.caches import PrefixCaches
from kvroute.control.state.policy_states import PolicyStates
from kvroute.control.state.pool import DecodePool, PrefillPool
from kvroute.control.state.storage_reads import StorageReads
from kvroute.llm import Model
from kvroute.oracle import NetworkOracle
from kvroute.policies import PrefillCandidates, prefill_mask
from kvroute.timing import prefill_time
from kvroute.topology import Cluster
from kvroute.types import (
    BoolArray,
    Choice,
    InstanceMeasured,
    IntArray,
    KvProtocol,
    Reject,
    Request,
    Role,
)

PoolKey = tuple[str, KvProtocol]
"""Model and protocol; instances with the same pair can transfer KV to each other."""


@dataclass(frozen=True, slots=True)
class CountedLoad:
    """Load of one instance as the router counts it, for displays."""

    queued: int
    """Requests that wait for or are in prefill here, or that wait for a decode slot here."""
    pending_s: float
    """Prefill work ahead, in seconds."""
    storage_queue_s: float | None = None
    """Reads in the storage queue of its node, in seconds; None: the cluster has no store."""


class MovedPositions(NamedTuple):
    """Position of each earlier pool member in the pools of the next cluster; -1: it has left."""

    prefill: dict[str, IntArray]
    decode: dict[PoolKey, IntArray]
    kept: dict[PoolKey, IntArray]


class ClusterView:
    """Pools by model and protocol, with health. Its `choose_*` methods change nothing; only its setters do."""

    def __init__(
        self, cluster: Cluster, settings: CoreSpec, oracle: NetworkOracle, caches: PrefixCaches | None = None
    ) -> None:
        """Start without load. Args: `caches` of a cluster that this one may follow (`take_over`); None: empty ones."""
        self.oracle, self.cluster, self.settings = oracle, cluster, settings
        self.options = settings.options
        self.states = PolicyStates(settings.decode_policy, settings.shadow_policy, cluster, oracle)
        members = list(enumerate(cluster.instances))
        self.models: dict[str, Model] = {
            name: llm.model(name) for name in sorted({instance.model for _, instance in members})
        }
        self.caches = caches or PrefixCaches(cluster.instances, self.models, settings.options.cache_block_tokens)
        self.adapters = LoadedAdapters(settings.options.adapters)
        """LoRA adapters by instance; only events and bookings change them."""
        self.sessions = Sessions(settings.options.session_bonus_s)
        """The last instances of each session; only bookings change them."""
        self.decode_ids = np.array([index for index, instance in members if instance.role == "decode"], dtype=np.int64)
        """Indices in the cluster of the decode instances."""
        self.reads = StorageReads(cluster) if cluster.file.storage is not None else None
        """Reads from the store; None: the cluster has no store."""
        times = {name: prefill_time(spec.prefill) for name, spec in cluster.timing.items()}
        turns = settings.switchable
        prefills = [m for m in members if m[1].role != "decode" or m[0] in turns]
        decodes = [m for m in members if m[1].role != "prefill" or m[0] in turns]
        self.prefill = {
            name: PrefillPool.of([m for m in prefills if m[1].model == name], times) for name in self.models
        }
        keys = sorted({(i.model, i.protocol) for _, i in decodes})
        self.decode: dict[PoolKey, DecodePool] = {
            key: DecodePool.of([m for m in decodes if (m[1].model, m[1].protocol) == key], cluster.timing)
            for key in keys
        }
        self.kept = self._kept()
        """Prefill instances that can go on to decode a request, as decode pools; a KV cache is never sent to them."""
        self.kept_positions: dict[PoolKey, IntArray] = {
            key: np.array([self.prefill[key[0]].position[index] for index in pool.ids.tolist()], dtype=np.int64)
            for key, pool in self.kept.items()
        }
        """Position in the prefill pool of each instance of a pool of `kept`."""
        pools: list[PrefillPool | DecodePool] = [
            *self.prefill.values(),
            *self.decode.values(),
            *self.kept.values(),
        ]
        for pool in pools:
            pool.slow_start.window_s = settings.options.slow_start_s
        self._healthy = [True] * len(members)
        self.roles: list[Role | None] = [instance.role for _, instance in members]
        """Role that each instance serves now; None: it is being drained before a role switch."""
        self._only_model = next(iter(self.models)) if len(self.models) == 1 else ""
        self._served = {name for name, _ in self.decode}
        self._allowed: dict[str, BoolArray | None] = {name: self._allowed_prefill(name) for name in self.models}
        for index in sorted(turns):
            self._settle(index)

    def _kept(self) -> dict[PoolKey, DecodePool]:
        if self.options.offload is not None or self.reads is not None:
            return {}
        members = [
            (index, instance)
            for index, instance in enumerate(self.cluster.instances)
            if instance.role == "prefill" and instance.traits.prefill_decodes
        ]
        keys = sorted({(instance.model, instance.protocol) for _, instance in members})
        timing = self.cluster.timing
        return {key: DecodePool.of([m for m in members if (m[1].model, m[1].protocol) == key], timing) for key in keys}

    def decode_pool_of(self, index: int) -> DecodePool | None:
        """The pool in which decodes on an instance are booked; None if it does not decode."""
        instance = self.cluster.instances[index]
        key = (instance.model, instance.protocol)
        pools = (self.decode.get(key), self.kept.get(key))
        return next((pool for pool in pools if pool is not None and index in pool.position), None)

    def take_over(self, old: ClusterView, before: IntArray) -> MovedPositions:
        """Continue with the state of the view of the cluster before, except oracle and policy states.

        Args:
            old: that view, which must not be used any more; this one was made with its caches.
            before: [n] earlier index of each instance; -1: it is new, and therefore down.
        """
        self.caches.change(self.cluster.instances, self.models, before)
        stay = {i.name for i, index in zip(self.cluster.instances, before, strict=True) if index >= 0}
        self.adapters.take_over(old.adapters, stay)
        self.sessions.take_over(old.sessions)
        healthy = [*old._healthy, False]
        self._healthy = [healthy[index] for index in before.tolist()]
        prefill, decode, kept = dict[str, IntArray](), dict[PoolKey, IntArray](), dict[PoolKey, IntArray]()
        for name, pool in self.prefill.items():
            if name in old.prefill:
                prefill[name] = pool.take_over(old.prefill[name], before)
            else:
                pool.up[:] = False
        for pools, former, moved in ((self.decode, old.decode, decode), (self.kept, old.kept, kept)):
            for key, takers in pools.items():
                if key in former:
                    moved[key] = takers.take_over(former[key], before)
                else:
                    takers.up[:] = takers.open = False
        self._allowed = {name: self._allowed_prefill(name) for name in self.models}
        return MovedPositions(prefill, decode, kept)

    def model_name(self, request: Request) -> str | None:
        """The model that serves a request. None if no instance serves it, or if it names none and there are several."""
        return self.served_name(request.model)

    def served_name(self, model: str) -> str | None:
        """The model with this name, as in `model_name`; empty: the only one."""
        name = model or self._only_model
        return name if name in self._served else None

    def set_up(self, index: int, up: bool, at: float, *, returned: bool = False) -> None:
        """Set whether an instance takes requests; `returned`: its share of them rises over the slow-start window."""
        self._healthy[index] = up
        self._settle(index)
        instance = self.cluster.instances[index]
        for pool in (self.prefill[instance.model], self.decode_pool_of(index)):
            if pool is not None and index in pool.position:
                if not up:
                    pool.slow_start.left(pool.position[index])
                elif returned:
                    pool.slow_start.returned(pool.position[index], at)

    def healthy(self, index: int) -> bool:
        """Whether an instance takes requests, whatever its role."""
        return self._healthy[index]

    def set_role(self, index: int, role: Role | None) -> None:
        """Set the role of a switchable instance; None: it takes no new requests while it is drained."""
        self.roles[index] = role
        self._settle(index)

    def _settle(self, index: int) -> None:
        """Open to an instance that is up the pools of its role, and no others."""
        instance, role, up = self.cluster.instances[index], self.roles[index], self._healthy[index]
        prefill, decode = self.prefill[instance.model], self.decode_pool_of(index)
        if index in prefill.position:
            prefill.up[prefill.position[index]] = up and role in ("prefill", "both")
        if decode is not None:
            kept = decode in self.kept.values()
            decode.set_up(decode.position[index], up and (kept or role in ("decode", "both")))
        self._allowed[instance.model] = self._allowed_prefill(instance.model)

    def loads(self, at: float) -> dict[str, CountedLoad]:
        """Load of every instance, by name."""
        result: dict[str, CountedLoad] = {}
        for pool in self.prefill.values():
            rows = zip(pool.names, pool.assigned.tolist(), pool.pending_s(at).tolist(), strict=True)
            result |= {name: CountedLoad(assigned, pending_s) for name, assigned, pending_s in rows}
        for decode in (*self.decode.values(), *self.kept.values()):
            for name, queued, prompts_s in zip(
                decode.names, decode.queued.tolist(), decode.prompts_s(at).tolist(), strict=True
            ):
                before = result.get(name, CountedLoad(0, 0.0))
                result[name] = CountedLoad(queued + before.queued, before.pending_s + prompts_s)
        if self.reads is not None:
            for instance, queue_s in zip(self.cluster.instances, self.reads.queue_s().tolist(), strict=True):
                result[instance.name] = replace(result[instance.name], storage_queue_s=queue_s)
        return result

    def measured(self, index: int, event: InstanceMeasured) -> None:
        """Store the load that an engine reports."""
        instance = self.cluster.instances[index]
        prefill, decode = self.prefill[instance.model], self.decode_pool_of(index)
        if decode is not None and decode is self.kept.get((instance.model, instance.protocol)):
            # Requests that stay to decode are not work ahead of a prompt; the rest of the load is prefills.
            position = decode.position[index]
            batch, queued = int(decode.batch[position]), int(decode.queued[position])
            decode.measured(position, batch, queued, event.kv_used_share)
            prefill.measured(prefill.position[index], max(event.running - batch, 0), event.waiting)
            return
        if index in prefill.position:
            prefill.measured(prefill.position[index], event.running, event.waiting)
        if decode is not None:
            decode.measured(decode.position[index], event.running, event.waiting, event.kv_used_share)

    def _allowed_prefill(self, model: str) -> BoolArray | None:
        """Mask of the prefill instances that are up and have a decode instance to send KV to; None if all are allowed.

        With a constraint, that decode instance must be inside the domain, if any prefill instance has one there. The
        excluded prefill instances could only be used if a decode instance came up later.
        """
        pool = self.prefill[model]
        instances = [self.cluster.instances[index] for index in pool.ids.tolist()]
        serves_both = np.array([instance.role == "both" for instance in instances], dtype=np.bool_)
        served, inside = serves_both.copy(), serves_both.copy()
        constraint = self.settings.constraint
        for (name, protocol), decode in self.decode.items():
            if name != model:
                continue
            takers = decode.ids[decode.up & decode.partner]
            speaks = np.array([instance.protocol == protocol for instance in instances], dtype=np.bool_) & ~serves_both
            served |= speaks & bool(len(takers))
            if constraint is not None:
                inside |= speaks & prefill_mask(constraint, self.cluster.tier, pool.ids, takers)
        mask: BoolArray = pool.up & (served if constraint is None else inside)
        if constraint is not None and not mask.any():
            mask = pool.up & served
        return None if mask.all() else mask

    def prefill_candidates(self, request: Request, model: str, at: float, avoid: Avoided) -> PrefillCandidates:
        """The prefill pool as the candidates of a request. Instances that have failed it are allowed only if no other
        is left, beginning with the one that failed first. A prompt takes longer beside requests that decode there."""
        pool = self.prefill[model]
        if self.options.prefill_cache and request.blocks:
            # The last token is always computed: its output is the first logits.
            hit_tokens = self.caches.reusable_tokens(request, model, pool.ids, max(request.input_tokens - 1, 0))
        else:
            hit_tokens = np.zeros(len(pool.ids), dtype=np.int64)
        allowed = self._allowed[model]
        usable = allowed
        for shunned in avoid.rounds() if avoid else ():
            allowed = ~np.isin(pool.ids, shunned) & (True if usable is None else usable)
            if allowed.any():
                break
        if pool.slow_start.started:
            usable = pool.up if allowed is None else allowed
            rest = pool.slow_start.without_limited(usable, pool.sites, at)
            allowed = allowed if rest is None else rest
        prefill_s = pool.prefill_s(request.input_tokens, hit_tokens)
        for key, kept in self.kept.items():
            if key[0] == model and kept.batch.any():
                positions = self.kept_positions[key]
                prefill_s[positions] += kept.beside_s(request.input_tokens - hit_tokens[positions])
        queue_s = self.reads.queue_s()[pool.ids] if self.reads is not None else None
        return PrefillCandidates(pool.names, pool.pending_s(at), hit_tokens, prefill_s, allowed, queue_s)

    def choose_prefill(self, request: Request, model: str, candidates: PrefillCandidates) -> Choice | Reject:
        """Let the policy choose, or return a Reject with the reason why no instance can be chosen."""
        pool = self.prefill[model]
        if candidates.allowed is not None and not candidates.allowed.any():
            who = "prefill instance is up" if not pool.up.any() else "decode instance is up"
            return Reject(request.id, f"no {who if len(pool.ids) else 'prefill instance exists'}")
        return self.settings.prefill_policy.choose(request, candidates, pool.decisions)
