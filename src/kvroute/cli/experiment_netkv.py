"""NetKV's experiments for the terminal: tunes CLA*, runs the sweeps, writes tables and pages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

from kvroute.cli.output import console, make_folder, print_json, progress_bar, remarks
from kvroute.cli.sweeps import Asked
from kvroute.comparison.cells import Record
from kvroute.experiments.cells import Experiment
from kvroute.experiments.netkv import PROFILES
from kvroute.experiments.readings import reading
from kvroute.experiments.runner import run_cells
from kvroute.experiments.setup import Study, check_trace, config_of, run_cell
from kvroute.experiments.tuning import Tuned, tune
from kvroute.report.tables import experiment_table


def run(chosen: Sequence[Experiment], asked: Asked) -> None:
    """Run the missing cells of these experiments and print all results.

    Raises:
        InputError: a wrong reading, trace, profile, cell or folder, before any run.
    """
    study = Study(reading=reading(asked.reading, asked.changes), trace=str(asked.trace) if asked.trace else "")
    folder = asked.folder(study.reading.name)
    sweeps = {one.name: asked.sweep(one, study.reading.name) for one in chosen}
    check_trace(study)
    make_folder(folder, "--out")
    # Only CLA* has weights to tune; a single cell of another policy needs no tuning.
    tunable = {cell.profile for sweep in sweeps.values() for cell in sweep if cell.policy == "cla"}
    wanted = [name for name in PROFILES if name in tunable]
    with progress_bar("Tuning CLA*") as progress:
        path = folder / "cla-tuning.jsonl"
        tuned = tune(study, wanted, path, on=asked.on, workers=asked.workers, progress=progress)
    study = Study(study.reading, study.trace, tuple((best.profile, best.weights) for best in tuned))
    results: dict[str, list[Record]] = {}
    for one in chosen:
        path, each = folder / f"{one.name}.jsonl", partial(run_cell, study)
        with progress_bar(one.name) as progress:
            results[one.name] = run_cells(
                sweeps[one.name], each, path, config_of(study), on=asked.on, workers=asked.workers, progress=progress
            )
    if asked.cell is None:
        _write_pages(chosen, results, tuned, folder)
    if asked.as_json:
        print_json({"cla_weights": tuned, "records": [record for one in chosen for record in results[one.name]]})
        return
    for one in chosen:
        console().print(experiment_table(one, results[one.name]))


def _write_pages(
    chosen: Sequence[Experiment], results: dict[str, list[Record]], tuned: list[Tuned], folder: Path
) -> None:
    from kvroute.report.experiment_page import write_experiment, write_index  # its import of plots takes a second

    pages = {}
    for one in chosen:
        notes = [*map(_tuning_note, tuned), *_latency_note(one, results[one.name])]
        pages[one.title] = write_experiment(one, results[one.name], folder / one.name, notes)
        remarks().print(f"{one.name}: {pages[one.title]}")
    if len(pages) > 1:
        remarks().print(f"All: {write_index(pages, folder / 'index.html', title=f'NetKV, {folder.parent.name}')}")


def _tuning_note(best: Tuned) -> str:
    return (
        f"CLA* weights for {best.profile}: cache {best.weights.cache:g}, load {best.weights.load:g} "
        f"({best.ttft_s * 1e3:,.0f} ms on the tuning slice, {best.ttft_at_ones_s * 1e3:,.0f} ms with equal weights; "
        f"{best.within_one_percent} of 100 grid points are within 1 %)"
    )


def _latency_note(one: Experiment, records: Sequence[Record]) -> list[str]:
    """Return the cost of a decision at each size, if the sweep varies the size of the cluster."""
    if "gpus" not in one.axes:
        return []
    by_size: dict[float, list[float]] = {}
    for record in records:
        if record.cell.policy == one.versus[0] and record.summary.decision_s is not None:
            by_size.setdefault(record.cell.settings["gpus"], []).append(record.summary.decision_s)
    sizes = "; ".join(f"{gpus:g} GPUs {median(times) * 1e6:.0f} us" for gpus, times in sorted(by_size.items()))
    return [f"Median decision of {one.versus[0]}, on this machine: {sizes}"] if sizes else []
