"""`heroserve-*` for the terminal: tables of ranges over the baselines, all cells of a small selection, and pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvroute.cli.output import console
from kvroute.planner.comparison.cells import Record
from kvroute.report.grid import Grid, rich_table
from kvroute_studies.heroserve.evaluation import EXPERIMENTS, run_cell
from kvroute_studies.heroserve.run import ONLINE
from kvroute_studies.shared.cells import Experiment
from kvroute_studies.shared.family import Results, plain_family

_ROWS_MAX = 60
"""Longest table of all cells beside ranges in the terminal; the page always has it."""


def _write(one: Experiment, records: Sequence[Record], folder: Path) -> Path:
    from kvroute_studies.heroserve.page import write_heroserve  # its import of plots takes a second
    from kvroute_studies.heroserve.results import write_online

    return write_online(one, records, folder) if one.name == ONLINE.name else write_heroserve(one, records, folder)


def _grids(one: Experiment, records: Sequence[Record]) -> list[Grid]:
    from kvroute_studies.heroserve.results import online_grid
    from kvroute_studies.heroserve.tables import cells_grid, range_grids

    if one.name == ONLINE.name:
        return [online_grid(records)]
    every = cells_grid(one, records)
    ranges = [grid for grid in range_grids(one, records) if grid.rows]
    return [*ranges, every] if not ranges or len(every.rows) <= _ROWS_MAX else ranges


def _print_tables(results: Results[None]) -> None:
    for experiment in results.sweeps.experiments:
        for grid in _grids(experiment, results.records[experiment.name]):
            console().print(rich_table(grid, console().width))


FAMILY = plain_family("heroserve", EXPERIMENTS, run_cell, _write, _print_tables)
