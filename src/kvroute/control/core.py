"""The control core: takes events and returns decisions. It has no clock, socket or random numbers of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvroute.control.booking import NOTHING_AVOIDED
from kvroute.control.choice.forecast import Backlog
from kvroute.control.cluster_change import CoreParts, NextCluster
from kvroute.control.events.fleet import FLEET_HANDLERS
from kvroute.control.events.kv import KV_HANDLERS
from kvroute.control.events.measurements import MEASUREMENT_HANDLERS
from kvroute.control.events.peers import PEER_HANDLERS
from kvroute.control.events.requests import REQUEST_HANDLERS
from kvroute.control.events.state import CoreState, Handler
from kvroute.control.offload.offloader import Offloader
from kvroute.control.peers import PeerGateways
from kvroute.control.scaling.scaler import Scaling
from kvroute.control.settings import CoreSpec
from kvroute.control.state.caches import PrefixCaches
from kvroute.control.view import CountedLoad
from kvroute.oracle import NetworkOracle
from kvroute.policies import TierLearned
from kvroute.prefix import PrefixIndex
from kvroute.topology import Cluster
from kvroute.types import (
    BandwidthLearned,
    CapacityLearned,
    Decision,
    Event,
    Joined,
    PeerBooking,
    Request,
    Role,
    SessionsServed,
)

_SESSIONS_MAX = 1_000
"""Number of sessions in one event."""


class Control:
    """Turns events into decisions. The simulator calls `handle` in virtual time, the gateway in real time; a recorded
    log of events can be replayed as a test."""

    def __init__(self, cluster: Cluster, settings: CoreSpec, oracle: NetworkOracle) -> None:
        """Start with an idle, empty cluster.

        Args:
            cluster: instances (ascending by name), tiers and timings.
            settings: policies and limits.
            oracle: the router's model of the network; this core reports its own transfers to it.
        """
        parts = CoreParts.of(cluster, settings, oracle)
        scaling = Scaling(settings.options.scaling) if settings.options.scaling is not None else None
        self._state = CoreState(cluster, settings, parts, PeerGateways(parts), scaling)

    def handle(self, event: Event) -> tuple[Decision, ...]:
        """Process one event and return the decisions that follow from it (often none).

        `Arrived` gives a `Prefill`. A `Decode` comes with it if both legs start at once (or are `both_on_arrival`), or
        if the instance serves the request aggregated (source and target are then the same). A request of one leg, or
        one that a decode instance serves aggregated because that is cheaper than a pair, gets a single `Decode`.
        `PrefillFinished` gives the `Decode` if there was none. The two failure events give the decisions that replace
        the failed leg. `Served` gives the `Decode` as it is booked from then on, if its instance was another one. A
        `Reject` ends the request: all its bookings are released, and no further event about it may follow.

        Raises:
            InputError: the event is impossible: a request arrives twice, is not in flight or has not reached that
                step, or the cluster does not have the instance. The view does not change.
        """
        return _HANDLERS[type(event)](self._state, event)

    def prepare(self, joined: tuple[Joined, ...], left: tuple[str, ...]) -> NextCluster:
        """Do all of a `ClusterChanged` that does not depend on the load; may run in a thread while the core handles
        other events than `ClusterChanged`. Changes nothing.

        Raises:
            InputError: see `next_cluster`.
        """
        return self._state.next_cluster(joined, left)

    def expect(self, following: NextCluster) -> None:
        """Use the result of `prepare` for the next `ClusterChanged`, which then takes a short time only."""
        self._state.following = following

    @property
    def oracle(self) -> NetworkOracle:
        """The router's model of the network."""
        return self._state.parts.oracle

    @property
    def offloading(self) -> Offloader | None:
        """Sites, thresholds and traffic, if prefills may be offloaded to another datacenter."""
        return self._state.parts.offloading

    @property
    def scaling(self) -> Scaling | None:
        """Number of instances that the traffic needs, if it is computed."""
        return self._state.scaling

    @property
    def peers(self) -> PeerGateways:
        """The other gateways of the cluster."""
        return self._state.peers

    @property
    def cluster(self) -> Cluster:
        """The cluster as the last `ClusterChanged` has left it."""
        return self._state.cluster

    @property
    def parts(self) -> CoreParts:
        """What belongs to the present cluster. A caller that holds it over a `ClusterChanged` frees its memory."""
        return self._state.parts

    @property
    def members(self) -> Mapping[str, Joined]:
        """The discovered engines of the cluster, by name."""
        return self._state.members

    @property
    def in_flight(self) -> int:
        """Number of requests that have arrived and not left."""
        return len(self._state.bookings)

    def in_progress(self, request_id: int) -> bool:
        """Whether a request has arrived and not left."""
        return request_id in self._state.bookings

    @property
    def requests(self) -> tuple[int, ...]:
        """Ids of the requests that have arrived and not left."""
        return tuple(self._state.bookings)

    @property
    def roles(self) -> Mapping[str, Role]:
        """Present roles of the instances whose roles are not those of the cluster file."""
        pairs = zip(self._state.cluster.instances, self._state.view.roles, strict=True)
        return {instance.name: role for instance, role in pairs if role is not None and role != instance.role}

    def booked(self, request_id: int) -> PeerBooking:
        """What is booked for an own request, as other gateways count it; empty if it has left."""
        booking = self._state.bookings.get(request_id)
        if booking is None:
            return PeerBooking(request_id)
        return booking.for_peers(self._state.cluster.instances, sessions=bool(self._state.view.sessions.bonus_s))

    def prefilling(self, request_id: int) -> bool:
        """Whether the prefill of a request is in progress on an instance."""
        booking = self._state.bookings.get(request_id)
        return booking is not None and booking.prefill >= 0

    def prefill_left_s(self, request_id: int, at: float) -> float:
        """Return the longest time, in seconds, until the prefill in progress of a request ends, as predicted: the work
        of its instance. 0.0 if it has no prefill in progress."""
        booking = self._state.bookings.get(request_id)
        if booking is None or booking.prefill < 0:
            return 0.0
        return float(self._state.view.prefill[booking.model].pending_s(at)[booking.prefill])

    def backlog(self, model: str, at: float) -> Backlog | None:
        """Return how busy the instances of a model are (empty: the cluster's only one); None if none serves it."""
        name = self._state.view.served_name(model)
        return None if name is None else self._state.dispatcher.forecaster.backlog(name, at)

    def work_s(self, request: Request, at: float, output_tokens: float) -> float:
        """Return the predicted seconds of work of a request with an output of this length. Changes nothing."""
        model = self._state.view.model_name(request)
        if model is None:
            return 0.0
        candidates = self._state.view.prefill_candidates(request, model, at, NOTHING_AVOIDED)
        return self._state.dispatcher.forecaster.work_s(request, model, candidates, output_tokens)

    def admitted(self, request_id: int) -> bool:
        """Whether a request is part of the batch of its decode instance."""
        booking = self._state.bookings.get(request_id)
        return booking is not None and booking.admitted

    def copying(self, copy_id: int) -> bool:
        """Whether a prefix copy is in progress."""
        return self._state.parts.prefixes.in_progress(copy_id)

    def reading(self, read_id: int) -> bool:
        """Whether a read from the store has begun and its request still waits for its prefill."""
        return self._state.view.reads is not None and self._state.view.reads.in_progress(read_id)

    def loads(self, at: float) -> dict[str, CountedLoad]:
        """Load of every instance as the router counts it, by name. Changes nothing."""
        return self._state.view.loads(at)

    @property
    def aggregated_instances(self) -> list[str]:
        """Names of the instances that the policy may let serve a request aggregated, in place of a pair."""
        return [self._state.cluster.instances[index].name for index in self._state.dispatcher.pairing.aggregated_ids]

    def learned(self, at: float) -> tuple[TierLearned, ...] | None:
        """What the acting policy, else the shadow policy, has learned from own transfers for each tier, [TIER_COUNT];
        None if neither learns. Changes nothing."""
        learners = self._state.view.states.learners
        return learners[0].learned(at) if learners else None

    def knowledge(self, at: float) -> tuple[CapacityLearned | BandwidthLearned, ...]:
        """What the core has learned from transfers and responses, as events for another core. Changes nothing."""
        tiers, pairs = self.oracle.known()
        names = [instance.name for instance in self._state.cluster.instances]
        named = tuple((names[source], names[target], known) for source, target, known in pairs)
        learners = self._state.view.states.learners
        known: list[CapacityLearned | BandwidthLearned] = [BandwidthLearned(at, tiers, named)] if any(tiers) else []
        return (*known, *(learner.known_at(at) for learner in learners[:1]))

    def dismantle(self) -> Iterator[int]:
        """Free the index of cached prefixes step by step (`PrefixIndex.dismantle`). The core is unusable then."""
        return self.prefix.dismantle()

    @property
    def adapters(self) -> Mapping[str, tuple[tuple[str, ...], int]]:
        """LoRA adapters of each instance, the last used one at the end, and for how many it has room (0: not known)."""
        return self._state.view.adapters.known()

    def sessions(self, at: float) -> Iterator[SessionsServed]:
        """Yield the last instances of all sessions, as events for another core."""
        known = self._state.view.sessions.known()
        for first in range(0, len(known), _SESSIONS_MAX):
            yield SessionsServed(at, tuple(known[first : first + _SESSIONS_MAX]))

    @property
    def caches(self) -> PrefixCaches:
        """The cached prefixes in all tiers of memory; only events change them."""
        return self._state.view.caches

    @property
    def prefix(self) -> PrefixIndex:
        """The index of cached prefixes, by slot of the instance: its index in the cluster until this changes."""
        return self._state.view.caches.prefix

    def may_switch(self, instance: str) -> bool:
        """Whether an instance of the cluster may change its role."""
        return self._state.cluster.index(instance) in self._state.settings.switchable

    def may_scale(self, instance: str) -> bool:
        """See `CoreState.may_scale`."""
        return self._state.may_scale(instance)


_HANDLERS: dict[type, Handler] = REQUEST_HANDLERS | KV_HANDLERS | FLEET_HANDLERS | MEASUREMENT_HANDLERS | PEER_HANDLERS
