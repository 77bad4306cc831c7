"""PrfaaS's experiments for the terminal: runs the sweeps, writes tables and pages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from kvroute.cli.output import console, make_folder, print_json, progress_bar, remarks
from kvroute.cli.sweeps import Asked
from kvroute.comparison.cells import Cell, Record, encode
from kvroute.experiments.cells import Computed, Experiment
from kvroute.experiments.prfaas import of_study, run_cell
from kvroute.experiments.prfaas_case import assumptions
from kvroute.experiments.prfaas_kv import KV_THROUGHPUT, computed
from kvroute.experiments.prfaas_queue import PrfaasStudy, config_of, source
from kvroute.experiments.runner import run_cells
from kvroute.report.grid import rich_table
from kvroute.report.prfaas_tables import prfaas_grids
from kvroute.types import InputError


def run(chosen: Sequence[Experiment], asked: Asked) -> None:
    """Run the missing cells of these experiments and print all results.

    Raises:
        InputError: a wrong reading, field, trace, profile, cell or folder, before any run.
    """
    if asked.reading != "paper":
        what = f"there is no reading {asked.reading!r}"
        raise InputError(what, where="--reading", hint="omit it; --set changes single assumptions")
    assumed = assumptions(asked.changes)
    study = PrfaasStudy(assumed, str(asked.trace) if asked.trace else "")
    if study.trace:
        source(study.trace)
    folder = asked.folder(assumed.name)
    chosen = [of_study(one, study) for one in chosen]
    sweeps = {one.name: asked.sweep(one, assumed.name) for one in chosen}
    make_folder(folder, "--out")
    results: dict[str, list[Record]] = {}
    points: list[Computed] = []
    for one in chosen:
        path = folder / f"{one.name}.jsonl"
        if one.name == KV_THROUGHPUT.name:
            points = _computed(sweeps[one.name], path)
            continue
        with progress_bar(one.name) as progress:
            results[one.name] = run_cells(
                sweeps[one.name],
                partial(run_cell, study),
                path,
                config_of(study),
                on=asked.on,
                workers=asked.workers,
                progress=progress,
            )
    if asked.cell is None:
        _write_pages(chosen, results, points, folder)
    if asked.as_json:
        records = [record for one in chosen for record in results.get(one.name, ())]
        print_json({"records": records, "computed": points})
        return
    for one in chosen:
        for grid in prfaas_grids(one, results.get(one.name, ()), points):
            console().print(rich_table(grid, console().width))


def _computed(sweep: Sequence[Cell], path: Path) -> list[Computed]:
    """Compute the cells by formula on every call; nothing is stored."""
    points = computed(sweep)
    path.write_bytes(b"".join(encode(point) + b"\n" for point in points))
    return points


def _write_pages(
    chosen: Sequence[Experiment], results: dict[str, list[Record]], points: Sequence[Computed], folder: Path
) -> None:
    from kvroute.report.experiment_page import write_index  # its import of plots takes a second
    from kvroute.report.prfaas_page import write_prfaas

    pages = {}
    for one in chosen:
        pages[one.title] = write_prfaas(one, results.get(one.name, ()), points, folder / one.name)
        remarks().print(f"{one.name}: {pages[one.title]}")
    if len(pages) > 1:
        remarks().print(f"All: {write_index(pages, folder / 'index.html', title=f'PrfaaS, {folder.parent.name}')}")
