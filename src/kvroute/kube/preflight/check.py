"""What discovery finds, and what a topology constraint would make of it; pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import msgspec

from kvroute.kube.discovery.labels import MODEL
from kvroute.kube.discovery.places import LevelKeys
from kvroute.kube.discovery.pods import PodFinding, PodReading
from kvroute.policies import Level
from kvroute.types.discovered import Discovered, Place

LEVELS: tuple[Level, ...] = get_args(Level)
"""Levels of a constraint, narrowest first."""


class LevelReport(msgspec.Struct, frozen=True, kw_only=True):
    """One level: who has no label for it, and what `level:required` would do."""

    level: Level
    domains: int
    """Number of domains with engines."""
    keys: tuple[str, ...]
    """Node labels that give the level, best first; none for `node`, which is the node's name."""
    unlabelled: tuple[str, ...]
    """Nodes with engines and without a label for the level."""
    stranded: tuple[str, ...]
    """Prefill engines without a decode engine in their domain: they would get no requests."""
    unreached: tuple[str, ...]
    """Decode engines without a prefill engine in their domain."""


class PickerTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Where gateways find the endpoint picker of a pool."""

    kind: str
    name: str
    port: int
    """Port of the Service; 0: the pool names none."""
    target_port: int | str | None
    """On which the picker listens, or the name of this port of its pods; None: it is not known."""
    failure_mode: str


class PoolReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a pool says."""

    name: str
    """`namespace/name`."""
    selector: str
    """Label selector of the pods; empty: the pool cannot be used."""
    target_ports: tuple[int, ...]
    picker: PickerTarget | None
    """None: gateways ask no endpoint picker."""
    pods: int
    """Number of pods with these labels."""

    @property
    def nothing(self) -> str:
        """Why the pool has no engine, in one sentence; empty if a finding tells."""
        if not self.selector:
            return ""
        where = f"InferencePool {self.name}: spec.selector"
        if self.pods:
            return f"{where}: none of its {self.pods} pods is an engine; see docs/kubernetes-labels.md for the labels"
        return f"{where}: no pod has the labels {self.selector}; label the engines' pods, or change matchLabels"


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `kvroute kube check` prints."""

    engines: tuple[Discovered, ...]
    findings: tuple[PodFinding, ...]
    levels: tuple[LevelReport, ...]
    constraint: Level | None
    """Level of the constraint that was asked for."""
    nodes_failure: str = ""
    """Why nodes could not be listed."""
    pool: PoolReport | None = None
    """The InferencePool whose engines these are; None: they are those of a namespace or a selector."""

    @property
    def faults(self) -> tuple[str, ...]:
        """What the owner of the cluster should change, one sentence each."""
        found = [finding.sentence for finding in self.findings if finding.effect != "waiting"]
        if self.nodes_failure:
            found.append(f"{self.nodes_failure}; places come from labels of pods alone")
        nothing = "no pod is an engine; see docs/kubernetes-labels.md for the labels"
        if self.pool is not None:
            nothing = self.pool.nothing
        if nothing and not self.engines:
            found.append(nothing)
        found += [
            f"{engine.name}: neither its command line nor a label names its model, so a gateway needs `defaults.model` "
            f"in its cluster file; add the label {MODEL}"
            for engine in self.engines
            if not engine.model and self.pool is None
        ]
        nowhere = set[str]()
        for role, other in (("prefill", "decode"), ("decode", "prefill")):
            partnerless = _partnerless(self.engines, None, role, other)
            found += [f"{name}: no {other} engine has its model and protocol" for name in partnerless]
            nowhere.update(partnerless)
        for level in self.levels:
            if level.level == self.constraint:
                found += [_unlabelled(level, node) for node in level.unlabelled]
                found += [
                    f"{name}: no decode engine is in its {level.level}, so {level.level}:required gives it no requests"
                    for name in level.stranded
                    if name not in nowhere
                ]
        return tuple(found)


def _unlabelled(level: LevelReport, node: str) -> str:
    keys = f"{', '.join(level.keys[:2])} or another label of the {level.level}"
    return f"node {node}: it has no {level.level}, so {level.level}:required excludes its engines; label it with {keys}"


def check_report(
    reading: PodReading,
    levels: LevelKeys,
    constraint: Level | None = None,
    nodes_failure: str = "",
    pool: PoolReport | None = None,
) -> CheckReport:
    """Return the report on what was read from the cluster."""
    return CheckReport(
        engines=reading.engines,
        findings=reading.findings,
        levels=tuple(_level_report(level, reading.engines, levels) for level in LEVELS),
        constraint=constraint,
        nodes_failure=nodes_failure,
        pool=pool,
    )


def _level_report(level: Level, engines: Sequence[Discovered], levels: LevelKeys) -> LevelReport:
    names = {_domain(engine.place, level) for engine in engines} - {""}
    unlabelled = {engine.place.node for engine in engines if not _domain(engine.place, level)}
    if level == "datacenter" and not names:
        unlabelled = set()  # the cluster is in one datacenter
    return LevelReport(
        level=level,
        domains=len(names),
        keys=() if level == "node" else getattr(levels, level),
        unlabelled=tuple(sorted(unlabelled)),
        stranded=_partnerless(engines, level, "prefill", "decode"),
        unreached=_partnerless(engines, level, "decode", "prefill"),
    )


def _partnerless(engines: Sequence[Discovered], level: Level | None, role: str, other: str) -> tuple[str, ...]:
    """Return the engines of a role that have none of the other role, of their protocol and model, in their domain of
    the level; None: anywhere."""
    present = {point for engine in engines if engine.role == other for point in _meeting_points(engine, level)}
    partnerless = (
        engine for engine in engines if engine.role == role and present.isdisjoint(_meeting_points(engine, level))
    )
    return tuple(engine.name for engine in partnerless)


def _meeting_points(engine: Discovered, level: Level | None) -> set[tuple[object, ...]]:
    """Return keys of which two engines share one if they are in one domain of the level, or of a narrower level.

    An engine without a label shares a domain with no other, except a datacenter: all without a label are in one.
    """
    kind = (engine.endpoint.protocol, engine.model)
    if level is None:
        return {kind}
    narrower = LEVELS[: LEVELS.index(level) + 1]
    points: set[tuple[object, ...]] = {
        (narrow, domain, *kind) for narrow in narrower if (domain := _domain(engine.place, narrow))
    }
    if level == "datacenter" and not engine.place.datacenter:
        points.add((level, "", *kind))
    return points


def _domain(place: Place, level: Level) -> str:
    return str(getattr(place, level))
