"""Figures of the matrix: each cell's ratio to the rivals, TTFT against TBT, and the contribution of each term."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from kvroute.planner.comparison.cells import Record
from kvroute.report.drawing import FAINT, INK, grid, legend_above, line_style, nothing, panels, plain, style
from kvroute_studies.never_worse.cases import CASES
from kvroute_studies.never_worse.findings import OURS, PolicyPairing, pairs, tbt_s, terms
from kvroute_studies.never_worse.verdicts import RIVALS

_LYING = "#b5472f"
_RATIOS = (0.5, 1.16)
_WORTH = (0.94, 1.16)
"""Limits of the x axis; values outside are drawn as an arrow at the edge."""
_TRADE_MAX = 60.0
"""Upper limit of the change in mean TTFT, in percent."""


def ratios(matrix: Sequence[Record]) -> Figure:
    """Draw foresight's mean TTFT over each rival's, a dot per cell with two standard errors, by axis of the matrix."""
    found = {rival: pairs(matrix, rival) for rival in RIVALS}
    axes_of = list(dict.fromkeys(CASES[pairing.case].axis for some in found.values() for pairing in some))
    with style():
        figure, (row,) = panels(1, len(RIVALS), width=4.6, height=max(2.0, 0.42 * len(axes_of)), sharey=True)
        for axes, rival in zip(row, RIVALS, strict=True):
            for number, axis in enumerate(axes_of):
                some = sorted(
                    (e for e in found[rival] if CASES[e.case].axis == axis), key=lambda pairing: pairing.ratio
                )
                for place, pairing in enumerate(some):
                    _dot(axes, pairing, number + 0.7 * ((place + 0.5) / len(some) - 0.5))
            axes.axvline(1.0, color=INK, linewidth=1)
            axes.set_xscale("log")
            axes.set_xlim(*_RATIOS)
            axes.set_xticks([0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1], ["0.5", "0.6", "0.7", "0.8", "0.9", "1", "1.1"])
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_xlabel(f"mean TTFT, foresight / {rival}")
            axes.set_yticks(range(len(axes_of)), axes_of)
            axes.set_ylim(len(axes_of) - 0.4, -0.6)
            grid(axes, "x")
    return figure


def _dot(axes: Axes, pairing: PolicyPairing, y: float) -> None:
    error = 2 * pairing.error / pairing.theirs if pairing.error and pairing.theirs else 0.0
    colour = _LYING if CASES[pairing.case].oracle == "lying" else line_style(pairing.second).colour
    if pairing.ratio < _RATIOS[0]:
        axes.plot([_RATIOS[0]], [y], "<", color=colour, markersize=4, clip_on=False)
        return
    marker = "D" if pairing.is_higher else "o"
    axes.errorbar([pairing.ratio], [y], xerr=[error], fmt=marker, color=colour, markersize=3, linewidth=0.8)


def trade(matrix: Sequence[Record]) -> Figure:
    """Draw a dot per cell: change in mean TTFT against change in TBT of foresight and NetKV, both relative to CLA*."""
    with style():
        figure, ((axes,),) = panels(1, 1, width=6.2, height=3.4)
        for name in ("netkv", OURS):
            ttft = {pair.case: pair.ratio - 1 for pair in pairs(matrix, "cla", first=name)}
            tbt = {pair.case: pair.difference * 1e3 for pair in pairs(matrix, "cla", tbt_s, first=name)}
            both = [case for case in ttft if case in tbt]
            if not both:
                return nothing(figure, "no cell has both")
            x, y = [min(100 * ttft[case], _TRADE_MAX) for case in both], [tbt[case] for case in both]
            axes.plot(
                x, y, line_style(name).marker, color=line_style(name).colour, markersize=3.5, label=name, alpha=0.8
            )
        axes.axhline(0, color=FAINT, linewidth=1)
        axes.axvline(0, color=FAINT, linewidth=1)
        axes.set_xlabel(f"mean TTFT compared with CLA*, % ({_TRADE_MAX:g}: that much or more)")
        axes.set_ylabel("TBT against CLA*, ms")
        legend_above(figure, axes)
        grid(axes, "both")
    return figure


def worth(ablation: Sequence[Record], matrix: Sequence[Record]) -> Figure:
    """Draw geometric mean (bar) and worst cell (diamond) of mean TTFT over the better rival's, for each term left out.
    Values beyond the right edge are printed there as numbers."""
    found = terms(ablation, matrix)
    with style():
        figure, ((axes,),) = panels(1, 1, width=6.4, height=max(1.6, 0.24 * len(found)))
        if not found:
            return nothing(figure, "no run without a term")
        for number, part in enumerate(found):
            axes.barh(number, part.mean - 1, left=1, color="#86bcd8", height=0.65)
            if part.worst <= _WORTH[1]:
                axes.plot([part.worst], [number], "D", color=_LYING, markersize=4)
            else:
                axes.plot([_WORTH[1]], [number], ">", color=_LYING, markersize=4, clip_on=False)
                axes.annotate(
                    f"{part.worst:.3g}",
                    (_WORTH[1], number),
                    (-5, 0),
                    textcoords="offset points",
                    ha="right",
                    va="center",
                )
        axes.axvline(1.0, color=INK, linewidth=1)
        axes.set_yticks(
            range(len(found)), [plain(part.variant if part.variant != OURS else "everything") for part in found]
        )
        axes.set_ylim(len(found) - 0.4, -0.6)
        axes.set_xlim(*_WORTH)
        axes.set_xlabel("mean TTFT divided by the better rival's: geometric mean (bar), worst cell")
        grid(axes, "x")
    return figure
