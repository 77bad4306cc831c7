"""`kvroute plan replicas`: prefill and decode instances over the request rate, and GPU-hours of a day."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kvroute.cli.output import console, make_folder, print_json, remarks, tell
from kvroute.cli.quantities import DURATION, RATE, TPOT_MAX_S, per_second, seconds
from kvroute.types import InputError

if TYPE_CHECKING:
    from kvroute.planner.comparison.served import ServedFile
    from kvroute.planner.replicas import ReplicaPlan
    from kvroute.policies.fleet.replicas import ReplicaTarget

SCALING = "autoscaling"
_OF_FILE = "default: as `gateway.autoscaling` of the file says"
_GENERATED = 4_000


def replicas(
    cluster: Annotated[Path, typer.Argument(help="Cluster file (YAML).", show_default=False)],
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate",
            parser=per_second(),
            metavar=RATE,
            help="Mean request rate of the day, e.g. 6/s; default: that of the trace.",
            show_default=False,
        ),
    ] = None,
    workload: Annotated[
        Path | None,
        typer.Option("--workload", help="Trace file with lengths and prefixes; default: a generated one."),
    ] = None,
    hourly: Annotated[
        str,
        typer.Option(
            "--hourly", help="24 relative rates of the hours, separated by commas, or `trace`.", show_default=False
        ),
    ] = "",
    ttft: Annotated[
        float | None,
        typer.Option(
            "--ttft",
            parser=seconds(1e-3),
            metavar=DURATION,
            help=f"SLO of the first token; {_OF_FILE} (2 s).",
            show_default=False,
        ),
    ] = None,
    tpot: Annotated[
        float | None,
        typer.Option(
            "--tpot",
            parser=seconds(1e-6, TPOT_MAX_S),
            metavar=DURATION,
            help=f"SLO of each further token; {_OF_FILE} (any).",
            show_default=False,
        ),
    ] = None,
    attainment: Annotated[
        float | None,
        typer.Option("--attainment", help=f"Share of the requests that must meet both; {_OF_FILE} (0.9)."),
    ] = None,
    utilisation: Annotated[
        float | None,
        typer.Option("--utilisation", help=f"Highest planned utilisation of any resource; {_OF_FILE} (0.8)."),
    ] = None,
    cache: Annotated[bool, typer.Option(help="Count the prefixes of the trace as cached.")] = True,
    model: Annotated[str, typer.Option("--model", help="Model, if the cluster file has several.")] = "",
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the report page, figure and numbers.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Compute how many prefill and decode instances a request rate needs, and the GPU-hours of a day.

    Timings, batch, KV memory and network come from the cluster file; the number of its instances does not matter. The
    same functions decide in the gateway (section `autoscaling`) and in simulations.

    Example: [bold]kvroute plan replicas examples/fat-tree-64gpu.yaml --rate 6/s --ttft 5s --tpot 30ms[/bold]
    """
    from kvroute.planner.comparison.served import served_file
    from kvroute.planner.replicas import plan_replicas
    from kvroute.sim.workload import generate, read
    from kvroute.sim.workload.diurnal import shape_of

    served = served_file(str(cluster))
    options = {"ttft_s": ttft, "tpot_s": tpot, "attainment": attainment, "utilisation_max": utilisation}
    target = _target(served, options)
    if workload is None and rate is None:
        raise InputError("no request rate is given", where="--rate", hint="give --rate, or a trace with --workload")
    trace = read(workload) if workload is not None else generate(_GENERATED, seed=0)
    tell(trace.remarks)
    rate_per_s = rate if rate is not None else trace.rate_per_s
    if not rate_per_s:
        raise InputError("the trace has no request rate", where="--workload", hint="give --rate")
    shape = shape_of(trace) if hourly == "trace" else _shape(hourly)
    plan = plan_replicas(served.cluster, trace, target, rate_per_s=rate_per_s, hourly=shape, cached=cache, model=model)
    if out is not None:
        make_folder(out, "--out")
    if as_json:
        print_json(msgspec.to_builtins(plan))
    else:
        _print(plan)
    if out is not None:
        from kvroute.report.plans.replica_page import write_replicas  # its import of plots takes a second

        page = write_replicas(plan, out, shlex.join(["kvroute", "plan", "replicas", str(cluster), "--out", str(out)]))
        remarks().print(f"Report: {page}", highlight=False, markup=False)


def _target(served: ServedFile, options: Mapping[str, float | None]) -> ReplicaTarget:
    """Return the target of the file's section `gateway.autoscaling`, else of its policy, with the options, and print
    which of the section's values these replace."""
    from kvroute.policies import TARGETS
    from kvroute.policies.fleet.replicas import ReplicaTarget
    from kvroute.serve.config.settings import SECTION
    from kvroute.topology import duration_text

    section, targets = served.gateway.autoscaling, served.gateway.policy_parameters()
    of_policy = {f"{name}_s": targets[name] for name in TARGETS if targets.get(name)}
    target = section.spec().target if section is not None else msgspec.structs.replace(ReplicaTarget(), **of_policy)
    given = {name: value for name, value in options.items() if value is not None}
    written = served.cluster.file.gateway.get(SCALING, {})
    for name, value in given.items():
        key = name.removesuffix("_s").removesuffix("_max")
        if key in written and getattr(target, name) != value:
            text = duration_text(value) if name.endswith("_s") else f"{value:g}"
            tell([f"--{key} {text} replaces {SECTION}.{SCALING}.{key}: {written[key]}"])
    if served.gateway.layerwise:
        tell([f"not modelled: {SECTION}.layerwise"])
    return msgspec.structs.replace(target, **given)


def _shape(text: str) -> tuple[float, ...]:
    from kvroute.planner.replicas import HOURS
    from kvroute.sim.workload.diurnal import DIURNAL

    if not text:
        return DIURNAL
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if len(numbers) != HOURS or not all(0.0 <= number < 1e12 for number in numbers) or not sum(numbers) > 0.0:
        what = f"{text!r} is not a list of 24 rates"
        raise InputError(what, where="--hourly", hint="write 24 numbers separated by commas, or `trace`")
    return numbers


def _print(plan: ReplicaPlan) -> None:
    from kvroute.report.grid import rich_table
    from kvroute.report.plans.replica_tables import day_grid, rates_grid, replica_choices, replica_verdict

    shown = console()
    shown.print(replica_verdict(plan), highlight=False, markup=False)
    for grid in (rates_grid(plan), day_grid(plan)):
        shown.print(rich_table(grid, shown.width))
    for choice in replica_choices(plan):
        shown.print(f"- {choice}", highlight=False, markup=False)
