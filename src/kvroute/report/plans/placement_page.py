"""The page of a placement: verdict, picture, instances, constraints, alternatives, and a cluster file."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvroute.files.compressed_lines import written_whole
from kvroute.planner.placement.output import cluster_file, launch_commands
from kvroute.planner.placement.plan import Planned
from kvroute.report.page import picture, write_page
from kvroute.report.plans.placement_figures import placement_figure
from kvroute.report.plans.placement_tables import (
    alternatives_grid,
    bounds_grid,
    phases_grid,
    placement_verdict,
    simulation_grid,
)

_NOTE = (
    "Rates are by formula: all-reduces and KV transfers on the cluster's links, M/G/1 queues at prefill instances, "
    "Little's law and KV memory at decode instances. docs/placement.md has the equations."
)
_ANOTHER = "choose another folder"


def write_placement(planned: Planned, out: Path, command: str) -> Path:
    """Write `out`/report.html, plan.json, cluster.yaml, launch.sh and the figure as PNG and SVG in `out`/figures.

    Args:
        planned: the plan.
        out: folder, created if needed.
        command: the command that repeats the plan.

    Returns:
        The path of the page.

    Raises:
        InputError: the folder cannot be written.
    """
    plan = planned.report
    grids = [bounds_grid(plan), alternatives_grid(plan), simulation_grid(plan)]
    page = write_page(
        "plan.html.j2",
        out / "report.html",
        title=f"{plan.model} on {plan.name}: a placement",
        verdict=placement_verdict(plan),
        deployments=phases_grid(plan),
        tables=[grid for grid in grids if grid is not None],
        pictures=[picture(placement_figure(planned), out, "placement", "GPUs by server, with their instance")],
        choices=plan.choices,
        command=command,
        note=_NOTE,
    )
    with written_whole(out / "plan.json", _ANOTHER) as part:
        part.write_bytes(msgspec.json.format(msgspec.json.encode(plan), indent=2) + b"\n")
    with written_whole(out / "cluster.yaml", _ANOTHER) as part:
        part.write_text(cluster_file(planned.problem, planned.instances).to_yaml(), encoding="utf-8")
    with written_whole(out / "launch.sh", _ANOTHER) as part:
        part.write_text(_launch_script(planned), encoding="utf-8")
    return page


def _launch_script(planned: Planned) -> str:
    """Return the commands of all instances; each is for one server, so the file is not one script to run."""
    lines = ["# One command for each server of each instance; run it on the server named at its end."]
    for instance in planned.instances:
        lines += [f"# {instance.name}", *launch_commands(planned.problem, instance)]
    return "\n".join(lines) + "\n"
