"""Locates the nodes of an expanded cluster file: checks names, parents and GPUs, and finds pairs that cannot reach each
other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvroute.topology.place import Places, gpu_list, places_of, wan_routes
from kvroute.topology.reading.data_parallel import rank_faults
from kvroute.topology.reading.expansion import ExpandedFile, entries_of
from kvroute.topology.schema import ClusterFile, Datacenter, InstanceEntry, Node, Pod, Rack
from kvroute.types import CROSS_DATACENTER, InputError
from kvroute_engine.files.form import FileError, Key, Lines, field_text, nearest


def place(flat: ExpandedFile, *, needs_roles: bool = True) -> tuple[Places | None, list[FileError]]:
    """Return the location of every node and the faults of names, parents, GPUs and missing links; None if there are
    faults, or values that the locations need could not be read. Args: `needs_roles`: the file must list a prefill and a
    decode instance."""
    faults = list(_name_faults(flat.file, flat.lines, needs_roles=needs_roles and flat.file.discovery is None))
    if faults or not flat.complete or not _can_place(flat.lines):
        return None, faults
    places = places_of(flat.file)
    faults = [*_reach_faults(flat.file, places, flat.lines), *_storage_faults(flat.file, flat.lines)]
    return (None if faults else places), faults


def _name_faults(file: ClusterFile, lines: Lines, *, needs_roles: bool) -> Iterator[FileError]:
    """Yield faults of names, parents, links between datacenters and GPUs; those that can be found if the file is not
    expanded."""
    yield from _duplicates(file, lines)
    yield from _parent_faults(file, lines)
    yield from _wan_faults(file, lines)
    if isinstance(file.instances, list) and file.fabric is None:
        yield from _instance_faults(file, lines)
        yield from rank_faults(file.instances, lines)
        if needs_roles:
            yield from _role_faults(file, lines)


def _duplicates(file: ClusterFile, lines: Lines) -> Iterator[FileError]:
    sections: dict[str, Sequence[Datacenter | Pod | Rack | Node | InstanceEntry]] = {
        "datacenters": file.datacenters,
        "pods": file.pods,
        "racks": file.racks,
        "nodes": file.nodes,
        "instances": file.instances if isinstance(file.instances, list) else [],
    }
    for section, entries in sections.items():
        first: dict[str, int] = {}
        for index, entry in enumerate(entries):
            name = entry.name
            if name in first:
                where = f"{field_text(lines.written((section, first[name])))} has the same name"
                yield lines.error(f"the name {name!r} is used twice", (section, index, "name"), where)
            first.setdefault(name, index)


def _parent_faults(file: ClusterFile, lines: Lines) -> Iterator[FileError]:
    names = {
        "rack": [rack.name for rack in file.racks],
        "pod": [pod.name for pod in file.pods],
        "datacenter": [datacenter.name for datacenter in file.datacenters] or ["dc0"],
    }
    known = {kind: set(members) for kind, members in names.items()}
    sections: tuple[tuple[str, Sequence[Pod | Rack | Node]], ...] = (
        ("pods", file.pods),
        ("racks", file.racks),
        ("nodes", file.nodes),
    )
    for section, entries in sections:
        for index, entry in enumerate(entries):
            given = {kind: getattr(entry, kind, None) for kind in names}
            parents = {kind: parent for kind, parent in given.items() if parent is not None}
            for kind, parent in parents.items():
                if parent not in known[kind] and _listed(f"{kind}s", lines) and lines.sure(section, index, kind):
                    key = (section, index, kind)
                    hint = nearest(parent, names[kind]) or f"the file lists no {kind}s"
                    yield lines.error(f"there is no {kind} {parent!r}", key, hint)
            if len(parents) > 1:
                what = f"{entry.name} has several parents: {', '.join(parents)}"
                yield lines.error(what, (section, index), "give only the nearest one; the others follow from it")
            orphan = not parents and all(lines.sure(section, index, kind) for kind in names if hasattr(entry, kind))
            if orphan and len(names["datacenter"]) > 1:
                what = f"{entry.name} has no parent, and there are several datacenters"
                yield lines.error(what, (section, index), "add `datacenter: ...`")


def _listed(section: str, lines: Lines) -> bool:
    """Return True if all names of a section are known."""
    return lines.sure(section, "*", "name") and (section not in ("pods", "racks", "nodes") or lines.sure("fabric"))


def _wan_faults(file: ClusterFile, lines: Lines) -> Iterator[FileError]:
    names = [datacenter.name for datacenter in file.datacenters]
    joined: dict[frozenset[str], int] = {}
    for index, wan in enumerate(file.wan):
        for key, end in (("from", wan.source), ("to", wan.target)):
            if end not in names and _listed("datacenters", lines) and lines.sure("wan", index, key):
                hint = nearest(end, names) or "list it under `datacenters`"
                yield lines.error(f"there is no datacenter {end!r}", ("wan", index, key), hint)
        pair = frozenset((wan.source, wan.target))
        if len(pair) == 1:
            yield lines.error(f"the link leads from {wan.source} to itself", ("wan", index), "name two datacenters")
        elif pair in joined:
            what = f"{wan.source} and {wan.target} are connected twice"
            hint = f"wan[{joined[pair]}] already connects them in both directions; raise its `count`"
            yield lines.error(what, ("wan", index), hint)
        joined.setdefault(pair, index)


def _instance_faults(file: ClusterFile, lines: Lines) -> Iterator[FileError]:
    nodes = {node.name: node for node in file.nodes}
    owner: dict[tuple[str, int], str] = {}
    entries = entries_of(file)
    for index, entry in enumerate(entries):
        if lines.sure("instances", index, "gpus"):
            yield from _gpu_faults(entry, file, nodes, owner, ("instances", index), lines)
        if entry.dp is not None and (entry.engine is not None or entry.rank is not None):
            what = f"{entry.name} has `dp`, so its ranks are numbered"
            yield lines.error(what, ("instances", index, "dp"), "remove `engine` and `rank`, or remove `dp`")
        if entry.group is not None and entry.role == "prefill" and lines.sure("instances", index, "role"):
            what = f"{entry.name} is a prefill instance, but only decode instances have a group"
            yield lines.error(what, ("instances", index, "group"), "remove `group`")


def _role_faults(file: ClusterFile, lines: Lines) -> Iterator[FileError]:
    entries = entries_of(file)
    for role in ("prefill", "decode"):
        if lines.sure("instances", "*", "role") and not any(entry.role in (role, "both") for entry in entries):
            yield lines.error(f"there is no {role} instance", ("instances",), f"add one with `role: {role}`")


def _gpu_faults(
    entry: InstanceEntry,
    file: ClusterFile,
    nodes: dict[str, Node],
    owner: dict[tuple[str, int], str],
    key: Key,
    lines: Lines,
) -> Iterator[FileError]:
    place = (*key, "gpus")
    try:
        gpus = gpu_list(entry.gpus)
    except InputError as error:
        yield lines.error(error.what, place, error.hint)
        return
    for name in dict.fromkeys(node for node, _ in gpus):
        if name not in nodes and _listed("nodes", lines):
            yield lines.error(f"there is no node {name!r}", place, nearest(name, list(nodes)))
    beyond = [(node, gpu) for node, gpu in gpus if node in nodes and gpu >= nodes[node].gpus]
    if beyond and lines.sure("nodes", "*", "gpus"):
        node, gpu = beyond[0]
        what = f"{node} has {nodes[node].gpus} GPUs and no GPU {gpu}"
        yield lines.error(what, place, f"use 0 to {nodes[node].gpus - 1}" if nodes[node].gpus else "use another node")
    clash = next((gpu for position, gpu in enumerate(gpus) if gpu in owner or gpu in gpus[:position]), None)
    if clash is not None:
        user = owner.get(clash, entry.name)
        yield lines.error(f"GPU {clash[0]}:{clash[1]} is used twice", place, f"{user} uses it too")
    owner.update((gpu, entry.name) for gpu in gpus if gpu not in owner)
    tp, pp, dp = entry.tp or file.defaults.tp, entry.pp or file.defaults.pp, entry.dp or 1
    shards_known = all(lines.sure(*place, part) for part in ("tp", "pp") for place in (key, ("defaults",)))
    if tp * pp * dp != len(gpus) and shards_known and lines.sure(*key, "dp"):
        product, change = f"tp {tp} x pp {pp}", "tp or pp"
        if entry.dp is not None:
            product, change = f"dp {dp} x {product}", "dp, tp or pp"
        what = f"{entry.name} has {len(gpus)} GPUs, but {product} = {tp * pp * dp}"
        yield lines.error(what, place, f"list one GPU per shard, or change {change}")


def _can_place(lines: Lines) -> bool:
    """Return True if the locations of all instances and the existing links are known."""
    presence = {
        "nodes": ("name", "rack", "pod", "datacenter", "nics"),
        "racks": ("name", "pod", "datacenter", "uplinks"),
        "pods": ("name", "datacenter", "uplinks"),
        "datacenters": ("name",),
        "wan": ("from", "to"),
        "instances": ("role", "gpus"),
    }
    known = all(lines.sure(section, "*", key) for section, keys in presence.items() for key in keys)
    links = ("nics", "rack_uplinks", "pod_uplinks", "oversubscription")
    known &= all(lines.sure("nodes", "*", "nics", kind) for kind in ("compute", "storage"))
    return known and all(lines.sure("fabric", key) for key in links) and lines.sure("fabric", "nics", "compute")


def _reach_faults(file: ClusterFile, places: Places, lines: Lines) -> Iterator[FileError]:
    """Yield one fault per missing link between a prefill node and a decode node, with an example pair."""
    sources, targets = _hosts(file, places, "prefill"), _hosts(file, places, "decode")
    if not sources or not targets:
        return
    source_ids, target_ids = np.array(list(sources)), np.array(list(targets))
    code = places.code
    level = CROSS_DATACENTER - sum(
        (code[k][source_ids][:, None] == code[k][target_ids][None, :]).astype(np.int8) for k in range(len(code))
    )
    reported: set[Key] = set()
    for short, end in (
        (level > places.reach[source_ids][:, None], 0),
        (level > places.reach[target_ids][None, :], 1),
    ):
        for position in np.flatnonzero(short.any(axis=1 - end)):
            other = int(np.argmax(short[position] if end == 0 else short[:, position]))
            source, target = (int(position), other) if end == 0 else (other, int(position))
            pair = (int(source_ids[source]), int(target_ids[target]))
            key, what, hint = _missing_link(file, places, pair[end])
            if key not in reported:
                reported.add(key)
                between = f"{targets[pair[1]]} cannot be reached from {sources[pair[0]]}"
                yield lines.error(f"{what}, so {between}", key, hint)
    if not reported:
        yield from _route_faults(file, places, sources, targets, lines)


def _hosts(file: ClusterFile, places: Places, role: str) -> dict[int, str]:
    """Return by node number the first instance of that role with a GPU on the node."""
    hosts: dict[int, str] = {}
    for entry in entries_of(file):
        if entry.role in (role, "both"):
            for node, _ in gpu_list(entry.gpus):
                hosts.setdefault(places.index[node], entry.name)
    return hosts


def _missing_link(file: ClusterFile, places: Places, node: int) -> tuple[Key, str, str]:
    """Return key, fault and fix of the missing link that limits a node's reach."""
    entry, rack, pod = places.nodes[node], places.racks[node], places.pods[node]
    add = "add `uplinks: {count: 8, capacity: 100 Gbps}`"
    if entry.nics.compute is None:
        add = "add `nics: {compute: {count: 8, capacity: 100 Gbps}}`"
        return ("nodes", node), f"{entry.name} has no compute NICs", add
    if rack is not None and rack.uplinks is None:
        return ("racks", file.racks.index(rack)), f"{rack.name} has no uplinks", add
    if pod is not None and pod.uplinks is None:
        return ("pods", file.pods.index(pod)), f"{pod.name} has no uplinks", add
    return ("wan",), "there are no links between datacenters", "add `wan: [{from: ..., to: ..., capacity: 100 Gbps}]`"


def _route_faults(
    file: ClusterFile, places: Places, sources: dict[int, str], targets: dict[int, str], lines: Lines
) -> Iterator[FileError]:
    routes = wan_routes(file)
    first_source = {places.datacenters[node]: name for node, name in reversed(sources.items())}
    first_target = {places.datacenters[node]: name for node, name in reversed(targets.items())}
    for start in sorted(first_source):
        for end in sorted(first_target):
            if start != end and (start, end) not in routes:
                between = f"{first_target[end]} cannot be reached from {first_source[start]}"
                what = f"no links connect {start} and {end}, so {between}"
                yield lines.error(what, ("wan",), f"add {{from: {start}, to: {end}, capacity: 100 Gbps}}")


def _storage_faults(file: ClusterFile, lines: Lines) -> Iterator[FileError]:
    """Yield a fault if there is a store that no node can read."""
    if file.storage is not None and lines.sure("storage") and all(node.nics.storage is None for node in file.nodes):
        hint = "add `nics: {storage: {count: 1, capacity: 400 Gbps, scope: server}}` to the nodes, or remove `storage`"
        yield lines.error("no node has a storage NIC", ("storage",), hint)
