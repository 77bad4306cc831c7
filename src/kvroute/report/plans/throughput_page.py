"""The page of a plan: the optimum, its limiting stage, its sensitivity, and every number."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvroute.files.compressed_lines import written_whole
from kvroute.planner.throughput.plan import Plan
from kvroute.report.page import picture, write_page
from kvroute.report.plans.throughput_figures import cost, egress_need, searches, sensitivity_lines
from kvroute.report.plans.throughput_tables import grids, verdict

_NOTE = (
    "These are stage rates by formula (PrfaaS eq. 1 to 8), without simulation, queues and variance in time. A real "
    "system saturates at a lower rate."
)


def write_plan(plan: Plan, out: Path, command: str) -> Path:
    """Write `out`/report.html, `out`/plan.json and the figures as PNG and SVG in `out`/figures.

    Args:
        plan: the plan to show.
        out: folder, created if needed.
        command: the command that repeats the plan.

    Returns:
        The path of the page.

    Raises:
        InputError: the folder cannot be written.
    """
    captions = (
        (searches(plan), "search", "The search (PrfaaS Figure 5): over the split, and over the threshold"),
        (sensitivity_lines(plan), "sensitivity", "Throughput by bandwidth and by prompt length"),
        (cost(plan), "cost", "Requests per price unit by price of a PrfaaS GPU"),
        (egress_need(plan), "egress", "Minimum egress by size of the PrfaaS cluster (eq. 2)"),
    )
    first, *rest = grids(plan.report)
    page = write_page(
        "plan.html.j2",
        out / "report.html",
        title=f"{plan.problem.name}: a plan for prefill across datacenters",
        verdict=verdict(plan.report),
        deployments=first,
        tables=rest,
        pictures=[picture(figure, out, name, caption) for figure, name, caption in captions],
        choices=plan.report.choices,
        command=command,
        note=_NOTE,
    )
    _write_numbers(plan, out / "plan.json")
    return page


def _write_numbers(plan: Plan, path: Path) -> None:
    with written_whole(path, "choose another folder") as part:
        part.write_bytes(msgspec.json.format(msgspec.json.encode(plan.report), indent=2) + b"\n")
