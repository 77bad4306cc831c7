"""Custom resources `ClusterTopology` and `KvRouter`: their types, checks and definitions."""

from kvroute.kube.resources.fields import GROUP, VERSION, Object, name_of, read_spec
from kvroute.kube.resources.router import KvRouterSpec, Ports, TransferTopology
from kvroute.kube.resources.topology import (
    ClusterTopologySpec,
    NetworkQos,
    TopologyLevel,
    place_of,
    read_grove_levels,
)

__all__ = [
    "GROUP",
    "VERSION",
    "ClusterTopologySpec",
    "KvRouterSpec",
    "NetworkQos",
    "Object",
    "Ports",
    "TopologyLevel",
    "TransferTopology",
    "name_of",
    "place_of",
    "read_grove_levels",
    "read_spec",
]
