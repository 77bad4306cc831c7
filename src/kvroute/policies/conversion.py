"""Which instances change their role between prefill and decode: towards the best split, where that would help now.

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
Verdict = Literal["convert", "relieve", "off", "converting", "no_gain", "not_busy"]
"""What a review says of conversions. `convert`: towards the best split. `relieve`: the split is about the best by the
model, but one role has a queue while the other can spare an instance, so the model must be wrong. None: they are
switched off; earlier ones are not over yet; the best split is hardly better; the role that would grow is not busy."""


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
) -> tuple[Verdict, tuple[Conversion, ...]]:
    """Whether instances change their role now, and which: at most `at_once`, the first of those that a home names.

    Args:
        spec: the marks.
        homes: their instances as they are.
        target: [homes] prefill instances of the best split.
        gain: share of the best split's throughput that the present one misses.
        loads: as observed; a stage that is missing is idle.
        converting: conversions that are under way.
    """
    if not spec.conversions:
        return "off", ()
    if converting:
        return "converting", ()
    if gain < spec.gain_min:
        conversions = _relief(spec, homes, loads)
        return ("relieve" if conversions else "no_gain"), conversions
    wanted, busy = _towards(homes, target), busy_stages(spec, loads)
    conversions = tuple(each for each in wanted if _would_help(each.role, busy))[: spec.at_once]
    return ("convert" if conversions else "not_busy"), conversions


def _would_help(role: Role, busy: tuple[Stage, ...]) -> bool:
    """More prefill at home also relieves PrfaaS, by a higher threshold."""
    return "decode" in busy if role == "decode" else "prefill" in busy or "prfaas" in busy


def _towards(homes: Sequence[Home], target: IntArray) -> list[Conversion]:
    """All conversions from the present split to `target`, [homes], the home that is farthest from it first."""
    missing = [int(count) - len(home.prefill) for count, home in zip(target, homes, strict=True)]
    order = sorted(range(len(missing)), key=lambda index: (-abs(missing[index]), index))
    return [each for index in order for each in _of_home(homes[index], missing[index])]


def _of_home(home: Home, more_prefill: int) -> list[Conversion]:
    if more_prefill >= 0:
        return [Conversion(instance=name, role="prefill") for name in home.decode[:more_prefill]]
    return [Conversion(instance=name, role="decode") for name in home.prefill[:-more_prefill]]


def _relief(spec: LongTerm, homes: Sequence[Home], loads: Mapping[Stage, StageLoad]) -> tuple[Conversion, ...]:
    """One instance for the role that has a queue, if the other role would not be busy without it."""
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
    if giver.utilisation * count / (count - 1) >= spec.busy_above:
        return ()
    return (Conversion(instance=max(spare, key=len)[0], role=grows),)
