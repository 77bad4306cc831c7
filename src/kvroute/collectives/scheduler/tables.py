"""State of the central scheduler: reports of agents go in, versioned tables of all-reduce schemes come out.

It has no clock and no sockets: calls take the time. Versions are numbers above the first one, for which the caller
takes the unix time in milliseconds, so they increase over restarts as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from kvroute.collectives.policy import LinkLoads
from kvroute.collectives.scheduler.derivation import (
    EXPONENTS,
    HYSTERESIS,
    WINDOW_PERIODS,
    AllReduceDemand,
    Cell,
    Period,
    derive,
    size_class,
)
from kvroute.collectives.scheduler.groups import (
    Group,
    groups_of,
    groups_on,
    nvlink_links,
    port_links,
    switch_names,
)
from kvroute.topology.cluster import Cluster
from kvroute.types import FloatArray, InputError
from kvroute_engine.agent.files import GroupEntry, GroupTraffic, SchemeRule
from kvroute_engine.agent.rates import CounterRate
from kvroute_engine.agent.reports import AgentName, AgentTable, CounterReport
from kvroute_engine.agent.schemes import Scheme

_SILENT_PERIODS = 3
_SILENT_LEAST_S = 3.0


@dataclass(slots=True)
class _Agent:
    heard_s: float
    slots: tuple[int, int] | None = None
    links: dict[int, CounterRate] = field(default_factory=dict)
    """By link."""
    nvlinks: dict[int, float] = field(default_factory=dict)
    """Bytes per second, by link."""


@dataclass(slots=True)
class _Traffic:
    """All-reduces of one group."""

    clock_s: float
    incarnation: int
    table_version: int
    calls: dict[tuple[Scheme, int], CounterRate] = field(default_factory=dict)
    nbytes: dict[tuple[Scheme, int], CounterRate] = field(default_factory=dict)
    """By scheme and size exponent."""
    schemes: frozenset[Scheme] = frozenset()
    """Those that it has used since its rank 0 has started."""


class Tables:
    """The scheduler's knowledge of a cluster, and the current tables."""

    def __init__(
        self, cluster: Cluster, first_version: int, period_s: float = 1.0, hysteresis: float = HYSTERESIS
    ) -> None:
        """Args:

        cluster: its instances are the groups.
        first_version: versions are higher.
        period_s: time between two calls of `derive`, and between two reports of an agent.
        hysteresis: share of the time that a change of a choice must save.

        Raises:
            InputError: the cluster has no groups, or two switches with the same name.
        """
        self.cluster, self.period_s = cluster, period_s
        self.silent_s = max(_SILENT_PERIODS * period_s, _SILENT_LEAST_S)
        """An agent without a report for this time counts as absent."""
        self.groups: tuple[Group, ...] = groups_of(cluster)
        self.entries: dict[str, GroupEntry] = {}
        self.background: FloatArray = np.zeros(len(cluster.links))
        """[link]: utilisation by other traffic in the last periods."""
        self._numbers = {group.name: number for number, group in enumerate(self.groups)}
        self._switches = switch_names(cluster)
        self._version, self._hysteresis = first_version, hysteresis
        self._agents: dict[AgentName, _Agent] = {}
        self._traffic: dict[str, _Traffic] = {}
        self._chosen: dict[Cell, int] = {}

    def check(self, agent: AgentName) -> None:
        """Raise InputError if the cluster has no such server or switch."""
        known = tuple(self.cluster.places.index) if agent.kind == "server" else self._switches
        if agent.name not in known:
            what = f"{self.cluster.name} has no {'node' if agent.kind == 'server' else 'rack, pod or datacenter'}"
            some = ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")
            raise InputError(f"{what} {agent.name!r}", hint=f"use one of: {some}")

    def hello(self, held_version: int) -> None:
        """Take the version that a new agent has. If it is higher, because the clock went back between two starts, all
        entries get higher ones."""
        if held_version > self._version:
            self._version = held_version + 1
            self.entries = {name: GroupEntry(self._version, entry.rules) for name, entry in self.entries.items()}

    def report(self, now_s: float, agent: AgentName, report: CounterReport) -> None:
        """Take the counters of an agent that `check` accepts; traffic counts if the group's rank 0 is on its server.

        Raises:
            InputError: a port or GPU that the cluster file does not have.
        """
        known = self._agents.setdefault(agent, _Agent(now_s))
        known.heard_s, known.slots = now_s, report.slots
        ports = port_links(self.cluster, agent.name, switch=agent.kind == "switch")
        for port, counted in sorted(report.ports.items()):
            for link, value in zip(_ends(ports, port, f"{agent}: port"), counted, strict=True):
                rate = known.links.setdefault(link, CounterRate(WINDOW_PERIODS * self.period_s))
                rate.read(report.clock_s, value, report.incarnation)
        if agent.kind == "switch":
            return
        gpus = nvlink_links(self.cluster, agent.name)
        known.nvlinks = {
            link: per_s
            for gpu, rates in report.nvlinks.items()
            for link, per_s in zip(_ends(gpus, gpu, f"{agent}: GPU"), rates, strict=True)
        }
        for traffic in report.traffic:
            number = self._numbers.get(traffic.group)
            if number is not None and self.groups[number].nodes[0] == agent.name:
                self._count(report.clock_s, traffic)

    def _count(self, clock_s: float, traffic: GroupTraffic) -> None:
        """Read the counters of a group; one that appears while its rank runs has been 0 until now."""
        known = self._traffic.setdefault(traffic.group, _Traffic(clock_s, traffic.incarnation, traffic.table_version))
        for rates, counts in ((known.calls, traffic.calls), (known.nbytes, traffic.nbytes)):
            flat = {(scheme, exponent): n for scheme, sizes in counts.items() for exponent, n in sizes.items()}
            for key in dict.fromkeys([*rates, *flat]):
                if key not in rates:
                    rates[key] = CounterRate(WINDOW_PERIODS * self.period_s)
                    if clock_s > known.clock_s:
                        rates[key].read(known.clock_s, 0, traffic.incarnation)
                rates[key].read(clock_s, flat.get(key, 0), traffic.incarnation)
        known.clock_s, known.incarnation, known.table_version = clock_s, traffic.incarnation, traffic.table_version
        known.schemes = frozenset(scheme for scheme, sizes in traffic.calls.items() if any(sizes.values()))

    def derive(self, now_s: float) -> bool:
        """Compute the tables from the loads of the last periods; return whether an entry has changed."""
        heard = {name: agent for name, agent in self._agents.items() if now_s - agent.heard_s <= self.silent_s}
        demand = self._demand(heard)
        self.background = self._background(heard)
        period = Period(demand, self.cluster.capacity_bytes_per_s, self.background, self.period_s, self._slots(heard))
        choices = [group.choices for group in self.groups]
        self._chosen = derive(choices, period, self._chosen, self._hysteresis)
        rules = {group.name: self._rules(number) for number, group in enumerate(self.groups)}
        changed = [name for name in rules if name not in self.entries or self.entries[name].rules != rules[name]]
        if changed:
            self._version += 1
            self.entries = self.entries | {name: GroupEntry(self._version, rules[name]) for name in changed}
        return bool(changed)

    def _heard_traffic(self, heard: Mapping[AgentName, _Agent]) -> list[tuple[int, _Traffic]]:
        """Return the traffic of groups whose first server is heard, by group number."""
        return [
            (number, self._traffic[group.name])
            for number, group in enumerate(self.groups)
            if group.name in self._traffic and AgentName("server", group.nodes[0]) in heard
        ]

    def _demand(self, heard: Mapping[AgentName, _Agent]) -> dict[Cell, AllReduceDemand]:
        found: dict[Cell, AllReduceDemand] = {}
        for number, traffic in self._heard_traffic(heard):
            for key, rate in traffic.nbytes.items():
                cell = number, size_class(key[1])
                before = found.get(cell, AllReduceDemand(0.0, 0.0))
                calls = traffic.calls[key].per_s * self.period_s if key in traffic.calls else 0.0
                found[cell] = AllReduceDemand(before.calls + calls, before.nbytes + rate.per_s * self.period_s)
        return {cell: demand for cell, demand in found.items() if demand.nbytes > 0}

    def _background(self, heard: Mapping[AgentName, _Agent]) -> FloatArray:
        """Return the utilisation of each link by other traffic: its counters without the groups' own bytes. Of two
        agents that count the same link, the higher rate counts."""
        loads = LinkLoads(self.cluster.capacity_bytes_per_s)
        for number, traffic in self._heard_traffic(heard):
            options = {choice.option.name: choice.option for choice in self.groups[number].choices}
            for (scheme, _), rate in traffic.nbytes.items():
                if scheme in options and rate.per_s:
                    loads.add(options[scheme], rate.per_s * self.period_s)
                    loads.remove(options[scheme], rate.per_s * self.period_s)
        counted = np.zeros(len(self.cluster.links))
        for agent in heard.values():
            rates = {link: rate.per_s for link, rate in agent.links.items()} | agent.nvlinks
            for link, per_s in rates.items():
                counted[link] = max(counted[link], per_s * self.period_s)
        loads.measured(self.period_s, counted)
        return loads.background

    def _slots(self, heard: Mapping[AgentName, _Agent]) -> dict[str, int]:
        """Return the slots that groups may share, by switch: all but those that others have. Groups have those of
        schemes that they use, or that their entry has."""
        used = {(number, scheme) for number, traffic in self._heard_traffic(heard) for scheme in traffic.schemes}
        used |= {(self._numbers[name], rule.scheme) for name, entry in self.entries.items() for rule in entry.rules}
        own: dict[str, int] = {}
        for number, scheme in sorted(used):
            for choice in self.groups[number].choices:
                for name, count in choice.slots if choice.option.name == scheme else ():
                    own[name] = own.get(name, 0) + count
        found = {}
        for agent, state in heard.items():
            if agent.kind == "switch" and state.slots is not None:
                total, free = state.slots
                found[agent.name] = total - max(total - free - own.get(agent.name, 0), 0)
        return found

    def _rules(self, number: int) -> tuple[SchemeRule, ...]:
        """Return the rules of a group: neighbouring sizes with the same scheme are one rule, and the last one has no
        limit."""
        rules: list[SchemeRule] = []
        for exponent in EXPONENTS:
            name = self.groups[number].choices[self._chosen[number, exponent]].option.name
            if rules and rules[-1].scheme == name:
                rules.pop()
            rules.append(SchemeRule(cast(Scheme, name), 1 << exponent))
        return (*rules[:-1], SchemeRule(rules[-1].scheme))

    def table(self, agent: AgentName) -> AgentTable:
        """Return the entries of the groups with ranks on a server; empty for a switch, and before `derive`."""
        names = [group.name for group in groups_on(self.groups, agent.name)] if agent.kind == "server" else []
        entries = {name: self.entries[name] for name in names if name in self.entries}
        return AgentTable(max((entry.version for entry in entries.values()), default=0), entries)

    def versions_in_use(self) -> dict[str, int]:
        """Return the version of the entry that each group uses, as its rank 0 has reported; 0: none."""
        return {name: traffic.table_version for name, traffic in sorted(self._traffic.items())}


def _ends(links: tuple[tuple[int, int], ...], number: int, what: str) -> tuple[int, int]:
    if number >= len(links):
        raise InputError(f"{what} {number} is not in the cluster file", hint=f"it has {len(links)}; change --nic")
    return links[number]
