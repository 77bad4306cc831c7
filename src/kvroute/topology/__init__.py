"""Nodes, links, paths and tiers of a cluster, from a checked cluster file or a builder. It simulates no transfers."""

from kvroute.topology.cluster import STORAGE, Cluster, Link
from kvroute.topology.drafts.builders import (
    H100_LLAMA_70B_TP4,
    LLAMA_70B_TP4,
    fat_tree,
    superpod,
    two_datacenters,
)
from kvroute.topology.reading.assembly import build, load, load_network, parse
from kvroute.topology.reading.expansion import expand
from kvroute.topology.schema import ClusterFile, InstanceCounts, InstanceDefaults, InstanceEntry, Network, TimingEntry
from kvroute_engine.files.form import FileError
from kvroute_engine.files.units import (
    bandwidth_bytes_per_s,
    bandwidth_text,
    duration_s,
    duration_text,
    size_bytes,
    size_text,
)

__all__ = [
    "H100_LLAMA_70B_TP4",
    "LLAMA_70B_TP4",
    "STORAGE",
    "Cluster",
    "ClusterFile",
    "FileError",
    "InstanceCounts",
    "InstanceDefaults",
    "InstanceEntry",
    "Link",
    "Network",
    "TimingEntry",
    "bandwidth_bytes_per_s",
    "bandwidth_text",
    "build",
    "duration_s",
    "duration_text",
    "expand",
    "fat_tree",
    "load",
    "load_network",
    "parse",
    "size_bytes",
    "size_text",
    "superpod",
    "two_datacenters",
]
