"""Tensor-parallel groups of a cluster file with the schemes that each can use, and the links that agents count."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvroute.collectives import (
    INA_SCHEMES,
    Aggregation,
    AllReduce,
    Collective,
    all_reduce,
    seconds,
)
from kvroute.collectives.policy import Option
from kvroute.collectives.scheduler.derivation import SchemeOption
from kvroute.topology.cluster import Cluster
from kvroute.topology.gpu_paths import GpuPaths
from kvroute.topology.place import Shards
from kvroute.topology.schema import SwitchLevel
from kvroute.types import SAME_DATACENTER, SAME_POD, SAME_RACK, InputError
from kvroute_engine.agent.schemes import Scheme

LIVE_SCHEMES: tuple[Scheme, ...] = ("ring", "hierarchical-ring", *INA_SCHEMES)
"""Schemes that ranks can choose; NCCL decides itself how many NICs its ring uses."""
_LEVELS: dict[SwitchLevel, int] = {"rack": SAME_RACK, "pod": SAME_POD, "core": SAME_DATACENTER}
_NBYTES = 1e6
"""Size for which flows are made; all times but the latency are proportional to it."""


@dataclass(frozen=True, slots=True)
class Group:
    """One tensor-parallel group."""

    name: str
    """The instance's, with `/STAGE` if it has several pipeline stages."""
    nodes: tuple[str, ...]
    """Servers of its ranks; the first one has rank 0."""
    choices: tuple[SchemeOption, ...]
    """Each with the scheme as the name of its option; `ring` first."""


def groups_of(cluster: Cluster) -> tuple[Group, ...]:
    """Return the groups of all instances with tensor parallelism, in the order of the instances.

    Raises:
        InputError: the cluster has none.
    """
    found = []
    for instance, shards in zip(cluster.instances, cluster.shards, strict=True):
        if instance.tp == 1:
            continue
        for stage in range(instance.pp):
            name = f"{instance.name}/{stage}" if instance.pp > 1 else instance.name
            members = shards[stage * instance.tp : (stage + 1) * instance.tp]
            nodes = tuple(dict.fromkeys(cluster.places.nodes[node].name for node, _ in members))
            found.append(Group(name, nodes, _choices(cluster, members)))
    if not found:
        raise InputError(f"{cluster.name} has no instance with tp > 1", hint="the scheduler needs one; set `tp`")
    return tuple(found)


def _choices(cluster: Cluster, members: Shards) -> tuple[SchemeOption, ...]:
    section = cluster.file.collectives
    aggregation = Aggregation.of(section.aggregation)
    allowed = LIVE_SCHEMES if section.schemes is None else ("ring", *section.schemes)
    across = len({node for node, _ in members}) > 1
    found = []
    for scheme in LIVE_SCHEMES if across else ("ring",):  # on one server all rings are the same
        collective = all_reduce(scheme, AllReduce(members, _NBYTES), cluster, aggregation)
        if scheme in allowed and collective is not None:
            found.append(_choice(cluster, members, collective, aggregation))
    return tuple(found)


def _choice(cluster: Cluster, members: Shards, collective: Collective, aggregation: Aggregation | None) -> SchemeOption:
    option = Option.of(collective, _NBYTES)
    busiest_s = float((option.share / cluster.capacity_bytes_per_s[option.links]).max())
    whole_s = (seconds(collective, cluster.capacity_bytes_per_s) - collective.latency_s) / _NBYTES
    slots: tuple[tuple[str, int], ...] = ()
    if aggregation is not None and collective.scheme in INA_SCHEMES:
        pools = _rails(cluster, members) if collective.scheme == "hierarchical-ina" else 1
        names = _switches(cluster, members, aggregation)
        slots = tuple((name, pools * aggregation.slots) for name in names)
    return SchemeOption(option, collective.latency_s, max(whole_s - busiest_s, 0.0), slots)


def _rails(cluster: Cluster, members: Shards) -> int:
    """Return the number of shards of a hierarchical scheme: NICs of the server with the fewest."""
    paths = GpuPaths(cluster, members)
    cards: dict[int, set[int]] = {}
    for gpu in members:
        cards.setdefault(gpu[0], set()).add(paths.card(gpu))
    return min(map(len, cards.values()))


def _switches(cluster: Cluster, members: Shards, aggregation: Aggregation) -> tuple[str, ...]:
    """Return the switches that aggregate the tensors of a group, by name."""
    top = GpuPaths(cluster, members).level
    levels = sorted(_LEVELS[level] for level in aggregation.levels if _LEVELS[level] <= top)
    return tuple(sorted({name for level in levels for node, _ in members if (name := _domain(cluster, node, level))}))


def _domain(cluster: Cluster, node: int, level: int) -> str:
    """Return the rack, pod or datacenter of a node; empty if it has none."""
    places = cluster.places
    if level == SAME_DATACENTER:
        return places.datacenters[node]
    domain = places.racks[node] if level == SAME_RACK else places.pods[node]
    return domain.name if domain is not None else ""


def switch_names(cluster: Cluster) -> tuple[str, ...]:
    """Return the names under which agents of switches may connect: racks, pods and datacenters.

    Raises:
        InputError: two of them have the same name.
    """
    domains = [domain.name for section in (cluster.file.racks, cluster.file.pods) for domain in section]
    names = [*domains, *dict.fromkeys(cluster.places.datacenters)]
    twice = next((name for number, name in enumerate(names) if name in names[:number]), None)
    if twice is not None:
        what = f"{twice!r} is the name of two of: rack, pod, datacenter"
        raise InputError(what, hint="give each another name, because agents of switches use them")
    return tuple(names)


def port_links(cluster: Cluster, name: str, *, switch: bool) -> tuple[tuple[int, int], ...]:
    """Return the links that leave and enter a server or switch, by port: NICs of a node, uplinks of a rack or pod."""
    if not switch:
        return cluster.cables.nic[cluster.places.index[name]]
    up, down = cluster.cables.rack.get(name) or cluster.cables.pod.get(name) or ((), ())
    return tuple(zip(up, down, strict=True))


def nvlink_links(cluster: Cluster, node: str) -> tuple[tuple[int, int], ...]:
    """Return the links that leave and enter each GPU of a node over NVLink."""
    return cluster.cables.nvlink[cluster.places.index[node]]


def groups_on(groups: tuple[Group, ...], node: str) -> Iterator[Group]:
    """Yield the groups with a rank on a node."""
    return (group for group in groups if node in group.nodes)
