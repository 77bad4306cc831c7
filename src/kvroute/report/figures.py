"""Figures of runs and sweeps, each a matplotlib Figure; no pyplot, no state, nothing written to disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from kvroute.experiments.cells import Record
from kvroute.report.compare import Difference, Metric, mean_ttft_s
from kvroute.report.drawing import (
    AXIS_LABELS,
    FAINT,
    INK,
    PART_COLOURS,
    TIER_COLOURS,
    grid,
    log_if_wide,
    look,
    nothing,
    panels,
    plain,
    policy_legend,
    scale_axis,
    style,
    tick_text,
)
from kvroute.report.series import (
    axes_of,
    by_point,
    estimate,
    gap,
    line,
    of_policy,
    of_profile,
    policies_of,
    profiles_of,
    relative_half_width,
    summaries,
    values_of,
)
from kvroute.report.tables import tier_means
from kvroute.report.topology_figure import TIER_NAMES
from kvroute.sim.metrics import Summary, Timeline

SAMPLES_SHOWN = 300
_PARTS = ("prefill_wait", "prefill", "transfer", "queue", "first_step")
_PART_NAMES = ("wait for prefill", "prefill", "KV transfer", "wait for a decode slot", "first decode step")
_NOTHING = "no request got a first token"


@dataclass(frozen=True, slots=True)
class _Scale:
    label: str
    metric: Metric
    factor: float = 1.0
    share: bool = False


_TTFT = _Scale("mean TTFT, ms", mean_ttft_s, 1e3)
_SLO = _Scale("SLO attainment", lambda run: run.slo_attainment, share=True)
_GOODPUT = _Scale("goodput, requests/s", lambda run: run.goodput_per_s)


def load_sweep(records: Sequence[Record]) -> Figure:
    """Mean TTFT, SLO attainment and goodput over load: a line per policy, its band ± one standard deviation over seeds."""
    return _lines(records, "load", (_TTFT, _SLO, _GOODPUT))


def sweep_lines(records: Sequence[Record], axis: str, versus: tuple[str, str] | None = None) -> Figure:
    """Mean TTFT over an axis per profile and, below it, the gap of a pair with its 95 % interval."""
    return _lines(records, axis, (_TTFT,), versus)


def _lines(records: Sequence[Record], axis: str, scales: Sequence[_Scale], versus: tuple[str, str] | None = None) -> Figure:
    """Rows are metrics and columns profiles; with one profile the metrics stand side by side."""
    profiles, policies = profiles_of(records), policies_of(summaries(records))
    drawings: list[Callable[[Axes, Sequence[Record]], None]] = [
        lambda axes, some, scale=scale: _policy_lines(axes, some, axis, policies, scale)  # type: ignore[misc]
        for scale in scales
    ]
    if versus is not None and set(versus) <= set(policies):
        drawings.append(lambda axes, some: _gap_line(axes, some, axis, versus))
    with style():
        if not values_of(records, axis):
            return nothing(Figure(figsize=(6, 2)), f"no run varies {plain(axis)}")
        flat = len(profiles) == 1
        figure, grid_axes = panels(1 if flat else len(drawings), len(drawings) if flat else len(profiles), width=3.1, height=2.25)
        for column, profile in enumerate(profiles):
            for row, draw in enumerate(drawings):
                axes = grid_axes[0][row] if flat else grid_axes[row][column]
                draw(axes, of_profile(records, profile))
                scale_axis(axes, values_of(records, axis))
                if flat or row == len(drawings) - 1:
                    axes.set_xlabel(AXIS_LABELS.get(axis, plain(axis)))
                if row == 0:
                    axes.set_title(plain(profile))
                if not flat and column:
                    axes.set_ylabel("")
        policy_legend(figure, policies)
        figure.align_ylabels()
    return figure


def _policy_lines(axes: Axes, records: Sequence[Record], axis: str, policies: Sequence[str], scale: _Scale) -> None:
    highest: list[float] = []
    for order, policy in enumerate(policies):
        points = line(records, axis, policy, scale.metric)
        if not points:
            continue
        x = [value for value, _ in points]
        mean = np.array([known.mean for _, known in points]) * scale.factor
        std = np.array([known.std for _, known in points]) * scale.factor
        drawn = look(policy)
        axes.fill_between(x, np.maximum(mean - std, mean * 0.05), mean + std, color=drawn.colour, alpha=0.15, linewidth=0)
        axes.plot(x, mean, color=drawn.colour, marker=drawn.marker, linestyle=drawn.dashes, zorder=3 + order)
        highest += mean.tolist()
    axes.set_ylabel(scale.label)
    grid(axes)
    if scale.share:
        axes.set_ylim(-0.02, 1.04)
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    else:
        log_if_wide(axes, highest)


def _gap_line(axes: Axes, records: Sequence[Record], axis: str, versus: tuple[str, str]) -> None:
    """Filled markers where the interval leaves out zero."""
    drawn = look(versus[0])
    gaps: list[tuple[float, Difference]] = []
    for value in values_of(records, axis):
        found = gap([record.summary for record in records if record.cell.settings.get(axis) == value], versus)
        if found is not None:
            gaps.append((value, found))
    axes.axhline(0, color=FAINT, linewidth=1)
    axes.plot([x for x, _ in gaps], [each.relative for _, each in gaps], color=drawn.colour, linewidth=1.2)
    for x, each in gaps:
        face = "white" if each.is_noise else drawn.colour
        axes.errorbar(x, each.relative, yerr=relative_half_width(each) or 0, color=drawn.colour, marker="o", markerfacecolor=face, capsize=2.5, linewidth=1.2)  # fmt: skip
    if gaps:
        reach = max(abs(each.relative) + (relative_half_width(each) or 0) for _, each in gaps)
        axes.set_ylim(-max(reach * 1.15, 0.02), max(reach * 0.35, 0.02) if all(e.relative <= 0 for _, e in gaps) else reach * 1.15)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_ylabel(f"{plain(versus[0])} vs {plain(versus[1])}")
    grid(axes)


def heat_map(records: Sequence[Record], versus: tuple[str, str] = ("netkv", "cla")) -> Figure:
    """The pair's relative gap over the first two axes, a panel per profile; parentheses mark noise. Blue: the first is lower."""
    profiles, names = profiles_of(records), axes_of(records)[:2]
    with style():
        if len(names) < 2:
            return nothing(Figure(figsize=(6, 2)), "a heat map needs two axes")
        y_values, x_values = values_of(records, names[0]), values_of(records, names[1])
        gaps = [{point: gap(runs, versus) for point, runs in by_point(of_profile(records, name)).items()} for name in profiles]
        reach = max((abs(each.relative) for some in gaps for each in some.values() if each is not None), default=0.0)
        figure, grid_axes = panels(1, len(profiles), width=0.62 * len(x_values) + 0.6, height=0.5 * len(y_values) + 0.6, sharey=True)
        for axes, some, profile in zip(grid_axes[0], gaps, profiles, strict=True):
            cells = [[some.get((y, x)) for x in x_values] for y in y_values]
            shares = np.array([[np.nan if each is None else each.relative for each in row] for row in cells])
            image = axes.imshow(shares, cmap="RdBu_r", vmin=-max(reach, 0.05), vmax=max(reach, 0.05), origin="lower", aspect="auto")
            for (row, column), share in np.ndenumerate(shares):
                _annotate(axes, column, row, cells[row][column], dark=abs(share) > 0.6 * max(reach, 0.05))
            axes.set_xticks(range(len(x_values)), [tick_text(value) for value in x_values])
            axes.set_yticks(range(len(y_values)), [tick_text(value) for value in y_values])
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)
            axes.set_title(plain(profile))
        figure.supxlabel(AXIS_LABELS.get(names[1], names[1]), fontsize=8.5)
        grid_axes[0][0].set_ylabel(AXIS_LABELS.get(names[0], names[0]))
        bar = figure.colorbar(image, ax=grid_axes[0], format=PercentFormatter(1, decimals=0), pad=0.02)
        bar.outline.set_visible(False)  # type: ignore[operator]  # stubs call the spine a property
        bar.set_label(f"mean TTFT, {plain(versus[0])} vs {plain(versus[1])}")
    return figure


def _annotate(axes: Axes, x: int, y: int, each: Difference | None, *, dark: bool) -> None:
    if each is None:
        text = "–"
    else:
        text = f"{each.relative * 100:+.1f}".replace("-", "−")
        text = f"({text})" if each.is_noise else text
    axes.text(x, y, text, ha="center", va="center", fontsize=7.5, color="#fefefe" if dark else "#111111")


def ablation_bars(records: Sequence[Record]) -> Figure:
    """Mean TTFT per policy with its 95 % interval, a panel per profile; the percentage is against the first policy."""
    profiles, policies = profiles_of(records), policies_of(summaries(records))
    with style():
        figure, grid_axes = panels(1, max(len(profiles), 1), width=3.1, height=0.36 * len(policies) + 0.55, sharey=True)
        for axes, profile in zip(grid_axes[0], profiles, strict=False):
            runs = summaries(of_profile(records, profile))
            known = [estimate(mean_ttft_s(run) for run in of_policy(runs, policy)) for policy in policies]
            means = [each.mean * 1e3 for each in known if each is not None]
            for row, (policy, each) in enumerate(zip(policies, known, strict=True)):
                if each is None:
                    axes.text(0, row, " " + _NOTHING, va="center", color=FAINT)
                    continue
                half_width = (each.half_width or 0) * 1e3
                axes.barh(row, each.mean * 1e3, xerr=half_width, color=look(policy).colour, height=0.68, ecolor=INK, capsize=2.5, error_kw={"linewidth": 1})  # fmt: skip
                text = f" {each.mean * 1e3:,.0f}"
                if row and (first := gap(runs, (policy, policies[0]))) is not None:
                    text += f" ({first.relative:+.1%})".replace("-", "−")
                axes.text(each.mean * 1e3 + half_width, row, text, va="center", fontsize=7.5)
            axes.set_xlim(0, max(means, default=1) * 1.5 or 1)
            _policy_rows(axes, policies)
            axes.set_title(plain(profile))
            axes.set_xlabel("mean TTFT, ms")
    return figure


def _policy_rows(axes: Axes, policies: Sequence[str]) -> None:
    axes.set_yticks(range(len(policies)), [plain(policy) for policy in policies])
    axes.set_ylim(len(policies) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    grid(axes, "x")


def tier_split(runs: Sequence[Summary]) -> Figure:
    """Share of transfers by tier of the chosen path, a bar per policy, mean over seeds."""
    policies = policies_of(runs)
    means = [tier_means(of_policy(runs, policy)) for policy in policies]
    tiers = sorted({name for some in means for name in some})
    names = [TIER_NAMES[int(name)] for name in tiers]
    values = [[some.get(name, 0.0) * 100 for name in tiers] for some in means]
    colours = [TIER_COLOURS[int(name)] for name in tiers]
    return _stacks(policies, values, names, colours, "share of KV transfers, %", lambda value: f"{value:.0f}", "no transfer")


def ttft_breakdown(runs: Sequence[Summary]) -> Figure:
    """Mean seconds of each part of TTFT, a bar per policy, mean over seeds; the parts add up to the mean TTFT."""
    policies = policies_of(runs)
    values = []
    for policy in policies:
        known = [estimate(getattr(run.ttft_parts_s, part) for run in of_policy(runs, policy)) for part in _PARTS]
        values.append([0.0 if each is None else each.mean * 1e3 for each in known])
    return _stacks(policies, values, _PART_NAMES, PART_COLOURS, "mean TTFT, ms", lambda value: f"{value:,.3g}" if value < 100 else f"{value:,.0f}", _NOTHING, totals=True)  # fmt: skip


def _stacks(
    policies: Sequence[str],
    values: Sequence[Sequence[float]],
    names: Sequence[str],
    colours: Sequence[str],
    label: str,
    text_of: Callable[[float], str],
    empty: str,
    *,
    totals: bool = False,
) -> Figure:
    """Horizontal stacked bars, a row per policy; parts too thin for their number go without."""
    with style():
        figure, grid_axes = panels(1, 1, width=7.2, height=0.4 * max(len(policies), 1) + 0.75)
        axes = grid_axes[0][0]
        widest = max((sum(row) for row in values), default=0.0)
        for row, parts in enumerate(values):
            left = 0.0
            for part, colour in zip(parts, colours, strict=True):
                axes.barh(row, part, left=left, color=colour, height=0.7, edgecolor="white", linewidth=0.6)
                if part > 0.06 * widest:
                    axes.text(left + part / 2, row, text_of(part), ha="center", va="center", fontsize=7.5, color=_on(colour))
                left += part
            if not left:
                axes.text(0, row, f" {empty}", va="center", color=FAINT)
            elif totals:
                axes.text(left, row, f" {text_of(left)}", va="center", fontsize=8, fontweight="bold")
        axes.set_xlim(0, widest * (1.1 if totals else 1) or 1)
        _policy_rows(axes, policies)
        axes.set_xlabel(label)
        if names:
            figure.legend([Patch(color=colour) for colour in colours], list(names), loc="outside upper center", ncols=5)
    return figure


def _on(colour: str) -> str:
    """Black or white, whichever is read more easily on the colour (Rec. 709 luma)."""
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "#111111" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 130 else "#fefefe"


def link_utilisation(timelines: Mapping[str, Timeline]) -> Figure:
    """Own traffic over time as a share of each tier's capacity, a panel per tier that carried any, a line per policy."""
    tiers = sorted({tier for each in timelines.values() for tier, shares in each.tier.items() if any(shares)})
    with style():
        if not tiers:
            return nothing(Figure(figsize=(7.2, 1.2)), "no transfer crossed the network")
        figure, grid_axes = panels(len(tiers), 1, width=7.2, height=1.35)
        for row, tier in enumerate(tiers):
            axes = grid_axes[row][0]
            highest = 0.0
            for order, (policy, timeline) in enumerate(timelines.items()):
                at_s, shares = thin(timeline.at_s, timeline.tier.get(tier, ()))
                drawn = look(policy)
                axes.plot(at_s, shares, color=drawn.colour, linestyle=drawn.dashes, linewidth=1.1, zorder=3 + order)
                highest = max(highest, max(shares, default=0.0))
            axes.set_ylim(0, highest * 1.1 or 1)
            axes.margins(x=0.01)
            axes.set_title(TIER_NAMES[int(tier)])
            axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
            grid(axes)
            if row < len(tiers) - 1:
                axes.tick_params(labelbottom=False)
        grid_axes[-1][0].set_xlabel("time, s")
        figure.supylabel("capacity in use", fontsize=8.5)
        policy_legend(figure, list(timelines))
    return figure


def thin(at_s: Sequence[float], shares: Sequence[float], most: int = SAMPLES_SHOWN) -> tuple[list[float], list[float]]:
    """At most `most` samples: means of equal runs of neighbours, so that the mean over time stays (bar the last run)."""
    count = min(len(at_s), len(shares))
    stride = -(-count // most) if count else 1
    starts = range(0, count, stride)
    times = [float(np.mean(at_s[start : min(start + stride, count)])) for start in starts]
    return times, [float(np.mean(shares[start : min(start + stride, count)])) for start in starts]
