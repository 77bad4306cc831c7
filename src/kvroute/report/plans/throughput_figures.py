"""Figures of a plan: the two searches of PrfaaS Figure 5, egress need, throughput per price, and sensitivity."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from kvroute.planner.throughput.kv_throughput import egress_bytes_per_s
from kvroute.planner.throughput.plan import Plan, over_splits, over_thresholds
from kvroute.planner.throughput.search import KINDS, Kind
from kvroute.planner.throughput.sensitivity import price_point
from kvroute.report.drawing import FAINT, INK, grid, legend_below, panels, readable, style, thousands
from kvroute.report.plans.throughput_tables import TITLES
from kvroute.types import FloatArray

_COLOURS: dict[Kind, str] = {"prfaas": "#d55e00", "homogeneous": "#0072b2", "naive": "#8a8a8a"}
_PRFAAS, _PD_P, _PD_D = "#d55e00", "#0072b2", "#009e73"
_HIGH = 2.2
"""Curves that go to infinity are cut off at this multiple of the optimum."""


@dataclass(frozen=True, slots=True)
class _Curve:
    """Label and style of a line; the dashes distinguish it in grey print."""

    label: str
    colour: str
    dashes: str = "-"
    marker: str = ""


def searches(plan: Plan) -> Figure:
    """Draw Figure 5: throughput over (a) the split at the optimal threshold, (b) the threshold at the optimal split."""
    with style():
        figure, ((left, right),) = panels(1, 2, width=4.2, height=2.9)
        _splits(left, plan)
        _thresholds(right, plan)
    return figure


def _splits(axes: Axes, plan: Plan) -> None:
    """Draw the best of the splits with the same number of prefill instances."""
    rates, best = over_splits(plan), plan.optima["prfaas"]
    counts = rates.n_prefill.sum(axis=1)
    x = np.unique(counts)

    def highest(values: FloatArray) -> FloatArray:
        return np.array([values[counts == count].max() for count in x])

    top = best.lambda_max_per_s
    prefill = _Curve("prefill stages", _PD_P, "--", "s")
    _draw(axes, x, np.minimum(highest(rates.prefill_bound_per_s[0]), _HIGH * top), prefill)
    _draw(axes, x, np.minimum(highest(rates.pd_d_per_s), _HIGH * top), _Curve("Θ PD-D", _PD_D, "-.", "^"))
    _draw(axes, x, highest(rates.lambda_max_per_s[0]), _Curve("Λ max", INK, "-", "o"))
    _optimum(axes, float(best.cell.n_prefill.sum()), top)
    axes.set_title(f"(a) split, threshold {best.threshold_tokens:,.0f} tokens")
    axes.set_xlabel("prefill instances of the PD clusters")
    axes.set_ylabel("requests/s")
    axes.set_ylim(0, top * 1.75)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend_below(axes, 4.2)
    grid(axes)


def _thresholds(axes: Axes, plan: Plan) -> None:
    rates, best = over_thresholds(plan), plan.optima["prfaas"]
    top = best.lambda_max_per_s
    x = np.maximum(rates.thresholds, 1.0)
    _draw(axes, x, np.minimum(rates.prfaas_bound_per_s, 2 * _HIGH * top), _Curve("Θ PrfaaS / p", _PRFAAS, "--"))
    pd_p = np.minimum(rates.pd_p_bound_per_s[:, 0], 2 * _HIGH * top)
    _draw(axes, x, pd_p, _Curve("Θ PD-P / (1 − p)", _PD_P, ":"))
    _draw(axes, x, np.full(len(x), rates.pd_d_per_s[0]), _Curve("Θ PD-D", _PD_D, "-."))
    axes.plot(x, rates.lambda_max_per_s[:, 0], color=INK, label="Λ max", linewidth=2.2, zorder=4)
    _optimum(axes, max(best.threshold_tokens, 1.0), top)
    split = f"{int(best.cell.n_prefill.sum())} : {int(best.cell.n_decode.sum())}"
    axes.set_title(f"(b) threshold, split {split}")
    axes.set_xlabel("routing threshold t, tokens")
    axes.set_ylabel("requests/s")
    axes.set_ylim(0, top * _HIGH)
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    thousands(axes.xaxis)
    legend_below(axes, 4.2)
    grid(axes)


def egress_need(plan: Plan) -> Figure:
    """Draw eq. 2 over the size of each PrfaaS cluster, for offloaded and for all prompts, with the available egress."""
    with style():
        needs = plan.report.egress_need
        figure, rows = panels(1, len(needs), width=4.6, height=2.9)
        for axes, need in zip(rows[0], needs, strict=True):
            instance_gpus = plan.problem.gpus_per_instance
            gpus = np.geomspace(instance_gpus, max(10_000, 4 * need.gpus), 60)
            for gbps, curve in (
                (need.offloaded_gbps, _Curve("offloaded prompts", _PRFAAS)),
                (need.all_gbps, _Curve("all prompts", _PD_P, "--")),
            ):
                per_instance = gbps / need.gpus * instance_gpus
                _draw(axes, gpus, np.array([egress_bytes_per_s(n, instance_gpus, per_instance) for n in gpus]), curve)
            axes.axhline(need.available_gbps, color=_PD_D, linestyle="-.", label="available")
            axes.axvline(need.gpus, color=FAINT, linewidth=1, linestyle=":")
            axes.plot([need.gpus], [need.offloaded_gbps], "o", color=INK, label=f"{need.cluster}: {need.gpus:,} GPUs")
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_xlim(gpus[0] / 1.5, gpus[-1] * 1.5)
            axes.set_xlabel("GPUs of the PrfaaS cluster")
            axes.set_ylabel("minimum egress, Gbps")
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_minor_locator(NullLocator())
                thousands(axis)
            legend_below(axes, 4.6)
            grid(axes, "both")
    return figure


def cost(plan: Plan) -> Figure:
    """Draw requests per unit of price over the price of a PrfaaS GPU, with the alternatives."""
    with style():
        figure, ((axes,),) = panels(1, 1, width=5.0, height=2.9)
        factors = np.linspace(0.25, 4, 61)
        points = [price_point(plan.optima, float(factor)) for factor in factors]
        for kind, dashes in zip(KINDS, ("-", "--", ":"), strict=True):
            values = np.array([point.requests_per_price[kind] for point in points])
            _draw(axes, factors, values, _Curve(TITLES[kind], _COLOURS[kind], dashes))
        even = plan.report.sensitivity.break_even_factor
        if factors[0] < even < factors[-1]:
            level = plan.report.costs["homogeneous"].requests_per_price
            axes.plot([even], [level], "o", color=INK)
            readable(axes.annotate(f"even at {even:.2f}", (even, level), xytext=(6, 8), textcoords="offset points"))
        axes.axvline(1, color=FAINT, linewidth=1, linestyle=":")
        axes.set_xlabel("price of a PrfaaS GPU, times the plan's")
        axes.set_ylabel("requests per price unit")
        axes.set_ylim(bottom=0)
        thousands(axes.yaxis)
        legend_below(axes, 5.0)
        grid(axes)
    return figure


def sensitivity_lines(plan: Plan) -> Figure:
    """Draw throughput over bandwidth, length and spread of prompts: for a new search and for the plan's choice."""
    found = plan.report.sensitivity
    anew, same = _Curve("new plan", _PRFAAS, "-", "o"), _Curve("plan unchanged", FAINT, "--", "x")
    with style():
        figure, ((left, middle, right),) = panels(1, 3, width=3.9, height=2.7)
        gbps = np.array([point.available_gbps for point in found.egress])
        _draw(left, gbps, np.array([point.kept_per_s for point in found.egress]), same)
        _draw(left, gbps, np.array([point.lambda_max_per_s for point in found.egress]), anew)
        left.set_xscale("log")
        left.xaxis.set_minor_locator(NullLocator())
        left.set_xticks(gbps, [f"{value:g}" for value in gbps])
        left.set_xlabel("egress bandwidth, Gbps")
        used_gbps = plan.report.deployments["prfaas"].egress_gbps
        if used_gbps > 0:
            left.axvline(used_gbps, color=FAINT, linewidth=1, linestyle=":", label=f"the plan uses {used_gbps:.3g}")
        other = _Curve(TITLES["homogeneous"], _COLOURS["homogeneous"], ":", "s")
        for axes, points in ((middle, found.lengths), (right, found.spread)):
            factors = np.array([point.factor for point in points])
            _draw(axes, factors, np.array([point.kept_per_s for point in points]), same)
            _draw(axes, factors, np.array([point.homogeneous_per_s for point in points]), other)
            _draw(axes, factors, np.array([point.lambda_max_per_s for point in points]), anew)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        middle.set_xlabel("length of every prompt, times the plan's")
        right.set_xlabel("spread of lengths, times the plan's")
        for axes in (left, middle, right):
            axes.set_ylabel("Λ max, requests/s")
            axes.set_ylim(bottom=0)
            legend_below(axes, 3.9)
            grid(axes)
    return figure


def _draw(axes: Axes, x: FloatArray, y: FloatArray, curve: _Curve) -> None:
    axes.plot(x, y, color=curve.colour, linestyle=curve.dashes, marker=curve.marker or None, label=curve.label)


def _optimum(axes: Axes, x: float, y: float) -> None:
    axes.axvline(x, color=FAINT, linewidth=1, linestyle=":", zorder=1)
    axes.plot([x], [y], "o", color=_PRFAAS, markersize=7, zorder=5)
    readable(axes.annotate(f"{y:.2f}/s", (x, y), xytext=(-7, 7), textcoords="offset points", ha="right", color=INK))
