"""The network around the engines of a `KvRouter`: speeds by level, and what each node, rack and pod has."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta, field

from kvroute.kube.resources.fields import Part
from kvroute.topology.schema import Count, NicScope
from kvroute_engine.files.units import Bandwidth, Latency

Share: TypeAlias = Annotated[float, Meta(ge=0.001, le=1)]


class TierLatencies(Part, frozen=True, kw_only=True):
    """One-way latency between two engines, by their nearest common domain."""

    node_s: Latency | None = field(name="node", default=None)
    rack_s: Latency | None = field(name="rack", default=None)
    pod_s: Latency | None = field(name="pod", default=None)
    datacenter_s: Latency | None = field(name="datacenter", default=None)


class TierBandwidths(Part, frozen=True, kw_only=True):
    """Bandwidth of one KV transfer, by the nearest common domain."""

    node_bytes_per_s: Bandwidth | None = field(name="node", default=None)
    rack_bytes_per_s: Bandwidth | None = field(name="rack", default=None)
    pod_bytes_per_s: Bandwidth | None = field(name="pod", default=None)
    datacenter_bytes_per_s: Bandwidth | None = field(name="datacenter", default=None)
    wan_bytes_per_s: Bandwidth = field(name="wan", default=Bandwidth(12.5e9))
    """Between datacenters, which are zones unless `place` of a level says something else."""


class ComputeNics(Part, frozen=True, kw_only=True):
    """Network cards of one node that carry KV caches."""

    count: Count = 8
    bytes_per_s: Bandwidth = field(name="capacity", default=Bandwidth(50e9))
    """Bandwidth of each network card, in each direction."""
    scope: NicScope = "gpu"
    """Which flows share a card: those of a GPU, those of an engine, or all of the node."""
    efficiency: Share = 1.0
    """Share of `capacity` that a KV transfer reaches."""


class NodeNics(Part, frozen=True, kw_only=True):
    """Network cards of one node."""

    compute: ComputeNics = ComputeNics()


class NodeShape(Part, frozen=True, kw_only=True):
    """What each node with an engine has."""

    gpus: Annotated[int, Meta(ge=1, le=1024)] = 8
    nvlink_bytes_per_s: Bandwidth = field(name="nvlink", default=Bandwidth(450e9))
    """Per GPU and direction."""
    nics: NodeNics = NodeNics()


class DomainUplinks(Part, frozen=True, kw_only=True):
    """`count` equal links to the next level."""

    count: Count = 1
    bytes_per_s: Bandwidth = field(name="capacity")
    """Bandwidth of each link, in each direction."""


class DomainShape(Part, frozen=True, kw_only=True):
    """What each rack, or each group of racks, has."""

    uplinks: DomainUplinks | None = None
    """Without them the uplinks are no limit."""


class RouterNetwork(Part, frozen=True, kw_only=True):
    """The network that KV transfers use."""

    latency: TierLatencies = TierLatencies()
    """These come before `networkQoS` of a ClusterTopology."""
    tier_bandwidth: TierBandwidths = TierBandwidths()
    """These come before `networkQoS` of a ClusterTopology."""
    node: NodeShape = NodeShape()
    rack: DomainShape = DomainShape()
    pod: DomainShape = DomainShape()
    """A group of racks: a block, a spine."""
