"""The page of `kvroute plan replicas`: verdict, figure, tables and every number."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
from matplotlib.figure import Figure

from kvroute.files.compressed_lines import written_whole
from kvroute.planner.replicas import ReplicaPlan
from kvroute.report.drawing import grid, legend_below, panels, style
from kvroute.report.page import picture, write_page
from kvroute.report.plans.replica_tables import day_grid, rates_grid, replica_choices, replica_verdict

_NOTE = "These are formulas for a steady rate. Simulate the cluster to see bursts, start-up times and the real network."


def write_replicas(plan: ReplicaPlan, out: Path, command: str) -> Path:
    """Write `out`/report.html, `out`/plan.json and the figure in `out`/figures; return the path of the page.

    Raises:
        InputError: the folder cannot be written.
    """
    page = write_page(
        "plan.html.j2",
        out / "report.html",
        title=f"{plan.cluster}: instances for {plan.model}",
        verdict=replica_verdict(plan),
        deployments=rates_grid(plan),
        tables=[day_grid(plan)],
        pictures=[picture(_day(plan), out, "day", "Instances over the day")],
        choices=replica_choices(plan),
        command=command,
        note=_NOTE,
    )
    with written_whole(out / "plan.json", "choose another folder") as part:
        part.write_bytes(msgspec.json.format(msgspec.json.encode(plan), indent=2) + b"\n")
    return page


def _day(plan: ReplicaPlan) -> Figure:
    hours = np.arange(len(plan.day.hours) + 1)
    with style():
        figure, ((axes,),) = panels(1, 1, width=6.0, height=2.9)
        for role, colour, dashes in (("prefill", "#0072b2", "-"), ("decode", "#009e73", "--")):
            counts = [getattr(row.need, role).replicas for row in plan.day.hours]
            axes.step(hours, [*counts, counts[-1]], where="post", color=colour, linestyle=dashes, label=role)
        axes.set_xlabel("hour of the day")
        axes.set_ylabel("instances")
        axes.set_ylim(bottom=0)
        axes.set_xlim(0, len(plan.day.hours))
        legend_below(axes, 6.0)
        grid(axes)
    return figure
