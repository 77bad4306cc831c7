"""The control core: events in, decisions out; it owns the view of the cluster, but no clock, socket or chance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvroute import llm
from kvroute.control.pool import DecodePool, PrefillPool
from kvroute.oracle import NetworkOracle
from kvroute.policies import (
    DecodePolicy,
    PrefillCandidates,
    PrefillPolicy,
    TopologyConstraint,
    constrain,
    prefill_mask,
)
from kvroute.prefix import PrefixIndex
from kvroute.timing import prefill_time
from kvroute.topology import Cluster
from kvroute.types import (
    Admitted,
    Arrived,
    CongestionMeasured,
    Decision,
    Decode,
    Event,
    Finished,
    InputError,
    KvEvicted,
    KvStored,
    LinksMeasured,
    Prefill,
    PrefillFinished,
    Reject,
    Request,
    TransferFinished,
)

_ONCE = "tell each step of a request once and in order"


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """What the operator decides once."""

    decode_policy: DecodePolicy
    prefill_policy: PrefillPolicy
    constraint: TopologyConstraint | None = None
    reserve_bytes: float = 0.0
    """KV memory held back on every decode instance (NetKV m_min)."""
    prefill_cache: bool = True
    """Whether prefill instances reuse cached prefixes."""


@dataclass(slots=True)
class _Journey:
    """Where a request stands: what must be given back when it leaves."""

    request: Request
    model: str
    prefill: int
    """Position in the prefill pool, -1 once prefill is over."""
    source: int = -1
    target: int = -1
    """Indices in the cluster."""
    position: int = -1
    """Position in the decode pool, -1 before the decision."""
    need_bytes: float = 0.0
    in_transfer: bool = False
    admitted: bool = False


class Control:
    """The simulator calls `handle` in virtual time, the gateway in real time. A log of events is a test."""

    def __init__(self, cluster: Cluster, settings: ControlSettings, oracle: NetworkOracle) -> None:
        """Start with an idle, empty cluster.

        Args:
            cluster: instances (ascending by name), tiers and timings.
            settings: policies and limits.
            oracle: the network as the router knows it; this core feeds it its own transfers.
        """
        self.oracle = oracle
        self.prefix = PrefixIndex(len(cluster.instances))
        self._cluster = cluster
        self._settings = settings
        self._journeys: dict[int, _Journey] = {}
        names = sorted({instance.model for instance in cluster.instances})
        self._models = {name: llm.model(name) for name in names}
        self._default_model = names[0] if len(names) == 1 else ""
        self._decode = {name: self._decode_pool(name) for name in names}
        self._prefill = {name: self._prefill_pool(name) for name in names}
        self._prefill_allowed = {name: self._allowed_prefill(name) for name in names}
        self._handlers: dict[type, Callable[[Any], tuple[Decision, ...]]] = {
            Arrived: self._arrived,
            PrefillFinished: self._prefill_finished,
            TransferFinished: self._transfer_finished,
            Admitted: self._admitted,
            Finished: self._finished,
            KvStored: self._kv_stored,
            KvEvicted: self._kv_evicted,
            CongestionMeasured: self._congestion_measured,
            LinksMeasured: self._links_measured,
        }

    def handle(self, event: Event) -> tuple[Decision, ...]:
        """Take note of one event; return what to do now (often nothing).

        Raises:
            InputError: an event that cannot be: a request that arrives twice, is not in flight or is not that far, an
                instance that the cluster does not have. The view stays as it was.
        """
        return self._handlers[type(event)](event)

    @property
    def in_flight(self) -> int:
        """Requests that have arrived and not left."""
        return len(self._journeys)

    def _decode_pool(self, model: str) -> DecodePool:
        members = [
            (index, instance)
            for index, instance in enumerate(self._cluster.instances)
            if instance.model == model and instance.role != "prefill"
        ]
        return DecodePool.of(members, self._cluster.timing)

    def _prefill_pool(self, model: str) -> PrefillPool:
        members = [
            (index, instance)
            for index, instance in enumerate(self._cluster.instances)
            if instance.model == model and instance.role != "decode"
        ]
        return PrefillPool(
            names=tuple(instance.name for _, instance in members),
            ids=np.array([index for index, _ in members], dtype=np.int64),
            timing=tuple(instance.timing for _, instance in members),
            times={name: prefill_time(spec.prefill) for name, spec in self._cluster.timing.items()},
            busy_until_s=np.zeros(len(members)),
            assigned=np.zeros(len(members), dtype=np.int64),
            position={index: position for position, (index, _) in enumerate(members)},
        )

    def _allowed_prefill(self, model: str) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
        """Prefill instances with a decode instance in their domain; None where nothing is ruled out."""
        constraint = self._settings.constraint
        if constraint is None:
            return None
        prefill, decode = self._prefill[model].ids, self._decode[model].ids
        mask = prefill_mask(constraint, self._cluster.tier, prefill, decode)
        return None if mask.all() or not mask.any() else mask

    def _arrived(self, event: Arrived) -> tuple[Decision, ...]:
        request, at = event.request, event.at
        if request.id in self._journeys:
            raise InputError(f"request {request.id} has already arrived", mend="give every request its own id")
        name = request.model or self._default_model
        pool = self._prefill.get(name)
        if pool is None or not len(pool.ids) or not len(self._decode[name].ids):
            what = f"model {name!r}" if name else "a request without a model, for there are several"
            return (Reject(request.id, f"no prefill and decode instances serve {what}"),)
        candidates = self._prefill_candidates(pool, request, at)
        choice = self._settings.prefill_policy.choose(request, candidates, pool.decisions)
        if isinstance(choice, Reject):
            return (choice,)
        pool.decisions += 1
        cached_tokens = int(candidates.hit_tokens[choice.index])
        pool.book(choice.index, at, float(candidates.prefill_s[choice.index]))
        self._journeys[request.id] = _Journey(request, name, choice.index, source=int(pool.ids[choice.index]))
        return (Prefill(request.id, pool.names[choice.index], cached_tokens, choice.terms),)

    def _prefill_candidates(self, pool: PrefillPool, request: Request, at: float) -> PrefillCandidates:
        if self._settings.prefill_cache and request.blocks:
            # The last token is always computed: its output is the first logits.
            most = max(request.input_tokens - 1, 0)
            hit_tokens = np.minimum(self.prefix.match(request.blocks)[pool.ids] * request.block_tokens, most)
        else:
            hit_tokens = np.zeros(len(pool.ids), dtype=np.int64)
        prefill_s = pool.prefill_s(request.input_tokens, hit_tokens)
        allowed = self._prefill_allowed[request.model or self._default_model]
        return PrefillCandidates(pool.names, pool.pending_s(at), hit_tokens, prefill_s, allowed)

    def _prefill_finished(self, event: PrefillFinished) -> tuple[Decision, ...]:
        journey = self._journey(event.request_id)
        if journey.prefill < 0:
            raise InputError(f"prefill of request {event.request_id} has already finished", mend=_ONCE)
        request, at = journey.request, event.at
        self._prefill[journey.model].release(journey.prefill, at)
        journey.prefill = -1
        pool = self._decode[journey.model]
        if request.blocks:
            hit_tokens = np.minimum(
                self.prefix.match(request.blocks)[pool.ids] * request.block_tokens, request.input_tokens
            )
        else:
            hit_tokens = np.zeros(len(pool.ids), dtype=np.int64)
        candidates = pool.candidates(request, self._models[journey.model], hit_tokens, self._settings.reserve_bytes)
        costs = self.oracle.costs(journey.source, pool.ids, at)
        policy, constraint = self._settings.decode_policy, self._settings.constraint
        if constraint is None:
            choice = policy.choose(request, candidates, costs, pool.decisions)
        else:
            choice = constrain(policy, constraint, request, candidates, costs, pool.decisions)
        if isinstance(choice, Reject):
            del self._journeys[event.request_id]
            return (choice,)
        pool.decisions += 1
        position = choice.index
        journey.position, journey.target, journey.in_transfer = position, int(pool.ids[position]), True
        journey.need_bytes = float(candidates.need_bytes[position]) - self._settings.reserve_bytes
        pool.free_kv_bytes[position] -= journey.need_bytes
        pool.queued[position] += 1
        self.oracle.transfer_started(journey.source, journey.target)
        return (
            Decode(
                request_id=request.id,
                source=self._cluster.instances[journey.source].name,
                target=pool.names[position],
                tier=int(costs.tier[position]),
                kv_bytes=float(candidates.kv_bytes[position]),
                need_bytes=journey.need_bytes,
                hit_tokens=int(hit_tokens[position]),
                terms=choice.terms,
            ),
        )

    def _transfer_finished(self, event: TransferFinished) -> tuple[Decision, ...]:
        journey = self._journey(event.request_id)
        if not journey.in_transfer:
            raise InputError(f"request {event.request_id} has no transfer under way", mend=_ONCE)
        self._end_transfer(journey)
        if event.free_kv_bytes is not None:
            self._decode[journey.model].free_kv_bytes[journey.position] = event.free_kv_bytes
        return ()

    def _end_transfer(self, journey: _Journey) -> None:
        if journey.in_transfer:
            journey.in_transfer = False
            self.oracle.transfer_finished(journey.source, journey.target)

    def _admitted(self, event: Admitted) -> tuple[Decision, ...]:
        journey = self._journey(event.request_id)
        if journey.position < 0 or journey.admitted:
            raise InputError(f"request {event.request_id} does not wait for a decode slot", mend=_ONCE)
        pool = self._decode[journey.model]
        pool.queued[journey.position] -= 1
        pool.batch[journey.position] += 1
        journey.admitted = True
        return ()

    def _finished(self, event: Finished) -> tuple[Decision, ...]:
        journey = self._journey(event.request_id)
        del self._journeys[event.request_id]
        if journey.prefill >= 0:
            self._prefill[journey.model].release(journey.prefill, event.at)
        if journey.position < 0:
            return ()
        self._end_transfer(journey)
        pool, position = self._decode[journey.model], journey.position
        if journey.admitted:
            pool.batch[position] -= 1
        else:
            pool.queued[position] -= 1
        pool.free_kv_bytes[position] += journey.need_bytes
        if event.free_kv_bytes is not None:
            pool.free_kv_bytes[position] = event.free_kv_bytes
        return ()

    def _journey(self, request_id: int) -> _Journey:
        journey = self._journeys.get(request_id)
        if journey is None:
            mend = "it has not arrived, was rejected or has left"
            raise InputError(f"request {request_id} is not in flight", mend=mend)
        return journey

    def _kv_stored(self, event: KvStored) -> tuple[Decision, ...]:
        self.prefix.store(self._cluster.index(event.instance), event.blocks)
        return ()

    def _kv_evicted(self, event: KvEvicted) -> tuple[Decision, ...]:
        self.prefix.evict(self._cluster.index(event.instance), event.blocks, event.keep)
        return ()

    def _congestion_measured(self, event: CongestionMeasured) -> tuple[Decision, ...]:
        self.oracle.congestion_measured(event.at, event.per_tier)
        return ()

    def _links_measured(self, event: LinksMeasured) -> tuple[Decision, ...]:
        self.oracle.links_measured(event.at, event.utilisation)
        return ()
