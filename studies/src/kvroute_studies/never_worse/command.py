"""foresight's matrix for the terminal: tunes CLA*, skips cells without their trace, has its own tables and page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kvroute.cli.output import console, progress_bar, remarks
from kvroute.planner.comparison.cells import Cell, Record
from kvroute.report.grid import Grid, rich_table
from kvroute.report.tables import comparison_table
from kvroute.sim.settings import Slo
from kvroute.sim.workload import PROFILES
from kvroute.types import InputError
from kvroute_studies.never_worse.cases import CASES
from kvroute_studies.never_worse.run import Runner, Traces, results_of, tune
from kvroute_studies.never_worse.tables import headline_grid, losses_grid, seen_grid, terms_grid
from kvroute_studies.never_worse.verdicts import ABLATION, EXPERIMENTS, FORESEEN, MATRIX, SEEN_SEEDS
from kvroute_studies.shared.cells import Experiment
from kvroute_studies.shared.family import ExperimentFamily, Results, Sweeps
from kvroute_studies.shared.sweeps import RunOptions


@dataclass(frozen=True)
class Matrix:
    """How cells are run, and the folder with the results of this call and earlier ones."""

    runner: Runner
    folder: Path

    @cached_property
    def stored(self) -> dict[str, list[Record]]:
        """All results in the folder, by experiment; read once, after the runs."""
        return {name: results_of(self.folder / f"{name}.jsonl") for name in EXPERIMENTS}

    @property
    def missing(self) -> dict[str, str]:
        """Cells without their trace, each with the remedy."""
        return self.runner.traces.missing(MATRIX.profiles)


def _prepare(chosen: Sequence[Experiment], options: RunOptions) -> Sweeps:
    _refuse(options)
    missing = Traces.of(options.trace_dir).missing(MATRIX.profiles)
    cells = {experiment.name: _runnable(experiment, options, missing) for experiment in chosen}
    return Sweeps(options, options.out / "never-worse", chosen, cells)


def _refuse(options: RunOptions) -> None:
    for given, option in (
        (options.reading != "paper", "--reading"),
        (options.changes, "--set"),
        (options.trace, "--trace"),
    ):
        if given:
            hint = "omit it; recorded traces are read from --trace-dir"
            raise InputError("never-worse does not support this option", where=option, hint=hint)


def _runnable(experiment: Experiment, options: RunOptions, missing: dict[str, str]) -> list[Cell]:
    """Return the cells whose trace is available; of expensive sweeps only the first seeds."""
    sweep = options.sweep(experiment, "never-worse")
    seeds = options.seeds[:SEEN_SEEDS] if experiment.name == FORESEEN.name else options.seeds
    if options.cell is not None and sweep[0].profile in missing:
        raise InputError(missing[sweep[0].profile], where="--cell", hint="or choose another cell")
    return [cell for cell in sweep if cell.profile not in missing and cell.seed in seeds]


def _begin(sweeps: Sweeps) -> Matrix:
    options, traces = sweeps.options, Traces.of(sweeps.options.trace_dir)
    for experiment in sweeps.experiments:
        results_of(sweeps.path(experiment.name))
    # Only CLA* has weights to tune; the descent also starts from it.
    policies = ("cla", "clairvoyant")
    tunable = {cell.profile for cells in sweeps.cells.values() for cell in cells if cell.policy in policies}
    wanted = [name for name in MATRIX.profiles if name in tunable]
    with progress_bar("Tuning CLA*") as progress:
        path = sweeps.path("cla-tuning")
        weights = tune(wanted, traces, path, on=options.on, workers=options.workers, progress=progress)
    return Matrix(Runner(traces, weights), sweeps.folder)


def _write_pages(results: Results[Matrix]) -> None:
    matrix, stored = results.study, results.study.stored
    if stored[MATRIX.name]:
        from kvroute_studies.never_worse.page import write_never_worse  # its import of plots takes a second

        parts = (stored[MATRIX.name], stored[ABLATION.name], stored[FORESEEN.name])
        remarks().print(f"never-worse: {write_never_worse(*parts, matrix.folder, matrix.missing)}")


def _print_tables(results: Results[Matrix]) -> None:
    stored, grids = results.study.stored, list[Grid]()
    for experiment in results.sweeps.experiments:
        if experiment.name == MATRIX.name:
            grids += [losses_grid(stored[experiment.name]), headline_grid(stored[experiment.name])]
        elif experiment.name == ABLATION.name:
            grids.append(terms_grid(stored[experiment.name], stored[MATRIX.name]))
        else:
            grids.append(seen_grid(stored[experiment.name]))
    shown = [grid for grid in grids if grid.rows]
    for grid in shown:
        console().print(rich_table(grid, console().width))
    if not shown:
        _print_runs(results)


def _print_runs(results: Results[Matrix]) -> None:
    """Print the runs themselves, because there is no pair of policies to compare."""
    for experiment in results.sweeps.experiments:
        if records := results.records[experiment.name]:
            limits = {PROFILES[CASES[record.cell.profile].profile].ttft_slo_s for record in records}
            slo = Slo(ttft_s=limits.pop()) if len(limits) == 1 else None
            runs = [record.summary for record in records]
            console().print(comparison_table(runs, width=console().width, slo=slo))
    remarks().print("A comparison needs two policies; run the cell of another policy, or the whole sweep.")


def _closing(results: Results[Matrix]) -> list[str]:
    """Return each reason for missing cells, with the cells."""
    missing = results.study.missing
    return [
        f"{why} ({', '.join(name for name in missing if missing[name] == why)})"
        for why in dict.fromkeys(missing.values())
    ]


FAMILY = ExperimentFamily(
    EXPERIMENTS,
    prepare=_prepare,
    begin=_begin,
    run_cell=lambda matrix: matrix.runner,
    write_pages=_write_pages,
    print_tables=_print_tables,
    closing=_closing,
    reads_trace_folder=True,
)
