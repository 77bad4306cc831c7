"""The results of `autoscaling`: GPU-hours and SLO attainment of every level, and the cheapest that attains enough."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from kvroute.planner.comparison.cells import Record
from kvroute.report.drawing import grid, legend_below, panels, style
from kvroute.report.estimate import Estimate, estimate, estimate_entry
from kvroute.report.grid import Grid, GridEntry, Heading
from kvroute.report.page import picture
from kvroute_studies.autoscaling.run import (
    AUTOSCALING,
    EQUAL_ATTAINMENT,
    KVROUTE,
    LEVELS,
    QUEUE,
    STATIC,
)
from kvroute_studies.shared.cells import Experiment
from kvroute_studies.shared.findings import ExpectationFinding, Holds
from kvroute_studies.shared.page import write_results

_STYLES = {STATIC: ("#8a8a8a", "s"), QUEUE: ("#d55e00", "^"), KVROUTE: ("#0072b2", "o")}


def runs_of(records: Sequence[Record], policy: str, level: int) -> list[Record]:
    """Return the runs of one level, by seed."""
    some = [record for record in records if record.cell.policy == policy and record.cell.settings["level"] == level]
    return sorted(some, key=lambda record: record.cell.seed)


def mean_of(records: Sequence[Record], figure: str) -> Estimate | None:
    """Return a figure over seeds."""
    return estimate(record.figures[figure] for record in records)


def cheapest(records: Sequence[Record], policy: str) -> int | None:
    """Return the level with the fewest GPU-hours whose mean attainment is enough; None if no level attains it."""
    found = []
    for level in range(len(LEVELS[policy])):
        runs = runs_of(records, policy, level)
        attained, hours = mean_of(runs, "attainment"), mean_of(runs, "gpu_hours")
        if attained is not None and hours is not None and attained.mean >= EQUAL_ATTAINMENT:
            found.append((hours.mean, level))
    return min(found)[1] if found else None


def autoscaling_grid(records: Sequence[Record]) -> Grid:
    """Return one row for each way and level, means over seeds; the cheapest that attains enough is bold."""
    headings = (
        Heading("way"),
        Heading("setting"),
        Heading("GPU-hours", "Of a day of 24 hours"),
        Heading("SLO met %", "Requests with both the first token and every further token in time"),
        Heading("TTFT p95 s", drop=1),
        Heading("most instances", "Prefill and decode instances at the same time", drop=2),
    )
    rows = [
        _row(policy, level, runs, level == cheapest(records, policy))
        for policy in AUTOSCALING.policies
        for level in range(len(LEVELS[policy]))
        if (runs := runs_of(records, policy, level))
    ]
    caption = f"Bold: the cheapest setting that meets the SLO for {EQUAL_ATTAINMENT:.0%} of the requests."
    return Grid(AUTOSCALING.title, headings, tuple(rows), caption, 2)


def _row(policy: str, level: int, runs: Sequence[Record], best: bool) -> tuple[GridEntry, ...]:
    hours, attained = mean_of(runs, "gpu_hours"), estimate(100.0 * run.figures["attainment"] for run in runs)
    most = max(_most(run) for run in runs)
    shown = estimate_entry(hours, 0)
    return (
        GridEntry(policy),
        GridEntry(setting_of(policy, level)),
        GridEntry(shown.text, shown.detail, best),
        estimate_entry(attained, 1),
        estimate_entry(estimate(run.summary.ttft_s.p95 for run in runs), 1),
        GridEntry(f"{most:.0f}"),
    )


def setting_of(policy: str, level: int) -> str:
    """Return the parameters of a level as text."""
    numbers = LEVELS[policy][level]
    if policy == STATIC:
        return f"{numbers[0]:g} prefill, {numbers[1]:g} decode"
    if policy == QUEUE:
        return f"{numbers[0]:g} and {numbers[1]:g} requests"
    return f"attainment {numbers[0]:g}"


def _most(run: Record) -> float:
    sums = [
        prefill_count + decode_count
        for (_, prefill_count), (_, decode_count) in zip(
            run.series["prefill instances"], run.series["decode instances"], strict=True
        )
    ]
    return max(sums, default=0.0)


def autoscaling_findings(records: Sequence[Record]) -> list[ExpectationFinding]:
    """Return whether kvroute needs fewer GPU-hours than each other way, at the cheapest settings of both."""
    return [ExpectationFinding("a day", *_compared(records, other)) for other in (STATIC, QUEUE)]


def saving(records: Sequence[Record], other: str) -> Estimate | None:
    """Return the share of GPU-hours that kvroute saves, paired by seed; None if a way does not attain enough."""
    mine, theirs = cheapest(records, KVROUTE), cheapest(records, other)
    if mine is None or theirs is None:
        return None
    hours = {run.cell.seed: run.figures["gpu_hours"] for run in runs_of(records, other, theirs)}
    pairs = [(run.figures["gpu_hours"], hours.get(run.cell.seed)) for run in runs_of(records, KVROUTE, mine)]
    return estimate(1.0 - ours / other_hours for ours, other_hours in pairs if other_hours)


def _compared(records: Sequence[Record], other: str) -> tuple[str, Holds, str]:
    claim, saved = f"kvroute uses fewer GPU-hours than {other}", saving(records, other)
    if saved is None or saved.half_width is None:
        return claim, "unclear", "At least two seeds, and a setting of both that attains enough, are needed."
    low, high = saved.mean - saved.half_width, saved.mean + saved.half_width
    holds: Holds = "holds" if low > 0.0 else "does not hold" if high < 0.0 else "unclear"
    return claim, holds, f"{saved.mean:+.1%} ±{saved.half_width:.1%} saved at {EQUAL_ATTAINMENT:.0%} attainment."


def autoscaling_figure(records: Sequence[Record]) -> Figure:
    """Draw attainment over GPU-hours for each way, and the instances over a day."""
    with style():
        figure, ((left, right),) = panels(1, 2, width=4.2, height=2.9)
        for policy, (colour, marker) in _STYLES.items():
            points = []
            for level in range(len(LEVELS[policy])):
                runs = runs_of(records, policy, level)
                hours, attained = mean_of(runs, "gpu_hours"), mean_of(runs, "attainment")
                if hours is not None and attained is not None:
                    points.append((hours.mean, 100.0 * attained.mean))
            points.sort()
            left.plot(*zip(*points, strict=True) if points else ((), ()), color=colour, marker=marker, label=policy)
            _draw_day(right, records, policy, colour)
        left.axhline(100.0 * EQUAL_ATTAINMENT, color="#444444", linewidth=0.8, linestyle=":")
        left.set_xlabel("GPU-hours of a day")
        left.set_ylabel("SLO met, %")
        right.set_xlabel("hour of the day")
        right.set_ylabel("instances")
        for axes in (left, right):
            legend_below(axes, 4.2)
            grid(axes)
    return figure


def _draw_day(axes: object, records: Sequence[Record], policy: str, colour: str) -> None:
    level = cheapest(records, policy)
    runs = runs_of(records, policy, level) if level is not None else []
    if not runs:
        return
    run = runs[0]
    hour_s = float(run.config["hour_played_s"])
    prefill, decode = run.series["prefill instances"], run.series["decode instances"]
    times = [at / hour_s for at, _ in prefill] + [24.0]
    counts = [
        prefill_count + decode_count for (_, prefill_count), (_, decode_count) in zip(prefill, decode, strict=True)
    ]
    axes.step(times, [*counts, counts[-1]], where="post", color=colour, label=policy)  # type: ignore[attr-defined]


def write_autoscaling(experiment: Experiment, records: Sequence[Record], out: Path) -> Path:
    """Write `out`/report.html and the figure; return the path of the page. Raises InputError for an unusable folder."""
    return write_results(
        experiment,
        records,
        out,
        found=autoscaling_findings(records),
        pictures=[
            picture(autoscaling_figure(records), out, "autoscaling", "Mean over seeds; instances of the first seed")
        ],
        tables=[autoscaling_grid(records)],
        notes=(
            "static: a fixed number of instances; the table has the splits around the best one",
            "queue-length: Kubernetes' autoscaler on requests per prefill and per decode instance, every 15 s, with a "
            "tolerance of 10 % and a stabilisation of 5 minutes before instances are taken away",
            "kvroute: the decisions of the core, every 15 s, for the SLO and an attainment in its configuration",
            "an instance costs from its order to the end of its last request; it serves 60 s after the order",
            "every hour is played in less time (`hour_played_s`), which favours fixed numbers",
        ),
    )
