"""Figures of one comparison: parts of TTFT, network distance of KV transfers, and network utilisation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.text import Annotation
from matplotlib.ticker import LogLocator, NullLocator

from kvroute.report.drawing import (
    FAINT,
    INK,
    NO_TOKEN,
    PART_COLOURS,
    TIER_COLOURS,
    grid,
    line_style,
    nothing,
    panels,
    percent,
    policy_legend,
    policy_rows,
    readable,
    style,
    thousands,
)
from kvroute.report.estimate import estimate
from kvroute.report.series import of_policy, policies_of
from kvroute.report.tables import tier_means
from kvroute.sim.metrics import Summary, Timeline
from kvroute.topology.tree import TIER_NAMES

SAMPLES_SHOWN = 150
_DETAIL_MOST = 0.6
"""The changes of links get a second column of panels if it shows at most this share of the run."""
_Changes = Sequence[tuple[float, str]]
_PARTS = ("prefill_wait", "prefill", "transfer", "queue", "first_step")
_PART_NAMES = ("wait for prefill", "prefill", "KV transfer", "wait for a decode slot", "first decode step")

_LINK_NAMES = ("NVLink", "NICs", "rack uplinks", "pod uplinks", "WAN links")
"""Links whose utilisation represents a tier, by tier."""


def tier_split(runs: Sequence[Summary]) -> Figure:
    """Draw the share of transfers by tier of the chosen path, a bar per policy, mean over seeds."""
    policies = policies_of(runs)
    means = [tier_means(of_policy(runs, policy)) for policy in policies]
    tiers = sorted({name for some in means for name in some})
    names = [TIER_NAMES[int(name)] for name in tiers]
    values = [[some.get(name, 0.0) * 100 for name in tiers] for some in means]
    colours = [TIER_COLOURS[int(name)] for name in tiers]
    return _stacks(
        policies, values, names, colours, "share of KV transfers, %", lambda value: f"{value:.0f}", "no transfer"
    )


def ttft_breakdown(runs: Sequence[Summary]) -> Figure:
    """Draw the mean seconds of each part of TTFT, a bar per policy, mean over seeds; the sum is the mean TTFT."""
    policies = policies_of(runs)
    values = []
    for policy in policies:
        known = [estimate(getattr(run.ttft_parts_s, part) for run in of_policy(runs, policy)) for part in _PARTS]
        values.append([0.0 if estimated is None else estimated.mean * 1e3 for estimated in known])
    return _stacks(policies, values, _PART_NAMES, PART_COLOURS, "mean TTFT, ms", _ms_text, NO_TOKEN, totals=True)


def _ms_text(value: float) -> str:
    return f"{value:,.3g}" if value < 100 else f"{value:,.0f}"


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
    """Draw horizontal stacked bars, a row per policy; parts that are too thin have no number."""
    with style():
        figure, grid_axes = panels(1, 1, width=7.2, height=0.4 * max(len(policies), 1) + 0.75)
        axes = grid_axes[0][0]
        widest = max((sum(row) for row in values), default=0.0)
        for row, parts in enumerate(values):
            left = 0.0
            for part, colour in zip(parts, colours, strict=True):
                axes.barh(row, part, left=left, color=colour, height=0.7, edgecolor="white", linewidth=0.6)
                if part > 0.06 * widest:
                    axes.text(
                        left + part / 2, row, text_of(part), ha="center", va="center", fontsize=7.5, color=_on(colour)
                    )
                left += part
            if not left:
                axes.text(0, row, f" {empty}", va="center", color=FAINT)
            elif totals:
                axes.text(left, row, f" {text_of(left)}", va="center", fontsize=8, fontweight="bold")
        axes.set_xlim(0, widest * (1.1 if totals else 1) or 1)
        policy_rows(axes, policies)
        axes.set_xlabel(label)
        if names:
            figure.legend([Patch(color=colour) for colour in colours], list(names), loc="outside upper center", ncols=5)
    return figure


def _on(colour: str) -> str:
    """Return black or white, whichever is more readable on the colour (Rec. 709 luma)."""
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "#111111" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 130 else "#fefefe"


def link_utilisation(timelines: Mapping[str, Timeline], changes: _Changes = ()) -> Figure:
    """Draw own traffic over time as a share of a tier's capacity, as means of intervals: a panel per tier with traffic,
    a line per policy. `changes` of links are marked, (time, text); short ones are enlarged in a second column."""
    tiers = sorted({tier for timeline in timelines.values() for tier, shares in timeline.tier.items() if any(shares)})
    with style():
        if not tiers:
            return nothing(Figure(figsize=(7.2, 1.2)), "no transfer crossed the network")
        spans = _spans(timelines, changes)
        figure, grid_axes = panels(len(tiers), len(spans), width=7.2 / len(spans), height=1.35)
        for row, tier in enumerate(tiers):
            for column, (axes, span) in enumerate(zip(grid_axes[row], spans, strict=True)):
                _tier_lines(axes, timelines, tier, span, SAMPLES_SHOWN // len(spans) ** 2)
                axes.set_title(_LINK_NAMES[int(tier)] if column == 0 else "")
                _mark(axes, changes, words=row == 0 and column == len(spans) - 1)
                if row < len(tiers) - 1:
                    axes.tick_params(labelbottom=False)
        for axes in grid_axes[-1]:
            axes.set_xlabel("time, s")
        figure.supylabel("capacity in use, mean", fontsize=8.5)
        policy_legend(figure, list(timelines), plain_lines=True)
    return figure


def _spans(timelines: Mapping[str, Timeline], changes: _Changes) -> list[tuple[float, float]]:
    """Return the times of each column of panels: the whole run, and the changes with as much time before and after."""
    times = [at_s for timeline in timelines.values() for at_s in timeline.at_s]
    first, last = min(times, default=0.0), max(times, default=0.0)
    within = [at_s for at_s, _ in changes if first <= at_s <= last]
    whole = (first, last)
    if not within:
        return [whole]
    margin = max(max(within) - min(within), 0.05 * (last - first))
    detail = (max(first, min(within) - margin), min(last, max(within) + margin))
    return [whole, detail] if detail[1] - detail[0] <= _DETAIL_MOST * (last - first) else [whole]


def _within(
    at_s: Sequence[float], values: Sequence[float], span: tuple[float, float]
) -> tuple[Sequence[float], Sequence[float]]:
    """Return the samples within a span of time, and one more on each side."""
    count = min(len(at_s), len(values))
    low = max(int(np.searchsorted(at_s[:count], span[0])) - 1, 0)
    high = int(np.searchsorted(at_s[:count], span[1], side="right")) + 1
    return at_s[low : min(high, count)], values[low : min(high, count)]


def _width(order: int, lines: int, step: float = 1.3) -> float:
    """Return the width of a line; each is thinner than the one under it, so that equal lines are all visible."""
    return 0.9 + min(step, 4.0 / lines) * (lines - 1 - order)


def _limit(axes: Axes, span: tuple[float, float]) -> None:
    margin = 0.01 * (span[1] - span[0])
    if margin > 0:
        axes.set_xlim(span[0] - margin, span[1] + margin)


def _tier_lines(axes: Axes, timelines: Mapping[str, Timeline], tier: str, span: tuple[float, float], most: int) -> None:
    """Draw one tier's utilisation within a span of time."""
    highest = 0.0
    for order, (policy, timeline) in enumerate(timelines.items()):
        at_s, shares = thin(*_within(timeline.at_s, timeline.tier.get(tier, ()), span), most=most)
        width = _width(order, len(timelines), step=0.6)
        axes.plot(at_s, shares, color=line_style(policy).colour, linewidth=width, zorder=3 + order)
        highest = max(highest, max(shares, default=0.0))
    axes.set_ylim(0, highest * 1.1 or 1)
    _limit(axes, span)
    percent(axes.yaxis)
    grid(axes)


def threshold_over_time(timelines: Mapping[str, Timeline], changes: _Changes = ()) -> Figure:
    """Draw the lowest routing threshold over time, a line per policy; `changes` of links are marked, and short ones are
    enlarged in a second column."""
    with style():
        spans = _spans(timelines, changes)
        figure, (row,) = panels(1, len(spans), width=7.2 / len(spans), height=1.9)
        for column, (axes, span) in enumerate(zip(row, spans, strict=True)):
            for order, (policy, timeline) in enumerate(timelines.items()):
                at_s, tokens = _within(timeline.at_s, timeline.threshold_tokens, span)
                width, colour = _width(order, len(timelines)), line_style(policy).colour
                axes.step(at_s, tokens, where="post", color=colour, linewidth=width, zorder=3 + order)
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
            axes.yaxis.set_minor_locator(NullLocator())
            thousands(axes.yaxis)
            _limit(axes, span)
            grid(axes)
            _mark(axes, changes, words=column == len(spans) - 1)
            axes.set_xlabel("time, s")
        row[0].set_ylabel("tokens")
        policy_legend(figure, list(timelines), plain_lines=True)
    return figure


def _mark(axes: Axes, changes: _Changes, *, words: bool) -> None:
    """Draw vertical lines within the visible range, with their texts beside the upper end."""
    first, last = axes.get_xlim()
    for at_s, what in changes:
        if not first <= at_s <= last:
            continue
        axes.axvline(at_s, color=FAINT, linewidth=0.9, linestyle=(0, (3, 2)), zorder=2)
        if words:
            readable(_vertical(axes, at_s, what))
            _vertical(axes, at_s, what).set_zorder(21)  # an SVG file contains the words of a text without a halo only


def _vertical(axes: Axes, at_s: float, what: str) -> Annotation:
    """Write a text along a vertical line."""
    return axes.annotate(
        what,
        (at_s, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(2, -2),
        textcoords="offset points",
        va="top",
        fontsize=7,
        color=INK,
        rotation=90,
    )


def thin(at_s: Sequence[float], shares: Sequence[float], most: int = SAMPLES_SHOWN) -> tuple[list[float], list[float]]:
    """Return at most `most` samples: means of equally many neighbours (except the last). They keep the mean."""
    count = min(len(at_s), len(shares))
    stride = -(-count // most) if count else 1
    starts = range(0, count, stride)
    times = [float(np.mean(at_s[start : min(start + stride, count)])) for start in starts]
    return times, [float(np.mean(shares[start : min(start + stride, count)])) for start in starts]
