"""`accuracy` for the terminal: tables of errors, and predictions of the cases of a file."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvroute.cli.output import console, print_json
from kvroute.planner.comparison.cells import Cell
from kvroute.report.grid import Grid, GridEntry, Heading, rich_table
from kvroute.types import InputError
from kvroute_studies.accuracy.cases import CALIBRATED, UNCALIBRATED
from kvroute_studies.accuracy.inputs import data_folder
from kvroute_studies.accuracy.run import EXPERIMENTS, applies, predicted_cases, run_cell
from kvroute_studies.accuracy.tables import layers_grid, predictions_grid, stages_grid, summary_grid
from kvroute_studies.shared.cells import Experiment
from kvroute_studies.shared.family import ExperimentFamily, Results, Sweeps
from kvroute_studies.shared.sweeps import RunOptions


def _prepare(chosen: Sequence[Experiment], options: RunOptions) -> Sweeps:
    if options.reading != "paper" or options.changes or options.trace:
        what = "accuracy does not support --reading, --set and --trace"
        raise InputError(what, where="accuracy", hint="omit these options; measured runs are read from --trace-dir")
    data_folder(options.trace_dir)
    cells: dict[str, Sequence[Cell]] = {
        experiment.name: [cell for cell in options.sweep(experiment, "measured") if applies(cell.policy, cell.profile)]
        for experiment in chosen
    }
    return Sweeps(options, options.out / "accuracy", chosen, cells)


def _print_tables(results: Results[Path]) -> None:
    records = results.all_records
    grids = [summary_grid(records), *(stages_grid(records, name) for name in (CALIBRATED, UNCALIBRATED))]
    for grid in (*grids, layers_grid(records), predictions_grid(records)):
        if grid.rows:
            console().print(rich_table(grid, console().width))


def print_predictions(file: Path, folder: Path | None, seed: int | None, as_json: bool) -> None:
    """Predict the cases of a file and print them. Args: `folder`: measured runs that calibrate the models.

    Raises:
        InputError: the file or the folder cannot be used.
    """
    found = predicted_cases(file, folder, seed or 0)
    if as_json:
        print_json(found)
        return
    times = ("TTFT median ms", "TTFT p90 ms", "TPOT ms", "latency s")
    titles = ("case", "stage", "protocol", *times, "failures", "slots %")
    rows = tuple(tuple(GridEntry(text) for text in _texts(stage)) for stage in found)
    caption = "At 80 % of the slots and above, --json has the values for steps that are 10 % faster and slower."
    console().print(rich_table(Grid("Predictions", tuple(map(Heading, titles)), rows, caption), console().width))


def _texts(stage: dict[str, Any]) -> list[str]:
    times = [
        "-" if stage[quantity] is None else f"{stage[quantity][statistic] * scale:.4g}"
        for quantity, statistic, scale in (
            ("ttft_s", "median", 1e3),
            ("ttft_s", "p90", 1e3),
            ("tpot_s", "mean", 1e3),
            ("e2e_s", "mean", 1.0),
        )
    ]
    labels = [stage["id"], str(stage["stage"]), stage["protocol"]]
    return [*labels, *times, str(stage["failures"]), f"{100 * stage['slots']:.0f}"]


FAMILY = ExperimentFamily(
    EXPERIMENTS,
    prepare=_prepare,
    begin=lambda sweeps: data_folder(sweeps.options.trace_dir),
    run_cell=lambda folder: partial(run_cell, folder),
    write_pages=lambda results: None,
    print_tables=_print_tables,
    reads_trace_folder=True,
)
"""`accuracy`: measured runs of vLLM, each predicted from what is known before it."""
