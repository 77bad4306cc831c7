"""foresight's matrix for the terminal: tunes CLA*, runs the sweeps, writes tables and one page."""

from __future__ import annotations

from collections.abc import Sequence

from kvroute.cli.output import console, make_folder, print_json, progress_bar, remarks
from kvroute.cli.sweeps import Asked
from kvroute.comparison.cells import Cell, Record
from kvroute.experiments.cells import Experiment
from kvroute.experiments.never_worse import ABLATION, EXPERIMENTS, FORESEEN, MATRIX, SEEN_SEEDS
from kvroute.experiments.never_worse_cases import CASES
from kvroute.experiments.never_worse_run import Runner, Traces, results_of, tune
from kvroute.experiments.runner import run_cells
from kvroute.report.grid import Grid, rich_table
from kvroute.report.never_worse_tables import headline_grid, losses_grid, seen_grid, terms_grid
from kvroute.report.tables import comparison_table
from kvroute.sim.workload import PROFILES
from kvroute.types import InputError


def run(chosen: Sequence[Experiment], asked: Asked) -> None:
    """Run the missing cells of these sweeps and print all results.

    Raises:
        InputError: a wrong cell, folder or trace, or an option of other experiments, before any run.
    """
    _refuse(asked)
    traces = Traces.of(asked.trace_dir)
    folder = asked.out / "never-worse"
    missing = traces.missing(MATRIX.profiles)
    sweeps = {one.name: _runnable(one, asked, missing) for one in chosen}
    make_folder(folder, "--out")
    for one in chosen:
        results_of(folder / f"{one.name}.jsonl")
    # Only CLA* has weights to tune; the descent also starts from it.
    tunable = {cell.profile for sweep in sweeps.values() for cell in sweep if cell.policy in ("cla", "clairvoyant")}
    wanted = [name for name in MATRIX.profiles if name in tunable]
    with progress_bar("Tuning CLA*") as progress:
        path = folder / "cla-tuning.jsonl"
        weights = tune(wanted, traces, path, on=asked.on, workers=asked.workers, progress=progress)
    runner = Runner(traces, weights)
    for one in chosen:
        path = folder / f"{one.name}.jsonl"
        with progress_bar(one.name) as progress:
            run_cells(sweeps[one.name], runner, path, on=asked.on, workers=asked.workers, progress=progress)
    results = {name: results_of(folder / f"{name}.jsonl") for name in EXPERIMENTS}
    if asked.cell is None and results[MATRIX.name]:
        from kvroute.report.never_worse_page import write_never_worse  # its import of plots takes a second

        page = write_never_worse(results[MATRIX.name], results[ABLATION.name], results[FORESEEN.name], folder, missing)
        remarks().print(f"never-worse: {page}")
    _show(chosen, asked, sweeps, results)
    if asked.cell is None:
        for why in dict.fromkeys(missing.values()):
            names = [name for name in missing if missing[name] == why]
            remarks().print(f"{why} ({', '.join(names)})")


def _refuse(asked: Asked) -> None:
    for given, option in ((asked.reading != "paper", "--reading"), (asked.changes, "--set"), (asked.trace, "--trace")):
        if given:
            hint = "omit it; recorded traces are read from --trace-dir"
            raise InputError("never-worse does not support this option", where=option, hint=hint)


def _runnable(one: Experiment, asked: Asked, missing: dict[str, str]) -> list[Cell]:
    """Return the cells whose trace is available; of expensive sweeps only the first seeds."""
    sweep = asked.sweep(one, "never-worse")
    seeds = asked.seeds[:SEEN_SEEDS] if one.name == FORESEEN.name else asked.seeds
    if asked.cell is not None and sweep[0].profile in missing:
        raise InputError(missing[sweep[0].profile], where="--cell", hint="or choose another cell")
    return [cell for cell in sweep if cell.profile not in missing and cell.seed in seeds]


def _show(
    chosen: Sequence[Experiment], asked: Asked, sweeps: dict[str, list[Cell]], results: dict[str, list[Record]]
) -> None:
    if asked.as_json:
        by_key = {record.key: record for records in results.values() for record in records}
        print_json({"records": [by_key[cell.key] for one in chosen for cell in sweeps[one.name]]})
        return
    matrix, grids = results[MATRIX.name], list[Grid]()
    for one in chosen:
        if one.name == MATRIX.name:
            grids += [losses_grid(matrix), headline_grid(matrix)]
        elif one.name == ABLATION.name:
            grids.append(terms_grid(results[one.name], matrix))
        else:
            grids.append(seen_grid(results[one.name]))
    shown = [grid for grid in grids if grid.rows]
    for grid in shown:
        console().print(rich_table(grid, console().width))
    if shown:
        return
    for one in chosen:
        keys = {cell.key for cell in sweeps[one.name]}
        if runs := [record.summary for record in results[one.name] if record.key in keys]:
            limits = {PROFILES[CASES[cell.profile].profile].ttft_slo_s for cell in sweeps[one.name]}
            limit_s = limits.pop() if len(limits) == 1 else None
            console().print(comparison_table(runs, width=console().width, slo_ttft_s=limit_s))
    remarks().print("A comparison needs two policies; run the cell of another policy, or the whole sweep.")
