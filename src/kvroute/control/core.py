"""The control core: takes events and returns decisions. It has no clock, socket or random numbers of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from kvroute.control.booking import NOTHING_AVOIDED, Booking
from kvroute.control.cluster_change import GONE, NextCluster, Parts, carry_over, next_cluster, refuse_in_use
from kvroute.control.forecast import Backlog
from kvroute.control.peers import Peers
from kvroute.control.scaling.scaler import Scaling
from kvroute.control.settings import ControlSettings
from kvroute.control.state.caches import Caches
from kvroute.control.view import Load
from kvroute.oracle import NetworkOracle
from kvroute.policies import TierLearned
from kvroute.prefix import PrefixIndex
from kvroute.topology import Cluster
from kvroute.types import (
    AdaptersMeasured,
    Admitted,
    Arrived,
    BandwidthLearned,
    CapacityLearned,
    ClusterChanged,
    CongestionMeasured,
    CopyFinished,
    Decision,
    DecodeFailed,
    Event,
    Finished,
    InputError,
    InstanceDown,
    InstanceMeasured,
    InstanceUp,
    Joined,
    KvCleared,
    KvEvicted,
    KvStored,
    LinksMeasured,
    PeerBooking,
    PeerEvent,
    PeerLost,
    PeerReported,
    PrefillFailed,
    PrefillFinished,
    ReadFinished,
    Reject,
    Request,
    ReviewDue,
    Role,
    RoleSwitched,
    ScaleEnded,
    ScalingDue,
    Served,
    SessionsServed,
    SwitchRole,
    ThresholdKnown,
    TransferFinished,
    TransferMeasured,
)

_SESSIONS_MAX = 1_000
"""Number of sessions in one event."""
_ONCE = "report each step of a request once and in order"


class Control:
    """Turns events into decisions. The simulator calls `handle` in virtual time, the gateway in real time; a recorded
    log of events can be replayed as a test."""

    def __init__(self, cluster: Cluster, settings: ControlSettings, oracle: NetworkOracle) -> None:
        """Start with an idle, empty cluster.

        Args:
            cluster: instances (ascending by name), tiers and timings.
            settings: policies and limits.
            oracle: the router's model of the network; this core reports its own transfers to it.
        """
        self._base, self._settings = cluster, settings
        self._members: Mapping[str, Joined] = {}
        """Discovered engines of the cluster, by name."""
        self._following: NextCluster | None = None
        self._bookings: dict[int, Booking] = {}
        self.scaling = Scaling(settings.options.scaling) if settings.options.scaling is not None else None
        """Number of instances that the traffic needs, if it is computed; read by displays."""
        parts = Parts.of(cluster, settings, oracle)
        self.peers = Peers(parts)
        """The other gateways of the cluster; read by displays and by `Replica`."""
        self._adopt(parts)

    def _adopt(self, parts: Parts) -> None:
        self._parts, self._cluster, self._view = parts, parts.cluster, parts.view
        self._prefixes, self._dispatcher, self.oracle = parts.prefixes, parts.dispatcher, parts.oracle
        self._reservations = parts.reservations
        self.offloading = parts.offloading
        """Sites, thresholds and traffic, if prefills may be offloaded to another datacenter; read by displays."""

    def handle(self, event: Event) -> tuple[Decision, ...]:
        """Process one event and return the decisions that follow from it (often none).

        `Arrived` gives a `Prefill`. A `Decode` comes with it if both legs start at once (or are `joint`), or if the
        instance serves the request alone (source and target are then the same). A request of one leg, or one that a
        decode instance serves alone because that is cheaper than a pair, gets a single `Decode`.
        `PrefillFinished` gives the `Decode` if there was none. The two failure events give the decisions that replace
        the failed leg. `Served` gives the `Decode` as it is booked from then on, if its instance was another one. A
        `Reject` ends the request: all its bookings are released, and no further event about it may follow.

        Raises:
            InputError: the event is impossible: a request arrives twice, is not in flight or has not reached that
                step, or the cluster does not have the instance. The view does not change.
        """
        return _HANDLERS[type(event)](self, event)

    def prepare(self, joined: tuple[Joined, ...], left: tuple[str, ...]) -> NextCluster:
        """Do all of a `ClusterChanged` that does not depend on the load; may run in a thread while the core handles
        other events than `ClusterChanged`. Changes nothing.

        Raises:
            InputError: see `next_cluster`.
        """
        return next_cluster(self._base, self._members, self._parts, self._settings, joined, left)

    def expect(self, following: NextCluster) -> None:
        """Use the result of `prepare` for the next `ClusterChanged`, which then takes a short time only."""
        self._following = following

    @property
    def cluster(self) -> Cluster:
        """The cluster as the last `ClusterChanged` has left it."""
        return self._cluster

    @property
    def parts(self) -> Parts:
        """What belongs to the present cluster. A caller that holds it over a `ClusterChanged` frees its memory."""
        return self._parts

    @property
    def members(self) -> Mapping[str, Joined]:
        """The discovered engines of the cluster, by name."""
        return self._members

    @property
    def in_flight(self) -> int:
        """Number of requests that have arrived and not left."""
        return len(self._bookings)

    def in_progress(self, request_id: int) -> bool:
        """Whether a request has arrived and not left."""
        return request_id in self._bookings

    @property
    def requests(self) -> tuple[int, ...]:
        """Ids of the requests that have arrived and not left."""
        return tuple(self._bookings)

    @property
    def roles(self) -> Mapping[str, Role]:
        """Present roles of the instances whose roles are not those of the cluster file."""
        pairs = zip(self._cluster.instances, self._view.roles, strict=True)
        return {instance.name: role for instance, role in pairs if role is not None and role != instance.role}

    def booked(self, request_id: int) -> PeerBooking:
        """What is booked for an own request, as other gateways count it; empty if it has left."""
        booking = self._bookings.get(request_id)
        if booking is None:
            return PeerBooking(request_id)
        return booking.for_peers(self._cluster.instances, sessions=bool(self._view.sessions.bonus_s))

    def prefilling(self, request_id: int) -> bool:
        """Whether the prefill of a request is in progress on an instance."""
        booking = self._bookings.get(request_id)
        return booking is not None and booking.prefill >= 0

    def prefill_left_s(self, request_id: int, at: float) -> float:
        """Return the longest time, in seconds, until the prefill in progress of a request ends, as predicted: the work
        of its instance. 0.0 if it has no prefill in progress."""
        booking = self._bookings.get(request_id)
        if booking is None or booking.prefill < 0:
            return 0.0
        return float(self._view.prefill[booking.model].pending_s(at)[booking.prefill])

    def backlog(self, model: str, at: float) -> Backlog | None:
        """Return how busy the instances of a model are (empty: the cluster's only one); None if none serves it."""
        name = self._view.served_name(model)
        return None if name is None else self._dispatcher.forecaster.backlog(name, at)

    def work_s(self, request: Request, at: float, output_tokens: float) -> float:
        """Return the predicted seconds of work of a request with an output of this length. Changes nothing."""
        model = self._view.model_name(request)
        if model is None:
            return 0.0
        candidates = self._view.prefill_candidates(request, model, at, NOTHING_AVOIDED)
        return self._dispatcher.forecaster.work_s(request, model, candidates, output_tokens)

    def admitted(self, request_id: int) -> bool:
        """Whether a request is part of the batch of its decode instance."""
        booking = self._bookings.get(request_id)
        return booking is not None and booking.admitted

    def copying(self, copy_id: int) -> bool:
        """Whether a prefix copy is in progress."""
        return self._prefixes.in_progress(copy_id)

    def reading(self, read_id: int) -> bool:
        """Whether a read from the store has begun and its request still waits for its prefill."""
        return self._view.reads is not None and self._view.reads.in_progress(read_id)

    def loads(self, at: float) -> dict[str, Load]:
        """Load of every instance as the router counts it, by name. Changes nothing."""
        return self._view.loads(at)

    @property
    def alone_instances(self) -> list[str]:
        """Names of the instances that the policy may let serve a request alone in place of a pair."""
        return [self._cluster.instances[index].name for index in self._dispatcher.pairing.alone_ids]

    def learned(self, at: float) -> tuple[TierLearned, ...] | None:
        """What the acting policy, else the shadow policy, has learned from own transfers for each tier, [TIER_COUNT];
        None if neither learns. Changes nothing."""
        learners = self._view.states.learners
        return learners[0].learned(at) if learners else None

    def knowledge(self, at: float) -> tuple[CapacityLearned | BandwidthLearned, ...]:
        """What the core has learned from transfers and responses, as events for another core. Changes nothing."""
        tiers, pairs = self.oracle.known()
        names = [instance.name for instance in self._cluster.instances]
        named = tuple((names[source], names[target], known) for source, target, known in pairs)
        learners = self._view.states.learners
        known: list[CapacityLearned | BandwidthLearned] = [BandwidthLearned(at, tiers, named)] if any(tiers) else []
        return (*known, *(learner.known_at(at) for learner in learners[:1]))

    def dismantle(self) -> Iterator[int]:
        """Free the index of cached prefixes step by step (`PrefixIndex.dismantle`). The core is unusable then."""
        return self.prefix.dismantle()

    @property
    def adapters(self) -> Mapping[str, tuple[tuple[str, ...], int]]:
        """LoRA adapters of each instance, the last used one at the end, and for how many it has room (0: not known)."""
        return self._view.adapters.known()

    def sessions(self, at: float) -> Iterator[SessionsServed]:
        """Yield the last instances of all sessions, as events for another core."""
        known = self._view.sessions.known()
        for first in range(0, len(known), _SESSIONS_MAX):
            yield SessionsServed(at, tuple(known[first : first + _SESSIONS_MAX]))

    @property
    def caches(self) -> Caches:
        """The cached prefixes in all tiers of memory; only events change them."""
        return self._view.caches

    @property
    def prefix(self) -> PrefixIndex:
        """The index of cached prefixes, by slot of the instance: its index in the cluster until this changes."""
        return self._view.caches.prefix

    def _arrived(self, event: Arrived) -> tuple[Decision, ...]:
        request = event.request
        if request.id in self._bookings:
            raise InputError(f"request {request.id} has already arrived", hint="give every request its own id")
        model = self._view.model_name(request)
        if model is None:
            unnamed = "a request without a model (the cluster has several)"
            what = f"model {request.model!r}" if request.model else unnamed
            why = f"no prefill and decode instances serve {what}" if self._cluster.instances else "no instance is up"
            return (Reject(request.id, why),)
        booking = Booking(request, model, joint=event.joint, only=event.only, ttft_max_s=event.ttft_max_s)
        booking.bar_others(self._cluster.instances)
        decisions = self._start(booking, event.at)
        if self.scaling is not None:
            service_s = booking.prefill_s or booking.prompt_s
            self.scaling.arrived(event.at, self._view, model, request, service_s)
        return decisions

    def _start(self, booking: Booking, at: float) -> tuple[Decision, ...]:
        """Choose the first leg, and the second one if both are due. Keep the booking unless the request is rejected."""
        decisions = (
            self._dispatcher.place_single(booking, at)
            if booking.request.one_leg
            else self._dispatcher.route(booking, at)
        )
        if isinstance(decisions[-1], Reject):
            self._reservations.release_prefill(booking, at)
            self._bookings.pop(booking.request.id, None)
            return (_restricted(decisions[-1], booking),)
        self._bookings[booking.request.id] = booking
        return decisions

    def _prefill_finished(self, event: PrefillFinished) -> tuple[Decision, ...]:
        booking = self._booking(event.request_id)
        if booking.prefill < 0:
            raise InputError(f"prefill of request {event.request_id} has already finished", hint=_ONCE)
        self._reservations.end_prefill(booking, event.at)
        planned = self._dispatcher.take_planned(booking, event.at, event.kept_tokens)
        if planned is not None:
            return (planned,)
        if booking.position < 0:
            return (self._decode(booking, event.at),)
        if booking.source != booking.target and not booking.early:
            self._reservations.start_transfer(booking, event.at)
        return ()

    def _prefill_failed(self, event: PrefillFailed) -> tuple[Decision, ...]:
        booking = self._booking(event.request_id)
        if booking.prefill < 0:
            raise InputError(f"prefill of request {event.request_id} is not in progress", hint=_ONCE)
        return self._again(booking, booking.source, event.at)

    def _decode_failed(self, event: DecodeFailed) -> tuple[Decision, ...]:
        booking = self._booking(event.request_id)
        if booking.position < 0 or booking.planned is not None:
            raise InputError(f"decode of request {event.request_id} is not in progress", hint=_ONCE)
        if booking.source == GONE:
            return self._again(booking, booking.target, event.at)
        alone = booking.source == booking.target
        joint = booking.joint or self._cluster.instances[booking.source].traits.concurrent_legs
        if event.kv_lost and self._reservations.is_offloaded(booking):
            booking.at_home = True  # the WAN path failed, neither of the two instances
            return self._again(booking, None, event.at)
        if event.kv_lost or alone or joint:
            return self._again(booking, booking.target, event.at)
        self._reservations.release_decode(booking, event.at)
        booking.exclude(booking.target)
        return (self._decode(booking, event.at),)

    def _served(self, event: Served) -> tuple[Decision, ...]:
        booking, index = self._booking(event.request_id), self._cluster.index(event.instance)
        if booking.pool is None or booking.position < 0 or booking.planned is not None or booking.source == GONE:
            raise InputError(f"decode of request {event.request_id} is not in progress", hint=_ONCE)
        pool = self._view.decode_pool_of(index)
        instance, own = self._cluster.instances[index], self._cluster.instances[booking.target]
        if pool is None or (instance.model, instance.protocol) != (own.model, own.protocol):
            what = f"instance {event.instance} cannot serve the decode of request {event.request_id}"
            raise InputError(what, hint="name an instance of its model that decodes with the same protocol")
        if index == booking.target:
            return ()
        return (self._dispatcher.move(booking, pool, pool.position[index], event.at),)

    def _decode(self, booking: Booking, at: float) -> Decision:
        decision = self._dispatcher.choose_decode(booking, at)
        if isinstance(decision, Reject):
            del self._bookings[booking.request.id]
            return _restricted(decision, booking)
        return decision

    def _again(self, booking: Booking, failed: int | None, at: float) -> tuple[Decision, ...]:
        """Restart the request from the beginning without the instance that failed."""
        self._reservations.release_prefill(booking, at)
        self._reservations.release_decode(booking, at)
        booking.early = False
        if failed is not None:
            booking.exclude(failed)
        return self._start(booking, at)

    def _transfer_finished(self, event: TransferFinished) -> tuple[Decision, ...]:
        booking = self._booking(event.request_id)
        if booking.source == GONE:
            return ()  # the transfer has ended with its source, as far as this core knows
        if not booking.in_transfer:
            raise InputError(f"request {event.request_id} has no transfer in progress", hint=_ONCE)
        self._reservations.end_transfer(booking, event.at, landed=True)
        if event.free_kv_bytes is not None and booking.pool is not None:
            booking.pool.free_kv_bytes[booking.position] = event.free_kv_bytes
        return ()

    def _admitted(self, event: Admitted) -> tuple[Decision, ...]:
        booking = self._booking(event.request_id)
        if booking.pool is None or booking.position < 0 or booking.admitted:
            raise InputError(f"request {event.request_id} does not wait for a decode slot", hint=_ONCE)
        booking.pool.admit(booking.position)
        booking.admitted = True
        self._reservations.release_prompt(booking, event.at)
        return ()

    def _finished(self, event: Finished) -> tuple[Decision, ...]:
        booking = self._booking(event.request_id)
        del self._bookings[event.request_id]
        self._reservations.release_prefill(booking, event.at)
        pool, position = booking.pool, booking.position
        self._reservations.release_decode(booking, event.at)
        if event.output_tokens:
            if self.offloading is not None:
                self.offloading.answered(event.at, event.output_tokens)
            if self.scaling is not None:
                self.scaling.answered(event.at, booking.model, event.output_tokens)
            for observer in self._view.states.response_observers:
                observer.answered(event.output_tokens)
        if pool is not None and position >= 0 and event.free_kv_bytes is not None:
            pool.free_kv_bytes[position] = event.free_kv_bytes
        return ()

    def _booking(self, request_id: int) -> Booking:
        booking = self._bookings.get(request_id)
        if booking is None:
            hint = "it has not arrived, was rejected or has left"
            raise InputError(f"request {request_id} is not in flight", hint=hint)
        return booking

    def _kv_stored(self, event: KvStored) -> tuple[Decision, ...]:
        self._view.caches.stored(self._cluster.index(event.instance), event.blocks, event.tier)
        return ()

    def _kv_evicted(self, event: KvEvicted) -> tuple[Decision, ...]:
        self._view.caches.evicted(self._cluster.index(event.instance), event.blocks, event.keep, event.tier)
        return ()

    def _kv_cleared(self, event: KvCleared) -> tuple[Decision, ...]:
        self._view.caches.cleared(self._cluster.index(event.instance))
        self._view.adapters.forget(event.instance)
        return ()

    def _instance_down(self, event: InstanceDown) -> tuple[Decision, ...]:
        self._view.set_up(self._cluster.index(event.instance), False, event.at)
        return ()

    def _instance_up(self, event: InstanceUp) -> tuple[Decision, ...]:
        self._view.set_up(self._cluster.index(event.instance), True, event.at, returned=event.returned)
        return ()

    def _role_switched(self, event: RoleSwitched) -> tuple[Decision, ...]:
        index = self._cluster.index(event.instance)
        if index not in self._settings.switchable:
            what = f"instance {event.instance} does not change its role"
            hint = "only prefill and decode instances in the sites of `offload`, or of `autoscaling`, switch roles"
            raise InputError(what, hint=hint)
        drained = self._view.roles[index] is None
        self._view.set_role(index, event.role)
        if drained and self.offloading is not None:
            self.offloading.role_switched(event.at)
        return ()

    def _copy_finished(self, event: CopyFinished) -> tuple[Decision, ...]:
        if not self._prefixes.ended(event.at, event.copy_id, landed=event.landed):
            raise InputError(f"copy {event.copy_id} is not in progress", hint="report the end of every copy once")
        return ()

    def _read_finished(self, event: ReadFinished) -> tuple[Decision, ...]:
        reads = self._view.reads
        if reads is None or not reads.finished(event.read_id, event.side):
            what = f"the {event.side} node does not read for read {event.read_id}"
            raise InputError(what, hint="report the end of every read once")
        return ()

    def _review_due(self, event: ReviewDue) -> tuple[Decision, ...]:
        # Role switches come first: an instance that is about to be drained gets no copies.
        return (*self._switch_roles(event.at), *self._prefixes.review(event.at))

    def _switch_roles(self, at: float) -> tuple[SwitchRole, ...]:
        if self.offloading is None:
            return ()
        switches = self.offloading.review(at)
        for switch in switches:
            self._view.set_role(self._cluster.index(switch.instance), None)
        self.offloading.switching += len(switches)
        return tuple(SwitchRole(switch.instance, switch.role) for switch in switches)

    def _scaling_due(self, event: ScalingDue) -> tuple[Decision, ...]:
        if self.scaling is None:
            return ()
        decisions = self.scaling.review(event.at, self._view, event.queued)
        for decision in decisions:
            if isinstance(decision, SwitchRole):
                self._view.set_role(self._cluster.index(decision.instance), None)
        return decisions

    def _scale_ended(self, event: ScaleEnded) -> tuple[Decision, ...]:
        if self.may_scale(event.instance) and self.scaling is not None:
            self.scaling.ended(event.instance, serves=event.serves)
        return ()

    def may_switch(self, instance: str) -> bool:
        """Whether an instance of the cluster may change its role."""
        return self._cluster.index(instance) in self._settings.switchable

    def may_scale(self, instance: str) -> bool:
        """Whether autoscaling counts an instance of the cluster, so that a gateway may start and stop it."""
        role = self._cluster.instances[self._cluster.index(instance)].role
        return self.scaling is not None and role != "both"

    def _threshold_known(self, event: ThresholdKnown) -> tuple[Decision, ...]:
        if self.offloading is None or not self.offloading.restore_threshold(
            event.site, event.tokens, event.base_tokens
        ):
            hint = "name a datacenter with prefill instances only"
            raise InputError(f"{event.site} is not an offloading site", hint=hint)
        return ()

    def _capacity_learned(self, event: CapacityLearned) -> tuple[Decision, ...]:
        for learner in self._view.states.learners:
            learner.resume(event.at, event)
        return ()

    def _bandwidth_learned(self, event: BandwidthLearned) -> tuple[Decision, ...]:
        index = self._cluster.index
        pairs = [(index(source), index(target), known) for source, target, known in event.pairs]
        self.oracle.resume(event.tiers, pairs)
        return ()

    def _instance_measured(self, event: InstanceMeasured) -> tuple[Decision, ...]:
        self._view.measured(self._cluster.index(event.instance), event)
        return ()

    def _adapters_measured(self, event: AdaptersMeasured) -> tuple[Decision, ...]:
        self._cluster.index(event.instance)  # raises for an instance that the cluster does not have
        self._view.adapters.measured(event.instance, event.adapters, event.slots)
        return ()

    def _sessions_served(self, event: SessionsServed) -> tuple[Decision, ...]:
        for session, prefill, decode in event.sessions:
            self._view.sessions.learn(session, prefill, decode)
        return ()

    def _transfer_measured(self, event: TransferMeasured) -> tuple[Decision, ...]:
        source, target = self._cluster.index(event.source), self._cluster.index(event.target)
        self.oracle.transfer_measured(event.at, source, target, event.kv_bytes, event.seconds, event.transfers)
        return ()

    def _congestion_measured(self, event: CongestionMeasured) -> tuple[Decision, ...]:
        self.oracle.congestion_measured(event.at, event.per_tier)
        return ()

    def _cluster_changed(self, event: ClusterChanged) -> tuple[Decision, ...]:
        following, self._following = self._following, None
        if following is None or not following.is_for(event):
            following = self.prepare(event.joined, event.left)
        refuse_in_use(self._parts, following, self._bookings)
        self.peers.lift(event.at)
        carry_over(self._parts, following, self._bookings, event.at)
        self._members = following.members
        self._adopt(following.parts)
        self.peers.put_back(event.at, following.parts)
        if self.scaling is not None:
            self.scaling.changed(event.at, self._view, [each.engine.name for each in event.joined])
        return ()

    def _peer_reported(self, event: PeerReported) -> tuple[Decision, ...]:
        ahead_s = event.at - event.report.at
        before = self.peers.arrivals
        events = self.peers.reported(event.at, event.report)
        if self.scaling is not None and self.peers.arrivals > before:
            self.scaling.arrived_elsewhere(event.at, self.peers.arrivals - before)
        for each in events:
            with suppress(InputError):  # this core does not have the instance or the feature
                _HANDLERS[type(each)](self, _at(each, event.at, ahead_s))
        return ()

    def _peer_lost(self, event: PeerLost) -> tuple[Decision, ...]:
        self.peers.lost(event.at, event.gateway)
        return ()

    def _links_measured(self, event: LinksMeasured) -> tuple[Decision, ...]:
        self.oracle.links_measured(event.at, event.utilisation)
        return ()


def _restricted(reject: Reject, booking: Booking) -> Reject:
    """Return a Reject whose reason says that the request may use some instances only, if so."""
    if booking.only is None:
        return reject
    return replace(reject, reason=f"{reject.reason} among those that may serve the request")


def _at(event: PeerEvent, at: float, ahead_s: float) -> PeerEvent:
    """An event of another gateway by this core's clock, which is `ahead_s` ahead of that gateway's."""
    if not isinstance(event, BandwidthLearned):
        return replace(event, at=at)
    tiers = tuple([known and replace(known, at=known.at + ahead_s) for known in event.tiers])
    pairs = tuple([(source, target, replace(known, at=known.at + ahead_s)) for source, target, known in event.pairs])
    return BandwidthLearned(at, tiers, pairs)


_HANDLERS: dict[type, Callable[[Control, Any], tuple[Decision, ...]]] = {
    Arrived: Control._arrived,
    PrefillFinished: Control._prefill_finished,
    PrefillFailed: Control._prefill_failed,
    TransferFinished: Control._transfer_finished,
    Admitted: Control._admitted,
    DecodeFailed: Control._decode_failed,
    Served: Control._served,
    Finished: Control._finished,
    KvStored: Control._kv_stored,
    KvEvicted: Control._kv_evicted,
    KvCleared: Control._kv_cleared,
    InstanceDown: Control._instance_down,
    InstanceUp: Control._instance_up,
    RoleSwitched: Control._role_switched,
    CopyFinished: Control._copy_finished,
    ReadFinished: Control._read_finished,
    ReviewDue: Control._review_due,
    ScalingDue: Control._scaling_due,
    ScaleEnded: Control._scale_ended,
    ThresholdKnown: Control._threshold_known,
    CapacityLearned: Control._capacity_learned,
    BandwidthLearned: Control._bandwidth_learned,
    InstanceMeasured: Control._instance_measured,
    AdaptersMeasured: Control._adapters_measured,
    SessionsServed: Control._sessions_served,
    TransferMeasured: Control._transfer_measured,
    CongestionMeasured: Control._congestion_measured,
    LinksMeasured: Control._links_measured,
    ClusterChanged: Control._cluster_changed,
    PeerReported: Control._peer_reported,
    PeerLost: Control._peer_lost,
}
"""Functions and not bound methods: a core that holds its own bound methods would be a reference cycle."""
