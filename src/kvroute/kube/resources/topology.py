"""`ClusterTopology`: the levels of a cluster's network, each with the node label that names its domains.

The schema is that of Grove's ClusterTopology, plus `networkQoS` and `place` of each level.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from kvroute.kube.resources.fields import DomainName, LabelKey, Object, Part
from kvroute.policies.constraint import Level
from kvroute.types import InputError
from kvroute_engine.files.units import Bandwidth, Latency

_PLACES: dict[str, Level] = {
    **dict.fromkeys(("zone", "datacenter", "site"), "datacenter"),
    **dict.fromkeys(("pod", "superpod", "block", "spine", "cluster"), "pod"),
    **dict.fromkeys(("rack", "leaf", "nvlink-domain", "nvl-domain", "clique"), "rack"),
    **dict.fromkeys(("host", "node", "server"), "node"),
}


class NetworkQos(Part, frozen=True, kw_only=True):
    """What the network gives to a KV transfer between two nodes of one domain."""

    bytes_per_s: Bandwidth | None = field(name="bandwidth", default=None)
    """Bandwidth of one transfer."""
    latency_s: Latency | None = field(name="latency", default=None)
    """One-way latency."""


class TopologyLevel(Part, frozen=True, kw_only=True):
    """One level: nodes with the same value of the label are in the same domain."""

    domain: DomainName
    """Name of the level, such as `zone`, `block`, `rack` or `host`."""
    label_key: LabelKey
    """Label of nodes whose value names the domain."""
    network_qos: NetworkQos | None = field(name="networkQoS", default=None)
    """Bandwidth and latency inside a domain of this level."""
    place: Level | None = None
    """Level of kvroute's network model; it can be left out for the usual names."""


class ClusterTopologySpec(Part, frozen=True, kw_only=True):
    """Levels of the network."""

    levels: Annotated[list[TopologyLevel], Meta(min_length=1, max_length=8)]
    """From the broadest to the narrowest."""

    def level(self, domain: str) -> TopologyLevel | None:
        """Return the level of this name, or None."""
        return next((level for level in self.levels if level.domain == domain), None)


def place_of(level: TopologyLevel) -> Level | None:
    """Return the level of kvroute's network model: `place` if given, else by the usual meaning of the name."""
    return level.place or _PLACES.get(level.domain)


def read_grove_levels(obj: Object) -> ClusterTopologySpec:
    """Read Grove's ClusterTopology or ClusterTopologyBinding; fields other than the levels are ignored.

    Raises:
        InputError: a level has no domain or no label key.
    """
    levels = []
    for index, entry in enumerate((obj.get("spec") or {}).get("levels") or ()):
        domain, key = entry.get("domain"), entry.get("key") or entry.get("labelKey")
        if not domain or not key:
            raise InputError(
                "a level needs a domain and a key", where=f"spec.levels[{index}]", hint="add `domain` and `key`"
            )
        levels.append(TopologyLevel(domain=str(domain), label_key=str(key)))
    return ClusterTopologySpec(levels=levels)
