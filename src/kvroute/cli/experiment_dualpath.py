"""`dualpath-*` for the terminal: its own tables and pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvroute.cli.experiment_family import Results, plain_family
from kvroute.cli.output import console
from kvroute.comparison.cells import Record
from kvroute.experiments.cells import Experiment
from kvroute.experiments.dualpath import EXPERIMENTS, run_cell
from kvroute.report.grid import rich_table


def _write(one: Experiment, records: Sequence[Record], folder: Path) -> Path:
    from kvroute.report.dualpath_results import write_dualpath  # its import of plots takes a second

    return write_dualpath(one, records, folder)


def _print_tables(results: Results[None]) -> None:
    from kvroute.report.dualpath_results import dualpath_grid

    for one in results.sweeps.experiments:
        console().print(rich_table(dualpath_grid(one, results.records[one.name]), console().width))


FAMILY = plain_family("dualpath", EXPERIMENTS, run_cell, _write, _print_tables)
