"""The results of DualPath's experiments: one table for the terminal and the page, findings, and one figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvroute.planner.comparison.cells import Record
from kvroute.report.drawing import AXIS_LABELS, grid, line_style, panels, plain, policy_legend, scale_axis, style
from kvroute.report.estimate import Estimate, estimate, estimate_entry
from kvroute.report.grid import Grid, GridEntry, Heading
from kvroute.report.page import picture
from kvroute.report.series import axes_of, of_profile, profiles_of, values_of
from kvroute_studies.shared.cells import Experiment
from kvroute_studies.shared.findings import ExpectationFinding, Holds
from kvroute_studies.shared.page import write_results

Number = Callable[[Record], float | None]
_PANELS = 6
UNCLEAR = 0.02
"""A change of the mean by this share or less counts as none."""


@dataclass(frozen=True, slots=True)
class ComparedMetric:
    """What an experiment compares."""

    figure: str
    """Name in `Record.figures`."""
    title: str
    label: str
    better: str
    """Word for a better value."""
    higher_wins: bool = False
    digits: int = 0

    def of(self, record: Record) -> float | None:
        """Value of a run."""
        return record.figures.get(self.figure)


TIME = ComparedMetric("end_s", "JCT s", "job completion, s", "faster")
METRICS = {
    "dualpath-online": ComparedMetric(
        "capacity_per_s", "agents /s", "agents/s within SLOs", "higher", higher_wins=True, digits=3
    ),
    "dualpath-balance": ComparedMetric("storage_balance", "NIC max/mean", "NIC max/mean", "more even", digits=2),
}
"""By experiment; all others compare job completion times."""
_COLUMNS: tuple[tuple[Heading, Number, int], ...] = (
    (Heading("TTFT s", "Mean time to first token", 3), lambda record: record.summary.ttft_s.mean, 2),
    (Heading("TPOT ms", "Mean time per output token", 4), lambda record: _ms(record.summary.tpot_s.mean), 1),
    (
        Heading("NIC max/mean", "Maximum bytes of a storage NIC in a window divided by the mean", 5),
        lambda record: record.figures["storage_balance"],
        2,
    ),
    (
        Heading("attention max/mean", "Maximum attention time of a GPU in a forward pass divided by the mean", 1),
        lambda record: record.figures["attention_balance"],
        2,
    ),
    (
        Heading("prefill reads %", "Share of the bytes that prefill nodes read", 2),
        lambda record: 100 * record.figures["prefill_read_share"],
        0,
    ),
)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def dualpath_grid(experiment: Experiment, records: Sequence[Record]) -> Grid:
    """Return means over seeds with 95 % intervals; the last column is the gain over the first policy."""
    metric = METRICS.get(experiment.name, TIME)
    axes = axes_of(records)
    columns = [column for column in _COLUMNS if column[0].title != metric.title]
    headings = (
        Heading("model"),
        *(Heading(axis) for axis in axes),
        Heading("system"),
        Heading(metric.title, metric.label),
        Heading("gain", f"How many times {experiment.policies[0]}'s value, paired by seed"),
        *(heading for heading, _, _ in columns),
    )
    rows = []
    for profile, point in points(records):
        some = records_at(records, profile, point)
        for policy in experiment.policies:
            runs = [record for record in some if record.cell.policy == policy]
            if runs:
                labels = (GridEntry(profile), *(GridEntry(f"{value:g}") for value in point), GridEntry(policy))
                gained = estimate_entry(gain(metric, some, policy, experiment.policies[0]), 2)
                own = estimate_entry(estimate(map(metric.of, runs)), metric.digits)
                others = (estimate_entry(estimate(map(value, runs)), digits) for _, value, digits in columns)
                rows.append((*labels, own, gained, *others))
    return Grid(experiment.title, headings, tuple(rows), _caption(records), 2 + len(axes))


def _caption(records: Sequence[Record]) -> str:
    seeds = len({record.cell.seed for record in records})
    return f"Means of {seeds} seeds with 95 % intervals." if seeds > 1 else "One seed."


def points(records: Sequence[Record]) -> list[tuple[str, tuple[float, ...]]]:
    """Return the profiles and axis values in the order of the cells."""
    return list(dict.fromkeys((record.cell.profile, tuple(record.cell.settings.values())) for record in records))


def records_at(records: Sequence[Record], profile: str, point: tuple[float, ...]) -> list[Record]:
    """Return the records of a profile with these axis values."""
    return [record for record in of_profile(records, profile) if tuple(record.cell.settings.values()) == point]


def gain(metric: ComparedMetric, records: Sequence[Record], policy: str, base: str) -> Estimate | None:
    """Return how many times better a policy is than another at one point, paired by seed; None without pairs."""
    values = {(record.cell.policy, record.cell.seed): metric.of(record) for record in records}
    ratios: list[float | None] = []
    for (name, seed), value in values.items():
        other = values.get((base, seed))
        if name == policy and value and other:
            ratios.append(value / other if metric.higher_wins else other / value)
    return estimate(ratios)


def dualpath_findings(experiment: Experiment, records: Sequence[Record]) -> list[ExpectationFinding]:
    """Return for every model whether each system is at least as good as the one before it."""
    metric = METRICS.get(experiment.name, TIME)
    found = []
    for profile in profiles_of(records):
        for before, after in pairwise(experiment.policies):
            gains = [
                found_gain
                for _, point in points(of_profile(records, profile))
                if (found_gain := gain(metric, records_at(records, profile, point), after, before)) is not None
            ]
            if gains:
                found.append(ExpectationFinding(profile, f"{after} is {metric.better} than {before}", *_verdict(gains)))
    return found


def _verdict(gains: Sequence[Estimate]) -> tuple[Holds, str]:
    """Return whether all points show a gain, and their range."""
    better = sum(gain.mean > 1 + UNCLEAR for gain in gains)
    worse = sum(gain.mean < 1 - UNCLEAR for gain in gains)
    holds: Holds = "holds" if better and not worse else "does not hold" if worse > better else "unclear"
    low, high = min(gain.mean for gain in gains), max(gain.mean for gain in gains)
    counts = f"Better by more than 2 % at {better} of {len(gains)} points, worse at {worse}"
    return holds, f"{counts}; {low:.2f} to {high:.2f} times."


def dualpath_lines(experiment: Experiment, records: Sequence[Record]) -> Figure:
    """Draw the compared value over the last axis, with one panel for each model and each value of the other axes. The
    panels of a model share the scale; up to `_PANELS` are in one row."""
    metric = METRICS.get(experiment.name, TIME)
    axes = [axis for axis in axes_of(records) if len(values_of(records, axis)) > 1] or list(axes_of(records))[-1:]
    others = list(product(*(values_of(records, axis) for axis in axes[:-1])))
    profiles = profiles_of(records)
    columns = min(len(others), _PANELS)
    lines = -(-len(others) // columns)
    with style():
        width = 3.6 if len(others) < 3 else 2.8
        figure, rows = panels(len(profiles) * lines, columns, width=width, height=2.2, sharey="row")
        for number, profile in enumerate(profiles):
            row = [panel for line in rows[number * lines : (number + 1) * lines] for panel in line]
            for panel in row[len(others) :]:
                panel.set_visible(False)
            for panel, values in zip(row, others, strict=False):
                fixed = dict(zip(axes[:-1], values, strict=True))
                some = [
                    record
                    for record in of_profile(records, profile)
                    if all(record.cell.settings[axis] == value for axis, value in fixed.items())
                ]
                _draw(panel, experiment, some, metric, axes[-1])
                panel.set_title(_panel_title(profile, fixed))
            top = max(panel.dataLim.y1 for panel in row[: len(others)])
            for panel in row[::columns]:
                panel.set_ylabel(metric.label)
                panel.set_ylim(0, 1.05 * top)
        policy_legend(figure, experiment.policies)
    return figure


def _panel_title(profile: str, fixed: Mapping[str, float]) -> str:
    """Return model and axis values, on two lines if there are several values."""
    values = ", ".join(f"{axis} {value:g}" for axis, value in fixed.items())
    return plain(profile + ("\n" if len(fixed) > 1 else ", " if fixed else "") + values)


def _draw(panel: Axes, experiment: Experiment, records: Sequence[Record], metric: ComparedMetric, axis: str) -> None:
    values = values_of(records, axis)
    for policy in experiment.policies:
        means = {
            value: estimate(
                metric.of(record)
                for record in records
                if record.cell.policy == policy and record.cell.settings[axis] == value
            )
            for value in values
        }
        known = {value: mean for value, mean in means.items() if mean is not None}
        look = line_style(policy)
        panel.errorbar(
            list(known),
            [mean.mean for mean in known.values()],
            yerr=[mean.half_width or 0.0 for mean in known.values()],
            color=look.colour,
            marker=look.marker,
            linestyle=look.dashes,
        )
    scale_axis(panel, values)
    panel.set_xlabel(AXIS_LABELS.get(axis, axis))
    grid(panel)


def write_dualpath(experiment: Experiment, records: Sequence[Record], out: Path) -> Path:
    """Write `out`/report.html and the figure; return the path of the page. Raises InputError for an unusable folder."""
    return write_results(
        experiment,
        records,
        out,
        found=dualpath_findings(experiment, records),
        pictures=[picture(dualpath_lines(experiment, records), out, "dualpath", "Mean over seeds, 95 % interval")],
        tables=[dualpath_grid(experiment, records)],
        notes=(
            "basic: prefill nodes read; whole requests are loaded before they are computed; engines are chosen in turn",
            "layerwise: the KV of one layer is copied while the previous one computes",
            "dual-path: prefill and decode nodes read in turn",
            "scheduling: engines by load, the side with the shorter storage queue reads, compute quota of 300 ms",
            "split-reads: both sides read a part of each request; oracle: no reads and no transfers",
            f"balances: means over windows of {_windows(records)} and forward passes, until half of the agents ended",
        ),
        without="Only one system ran.",
    )


def _windows(records: Sequence[Record]) -> str:
    """Return the windows of the storage balance as text."""
    return " and ".join(f"{value:g} s" for value in values_of(records, "window")) or "1 s"
