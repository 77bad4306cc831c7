"""Cluster files for the programs of a testbed. The engines' file has no link limits, because the kernel sets the pace.
The gateway's file has the true rates and the engines' addresses."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvroute.topology import Cluster
from kvroute.topology.schema import (
    ClusterFile,
    EndpointEntry,
    InstanceEntry,
    Network,
    Nic,
    Nics,
    Rack,
    TierLatency,
)
from kvroute.types import Endpoint
from kvroute_engine.files.units import Bandwidth, Latency

UNBOUND = Bandwidth(12.5e12)
"""The fastest link that a cluster file may have, 100 Tbps: emulated engines then send all bytes at once."""


def unpaced(cluster: Cluster) -> ClusterFile:
    """Return the same instances on the same GPUs behind unlimited links, without latency."""
    file = cluster.file
    none = Latency(0.0)
    cards = Nics(compute=Nic(bytes_per_s=UNBOUND, scope="server"))
    return msgspec.structs.replace(
        file,
        datacenters=[],
        pods=[],
        racks=[Rack(name="rack0")],
        nodes=[
            msgspec.structs.replace(
                node, rack="rack0", pod=None, datacenter=None, nvlink_bytes_per_s=UNBOUND, nics=cards
            )
            for node in file.nodes
        ],
        wan=[],
        network=Network(
            latency=TierLatency(node_s=none, rack_s=none, pod_s=none, datacenter_s=none), flows_per_transfer=1
        ),
        gateway={},
    )


def served(cluster: Cluster, endpoints: Mapping[str, Endpoint]) -> ClusterFile:
    """Return the cluster's own file, without shorthands, with the address of every engine.

    It sets `measure: engine`, because engines count their transfers. With timing by first bytes, too, the first
    transfers would count twice.
    """
    entries = cluster.file.instances
    assert isinstance(entries, list), "a Cluster keeps its file without shorthands"
    return msgspec.structs.replace(
        cluster.file,
        instances=[_with(entry, endpoints[entry.name]) for entry in entries],
        gateway={"measure": "engine", **cluster.file.gateway},
    )


def _with(entry: InstanceEntry, endpoint: Endpoint) -> InstanceEntry:
    return msgspec.structs.replace(
        entry,
        endpoint=EndpointEntry(
            url=endpoint.url,
            bootstrap=endpoint.bootstrap,
            kv_events=endpoint.kv_events,
            kv_replay=endpoint.kv_replay,
            buffer=endpoint.buffer,
        ),
    )
