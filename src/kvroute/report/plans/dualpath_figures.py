"""Figures of a DualPath plan: utilisation of every resource, and turns over the ratio of prefill to decode nodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kvroute.planner.dualpath.plan import DualPathPlan, RatioPoint
from kvroute.planner.dualpath.problem import DualPathProblem
from kvroute.report.drawing import FAINT, INK, grid, legend_below, panels, percent, style, thousands
from kvroute.report.plans.dualpath_tables import by_utilisation

_POOLED, _PREFILL_ONLY, _COMPUTE = "#0072b2", "#86bcd8", "#d55e00"
_INTERVAL = "#f2c14e"
_BAR = 0.38
_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)


def utilisation_bars(plan: DualPathPlan) -> Figure:
    """Draw two bars for each resource, the most used first: with both sides reading, and with prefill nodes only."""
    names = by_utilisation(plan)
    with style():
        figure, ((axes,),) = panels(1, 1, width=6.4, height=0.36 * len(names) + 0.7)
        rows = np.arange(len(names))
        for found, place, colour, label in (
            (plan.utilisation, rows - _BAR / 2, _POOLED, "both sides read"),
            (plan.utilisation_prefill_only, rows + _BAR / 2, _PREFILL_ONLY, "only prefill nodes read"),
        ):
            shares = [found[name] for name in names]
            axes.barh(place, shares, _BAR, color=colour, label=label)
            for y, share in zip(place, shares, strict=True):
                text, place_pt = f"{100.0 * share:.3g}%", (3, 0)
                axes.annotate(text, (share, y), place_pt, textcoords="offset points", va="center", fontsize=7.5)
        axes.axvline(1.0, color=FAINT, linewidth=1, linestyle=":")
        axes.set_yticks(rows, names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xlim(0, 1.1)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("share in use at the highest rate of reading")
        percent(axes.xaxis)
        grid(axes, "x")
        legend_below(axes, 5.0)
    return figure


def rates_by_ratio(problem: DualPathProblem, plan: DualPathPlan, points: Sequence[RatioPoint]) -> Figure:
    """Draw the turns per second that storage delivers and that the prefill GPUs compute, over the ratio of prefill to
    decode nodes with the same number of nodes. Shaded: the ratios at which all storage NICs can read at full rate."""
    turn_bytes = problem.turn_cached_bytes
    ratios = np.array([point.ratio for point in points])
    pooled = np.array([point.rate_bytes_per_s.pooled for point in points]) / turn_bytes
    only = np.array([point.rate_bytes_per_s.prefill_only for point in points]) / turn_bytes
    compute = np.array([point.compute_turns_per_s for point in points])
    with style():
        figure, ((axes,),) = panels(1, 1, width=6.4, height=3.4)
        if plan.pd_interval is not None:
            high = ratios[-1] if plan.pd_interval.high is None else plan.pd_interval.high
            low = max(plan.pd_interval.low, ratios[0])
            axes.axvspan(low, high, color=_INTERVAL, alpha=0.22, linewidth=0, label="all storage NICs at full rate")
        axes.plot(ratios, pooled, color=_POOLED, linewidth=2.2, label="storage, both sides read")
        axes.plot(ratios, only, color=_POOLED, linestyle="--", label="storage, only prefill nodes read")
        top = max(pooled.max(), only.max())
        above = compute.min() > 2.0 * top
        limit = "compute limit, above this range" if above else "compute limit of the prefill GPUs"
        axes.plot(ratios, compute, color=_COMPUTE, linestyle="-.", label=limit)
        own = problem.prefill_nodes / problem.decode_nodes
        axes.axvline(own, color=FAINT, linewidth=1, linestyle=":")
        marks = f"this plan, {problem.prefill_nodes} : {problem.decode_nodes}"
        reads = [plan.rate_bytes_per_s.pooled / turn_bytes, plan.rate_bytes_per_s.prefill_only / turn_bytes]
        axes.plot([own] * 3, [*reads, plan.turns_per_s.compute], "o", color=INK, label=marks, zorder=5)
        axes.set_xscale("log")
        axes.set_xlim(ratios[0], ratios[-1])
        axes.xaxis.set_major_locator(FixedLocator([tick for tick in _TICKS if ratios[0] <= tick <= ratios[-1]]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        nodes = problem.prefill_nodes + problem.decode_nodes
        axes.set_xlabel(f"prefill nodes per decode node, {nodes:,} nodes together")
        axes.set_ylabel("turns/s")
        axes.set_ylim(0, 1.08 * (top if above else max(top, min(compute.max(), 2.0 * top))))
        gigabytes = axes.secondary_yaxis(
            "right",
            functions=(
                lambda turns: np.multiply(turns, turn_bytes / 1e9),
                lambda rate: np.divide(rate, turn_bytes / 1e9),
            ),
        )
        gigabytes.set_ylabel("KV read from storage, GB/s")
        for axis in (axes.yaxis, gigabytes.yaxis):
            thousands(axis)
        legend_below(axes, 6.4)
        grid(axes)
    return figure
