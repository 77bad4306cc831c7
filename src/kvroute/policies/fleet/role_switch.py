"""Selects the instances that switch between prefill and decode: towards the best split, if the switch helps now, is
worth its cost and leaves the other role enough capacity.

It only names the instances; the driver drains and switches them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import msgspec

from kvroute.policies.fleet.throughput import Curve, Reading
from kvroute.types import InputError, IntArray

Stage = Literal["prfaas", "prefill", "decode"]
STAGES: tuple[Stage, ...] = get_args(Stage)
READINGS: tuple[Reading, ...] = get_args(Reading)
Role = Literal["prefill", "decode"]
Verdict = Literal["switch_role", "relieve", "off", "switching", "no_gain", "not_busy", "no_room", "costly"]
"""Result of a review about role switches. `switch_role`: switch towards the best split. `relieve`: by the model the
split is about the best, but one role has a queue while the other can spare an instance, so the model must be wrong. The
others mean no switch: `off`, disabled; `switching`, earlier switches are in progress; `no_gain`, the best split is
hardly better; `not_busy`, the role that would grow is not busy; `no_room`, the role that would shrink would be too busy
with one instance less; `costly`, the switch costs more than it gains."""


class LongTerm(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of role switches."""

    role_switches: bool = True
    """False: roles do not change; the threshold is still searched."""
    review_s: float = 60.0
    """Time between reviews, in seconds; the first review takes place once `requests_min` requests have arrived."""
    window_s: float = 300.0
    """Length of the traffic window that a review evaluates, in seconds."""
    requests_min: int = 100
    """Minimum number of arrivals in the window for a review."""
    start_requests: int = 20
    """Arrivals after which a threshold is first searched, and again at each doubling until the first review."""
    gain_min: float = 0.05
    """Share of the best split's throughput that the present split must fall short of before a role switch."""
    threshold_gain_min: float = 0.02
    """Share of the best threshold's throughput that the present one must fall short of before it changes. It absorbs
    the sampling noise of the observed lengths."""
    reading: Reading = "exact"
    """How the mean cost of a request at a stage is computed; the publication's closed form uses `representative`."""
    at_once: int = 1
    """Maximum number of role switches at a time."""
    prefill_min: int = 1
    """Minimum number of prefill instances in every home, regardless of the search: the WAN path may fail."""
    decode_min: int = 1
    busy_above: float = 0.8
    """Utilisation above which a stage counts as busy."""
    spare_below: float = 0.8
    """Utilisation that a role must stay below with one instance less; at most `busy_above`, to avoid switching back."""
    queue_high_s: float = 5.0
    """Seconds of queued work above which a stage counts as busy."""

    def __post_init__(self) -> None:
        for name, seconds in (("review_s", self.review_s), ("window_s", self.window_s)):
            _check(name, seconds, 0.0 < seconds < math.inf, "a positive time")
        _check("queue_high_s", self.queue_high_s, 0.0 <= self.queue_high_s < math.inf, "a time of 0 or more")
        for name, share in (
            ("gain_min", self.gain_min),
            ("threshold_gain_min", self.threshold_gain_min),
            ("busy_above", self.busy_above),
            ("spare_below", self.spare_below),
        ):
            _check(name, share, 0.0 < share < 1.0, "a share between 0 and 1")
        _check("reading", self.reading, self.reading in READINGS, f"one of {', '.join(READINGS)}")
        for name, count in (
            ("requests_min", self.requests_min),
            ("start_requests", self.start_requests),
            ("at_once", self.at_once),
        ):
            _check(name, count, count >= 1, "1 or more")
        for name, count in (("prefill_min", self.prefill_min), ("decode_min", self.decode_min)):
            _check(name, count, count >= 0, "0 or more")


def _check(name: str, value: float | str, right: bool, due: str) -> None:
    if not right:
        raise InputError(f"{value} is not {due}", where=f"offload.long_term.{name}", hint=f"give {due}")


@dataclass(frozen=True, slots=True)
class Home:
    """The instances of one PD cluster that are up, and their capacity."""

    prefill: Sequence[str]
    """Names in the order in which they would be switched: least loaded first."""
    decode: Sequence[str]
    prefill_s: Curve
    batch_max: int
    """Requests that one decode instance processes at a time (BS_max)."""
    iteration_s: float
    """T_decode at that batch, in seconds."""

    @property
    def instances(self) -> int:
        """Number of instances of both roles."""
        return len(self.prefill) + len(self.decode)


@dataclass(frozen=True, slots=True)
class StageLoad:
    """Observed load of a stage."""

    utilisation: float = 0.0
    """Recent utilisation, 0 to 1."""
    queue_s: float = 0.0
    """Seconds of queued work."""
    peak: float = 0.0
    """Utilisation in the busiest part of the window, relative to the present instances; above 1 if they were more."""

    def without(self, leaving: int, instances: int, *, at_peak: bool) -> float:
        """Utilisation of the remaining instances when `leaving` of `instances` leave; inf if work exists and none
        remains.

        Args: `at_peak`: use the busiest part of the window and not only the recent utilisation.
        """
        work = max(self.utilisation, self.peak if at_peak else 0.0) * instances
        staying = instances - leaving
        return work / staying if staying > 0 else (math.inf if work else 0.0)


_IDLE = StageLoad()


class PlannedSwitch(msgspec.Struct, frozen=True, kw_only=True):
    """One instance, and the role that it takes once it is drained."""

    instance: str
    role: Role


def busy_stages(spec: LongTerm, loads: Mapping[Stage, StageLoad]) -> tuple[Stage, ...]:
    """Stages that are busy as observed, from source to sink."""
    return tuple(
        stage
        for stage in STAGES
        if (load := loads.get(stage, _IDLE)).utilisation >= spec.busy_above or load.queue_s >= spec.queue_high_s
    )


def judge(
    spec: LongTerm,
    homes: Sequence[Home],
    target: IntArray,
    gain: float,
    loads: Mapping[Stage, StageLoad],
    switching: int,
    used_s: float = 0.0,
    costs_s: Mapping[str, float] | None = None,
) -> tuple[Verdict, tuple[PlannedSwitch, ...]]:
    """Whether instances switch roles, and which: at most `at_once`, cheapest first, ties in the order of a home's list.

    Gain and cost are in seconds of one instance. A split with a shortfall of `gain` keeps its limiting stage busy that
    much longer for the same requests. The gain is `gain` of all instances, for as long as the traffic lasts, scaled by
    their use. The cost includes switching back later.

    Args:
        spec: limits.
        homes: their present instances.
        target: [homes] prefill instances of the best split.
        gain: share of the best split's throughput that the present split does not reach.
        loads: as observed; a missing stage counts as idle.
        switching: number of role switches in progress.
        used_s: seconds that the present traffic is expected to last, times its peak arrival rate as a share of the
            present split's throughput, 1 at most.
        costs_s: cost of switching each instance; 0 if missing.
    """
    if not spec.role_switches:
        return "off", ()
    if switching:
        return "switching", ()
    costs_s = costs_s or {}
    if gain < spec.gain_min:
        role_switches = _relief(spec, homes, loads, used_s, costs_s)
        return ("relieve" if role_switches else "no_gain"), role_switches
    busy = busy_stages(spec, loads)
    wanted = [role_switch for role_switch in _towards(homes, target, costs_s) if _would_help(role_switch.role, busy)]
    if not wanted:
        return "not_busy", ()
    spared = _spared(spec, homes, loads, wanted[: spec.at_once])
    if not spared:
        return "no_room", ()
    gain_s = gain * used_s * sum(home.instances for home in homes)
    if gain_s < sum(_there_and_back_s(homes, role_switch, costs_s) for role_switch in wanted):
        return "costly", ()
    return "switch_role", spared


def _there_and_back_s(homes: Sequence[Home], role_switch: PlannedSwitch, costs_s: Mapping[str, float]) -> float:
    """Cost of switching this instance now, plus the mean cost of switching one instance of the role that it joins back
    when the traffic has changed again."""
    joined = [name for home in homes for name in (home.prefill if role_switch.role == "prefill" else home.decode)]
    back_s = sum(costs_s.get(name, 0.0) for name in joined) / max(len(joined), 1)
    return costs_s.get(role_switch.instance, 0.0) + back_s


def _spared(
    spec: LongTerm, homes: Sequence[Home], loads: Mapping[Stage, StageLoad], wanted: Sequence[PlannedSwitch]
) -> tuple[PlannedSwitch, ...]:
    """The wanted switches that leave the shrinking role enough capacity: for its peak in the window or, if the growing
    role has a queue, for its recent utilisation. A present shortage counts more than a peak that may return."""
    spared: list[PlannedSwitch] = []
    for role_switch in wanted:
        giver: Role = "decode" if role_switch.role == "prefill" else "prefill"
        instances = sum(len(home.decode if giver == "decode" else home.prefill) for home in homes)
        grown: tuple[Stage, ...] = ("decode",) if giver == "prefill" else ("prfaas", "prefill")
        queued = any(loads.get(stage, _IDLE).queue_s >= spec.queue_high_s for stage in grown)
        leaving = 1 + sum(other.role == role_switch.role for other in spared)
        if loads.get(giver, _IDLE).without(leaving, instances, at_peak=not queued) < spec.spare_below:
            spared.append(role_switch)
    return tuple(spared)


def _would_help(role: Role, busy: tuple[Stage, ...]) -> bool:
    """More prefill at home also relieves PrfaaS, through a higher threshold."""
    return "decode" in busy if role == "decode" else "prefill" in busy or "prfaas" in busy


def _towards(homes: Sequence[Home], target: IntArray, costs_s: Mapping[str, float]) -> list[PlannedSwitch]:
    """All role switches from the present split to `target`, [homes]; the home that needs most comes first."""
    missing = [int(count) - len(home.prefill) for count, home in zip(target, homes, strict=True)]
    order = sorted(range(len(missing)), key=lambda index: (-abs(missing[index]), index))
    return [role_switch for index in order for role_switch in _of_home(homes[index], missing[index], costs_s)]


def _of_home(home: Home, more_prefill: int, costs_s: Mapping[str, float]) -> list[PlannedSwitch]:
    role: Role = "prefill" if more_prefill >= 0 else "decode"
    cheapest = _cheapest(home.decode if role == "prefill" else home.prefill, costs_s)
    return [PlannedSwitch(instance=name, role=role) for name in cheapest[: abs(more_prefill)]]


def _cheapest(names: Sequence[str], costs_s: Mapping[str, float]) -> list[str]:
    return sorted(names, key=lambda name: costs_s.get(name, 0.0))


def _relief(
    spec: LongTerm, homes: Sequence[Home], loads: Mapping[Stage, StageLoad], used_s: float, costs_s: Mapping[str, float]
) -> tuple[PlannedSwitch, ...]:
    """One instance for the role that has a queue, or none.

    The other role must not be busy without it, and its share of the role's work must be worth the cost of the switch.
    """
    prefill, decode = loads.get("prefill", _IDLE), loads.get("decode", _IDLE)
    if max(prefill.queue_s, decode.queue_s) < spec.queue_high_s:
        return ()
    grows: Role = "prefill" if prefill.queue_s > decode.queue_s else "decode"
    giver, least = (decode, spec.decode_min) if grows == "prefill" else (prefill, spec.prefill_min)
    pools = [home.decode if grows == "prefill" else home.prefill for home in homes]
    count = sum(len(pool) for pool in pools)
    spare = [pool for pool in pools if len(pool) > least]
    if not spare or count < 2 or giver.queue_s >= spec.queue_high_s:
        return ()
    if giver.without(1, count, at_peak=False) >= spec.spare_below:
        return ()
    name = _cheapest(max(spare, key=len), costs_s)[0]
    switch, there = PlannedSwitch(instance=name, role=grows), sum(home.instances for home in homes) - count
    gain_s = used_s * there / (there + 1)
    return (switch,) if gain_s >= _there_and_back_s(homes, switch, costs_s) else ()
