"""Checks of a cluster file whose form is valid: names, GPUs, limits, and pairs that cannot reach each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvroute import llm
from kvroute.topology.place import Places, gpu_list, port_fault, wan_routes
from kvroute.topology.reading.data_parallel import rank_faults
from kvroute.topology.schema import (
    ClusterFile,
    Datacenter,
    FatTree,
    InstanceCounts,
    InstanceEntry,
    Node,
    PiecewisePrefillEntry,
    Pod,
    Rack,
    TimingEntry,
)
from kvroute.types import CROSS_DATACENTER, InputError
from kvroute_engine.files.form import FileError, Key, Lines, field_text, nearest
from kvroute_engine.files.units import duration_text

_ADDRESSES = ("url", "bootstrap", "kv_events", "kv_replay", "buffer")
"""Fields of an endpoint that hold an address."""


def shorthand_faults(file: ClusterFile, lines: Lines) -> Iterator[FileError]:
    """Yield the faults that prevent the expansion of shorthands."""
    if file.fabric is not None:
        for key, entries in (("pods", file.pods), ("racks", file.racks), ("nodes", file.nodes)):
            if entries:
                what = f"`{key}` and `fabric` cannot be given together"
                yield lines.error(what, (key,), f"remove one of them: `fabric` creates {key} itself")
        if len(file.datacenters) > 1:
            yield lines.error("a fabric has one datacenter", ("datacenters",), "list nodes and racks instead")
    if isinstance(file.fabric, FatTree):
        yield from _fat_tree_faults(file.fabric, lines)
    elif file.fabric is None and not file.nodes and not file.discovery and lines.sure("nodes") and lines.sure("fabric"):
        yield lines.error("there are no nodes", (), "add `nodes:` or `fabric:`")


def _fat_tree_faults(tree: FatTree, lines: Lines) -> Iterator[FileError]:
    size = tree.pods * tree.racks_per_pod * tree.nodes_per_rack
    if size > 100_000:  # a placeholder is 1
        yield lines.error(f"the fabric has {size} nodes", ("fabric",), "use at most 100000")
    if tree.oversubscription and tree.rack_uplinks and tree.pod_uplinks:
        what = "`oversubscription` has no effect with `rack_uplinks` and `pod_uplinks`"
        yield lines.error(what, ("fabric", "oversubscription"), "remove it or one of the uplinks")


def can_expand(file: ClusterFile, lines: Lines) -> bool:
    """Return True if all values that the shorthands need are known."""
    sizes = ("kind", "pods", "racks_per_pod", "nodes_per_rack", "gpus_per_node", "units", "nodes_per_unit")
    known = all(lines.sure("fabric", key) for key in sizes)
    if isinstance(file.instances, InstanceCounts):
        known &= all(lines.sure("instances", key) for key in ("prefill", "decode", "placement", "tp", "pp", "dp"))
        known &= all(lines.sure("defaults", key) for key in ("tp", "pp"))
        known &= all(lines.sure("nodes", "*", key) for key in ("gpus", "rack"))
    elif any(entry.dp is not None for entry in file.instances):
        known &= all(lines.sure("instances", "*", key) for key in ("name", "gpus", "tp", "pp", "dp"))
        known &= all(lines.sure("defaults", key) for key in ("tp", "pp"))
    return known


def setting_faults(written: ClusterFile, lines: Lines) -> Iterator[FileError]:
    """Yield faults of timings, models and memory of a file before expansion."""
    yield from _timing_faults(written, lines)
    yield from _setting_faults(written, lines)


def place_faults(file: ClusterFile, lines: Lines, *, placed: bool = True) -> Iterator[FileError]:
    """Yield faults of names, parents, links between datacenters and GPUs; for an unexpanded file, those that can be
    found. Without `placed`, the file may lack instances of a role."""
    yield from _duplicates(file, lines)
    yield from _parent_faults(file, lines)
    yield from _wan_faults(file, lines)
    if isinstance(file.instances, list) and file.fabric is None:
        yield from _instance_faults(file, lines)
        yield from rank_faults(file.instances, lines)
        if placed:
            yield from _role_faults(file, lines)


def port_faults(file: ClusterFile, lines: Lines) -> Iterator[FileError]:
    """Yield addresses of endpoints without a valid port."""
    for index, entry in enumerate(file.instances if isinstance(file.instances, list) else []):
        for part in _ADDRESSES if entry.endpoint is not None else ():
            key, address = ("instances", index, "endpoint", part), getattr(entry.endpoint, part)
            if lines.sure(*key) and not address.startswith("ipc://") and (fault := port_fault(address)):
                yield lines.error(fault, key, "give the port that the engine listens on")


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


def entries_of(file: ClusterFile) -> list[InstanceEntry]:
    """Return the instances of an expanded file."""
    assert isinstance(file.instances, list), "expand first"
    return file.instances


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


def _timing_faults(file: ClusterFile, lines: Lines) -> Iterator[FileError]:
    for name, timing in file.timing.items():
        yield from _scheduler_faults(name, timing, lines)
        prefill = timing.prefill
        if not isinstance(prefill, PiecewisePrefillEntry):
            continue
        key = ("timing", name, "prefill")
        if not lines.sure(*key, "tokens", whole=True) or not lines.sure(*key, "times"):
            continue
        if len(prefill.tokens) != len(prefill.times_s) or len(prefill.tokens) < 2:
            what = f"{len(prefill.tokens)} token counts but {len(prefill.times_s)} times are given"
            yield lines.error(what, key, "give two or more points, one time for each token count")
        elif any(b <= a for a, b in zip(prefill.tokens, prefill.tokens[1:], strict=False)):
            yield lines.error("the token counts do not ascend", (*key, "tokens"), "sort the points, without duplicates")


def _scheduler_faults(name: str, timing: TimingEntry, lines: Lines) -> Iterator[FileError]:
    scheduler, prefill = timing.scheduler, timing.prefill
    key = ("timing", name, "scheduler", "step")
    if not scheduler.step_s or not lines.sure(*key):
        return
    if scheduler.step_tokens is None and lines.sure("timing", name, "scheduler", "step_tokens"):
        what = "a step has a time, but prompts do not share steps"
        yield lines.error(what, key, "give `step_tokens`, the most tokens of one step")
    if isinstance(prefill, PiecewisePrefillEntry) or not lines.sure("timing", name, "prefill", "base"):
        return
    if scheduler.step_s > prefill.base_s:
        what = f"a step takes {duration_text(scheduler.step_s)}, longer than the base of a prefill"
        yield lines.error(what, key, f"give {duration_text(prefill.base_s)} or less: the base includes a step")


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


def _setting_faults(file: ClusterFile, lines: Lines) -> Iterator[FileError]:
    """Yield faults of models, timings and memory; a wrong or missing value in `defaults` is reported once."""
    reported: set[Key] = set()
    written = file.instances
    entries: Sequence[tuple[Key, InstanceEntry | InstanceCounts]] = (
        [(("instances",), written)]
        if isinstance(written, InstanceCounts)
        else [(("instances", index), entry) for index, entry in enumerate(written)]
    )
    for key, entry in entries:
        for setting in ("model", "kv_capacity", "timing"):
            attribute = "kv_capacity_bytes" if setting == "kv_capacity" else setting
            own, inherited = getattr(entry, attribute), getattr(file.defaults, attribute)
            place: Key = (*key, setting) if own is not None else ("defaults", setting)
            known = lines.sure(*key, setting) and (own is not None or lines.sure("defaults", setting))
            if place not in reported and known:
                value = inherited if own is None else own
                if setting == "timing" and not lines.sure("timing"):
                    continue
                fault = setting_fault(setting, value, file)
                if fault is not None:
                    reported.add(place)
                    missing = own is None and inherited is None
                    yield lines.error(fault.what, key if missing else place, fault.hint)


def setting_fault(setting: str, value: str | float | None, file: ClusterFile) -> InputError | None:
    """Return the fault of a model, a timing or a KV memory (`kv_capacity`) of an instance; None if it is valid."""
    if value is None:
        example = "`model: llama-3-70b`" if setting == "model" else "`kv_capacity: 180 GB` (all GPUs of an instance)"
        return InputError(f"no {setting} is given", hint=f"add {example}, here or under `defaults`")
    if setting == "timing" and value not in file.timing:
        hint = nearest(str(value), list(file.timing)) or f"add a `timing:` section with `{value}:`"
        return InputError(f"there is no timing {value!r}", hint=hint)
    if setting == "model":
        try:
            llm.model(str(value))
        except InputError as error:
            return error
    return None


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


def can_place(lines: Lines) -> bool:
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


def reach_faults(file: ClusterFile, places: Places, lines: Lines) -> Iterator[FileError]:
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


def storage_faults(file: ClusterFile, lines: Lines) -> Iterator[FileError]:
    """Yield a fault if there is a store that no node can read."""
    if file.storage is not None and lines.sure("storage") and all(node.nics.storage is None for node in file.nodes):
        hint = "add `nics: {storage: {count: 1, capacity: 400 Gbps, scope: server}}` to the nodes, or remove `storage`"
        yield lines.error("no node has a storage NIC", ("storage",), hint)


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
