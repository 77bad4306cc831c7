"""Which node labels a KvRouter's constraint means: from a ClusterTopology, from Grove's, or from an explicit label."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvroute.kube.resources.router import TransferTopology
from kvroute.kube.resources.topology import ClusterTopologySpec, TopologyLevel, place_of
from kvroute.policies.constraint import Level
from kvroute.types import InputError
from kvroute_engine.files.form import nearest

FIELD = "spec.kvCacheTransferTopology"


@dataclass(frozen=True, slots=True)
class Catalog:
    """The topologies of a cluster, by name; None: the CustomResourceDefinition is not installed."""

    own: Mapping[str, ClusterTopologySpec] | None = None
    grove: Mapping[str, ClusterTopologySpec] | None = None

    def find(self, name: str) -> ClusterTopologySpec | None:
        """Return a topology; kvroute's own one counts before Grove's of the same name."""
        return (self.own or {}).get(name) or (self.grove or {}).get(name)


@dataclass(frozen=True, slots=True)
class ResolvedTopology:
    """What a constraint means in this cluster."""

    levels: tuple[TopologyLevel, ...]
    """Levels whose labels engine pods get, from the broadest to the narrowest."""
    level: TopologyLevel
    """The level of the constraint, one of `levels`."""
    place: Level
    """The same level in kvroute's network model."""


def resolve(transfer: TransferTopology, catalog: Catalog) -> ResolvedTopology:
    """Return the meaning of a constraint.

    Raises:
        InputError: no topology can be read, the topology or its level does not exist, or kvroute has no such level.
    """
    if transfer.label is not None:
        level = TopologyLevel(domain=transfer.level, label_key=transfer.label, place=transfer.place)
        return ResolvedTopology((level,), level, _place(level, f"{FIELD}.place"))
    name = transfer.cluster_topology_name
    if name is None:
        raise InputError(
            "the level has no meaning yet",
            where=FIELD,
            hint="set clusterTopologyName, or set label to a label of nodes",
        )
    topology = _topology(name, catalog)
    found = topology.level(transfer.level)
    if found is None:
        known = [level.domain for level in topology.levels]
        what = f"{transfer.level!r} is no domain of the ClusterTopology {name!r}"
        raise InputError(what, where=f"{FIELD}.level", hint=nearest(transfer.level, known))
    return ResolvedTopology(tuple(topology.levels), found, _place(found, f"{FIELD}.level"))


def _topology(name: str, catalog: Catalog) -> ClusterTopologySpec:
    where = f"{FIELD}.clusterTopologyName"
    if catalog.own is None and catalog.grove is None:
        raise InputError(
            "the cluster has no resource ClusterTopology, neither kvroute's nor Grove's",
            where=where,
            hint="install the CustomResourceDefinitions of kvroute or Grove, or use label instead",
        )
    found = catalog.find(name)
    if found is None:
        known = sorted({*(catalog.own or {}), *(catalog.grove or {})})
        hint = nearest(name, known) or "create it, or use label instead"
        raise InputError(f"the ClusterTopology {name!r} does not exist", where=where, hint=hint)
    return found


def _place(level: TopologyLevel, where: str) -> Level:
    place = place_of(level)
    if place is None:
        what = f"the level {level.domain!r} has no place in kvroute's network model"
        fix = "set place of that level to node, rack, pod or datacenter"
        raise InputError(what, where=where, hint=fix)
    return place
