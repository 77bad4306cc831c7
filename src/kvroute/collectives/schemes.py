"""All-reduce schemes as sets of flows over the links of a cluster.

`ring`: one ring over all GPUs, with one NIC per server. `multi-rail-ring`: one ring per NIC of a server, each for a
part of the tensor (NCCL). `hierarchical-ring`: reduce-scatter over NVLink, a ring over the servers for each shard, and
all-gather over NVLink. `ina`: every GPU sends the tensor to a switch that aggregates (SwitchML). `hierarchical-ina`:
reduce-scatter over NVLink, then each shard through the switch, and all-gather (HeroServe). With a fallback, a share of
the packets finds no slot in the switch and is summed at a worker (ATP).

The flows of one all-reduce run at the same time, because every scheme is pipelined in chunks: its time is the time of
the flow that ends last, plus the latency of its steps. In comments and docstrings, P is the number of GPUs of the group
and n that of one server.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kvroute.topology.cluster import Cluster
from kvroute.topology.gpu_paths import Gpu, GpuPaths, Links
from kvroute.topology.place import Shards
from kvroute.topology.schema import AggregationEntry, SwitchLevel, WireType
from kvroute.types import SAME_DATACENTER, SAME_NODE, SAME_POD, SAME_RACK, InputError
from kvroute_engine.agent.schemes import SCHEMES, Scheme

WIRE_BYTES: dict[WireType, int] = {"int32": 4, "fp16": 2}
_LEVEL: dict[SwitchLevel, int] = {"rack": SAME_RACK, "pod": SAME_POD, "core": SAME_DATACENTER}


@dataclass(frozen=True, slots=True)
class Aggregation:
    """What switches that aggregate can do."""

    levels: frozenset[SwitchLevel] = frozenset({"rack"})
    """Levels whose switches aggregate."""
    slots: int = 512
    """Packets that a switch aggregates at the same time, for each NIC of a server in a group."""
    packet_bytes: int = 1024
    """Payload of one packet."""
    wire: WireType = "int32"
    """Type of the elements in packets: fixed point in 4 bytes, or half precision."""
    switch_s: float = 1e-6
    """Time of the aggregation in the switch (HeroServe's T_agg)."""
    fallback_share: float = 0.0
    """Share of the packets that find no slot and are summed at one worker of the group (ATP's parameter server)."""

    @classmethod
    def of(cls, entry: AggregationEntry | None) -> Aggregation | None:
        """Return the same as the section `collectives.aggregation` of a cluster file; None without it."""
        if entry is None:
            return None
        nbytes, seconds = int(entry.packet_bytes), float(entry.switch_s)
        return cls(frozenset(entry.levels), entry.slots, nbytes, entry.wire, seconds, entry.fallback_share)

    def __post_init__(self) -> None:
        if self.slots < 1 or self.packet_bytes < 1:
            what = f"{self.slots} slots of {self.packet_bytes} bytes"
            raise InputError(what, where="aggregation", hint="give 1 or more of both")
        if not 0 <= self.switch_s < math.inf:
            raise InputError(f"{self.switch_s} s", where="aggregation", hint="give a finite time of 0 or more")
        if not 0 <= self.fallback_share <= 1:
            what = f"a fallback of {self.fallback_share}"
            raise InputError(what, where="aggregation", hint="give a share of the packets between 0 and 1")


@dataclass(frozen=True, slots=True)
class AllReduce:
    """A tensor that a group of GPUs sums."""

    gpus: Shards
    nbytes: float
    element_bytes: int = 2
    """Size of one element in GPU memory."""


@dataclass(frozen=True, slots=True)
class CollectiveFlow:
    """Bytes over one path."""

    links: Links
    nbytes: float
    ceiling_bytes_per_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Collective:
    """The flows of one all-reduce with one scheme."""

    scheme: Scheme
    flows: tuple[CollectiveFlow, ...]
    latency_s: float
    """Latency of its steps one after another, without the time of the bytes."""


@dataclass(frozen=True, slots=True)
class _Group:
    """A group in the order of its ring: by place, server by server."""

    paths: GpuPaths
    servers: tuple[tuple[Gpu, ...], ...]

    @property
    def gpus(self) -> list[Gpu]:
        return [gpu for server in self.servers for gpu in server]

    @property
    def rails(self) -> int:
        """Number of shards or rings: GPUs of the server with the fewest, each with a NIC of its own."""
        return min(len(_by_card(self.paths, server)) for server in self.servers)

    def leaders(self, rail: int) -> list[Gpu]:
        """Return the GPU of each server that sends rail `rail`: GPUs with NICs of their own first."""
        return [_by_card(self.paths, server)[rail] for server in self.servers]


def all_reduce(
    scheme: Scheme, tensor: AllReduce, cluster: Cluster, aggregation: Aggregation | None = None
) -> Collective | None:
    """Return the flows of an all-reduce; None if the group cannot use the scheme.

    On one server all ring schemes are the same ring over NVLink, and no switch is used.

    Raises:
        InputError: an unknown scheme, a GPU that appears twice, fewer than two GPUs, or GPUs without a network between
            them.
    """
    if scheme not in SCHEMES:
        raise InputError(f"{scheme!r} is not an all-reduce scheme", hint=f"use one of: {', '.join(SCHEMES)}")
    if len(tensor.gpus) < 2 or len(set(tensor.gpus)) < len(tensor.gpus):
        raise InputError("a group has fewer than two GPUs, or one GPU twice", hint="list different GPUs")
    group = _group(tensor.gpus, cluster)
    if scheme in INA_SCHEMES:
        if aggregation is None or len(group.servers) == 1 or not _aggregates(group, aggregation):
            return None
        return _INA[scheme](group, tensor, aggregation)
    return _RINGS[scheme if len(group.servers) > 1 else "ring"](group, tensor, scheme)


def _group(gpus: Shards, cluster: Cluster) -> _Group:
    paths = GpuPaths(cluster, gpus)
    ordered = sorted(gpus, key=lambda gpu: (*reversed(cluster.places.domains[gpu[0]]), gpu))
    nodes = list(dict.fromkeys(node for node, _ in ordered))
    return _Group(paths, tuple(tuple(gpu for gpu in ordered if gpu[0] == node) for node in nodes))


def _by_card(paths: GpuPaths, server: tuple[Gpu, ...]) -> list[Gpu]:
    """Return one GPU for each compute NIC that the members on a server use, in order."""
    if paths.level == SAME_NODE:
        return list(server)
    first: dict[int, Gpu] = {}
    for gpu in server:
        first.setdefault(paths.card(gpu), gpu)
    return list(first.values())


def _ring_flows(paths: GpuPaths, ring: list[Gpu], nbytes: float) -> list[CollectiveFlow]:
    """Return the flows of a ring all-reduce of `nbytes`: each member sends 2(P-1)/P of them to the next one."""
    sent = 2.0 * (len(ring) - 1) / len(ring) * nbytes
    following = [*ring[1:], ring[0]]
    return [CollectiveFlow(paths.between(a, b), sent) for a, b in zip(ring, following, strict=True)]


def _ring_latency_s(paths: GpuPaths, ring: list[Gpu]) -> float:
    """Return the latency of the 2(P-1) steps of a ring; a chunk crosses each edge in turn."""
    around_s = sum(paths.latency_s(a, b) for a, b in zip(ring, [*ring[1:], ring[0]], strict=True))
    return 2.0 * (len(ring) - 1) / len(ring) * around_s


def _ring(group: _Group, tensor: AllReduce, scheme: Scheme) -> Collective:
    flows = _ring_flows(group.paths, _through(group, 0), tensor.nbytes)
    return Collective(scheme, tuple(flows), _ring_latency_s(group.paths, group.gpus))


def _through(group: _Group, rail: int) -> list[Gpu]:
    """Return a ring that enters each server at the leader of `rail` and leaves it at the GPU before it, so that the
    rings of all rails together use each NIC once in each direction."""
    ring: list[Gpu] = []
    for server, leader in zip(group.servers, group.leaders(rail), strict=True):
        at = server.index(leader)
        ring += [*server[at:], *server[:at]]
    return ring


def _multi_rail_ring(group: _Group, tensor: AllReduce, scheme: Scheme) -> Collective:
    rails = group.rails
    flows = [
        flow for rail in range(rails) for flow in _ring_flows(group.paths, _through(group, rail), tensor.nbytes / rails)
    ]
    return Collective(scheme, tuple(flows), _ring_latency_s(group.paths, group.gpus))


def _hierarchical_ring(group: _Group, tensor: AllReduce, scheme: Scheme) -> Collective:
    rails = group.rails
    flows = _scatter_and_gather(group, tensor.nbytes)
    for rail in range(rails):
        flows += _ring_flows(group.paths, group.leaders(rail), tensor.nbytes / rails)
    return Collective(scheme, tuple(flows), _nvlink_latency_s(group) + _ring_latency_s(group.paths, group.leaders(0)))


def _scatter_and_gather(group: _Group, nbytes: float) -> list[CollectiveFlow]:
    """Return the flows over NVLink that bring the sum of a server's shard to its leader, and the result to all."""
    rails, paths = group.rails, group.paths
    return [
        CollectiveFlow(paths.between(*ends), nbytes / rails)
        for rail in range(rails)
        for server, leader in zip(group.servers, group.leaders(rail), strict=True)
        for gpu in server
        if gpu != leader
        for ends in ((gpu, leader), (leader, gpu))
    ]


def _nvlink_latency_s(group: _Group) -> float:
    """Return the latency of reduce-scatter and all-gather on the server with the most members: 2(n-1) steps, as in a
    ring."""
    server = max(group.servers, key=len)
    return 2.0 * (len(server) - 1) * (group.paths.latency_s(server[0], server[1]) if len(server) > 1 else 0.0)


def _flat_ina(group: _Group, tensor: AllReduce, aggregation: Aggregation) -> Collective:
    flows = _switch_flows(group, group.gpus, tensor.nbytes, tensor.element_bytes, aggregation)
    return Collective("ina", tuple(flows), _switch_latency_s(group, aggregation))


def _hierarchical_ina(group: _Group, tensor: AllReduce, aggregation: Aggregation) -> Collective:
    rails = group.rails
    flows = _scatter_and_gather(group, tensor.nbytes)
    for rail in range(rails):
        flows += _switch_flows(group, group.leaders(rail), tensor.nbytes / rails, tensor.element_bytes, aggregation)
    latency_s = _nvlink_latency_s(group) + _switch_latency_s(group, aggregation)
    return Collective("hierarchical-ina", tuple(flows), latency_s)


def _aggregates(group: _Group, aggregation: Aggregation) -> bool:
    """Return whether the switch that joins the group aggregates."""
    return group.paths.level in {_LEVEL[level] for level in aggregation.levels}


def _switch_latency_s(group: _Group, aggregation: Aggregation) -> float:
    """Return the time of a packet to the switch and back: two messages and the aggregation."""
    first = group.gpus[0]
    farthest_s = max(group.paths.latency_s(first, gpu) for gpu in group.gpus[1:])
    return 2.0 * farthest_s + aggregation.switch_s


def _switch_flows(
    group: _Group, workers: list[Gpu], nbytes: float, element_bytes: int, aggregation: Aggregation
) -> list[CollectiveFlow]:
    """Return the flows of workers that sum `nbytes` in the switches, and of the result back to all.

    Switches below the one that joins the group aggregate, too, if they can: above them, one flow has the sum of all
    their workers. The slots limit the rate of every flow to slots * packet / round trip.
    """
    whole_bytes = nbytes * WIRE_BYTES[aggregation.wire] / element_bytes
    wire_bytes = (1.0 - aggregation.fallback_share) * whole_bytes
    ceiling = aggregation.slots * aggregation.packet_bytes / _switch_latency_s(group, aggregation)
    paths, low, senders = group.paths, 0, workers
    flows = _fallback_flows(group, workers, aggregation.fallback_share * whole_bytes)
    if not wire_bytes:
        return flows
    capable = sorted(_LEVEL[level] for level in aggregation.levels if _LEVEL[level] <= paths.level)
    for level in capable:
        for gpu in senders:
            up, down = paths.up(gpu, level), paths.down(gpu, level)
            skip = len(paths.up(gpu, low)) if low else 0
            flows.append(CollectiveFlow(up[skip:], wire_bytes, ceiling))
            flows.append(CollectiveFlow(down[: len(down) - skip], wire_bytes, ceiling))
        domains: dict[int, Gpu] = {}
        for gpu in senders:
            domains.setdefault(paths.domain(gpu, level), gpu)
        low, senders = level, list(domains.values())
    return flows


def _fallback_flows(group: _Group, workers: list[Gpu], nbytes: float) -> list[CollectiveFlow]:
    """Return the flows of packets without a slot: from every worker over the switch to the first one, which sums them,
    and back.

    They take no longer than packets with a slot: two messages.
    """
    server, paths, level = workers[0], group.paths, group.paths.level
    ends = [pair for gpu in workers[1:] for pair in ((gpu, server), (server, gpu))] if nbytes else []
    return [CollectiveFlow(paths.up(a, level) + paths.down(b, level), nbytes) for a, b in ends]


_RINGS: dict[Scheme, Callable[[_Group, AllReduce, Scheme], Collective]] = {
    "ring": _ring,
    "multi-rail-ring": _multi_rail_ring,
    "hierarchical-ring": _hierarchical_ring,
}
_INA: dict[Scheme, Callable[[_Group, AllReduce, Aggregation], Collective]] = {
    "ina": _flat_ina,
    "hierarchical-ina": _hierarchical_ina,
}
INA_SCHEMES: tuple[Scheme, ...] = tuple(_INA)
"""Schemes that need a switch that aggregates."""
