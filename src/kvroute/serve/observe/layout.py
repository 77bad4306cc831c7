"""The cluster as the dashboard's map: nested domains, and the static properties of each instance."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from kvroute.topology import Cluster
from kvroute.topology.tree import TIER_NAMES, Domain, domain_tree
from kvroute.types import Role


class MapDomain(msgspec.Struct, frozen=True, kw_only=True):
    """A domain of the map; a node refers to its instances by position in `ClusterLayout.instances`."""

    kind: str
    name: str
    children: tuple[MapDomain, ...] = ()
    instances: tuple[int, ...] = ()


class LayoutInstance(msgspec.Struct, frozen=True, kw_only=True):
    """Static properties of an instance."""

    name: str
    role: Role
    model: str
    place: str
    gpus: int
    protocol: str
    batch_max: int
    url: str
    """URL of the engine; empty in a simulation."""


class MapSite(msgspec.Struct, frozen=True, kw_only=True):
    """A datacenter and its role."""

    name: str
    role: Literal["prefill", "home"]
    """prefill: the cluster file gives it only prefill instances; home: it also decodes."""


class WanLink(msgspec.Struct, frozen=True, kw_only=True):
    """All links of one entry of the cluster file's `wan`."""

    source: str
    target: str
    bytes_per_s: float
    """Bandwidth in each direction."""
    latency_s: float


class ClusterLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster as a tree; `id` changes when the cluster file is reloaded."""

    id: int
    name: str
    root: MapDomain
    instances: tuple[LayoutInstance, ...]
    sites: tuple[MapSite, ...]
    """Datacenters, ascending by name."""
    wan: tuple[WanLink, ...]
    tiers: tuple[str, ...]
    """Names of all tiers."""
    tiers_present: tuple[int, ...]
    """Tiers between any two of the instances, ascending."""
    tier_bytes_per_s: tuple[float, ...]


def layout_of(cluster: Cluster, number: int) -> ClusterLayout:
    """Return the map of a cluster; instances are in the cluster's order."""
    positions = {instance.name: k for k, instance in enumerate(cluster.instances)}
    return ClusterLayout(
        id=number,
        name=cluster.name,
        root=_place(domain_tree(cluster), positions),
        instances=tuple(
            LayoutInstance(
                name=instance.name,
                role=instance.role,
                model=instance.model,
                place=" / ".join(filter(None, (instance.datacenter, instance.pod, instance.rack, instance.node))),
                gpus=len(instance.gpus),
                protocol=instance.protocol,
                batch_max=instance.batch_max,
                url=instance.endpoint.url if instance.endpoint is not None else "",
            )
            for instance in cluster.instances
        ),
        sites=_sites(cluster),
        wan=tuple(
            WanLink(
                source=entry.source,
                target=entry.target,
                bytes_per_s=float(entry.bytes_per_s) * entry.count,
                latency_s=float(entry.latency_s),
            )
            for entry in cluster.file.wan
        ),
        tiers=TIER_NAMES,
        tiers_present=_tiers_present(cluster),
        tier_bytes_per_s=tuple(cluster.tier_bytes_per_s.tolist()),
    )


def _tiers_present(cluster: Cluster) -> tuple[int, ...]:
    others = ~np.eye(len(cluster.instances), dtype=np.bool_)
    return tuple(np.unique(cluster.tier[others]).tolist())


def _sites(cluster: Cluster) -> tuple[MapSite, ...]:
    homes = {instance.datacenter for instance in cluster.instances if instance.role != "prefill"}
    names = sorted({instance.datacenter for instance in cluster.instances})
    return tuple(MapSite(name=name, role="home" if name in homes else "prefill") for name in names)


def _place(domain: Domain, positions: dict[str, int]) -> MapDomain:
    return MapDomain(
        kind=domain.kind,
        name=domain.name,
        children=tuple(_place(child, positions) for child in domain.children),
        instances=tuple(positions[instance.name] for instance in domain.instances),
    )
