"""Conversion between the messages of agents.proto and the types of the core; what comes from outside is checked."""

from __future__ import annotations

import math

from kvroute_engine.agent.agents_pb2 import (
    SERVER,
    SWITCH,
    Count,
    Entry,
    FromAgent,
    FromScheduler,
    Heartbeat,
    Hello,
    Kind,
    NvlinkRate,
    PortCounter,
    Rule,
    Slots,
    Traffic,
    Welcome,
)
from kvroute_engine.agent.agents_pb2 import Report as ReportMessage
from kvroute_engine.agent.agents_pb2 import Table as TableMessage
from kvroute_engine.agent.files import GroupEntry, GroupTraffic, SchemeRule
from kvroute_engine.agent.reports import AgentKind, AgentName, AgentTable, CounterReport
from kvroute_engine.agent.schemes import SCHEMES, Scheme
from kvroute_engine.errors import InputError

PROTOCOL = 1
"""Version of agents.proto; both sides must have the same one."""
METHOD = "/kvroute.agents.v1.Scheduler/Connect"
_EXPONENT_MAX = 63
_KINDS: dict[AgentKind, Kind] = {"server": SERVER, "switch": SWITCH}
_SCHEMES: dict[str, Scheme] = {scheme: scheme for scheme in SCHEMES}


def hello_message(agent: AgentName, table_version: int, release: str) -> FromAgent:
    """Return the first message of an agent."""
    kind = _KINDS[agent.kind]
    hello = Hello(protocol=PROTOCOL, kind=kind, name=agent.name, table_version=table_version, release=release)
    return FromAgent(hello=hello)


def agent_of(hello: Hello) -> AgentName:
    """Return the name of the agent that says hello.

    Raises:
        InputError: its kind is missing.
    """
    for kind, number in _KINDS.items():
        if number == hello.kind:
            return AgentName(kind, hello.name)
    raise InputError(f"kind {hello.kind} of an agent is unknown", hint="use 1 for a server or 2 for a switch")


def report_message(report: CounterReport) -> FromAgent:
    """Return the message of a report."""
    message = ReportMessage(
        clock_s=report.clock_s,
        incarnation=report.incarnation,
        ports=[PortCounter(port=port, tx_bytes=tx, rx_bytes=rx) for port, (tx, rx) in sorted(report.ports.items())],
        nvlinks=[
            NvlinkRate(gpu=gpu, tx_bytes_per_s=tx, rx_bytes_per_s=rx)
            for gpu, (tx, rx) in sorted(report.nvlinks.items())
        ],
        traffic=[_traffic_message(traffic) for traffic in report.traffic],
        slots=None if report.slots is None else Slots(total=report.slots[0], free=report.slots[1]),
    )
    return FromAgent(report=message)


def _traffic_message(traffic: GroupTraffic) -> Traffic:
    counts = [
        Count(
            scheme=scheme,
            size_exponent=exponent,
            calls=calls,
            tensor_bytes=traffic.nbytes.get(scheme, {}).get(exponent, 0),
        )
        for scheme, sizes in sorted(traffic.calls.items())
        for exponent, calls in sorted(sizes.items())
    ]
    return Traffic(
        group=traffic.group, incarnation=traffic.incarnation, counts=counts, table_version=traffic.table_version
    )


def report_of(message: ReportMessage) -> CounterReport:
    """Return the report of a message.

    Raises:
        InputError: a number that cannot be, or an unknown scheme.
    """
    numbers = [
        message.clock_s,
        *(rate for nvlink in message.nvlinks for rate in (nvlink.tx_bytes_per_s, nvlink.rx_bytes_per_s)),
    ]
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise InputError("a clock or rate of a report is negative or not finite", hint="restart the agent")
    if message.HasField("slots") and message.slots.free > message.slots.total:
        raise InputError(f"{message.slots.free} of {message.slots.total} slots are free", hint="restart the switch")
    return CounterReport(
        clock_s=message.clock_s,
        incarnation=message.incarnation,
        ports={port.port: (port.tx_bytes, port.rx_bytes) for port in message.ports},
        nvlinks={nvlink.gpu: (nvlink.tx_bytes_per_s, nvlink.rx_bytes_per_s) for nvlink in message.nvlinks},
        traffic=tuple(_traffic_of(traffic) for traffic in message.traffic),
        slots=(message.slots.total, message.slots.free) if message.HasField("slots") else None,
    )


def _traffic_of(message: Traffic) -> GroupTraffic:
    calls: dict[Scheme, dict[int, int]] = {}
    nbytes: dict[Scheme, dict[int, int]] = {}
    for count in message.counts:
        scheme = _SCHEMES.get(count.scheme)
        if scheme is None or count.size_exponent > _EXPONENT_MAX:
            what = f"group {message.group!r} has counted {count.scheme!r}, 2^{count.size_exponent} bytes"
            raise InputError(what, hint="install the same version of kvroute on all machines")
        calls.setdefault(scheme, {})[count.size_exponent] = count.calls
        nbytes.setdefault(scheme, {})[count.size_exponent] = count.tensor_bytes
    return GroupTraffic(message.group, message.incarnation, message.table_version, calls, nbytes)


def welcome_message(period_s: float) -> FromScheduler:
    """Return the first message of the scheduler."""
    return FromScheduler(welcome=Welcome(period_s=period_s))


def heartbeat_message(version: int) -> FromScheduler:
    """Return the message that the table of this version is current; 0: there is none yet."""
    return FromScheduler(heartbeat=Heartbeat(version=version))


def table_message(table: AgentTable) -> FromScheduler:
    """Return the message of a table."""
    groups = {
        name: Entry(
            version=entry.version,
            rules=[Rule(scheme=rule.scheme, up_to_bytes=rule.up_to_bytes) for rule in entry.rules],
        )
        for name, entry in table.groups.items()
    }
    return FromScheduler(table=TableMessage(version=table.version, groups=groups))


def table_of(message: TableMessage) -> AgentTable:
    """Return the table of a message.

    Raises:
        InputError: an unknown scheme.
    """
    return AgentTable(message.version, {name: _entry_of(name, entry) for name, entry in sorted(message.groups.items())})


def _entry_of(name: str, message: Entry) -> GroupEntry:
    rules = []
    for rule in message.rules:
        scheme = _SCHEMES.get(rule.scheme)
        if scheme is None:
            what = f"the table has the unknown scheme {rule.scheme!r} for {name}"
            raise InputError(what, hint="install the same version of kvroute on all machines")
        rules.append(SchemeRule(scheme, rule.up_to_bytes if rule.HasField("up_to_bytes") else None))
    return GroupEntry(message.version, tuple(rules))
