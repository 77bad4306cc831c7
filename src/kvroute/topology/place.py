"""Location of every node (rack, pod, datacenter), its reach, and the routes between datacenters."""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvroute.topology.schema import ClusterFile, Node, Pod, Rack
from kvroute.types import CROSS_DATACENTER, SAME_DATACENTER, SAME_NODE, SAME_POD, SAME_RACK, InputError, IntArray

Route = tuple[tuple[int, bool], ...]
"""Entries of `wan` in order, each with True if it is used in the direction from `from` to `to`."""
DomainKey = str | tuple[str, str]
Shards = tuple[tuple[int, int], ...]
"""Node number and GPU index of every shard of an instance."""


_GPUS = re.compile(r"(?:([^\s:,]+):)?(\d{1,6})(?:-(\d{1,6}))?", re.ASCII)
_MOST_GPUS = 65_536


@dataclass(frozen=True, slots=True)
class Places:
    """Domains of each node; arrays are in the file's order of nodes."""

    nodes: tuple[Node, ...]
    index: dict[str, int]
    racks: tuple[Rack | None, ...]
    pods: tuple[Pod | None, ...]
    datacenters: tuple[str, ...]
    code: IntArray
    """[4, nodes]: number of the node, rack, pod and datacenter; a missing rack or pod has its own number."""
    domains: tuple[tuple[int, ...], ...]
    """The columns of `code`."""
    reach: IntArray
    """[nodes]: highest tier whose links the node can use: 0 without compute NIC, 1 in a rack without uplinks, ..."""

    def level(self, source: int, target: int) -> int:
        """Return the tier of two nodes: their nearest common domain."""
        for tier, (here, there) in enumerate(zip(self.domains[source], self.domains[target], strict=True)):
            if here == there:
                return tier
        return CROSS_DATACENTER


def places_of(file: ClusterFile) -> Places:
    """Resolve the parents of an expanded, checked file."""
    racks = {rack.name: rack for rack in file.racks}
    pods = {pod.name: pod for pod in file.pods}
    only = file.datacenters[0].name if file.datacenters else "dc0"
    node_racks, node_pods, sites, keys = [], [], [], []
    for node in file.nodes:
        rack = racks[node.rack] if node.rack else None
        pod_name = (rack.pod if rack else None) or node.pod
        pod = pods[pod_name] if pod_name else None
        site = (pod.datacenter if pod else None) or (rack.datacenter if rack else None) or node.datacenter or only
        rack_key: DomainKey = rack.name if rack else ("node", node.name)
        pod_key: DomainKey = pod.name if pod else ("rack", rack.name) if rack else ("node", node.name)
        node_racks.append(rack)
        node_pods.append(pod)
        sites.append(site)
        keys.append((node.name, rack_key, pod_key, site))
    reach = [
        _reach(node, rack, pod, bool(file.wan))
        for node, rack, pod in zip(file.nodes, node_racks, node_pods, strict=True)
    ]
    columns = list(zip(*keys, strict=True)) if keys else [()] * CROSS_DATACENTER
    code = np.array([_numbers(column) for column in columns], dtype=np.int64)
    return Places(
        nodes=tuple(file.nodes),
        index={node.name: index for index, node in enumerate(file.nodes)},
        racks=tuple(node_racks),
        pods=tuple(node_pods),
        datacenters=tuple(sites),
        code=code,
        domains=tuple(map(tuple, code.T.tolist())),
        reach=np.array(reach, dtype=np.int64),
    )


def _reach(node: Node, rack: Rack | None, pod: Pod | None, wan: bool) -> int:
    if node.nics.compute is None:
        return SAME_NODE
    if rack is not None and rack.uplinks is None:
        return SAME_RACK
    if pod is not None and pod.uplinks is None:
        return SAME_POD
    return CROSS_DATACENTER if wan else SAME_DATACENTER


def _numbers(keys: Sequence[DomainKey]) -> list[int]:
    known: dict[DomainKey, int] = {}
    return [known.setdefault(key, len(known)) for key in keys]


def port_fault(url: str) -> str:
    """Return the fault of the port of `http://host:port` or `host:port`; empty if it is valid or absent."""
    address = re.split(r"[/?#]", url.partition("://")[2] or url, maxsplit=1)[0]
    if ("[" in address) != ("]" in address):
        return f"{url!r} has one bracket only"
    _, colon, port = address.rpartition("]")[2].rpartition(":")
    if not colon or (port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 2**16):
        return ""
    return f"port {port} is not between 1 and 65535" if port else f"{url!r} has no port after the colon"


def wan_routes(file: ClusterFile) -> dict[tuple[str, str], Route]:
    """Return the route with the lowest latency for each connected ordered pair of datacenters; ties: fewer links, then
    the file's order."""
    links: dict[str, list[tuple[str, int, bool]]] = {}
    for index, wan in enumerate(file.wan):
        links.setdefault(wan.source, []).append((wan.target, index, True))
        links.setdefault(wan.target, []).append((wan.source, index, False))
    routes: dict[tuple[str, str], Route] = {}
    for start in links:
        queue: list[tuple[float, int, Route, str]] = [(0.0, 0, (), start)]
        done: set[str] = set()
        while queue:
            latency_s, hops, route, here = heapq.heappop(queue)
            if here in done:
                continue
            done.add(here)
            routes[start, here] = route
            for there, index, forward in links[here]:
                step_s = latency_s + float(file.wan[index].latency_s)
                heapq.heappush(queue, (step_s, hops + 1, (*route, (index, forward)), there))
    return routes


def card_of(places: Places, gpus: Shards, position: int) -> int:
    """Return the compute NIC of its node that the shard at `position` uses, by the scope of the node's NICs."""
    node, gpu = gpus[position]
    entry = places.nodes[node]
    nic = entry.nics.compute
    assert nic is not None, "`placing.place` has found no fault"
    if nic.scope == "instance":
        gpu = next(index for host, index in gpus if host == node)
    return 0 if nic.scope == "server" else gpu * nic.count // entry.gpus


def gpu_text(gpus: Sequence[tuple[str, int]]) -> str:
    """Return GPUs as `gpu_list` reads them: "node0:0-3,node1:0"."""
    runs: list[list[tuple[str, int]]] = []
    for node, gpu in gpus:
        if runs and runs[-1][-1] == (node, gpu - 1):
            runs[-1].append((node, gpu))
        else:
            runs.append([(node, gpu)])
    return ",".join(f"{run[0][0]}:{run[0][1]}" + (f"-{run[-1][1]}" if len(run) > 1 else "") for run in runs)


def gpu_list(text: str) -> list[tuple[str, int]]:
    """Return (node, index) of every GPU of "node0:0-3,6,node1:0-3", in the written order; raise InputError if it is
    invalid."""
    gpus: list[tuple[str, int]] = []
    node = ""
    for part in text.split(","):
        match = _GPUS.fullmatch(part.strip())
        if match is None or not (match[1] or node):
            raise InputError(f"{text[:60]!r} is not a list of GPUs", hint='write nodes and GPUs such as "node0:0-3"')
        node = match[1] or node
        first, last = int(match[2]), int(match[3] or match[2])
        if last < first or last - first >= _MOST_GPUS:
            raise InputError(
                f"{part.strip()!r} is not a range of GPUs", hint='write the lower number first, "node0:0-3"'
            )
        gpus += [(node, index) for index in range(first, last + 1)]
    return gpus
