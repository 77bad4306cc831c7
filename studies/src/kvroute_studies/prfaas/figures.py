"""Figures of PrfaaS's experiments: formula and simulation, goodput over thresholds, time series, KV throughput."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from kvroute.planner.comparison.cells import Record
from kvroute.planner.throughput.search import Kind
from kvroute.report.drawing import (
    FAINT,
    GRID,
    INK,
    grid,
    legend_above,
    panels,
    percent,
    plain,
    style,
    thousands,
    tick_text,
)
from kvroute.report.estimate import estimate
from kvroute.report.plans.throughput_tables import TITLES
from kvroute.report.series import of_profile, profiles_of, values_of
from kvroute_studies.prfaas.burst import DUAL, FROM_S, SCENARIOS, WARMUP_S
from kvroute_studies.prfaas.findings import (
    DENSE,
    at,
    best_static,
    figure,
    goodput_per_s,
    old_static,
    statics,
)
from kvroute_studies.shared.cells import Computed

_KINDS: dict[Kind, tuple[str, str, str]] = {
    "prfaas": ("#d55e00", "o", "-"),
    "homogeneous": ("#0072b2", "s", "--"),
    "naive": ("#8a8a8a", "^", "-."),
}
"""Colour, marker and dashes by kind."""
_WAITS = (
    ("service_mean_s", "prefill", "#5b7fa6"),
    ("prfaas_wait_s", "wait for PrfaaS", "#d55e00"),
    ("pd_p_wait_s", "wait for PD prefill", "#f2c14e"),
    ("ethernet_s", "Ethernet after prefill", "#3f9c7a"),
    ("pd_d_wait_s", "wait for PD decode", "#b8629a"),
)
_LINES = ((DUAL, "#d55e00", "-", 2.8), ("best", "#0072b2", "--", 1.9), ("old", "#8a8a8a", ":", 1.2))
"""Colour, dashes and width; each line is thinner than the one under it, so that equal lines are all visible."""


def keeps_up(records: Sequence[Record]) -> Figure:
    """Draw the sustained rate over the offered rate, both as shares of the formula's throughput, by profile."""
    profiles = profiles_of(records)
    with style():
        figure_, (row,) = panels(1, len(profiles), width=3.0, height=2.6, sharey=True)
        for axes, profile in zip(row, profiles, strict=True):
            loads = values_of(records, "load")
            axes.plot(loads, loads, color=FAINT, linewidth=1, linestyle=":", label="offered rate")
            axes.axhline(1.0, color=FAINT, linewidth=1)
            _kind_lines(axes, of_profile(records, profile), "keeps_up_per_s", relative=True)
            axes.set_title(plain(profile))
            axes.set_xlabel("offered, share of the formula's Λ max")
            percent(axes.xaxis)
            percent(axes.yaxis)
            grid(axes)
        row[0].set_ylabel("served, share of Λ max")
        legend_above(figure_, row[0])
    return figure_


def ttft_lines(records: Sequence[Record]) -> Figure:
    """Draw mean and P90 of TTFT over load by profile; dotted lines show the formula's TTFT, which is prefill alone."""
    profiles = profiles_of(records)
    rows = (("mean", "mean TTFT, s", "model_ttft_mean_s"), ("p90", "P90 of TTFT, s", "model_ttft_p90_s"))
    with style():
        figure_, grid_axes = panels(2, len(profiles), width=3.0, height=2.2, sharey="row")
        for row, (key, label, model) in zip(grid_axes, rows, strict=True):
            for axes, profile in zip(row, profiles, strict=True):
                some = of_profile(records, profile)
                _kind_lines(axes, some, "ttft_mean_s" if key == "mean" else "ttft_p90_s")
                for kind, (colour, _, _) in _KINDS.items():
                    there = at(some, kind)
                    if there:
                        axes.axhline(there[0].figures[model], color=colour, linewidth=1, linestyle=":")
                axes.set_yscale("log")
                axes.set_yticks([1, 2, 5, 10, 20, 50, 100])
                axes.yaxis.set_minor_locator(NullLocator())
                thousands(axes.yaxis)
                percent(axes.xaxis)
                axes.set_title(plain(profile) if key == "mean" else "")
                axes.set_xlabel("" if key == "mean" else "offered, share of the formula's Λ max")
                grid(axes)
            row[0].set_ylabel(label)
        legend_above(figure_, grid_axes[0][0])
    return figure_


def _kind_lines(axes: Axes, records: Sequence[Record], key: str, *, relative: bool = False) -> None:
    for kind, (colour, marker, dashes) in _KINDS.items():
        points = []
        for load in values_of(at(records, kind), "load"):
            there = at(records, kind, load=load)
            known = (
                estimate(record.summary.ttft_s.mean for record in there) if key == "ttft_mean_s" else figure(there, key)
            )
            if known is not None:
                scale = there[0].figures["lambda_max_per_s"] if relative else 1.0
                points.append((load, known.mean / scale, (known.half_width or 0.0) / scale))
        if points:
            x, y, error = zip(*points, strict=True)
            axes.errorbar(x, y, error, color=colour, marker=marker, linestyle=dashes, capsize=2, label=TITLES[kind])


def waiting(records: Sequence[Record]) -> Figure:
    """Draw the parts of TTFT over load for PrfaaS-PD by profile: means over the requests of each stage."""
    profiles = profiles_of(records)
    with style():
        figure_, (row,) = panels(1, len(profiles), width=3.2, height=2.6, sharey=True)
        for axes, profile in zip(row, profiles, strict=True):
            some = at(of_profile(records, profile), "prfaas")
            loads = [load for load in values_of(some, "load") if load <= 1.0]
            width = 0.8 / len(_WAITS)
            for number, (key, label, colour) in enumerate(_WAITS):
                means = [known.mean if (known := figure(at(some, "prfaas", load=load), key)) else 0.0 for load in loads]
                place = np.arange(len(loads)) + (number - (len(_WAITS) - 1) / 2) * width
                axes.bar(place, means, width, color=colour, label=label)
            axes.set_xticks(range(len(loads)), [f"{load:.0%}" for load in loads])
            axes.set_title(plain(profile))
            axes.set_xlabel("offered, share of the formula's Λ max")
            grid(axes)
        row[0].set_ylabel("mean, s")
        legend_above(figure_, row[0])
    return figure_


def over_thresholds(records: Sequence[Record]) -> Figure:
    """Draw the goodput of every static threshold by scenario, with the scheduler's as a line; bands: 95 % intervals."""
    profiles = profiles_of(records)
    old = old_static(records)
    with style():
        figure_, (row,) = panels(1, len(profiles), width=2.5, height=2.4)
        for axes, profile in zip(row, profiles, strict=True):
            some = of_profile(records, profile)
            points = []
            for policy in statics(some):
                known = estimate(goodput_per_s(record.summary) for record in at(some, policy))
                if known is not None:
                    points.append((float(policy.removeprefix("static-")), known.mean, known.half_width or 0.0))
            x, y, error = zip(*sorted(points), strict=True)
            axes.errorbar(x, y, error, color="#0072b2", marker="s", capsize=2, label="static threshold")
            if old is not None:
                tokens = float(old.removeprefix("static-"))
                axes.axvline(tokens, color=FAINT, linestyle=":", label="best for old traffic")
            dual = estimate(goodput_per_s(record.summary) for record in at(some, DUAL))
            if dual is not None:
                half = dual.half_width or 0.0
                axes.axhspan(dual.mean - half, dual.mean + half, color="#d55e00", alpha=0.15, linewidth=0)
                axes.axhline(dual.mean, color="#d55e00", label=DUAL)
            axes.set_ylim(0, None)
            axes.set_xscale("log")
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_xticks(*_threshold_ticks(x))
            axes.set_title(plain(profile))
            axes.set_xlabel("threshold, tokens")
            grid(axes)
        row[0].set_ylabel("good requests/s")
        legend_above(figure_, row[0])
    return figure_


def over_time(records: Sequence[Record]) -> Figure:
    """Draw the share of requests within the SLO by arrival, mean over seeds; below, the scheduler's threshold and
    prefill instances."""
    profiles = profiles_of(records)
    old = old_static(records)
    with style():
        figure_, grid_axes = panels(3, len(profiles), width=2.6, height=1.75, sharey="row")
        for column, profile in enumerate(profiles):
            some = of_profile(records, profile)
            named = {"best": best_static(some), "old": old, DUAL: DUAL}
            for name, colour, dashes, width in _LINES:
                times, shares = _mean_series(at(some, named[name] or ""), "good_share")
                label = name if name == DUAL else f"{name} static"
                if times:
                    grid_axes[0][column].plot(
                        times, shares, color=colour, linestyle=dashes, linewidth=width, label=label
                    )
            for record in at(some, DUAL):
                x, y = zip(*record.series["threshold_tokens"], strict=True)
                grid_axes[1][column].plot(x, y, color="#d55e00", alpha=0.45, linewidth=0.9)
                roles = record.series["n_prefill"]
                x, y = zip(*roles, (max(x[-1], roles[-1][0]), roles[-1][1]), strict=True)
                grid_axes[2][column].step(x, y, where="post", color="#d55e00", alpha=0.45, linewidth=1.1)
            grid_axes[1][column].set_yscale("log")
            low, high = _threshold_limits(records)
            marks = [mark * 10**power for power in range(1, 7) for mark in (1, 1.5, 2, 3, 5, 7)]
            marks = [mark for mark in marks if low <= mark <= high]
            grid_axes[1][column].set_ylim(low, high)
            grid_axes[1][column].set_yticks(marks[:: max(len(marks) // 5, 1)])
            grid_axes[1][column].yaxis.set_minor_locator(NullLocator())
            thousands(grid_axes[1][column].yaxis)
            percent(grid_axes[0][column].yaxis)
            grid_axes[2][column].yaxis.set_major_locator(MaxNLocator(integer=True))
            grid_axes[0][column].set_title(plain(profile))
            grid_axes[2][column].set_xlabel("time, s")
            for axes in (grid_axes[0][column], grid_axes[1][column], grid_axes[2][column]):
                _shade(axes, profile)
                grid(axes)
        for axes, label in zip(
            (rows[0] for rows in grid_axes), ("SLO met", "threshold, tokens", "prefill instances"), strict=True
        ):
            axes.set_ylabel(label)
        legend_above(figure_, grid_axes[0][0])
    return figure_


def _threshold_ticks(tokens: Sequence[float]) -> tuple[list[float], list[str]]:
    """Return four of the tested thresholds, evenly distributed."""
    chosen = sorted({tokens[round(position)] for position in np.linspace(0, len(tokens) - 1, 4)})
    return chosen, [f"{threshold / 1e3:g}k" for threshold in chosen]


def _threshold_limits(records: Sequence[Record]) -> tuple[float, float]:
    """Return the range of the scheduler's thresholds after half of the warm-up; before, it offloads nothing."""
    found = [
        tokens
        for record in at(records, DUAL)
        for at_s, tokens in record.series["threshold_tokens"]
        if at_s >= WARMUP_S / 2
    ]
    return (0.8 * min(found), 1.25 * max(found)) if found else (1e3, 1e6)


def _mean_series(records: Sequence[Record], key: str) -> tuple[list[float], list[float]]:
    """Return times and means over the records; both empty if there are none."""
    by_time: dict[float, list[float]] = {}
    for record in records:
        for at_s, value in record.series.get(key, ()):
            by_time.setdefault(at_s, []).append(value)
    x = sorted(by_time)
    return x, [float(np.mean(by_time[at_s])) for at_s in x]


def _shade(axes: Axes, profile: str) -> None:
    """Shade the disturbance and the unmeasured warm-up."""
    scenario = SCENARIOS.get(profile)
    axes.axvspan(0, WARMUP_S, color=GRID, alpha=0.6, linewidth=0)
    if scenario is None or profile == "calm":
        return
    to_s = scenario.link_shares[-1][0] if scenario.link_shares else scenario.traffic.to_s
    axes.axvspan(FROM_S, to_s, color="#f2c14e", alpha=0.18, linewidth=0)


def kv_lines(points: Sequence[Computed]) -> Figure:
    """Draw measured KV throughput over prompt length, and eq. 1 as crosses where it can be computed."""
    models = list(dict.fromkeys(point.cell.policy for point in points))
    markers = "osD^vPX"
    with style():
        figure_, ((axes,),) = panels(1, 1, width=5.2, height=3.4)
        for number, name in enumerate(models):
            some = sorted((p for p in points if p.cell.policy == name), key=lambda p: p.cell.settings["tokens"])
            x = [point.cell.settings["tokens"] for point in some]
            y = [point.figures["published_gbps"] for point in some]
            dashes = "--" if name in DENSE else "-"
            colour = f"C{number}"
            axes.plot(x, y, marker=markers[number % len(markers)], linestyle=dashes, color=colour, label=name)
            known = [
                (p.cell.settings["tokens"], p.figures["computed_gbps"]) for p in some if "computed_gbps" in p.figures
            ]
            if known:
                axes.plot(*zip(*known, strict=True), "+", color=INK, markersize=11, label="eq. 1", zorder=5)
        axes.set_xscale("log")
        axes.set_yscale("log")
        ticks = sorted({point.cell.settings["tokens"] for point in points})
        axes.set_xticks(ticks, [tick_text(tick) for tick in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_yticks([1, 2, 5, 10, 20, 50])
        axes.yaxis.set_minor_locator(NullLocator())
        thousands(axes.yaxis)
        axes.set_xlabel("prompt length, tokens")
        axes.set_ylabel("KV throughput of 8 H200, Gbps")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        grid(axes, "both")
    return figure_
