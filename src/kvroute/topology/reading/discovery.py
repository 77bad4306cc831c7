"""Builds a cluster from a cluster file and the engines that a discovery source has found; pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import get_args

import msgspec

from kvroute.topology.cluster import Cluster
from kvroute.topology.place import places_of, port_fault
from kvroute.topology.reading.check import setting_fault
from kvroute.topology.reading.linking import link
from kvroute.topology.reading.templates import with_domains
from kvroute.topology.schema import EndpointEntry, InstanceEntry, Name
from kvroute.types import TRAITS, Discovered, Endpoint, InputError, Joined, Place, Role

_REFERENCE = ("prefill", "decode")


def grown(base: Cluster, members: Iterable[Joined]) -> Cluster:
    """Return the cluster of a file with these engines in addition to the file's own instances.

    Nodes, racks, pods and datacenters that the file does not list are made from the templates of its section
    `discovery`; all other values of an engine are those of `defaults`.

    Args:
        base: cluster of the file alone.
        members: engines that `admitted` has accepted.
    """
    ordered = sorted(members, key=lambda member: member.engine.name)
    file = with_domains(base.file, [member.engine.place for member in ordered])
    assert isinstance(file.instances, list), "a Cluster keeps its file without shorthands"
    file = msgspec.structs.replace(file, instances=[*file.instances, *map(_entry, ordered)])
    return replace(link(file, places_of(file)), remarks=base.remarks, lines=base.lines)


def template_cluster(base: Cluster) -> Cluster:
    """Return a cluster of one prefill and one decode engine as the templates make them; it serves no request."""
    model = base.file.defaults.model or "llama-3-70b"
    size = base.file.defaults.tp * base.file.defaults.pp
    place = [Place(node=f"{role}-node", rack=f"{role}-rack") for role in _REFERENCE]
    roles: tuple[Role, ...] = ("prefill", "decode")
    engines = [
        Discovered(name=role, uid="", role=role, endpoint=Endpoint(url="http://127.0.0.1:1"), place=at, model=model)
        for role, at in zip(roles, place, strict=True)
    ]
    return grown(base, [Joined(engine, tuple(range(size))) for engine in engines])


def admitted(
    base: Cluster, present: Mapping[str, Joined], found: Sequence[Discovered]
) -> tuple[tuple[Joined, ...], dict[str, str]]:
    """Return which of the engines found can join a cluster, and why each of the others cannot.

    On its node an engine gets the first GPUs that no other engine has, in the order of the names.

    Args:
        base: cluster of the file alone.
        present: engines that are part of the cluster and still exist, by name.
        found: new engines, ascending by name.

    Returns:
        the engines that join, and the reason for each other one, by its name.
    """
    checks = _Checks(base, present)
    joined: list[Joined] = []
    refused: dict[str, str] = {}
    for engine in found:
        why = checks.fault(engine)
        if why:
            refused[engine.name] = why
        else:
            joined.append(checks.take(engine))
    return tuple(joined), refused


class _Checks:
    """What is taken on each node and at each address, and the checks of the next engine."""

    def __init__(self, base: Cluster, present: Mapping[str, Joined]) -> None:
        file = base.file
        self._file = file
        self._gpus = {node.name: node.gpus for node in file.nodes}
        self._listed = {name for instance in base.instances for name in (instance.name, instance.server)}
        self._taken: dict[str, set[int]] = {}
        for instance in base.instances:
            for gpu in instance.gpus:
                node, _, number = gpu.rpartition("/")
                self._taken.setdefault(node, set()).add(int(number))
        self._urls = {i.endpoint.url: i.server for i in base.instances if i.endpoint is not None}
        self._names = set(present)
        self._sites = {site.name for site in file.datacenters} or {
            member.engine.place.datacenter for member in present.values() if member.engine.place.datacenter
        }
        for member in present.values():
            self._taken.setdefault(member.engine.place.node, set()).update(member.gpus)
            self._urls[member.engine.endpoint.url] = member.engine.server

    def take(self, engine: Discovered) -> Joined:
        """Give an engine without a fault the first free GPUs of its node."""
        taken = self._taken.setdefault(engine.place.node, set())
        free = [gpu for gpu in range(self._room(engine)) if gpu not in taken][: self._size(engine)]
        taken.update(free)
        self._urls[engine.endpoint.url] = engine.server
        self._names.add(engine.name)
        if engine.place.datacenter:
            self._sites.add(engine.place.datacenter)
        return Joined(engine, tuple(free))

    def fault(self, engine: Discovered) -> str:
        """Return why an engine cannot join; empty if it can."""
        if engine.name in self._listed:
            return "the cluster file lists an instance with this name"
        if engine.name in self._names:
            return "another engine has this name"
        if engine.engine in self._listed or engine.engine in self._names:
            return f"its engine has the name of the instance {engine.engine}"
        try:
            msgspec.convert(engine.name, Name)
        except msgspec.ValidationError:
            return "its name may have letters, digits and _.- only, and begins with a letter or digit"
        if engine.role not in get_args(Role):
            return f"there is no role {engine.role!r}"
        return self._endpoint_fault(engine) or self._setting_fault(engine) or self._place_fault(engine)

    def _endpoint_fault(self, engine: Discovered) -> str:
        endpoint = engine.endpoint
        try:
            msgspec.convert(msgspec.to_builtins(endpoint), EndpointEntry)
        except msgspec.ValidationError as error:
            return f"its endpoint is invalid: {error}"
        if fault := port_fault(endpoint.url):
            return fault
        if self._urls.get(endpoint.url, engine.server) != engine.server:
            return f"{endpoint.url} is already the endpoint of {self._urls[endpoint.url]}"
        if engine.engine and not TRAITS[endpoint.protocol].rank_header:
            return f"{endpoint.protocol} engines do not take the data-parallel rank of a request from a header"
        if engine.role == "prefill" and TRAITS[endpoint.protocol].needs_bootstrap and not endpoint.bootstrap:
            return f"{endpoint.protocol} needs the prefill engine's bootstrap server"
        return "`kv_replay` requires `kv_events`" if endpoint.kv_replay and not endpoint.kv_events else ""

    def _setting_fault(self, engine: Discovered) -> str:
        defaults = self._file.defaults
        for setting, value in (
            ("model", engine.model or defaults.model),
            ("timing", engine.timing or defaults.timing),
        ):
            fault: InputError | None = setting_fault(setting, value, self._file)
            if fault is not None:
                return f"{fault.what}; {fault.hint}"
        return ""

    def _place_fault(self, engine: Discovered) -> str:
        place = engine.place
        for level, name in (
            ("node", place.node),
            ("rack", place.rack),
            ("pod", place.pod),
            ("datacenter", place.datacenter),
        ):
            try:
                msgspec.convert(name, Name if name or level == "node" else str)
            except msgspec.ValidationError:
                return f"{name!r} is not the name of a {level}"
        size = self._size(engine)
        free = self._room(engine) - len(self._taken.get(place.node, ()))
        if size > free:
            return f"it needs {size} GPUs, and node {place.node} has {max(free, 0)} free of {self._room(engine)}"
        joined = self._file.network.tier_bandwidth.wan_bytes_per_s is not None
        if place.datacenter and self._sites and place.datacenter not in self._sites and not joined:
            hint = "add it with `wan` links, or add `network: {tier_bandwidth: {wan: 10 Gbps}}`"
            return f"no `wan` links lead to datacenter {place.datacenter}; {hint}"
        return ""

    def _room(self, engine: Discovered) -> int:
        discovery = self._file.discovery
        template = discovery.node.gpus if discovery is not None else 0
        return self._gpus.get(engine.place.node, template)

    def _size(self, engine: Discovered) -> int:
        return (engine.tp or self._file.defaults.tp) * (engine.pp or self._file.defaults.pp)


def _entry(member: Joined) -> InstanceEntry:
    engine, endpoint = member.engine, member.engine.endpoint
    return InstanceEntry(
        name=engine.name,
        role=engine.role,
        gpus=f"{engine.place.node}:{','.join(map(str, member.gpus))}",
        model=engine.model or None,
        tp=engine.tp,
        pp=engine.pp,
        timing=engine.timing or None,
        engine=engine.engine or None,
        rank=engine.rank if engine.engine else None,
        endpoint=EndpointEntry(
            url=endpoint.url,
            protocol=endpoint.protocol,
            bootstrap=endpoint.bootstrap,
            kv_events=endpoint.kv_events,
            kv_replay=endpoint.kv_replay,
            buffer=endpoint.buffer,
        ),
    )
