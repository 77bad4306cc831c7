"""A change of the cluster under a running core: what is built for the next cluster, and what moves to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from kvroute.control.booking import Booking
from kvroute.control.dispatcher import Dispatcher
from kvroute.control.offload.offloader import Offloader
from kvroute.control.prefix_copies.source import PrefixCopies
from kvroute.control.reservations import Reservations
from kvroute.control.settings import CoreSpec
from kvroute.control.view import ClusterView
from kvroute.oracle import NetworkOracle
from kvroute.topology import Cluster
from kvroute.topology.reading.discovery import grown
from kvroute.types import ClusterChanged, InputError, IntArray, Joined

GONE = -1
"""Source of a request whose prefill instance has left the cluster after it had sent the KV cache."""


@dataclass(frozen=True, slots=True)
class CoreParts:
    """The parts of a core that belong to one cluster."""

    cluster: Cluster
    oracle: NetworkOracle
    view: ClusterView
    offloading: Offloader | None
    prefixes: PrefixCopies
    reservations: Reservations
    dispatcher: Dispatcher

    @classmethod
    def of(
        cls, cluster: Cluster, settings: CoreSpec, oracle: NetworkOracle, before: ClusterView | None = None
    ) -> CoreParts:
        """Return the parts for a cluster, without load. Args: `before`: the view whose caches it may take over."""
        view = ClusterView(cluster, settings, oracle, before.caches if before is not None else None)
        offload = settings.options.offload
        offloading = Offloader(offload, view) if offload else None
        prefixes = PrefixCopies(view, offloading)
        dispatcher = Dispatcher(view, offloading, prefixes)
        return cls(cluster, oracle, view, offloading, prefixes, dispatcher.reservations, dispatcher)


@dataclass(frozen=True, slots=True)
class NextCluster:
    """Everything that a change needs and that does not depend on the load, so that a thread can make it."""

    joined: tuple[Joined, ...]
    left: tuple[str, ...]
    members: Mapping[str, Joined]
    """All discovered engines of the next cluster, by name."""
    parts: CoreParts
    before: IntArray
    """[n] earlier index of each instance; -1: it is new."""
    after: IntArray
    """[earlier n] index of each earlier instance; -1: it has left."""
    links_before: IntArray
    """[links] earlier number of each link; -1: it is new."""
    links_after: tuple[IntArray, ...]
    """See `PolicyStates.links_after`."""

    def is_for(self, event: ClusterChanged) -> bool:
        """Whether it was made for this change."""
        return (self.joined, self.left) == (event.joined, event.left)


def next_cluster(
    base: Cluster,
    members: Mapping[str, Joined],
    parts: CoreParts,
    settings: CoreSpec,
    joined: tuple[Joined, ...],
    left: tuple[str, ...],
) -> NextCluster:
    """Build what follows the cluster of `parts`. Changes nothing.

    Args:
        base: cluster of the file alone.
        members: the discovered engines now, by name.
        parts: the parts of the core now.
        settings: of the core.
        joined, left: as in `ClusterChanged`.

    Raises:
        InputError: an engine that leaves is no member, one that joins has a name in use, or the core has a feature that
            needs a fixed cluster.
    """
    _refuse_features(parts, settings)
    rest = dict(members)
    for name in left:
        if rest.pop(name, None) is None:
            raise InputError(f"{name} is not a discovered engine", hint="only engines that have joined can leave")
    names = {instance.name for instance in base.instances} | rest.keys()
    for joining in joined:
        if joining.engine.name in names:
            raise InputError(f"there is already an instance {joining.engine.name}", hint="let the engine leave first")
        names.add(joining.engine.name)
        rest[joining.engine.name] = joining
    cluster, earlier = grown(base, rest.values()), parts.cluster
    new = {joining.engine.name for joining in joined}
    position = {i.name: index for index, i in enumerate(earlier.instances) if i.name not in new}
    before = np.array([position.get(instance.name, -1) for instance in cluster.instances], dtype=np.int64)
    after = np.full(len(earlier.instances), -1, dtype=np.int64)
    after[before[before >= 0]] = np.flatnonzero(before >= 0)
    links = {link.name: number for number, link in enumerate(earlier.links)}
    following = CoreParts.of(cluster, settings, parts.oracle.of_changed(cluster), parts.view)
    return NextCluster(
        joined=joined,
        left=left,
        members=rest,
        parts=following,
        before=before,
        after=after,
        links_before=np.array([links.get(link.name, -1) for link in cluster.links], dtype=np.int64),
        links_after=following.view.states.links_after(parts.view.states, before),
    )


def _refuse_features(parts: CoreParts, settings: CoreSpec) -> None:
    options = settings.options
    features = {
        "offload": options.offload is not None,
        "storage": parts.view.reads is not None,
        "copies": options.copies is not None,
        "prefix_pool": options.prefix_pool,
        "role switches": options.scaling is not None and options.scaling.manages == "roles",
    }
    for name, used in features.items():
        if used:
            raise InputError(f"a cluster with `{name}` cannot change", hint="list its instances in the cluster file")


def refuse_in_use(old: CoreParts, following: NextCluster, bookings: Mapping[int, Booking]) -> None:
    """Raises InputError if a leg of a request is in progress on an instance that leaves."""
    after = following.after.tolist()
    for booking in bookings.values():
        _refuse_in_use(old, booking, after)


def carry_over(old: CoreParts, following: NextCluster, bookings: Mapping[int, Booking], at: float) -> None:
    """Move the state of a core to the parts of its next cluster. The caller has called `refuse_in_use`.

    Instances that stay keep load, health, slow start, cached prefixes and learned bandwidths; requests keep their
    bookings and transfers. The transfer of a request whose source leaves ends here: see `GONE`.
    """
    after = following.after.tolist()
    for booking in bookings.values():
        if booking.source >= 0 and after[booking.source] < 0:
            old.reservations.end_transfer(booking, at)
    new = following.parts
    moved = new.view.take_over(old.view, following.before)
    prefill = {name: positions.tolist() for name, positions in moved.prefill.items()}
    decode = {
        id(old.view.decode[key]): (new.view.decode[key], moved_to.tolist()) for key, moved_to in moved.decode.items()
    }
    decode |= {id(old.view.kept[key]): (new.view.kept[key], moved_to.tolist()) for key, moved_to in moved.kept.items()}
    for booking in bookings.values():
        if booking.prefill >= 0:
            booking.prefill = prefill[booking.model][booking.prefill]
        if booking.position >= 0:
            booking.pool, positions = decode[id(booking.pool)]
            booking.position = positions[booking.position]
        else:
            booking.pool = None
        booking.source = after[booking.source] if booking.source >= 0 else GONE
        booking.target = after[booking.target] if booking.target >= 0 else GONE
        failed = [after[index] for index in booking.avoid.failed if after[index] >= 0]
        booking.avoid = booking.avoid._replace(failed=failed)
        booking.restrict_to(new.cluster.instances)
    in_flight = [
        (booking.request.id, booking.source, booking.target, booking.kv_bytes)
        for booking in bookings.values()
        if booking.in_transfer
    ]
    new.view.states.take_over(old.view.states, following.links_after, at, in_flight)
    new.oracle.take_over(old.oracle, following.before, following.links_before, _transfers(bookings.values()))


def _refuse_in_use(parts: CoreParts, booking: Booking, after: list[int]) -> None:
    prefills = booking.prefill >= 0 and after[booking.source] < 0
    decodes = booking.position >= 0 and after[booking.target] < 0
    if prefills or decodes:
        name = parts.cluster.instances[booking.source if prefills else booking.target].name
        what = f"request {booking.request.id} is in progress on {name}, which cannot leave"
        raise InputError(what, hint="report the end of its requests first")


def _transfers(bookings: Iterable[Booking]) -> list[tuple[int, int]]:
    return [(booking.source, booking.target) for booking in bookings if booking.in_transfer]
