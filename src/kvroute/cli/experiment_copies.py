"""`prefix-copies` for the terminal: runs its cells and writes its table and page."""

from __future__ import annotations

from collections.abc import Sequence

from kvroute.cli.output import console, make_folder, print_json, progress_bar, remarks
from kvroute.cli.sweeps import Asked
from kvroute.experiments.cells import Experiment
from kvroute.experiments.prefix_copies import run_cell
from kvroute.experiments.runner import run_cells
from kvroute.report.grid import rich_table
from kvroute.types import InputError


def run(chosen: Sequence[Experiment], asked: Asked) -> None:
    """Run the missing cells of the experiment and print all results.

    Raises:
        InputError: a reading, field or trace was given, and the experiment has none; a wrong profile, cell or folder.
    """
    from kvroute.report.copies_page import copies_grid, write_copies  # its import of plots takes a second

    if asked.reading != "paper" or asked.changes or asked.trace:
        what = "prefix-copies does not support --reading, --set and --trace"
        raise InputError(what, where="prefix-copies", hint="omit these options")
    folder = asked.folder(asked.reading)
    for one in chosen:
        sweep = asked.sweep(one, asked.reading)
        make_folder(folder, "--out")
        path = folder / f"{one.name}.jsonl"
        with progress_bar(one.name) as progress:
            records = run_cells(sweep, run_cell, path, on=asked.on, workers=asked.workers, progress=progress)
        if asked.cell is None:
            remarks().print(f"{one.name}: {write_copies(one, records, folder / one.name)}")
        if asked.as_json:
            print_json({"records": records})
        else:
            console().print(rich_table(copies_grid(records), console().width))
