"""`heroserve-*` for the terminal: tables of ranges over the baselines, all cells of a small selection, and pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from kvroute.cli.output import console
from kvroute.planner.comparison.cells import Cell, Record
from kvroute.report.grid import Grid, rich_table
from kvroute_studies.heroserve import run, serving, throughput
from kvroute_studies.shared.cells import Experiment
from kvroute_studies.shared.family import Results, plain_family

_ROWS_MAX = 60
"""Longest table of all cells beside ranges in the terminal; the page always has it."""
_RUNS: dict[str, tuple[Experiment, Callable[[Cell], Record]]] = {
    experiment.name: (experiment, run_one)
    for experiment, run_one in (
        (serving.SCALABILITY, serving.run_scalability),
        (serving.PREDICTION, serving.run_prediction),
        (serving.LATENCY, serving.run_latency),
        (throughput.THROUGHPUT, throughput.run_throughput),
        (throughput.LOSS, throughput.run_loss),
        (serving.MEMORY, serving.run_memory),
        (run.ONLINE, run.run_cell),
    )
}
EXPERIMENTS = {name: experiment for name, (experiment, _) in _RUNS.items()}


def run_cell(cell: Cell) -> Record:
    """Run a cell of any of `EXPERIMENTS`."""
    return _RUNS[cell.experiment][1](cell)


def _write(experiment: Experiment, records: Sequence[Record], folder: Path) -> Path:
    from kvroute_studies.heroserve.page import write_heroserve  # its import of plots takes a second
    from kvroute_studies.heroserve.results import write_online

    write = write_online if experiment.name == run.ONLINE.name else write_heroserve
    return write(experiment, records, folder)


def _grids(experiment: Experiment, records: Sequence[Record]) -> list[Grid]:
    from kvroute_studies.heroserve.results import online_grid
    from kvroute_studies.heroserve.tables import cells_grid, range_grids

    if experiment.name == run.ONLINE.name:
        return [online_grid(records)]
    every = cells_grid(experiment, records)
    ranges = [grid for grid in range_grids(experiment, records) if grid.rows]
    return [*ranges, every] if not ranges or len(every.rows) <= _ROWS_MAX else ranges


def _print_tables(results: Results[None]) -> None:
    for experiment in results.sweeps.experiments:
        for grid in _grids(experiment, results.records[experiment.name]):
            console().print(rich_table(grid, console().width))


FAMILY = plain_family("heroserve", EXPERIMENTS, run_cell, _write, _print_tables)
