"""`prefix-copies` for the terminal: its own table and page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvroute.cli.output import console
from kvroute.planner.comparison.cells import Record
from kvroute.report.grid import rich_table
from kvroute_studies.prefix_copies.run import EXPERIMENTS, run_cell
from kvroute_studies.shared.cells import Experiment
from kvroute_studies.shared.family import Results, plain_family


def _write(experiment: Experiment, records: Sequence[Record], folder: Path) -> Path:
    from kvroute_studies.prefix_copies.page import write_copies  # its import of plots takes a second

    return write_copies(experiment, records, folder)


def _print_tables(results: Results[None]) -> None:
    from kvroute_studies.prefix_copies.page import copies_grid

    for records in results.records.values():
        console().print(rich_table(copies_grid(records), console().width))


FAMILY = plain_family("prefix-copies", EXPERIMENTS, run_cell, _write, _print_tables)
