"""The results of `heroserve-online`: one table for the terminal and the page, findings, and one figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from kvroute.planner.comparison.cells import Record
from kvroute.report.drawing import INK, grid, panels, style
from kvroute.report.estimate import Estimate, estimate, estimate_entry
from kvroute.report.grid import Grid, GridEntry, Heading
from kvroute.report.page import picture
from kvroute_studies.heroserve.run import AGGREGATION, ONLINE, RINGS, STALE, TABLE
from kvroute_studies.shared.cells import Experiment
from kvroute_studies.shared.findings import ExpectationFinding, Holds
from kvroute_studies.shared.page import write_results

Number = Callable[[Record], float | None]


def _figure(name: str) -> Number:
    return lambda record: record.figures.get(name)


_COLUMNS: tuple[tuple[Heading, Number, int], ...] = (
    (
        Heading("mean", "Mean slowdown over the fastest option on idle links"),
        _figure("slowdown_mean"),
        2,
    ),
    (Heading("p50", "Median slowdown", 2), _figure("slowdown_p50"), 2),
    (Heading("p99", "99th percentile of the slowdown"), _figure("slowdown_p99"), 2),
    (Heading("ms", "Mean time of an all-reduce", 3), _figure("time_mean_ms"), 3),
    (Heading("GB/s", "Tensors reduced, all groups", 1), _figure("reduced_gb_per_s"), 1),
    (
        Heading("aggregated %", "All-reduces through switches", 4),
        lambda record: 100.0 * record.figures["aggregated_share"],
        0,
    ),
)
_PAIRS = (
    ("outstanding", "utilisation-table"),
    ("corrected-table", "utilisation-table"),
    ("outstanding", "static"),
    ("outstanding", TABLE),
    (TABLE, "static"),
    ("outstanding", STALE),
    ("outstanding", RINGS),
    ("outstanding", AGGREGATION),
)
"""Pairs of policies; the first should have the lower mean slowdown."""
_UNCLEAR = 0.02
_COLOURS = ("#0072b2", "#86bcd8")


def online_grid(records: Sequence[Record]) -> Grid:
    """Return means over seeds with 95 % intervals."""
    headings = (Heading("span"), Heading("background"), Heading("policy"), *(heading for heading, _, _ in _COLUMNS))
    rows = []
    for point in _points(records):
        for policy in ONLINE.policies:
            runs = _at(records, point, policy)
            if runs:
                numbers = (estimate_entry(estimate(map(value, runs)), digits) for _, value, digits in _COLUMNS)
                rows.append((GridEntry(f"{point[0]:g}"), GridEntry(f"{point[1]:g}"), GridEntry(policy), *numbers))
    caption = "span: servers of a group; background: bursts of other traffic on a link per time without one."
    return Grid(ONLINE.title, headings, tuple(rows), caption, 3)


def _points(records: Sequence[Record]) -> list[tuple[float, float]]:
    found = dict.fromkeys((record.cell.settings["span"], record.cell.settings["background"]) for record in records)
    return list(found)


def _at(records: Sequence[Record], point: tuple[float, float], policy: str) -> list[Record]:
    return [
        record
        for record in records
        if record.cell.policy == policy and (record.cell.settings["span"], record.cell.settings["background"]) == point
    ]


def ratio(records: Sequence[Record], point: tuple[float, float], pair: tuple[str, str]) -> Estimate | None:
    """Return the mean slowdown of the second policy over that of the first, paired by seed; None without pairs."""
    first, second = (
        {record.cell.seed: record.figures["slowdown_mean"] for record in _at(records, point, name)} for name in pair
    )
    return estimate([second[seed] / first[seed] for seed in first if seed in second])


def online_findings(records: Sequence[Record]) -> list[ExpectationFinding]:
    """Return for each pair whether the first policy is faster, over all points."""
    found = []
    for pair in _PAIRS:
        ratios = [gain for point in _points(records) if (gain := ratio(records, point, pair)) is not None]
        if ratios:
            better = sum(gain.mean > 1 + _UNCLEAR for gain in ratios)
            worse = sum(gain.mean < 1 - _UNCLEAR for gain in ratios)
            holds: Holds = "holds" if better and not worse else "does not hold" if worse > better else "unclear"
            span = f"{min(gain.mean for gain in ratios):.2f} to {max(gain.mean for gain in ratios):.2f} times"
            counts = f"Faster by more than 2 % at {better} of {len(ratios)} points, slower at {worse}; {span}."
            found.append(ExpectationFinding("unit", f"{pair[0]} is faster than {pair[1]}", holds, counts))
    return found


def online_bars(records: Sequence[Record]) -> Figure:
    """Draw the mean slowdown by policy: one panel per span, one bar per background."""
    spans = list(dict.fromkeys(span for span, _ in _points(records)))
    backgrounds = list(dict.fromkeys(background for _, background in _points(records)))
    with style():
        figure, (row,) = panels(1, len(spans), width=3.1, height=3.4, sharey="row")
        height = 0.8 / len(backgrounds)
        for axes, span in zip(row, spans, strict=True):
            for number, background in enumerate(backgrounds):
                found = [
                    estimate(record.figures["slowdown_mean"] for record in _at(records, (span, background), policy))
                    for policy in ONLINE.policies
                ]
                places = np.arange(len(found)) + (number - (len(backgrounds) - 1) / 2) * height
                means = [estimated.mean if estimated else 0.0 for estimated in found]
                errors = [(estimated.half_width or 0.0) if estimated else 0.0 for estimated in found]
                label = "no other traffic" if not background else f"other traffic, {background:g} bursts"
                colour = _COLOURS[number % len(_COLOURS)]
                axes.barh(places, means, height, xerr=errors, color=colour, ecolor=INK, label=label)
            axes.set_yticks(range(len(ONLINE.policies)), ONLINE.policies)
            axes.set_title(f"groups over {span:g} servers")
            axes.set_xlabel("mean slowdown")
            axes.set_xlim(left=0)
            grid(axes, "x")
        row[0].invert_yaxis()
        handles, labels = row[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(backgrounds), frameon=False)
    return figure


def write_online(experiment: Experiment, records: Sequence[Record], out: Path) -> Path:
    """Write `out`/report.html and the figure; return the path of the page. Raises InputError for an unusable folder."""
    return write_results(
        experiment,
        records,
        out,
        found=online_findings(records),
        pictures=[picture(online_bars(records), out, "online", "Mean over seeds, 95 % interval")],
        tables=[online_grid(records)],
        notes=(
            "options of a group: hierarchical ring or hierarchical in-network aggregation, through one of two switches",
            f"{STALE}: eight schedulers that learn of each other every 32 decisions, each with the policy outstanding",
            f"{RINGS}, {AGGREGATION}: outstanding, with these schemes only",
            "slowdown: time divided by that of the fastest of all options on idle links",
        ),
        without="Only one policy ran.",
    )
