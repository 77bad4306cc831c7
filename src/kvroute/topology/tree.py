"""The cluster as a tree of domains for people to look at; routing does not use it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvroute.topology.cluster import Cluster
from kvroute.topology.schema import Uplinks
from kvroute.types import Instance

Kind: TypeAlias = Literal["cluster", "datacenter", "pod", "rack", "node"]
_KINDS: tuple[Kind, ...] = ("node", "rack", "pod", "datacenter")


@dataclass(frozen=True, slots=True)
class Domain:
    """A domain with its children in the file's order; a level that the file leaves out has an empty name."""

    kind: Kind
    name: str
    uplinks: Uplinks | None
    children: tuple[Domain, ...]
    instances: tuple[Instance, ...]
    """Of a node: those whose first GPU is there."""

    def all_instances(self) -> Iterator[Instance]:
        """Those of the whole subtree."""
        yield from self.instances
        for child in self.children:
            yield from child.all_instances()

    def nodes(self) -> Iterator[Domain]:
        """The nodes of the whole subtree."""
        if self.kind == "node":
            yield self
        for child in self.children:
            yield from child.nodes()


def domain_tree(cluster: Cluster) -> Domain:
    """Datacenters, pods, racks and nodes of a cluster, below one root."""
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
