"""Expands a cluster file's shorthands: a fabric to pods, racks and nodes, counts to placed instances."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import msgspec

from kvroute.topology.reading.data_parallel import rank_entries
from kvroute.topology.schema import (
    ClusterFile,
    EndpointEntry,
    FatTree,
    InstanceCounts,
    InstanceDefaults,
    InstanceEntry,
    Nic,
    Nics,
    Node,
    Oversubscription,
    Pod,
    Rack,
    SuperPod,
    Uplinks,
)
from kvroute.types import InputError, KvProtocol, Role
from kvroute_engine.files.form import FileError, Lines
from kvroute_engine.files.units import Bandwidth


@dataclass(frozen=True, slots=True)
class ExpandedFile:
    """A cluster file without shorthands, and the lines of its entries."""

    file: ClusterFile
    lines: Lines
    complete: bool = True
    """False: the shorthands could not be expanded, and `file` has them as written."""


def expand_shorthands(file: ClusterFile, lines: Lines) -> tuple[ExpandedFile, list[FileError]]:
    """Return the file without shorthands, and the faults that prevent their expansion."""
    faults = list(_shorthand_faults(file, lines))
    if not faults and _can_expand(file, lines):
        try:
            return ExpandedFile(expand(file), replace(lines, written_at=_written_at(file))), []
        except InputError as error:
            faults.append(lines.error(error.what, ("instances",), error.hint))
    return ExpandedFile(file, lines, complete=False), faults


def expand(file: ClusterFile) -> ClusterFile:
    """Return the same cluster without shorthands: fabric as pods, racks and nodes, counts as instances, engines as
    their data-parallel ranks.

    Raises:
        InputError: the counts do not fit the nodes (`what` has the numbers).
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
    instances = [rank for entry in instances for rank in rank_entries(entry, file.defaults)]
    return msgspec.structs.replace(file, fabric=None, pods=pods, racks=racks, nodes=nodes, instances=instances)


def _written_at(file: ClusterFile) -> tuple[int, ...]:
    """Return the index in the file of each instance of the expanded file; empty if the file lists none."""
    if not isinstance(file.instances, list):
        return ()
    return tuple(index for index, entry in enumerate(file.instances) for _ in rank_entries(entry, file.defaults))


def entries_of(file: ClusterFile) -> list[InstanceEntry]:
    """Return the instances of an expanded file."""
    assert isinstance(file.instances, list), "expand first"
    return file.instances


def _shorthand_faults(file: ClusterFile, lines: Lines) -> Iterator[FileError]:
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


def _can_expand(file: ClusterFile, lines: Lines) -> bool:
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


def with_endpoints(file: ClusterFile, addresses: Sequence[str], protocol: KvProtocol) -> ClusterFile:
    """Return the expanded cluster with engine endpoints; instances that are not named keep theirs.

    Args:
        file: a cluster with or without shorthands.
        addresses: a URL for each engine, in the file's order, or `NAME=URL` for some. Data-parallel ranks have that of
            their engine.
        protocol: KV transfer protocol of all these engines.

    Raises:
        InputError: the numbers of URLs and instances differ, a name is unknown, or an address is given twice.
    """
    flat = expand(file)
    entries = entries_of(flat)
    names = list(dict.fromkeys(entry.engine or entry.name for entry in entries))
    named = [
        (name, url) for name, equals, url in (address.partition("=") for address in addresses) if _is_name(name, equals)
    ]
    if named and len(named) < len(addresses):
        raise InputError("some addresses have a name and others do not", hint="write NAME=URL for all or for none")
    if addresses and not named and len(addresses) != len(names):
        what = f"{len(names)} instances but {len(addresses)} address{'' if len(addresses) == 1 else 'es'}"
        raise InputError(what, hint=f"give one for each, in this order: {', '.join(names)}; or NAME=URL for some")
    pairs = named or list(zip(names, addresses, strict=False))
    for name, _ in pairs:
        if name not in names:
            raise InputError(f"there is no instance {name!r}", hint=f"its instances are {', '.join(names)}")
    urls = dict(pairs)
    if len(urls) < len(pairs) or len({url.rstrip("/") for url in urls.values()}) < len(urls):
        raise InputError("an instance or an address is given twice", hint="give each instance its own address")
    instances = [
        entry
        if (url := urls.get(entry.engine or entry.name)) is None
        else msgspec.structs.replace(entry, endpoint=EndpointEntry(url=url.rstrip("/"), protocol=protocol))
        for entry in entries
    ]
    return msgspec.structs.replace(flat, instances=instances)


def _is_name(text: str, equals: str) -> bool:
    return bool(equals) and "://" not in text


def numbered(stem: str, count: int) -> list[str]:
    """Return `stem0`, ... with leading zeros, so that the order of names is the order of numbers."""
    width = len(str(count - 1))
    return [f"{stem}{index:0{width}}" for index in range(count)]


def fabric_uplinks(nodes: int, nics: Nics, ratio: float = 1.0) -> Uplinks | None:
    """Return as many uplinks as NICs below, with their capacity (the line rate) divided by `ratio`."""
    nic = nics.compute
    if nic is None:
        return None
    per_node = 1 if nic.scope == "server" else nic.count
    bytes_per_s = nic.bytes_per_s * (nic.count / per_node) / ratio
    return Uplinks(count=min(nodes * per_node, 65_536), bytes_per_s=Bandwidth(bytes_per_s))


def _fat_tree_lists(tree: FatTree) -> tuple[list[Pod], list[Rack], list[Node]]:
    ratio = tree.oversubscription or Oversubscription()
    rack_uplinks = tree.rack_uplinks or fabric_uplinks(tree.nodes_per_rack, tree.nics, ratio.rack)
    per_pod = tree.racks_per_pod * tree.nodes_per_rack
    pod_uplinks = tree.pod_uplinks or fabric_uplinks(per_pod, tree.nics, ratio.pod)
    pods = [Pod(name=name, uplinks=pod_uplinks) for name in numbered("pod", tree.pods)]
    rack_names = numbered("rack", tree.pods * tree.racks_per_pod)
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
        for index, name in enumerate(numbered("node", len(racks) * tree.nodes_per_rack))
    ]
    return pods, racks, nodes


def _superpod_lists(pod: SuperPod) -> tuple[list[Pod], list[Rack], list[Node]]:
    nics = Nics(
        compute=Nic(count=pod.gpus_per_node, bytes_per_s=pod.compute_bytes_per_s, efficiency=pod.efficiency),
        storage=Nic(count=1, bytes_per_s=pod.storage_bytes_per_s, scope="server"),
    )
    uplinks = fabric_uplinks(pod.nodes_per_unit, nics, pod.oversubscription)
    units = [Rack(name=name, pod="spine", uplinks=uplinks) for name in numbered("unit", pod.units)]
    nodes = [
        Node(
            name=name,
            rack=units[index // pod.nodes_per_unit].name,
            gpus=pod.gpus_per_node,
            nvlink_bytes_per_s=pod.nvlink_bytes_per_s,
            nics=nics,
        )
        for index, name in enumerate(numbered("node", pod.units * pod.nodes_per_unit))
    ]
    return [Pod(name="spine")], units, nodes


def _placed(counts: InstanceCounts, defaults: InstanceDefaults, nodes: Sequence[Node]) -> list[InstanceEntry]:
    size = (counts.tp or defaults.tp) * (counts.pp or defaults.pp) * (counts.dp or 1)
    racks: dict[str, list[Node]] = {}
    for node in nodes:
        racks.setdefault(node.rack or f"{node.name} alone", []).append(node)
    by_rack = [list(_slots(members, size)) for members in racks.values()]
    prefill, decode = _choose_slots(counts, by_rack, size)
    keys = ("model", "tp", "pp", "dp", "batch_max", "kv_capacity_bytes", "timing", "all_reduce")
    shared = {key: getattr(counts, key) for key in keys}
    entries = []
    roles: tuple[tuple[Role, list[str]], ...] = (("prefill", prefill), ("decode", decode))
    for role, slots in roles:
        named = zip(numbered(role, len(slots)), slots, strict=True)
        entries += [InstanceEntry(name=name, role=role, gpus=gpus, **shared) for name, gpus in named]
    return entries


def _slots(nodes: Sequence[Node], size: int) -> Iterator[str]:
    """Yield slots for instances of `size` GPUs in one rack: several in a node, or one over whole neighbouring nodes."""
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
        where = " outside the prefill racks"
    if len(prefill) < counts.prefill or len(decode) < counts.decode:
        what = f"{wanted} instances of {size} GPUs do not fit: the nodes have room for {len(flat)} in total"
        rest = f", {len(decode)} for decode{where}" if len(prefill) == counts.prefill else ""
        raise InputError(what + rest, hint="use fewer or smaller instances, add nodes or change `placement`")
    return prefill, decode[: counts.decode]
