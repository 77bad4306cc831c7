"""A family of experiments as data, and the one loop that runs, writes and prints every family."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from kvroute.cli.output import console, make_folder, print_json, progress_bar, remarks
from kvroute.planner.comparison.cells import Cell, Record, encode
from kvroute.planner.comparison.parallel import RunCell
from kvroute.types import InputError
from kvroute_studies.shared.cells import Computed, Experiment
from kvroute_studies.shared.runner import run_cells
from kvroute_studies.shared.sweeps import RunOptions
from kvroute_studies.shared.tables import experiment_table

Study = TypeVar("Study")
"""What a family needs to run a cell: its reading, trace and tuned weights, for example."""


@dataclass(frozen=True, slots=True)
class Sweeps:
    """The cells of one call, all checked before the first run."""

    options: RunOptions
    folder: Path
    experiments: Sequence[Experiment]
    cells: Mapping[str, Sequence[Cell]]
    """By experiment name."""

    @classmethod
    def of(cls, chosen: Sequence[Experiment], options: RunOptions, reading: str) -> Sweeps:
        """Return every selected cell of the experiments. Raises InputError for an unknown profile or cell."""
        return cls(
            options,
            options.folder(reading),
            chosen,
            {experiment.name: options.sweep(experiment, reading) for experiment in chosen},
        )

    def path(self, name: str) -> Path:
        """Return the file with the results of an experiment."""
        return self.folder / f"{name}.jsonl"


@dataclass(frozen=True, slots=True)
class Results(Generic[Study]):
    """The finished cells of one call."""

    sweeps: Sweeps
    study: Study
    records: Mapping[str, Sequence[Record]]
    """By experiment name, in the order of the cells; experiments computed by formula have none."""
    computed: Sequence[Computed] = ()

    @property
    def all_records(self) -> list[Record]:
        """The records of all experiments."""
        return [record for experiment in self.sweeps.experiments for record in self.records.get(experiment.name, ())]

    def print_tables(self) -> None:
        """Print the general table of each experiment."""
        for experiment in self.sweeps.experiments:
            console().print(experiment_table(experiment, self.records[experiment.name]))

    def document(self) -> dict[str, Any]:
        """Return the JSON document of `--json`."""
        return {"records": self.all_records}


@dataclass(frozen=True, slots=True)
class ExperimentFamily(Generic[Study]):
    """Experiments that share settings, and the functions in which they differ from other families."""

    experiments: Mapping[str, Experiment]
    prepare: Callable[[Sequence[Experiment], RunOptions], Sweeps]
    """Checks the options and selects the cells."""
    begin: Callable[[Sweeps], Study]
    """Called once the folder exists; tunes what has to be tuned."""
    run_cell: Callable[[Study], RunCell]
    """Returns a picklable function."""
    write_pages: Callable[[Results[Study]], None]
    config: Callable[[Study], Mapping[str, Any] | None] = lambda study: None
    """Values that every record's config must have."""
    formulas: Mapping[str, Callable[[Sequence[Cell]], list[Computed]]] = field(default_factory=dict)
    """Experiments that are computed by formula on every call instead of run."""
    print_tables: Callable[[Results[Study]], None] = Results.print_tables
    document: Callable[[Results[Study]], dict[str, Any]] = Results.document
    closing: Callable[[Results[Study]], Sequence[str]] = lambda results: ()
    """Sentences printed at the end, unless a single cell was selected."""
    reads_trace_folder: bool = False
    """Whether `--trace-dir` is supported."""


def run_family(family: ExperimentFamily[Study], chosen: Sequence[Experiment], options: RunOptions) -> None:
    """Run the missing cells of these experiments, write their pages and print all results.

    Raises:
        InputError: a wrong option, cell, trace or folder, before any run.
    """
    sweeps = family.prepare(chosen, options)
    make_folder(sweeps.folder, "--out")
    results = run_sweeps(family, sweeps, family.begin(sweeps))
    if options.cell is None:
        family.write_pages(results)
    if options.as_json:
        print_json(family.document(results))
    else:
        family.print_tables(results)
    if options.cell is None:
        for sentence in family.closing(results):
            remarks().print(sentence)


def run_sweeps(family: ExperimentFamily[Study], sweeps: Sweeps, study: Study) -> Results[Study]:
    """Run the missing cells; the folder of the sweeps exists."""
    options, run_cell, config = sweeps.options, family.run_cell(study), family.config(study)
    records: dict[str, list[Record]] = {}
    computed: list[Computed] = []
    for experiment in sweeps.experiments:
        cells, path = sweeps.cells[experiment.name], sweeps.path(experiment.name)
        if formula := family.formulas.get(experiment.name):
            points = formula(cells)
            path.write_bytes(b"".join(encode(point) + b"\n" for point in points))
            computed += points
            continue
        with progress_bar(experiment.name) as progress:
            records[experiment.name] = run_cells(
                cells, run_cell, path, config, on=options.on, workers=options.workers, progress=progress
            )
    return Results(sweeps, study, records, computed)


def write_each(sweeps: Sweeps, title: str, write: Callable[[Experiment, Path], Path]) -> None:
    """Write a page per experiment and, for several, an overview; print their paths.

    Args:
        sweeps: the experiments and their folder.
        title: name of the family in the overview.
        write: writes the page of an experiment in a folder and returns its path.
    """
    from kvroute_studies.shared.page import write_index  # its import of plots takes a second

    pages = {}
    for experiment in sweeps.experiments:
        pages[experiment.title] = write(experiment, sweeps.folder / experiment.name)
        remarks().print(f"{experiment.name}: {pages[experiment.title]}")
    if len(pages) > 1:
        overview = write_index(pages, sweeps.folder / "index.html", title=f"{title}, {sweeps.folder.parent.name}")
        remarks().print(f"All: {overview}")


def plain_family(
    name: str,
    experiments: Mapping[str, Experiment],
    run_cell: RunCell,
    write: Callable[[Experiment, Sequence[Record], Path], Path] | None = None,
    print_tables: Callable[[Results[None]], None] = Results.print_tables,
) -> ExperimentFamily[None]:
    """Return a family without readings, assumptions, recorded traces and tuning.

    Args:
        name: its name on the command line.
        experiments: the experiments by name.
        run_cell: a picklable function from cell to record.
        write: writes the page of an experiment with its records in a folder; None: the general page.
        print_tables: prints the tables; by default the general table of each experiment.
    """

    def prepare(chosen: Sequence[Experiment], options: RunOptions) -> Sweeps:
        if options.reading != "paper" or options.changes or options.trace:
            what = f"{name} does not support --reading, --set and --trace"
            raise InputError(what, where=name, hint="omit these options")
        return Sweeps.of(chosen, options, options.reading)

    def write_pages(results: Results[None]) -> None:
        from kvroute_studies.shared.page import write_experiment

        page = write or write_experiment
        write_each(
            results.sweeps, name, lambda experiment, folder: page(experiment, results.records[experiment.name], folder)
        )

    return ExperimentFamily(
        experiments,
        prepare=prepare,
        begin=lambda sweeps: None,
        run_cell=lambda study: run_cell,
        write_pages=write_pages,
        print_tables=print_tables,
    )
