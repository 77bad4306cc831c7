"""`heroserve-online` for the terminal: its own table and page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvroute.cli.experiment_family import Results, plain_family
from kvroute.cli.output import console
from kvroute.comparison.cells import Record
from kvroute.experiments.cells import Experiment
from kvroute.experiments.heroserve import EXPERIMENTS, run_cell
from kvroute.report.grid import rich_table


def _write(one: Experiment, records: Sequence[Record], folder: Path) -> Path:
    from kvroute.report.heroserve_results import write_online  # its import of plots takes a second

    return write_online(one, records, folder)


def _print_tables(results: Results[None]) -> None:
    from kvroute.report.heroserve_results import online_grid

    for records in results.records.values():
        console().print(rich_table(online_grid(records), console().width))


FAMILY = plain_family("heroserve", EXPERIMENTS, run_cell, _write, _print_tables)
