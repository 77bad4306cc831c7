"""Which instances change their role between prefill and decode: towards the best split, where that would help now,
pays for what it throws away and leaves the other role enough.

It names them; whoever runs them drains and converts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import msgspec

from kvroute.policies.throughput import Curve, Reading
from kvroute.types import InputError, IntArray

Stage = Literal["prfaas", "prefill", "decode"]
STAGES: tuple[Stage, ...] = get_args(Stage)
READINGS: tuple[Reading, ...] = get_args(Reading)
Role = Literal["prefill", "decode"]
Verdict = Literal["convert", "relieve", "off", "converting", "no_gain", "not_busy", "no_room", "costly"]
"""What a review says of conversions. `convert`: towards the best split. `relieve`: the split is about the best by the
model, but one role has a queue while the other can spare an instance, so the model must be wrong. None: they are
switched off; earlier ones are not over yet; the best split is hardly better; the role that would grow is not busy;
the role that would shrink has been busy, and would be too busy with one instance less; it costs more than it gains."""


class LongTerm(msgspec.Struct, frozen=True, kw_only=True):
    """When roles are converted."""

    conversions: bool = True
    """False: roles stay; the threshold is still searched."""
    review_s: float = 60.0
    """Time between reviews; the first comes as soon as `requests_min` have been seen."""
    window_s: float = 300.0
    """Traffic that a review looks back on."""
    requests_min: int = 100
    """Fewer arrivals in the window say too little for a review."""
    start_requests: int = 20
    """Arrivals after which a threshold is searched for the first time, and again at each doubling until a review."""
    gain_min: float = 0.05
    """Share of the best split's throughput that the present split must miss before a conversion."""
    threshold_gain_min: float = 0.02
    """Share of the best threshold's throughput that the present one must miss before it is changed: a sample of
    lengths is never twice the same."""
    reading: Reading = "exact"
    """What a stage's mean request costs; the publication's closed form has `representative`."""
    at_once: int = 1
    """Conversions at a time."""
    prefill_min: int = 1
    """Instances that stay prefill in every home, whatever the search says: the link may go down."""
    decode_min: int = 1
    busy_above: float = 0.8
    """Utilisation above which a stage counts as binding."""
    spare_below: float = 0.8
    """Utilisation that a role with one instance less must stay below; at most `busy_above`, or it may be given back."""
    queue_high_s: float = 5.0
    """Seconds of queued work above which it does."""

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
        raise InputError(f"{value} is not {due}", where=f"offload.long_term.{name}", mend=f"give {due}")


@dataclass(frozen=True, slots=True)
class Home:
    """The instances of one PD cluster that are up, and what they can do."""

    prefill: Sequence[str]
    """Names in the order in which they would be converted: idle first."""
    decode: Sequence[str]
    prefill_s: Curve
    batch_max: int
    """Requests that one decode instance answers at a time (BS_max)."""
    iteration_s: float
    """T_decode at that batch."""

    @property
    def instances(self) -> int:
        """Of both roles."""
        return len(self.prefill) + len(self.decode)


@dataclass(frozen=True, slots=True)
class StageLoad:
    """How busy a stage is, as observed."""

    utilisation: float = 0.0
    """0 to 1."""
    queue_s: float = 0.0
    """Seconds of work that wait."""
    peak: float = 0.0
    """Utilisation in the busiest part of the window, of the instances there are now: above 1 if there were more."""

    def without(self, leaving: int, instances: int, *, at_peak: bool) -> float:
        """Utilisation of those who stay when so many of so many leave, of late or in the busiest part of the window;
        inf where nobody stays for what there is to do."""
        work = max(self.utilisation, self.peak if at_peak else 0.0) * instances
        staying = instances - leaving
        return work / staying if staying > 0 else (math.inf if work else 0.0)


_IDLE = StageLoad()


class Conversion(msgspec.Struct, frozen=True, kw_only=True):
    """One instance and the role it takes on once it is drained."""

    instance: str
    role: Role


def busy_stages(spec: LongTerm, loads: Mapping[Stage, StageLoad]) -> tuple[Stage, ...]:
    """Stages that bind as observed, from source to sink."""
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
    converting: int,
    used_s: float = 0.0,
    costs_s: Mapping[str, float] | None = None,
) -> tuple[Verdict, tuple[Conversion, ...]]:
    """Whether instances change their role now, and which: at most `at_once`, those that lose least first, of equals the
    first of those that a home names.

    Gain and cost are seconds of one instance. A split that misses `gain` has its limiting stage work so much longer for
    the same requests: `gain` of all instances, for as long as the traffic lasts, as far as they are used at all. Then
    the way back is paid, too.

    Args:
        spec: the marks.
        homes: their instances as they are.
        target: [homes] prefill instances of the best split.
        gain: share of the best split's throughput that the present one misses.
        loads: as observed; a stage that is missing is idle.
        converting: conversions that are under way.
        used_s: seconds that the traffic is expected to last as it is, times its highest rate of arrivals as a share of
            the present split's throughput, 1 at most.
        costs_s: what is lost with each instance that changes its role; nothing where it is missing.
    """
    if not spec.conversions:
        return "off", ()
    if converting:
        return "converting", ()
    costs_s = costs_s or {}
    if gain < spec.gain_min:
        conversions = _relief(spec, homes, loads, used_s, costs_s)
        return ("relieve" if conversions else "no_gain"), conversions
    busy = busy_stages(spec, loads)
    wanted = [each for each in _towards(homes, target, costs_s) if _would_help(each.role, busy)]
    if not wanted:
        return "not_busy", ()
    spared = _spared(spec, homes, loads, wanted[: spec.at_once])
    if not spared:
        return "no_room", ()
    gain_s = gain * used_s * sum(home.instances for home in homes)
    if gain_s < sum(_there_and_back_s(homes, each, costs_s) for each in wanted):
        return "costly", ()
    return "convert", spared


def _there_and_back_s(homes: Sequence[Home], each: Conversion, costs_s: Mapping[str, float]) -> float:
    """What is lost with this instance now, and with one of those that it joins, on average, when traffic has changed
    again."""
    joined = [name for home in homes for name in (home.prefill if each.role == "prefill" else home.decode)]
    back_s = sum(costs_s.get(name, 0.0) for name in joined) / max(len(joined), 1)
    return costs_s.get(each.instance, 0.0) + back_s


def _spared(
    spec: LongTerm, homes: Sequence[Home], loads: Mapping[Stage, StageLoad], wanted: Sequence[Conversion]
) -> tuple[Conversion, ...]:
    """Those of the wanted that their role can do without: in the busiest part of the window, or, where a queue has
    formed at who would grow, of late. A shortage that is there counts more than one that may come again."""
    spared: list[Conversion] = []
    for each in wanted:
        giver: Role = "decode" if each.role == "prefill" else "prefill"
        instances = sum(len(home.decode if giver == "decode" else home.prefill) for home in homes)
        grown: tuple[Stage, ...] = ("decode",) if giver == "prefill" else ("prfaas", "prefill")
        queued = any(loads.get(stage, _IDLE).queue_s >= spec.queue_high_s for stage in grown)
        leaving = 1 + sum(other.role == each.role for other in spared)
        if loads.get(giver, _IDLE).without(leaving, instances, at_peak=not queued) < spec.spare_below:
            spared.append(each)
    return tuple(spared)


def _would_help(role: Role, busy: tuple[Stage, ...]) -> bool:
    """More prefill at home also relieves PrfaaS, by a higher threshold."""
    return "decode" in busy if role == "decode" else "prefill" in busy or "prfaas" in busy


def _towards(homes: Sequence[Home], target: IntArray, costs_s: Mapping[str, float]) -> list[Conversion]:
    """All conversions from the present split to `target`, [homes], the home that is farthest from it first."""
    missing = [int(count) - len(home.prefill) for count, home in zip(target, homes, strict=True)]
    order = sorted(range(len(missing)), key=lambda index: (-abs(missing[index]), index))
    return [each for index in order for each in _of_home(homes[index], missing[index], costs_s)]


def _of_home(home: Home, more_prefill: int, costs_s: Mapping[str, float]) -> list[Conversion]:
    role: Role = "prefill" if more_prefill >= 0 else "decode"
    cheapest = _cheapest(home.decode if role == "prefill" else home.prefill, costs_s)
    return [Conversion(instance=name, role=role) for name in cheapest[: abs(more_prefill)]]


def _cheapest(names: Sequence[str], costs_s: Mapping[str, float]) -> list[str]:
    return sorted(names, key=lambda name: costs_s.get(name, 0.0))


def _relief(
    spec: LongTerm, homes: Sequence[Home], loads: Mapping[Stage, StageLoad], used_s: float, costs_s: Mapping[str, float]
) -> tuple[Conversion, ...]:
    """One instance for the role that has a queue, if the other role would not be busy without it, and its part of the
    role's work is worth what is lost."""
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
    conversion, there = Conversion(instance=name, role=grows), sum(home.instances for home in homes) - count
    gain_s = used_s * there / (there + 1)
    return (conversion,) if gain_s >= _there_and_back_s(homes, conversion, costs_s) else ()
