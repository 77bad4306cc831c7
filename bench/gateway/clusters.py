"""Cluster files for the gateway's benches: fat trees with at least two pods, every instance with an endpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from bench.gateway.mock_worker import MODEL

from kvroute.topology import ClusterFile, InstanceCounts, InstanceDefaults, InstanceEntry, expand, fat_tree
from kvroute.topology.schema import EndpointEntry
from kvroute.types import KvProtocol
from kvroute_engine.files.units import Size

GPUS_PER_INSTANCE, GPUS_PER_NODE, NODES_PER_RACK = 4, 8, 4
KV_CAPACITY = Size(180e9)


def tree(prefill: int, decode: int) -> ClusterFile:
    """Return the smallest fat tree: 2:1 above the racks, 4:1 above its two or more pods, instances spread."""
    nodes = -(-(prefill + decode) * GPUS_PER_INSTANCE // GPUS_PER_NODE)
    racks = max(2, -(-nodes // NODES_PER_RACK))
    pods = max(2, -(-racks // 8))
    return fat_tree(
        f"bench-{prefill + decode}",
        pods=pods,
        racks_per_pod=-(-racks // pods),
        nodes_per_rack=NODES_PER_RACK,
        oversubscription=(2.0, 4.0),
        instances=InstanceCounts(prefill=prefill, decode=decode, placement="spread"),
        defaults=InstanceDefaults(model=MODEL, tp=GPUS_PER_INSTANCE, kv_capacity_bytes=KV_CAPACITY),
    )


def served(
    prefill: Sequence[int],
    decode: Sequence[int],
    gateway: Mapping[str, Any],
    *,
    protocol: KvProtocol = "vllm",
    bootstrap: str = "",
) -> ClusterFile:
    """Return a tree whose instances listen on these loopback ports, with a `gateway` section.

    Args:
        prefill, decode: ports.
        gateway: the section as in the file.
        protocol: KV protocol of all instances.
        bootstrap: `host:port` of the prefill engines' bootstrap server, if the protocol has one.
    """
    ports = {"prefill": iter(prefill), "decode": iter(decode)}

    def endpoint(instance: InstanceEntry) -> EndpointEntry:
        return EndpointEntry(
            url=f"http://127.0.0.1:{next(ports[instance.role])}",
            protocol=protocol,
            bootstrap=bootstrap if instance.role == "prefill" else "",
        )

    return reached(tree(len(prefill), len(decode)), endpoint, gateway)


def reached(
    file: ClusterFile, endpoint: Callable[[InstanceEntry], EndpointEntry], gateway: Mapping[str, Any]
) -> ClusterFile:
    """Return the file with an endpoint for every instance, requested in the file's order, and a `gateway` section."""
    file = expand(file)
    assert isinstance(file.instances, list)
    instances = [msgspec.structs.replace(instance, endpoint=endpoint(instance)) for instance in file.instances]
    return msgspec.structs.replace(file, instances=instances, gateway=dict(gateway))


def write(file: ClusterFile, folder: Path) -> Path:
    """Write the file as YAML into the folder; return its path."""
    path = folder / f"{file.name}.yaml"
    path.write_text(file.to_yaml())
    return path
