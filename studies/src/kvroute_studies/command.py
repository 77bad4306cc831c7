"""`kvroute experiment`: repeats published evaluations on this machine or on Ray, cell by cell."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvroute.cli.choices import READINGS
from kvroute.cli.output import console, print_json, remarks
from kvroute.cli.quantities import listed
from kvroute.types import InputError
from kvroute_engine import renamed

if TYPE_CHECKING:
    from kvroute_studies.shared.cells import Experiment
    from kvroute_studies.shared.family import ExperimentFamily

_SEEDS = 5


@cache
def families() -> dict[str, ExperimentFamily[Any]]:
    """Return the experiments by publication; never-worse, aggregated, prefix-copies, autoscaling and accuracy are
    kvroute's."""
    from kvroute_studies.accuracy import command as experiment_accuracy
    from kvroute_studies.aggregated import command as experiment_alone
    from kvroute_studies.autoscaling import command as experiment_autoscaling
    from kvroute_studies.dualpath import command as experiment_dualpath
    from kvroute_studies.heroserve import command as experiment_heroserve
    from kvroute_studies.netkv import command as experiment_netkv
    from kvroute_studies.never_worse import command as experiment_never_worse
    from kvroute_studies.prefix_copies import command as experiment_copies
    from kvroute_studies.prfaas import command as experiment_prfaas

    return {
        "netkv": experiment_netkv.FAMILY,
        "prfaas": experiment_prfaas.FAMILY,
        "dualpath": experiment_dualpath.FAMILY,
        "never-worse": experiment_never_worse.FAMILY,
        "aggregated": experiment_alone.FAMILY,
        "prefix-copies": experiment_copies.FAMILY,
        "autoscaling": experiment_autoscaling.FAMILY,
        "heroserve": experiment_heroserve.FAMILY,
        "accuracy": experiment_accuracy.FAMILY,
    }


def experiment(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Experiments by name; netkv, prfaas, dualpath, heroserve or never-worse selects a whole group.",
            show_default=False,
        ),
    ] = None,
    reading_name: Annotated[
        str, typer.Option("--reading", help=f"Interpretation of the paper: {', '.join(READINGS)}.")
    ] = "paper",
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change an assumption, e.g. ecmp=flow or wan_gbps=50; repeat for several."),
    ] = None,
    profile: Annotated[
        list[str] | None, typer.Option(help="Run only this profile, or those of a pattern; repeat for several.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Trace file, e.g. Mooncake's; default: a generated trace.")] = None,
    trace_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder of recorded traces for never-worse, of measured runs for accuracy (or set KVROUTE_TRACES).",
            show_default=False,
        ),
    ] = None,
    predict: Annotated[
        Path | None,
        typer.Option(
            help="With accuracy: predict the cases of this file, in the form of the measured runs without results.",
            show_default=False,
        ),
    ] = None,
    cell: Annotated[
        str | None,
        typer.Option(help="Run one cell: profile, axis values, policy, e.g. 'rag,1.0,netkv'."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**31 - 1, help="Run only this seed; with --seeds, the first one.")
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1, max=10_000, help="Number of seeds, starting at --seed or 0; default: 5.", show_default=False
        ),
    ] = None,
    on: Annotated[str, typer.Option(help="Where to run: local (all cores) or ray.")] = "local",
    workers: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Number of processes; default: one per core.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for results, figures and pages; finished cells in it are not run again.")
    ] = Path("results"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Run published evaluations. After an interruption, the next start continues with the missing cells.

    Examples:

    [bold]kvroute experiment netkv-load --reading paper[/bold]

    [bold]kvroute experiment netkv-load --cell 'rag,1.0,netkv' --seed 3[/bold]

    [bold]kvroute experiment prfaas --trace conversation_trace.jsonl.zst --out results[/bold]

    [bold]kvroute experiment never-worse --seeds 8 --trace-dir traces[/bold]

    [bold]kvroute experiment accuracy --predict cases.json --json[/bold]
    """
    from kvroute.planner.comparison.parallel import check_where
    from kvroute_studies.shared.family import run_family
    from kvroute_studies.shared.sweeps import RunOptions

    if not names:
        _list(as_json)
        return
    family, chosen = _chosen(names)
    if predict is not None:
        if family != "accuracy":
            raise InputError(f"{family} does not support this option", where="--predict", hint="only accuracy predicts")
        from kvroute_studies.accuracy.command import print_predictions

        print_predictions(predict, trace_dir, seed, as_json)
        return
    if trace_dir is not None and not families()[family].reads_trace_folder:
        readers = " and ".join(name for name, family in families().items() if family.reads_trace_folder)
        hint = f"omit it; only {readers} reads a folder of traces"
        raise InputError(f"{family} does not support this option", where="--trace-dir", hint=hint)
    check_where(on)
    options = RunOptions(
        reading=reading_name,
        changes=changes or (),
        profiles=listed(profile),
        trace=trace,
        cell=cell,
        seeds=_seeds_of(seed, seeds),
        on=on,
        workers=workers,
        out=out,
        as_json=as_json,
        trace_dir=trace_dir,
    )
    try:
        run_family(families()[family], chosen, options)
    except KeyboardInterrupt:
        remarks().print(f"Stopped. Finished cells are kept in {out}; run the same command again to continue.")
        raise typer.Exit(130) from None


def _seeds_of(seed: int | None, seeds: int | None) -> tuple[int, ...]:
    first, count = seed or 0, seeds if seeds is not None else 1 if seed is not None else _SEEDS
    return tuple(range(first, first + count))


def _list(as_json: bool) -> None:
    from kvroute.report.grid import UNKNOWN, Grid, GridEntry, Heading, rich_table

    known = [experiment for family in families().values() for experiment in family.experiments.values()]
    if as_json:
        print_json(
            {
                "experiments": [
                    {"name": experiment.name, "title": experiment.title, "source": experiment.source}
                    for experiment in known
                ]
            }
        )
        return
    rows = []
    for experiment in known:
        axes = "; ".join(
            f"{name}: {', '.join(f'{value:,g}' for value in values)}" for name, values in experiment.axes.items()
        )
        rows.append(
            tuple(
                map(
                    GridEntry,
                    (
                        experiment.name,
                        experiment.title,
                        experiment.source,
                        axes or UNKNOWN,
                        ", ".join(experiment.policies),
                    ),
                )
            )
        )
    # Users type the names next, so other columns are dropped first.
    headings = (
        Heading("experiment"),
        *(Heading(title, prose=True, drop=drop) for title, drop in (("title", 0), ("source", 3), ("axes", 2))),
        Heading("policies", prose=True, drop=1),
    )
    shown = console()
    shown.print(rich_table(Grid("", headings, tuple(rows)), shown.width))


def _chosen(names: Sequence[str]) -> tuple[str, list[Experiment]]:
    """Return the publication of all names, and the experiments that they select."""
    groups = {family: members.experiments for family, members in families().items()}
    chosen: dict[str, Experiment] = {}
    selected: dict[str, None] = {}
    for given in names:
        name = renamed.EXPERIMENTS.get(given, given)
        if name != given:
            remarks().print(f"experiment {given!r} is now called {name!r}", soft_wrap=True)
        family = next((family for family, known in groups.items() if name == family or name in known), None)
        if family is None:
            known = [*groups, *(experiment for experiments in groups.values() for experiment in experiments)]
            near = get_close_matches(name, known, 1)
            hint = (f"did you mean {near[0]}? " if near else "") + f"choose among {', '.join(known)}"
            raise InputError(f"there is no experiment {name!r}", hint=hint)
        selected[family] = None
        chosen |= groups[family] if name == family else {name: groups[family][name]}
    if len(selected) > 1:
        what = f"{' and '.join(selected)} are different publications"
        raise InputError(what, hint="run them one after the other; they have different profiles and settings")
    return next(iter(selected)), list(chosen.values())
