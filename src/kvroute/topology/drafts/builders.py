"""Builders of regular clusters as ClusterFiles: fat trees, SuperPODs, two datacenters. They use shorthands if
possible."""

from __future__ import annotations

from collections.abc import Sequence

from kvroute.topology.reading.expansion import fabric_uplinks, numbered
from kvroute.topology.schema import (
    ClusterFile,
    Datacenter,
    DecodeEntry,
    FatTree,
    InstanceCounts,
    InstanceDefaults,
    InstanceEntry,
    LinearPrefillEntry,
    Network,
    Nic,
    Nics,
    NicScope,
    Node,
    Oversubscription,
    Rack,
    SuperPod,
    TimingEntry,
    Uplinks,
    Wan,
)
from kvroute.types import InputError
from kvroute_engine.files.units import Bandwidth, Latency, Size

H100_LLAMA_70B_TP4 = TimingEntry(
    prefill=LinearPrefillEntry(per_token_s=90e-6, base_s=20e-3),
    decode=DecodeEntry(base_s=12.5e-3, per_request_s=0.1e-3),
)
"""Llama-3-70B on four H100, in the range of the sources that NetKV VI-A fits; profile your own engine."""

LLAMA_70B_TP4 = InstanceDefaults(model="llama-3-70b", tp=4, kv_capacity_bytes=Size(180e9))
"""45 GB of free memory on each of four GPUs (NetKV VI-A)."""


def fat_tree(
    name: str = "fat-tree",
    *,
    pods: int,
    racks_per_pod: int,
    nodes_per_rack: int,
    gpus_per_node: int = 8,
    nvlink_bytes_per_s: float = 450e9,
    nic_bytes_per_s: float = 12.5e9,
    nics_per_node: int | None = None,
    nic_scope: NicScope = "gpu",
    rack_uplinks: tuple[int, float] | None = None,
    pod_uplinks: tuple[int, float] | None = None,
    oversubscription: tuple[float, float] | None = None,
    instances: InstanceCounts | Sequence[InstanceEntry],
    network: Network | None = None,
    timing: dict[str, TimingEntry] | None = None,
    defaults: InstanceDefaults = LLAMA_70B_TP4,
) -> ClusterFile:
    """Return a fat tree; uplinks are (count, bytes/s each), else one per NIC divided by `oversubscription` (rack,
    pod)."""
    nic = Nic(count=nics_per_node or gpus_per_node, bytes_per_s=Bandwidth(nic_bytes_per_s), scope=nic_scope)
    fabric = FatTree(
        pods=pods,
        racks_per_pod=racks_per_pod,
        nodes_per_rack=nodes_per_rack,
        gpus_per_node=gpus_per_node,
        nvlink_bytes_per_s=Bandwidth(nvlink_bytes_per_s),
        nics=Nics(compute=nic),
        rack_uplinks=_uplinks(rack_uplinks),
        pod_uplinks=_uplinks(pod_uplinks),
        oversubscription=oversubscription and Oversubscription(rack=oversubscription[0], pod=oversubscription[1]),
    )
    return _cluster_file(name, fabric, instances, network, timing, defaults)


def superpod(
    name: str = "superpod",
    *,
    units: int = 1,
    nodes_per_unit: int = 32,
    gpus_per_node: int = 8,
    compute_bytes_per_s: float = 50e9,
    storage_bytes_per_s: float = 50e9,
    oversubscription: float = 1.0,
    instances: InstanceCounts | Sequence[InstanceEntry],
    network: Network | None = None,
    timing: dict[str, TimingEntry] | None = None,
    defaults: InstanceDefaults = LLAMA_70B_TP4,
) -> ClusterFile:
    """Return scalable units with one compute NIC per GPU and one storage NIC per node, 400 Gbps each by default."""
    fabric = SuperPod(
        units=units,
        nodes_per_unit=nodes_per_unit,
        gpus_per_node=gpus_per_node,
        compute_bytes_per_s=Bandwidth(compute_bytes_per_s),
        storage_bytes_per_s=Bandwidth(storage_bytes_per_s),
        oversubscription=oversubscription,
    )
    return _cluster_file(name, fabric, instances, network, timing, defaults)


def two_datacenters(
    name: str = "two-datacenters",
    *,
    prefill_nodes: int,
    local_prefill_nodes: int,
    decode_nodes: int,
    gpus_per_node: int = 8,
    nic_bytes_per_s: float = 12.5e9,
    wan_bytes_per_s: float = 12.5e9,
    wan_latency_s: float = 5e-3,
    timing: dict[str, TimingEntry] | None = None,
    defaults: InstanceDefaults = LLAMA_70B_TP4,
) -> ClusterFile:
    """Return a prefill-only site and a site with prefill and decode, joined by one slow link (PrfaaS 4.1).

    Each instance has its own node; the prefill site uses the timing `prefill-site` if there is one.
    """
    sites = {"prefill-site": prefill_nodes, "local-site": local_prefill_nodes + decode_nodes}
    nics = Nics(compute=Nic(count=gpus_per_node, bytes_per_s=Bandwidth(nic_bytes_per_s)))
    nodes = [
        Node(name=node, rack=f"{site}-rack", gpus=gpus_per_node, nics=nics)
        for site, count in sites.items()
        for node in numbered(f"{site}-node", count)
    ]
    prefills = prefill_nodes + local_prefill_nodes
    times = timing or {"default": H100_LLAMA_70B_TP4}
    tp = defaults.tp * defaults.pp
    if tp > gpus_per_node:
        raise InputError(f"an instance of {tp} GPUs does not fit on a node with {gpus_per_node}", hint="lower tp")
    entries = [
        InstanceEntry(
            name=node.name.replace("-node", "-prefill" if index < prefills else "-decode"),
            role="prefill" if index < prefills else "decode",
            gpus=f"{node.name}:0-{tp - 1}",
            timing="prefill-site" if node.rack == "prefill-site-rack" and "prefill-site" in times else None,
        )
        for index, node in enumerate(nodes)
    ]
    return ClusterFile(
        name=name,
        datacenters=[Datacenter(name=site) for site in sites],
        racks=[
            Rack(name=f"{site}-rack", datacenter=site, uplinks=fabric_uplinks(count, nics))
            for site, count in sites.items()
        ],
        nodes=nodes,
        wan=[
            Wan(
                source="prefill-site",
                target="local-site",
                bytes_per_s=Bandwidth(wan_bytes_per_s),
                latency_s=Latency(wan_latency_s),
            )
        ],
        timing=times,
        defaults=defaults,
        instances=entries,
    )


def _cluster_file(
    name: str,
    fabric: FatTree | SuperPod,
    instances: InstanceCounts | Sequence[InstanceEntry],
    network: Network | None,
    timing: dict[str, TimingEntry] | None,
    defaults: InstanceDefaults,
) -> ClusterFile:
    return ClusterFile(
        name=name,
        fabric=fabric,
        network=network or Network(),
        timing=timing or {"default": H100_LLAMA_70B_TP4},
        defaults=defaults,
        instances=instances if isinstance(instances, InstanceCounts) else list(instances),
    )


def _uplinks(pair: tuple[int, float] | None) -> Uplinks | None:
    return None if pair is None else Uplinks(count=pair[0], bytes_per_s=Bandwidth(pair[1]))
