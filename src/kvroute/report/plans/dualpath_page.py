"""The page of a DualPath plan: its verdict, figures, the utilisation of every resource, and every number."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvroute.files.compressed_lines import written_whole
from kvroute.planner.dualpath.plan import DualPathPlan, over_ratios
from kvroute.planner.dualpath.problem import DualPathProblem
from kvroute.report.page import picture, write_page
from kvroute.report.plans.dualpath_figures import rates_by_ratio, utilisation_bars
from kvroute.report.plans.dualpath_tables import dualpath_verdict, utilisation_grid

_NOTE = (
    "These are rates by formula (DualPath 4.2) with an even load and an uncongested compute network, without queues. A "
    "real system saturates at a lower rate."
)


def write_dualpath(problem: DualPathProblem, plan: DualPathPlan, out: Path, command: str) -> Path:
    """Write `out`/report.html, `out`/plan.json and the figures as PNG and SVG in `out`/figures.

    Args:
        problem: what was planned for.
        plan: its plan.
        out: folder, created if needed.
        command: the command that repeats the plan.

    Returns:
        The path of the page.

    Raises:
        InputError: the folder cannot be written.
    """
    points = over_ratios(problem)
    captions = (
        (rates_by_ratio(problem, plan, points), "rates", "Turns over the ratio of prefill to decode nodes"),
        (utilisation_bars(plan), "utilisation", "Share of each resource in use at the highest rate of reading"),
    )
    page = write_page(
        "plan.html.j2",
        out / "report.html",
        title=f"{plan.name}: a plan for reading cached KV",
        verdict=dualpath_verdict(plan),
        deployments=utilisation_grid(plan),
        tables=[],
        pictures=[picture(figure, out, name, caption) for figure, name, caption in captions],
        choices=plan.choices,
        command=command,
        note=_NOTE,
    )
    with written_whole(out / "plan.json", "choose another folder") as part:
        document = msgspec.to_builtins(plan) | {"over_ratios": msgspec.to_builtins(points)}
        part.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
    return page
