"""Figures of a sweep: policies over an axis, a pair of policies over two axes, and the steps of an ablation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from kvroute.planner.comparison.cells import Record
from kvroute.report.compare import Difference, Metric, mean_ttft_s
from kvroute.report.drawing import (
    AXIS_LABELS,
    FAINT,
    INK,
    NO_TOKEN,
    PAPER,
    grid,
    line_style,
    log_if_wide,
    nothing,
    panels,
    percent,
    plain,
    policy_legend,
    policy_rows,
    scale_axis,
    style,
    tick_text,
)
from kvroute.report.estimate import Estimate, estimate
from kvroute.report.series import (
    axes_of,
    by_point,
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


@dataclass(frozen=True, slots=True)
class _Scale:
    label: str
    metric: Metric
    factor: float = 1.0
    share: bool = False


_TTFT = _Scale("mean TTFT, ms", mean_ttft_s, 1e3)
_SLO = _Scale("SLO attainment", lambda run: run.slo_attainment, share=True)
_GOODPUT = _Scale("goodput, requests/s", lambda run: run.goodput_per_s)


def load_sweep(records: Sequence[Record], versus: tuple[str, str] | None = None) -> Figure:
    """Draw mean TTFT, SLO attainment and goodput over load: a line per policy, its band ± one standard deviation.

    With a pair of policies, the last panel is its gap with the 95 % interval; hollow markers are noise.
    """
    return _lines(records, "load", (_TTFT, _SLO, _GOODPUT), versus)


def sweep_lines(records: Sequence[Record], axis: str, versus: tuple[str, str] | None = None) -> Figure:
    """Draw mean TTFT over an axis per profile and, below it, the gap of a pair with its 95 % interval; hollow markers
    are noise.

    With a second axis in the records, a line is the mean over it. The gap pairs runs of one point and is left out.
    """
    return _lines(records, axis, (_TTFT,), versus if len(axes_of(records)) == 1 else None)


def _lines(
    records: Sequence[Record], axis: str, scales: Sequence[_Scale], versus: tuple[str, str] | None = None
) -> Figure:
    """Draw metrics as rows and profiles as columns; with one profile the metrics are side by side."""
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
        figure, grid_axes = panels(
            1 if flat else len(drawings), len(drawings) if flat else len(profiles), width=3.1, height=2.25
        )
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
        drawn = line_style(policy)
        axes.fill_between(
            x, np.maximum(mean - std, mean * 0.05), mean + std, color=drawn.colour, alpha=0.15, linewidth=0
        )
        axes.plot(x, mean, color=drawn.colour, marker=drawn.marker, linestyle=drawn.dashes, zorder=3 + order)
        highest += mean.tolist()
    axes.set_ylabel(scale.label)
    grid(axes)
    if scale.share:
        axes.set_ylim(-0.02, 1.04)
        percent(axes.yaxis)
    else:
        log_if_wide(axes, highest)


def _gap_line(axes: Axes, records: Sequence[Record], axis: str, versus: tuple[str, str]) -> None:
    """Draw the gap; markers are filled if the interval excludes zero."""
    drawn = line_style(versus[0])
    gaps: list[tuple[float, Difference]] = []
    for value in values_of(records, axis):
        found = gap([record.summary for record in records if record.cell.settings.get(axis) == value], versus)
        if found is not None:
            gaps.append((value, found))
    axes.axhline(0, color=FAINT, linewidth=1)
    axes.plot([x for x, _ in gaps], [difference.relative for _, difference in gaps], color=drawn.colour, linewidth=1.2)
    for x, difference in gaps:
        face = "white" if difference.is_noise else drawn.colour
        error = relative_half_width(difference) or 0
        axes.errorbar(x, difference.relative, error, color=drawn.colour, marker="o", markerfacecolor=face, capsize=2.5)
    if gaps:
        reach = max(abs(difference.relative) + (relative_half_width(difference) or 0) for _, difference in gaps)
        axes.set_ylim(
            -max(reach * 1.15, 0.02), max(reach * 0.35, 0.02) if all(e.relative <= 0 for _, e in gaps) else reach * 1.15
        )
    percent(axes.yaxis)
    axes.set_ylabel(f"{plain(versus[0])} vs {plain(versus[1])}")
    grid(axes)


def heat_map(records: Sequence[Record], versus: tuple[str, str] = ("netkv", "cla")) -> Figure:
    """Draw the pair's relative gap over the first two axes, a panel per profile; parentheses: noise; blue: lower."""
    profiles, names = profiles_of(records), axes_of(records)[:2]
    with style():
        if len(names) < 2:
            return nothing(Figure(figsize=(6, 2)), "a heat map needs two axes")
        y_values, x_values = values_of(records, names[0]), values_of(records, names[1])
        gaps = [
            {point: gap(runs, versus) for point, runs in by_point(of_profile(records, name)).items()}
            for name in profiles
        ]
        reach = max(
            (abs(difference.relative) for some in gaps for difference in some.values() if difference is not None),
            default=0.0,
        )
        figure, grid_axes = panels(
            1, len(profiles), width=0.62 * len(x_values) + 0.6, height=0.5 * len(y_values) + 0.6, sharey=True
        )
        for axes, some, profile in zip(grid_axes[0], gaps, profiles, strict=True):
            cells = [[some.get((y, x)) for x in x_values] for y in y_values]
            shares = np.array(
                [[np.nan if difference is None else difference.relative for difference in row] for row in cells]
            )
            limit = max(reach, 0.05)
            image = axes.pcolormesh(shares, cmap="RdBu_r", vmin=-limit, vmax=limit, edgecolors=PAPER, linewidth=1.5)
            for (row, column), share in np.ndenumerate(shares):
                _annotate(axes, column + 0.5, row + 0.5, cells[row][column], dark=abs(share) > 0.6 * limit)
            axes.set_xticks(np.arange(len(x_values)) + 0.5, [tick_text(value) for value in x_values])
            axes.set_yticks(np.arange(len(y_values)) + 0.5, [tick_text(value) for value in y_values])
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)
            axes.set_title(plain(profile))
        figure.supxlabel(AXIS_LABELS.get(names[1], names[1]), fontsize=8.5)
        grid_axes[0][0].set_ylabel(AXIS_LABELS.get(names[0], names[0]))
        bar = figure.colorbar(image, ax=grid_axes[0], format=PercentFormatter(1, decimals=0), pad=0.02)
        bar.outline.set_visible(False)
        assert bar.solids is not None
        bar.solids.set_rasterized(False)  # vector graphics like everything else
        bar.solids.set_edgecolor("face")
        bar.set_label(f"mean TTFT, {plain(versus[0])} vs {plain(versus[1])}")
    return figure


def _annotate(axes: Axes, x: float, y: float, difference: Difference | None, *, dark: bool) -> None:
    if difference is None:
        text = "–"
    else:
        text = f"{difference.relative * 100:+.1f}".replace("-", "−")
        text = f"({text})" if difference.is_noise else text
    axes.text(x, y, text, ha="center", va="center", fontsize=7.5, color="#fefefe" if dark else "#111111")


def ablation_bars(records: Sequence[Record]) -> Figure:
    """Draw mean TTFT per policy with its 95 % interval, a panel per profile, and percentages of the first policy."""
    profiles, policies = profiles_of(records), policies_of(summaries(records))
    with style():
        figure, grid_axes = panels(1, max(len(profiles), 1), width=3.1, height=0.36 * len(policies) + 0.55, sharey=True)
        for axes, profile in zip(grid_axes[0], profiles, strict=False):
            runs = summaries(of_profile(records, profile))
            known = [estimate(mean_ttft_s(run) for run in of_policy(runs, policy)) for policy in policies]
            means = [estimated.mean * 1e3 for estimated in known if estimated is not None]
            for row, (policy, estimated) in enumerate(zip(policies, known, strict=True)):
                _bar(axes, row, policy, estimated, gap(runs, (policy, policies[0])) if row else None)
            axes.set_xlim(0, max(means, default=1) * 1.5 or 1)
            policy_rows(axes, policies)
            axes.set_title(plain(profile))
            axes.set_xlabel("mean TTFT, ms")
            axes.xaxis.set_major_locator(MaxNLocator(4))
    return figure


def _bar(axes: Axes, row: int, policy: str, known: Estimate | None, step: Difference | None) -> None:
    if known is None:
        axes.text(0, row, f" {NO_TOKEN}", va="center", color=FAINT)
        return
    mean, error = known.mean * 1e3, (known.half_width or 0) * 1e3
    axes.barh(row, mean, color=line_style(policy).colour, height=0.68)
    if error:
        axes.errorbar(mean, row, xerr=error, color=INK, capsize=2.5, linewidth=1)
    text = f" {mean:,.0f}" + ("" if step is None else f" ({step.relative:+.1%})".replace("-", "−"))
    axes.text(mean + error, row, text, va="center", fontsize=7.5)
