"""The control core: events in, decisions out; it owns the view of the cluster, but no clock, socket or chance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvroute.control.pool import DecodePool
from kvroute.control.view import ControlSettings, DecodePick, Load, PoolKey, View
from kvroute.oracle import NetworkOracle
from kvroute.policies import PrefillCandidates
from kvroute.prefix import PrefixIndex
from kvroute.topology import Cluster
from kvroute.types import (
    Admitted,
    Arrived,
    Candidates,
    Choice,
    CongestionMeasured,
    Decision,
    Decode,
    DecodeFailed,
    Event,
    Finished,
    InputError,
    InstanceDown,
    InstanceMeasured,
    InstanceUp,
    KvCleared,
    KvEvicted,
    KvStored,
    LinksMeasured,
    Prefill,
    PrefillFailed,
    PrefillFinished,
    Reject,
    Request,
    Terms,
    TransferFinished,
    TransferMeasured,
)

_ONCE = "tell each step of a request once and in order"
_JOINT_WIDTH = 4
"""Prefill instances whose partners are priced when both legs are chosen at once."""


@dataclass(slots=True)
class _Journey:
    """Where a request stands: what must be given back when it leaves."""

    request: Request
    model: str
    prefill: int = -1
    """Position in the prefill pool, -1 once prefill is over."""
    prefill_s: float = 0.0
    """Booked there."""
    source: int = -1
    target: int = -1
    """Indices in the cluster."""
    pool: DecodePool | None = None
    position: int = -1
    """Position in the decode pool, -1 before the decision."""
    need_bytes: float = 0.0
    in_transfer: bool = False
    admitted: bool = False
    avoid: list[int] = field(default_factory=list)
    """Instances that have failed this request, the latest last."""

    def shun(self, index: int) -> None:
        """This instance has failed it now."""
        self.avoid = [each for each in self.avoid if each != index] + [index]


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
        self._cluster = cluster
        self._view = View(cluster, settings, oracle)
        self._journeys: dict[int, _Journey] = {}
        self._handlers: dict[type, Callable[[Any], tuple[Decision, ...]]] = {
            Arrived: self._arrived,
            PrefillFinished: self._prefill_finished,
            PrefillFailed: self._prefill_failed,
            TransferFinished: self._transfer_finished,
            Admitted: self._admitted,
            DecodeFailed: self._decode_failed,
            Finished: self._finished,
            KvStored: self._kv_stored,
            KvEvicted: self._kv_evicted,
            KvCleared: self._kv_cleared,
            InstanceDown: self._instance_down,
            InstanceUp: self._instance_up,
            InstanceMeasured: self._instance_measured,
            TransferMeasured: self._transfer_measured,
            CongestionMeasured: self._congestion_measured,
            LinksMeasured: self._links_measured,
        }

    def handle(self, event: Event) -> tuple[Decision, ...]:
        """Take note of one event; return what to do now (often nothing).

        `Arrived` gives a `Prefill`; with a `Decode` beside it where both legs start at once, or where the instance
        serves the request alone (source and target are then the same); a lone `Decode` for a request of one leg.
        `PrefillFinished` gives the `Decode` if there was none. The two failures give what replaces the leg. A
        `Reject` ends the request: nothing of it is left, and no further event about it is due.

        Raises:
            InputError: an event that cannot be: a request that arrives twice, is not in flight or is not that far, an
                instance that the cluster does not have. The view stays as it was.
        """
        return self._handlers[type(event)](event)

    @property
    def in_flight(self) -> int:
        """Requests that have arrived and not left."""
        return len(self._journeys)

    def loads(self, at: float) -> dict[str, Load]:
        """What is counted on every instance, by name; changes nothing."""
        return self._view.loads(at)

    @property
    def prefix(self) -> PrefixIndex:
        """What is known of cached prefixes, by index in the cluster."""
        return self._view.prefix

    def _arrived(self, event: Arrived) -> tuple[Decision, ...]:
        request = event.request
        if request.id in self._journeys:
            raise InputError(f"request {request.id} has already arrived", mend="give every request its own id")
        model = self._view.model_name(request)
        if model is None:
            what = f"model {request.model!r}" if request.model else "a request without a model, for there are several"
            return (Reject(request.id, f"no prefill and decode instances serve {what}"),)
        return self._start(_Journey(request, model), event.at)

    def _start(self, journey: _Journey, at: float) -> tuple[Decision, ...]:
        """Choose the first leg, and the second where both are due; the journey is kept unless it is rejected."""
        decisions = self._alone(journey) if journey.request.one_leg else self._route(journey, at)
        if isinstance(decisions[-1], Reject):
            self._release_prefill(journey, at)
            self._journeys.pop(journey.request.id, None)
            return decisions[-1:]
        self._journeys[journey.request.id] = journey
        return decisions

    def _route(self, journey: _Journey, at: float) -> tuple[Decision, ...]:
        request, model, view = journey.request, journey.model, self._view
        candidates = view.prefill_candidates(request, model, at, journey.avoid)
        choice = view.choose_prefill(request, model, candidates)
        if isinstance(choice, Reject):
            return (choice,)
        pool = view.prefill[model]
        pick: DecodePick | Reject | None = None
        if self._cluster.instances[int(pool.ids[choice.index])].protocol == "sglang":
            choice, pick = self._jointly(journey, at, candidates, choice)
        pool.decisions += 1
        index = int(pool.ids[choice.index])
        journey.prefill, journey.source = choice.index, index
        journey.prefill_s = float(candidates.prefill_s[choice.index])
        pool.book(choice.index, at, journey.prefill_s)
        cached_tokens = int(candidates.hit_tokens[choice.index])
        prefill = Prefill(request.id, pool.names[choice.index], cached_tokens, choice.terms)
        instance = self._cluster.instances[index]
        if instance.role == "both":
            return (prefill, self._stay(journey, (model, instance.protocol), index))
        if pick is None:
            return (prefill,)
        return (prefill, pick if isinstance(pick, Reject) else self._go(journey, pick))

    def _jointly(
        self, journey: _Journey, at: float, candidates: PrefillCandidates, choice: Choice
    ) -> tuple[Choice, DecodePick | Reject | None]:
        """Both legs at once: of the few cheapest prefill instances the one whose whole way is shortest, where both
        policies price in seconds; else the cheapest one and its best partner. One whose partners are full is passed by;
        those who decide later have no price here, and are taken where nobody else can be."""
        pool, terms = self._view.prefill[journey.model], choice.terms
        usable: list[tuple[int, DecodePick]] = []
        later: Choice | None = None
        refused: Reject | None = None
        in_seconds = terms.unit == "s"
        for i in terms.cost.argsort(kind="stable").tolist():
            if not terms.feasible[i]:
                continue
            pick = self._partner(journey, at, i)
            if isinstance(pick, Reject):
                refused = refused or pick
                continue
            if pick is None:
                later = later or Choice(i, terms)
                continue
            usable.append((i, pick))
            in_seconds = in_seconds and pick.choice.terms.unit == "s"
            if len(usable) == (_JOINT_WIDTH if in_seconds else 1):
                break
        if not usable:
            return (later, None) if later else (choice, refused)
        if not in_seconds:
            return Choice(usable[0][0], terms), usable[0][1]
        decode_s = [float(pick.choice.terms.cost[pick.choice.index]) for _, pick in usable]
        prefill_s = [float(candidates.pending_s[i] + candidates.prefill_s[i]) for i, _ in usable]
        whole_s = np.array(prefill_s) + np.array(decode_s)
        best = int(whole_s.argmin())
        parts = {"finish_s": np.array(prefill_s), "decode_path_s": np.array(decode_s)}
        names = tuple(pool.names[i] for i, _ in usable)
        joint = Terms(names, whole_s, np.ones(len(usable), dtype=np.bool_), parts)
        return Choice(usable[best][0], joint), usable[best][1]

    def _partner(self, journey: _Journey, at: float, position: int) -> DecodePick | Reject | None:
        """Who would decode after this prefill instance; None where it decodes itself or decides later."""
        index = int(self._view.prefill[journey.model].ids[position])
        instance = self._cluster.instances[index]
        if instance.role == "both" or instance.protocol != "sglang":
            return None
        key = (journey.model, instance.protocol)
        return self._view.choose_decode(journey.request, key, index, at, journey.avoid)

    def _alone(self, journey: _Journey) -> tuple[Decision, ...]:
        found = self._view.choose_alone(journey.request, journey.model, journey.avoid)
        if isinstance(found, Reject):
            return (found,)
        key, pick = found
        pool = self._view.decode[key]
        journey.source = int(pool.ids[pick.choice.index])
        return (self._book(journey, pool, pick.choice.index, pick.candidates, pick.tier, pick.choice.terms),)

    def _stay(self, journey: _Journey, key: PoolKey, index: int) -> Decode:
        """Decode where the prefill is."""
        pool, request = self._view.decode[key], journey.request
        hit_tokens = np.zeros(len(pool.ids), dtype=np.int64)
        model = self._view.models[journey.model]
        candidates = pool.candidates(request, model, hit_tokens, self._view.settings.reserve_bytes, None)
        candidates.kv_bytes[:] = 0.0
        return self._book(journey, pool, pool.position[index], candidates, 0, None)

    def _go(self, journey: _Journey, pick: DecodePick) -> Decode:
        """Decode on another instance than the prefill's."""
        instance = self._cluster.instances[journey.source]
        pool = self._view.decode[journey.model, instance.protocol]
        return self._book(journey, pool, pick.choice.index, pick.candidates, pick.tier, pick.choice.terms)

    def _book(
        self,
        journey: _Journey,
        pool: DecodePool,
        position: int,
        candidates: Candidates,
        tier: int,
        terms: Terms | None,
    ) -> Decode:
        pool.decisions += 1
        journey.pool, journey.position, journey.target = pool, position, int(pool.ids[position])
        reserve_bytes = self._view.settings.reserve_bytes
        journey.need_bytes = float(candidates.need_bytes[position]) - reserve_bytes
        pool.book(position, journey.need_bytes)
        if journey.prefill < 0 and journey.source != journey.target:
            self._start_transfer(journey)
        return Decode(
            request_id=journey.request.id,
            source=self._cluster.instances[journey.source].name,
            target=pool.names[position],
            tier=tier,
            kv_bytes=float(candidates.kv_bytes[position]),
            need_bytes=journey.need_bytes,
            hit_tokens=int(candidates.hit_tokens[position]),
            terms=terms,
        )

    def _prefill_finished(self, event: PrefillFinished) -> tuple[Decision, ...]:
        journey = self._journey(event.request_id)
        if journey.prefill < 0:
            raise InputError(f"prefill of request {event.request_id} has already finished", mend=_ONCE)
        self._view.prefill[journey.model].release(journey.prefill, event.at)
        journey.prefill = -1
        if journey.position < 0:
            return (self._choose_decode(journey, event.at),)
        if journey.source != journey.target:
            self._start_transfer(journey)
        return ()

    def _choose_decode(self, journey: _Journey, at: float) -> Decision:
        request, instance = journey.request, self._cluster.instances[journey.source]
        key = (journey.model, instance.protocol)
        pick = self._view.choose_decode(request, key, journey.source, at, journey.avoid)
        if isinstance(pick, Reject):
            del self._journeys[request.id]
            return pick
        return self._go(journey, pick)

    def _prefill_failed(self, event: PrefillFailed) -> tuple[Decision, ...]:
        journey = self._journey(event.request_id)
        if journey.prefill < 0:
            raise InputError(f"prefill of request {event.request_id} is not under way", mend=_ONCE)
        return self._again(journey, journey.source, event.at)

    def _decode_failed(self, event: DecodeFailed) -> tuple[Decision, ...]:
        journey = self._journey(event.request_id)
        if journey.position < 0:
            raise InputError(f"decode of request {event.request_id} is not under way", mend=_ONCE)
        alone = journey.source == journey.target
        joint = self._cluster.instances[journey.source].protocol == "sglang"
        if event.kv_lost or alone or joint:
            return self._again(journey, journey.target, event.at)
        self._release_decode(journey)
        journey.shun(journey.target)
        return (self._choose_decode(journey, event.at),)

    def _again(self, journey: _Journey, failed: int, at: float) -> tuple[Decision, ...]:
        """From the start, past the instance that has failed."""
        self._release_prefill(journey, at)
        self._release_decode(journey)
        journey.shun(failed)
        return self._start(journey, at)

    def _transfer_finished(self, event: TransferFinished) -> tuple[Decision, ...]:
        journey = self._journey(event.request_id)
        if not journey.in_transfer:
            raise InputError(f"request {event.request_id} has no transfer under way", mend=_ONCE)
        self._end_transfer(journey)
        if event.free_kv_bytes is not None and journey.pool is not None:
            journey.pool.free_kv_bytes[journey.position] = event.free_kv_bytes
        return ()

    def _start_transfer(self, journey: _Journey) -> None:
        journey.in_transfer = True
        self.oracle.transfer_started(journey.source, journey.target)

    def _end_transfer(self, journey: _Journey) -> None:
        if journey.in_transfer:
            journey.in_transfer = False
            self.oracle.transfer_finished(journey.source, journey.target)

    def _admitted(self, event: Admitted) -> tuple[Decision, ...]:
        journey = self._journey(event.request_id)
        if journey.pool is None or journey.position < 0 or journey.admitted:
            raise InputError(f"request {event.request_id} does not wait for a decode slot", mend=_ONCE)
        journey.pool.admit(journey.position)
        journey.admitted = True
        return ()

    def _finished(self, event: Finished) -> tuple[Decision, ...]:
        journey = self._journey(event.request_id)
        del self._journeys[event.request_id]
        self._release_prefill(journey, event.at)
        pool, position = journey.pool, journey.position
        self._release_decode(journey)
        if pool is not None and position >= 0 and event.free_kv_bytes is not None:
            pool.free_kv_bytes[position] = event.free_kv_bytes
        return ()

    def _release_prefill(self, journey: _Journey, at: float) -> None:
        """Give back a prefill that has not finished."""
        if journey.prefill >= 0:
            self._view.prefill[journey.model].release(journey.prefill, at, journey.prefill_s)
            journey.prefill = -1

    def _release_decode(self, journey: _Journey) -> None:
        if journey.pool is None or journey.position < 0:
            return
        self._end_transfer(journey)
        journey.pool.release(journey.position, journey.need_bytes, admitted=journey.admitted)
        journey.position, journey.admitted = -1, False

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

    def _kv_cleared(self, event: KvCleared) -> tuple[Decision, ...]:
        self.prefix.clear(self._cluster.index(event.instance))
        return ()

    def _instance_down(self, event: InstanceDown) -> tuple[Decision, ...]:
        self._view.set_up(self._cluster.index(event.instance), False)
        return ()

    def _instance_up(self, event: InstanceUp) -> tuple[Decision, ...]:
        self._view.set_up(self._cluster.index(event.instance), True)
        return ()

    def _instance_measured(self, event: InstanceMeasured) -> tuple[Decision, ...]:
        self._view.measured(self._cluster.index(event.instance), event)
        return ()

    def _transfer_measured(self, event: TransferMeasured) -> tuple[Decision, ...]:
        source, target = self._cluster.index(event.source), self._cluster.index(event.target)
        self.oracle.transfer_measured(event.at, source, target, event.kv_bytes, event.seconds, event.transfers)
        return ()

    def _congestion_measured(self, event: CongestionMeasured) -> tuple[Decision, ...]:
        self.oracle.congestion_measured(event.at, event.per_tier)
        return ()

    def _links_measured(self, event: LinksMeasured) -> tuple[Decision, ...]:
        self.oracle.links_measured(event.at, event.utilisation)
        return ()
