"""The cluster as other packages use it: instances, directed links, tiers, and the path between any two shards.

The caller that starts a flow chooses one of several equal links; `flows` computes the load of the links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec
import numpy as np

from kvroute.topology.place import Places, Route, Shards, card_of
from kvroute.topology.schema import ClusterFile, Ecmp
from kvroute.types import (
    CROSS_DATACENTER,
    SAME_NODE,
    TIER_COUNT,
    FloatArray,
    InputError,
    Instance,
    TierArray,
    TimingSpec,
)
from kvroute_engine.files.form import Lines

Group: TypeAlias = tuple[int, ...]
Path: TypeAlias = tuple[Group, ...]
STORAGE = -1
"""Tier of the links of storage NICs: a separate network, which no KV transfer between instances uses."""
_MEMO_MOST = 2_000_000
_NOTHING: tuple[Group, Group] = ((), ())


class Link(msgspec.Struct, frozen=True, gc=False):
    """One direction of one cable; its index in `Cluster.links` is its id."""

    name: str
    source: str
    target: str
    bytes_per_s: float
    tier: int
    """Lowest tier that uses it: 0 NVLink, 1 NIC, 2 rack uplink, 3 pod uplink, 4 between datacenters; or STORAGE."""


@dataclass(frozen=True, slots=True)
class Cables:
    """Link ids by kind; one tuple is one ECMP group."""

    nvlink: tuple[tuple[tuple[int, int], ...], ...]
    """[node][GPU]: out, in."""
    nic: tuple[tuple[tuple[int, int], ...], ...]
    """[node][card]: up, down. One card if the scope is `server`."""
    storage: tuple[tuple[tuple[int, int], ...], ...]
    store: int | None
    """Link from the store to all storage NICs; None: they are the only limit."""
    rack: dict[str, tuple[Group, Group]]
    """By rack name: up, down."""
    pod: dict[str, tuple[Group, Group]]
    wan: tuple[tuple[Group, Group], ...]
    """[entry of `wan`]: forward, backward."""


@dataclass(frozen=True, slots=True, eq=False)
class Cluster:
    """A checked cluster; n instances ascending by name, links by id."""

    name: str
    instances: tuple[Instance, ...]
    links: tuple[Link, ...]
    capacity_bytes_per_s: FloatArray
    """Capacity by link id."""
    tier: TierArray
    """[n, n]: 0 same node, 1 rack, 2 pod, 3 datacenter, 4 across. A missing rack or pod is shared with no other
    instance. An instance over several nodes has the location of its first GPU."""
    tier_latency_s: FloatArray
    """[TIER_COUNT]; across datacenters: the latency of the slowest route."""
    tier_bytes_per_s: FloatArray
    """[TIER_COUNT]: declared in the file, else derived (`bandwidth.tier_bytes_per_s`); always finite and positive."""
    timing: dict[str, TimingSpec]
    ecmp: Ecmp
    file: ClusterFile
    """Expanded file from which the cluster was built."""
    places: Places
    cables: Cables
    routes: dict[tuple[str, str], Route]
    shards: tuple[Shards, ...]
    """[instance][shard]: node number and GPU index."""
    remarks: tuple[str, ...] = ()
    """Implausible values in the file, in sentences for the user."""
    lines: Lines = field(default_factory=lambda: Lines(""), repr=False)
    """Lines of the file's keys, for faults that other packages find in it."""
    _positions: dict[str, int] = field(default_factory=dict, repr=False)
    _climbs: dict[tuple[int, int], tuple[tuple[Path, Path], ...]] = field(default_factory=dict, repr=False)
    _paths: dict[tuple[int, int, int], Path] = field(default_factory=dict, repr=False)

    def index(self, name: str) -> int:
        """Return the position of the instance `name`; raise InputError if there is none."""
        if not self._positions:
            self._positions.update((instance.name, position) for position, instance in enumerate(self.instances))
        if name not in self._positions:
            raise InputError(f"there is no instance {name!r} in {self.name}", hint="`kvroute topology show` lists them")
        return self._positions[name]

    def flows_per_transfer(self, source: int, target: int) -> int:
        """Return the number of flows of one KV transfer: as set in the file, else one per shard of the side with more
        shards."""
        flows = self.file.network.flows_per_transfer
        return flows if isinstance(flows, int) else max(len(self.shards[source]), len(self.shards[target]))

    def latency_s(self, source: int, target: int) -> float:
        """Return the one-way latency of the pair, including links between datacenters."""
        tier = int(self.tier[source, target])
        if tier < CROSS_DATACENTER:
            return float(self.tier_latency_s[tier])
        sites = self.places.datacenters
        route = self._route(sites[self.shards[source][0][0]], sites[self.shards[target][0][0]])
        return float(self.file.network.latency.datacenter_s) + _route_latency_s(self.file, route)

    def links_of_tier(self, tier: int) -> Group:
        """Return the ids of the links that `tier` adds (see `Link.tier`), ascending. Background traffic of the tier
        uses them."""
        return tuple(link for link, entry in enumerate(self.links) if entry.tier == tier)

    def storage_links(self, instance: int) -> tuple[tuple[int, int], ...]:
        """Return (out, in) link ids of each storage NIC of the instance's first node; empty without one."""
        return self.cables.storage[self.shards[instance][0][0]]

    def storage_read_paths(self, instance: int) -> list[list[int]]:
        """Return the link ids of a read from the store over each storage NIC of the instance's first node."""
        before = [] if self.cables.store is None else [self.cables.store]
        return [[*before, down] for _, down in self.storage_links(instance)]

    def hops(self, source: int, target: int, shard: int) -> Path:
        """Return the path of one shard's flow as ECMP groups of link ids, in order; each group is drawn from
        separately.

        Shard i leaves from GPU i modulo the source's GPUs and enters GPU i modulo the target's.

        Raises:
            InputError: the two cannot reach each other (`check` accepts this only for pairs without KV transfers).
        """
        path = self._paths.get((source, target, shard))
        if path is None:
            path = self._path(source, target, shard)
            if len(self._paths) < _MEMO_MOST:
                self._paths[source, target, shard] = path
        return path

    def _path(self, source: int, target: int, shard: int) -> Path:
        leaving, entering = self.shards[source], self.shards[target]
        first, last = shard % len(leaving), shard % len(entering)
        near, far = leaving[first][0], entering[last][0]
        level = self.places.level(near, far)
        if level == SAME_NODE:
            return (
                (self.cables.nvlink[near][leaving[first][1]][0],),
                (self.cables.nvlink[far][entering[last][1]][1],),
            )
        if level > min(self.places.reach[near], self.places.reach[far]):
            names = (self.instances[source].name, self.instances[target].name)
            raise InputError(f"{names[1]} cannot be reached from {names[0]}", hint="run `kvroute topology check`")
        across: Path = ()
        if level == CROSS_DATACENTER:
            route = self._route(self.places.datacenters[near], self.places.datacenters[far])
            across = tuple(self.cables.wan[entry][0 if forward else 1] for entry, forward in route)
        return self._climb(source, first)[level][0] + across + self._climb(target, last)[level][1]

    def _climb(self, instance: int, position: int) -> tuple[tuple[Path, Path], ...]:
        """Return by tier the groups from one shard's NIC up to the switch that joins the tier, and from there down to
        the NIC."""
        climbs = self._climbs.get((instance, position))
        if climbs is None:
            node = self.shards[instance][position][0]
            rack, pod = self.places.racks[node], self.places.pods[node]
            card = self.cables.nic[node][card_of(self.places, self.shards[instance], position)]
            steps: list[tuple[Group, Group]] = [((card[0],), (card[1],))]
            steps.append(self.cables.rack.get(rack.name, _NOTHING) if rack else _NOTHING)
            steps.append(self.cables.pod.get(pod.name, _NOTHING) if pod else _NOTHING)
            climbs = tuple(
                (tuple(up for up, _ in steps[:tier] if up), tuple(down for _, down in steps[:tier][::-1] if down))
                for tier in range(TIER_COUNT)
            )
            self._climbs[instance, position] = climbs
        return climbs

    def _route(self, source: str, target: str) -> Route:
        route = self.routes.get((source, target))
        if route is None:
            raise InputError(f"no links connect {source} and {target}", hint="add them under `wan`")
        return route


def _route_latency_s(file: ClusterFile, route: Route) -> float:
    return sum(float(file.wan[entry].latency_s) for entry, _ in route)


def tier_matrix(places: Places, first_nodes: Sequence[int]) -> TierArray:
    """Return the tiers of instances whose first GPU is on these nodes, [n, n]."""
    codes = places.code[:, np.array(first_nodes, dtype=np.int64)]
    tier = np.full((len(first_nodes), len(first_nodes)), CROSS_DATACENTER, dtype=np.int8)
    same = np.empty(tier.shape, dtype=np.bool_)
    for code in codes:
        np.equal(code[:, None], code[None, :], out=same)
        tier -= same.view(np.int8)
    return tier


def tier_latency_s(file: ClusterFile, routes: dict[tuple[str, str], Route]) -> FloatArray:
    """Return the declared latencies, [TIER_COUNT]; tier 4 adds the latency of the slowest route."""
    latency = file.network.latency
    slowest_s = max((_route_latency_s(file, route) for route in routes.values()), default=0.0)
    across_s = latency.datacenter_s + slowest_s
    seconds = [latency.node_s, latency.rack_s, latency.pod_s, latency.datacenter_s, across_s]
    assert len(seconds) == TIER_COUNT
    return np.array([float(second) for second in seconds])
