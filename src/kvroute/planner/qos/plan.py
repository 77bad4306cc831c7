"""Traffic classes of the compute network: numbers for InfiniBand and RoCE, and the guaranteed share of each class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvroute.planner.qos.schema import DEFAULT_CLASSES, LinkType, QosEntry, TrafficClassEntry
from kvroute.planner.qos.vl_arbitration import Arbitration, arbitration, guaranteed_shares
from kvroute.topology import parse
from kvroute.topology.reading.assembly import read_text
from kvroute.types import InputError, InputErrors
from kvroute_engine.files.document import read_section
from kvroute_engine.files.form import FileError, Key, Lines

SECTION = "qos"
_SHARE_MIN = 0.9
"""A class is guaranteed at least this part of its share, or the shares are rejected."""
_SERVICE_LEVELS, _DSCPS, _PRIORITIES = 16, 64, 8


@dataclass(frozen=True, slots=True)
class TrafficClass:
    """A class with all its numbers."""

    name: str
    share: float
    """Share of the link that was asked for."""
    guaranteed_share: float
    """Share of the link that the class has while all classes send full packets."""
    default: bool
    high: bool
    service_level: int
    vl: int
    dscp: tuple[int, ...]
    priority: int
    """RoCE: priority and hardware traffic class."""
    lossless: bool
    library: str | None


@dataclass(frozen=True, slots=True)
class InfiniBandQos:
    """Settings of all ports."""

    vls: int
    arbitration: Arbitration
    sl2vl: tuple[int, ...]
    """Virtual lane of each service level."""


@dataclass(frozen=True, slots=True)
class RoceQos:
    """Settings of NICs and of switch ports."""

    interface: str
    dscp: tuple[int, ...]
    """DSCP values that the classes list."""
    dscp_priority: tuple[int, ...]
    """Priority of each DSCP value."""
    priority_class: tuple[int, ...]
    """Hardware traffic class of each priority."""
    weights: tuple[int, ...]
    """ETS weight of each hardware traffic class in percent; 0: not used."""
    pfc: tuple[bool, ...]
    """Whether PFC pauses each priority."""


@dataclass(frozen=True, slots=True)
class QosPlan:
    """Traffic classes, and the settings of one type of link."""

    cluster: str
    link: LinkType
    classes: tuple[TrafficClass, ...]
    infiniband: InfiniBandQos | None
    roce: RoceQos | None


def read_qos(text: str, source: str) -> tuple[QosEntry, Lines]:
    """Return the `qos` section of a cluster file's text, checked for its link type if it has one.

    Raises:
        InputErrors: every fault of form and every contradiction between classes, each with its line.
    """
    entry, lines = read_section(text, source, SECTION, QosEntry)
    if entry.link is not None:
        qos_plan(source, entry.link, entry, lines)
    elif entry.classes:
        _reject(_class_faults(entry.classes, lines))
    return entry, lines


def plan_qos(path: Path, link: LinkType | None = None) -> QosPlan:
    """Read a cluster file and plan for its `qos` section; `link` overrides its link type.

    Raises:
        InputErrors: the file is wrong, or the classes contradict each other; every fault with its line.
        InputError: the file cannot be read, or the link type is not known.
    """
    text = read_text(path)
    cluster = parse(text, str(path))
    entry, lines = read_section(text, str(path), SECTION, QosEntry)
    link = link or entry.link
    if link is None:
        hint = "give --link roce or --link infiniband, or add `qos: {link: roce}` to the file"
        raise InputError("the type of the compute network is not known", where=str(path), hint=hint)
    return qos_plan(cluster.name, link, entry, lines)


def qos_plan(cluster: str, link: LinkType, entry: QosEntry, lines: Lines) -> QosPlan:
    """Return the settings for a link type.

    Raises:
        InputErrors: the classes contradict each other.
    """
    entries = entry.classes or list(DEFAULT_CLASSES)
    _reject(_class_faults(entries, lines))
    classes = _numbered(entries)
    if link == "roce":
        _reject(_roce_faults(entries, classes, lines))
        return QosPlan(cluster, link, classes, None, _roce(entry, classes))
    _reject(_infiniband_faults(entry, classes, lines))
    high = {traffic_class.vl: round(traffic_class.share * 100) for traffic_class in classes if traffic_class.high}
    low = {traffic_class.vl: round(traffic_class.share * 100) for traffic_class in classes if not traffic_class.high}
    tables = arbitration(high, low, entry.mtu)
    guaranteed = guaranteed_shares(tables, entry.mtu)
    classes = tuple(replace(traffic_class, guaranteed_share=guaranteed[traffic_class.vl]) for traffic_class in classes)
    _reject(_table_faults(entry, tables, classes, lines))
    other = next(traffic_class.vl for traffic_class in classes if traffic_class.default)
    lanes = {traffic_class.service_level: traffic_class.vl for traffic_class in classes}
    sl2vl = tuple(lanes.get(level, other) for level in range(_SERVICE_LEVELS))
    return QosPlan(cluster, link, classes, InfiniBandQos(entry.vls, tables, sl2vl), None)


def _roce(entry: QosEntry, classes: Sequence[TrafficClass]) -> RoceQos:
    """Return the settings. NICs and switches map DSCP value d to priority d // 8, or to 0, unless told otherwise.

    A value that no class lists keeps its priority, and the priority is mapped to the traffic class of the default. If a
    class has that priority or priority 0, the value gets the priority of the default.
    """
    other = next(traffic_class.priority for traffic_class in classes if traffic_class.default)
    taken = {traffic_class.priority for traffic_class in classes} - {other}
    marked = {value: traffic_class.priority for traffic_class in classes for value in traffic_class.dscp}
    own = {traffic_class.priority: traffic_class for traffic_class in classes}
    return RoceQos(
        interface=entry.interface,
        dscp=tuple(sorted(marked)),
        dscp_priority=tuple(
            marked.get(value, other if taken & {0, value // 8} else value // 8) for value in range(_DSCPS)
        ),
        priority_class=tuple(priority if priority in own else other for priority in range(_PRIORITIES)),
        weights=tuple(round(own[queue].share * 100) if queue in own else 0 for queue in range(_PRIORITIES)),
        pfc=tuple(priority in own and own[priority].lossless for priority in range(_PRIORITIES)),
    )


def _numbered(entries: Sequence[TrafficClassEntry]) -> tuple[TrafficClass, ...]:
    """Return the classes with the numbers that the file leaves out."""
    order = sorted(range(len(entries)), key=lambda index: not entries[index].default)
    place = {index: number for number, index in enumerate(order)}
    return tuple(
        TrafficClass(
            name=entry.name,
            share=entry.share / 100,
            guaranteed_share=entry.share / 100,
            default=entry.default,
            high=entry.high,
            service_level=place[index] if entry.service_level is None else entry.service_level,
            vl=place[index] if entry.vl is None else entry.vl,
            dscp=tuple(entry.dscp),
            priority=(entry.dscp[0] // 8 if entry.dscp else 0) if entry.priority is None else entry.priority,
            lossless=entry.lossless,
            library=entry.library,
        )
        for index, entry in enumerate(entries)
    )


def _reject(faults: Sequence[FileError]) -> None:
    if faults:
        raise InputErrors(faults)


def _at(index: int | None = None, key: str = "") -> Key:
    whole: Key = (SECTION, "classes")
    return whole if index is None else (*whole, index, key)


def _class_faults(entries: Sequence[TrafficClassEntry], lines: Lines) -> list[FileError]:
    """Return what is wrong on every type of link."""
    found = []
    total = sum(entry.share for entry in entries)
    if total != 100:
        what = f"the shares of the classes add up to {total}, not to 100"
        found.append(lines.error(what, _at(), "give percentages of the link"))
    for index, entry in enumerate(entries):
        if not entry.share:
            what = f"class {entry.name} has a share of 0 and would starve while others send"
            found.append(lines.error(what, _at(index, "share"), "give at least 1"))
    defaults = sum(entry.default for entry in entries)
    if defaults != 1:
        what = f"{defaults or 'no'} classes are the default for other traffic"
        found.append(lines.error(what, _at(), "set `default: true` in one class"))
    return found + _twice([entry.name for entry in entries], "name", "the name", lines)


def _twice(values: Sequence[object], key: str, noun: str, lines: Lines) -> list[FileError]:
    """Return a fault for every value that an earlier class has."""
    return [
        lines.error(f"{noun} {value} is used by two classes", _at(index, key), "give each class its own")
        for index, value in enumerate(values)
        if value in values[:index]
    ]


def _infiniband_faults(entry: QosEntry, classes: Sequence[TrafficClass], lines: Lines) -> list[FileError]:
    found = _twice([traffic_class.vl for traffic_class in classes], "vl", "virtual lane", lines)
    found += _twice([traffic_class.service_level for traffic_class in classes], "service_level", "service level", lines)
    for index, traffic_class in enumerate(classes):
        if traffic_class.vl >= entry.vls:
            uses = f"class {traffic_class.name} uses virtual lane {traffic_class.vl}"
            what = f"{uses}, and ports have {entry.vls} (0 to {entry.vls - 1})"
            found.append(lines.error(what, _at(index, "vl"), "use a lower one, or give the ports' number as `vls`"))
    for high, kind in ((True, "all"), (False, "none")):
        if all(traffic_class.high is high for traffic_class in classes):
            what = f"{kind} of the classes are `high`, so that no class has priority over another"
            found.append(lines.error(what, _at(), "set `high: true` in some of the classes"))
    return found


def _table_faults(
    entry: QosEntry, tables: Arbitration, classes: Sequence[TrafficClass], lines: Lines
) -> list[FileError]:
    """Return what the tables cannot express: the share that is missed most, or else too many entries."""
    index, worst = min(enumerate(classes), key=lambda entry: entry[1].guaranteed_share / entry[1].share)
    if worst.guaranteed_share < _SHARE_MIN * worst.share:
        what = f"class {worst.name} would be guaranteed {worst.guaranteed_share:.1%} instead of {worst.share:.0%}"
        hint = "the classes without `high: true` can have a half, a third, a quarter, ... of the link together"
        return [lines.error(what, _at(index, "share"), hint)]
    return [
        lines.error(
            f"the {name}-priority table needs {len(table)} entries, and ports have {entry.table_entries}",
            _at(),
            "choose shares in smaller ratios, or give the ports' number as `table_entries`",
        )
        for name, table in (("high", tables.high), ("low", tables.low))
        if len(table) > entry.table_entries
    ]


def _roce_faults(
    entries: Sequence[TrafficClassEntry], classes: Sequence[TrafficClass], lines: Lines
) -> list[FileError]:
    found = _twice([traffic_class.priority for traffic_class in classes], "priority", "priority", lines)
    owner: dict[int, str] = {}
    for index, (entry, traffic_class) in enumerate(zip(entries, classes, strict=True)):
        for value in traffic_class.dscp:
            if value in owner:
                what = f"DSCP {value} is in class {owner[value]} and in class {traffic_class.name}"
                found.append(lines.error(what, _at(index, "dscp"), "give every value to one class"))
            owner.setdefault(value, traffic_class.name)
        if not traffic_class.dscp and not traffic_class.default:
            what = f"class {traffic_class.name} has no DSCP value, so that no packet is in it"
            found.append(lines.error(what, _at(index, "dscp"), "give the values that its senders set"))
        if entry.pfc is not None and entry.pfc != traffic_class.lossless:
            has = "lossless without" if traffic_class.lossless else "not lossless but has"
            what = f"class {traffic_class.name} is {has} PFC"
            found.append(lines.error(what, _at(index, "pfc"), "remove `pfc`, or change `lossless`"))
    return found
