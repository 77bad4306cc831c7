"""Regular clusters as ClusterFiles: fat trees, SuperPODs, two datacenters; and what a file's shorthands stand for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

import msgspec

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
    Pod,
    Rack,
    SuperPod,
    TimingEntry,
    Uplinks,
    Wan,
)
from kvroute.topology.units import Bandwidth, Duration, Latency, Size
from kvroute.types import InputError, Role

H100_LLAMA_70B_TP4 = TimingEntry(
    prefill=LinearPrefillEntry(per_token_s=Duration(90e-6), base_s=Duration(20e-3)),
    decode=DecodeEntry(base_s=Duration(12.5e-3), per_request_s=Duration(0.1e-3)),
)
"""Llama-3-70B on four H100, within the range of the sources that NetKV VI-A fits; profile your own engine."""

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
    """A fat tree; uplinks are (count, bytes/s each), else one per NIC slowed by `oversubscription` (rack, pod)."""
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
    """Scalable units with one compute NIC per GPU and one storage NIC per node, 400 Gbps each by default."""
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
    """A site that only prefills beside one that prefills and decodes, one slow link between (PrfaaS 4.1).

    Each instance has a node of its own; the prefill site computes by the timing `prefill-site` if there is one.
    """
    sites = {"prefill-site": prefill_nodes, "local-site": local_prefill_nodes + decode_nodes}
    nics = Nics(compute=Nic(count=gpus_per_node, bytes_per_s=Bandwidth(nic_bytes_per_s)))
    nodes = [
        Node(name=node, rack=f"{site}-rack", gpus=gpus_per_node, nics=nics)
        for site, count in sites.items()
        for node in _names(f"{site}-node", count)
    ]
    prefills = prefill_nodes + local_prefill_nodes
    times = timing or {"default": H100_LLAMA_70B_TP4}
    tp = defaults.tp * defaults.pp
    if tp > gpus_per_node:
        raise InputError(f"an instance of {tp} GPUs does not fit a node of {gpus_per_node}", mend="lower tp")
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
            Rack(name=f"{site}-rack", datacenter=site, uplinks=_fabric_uplinks(count, nics))
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


def expand(file: ClusterFile) -> ClusterFile:
    """The same cluster without shorthands: fabric as pods, racks and nodes, counts as instances.

    Raises:
        InputError: the counts do not fit the nodes (`what` says by how much).
    """
    match file.fabric:
        case FatTree() as tree:
            pods, racks, nodes = _fat_tree_lists(tree)
        case SuperPod() as pod:
            pods, racks, nodes = _superpod_lists(pod)
        case None:
            pods, racks, nodes = file.pods, file.racks, file.nodes
    instances = file.instances
    if isinstance(instances, InstanceCounts):
        instances = _placed(instances, file.defaults, nodes)
    return msgspec.structs.replace(file, fabric=None, pods=pods, racks=racks, nodes=nodes, instances=instances)


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


def _names(stem: str, count: int) -> list[str]:
    """`stem0`, ... with leading zeros, so that the order of names is the order of numbers."""
    width = len(str(count - 1))
    return [f"{stem}{index:0{width}}" for index in range(count)]


def _fabric_uplinks(nodes: int, nics: Nics, ratio: float = 1.0) -> Uplinks | None:
    """As many uplinks as NICs below, each slower by `ratio`."""
    nic = nics.compute
    if nic is None:
        return None
    per_node = 1 if nic.scope == "server" else nic.count
    bytes_per_s = nic.bytes_per_s * (nic.count / per_node) / ratio
    return Uplinks(count=min(nodes * per_node, 65_536), bytes_per_s=Bandwidth(bytes_per_s))


def _fat_tree_lists(tree: FatTree) -> tuple[list[Pod], list[Rack], list[Node]]:
    ratio = tree.oversubscription or Oversubscription()
    rack_uplinks = tree.rack_uplinks or _fabric_uplinks(tree.nodes_per_rack, tree.nics, ratio.rack)
    per_pod = tree.racks_per_pod * tree.nodes_per_rack
    pod_uplinks = tree.pod_uplinks or _fabric_uplinks(per_pod, tree.nics, ratio.pod)
    pods = [Pod(name=name, uplinks=pod_uplinks) for name in _names("pod", tree.pods)]
    rack_names = _names("rack", tree.pods * tree.racks_per_pod)
    racks = [
        Rack(name=name, pod=pods[index // tree.racks_per_pod].name, uplinks=rack_uplinks)
        for index, name in enumerate(rack_names)
    ]
    nodes = [
        Node(
            name=name,
            rack=rack_names[index // tree.nodes_per_rack],
            gpus=tree.gpus_per_node,
            nvlink_bytes_per_s=tree.nvlink_bytes_per_s,
            nics=tree.nics,
        )
        for index, name in enumerate(_names("node", len(racks) * tree.nodes_per_rack))
    ]
    return pods, racks, nodes


def _superpod_lists(pod: SuperPod) -> tuple[list[Pod], list[Rack], list[Node]]:
    nics = Nics(
        compute=Nic(count=pod.gpus_per_node, bytes_per_s=pod.compute_bytes_per_s),
        storage=Nic(count=1, bytes_per_s=pod.storage_bytes_per_s, scope="server"),
    )
    uplinks = _fabric_uplinks(pod.nodes_per_unit, nics, pod.oversubscription)
    units = [Rack(name=name, pod="spine", uplinks=uplinks) for name in _names("unit", pod.units)]
    nodes = [
        Node(
            name=name,
            rack=units[index // pod.nodes_per_unit].name,
            gpus=pod.gpus_per_node,
            nvlink_bytes_per_s=pod.nvlink_bytes_per_s,
            nics=nics,
        )
        for index, name in enumerate(_names("node", pod.units * pod.nodes_per_unit))
    ]
    return [Pod(name="spine")], units, nodes


def _placed(counts: InstanceCounts, defaults: InstanceDefaults, nodes: Sequence[Node]) -> list[InstanceEntry]:
    size = (counts.tp or defaults.tp) * (counts.pp or defaults.pp)
    racks: dict[str, list[Node]] = {}
    for node in nodes:
        racks.setdefault(node.rack or f"{node.name} alone", []).append(node)
    by_rack = [list(_slots(members, size)) for members in racks.values()]
    prefill, decode = _choose_slots(counts, by_rack, size)
    shared = {key: getattr(counts, key) for key in ("model", "tp", "pp", "batch_max", "kv_capacity_bytes", "timing")}
    entries = []
    roles: tuple[tuple[Role, list[str]], ...] = (("prefill", prefill), ("decode", decode))
    for role, slots in roles:
        named = zip(_names(role, len(slots)), slots, strict=True)
        entries += [InstanceEntry(name=name, role=role, gpus=gpus, **shared) for name, gpus in named]
    return entries


def _slots(nodes: Sequence[Node], size: int) -> Iterator[str]:
    """Room for instances of `size` GPUs in one rack: several in a node, or one over neighbouring whole nodes."""
    pending: list[Node] = []
    for node in nodes:
        if size <= node.gpus:
            yield from (f"{node.name}:{first}-{first + size - 1}" for first in range(0, node.gpus - size + 1, size))
        elif node.gpus:
            pending.append(node)
            if sum(member.gpus for member in pending) >= size:
                rest = size - sum(member.gpus for member in pending[:-1])
                parts = [*((member, member.gpus) for member in pending[:-1]), (node, rest)]
                yield ",".join(f"{member.name}:0-{count - 1}" for member, count in parts)
                pending = []


def _choose_slots(counts: InstanceCounts, by_rack: list[list[str]], size: int) -> tuple[list[str], list[str]]:
    flat = [slot for rack in by_rack for slot in rack]
    wanted = counts.prefill + counts.decode
    if counts.placement == "spread":
        flat = [slot for level in zip_longest(*by_rack) for slot in level if slot is not None]
    prefill = flat[: counts.prefill]
    decode = flat[counts.prefill :]
    where = ""
    if counts.placement == "rack":
        taken = set(prefill)
        decode = [slot for rack in by_rack if taken.isdisjoint(rack) for slot in rack]
        where = " outside of the racks that prefill fills"
    if len(prefill) < counts.prefill or len(decode) < counts.decode:
        what = f"{wanted} instances of {size} GPUs do not fit: the nodes have room for {len(flat)} in all"
        rest = f", {len(decode)} for decode{where}" if len(prefill) == counts.prefill else ""
        raise InputError(what + rest, mend="ask for fewer or smaller instances, add nodes or change `placement`")
    return prefill, decode[: counts.decode]
