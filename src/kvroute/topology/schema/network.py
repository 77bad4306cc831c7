"""The network of a cluster file: nodes, NICs, racks, pods, datacenters, fabrics, links between them."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, field

from kvroute.topology.schema.base import Count, Efficiency, Entry, GpuCount, Name, Ratio
from kvroute_engine.agent.schemes import Scheme
from kvroute_engine.files.units import Bandwidth, Latency, Size

NicScope: TypeAlias = Literal["gpu", "instance", "server"]
Ecmp: TypeAlias = Literal["flow", "transfer"]
Placement: TypeAlias = Literal["rack", "spread", "packed"]
SwitchLevel: TypeAlias = Literal["rack", "pod", "core"]
WireType: TypeAlias = Literal["int32", "fp16"]


class Uplinks(Entry, frozen=True, kw_only=True):
    """`count` equal links to the next level, each with `capacity` in both directions."""

    count: Count = 1
    bytes_per_s: Bandwidth = field(name="capacity")


class Nic(Entry, frozen=True, kw_only=True):
    """`count` network cards of one node, each with `capacity` in both directions."""

    count: Count = 1
    bytes_per_s: Bandwidth = field(name="capacity")
    scope: NicScope = "gpu"
    """Use of the cards: with `gpu`, GPU g uses card g * count // gpus; with `instance`, an instance uses the card of
    its first GPU on the node; `server` combines the cards into one."""
    efficiency: Efficiency = 1.0
    """Share of `capacity` that a KV transfer reaches (RDMA, NIXL, TCP)."""

    @property
    def kv_bytes_per_s(self) -> float:
        """Rate of one card for KV, in bytes per second and direction."""
        return float(self.bytes_per_s) * self.efficiency


class Nics(Entry, frozen=True, kw_only=True):
    """The network cards of a node: the compute network carries KV caches, the storage network reads and writes stored
    ones."""

    compute: Nic | None = None
    storage: Nic | None = None


class Datacenter(Entry, frozen=True, kw_only=True):
    """A site. Its core connects all its pods without oversubscription."""

    name: Name


class Pod(Entry, frozen=True, kw_only=True):
    """Racks below one aggregation layer. Without uplinks no traffic leaves it."""

    name: Name
    datacenter: Name | None = None
    uplinks: Uplinks | None = None


class Rack(Entry, frozen=True, kw_only=True):
    """Nodes below one top-of-rack switch. Without uplinks no traffic leaves it."""

    name: Name
    pod: Name | None = None
    datacenter: Name | None = None
    """Only without `pod`: the uplinks then lead directly to the core."""
    uplinks: Uplinks | None = None


class Node(Entry, frozen=True, kw_only=True):
    """One server. Only its nearest parent is given; without rack and pod its cards lead directly to the core."""

    name: Name
    rack: Name | None = None
    pod: Name | None = None
    datacenter: Name | None = None
    gpus: GpuCount = 8
    nvlink_bytes_per_s: Bandwidth = field(name="nvlink", default=Bandwidth(450e9))
    """Per GPU and direction."""
    nics: Nics = Nics()


class Wan(Entry, frozen=True, kw_only=True):
    """`count` equal links between two datacenters, each with `capacity` in both directions."""

    source: Name = field(name="from")
    target: Name = field(name="to")
    bytes_per_s: Bandwidth = field(name="capacity")
    count: Count = 1
    latency_s: Latency = field(name="latency", default=Latency(0.0))


class TierLatency(Entry, frozen=True, kw_only=True):
    """One-way latency between two instances, by their nearest common domain (defaults: NetKV VI-A)."""

    node_s: Latency = field(name="node", default=Latency(1e-6))
    rack_s: Latency = field(name="rack", default=Latency(3e-6))
    pod_s: Latency = field(name="pod", default=Latency(8e-6))
    datacenter_s: Latency = field(name="datacenter", default=Latency(15e-6))


class TierBandwidth(Entry, frozen=True, kw_only=True):
    """Bandwidth per tier that the scheduler uses; an absent one is derived from the links."""

    node_bytes_per_s: Bandwidth | None = field(name="node", default=None)
    rack_bytes_per_s: Bandwidth | None = field(name="rack", default=None)
    pod_bytes_per_s: Bandwidth | None = field(name="pod", default=None)
    datacenter_bytes_per_s: Bandwidth | None = field(name="datacenter", default=None)
    wan_bytes_per_s: Bandwidth | None = field(name="wan", default=None)


class Network(Entry, frozen=True, kw_only=True):
    """Settings of all transfers."""

    latency: TierLatency = TierLatency()
    ecmp: Ecmp = "flow"
    """Choice among equal links: every `flow` draws, or a `transfer` draws once for all its flows."""
    flows_per_transfer: Count | Literal["tp"] = "tp"
    """Number of flows of one transfer; `tp`: one per shard of the side with more shards."""
    tier_bandwidth: TierBandwidth = TierBandwidth()


class Oversubscription(Entry, frozen=True, kw_only=True):
    """Ratio of the NIC bandwidth below a domain to its uplink bandwidth: as many uplinks as NICs, each slower by this
    ratio."""

    rack: Ratio = 1.0
    pod: Ratio = 1.0


class FatTree(Entry, frozen=True, kw_only=True, tag="fat-tree", tag_field="kind"):
    """Equal pods of equal racks of equal nodes. Without given uplinks: as many as NICs, divided by oversubscription."""

    pods: Count
    racks_per_pod: Count
    nodes_per_rack: Count
    gpus_per_node: Annotated[int, Meta(ge=1, le=1024)] = 8
    nvlink_bytes_per_s: Bandwidth = field(name="nvlink", default=Bandwidth(450e9))
    nics: Nics
    rack_uplinks: Uplinks | None = None
    pod_uplinks: Uplinks | None = None
    oversubscription: Oversubscription | None = None


class SuperPod(Entry, frozen=True, kw_only=True, tag="superpod", tag_field="kind"):
    """Scalable units of nodes with one compute NIC per GPU and one storage NIC per node (DualPath 2.2).

    Rail switches connect all nodes of a unit in one hop, so a unit is a rack; a spine without oversubscription connects
    units.
    """

    units: Count = 1
    nodes_per_unit: Count = 32
    gpus_per_node: Annotated[int, Meta(ge=1, le=1024)] = 8
    nvlink_bytes_per_s: Bandwidth = field(name="nvlink", default=Bandwidth(450e9))
    compute_bytes_per_s: Bandwidth = field(name="compute", default=Bandwidth(50e9))
    storage_bytes_per_s: Bandwidth = field(name="storage", default=Bandwidth(50e9))
    efficiency: Efficiency = 1.0
    """Share of `compute` that a KV transfer reaches."""
    oversubscription: Ratio = 1.0


class AggregationEntry(Entry, frozen=True, kw_only=True):
    """Switches that sum the packets of a collective on their way (in-network aggregation)."""

    levels: list[SwitchLevel] = field(default_factory=lambda: ["rack"])
    """Levels whose switches aggregate."""
    slots: Count = 512
    """Packets that a switch aggregates at the same time, for each NIC of a server in a group."""
    packet_bytes: Size = field(name="packet", default=Size(1024.0))
    """Payload of one packet."""
    wire: WireType = "int32"
    """Type of the elements in packets: fixed point in 4 bytes, or half precision."""
    switch_s: Latency = field(name="time", default=Latency(1e-6))
    """Time of an aggregation in the switch."""
    fallback_share: Annotated[float, Meta(ge=0, le=1)] = field(name="fallback", default=0.0)
    """Share of the packets that find no slot and are summed on a GPU of the group (ATP)."""


class Collectives(Entry, frozen=True, kw_only=True):
    """All-reduces of tensor-parallel groups."""

    aggregation: AggregationEntry | None = None
    """None: no switch aggregates."""
    schemes: list[Scheme] | None = None
    """All-reduce schemes that groups may use beside `ring`, which they always may; None: all."""
