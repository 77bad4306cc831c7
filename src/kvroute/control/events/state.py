"""The state of a core: its cluster, the requests in flight and its parts. Handlers of events change it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kvroute.control.booking import Booking
from kvroute.control.cluster_change import CoreParts, NextCluster, next_cluster
from kvroute.control.dispatcher import Dispatcher
from kvroute.control.peers import PeerGateways
from kvroute.control.reservations import Reservations
from kvroute.control.scaling.scaler import Scaling
from kvroute.control.settings import CoreSpec
from kvroute.control.view import ClusterView
from kvroute.topology import Cluster
from kvroute.types import Decision, Joined


@dataclass(slots=True)
class CoreState:
    """What a core knows. A change of the cluster replaces its parts."""

    base: Cluster
    """Cluster of the file alone."""
    settings: CoreSpec
    parts: CoreParts
    peers: PeerGateways
    """The other gateways of the cluster."""
    scaling: Scaling | None
    """Number of instances that the traffic needs; None: it is not computed."""
    members: Mapping[str, Joined] = field(default_factory=dict)
    """Discovered engines of the cluster, by name."""
    following: NextCluster | None = None
    """Prepared for the next `ClusterChanged`."""
    bookings: dict[int, Booking] = field(default_factory=dict)
    """Requests that have arrived and not left, by id."""
    cluster: Cluster = field(init=False)
    view: ClusterView = field(init=False)
    dispatcher: Dispatcher = field(init=False)
    reservations: Reservations = field(init=False)

    def __post_init__(self) -> None:
        self.adopt(self.parts)

    def adopt(self, parts: CoreParts) -> None:
        """Use these parts from now on."""
        self.parts, self.cluster, self.view = parts, parts.cluster, parts.view
        self.dispatcher, self.reservations = parts.dispatcher, parts.reservations

    def next_cluster(self, joined: tuple[Joined, ...], left: tuple[str, ...]) -> NextCluster:
        """Build the cluster after a change; see the function of this name. Changes nothing."""
        return next_cluster(self.base, self.members, self.parts, self.settings, joined, left)

    def may_scale(self, instance: str) -> bool:
        """Whether autoscaling counts an instance of the cluster, so that a gateway may start and stop it."""
        role = self.cluster.instances[self.cluster.index(instance)].role
        return self.scaling is not None and role != "both"


Handler: TypeAlias = Callable[[CoreState, Any], tuple[Decision, ...]]
"""Processes one event and returns the decisions that follow from it."""
