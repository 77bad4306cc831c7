"""`autoscaling` for the terminal: its own table and page, and requests of a trace file."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from kvroute.cli.experiment_family import Family, Results, Sweeps, write_each
from kvroute.cli.output import console
from kvroute.cli.sweeps import RunOptions
from kvroute.comparison.cells import Record
from kvroute.experiments.autoscaling import EXPERIMENTS, requests_of, run_cell
from kvroute.experiments.cells import Experiment
from kvroute.report.grid import rich_table
from kvroute.types import InputError


def _prepare(chosen: Sequence[Experiment], options: RunOptions) -> Sweeps:
    if options.reading != "paper" or options.changes:
        what = "autoscaling does not support --reading and --set"
        raise InputError(what, where="autoscaling", hint="omit these options")
    if options.trace is not None:
        requests_of(0, str(options.trace))  # raises for a file that cannot be read
    return Sweeps.of(chosen, options, options.reading)


def _begin(sweeps: Sweeps) -> str:
    return "" if sweeps.options.trace is None else str(sweeps.options.trace.resolve())


def _write_pages(results: Results[str]) -> None:
    from kvroute.report.autoscaling_page import write_autoscaling  # its import of plots takes a second

    def write(one: Experiment, folder: Path) -> Path:
        return write_autoscaling(one, results.records[one.name], folder)

    write_each(results.sweeps, "autoscaling", write)


def _print_tables(results: Results[str]) -> None:
    from kvroute.report.autoscaling_page import autoscaling_grid

    records: list[Record] = results.all_records
    console().print(rich_table(autoscaling_grid(records), console().width))


FAMILY: Family[str] = Family(
    EXPERIMENTS,
    prepare=_prepare,
    begin=_begin,
    run_cell=lambda trace: partial(run_cell, trace=trace),
    write_pages=_write_pages,
    config=lambda trace: {"trace": trace},
    print_tables=_print_tables,
)
