"""`kvroute experiment`: published evaluations, run again on this machine or on Ray, cell by cell."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.table import Table

from kvroute.cli.output import console, make_folder, print_json, progress_bar, remarks
from kvroute.experiments.cells import Cell, Experiment, Record
from kvroute.experiments.netkv import EXPERIMENTS, PROFILES, cells
from kvroute.experiments.readings import READINGS, reading
from kvroute.experiments.runner import run_cells
from kvroute.experiments.setup import Study, check_trace, config_of, run_cell
from kvroute.experiments.tuning import Tuned, tune
from kvroute.report.tables import experiment_table
from kvroute.types import InputError


def experiment(
    names: Annotated[
        list[str] | None,
        typer.Argument(help=f"Which: {', '.join(EXPERIMENTS)}, or netkv for all of them.", show_default=False),
    ] = None,
    reading_name: Annotated[
        str, typer.Option("--reading", help=f"How the paper is read: {', '.join(READINGS)}.")
    ] = "paper",
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a field of the reading, e.g. ecmp=flow; repeat for several."),
    ] = None,
    profile: Annotated[list[str] | None, typer.Option(help="Only these profiles; repeat for several.")] = None,
    trace: Annotated[Path | None, typer.Option(help="A Mooncake trace; without it one is generated.")] = None,
    cell: Annotated[
        str | None,
        typer.Option(help="One cell: profile, axis values, policy, e.g. 'rag,1.0,netkv'."),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**31 - 1, help="Only this seed.")] = None,
    seeds: Annotated[int, typer.Option(min=1, max=10_000, help="Seeds 0 to N-1.")] = 5,
    on: Annotated[str, typer.Option(help="Where to run: local (all cores) or ray.")] = "local",
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; default one per core.")] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for results, figures and pages; finished cells in it are not run again.")
    ] = Path("results"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Run published evaluations. Interrupt at will: the next start goes on where this one stopped.

    Examples:

    [bold]kvroute experiment netkv-load --reading paper[/bold]

    [bold]kvroute experiment netkv-load --cell 'rag,1.0,netkv' --seed 3[/bold]

    [bold]kvroute experiment netkv --trace conversation_trace.jsonl.zst --out results[/bold]
    """
    if not names:
        _list(as_json)
        return
    chosen = _chosen(names)
    study = Study(reading=reading(reading_name, changes or ()), trace=str(trace) if trace else "")
    folder = out / study.reading.name / (trace.name if trace else "generated")
    all_seeds = (seed,) if seed is not None else tuple(range(seeds))
    results: dict[str, list[Record]] = {}
    sweeps = {one.name: _sweep(one, study.reading.name, profile, all_seeds, cell) for one in chosen}
    check_trace(study)
    make_folder(folder, "--out")
    # Only CLA* has weights to tune: a lone cell of another policy does not wait for them.
    tunable = {one.profile for sweep in sweeps.values() for one in sweep if one.policy == "cla"}
    wanted = [name for name in PROFILES if name in tunable]
    try:
        with progress_bar("Tuning CLA*") as progress:
            tuned = tune(study, wanted, folder / "cla-tuning.jsonl", on=on, workers=workers, progress=progress)
        study = Study(study.reading, study.trace, tuple((best.profile, best.weights) for best in tuned))
        for one in chosen:
            path = folder / f"{one.name}.jsonl"
            with progress_bar(one.name) as progress:
                run = partial(run_cell, study)
                results[one.name] = run_cells(
                    sweeps[one.name], run, path, config_of(study), on=on, workers=workers, progress=progress
                )
    except KeyboardInterrupt:
        remarks().print(f"Stopped. What is finished stays in {folder}; the same command goes on from there.")
        raise typer.Exit(130) from None
    _print(chosen, results, tuned, folder, as_json, pages=cell is None)


def _list(as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "experiments": [
                    {"name": one.name, "title": one.title, "source": one.source} for one in EXPERIMENTS.values()
                ]
            }
        )
        return
    table = Table("experiment", "title", "source", "axes", "policies")
    for one in EXPERIMENTS.values():
        axes = "; ".join(f"{name}: {', '.join(f'{value:g}' for value in values)}" for name, values in one.axes.items())
        table.add_row(one.name, one.title, one.source, axes or "-", ", ".join(one.policies))
    console().print(table)


def _chosen(names: Sequence[str]) -> list[Experiment]:
    chosen: dict[str, Experiment] = {}
    for name in names:
        if name == "netkv":
            chosen |= EXPERIMENTS
        elif name in EXPERIMENTS:
            chosen[name] = EXPERIMENTS[name]
        else:
            near = get_close_matches(name, EXPERIMENTS, 1)
            mend = (f"did you mean {near[0]}? " if near else "") + f"choose among {', '.join(EXPERIMENTS)}"
            raise InputError(f"there is no experiment {name!r}", mend=mend)
    return list(chosen.values())


def _profiles(one: Experiment, asked: list[str] | None) -> tuple[str, ...]:
    for name in asked or ():
        if name not in one.profiles:
            raise InputError(
                f"there is no profile {name!r}", where="--profile", mend=f"choose among {', '.join(one.profiles)}"
            )
    return tuple(name for name in one.profiles if not asked or name in asked)


def _sweep(
    one: Experiment, reading_name: str, profiles: list[str] | None, seeds: Sequence[int], cell: str | None
) -> list[Cell]:
    """What is to be run of an experiment, checked before anything is."""
    sweep = cells(one, reading_name, _profiles(one, profiles), tuple(seeds))
    return sweep if cell is None else _matching(sweep, one, cell)


def _matching(sweep: list[Cell], one: Experiment, text: str) -> list[Cell]:
    """Cells named by profile, one value per axis and policy."""
    parts = [part.strip() for part in text.split(",")]
    form = ",".join(("profile", *one.axes, "policy"))
    if len(parts) != len(one.axes) + 2:
        raise InputError(f"{text!r} is not a cell of {one.name}", where="--cell", mend=f"write {form}")
    try:
        values = [float(part) for part in parts[1:-1]]
    except ValueError:
        raise InputError(
            f"{text!r} has an axis value that is no number", where="--cell", mend=f"write {form}"
        ) from None
    found = [
        cell
        for cell in sweep
        if (cell.profile, cell.policy) == (parts[0], parts[-1]) and list(cell.settings.values()) == values
    ]
    if not found:
        points = "; ".join(
            f"{axis}: {', '.join(f'{value:g}' for value in values)}" for axis, values in one.axes.items()
        )
        mend = f"profiles: {', '.join(one.profiles)}; {points}; policies: {', '.join(one.policies)}"
        raise InputError(f"{one.name} has no cell {text!r}", where="--cell", mend=mend)
    return found


def _print(
    chosen: Sequence[Experiment],
    results: dict[str, list[Record]],
    tuned: list[Tuned],
    folder: Path,
    as_json: bool,
    *,
    pages: bool,
) -> None:
    if pages:
        _write_pages(chosen, results, tuned, folder)
    if as_json:
        print_json({"cla_weights": tuned, "records": [record for one in chosen for record in results[one.name]]})
        return
    for one in chosen:
        console().print(experiment_table(one, results[one.name]))


def _write_pages(
    chosen: Sequence[Experiment], results: dict[str, list[Record]], tuned: list[Tuned], folder: Path
) -> None:
    from kvroute.report.experiment_page import write_experiment, write_index  # plots take a second to import

    pages = {}
    for one in chosen:
        notes = [*map(_tuning_note, tuned), *_latency_note(one, results[one.name])]
        pages[one.title] = write_experiment(one, results[one.name], folder / one.name, notes)
        remarks().print(f"{one.name}: {pages[one.title]}")
    if len(pages) > 1:
        remarks().print(f"All: {write_index(pages, folder / 'index.html', title=f'NetKV, {folder.parent.name}')}")


def _tuning_note(best: Tuned) -> str:
    return (
        f"CLA* weights for {best.profile}: cache {best.weights.cache:g}, load {best.weights.load:g} "
        f"({best.ttft_s * 1e3:,.0f} ms on the tuning slice, {best.ttft_at_ones_s * 1e3:,.0f} ms with equal weights; "
        f"{best.within_one_percent} of 100 grid points are within 1 %)"
    )


def _latency_note(one: Experiment, records: Sequence[Record]) -> list[str]:
    """Where the size of the cluster is swept: what a decision costs at each size."""
    if "gpus" not in one.axes:
        return []
    by_size: dict[float, list[float]] = {}
    for record in records:
        if record.cell.policy == one.versus[0] and record.summary.decision_s is not None:
            by_size.setdefault(record.cell.settings["gpus"], []).append(record.summary.decision_s)
    sizes = "; ".join(f"{gpus:g} GPUs {median(times) * 1e6:.0f} us" for gpus, times in sorted(by_size.items()))
    return [f"Median decision of {one.versus[0]}, on this machine: {sizes}"] if sizes else []
