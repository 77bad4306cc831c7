"""`autoscaling` for the terminal: its own table and page, and requests of a trace file."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from kvroute.cli.output import console
from kvroute.planner.comparison.cells import Record
from kvroute.report.grid import rich_table
from kvroute.types import InputError
from kvroute_studies.autoscaling.run import EXPERIMENTS, requests_of, run_cell
from kvroute_studies.shared.cells import Experiment
from kvroute_studies.shared.family import ExperimentFamily, Results, Sweeps, write_each
from kvroute_studies.shared.sweeps import RunOptions


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
    from kvroute_studies.autoscaling.page import write_autoscaling  # its import of plots takes a second

    def write(experiment: Experiment, folder: Path) -> Path:
        return write_autoscaling(experiment, results.records[experiment.name], folder)

    write_each(results.sweeps, "autoscaling", write)


def _print_tables(results: Results[str]) -> None:
    from kvroute_studies.autoscaling.page import autoscaling_grid

    records: list[Record] = results.all_records
    console().print(rich_table(autoscaling_grid(records), console().width))


FAMILY: ExperimentFamily[str] = ExperimentFamily(
    EXPERIMENTS,
    prepare=_prepare,
    begin=_begin,
    run_cell=lambda trace: partial(run_cell, trace=trace),
    write_pages=_write_pages,
    config=lambda trace: {"trace": trace},
    print_tables=_print_tables,
)
