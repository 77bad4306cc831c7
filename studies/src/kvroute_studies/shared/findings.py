"""Compares a sweep with the publication's expectation by profile, in sentences; insignificant differences are noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from kvroute.planner.comparison.cells import Record
from kvroute.report.compare import Difference, difference, mean_ttft_s
from kvroute.report.estimate import Estimate, estimate
from kvroute.report.series import (
    by_point,
    gap,
    of_policy,
    of_profile,
    profiles_of,
    relative_half_width,
    summaries,
    values_of,
)
from kvroute.sim.metrics import Summary
from kvroute_studies.shared.cells import Experiment

Holds = Literal["holds", "holds in part", "does not hold", "unclear"]
SAME_WITHIN = 0.02
"""A change of two percentage points or less counts as none."""
UNCLEAR_ABOVE = 0.05
"""An interval wider than ± five percentage points cannot show the absence of a change."""


@dataclass(frozen=True, slots=True)
class ExpectationFinding:
    """One expected direction in one profile, and the result."""

    profile: str
    claim: str
    holds: Holds
    sentence: str


_Claim = Callable[[Experiment, Sequence[Record]], tuple[str, Holds, str]]
_PerSeed = Callable[[Sequence[Summary]], float | None]


def findings(experiment: Experiment, records: Sequence[Record]) -> list[ExpectationFinding]:
    """Return every claim of the experiment for every profile with records, in that order.

    All experiments claim that the first policy of `versus` has the lower mean TTFT; trends are added by name.
    """
    claims: tuple[_Claim, ...] = (partial(below, pair=experiment.versus), *_FURTHER.get(experiment.name, ()))
    return [
        ExpectationFinding(profile, *claim(experiment, of_profile(records, profile)))
        for profile in profiles_of(records)
        for claim in claims
    ]


def below(experiment: Experiment, records: Sequence[Record], pair: tuple[str, str]) -> tuple[str, Holds, str]:
    """Check whether the pair's first policy is below the second at every point."""
    axes = tuple(experiment.axes)
    found = [(place(axes, point), gap(runs, pair)) for point, runs in by_point(records).items()]
    gaps = [(where, difference) for where, difference in found if difference is not None]
    claim = f"{pair[0]} below {pair[1]}"
    if not gaps:
        return (
            claim,
            "unclear",
            f"{pair[0]} and {pair[1]} have no common seed with a first token; use the same --seeds.",
        )
    clear_wins = sum(difference.mean < 0 and not difference.is_noise for _, difference in gaps)
    holds = _below_holds([difference for _, difference in gaps], clear_wins)
    if len(gaps) == 1:
        return claim, holds, f"Mean TTFT of {pair[0]} compared with {pair[1]}: {worth(gaps[0][1])}{gaps[0][0]}."
    losses = [(where, difference) for where, difference in gaps if difference.mean > 0]
    lower = sum(difference.mean < 0 for _, difference in gaps)
    sentence = f"{pair[0]} has the lower mean TTFT at {lower} of {len(gaps)} points"
    sentence += f", {clear_wins} of them significant"
    where, best = min(gaps, key=lambda item: (item[1].relative, item[0]))
    if best.mean < 0:
        sentence += f"; its largest lead is {worth(best)}{where}"
    sentence += (
        f". Its mean TTFT is higher: {'; '.join(f'{worth(difference)}{at}' for at, difference in losses)}."
        if losses
        else "; it is never higher."
    )
    return claim, holds, sentence


def _below_holds(gaps: Sequence[Difference], clear_wins: int) -> Holds:
    clear_losses = sum(gap.mean > 0 and not gap.is_noise for gap in gaps)
    if clear_losses:
        return "holds in part" if clear_wins else "does not hold"
    if clear_wins == 0:
        return "unclear"
    return "holds" if all(gap.mean < 0 for gap in gaps) else "holds in part"


def worth(found: Difference) -> str:
    """Return the relative difference with its interval, such as "-12.3% ±2.1%", and whether it is noise."""
    half_width = relative_half_width(found)
    if half_width is None:
        return f"{found.relative:+.1%} (one seed)"
    return f"{found.relative:+.1%} ±{half_width:.1%}" + (" (noise)" if found.is_noise else "")


def place(axes: Sequence[str], point: Sequence[float]) -> str:
    """Return a text such as " at load=1, background=0.1", or "" without axes."""
    return f" at {', '.join(f'{axis}={value:g}' for axis, value in zip(axes, point, strict=False))}" if axes else ""


def gain_trend(
    experiment: Experiment, records: Sequence[Record], axis: str, expected: Literal["grows", "same"]
) -> tuple[str, Holds, str]:
    """Check whether the gain of `versus` grows along an axis or is constant: first against last value, by seed."""
    first, second = experiment.versus

    def gain(runs: Sequence[Summary]) -> float | None:
        found = difference(runs, first, second)
        return None if found is None else -found.relative

    claim = f"the gain over {second} {'grows with' if expected == 'grows' else 'is the same at every'} {axis}"
    return _trend(records, axis, gain, expected, claim, f"The gain over {second}")


def steady(experiment: Experiment, records: Sequence[Record], axis: str) -> tuple[str, Holds, str]:
    """Check whether the mean TTFT of the first policy of `versus` stays the same along an axis."""
    policy = experiment.versus[0]
    start = values_of(records, axis)[:1]
    at_start = [record.summary for record in records if record.cell.settings.get(axis) in start]

    def level(runs: Sequence[Summary]) -> float | None:
        now = estimate(mean_ttft_s(run) for run in of_policy(runs, policy))
        then = estimate(
            mean_ttft_s(run) for run in of_policy(at_start, policy) if run.seed in {run.seed for run in runs}
        )
        return None if now is None or then is None or not then.mean else now.mean / then.mean - 1

    return _trend(
        records,
        axis,
        level,
        "same",
        f"{policy} does not change with {axis}",
        f"The mean TTFT of {policy}, relative to its first point,",
    )


def _trend(
    records: Sequence[Record], axis: str, per_seed: _PerSeed, expected: str, claim: str, subject: str
) -> tuple[str, Holds, str]:
    values = values_of(records, axis)
    if len(values) < 2:
        return claim, "unclear", f"Only one value of {axis} was run."
    table = {value: _by_seed(records, axis, value, per_seed) for value in values}
    low, high = table[values[0]], table[values[-1]]
    change = estimate(high[seed] - low[seed] for seed in sorted(low.keys() & high.keys()))
    if change is None:
        return (
            claim,
            "unclear",
            f"No seed has a first token at both ends of {axis}; use the same --seeds.",
        )
    means = {value: float(np.mean(list(some.values()))) for value, some in table.items() if some}
    peak = max(means, key=lambda value: (means[value], -value))
    half_width = "" if change.half_width is None else f" ±{change.half_width * 100:.1f}"
    sentence = (
        f"{subject} changes from {means[values[0]]:.1%} at {axis}={values[0]:g} "
        f"to {means[values[-1]]:.1%} at {values[-1]:g}: "
        f"{change.mean * 100:+.1f}{half_width} percentage points; the maximum is at {peak:g} ({means[peak]:.1%})."
    )
    return claim, _trend_holds(change, expected), sentence


def _by_seed(records: Sequence[Record], axis: str, value: float, per_seed: _PerSeed) -> dict[int, float]:
    """Return the quantity for each seed: its mean over the points with that value of the axis."""
    here = [record for record in records if record.cell.settings.get(axis) == value]
    result = {}
    for seed in sorted({record.cell.seed for record in here}):
        points = by_point(record for record in here if record.cell.seed == seed)
        known = estimate(per_seed(runs) for runs in points.values())
        if known is not None:
            result[seed] = known.mean
    return result


def _trend_holds(change: Estimate, expected: str) -> Holds:
    if change.half_width is None:
        return "unclear"
    noise = abs(change.mean) <= change.half_width
    if expected == "grows":
        return "unclear" if noise else ("holds" if change.mean > 0 else "does not hold")
    if abs(change.mean) + change.half_width <= SAME_WITHIN or (noise and change.half_width <= UNCLEAR_ABOVE):
        return "holds"
    if noise:
        return "unclear"
    return "holds" if abs(change.mean) <= SAME_WITHIN else "does not hold"


def ablation_order(experiment: Experiment, records: Sequence[Record]) -> tuple[str, Holds, str]:
    """Check whether the first step of the ladder brings most of the gain, and every further step a little more."""
    claim = "the first step gives most of the gain, each further step more"
    runs = summaries(records)
    steps = [
        difference(runs, later, earlier)
        for earlier, later in zip(experiment.policies, experiment.policies[1:], strict=False)
    ]
    whole = difference(runs, experiment.policies[-1], experiment.policies[0])
    known = [step for step in steps if step is not None]
    if whole is None or len(known) < len(steps):
        return claim, "unclear", "Not every step of the ladder has a run with a first token."
    gains = "; ".join(f"{step.first} vs {step.second} {worth(step)}" for step in known)
    if whole.mean >= 0:
        return claim, "does not hold", f"{gains}. There is no gain."
    share = known[0].mean / whole.mean
    sentence = f"{gains}. The first step gives {share:.0%} of the total gain of {worth(whole)}."
    if whole.is_noise:
        return claim, "unclear", sentence
    if share >= 0.5 and all(step.mean < 0 and not step.is_noise for step in known):
        return claim, "holds", sentence
    return claim, "holds in part" if share >= 0.5 else "does not hold", sentence


_FURTHER: dict[str, tuple[_Claim, ...]] = {
    "netkv-load": (
        partial(below, pair=("cla", "round-robin")),
        partial(gain_trend, axis="load", expected="grows"),
    ),
    "netkv-context": (partial(gain_trend, axis="tokens", expected="grows"),),
    "netkv-topology": (
        partial(gain_trend, axis="oversubscription", expected="grows"),
        partial(gain_trend, axis="background", expected="grows"),
    ),
    "netkv-staleness": (partial(steady, axis="refresh_s"),),
    "netkv-prefix": (partial(gain_trend, axis="p_share", expected="same"),),
    "netkv-ablation": (ablation_order,),
    "netkv-scale": (partial(gain_trend, axis="gpus", expected="same"),),
}
