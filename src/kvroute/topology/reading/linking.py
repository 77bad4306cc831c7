"""Links a cluster: the instances and the links of an expanded cluster file without faults."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvroute.topology.cluster import STORAGE, Cables, Cluster, Link, tier_latency_s, tier_matrix
from kvroute.topology.place import Places, Shards, gpu_list, wan_routes
from kvroute.topology.reading.bandwidth import tier_bytes_per_s
from kvroute.topology.reading.expansion import entries_of
from kvroute.topology.schema import ClusterFile, Nic, Uplinks
from kvroute.types import CROSS_DATACENTER, SAME_DATACENTER, SAME_NODE, SAME_POD, SAME_RACK, Instance


def link(file: ClusterFile, places: Places) -> Cluster:
    """Return the cluster of an expanded file without faults. Args: `places` of the file."""
    entries = sorted(entries_of(file), key=lambda entry: entry.name)
    shards = tuple(tuple((places.index[node], gpu) for node, gpu in gpu_list(entry.gpus)) for entry in entries)
    links: list[Link] = []
    cables = _lay(file, places, links)
    routes = wan_routes(file)
    return Cluster(
        name=file.name,
        instances=_instances(file, places, shards),
        links=tuple(links),
        capacity_bytes_per_s=np.array([link.bytes_per_s for link in links], dtype=np.float64),
        tier=tier_matrix(places, [gpus[0][0] for gpus in shards]),
        tier_latency_s=tier_latency_s(file, routes),
        tier_bytes_per_s=tier_bytes_per_s(file, places, routes, shards),
        timing={name: timing.spec() for name, timing in file.timing.items()},
        ecmp=file.network.ecmp,
        file=file,
        places=places,
        cables=cables,
        routes=routes,
        shards=shards,
    )


def _instances(file: ClusterFile, places: Places, shards: tuple[Shards, ...]) -> tuple[Instance, ...]:
    defaults = file.defaults
    result = []
    for entry, gpus in zip(sorted(entries_of(file), key=lambda entry: entry.name), shards, strict=True):
        node = gpus[0][0]
        rack, pod = places.racks[node], places.pods[node]
        result.append(
            Instance(
                name=entry.name,
                role=entry.role,
                model=entry.model or defaults.model or "",
                node=places.nodes[node].name,
                rack=rack.name if rack else "",
                pod=pod.name if pod else "",
                datacenter=places.datacenters[node],
                gpus=tuple(f"{places.nodes[host].name}/{gpu}" for host, gpu in gpus),
                tp=entry.tp or defaults.tp,
                pp=entry.pp or defaults.pp,
                timing=entry.timing or defaults.timing,
                batch_max=entry.batch_max or defaults.batch_max,
                chunk_tokens=entry.chunk_tokens or defaults.chunk_tokens,
                kv_capacity_bytes=float(entry.kv_capacity_bytes or defaults.kv_capacity_bytes or 0.0),
                cpu_bytes_per_s=float(entry.cpu_bytes_per_s or defaults.cpu_bytes_per_s),
                disk_bytes_per_s=float(entry.disk_bytes_per_s or defaults.disk_bytes_per_s),
                group=entry.group or "",
                engine=entry.engine or "",
                rank=entry.rank or 0,
                ep_group=entry.ep_group or entry.engine or "",
                endpoint=entry.endpoint.endpoint() if entry.endpoint else None,
            )
        )
    return tuple(result)


def _lay(file: ClusterFile, places: Places, links: list[Link]) -> Cables:
    """Append every link, nodes first, and return the ids by kind."""
    nvlink, nic, storage = [], [], []
    for position, node in enumerate(places.nodes):
        rack, pod = places.racks[position], places.pods[position]
        switch = rack.name if rack else pod.name if pod else places.datacenters[position]
        inner = float(node.nvlink_bytes_per_s)
        nvlink.append(
            tuple(_pair(links, f"{node.name}/{g}", node.name, "nvlink", inner, SAME_NODE) for g in range(node.gpus))
        )
        nic.append(_cards(links, node.name, switch, "nic", node.nics.compute, SAME_RACK))
        storage.append(_cards(links, node.name, "storage", "snic", node.nics.storage, STORAGE))
    above = {rack.name: rack.pod or rack.datacenter or _core(file) for rack in file.racks}
    cores = {pod.name: pod.datacenter or _core(file) for pod in file.pods}
    cables = Cables(
        nvlink=tuple(nvlink),
        nic=tuple(nic),
        storage=tuple(storage),
        store=None,
        rack={r.name: _bundle(links, r.name, above[r.name], r.uplinks, SAME_POD) for r in file.racks if r.uplinks},
        pod={p.name: _bundle(links, p.name, cores[p.name], p.uplinks, SAME_DATACENTER) for p in file.pods if p.uplinks},
        wan=tuple(
            _bundle(links, w.source, w.target, Uplinks(count=w.count, bytes_per_s=w.bytes_per_s), CROSS_DATACENTER)
            for w in file.wan
        ),
    )
    if file.storage is None or file.storage.bytes_per_s is None:
        return cables
    links.append(Link("store read", "store", "storage", float(file.storage.bytes_per_s), STORAGE))
    return replace(cables, store=len(links) - 1)


def _core(file: ClusterFile) -> str:
    """Return the datacenter of entries that name none."""
    return file.datacenters[0].name if file.datacenters else "dc0"


def _pair(links: list[Link], low: str, high: str, kind: str, bytes_per_s: float, tier: int) -> tuple[int, int]:
    """Append two opposite links between `low` and `high`; return the ids of the one up and the one down."""
    links.append(Link(f"{low} {kind} up", low, high, bytes_per_s, tier))
    links.append(Link(f"{low} {kind} down", high, low, bytes_per_s, tier))
    return len(links) - 2, len(links) - 1


def _cards(
    links: list[Link], node: str, switch: str, kind: str, nic: Nic | None, tier: int
) -> tuple[tuple[int, int], ...]:
    if nic is None:
        return ()
    if nic.scope == "server":
        return (_pair(links, node, switch, kind, nic.kv_bytes_per_s * nic.count, tier),)
    return tuple(_pair(links, node, switch, f"{kind}{card}", nic.kv_bytes_per_s, tier) for card in range(nic.count))


def _bundle(
    links: list[Link], low: str, high: str, uplinks: Uplinks | None, tier: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    assert uplinks is not None
    kind = f"to {high} #"
    pairs = [_pair(links, low, high, f"{kind}{n}", float(uplinks.bytes_per_s), tier) for n in range(uplinks.count)]
    return tuple(up for up, _ in pairs), tuple(down for _, down in pairs)
