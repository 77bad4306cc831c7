"""A cluster as network namespaces: which ones exist, how they are connected, and how packets are routed. No side
effects.

Every compute card that an instance uses is a host; every rack, pod and datacenter is a switch; every cable of the
cluster file is one pair of devices. Two hosts of one node are connected by the hub without a limit, as GPUs by NVLink.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from itertools import permutations

from kvroute.topology import Cluster
from kvroute.topology.place import card_of
from kvroute.types import SAME_NODE, TIER_COUNT, InputError

HUB = "hub"
"""Switch beside the cluster's own network, without limits, from the gateway to every host."""
CABLES = IPv4Network("172.16.0.0/12")
"""Addresses of the ends of cables. They are not visible outside the namespaces."""
_FIRST_HOST = 3
_MOST_HOSTS = 240


@dataclass(frozen=True, slots=True)
class Host:
    """One compute card, with the instances that use it and the address that they share."""

    name: str
    node: str
    address: IPv4Address
    instances: tuple[str, ...]

    @property
    def program(self) -> str:
        """Name of its engines' process and files. The prefix distinguishes them from the gateway and other programs."""
        return f"engines-{self.name}"


@dataclass(frozen=True, slots=True)
class LinkDevice:
    """A device at the source of one directed link. Packets that leave by it use that link."""

    link: int
    place: str
    address: IPv4Address
    beyond: IPv4Address
    """Address of the other end."""
    bytes_per_s: float
    """Rate in the cluster file, before scaling."""
    tier: int
    equal: int
    """Number of links among which connections are spread, this one included."""

    @property
    def device(self) -> str:
        """Name of the device inside its namespace."""
        return f"l{self.link}"


@dataclass(frozen=True, slots=True)
class Cable:
    """Both directions of a cable."""

    up: LinkDevice
    down: LinkDevice


@dataclass(frozen=True, slots=True)
class Wiring:
    """All places and routes. `routes[place, host]`: links among which packets to that host are spread at that place."""

    hosts: tuple[Host, ...]
    switches: tuple[str, ...]
    cables: tuple[Cable, ...]
    routes: dict[tuple[str, str], tuple[int, ...]]
    neighbours: tuple[tuple[str, str], ...]
    """Ordered pairs of hosts of one node."""
    latency_s: dict[tuple[str, str], float]
    """One-way latency between two hosts, by ordered pair."""

    @property
    def places(self) -> tuple[str, ...]:
        """Names of all namespaces but the hub's."""
        return (*(host.name for host in self.hosts), *self.switches)

    @property
    def ends(self) -> Iterator[LinkDevice]:
        """Ends of all cables."""
        for cable in self.cables:
            yield cable.up
            yield cable.down

    def host_of(self, instance: str) -> Host:
        """Return the host of an instance."""
        return next(host for host in self.hosts if instance in host.instances)

    def ends_at(self, place: str) -> Iterator[LinkDevice]:
        """Return the devices of one namespace."""
        return (end for end in self.ends if end.place == place)


def wire(cluster: Cluster, addresses: IPv4Network) -> Wiring:
    """Return the namespaces of a cluster. Its hosts take their addresses from `addresses`, from index 3 on.

    Raises:
        InputError: several flows per transfer, which one connection cannot have; names that two places share; too many
            hosts; or instances without a compute card.
    """
    _check(cluster)
    hosts = _hosts(cluster, addresses)
    cables = tuple(_cables(cluster, hosts))
    switches = tuple(dict.fromkeys(end.place for cable in cables for end in (cable.up, cable.down)))
    names = {host.name for host in hosts}
    of = {name: host for host in hosts for name in host.instances}
    routes: dict[tuple[str, str], tuple[int, ...]] = {}
    latency_s: dict[tuple[str, str], float] = {}
    for source, target in permutations(range(len(cluster.instances)), 2):
        near, far = (of[cluster.instances[index].name] for index in (source, target))
        if near.name == far.name:
            continue
        latency_s[near.name, far.name] = cluster.latency_s(source, target)
        if cluster.tier[source, target] != SAME_NODE:
            for links in cluster.hops(source, target, 0):
                place = cluster.links[links[0]].source
                place = near.name if place == near.node else place
                if routes.setdefault((place, far.name), links) != links:
                    what = f"the path from {place} to {far.name} depends on the traffic's origin"
                    raise InputError(what, where=cluster.name, hint="give the datacenters one route, without a detour")
    beside = tuple((a.name, b.name) for a, b in permutations(hosts, 2) if a.node == b.node)
    return Wiring(hosts, tuple(name for name in switches if name not in names), cables, routes, beside, latency_s)


def _check(cluster: Cluster) -> None:
    pairs = permutations(range(len(cluster.instances)), 2)
    if any(cluster.flows_per_transfer(*pair) != 1 for pair in pairs):
        what = "emulated engines transfer a KV cache over one connection, but the file sets several flows"
        hint = "write `network: {flows_per_transfer: 1}`, and `scope: instance` or `server` for the NICs"
        raise InputError(what, where=f"{cluster.name}: network.flows_per_transfer", hint=hint)
    places = cluster.places
    sites = set(places.datacenters)
    kinds = {
        "node": set(places.index),
        "rack": {rack.name for rack in places.racks if rack},
        "pod": {pod.name for pod in places.pods if pod},
        "datacenter": sites,
    }
    seen: dict[str, str] = {HUB: "the testbed's own hub"}
    for kind, names in kinds.items():
        for name in sorted(names):
            if name in seen:
                what = f"{kind} {name} has the same name as {seen[name]}, but each needs its own namespace"
                raise InputError(
                    what, where=cluster.name, hint="give every node, rack, pod and datacenter its own name"
                )
            seen[name] = f"a {kind}"


def _hosts(cluster: Cluster, addresses: IPv4Network) -> tuple[Host, ...]:
    """Return one host per card, ascending by (node, card)."""
    cards: dict[tuple[int, int], list[str]] = {}
    for instance, gpus in zip(cluster.instances, cluster.shards, strict=True):
        node = gpus[0][0]
        if not cluster.cables.nic[node]:
            what = f"{instance.name} is on {instance.node}, which has no compute NIC"
            raise InputError(what, where=cluster.name, hint="add `nics: {compute: {...}}` to the node")
        cards.setdefault((node, card_of(cluster.places, gpus, 0)), []).append(instance.name)
    if len(cards) > _MOST_HOSTS:
        raise InputError(f"the testbed needs {len(cards)} hosts", where=cluster.name, hint=f"use {_MOST_HOSTS} at most")
    single = {node: sum(other == node for other, _ in cards) == 1 for node, _ in cards}
    return tuple(
        Host(
            name=cluster.places.nodes[node].name + ("" if single[node] else f".card{card}"),
            node=cluster.places.nodes[node].name,
            address=addresses[_FIRST_HOST + number],
            instances=tuple(names),
        )
        for number, ((node, card), names) in enumerate(sorted(cards.items()))
    )


def _cables(cluster: Cluster, hosts: Iterable[Host]) -> Iterator[Cable]:
    """Yield the cables of the hosts' cards and of all uplinks, `wan` included."""
    index = {instance.name: gpus for instance, gpus in zip(cluster.instances, cluster.shards, strict=True)}
    pairs: list[tuple[int, int, str, int]] = []
    for host in hosts:
        gpus = index[host.instances[0]]
        pairs.append((*cluster.cables.nic[gpus[0][0]][card_of(cluster.places, gpus, 0)], host.name, 1))
    for ups, downs in (*cluster.cables.rack.values(), *cluster.cables.pod.values(), *cluster.cables.wan):
        pairs += [(up, down, cluster.links[up].source, len(ups)) for up, down in zip(ups, downs, strict=True)]
    for number, (up, down, low, equal) in enumerate(pairs):
        here, there = CABLES[2 * number], CABLES[2 * number + 1]
        forth, back = cluster.links[up], cluster.links[down]
        yield Cable(
            LinkDevice(up, low, here, there, forth.bytes_per_s, forth.tier, equal),
            LinkDevice(down, forth.target, there, here, back.bytes_per_s, back.tier, equal),
        )


def background_ends(wiring: Wiring, shares: tuple[float, ...]) -> list[tuple[LinkDevice, float]]:
    """Return the links with background traffic, with its share of each. `shares` is by tier, [TIER_COUNT]."""
    assert len(shares) == TIER_COUNT
    return [(end, shares[end.tier]) for end in wiring.ends if shares[end.tier] > 0.0]
