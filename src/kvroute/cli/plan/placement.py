"""`kvroute plan placement`: tensor-parallel groups, schemes and the rate of requests under SLOs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from kvroute.cli.choices import GROUPINGS
from kvroute.cli.output import console, make_folder, print_json, remarks
from kvroute.cli.quantities import DURATION, TPOT_MAX_S, seconds
from kvroute.types import InputError

if TYPE_CHECKING:
    from kvroute.control import ControlSpec
    from kvroute.planner.placement.grouping import Method
    from kvroute.planner.placement.plan import Planned
    from kvroute.topology import ClusterFile

EQUATIONS = ("corrected", "literal")


def placement(
    cluster: Annotated[
        Path, typer.Argument(help="Cluster file (YAML) with a section `placement`.", show_default=False)
    ],
    model: Annotated[str, typer.Option("--model", help="A preset or a config.json.", show_default=False)],
    ttft: Annotated[
        float,
        typer.Option("--ttft", parser=seconds(), metavar=DURATION, help="SLO of the first token.", show_default=False),
    ],
    tpot: Annotated[
        float,
        typer.Option(
            "--tpot",
            parser=seconds(most=TPOT_MAX_S),
            metavar=DURATION,
            help="SLO of each further token.",
            show_default=False,
        ),
    ],
    grouping: Annotated[
        str, typer.Option("--grouping", help=f"How GPUs are grouped: {', '.join(GROUPINGS)} (needs kvroute-studies).")
    ] = "milp",
    equations: Annotated[
        str,
        typer.Option(
            "--equations",
            help="`literal` also evaluates the equations of HeroServe as published (needs kvroute-studies).",
        ),
    ] = "corrected",
    no_simulation: Annotated[
        bool, typer.Option("--no-simulation", help="Do not simulate the chosen placement.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for the report, the picture, a cluster file and launch commands."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Find groups of GPUs, tensor and pipeline parallelism, all-reduce schemes, and the rate that they sustain.

    The cluster file describes servers, NVLink, NICs and switches, and in its section `placement` the kinds of GPUs and
    the lengths of requests. GPUs of the file's instances count as used. The placement that is found is simulated, with
    the policies of the file's section `gateway`, or with `foresight` if it has none.

    Example: [bold]kvroute plan placement examples/heroserve-testbed.yaml --model opt-66b --ttft 2.5s --tpot 0.1s[/bold]
    """
    from kvroute.planner.placement.plan import plan_placement
    from kvroute.planner.placement.problem import Objective, read_placement

    _one_of(grouping, GROUPINGS, "--grouping")
    _one_of(equations, EQUATIONS, "--equations")
    for name, limit_s in (("--ttft", ttft), ("--tpot", tpot)):
        if not limit_s > 0.0:
            raise InputError("the limit is not above 0", where=name, hint="give a time, such as 150 ms")
    problem = read_placement(cluster, model, Objective(ttft, tpot))
    if out is not None:
        make_folder(out, "--out")
    planned = plan_placement(
        problem,
        cast("Method", grouping),
        literal=equations == "literal",
        simulates=not no_simulation,
        spec=_spec(problem.cluster.file, str(cluster)),
    )
    if as_json:
        print_json(planned.report)
    else:
        _print(planned)
    if out is not None:
        words = [str(cluster), "--model", model, "--ttft", f"{ttft:g}s", "--tpot", f"{tpot:g}s", "--grouping", grouping]
        command = shlex.join(["kvroute", "plan", "placement", *words, "--equations", equations, "--out", str(out)])
        from kvroute.report.plans.placement_page import write_placement  # its import of plots takes a second

        remarks().print(f"Report: {write_placement(planned, out, command)}", highlight=False, markup=False)


def _spec(file: ClusterFile, source: str) -> ControlSpec:
    """Return the configuration of the core that the file's `gateway` section gives; without one, that for pairs."""
    from kvroute.planner.placement.simulation import PAIRS
    from kvroute.serve.config.modelled import simulated_spec
    from kvroute.serve.config.preflight import settings_of
    from kvroute.topology.reading.assembly import read_text

    if not file.gateway:
        return PAIRS
    return simulated_spec(settings_of(read_text(source), source, None))


def _one_of(value: str, known: tuple[str, ...], option: str) -> None:
    if value not in known:
        raise InputError(f"{value!r} is not known", where=option, hint=f"choose one of {', '.join(known)}")


def _print(planned: Planned) -> None:
    from kvroute.report.grid import rich_table
    from kvroute.report.plans.placement_tables import (
        alternatives_grid,
        bounds_grid,
        phases_grid,
        placement_verdict,
        simulation_grid,
    )

    plan, shown = planned.report, console()
    shown.print(placement_verdict(plan), highlight=False, markup=False)
    for grid in (phases_grid(plan), bounds_grid(plan), alternatives_grid(plan), simulation_grid(plan)):
        if grid is not None:
            shown.print(rich_table(grid, shown.width))
    for phase, commands in plan.launch.items():
        typer.echo(f"\nThe first {phase} instance:")
        typer.echo("\n".join(commands))
    typer.echo("")
    for choice in plan.choices:
        shown.print(f"- {choice}", highlight=False, markup=False)
