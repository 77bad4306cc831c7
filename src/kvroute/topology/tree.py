"""Views of the cluster for people: a tree of domains and a table of tiers. Routing does not use them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from kvroute.topology.cluster import Cluster
from kvroute.topology.schema import Uplinks
from kvroute.types import TIER_COUNT, Instance, Role
from kvroute_engine.files.units import bandwidth_text

Kind: TypeAlias = Literal["cluster", "datacenter", "pod", "rack", "node"]
TIER_NAMES = ("same node", "same rack", "same pod", "same datacenter", "across datacenters")
ROLE_COLOURS: dict[Role, str] = {"prefill": "#2f6db3", "decode": "#e08a2c", "both": "#7d55a8"}
_KINDS: tuple[Kind, ...] = ("node", "rack", "pod", "datacenter")


def uplinks_text(uplinks: Uplinks) -> str:
    """Return text such as `32 x 50 Gbps`."""
    capacity = bandwidth_text(uplinks.bytes_per_s)
    return capacity if uplinks.count == 1 else f"{uplinks.count} \N{MULTIPLICATION SIGN} {capacity}"


@dataclass(frozen=True, slots=True)
class Domain:
    """A domain with its children in the file's order; a level that is missing in the file has an empty name."""

    kind: Kind
    name: str
    uplinks: Uplinks | None
    children: tuple[Domain, ...]
    instances: tuple[Instance, ...]
    """Instances of a node: those whose first GPU is there."""

    def all_instances(self) -> Iterator[Instance]:
        """Yield the instances of the whole subtree."""
        yield from self.instances
        for child in self.children:
            yield from child.all_instances()

    def nodes(self) -> Iterator[Domain]:
        """Yield the nodes of the whole subtree."""
        if self.kind == "node":
            yield self
        for child in self.children:
            yield from child.nodes()


def domain_tree(cluster: Cluster) -> Domain:
    """Return the datacenters, pods, racks and nodes of a cluster, below one root."""
    places = cluster.places
    hosted: dict[int, list[Instance]] = {}
    for instance, gpus in zip(cluster.instances, cluster.shards, strict=True):
        hosted.setdefault(gpus[0][0], []).append(instance)
    level = [
        (number, Domain("node", node.name, None, (), tuple(hosted.get(number, ()))))
        for number, node in enumerate(places.nodes)
    ]
    for height, kind in enumerate(_KINDS[1:], start=1):
        members: dict[int, list[tuple[int, Domain]]] = {}
        for number, domain in level:
            members.setdefault(places.domains[number][height], []).append((number, domain))
        level = [
            (inside[0][0], Domain(kind, *_labels(cluster, kind, inside[0][0]), tuple(d for _, d in inside), ()))
            for inside in members.values()
        ]
    return Domain("cluster", cluster.name, None, tuple(domain for _, domain in level), ())


def _labels(cluster: Cluster, kind: Kind, node: int) -> tuple[str, Uplinks | None]:
    rack, pod = cluster.places.racks[node], cluster.places.pods[node]
    if kind == "rack":
        return (rack.name, rack.uplinks) if rack else ("", None)
    if kind == "pod":
        return (pod.name, pod.uplinks) if pod else ("", None)
    return cluster.places.datacenters[node], None


def tier_rows(cluster: Cluster) -> list[tuple[str, int, float, float]]:
    """Return per tier: name, pairs of a prefill and another decode instance, bytes per second, latency in seconds."""
    pairs = pair_counts(cluster)
    return [
        (TIER_NAMES[tier], pairs[tier], float(cluster.tier_bytes_per_s[tier]), float(cluster.tier_latency_s[tier]))
        for tier in range(TIER_COUNT)
    ]


def pair_counts(cluster: Cluster) -> list[int]:
    """Return the number of ordered pairs (prefill instance, other decode instance) per tier; role `both` counts on each
    side."""
    prefill = [i for i, instance in enumerate(cluster.instances) if instance.role != "decode"]
    decode = [i for i, instance in enumerate(cluster.instances) if instance.role != "prefill"]
    counts = np.bincount(cluster.tier[np.ix_(prefill, decode)].ravel(), minlength=TIER_COUNT)
    counts[0] -= len(set(prefill) & set(decode))
    return [int(count) for count in counts]
