"""`aggregated` for the terminal: its own tables, and the general page."""

from __future__ import annotations

from kvroute.cli.output import console
from kvroute.report.grid import rich_table
from kvroute_studies.aggregated.run import EXPERIMENTS, run_cell
from kvroute_studies.aggregated.tables import verdict_grid, worst_grid
from kvroute_studies.shared.family import Results, plain_family


def _print_tables(results: Results[None]) -> None:
    for records in results.records.values():
        for grid in (verdict_grid(records), worst_grid(records)):
            console().print(rich_table(grid, console().width))


FAMILY = plain_family("aggregated", EXPERIMENTS, run_cell, print_tables=_print_tables)
