"""NetKV's experiments for the terminal: tunes CLA* before the sweeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from kvroute.cli.output import progress_bar
from kvroute.planner.comparison.cells import Record
from kvroute_studies.netkv.cases import EXPERIMENTS, PROFILES
from kvroute_studies.netkv.readings import reading
from kvroute_studies.netkv.setup import Study, check_trace, config_of, run_cell
from kvroute_studies.netkv.tuning import Tuned, tune
from kvroute_studies.shared.cells import Experiment
from kvroute_studies.shared.family import ExperimentFamily, Results, Sweeps, write_each
from kvroute_studies.shared.sweeps import RunOptions


@dataclass(frozen=True, slots=True)
class TunedStudy:
    """A study with CLA*'s weights, and how they were found."""

    study: Study
    tuned: list[Tuned]


def _untuned(options: RunOptions) -> Study:
    return Study(reading=reading(options.reading, options.changes), trace=str(options.trace) if options.trace else "")


def _prepare(chosen: Sequence[Experiment], options: RunOptions) -> Sweeps:
    study = _untuned(options)
    sweeps = Sweeps.of(chosen, options, study.reading.name)
    check_trace(study)
    return sweeps


def _begin(sweeps: Sweeps) -> TunedStudy:
    # Only CLA* has weights to tune; a single cell of another policy needs no tuning.
    options, study = sweeps.options, _untuned(sweeps.options)
    tunable = {cell.profile for cells in sweeps.cells.values() for cell in cells if cell.policy == "cla"}
    wanted = [name for name in PROFILES if name in tunable]
    with progress_bar("Tuning CLA*") as progress:
        path = sweeps.path("cla-tuning")
        tuned = tune(study, wanted, path, on=options.on, workers=options.workers, progress=progress)
    weights = tuple((best.profile, best.weights) for best in tuned)
    return TunedStudy(Study(study.reading, study.trace, weights), tuned)


def _write_pages(results: Results[TunedStudy]) -> None:
    from kvroute_studies.shared.page import write_experiment  # its import of plots takes a second

    tuning = [_tuning_note(best) for best in results.study.tuned]
    write_each(
        results.sweeps,
        "NetKV",
        lambda experiment, folder: write_experiment(
            experiment,
            results.records[experiment.name],
            folder,
            [*tuning, *_latency_note(experiment, results.records[experiment.name])],
        ),
    )


def _document(results: Results[TunedStudy]) -> dict[str, Any]:
    return {"cla_weights": results.study.tuned, "records": results.all_records}


def _tuning_note(best: Tuned) -> str:
    return (
        f"CLA* weights for {best.profile}: cache {best.weights.cache:g}, load {best.weights.load:g} "
        f"({best.ttft_s * 1e3:,.0f} ms on the tuning slice, {best.ttft_at_ones_s * 1e3:,.0f} ms with equal weights; "
        f"{best.within_one_percent} of 100 grid points are within 1 %)"
    )


def _latency_note(experiment: Experiment, records: Sequence[Record]) -> list[str]:
    """Return the cost of a decision at each size, if the sweep varies the size of the cluster."""
    if "gpus" not in experiment.axes:
        return []
    by_size: dict[float, list[float]] = {}
    for record in records:
        if record.cell.policy == experiment.versus[0] and record.summary.decision_s is not None:
            by_size.setdefault(record.cell.settings["gpus"], []).append(record.summary.decision_s)
    sizes = "; ".join(f"{gpus:g} GPUs {median(times) * 1e6:.0f} us" for gpus, times in sorted(by_size.items()))
    return [f"Median decision of {experiment.versus[0]}, on this machine: {sizes}"] if sizes else []


FAMILY = ExperimentFamily(
    EXPERIMENTS,
    prepare=_prepare,
    begin=_begin,
    run_cell=lambda tuned: partial(run_cell, tuned.study),
    config=lambda tuned: config_of(tuned.study),
    write_pages=_write_pages,
    document=_document,
)
