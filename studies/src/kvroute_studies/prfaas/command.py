"""PrfaaS's experiments for the terminal: their own tables and pages; one is computed by formula."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from kvroute.cli.output import console
from kvroute.report.grid import rich_table
from kvroute.types import InputError
from kvroute_studies.prfaas.case_study import assumptions
from kvroute_studies.prfaas.kv import KV_THROUGHPUT, computed
from kvroute_studies.prfaas.queue import PrfaasStudy, config_of, source
from kvroute_studies.prfaas.run import EXPERIMENTS, of_study, run_cell
from kvroute_studies.prfaas.tables import prfaas_grids
from kvroute_studies.shared.cells import Experiment
from kvroute_studies.shared.family import ExperimentFamily, Results, Sweeps, write_each
from kvroute_studies.shared.sweeps import RunOptions


def _study(options: RunOptions) -> PrfaasStudy:
    return PrfaasStudy(assumptions(options.changes), str(options.trace) if options.trace else "")


def _prepare(chosen: Sequence[Experiment], options: RunOptions) -> Sweeps:
    if options.reading != "paper":
        what = f"there is no reading {options.reading!r}"
        raise InputError(what, where="--reading", hint="omit it; --set changes single assumptions")
    study = _study(options)
    if study.trace:
        source(study.trace)
    return Sweeps.of([of_study(experiment, study) for experiment in chosen], options, study.assumed.name)


def _write_pages(results: Results[PrfaasStudy]) -> None:
    from kvroute_studies.prfaas.page import write_prfaas  # its import of plots takes a second

    write_each(
        results.sweeps,
        "PrfaaS",
        lambda experiment, folder: write_prfaas(
            experiment, results.records.get(experiment.name, ()), results.computed, folder
        ),
    )


def _document(results: Results[PrfaasStudy]) -> dict[str, Any]:
    return {"records": results.all_records, "computed": results.computed}


def _print_tables(results: Results[PrfaasStudy]) -> None:
    for experiment in results.sweeps.experiments:
        for grid in prfaas_grids(experiment, results.records.get(experiment.name, ()), results.computed):
            console().print(rich_table(grid, console().width))


FAMILY = ExperimentFamily(
    EXPERIMENTS,
    prepare=_prepare,
    begin=lambda sweeps: _study(sweeps.options),
    run_cell=lambda study: partial(run_cell, study),
    config=config_of,
    formulas={KV_THROUGHPUT.name: computed},
    write_pages=_write_pages,
    document=_document,
    print_tables=_print_tables,
)
