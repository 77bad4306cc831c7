"""`python -m kvroute_studies.results [NAME...]`: make the result files again whose code has changed, or those named.

Those of recorded traces need `--traces DIR`.
Finished cells are kept in build/results, so that a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from kvroute.cli.output import make_folder
from kvroute.planner.comparison.cells import Record
from kvroute.types import InputError
from kvroute_studies.accuracy.quoted import QUOTED as ACCURACY
from kvroute_studies.aggregated.quoted import QUOTED as AGGREGATED
from kvroute_studies.autoscaling.quoted import QUOTED as AUTOSCALING
from kvroute_studies.command import families
from kvroute_studies.dualpath.quoted import QUOTED as DUALPATH
from kvroute_studies.heroserve.quoted import QUOTED as HEROSERVE
from kvroute_studies.netkv.quoted import QUOTED as NETKV
from kvroute_studies.never_worse.quoted import QUOTED as NEVER_WORSE
from kvroute_studies.never_worse.run import TRACES_VARIABLE, Traces
from kvroute_studies.prefix_copies.quoted import QUOTED as PREFIX_COPIES
from kvroute_studies.prfaas.quoted import QUOTED as PRFAAS
from kvroute_studies.shared.family import ExperimentFamily, run_sweeps
from kvroute_studies.shared.provenance import PACKAGES, digest
from kvroute_studies.shared.result_files import (
    Quoted,
    ResultFile,
    code_digests,
    read_results,
    write_result,
)
from kvroute_studies.shared.sweeps import RunOptions

STUDIES: Mapping[str, Mapping[str, Quoted]] = {
    "accuracy": ACCURACY,
    "aggregated": AGGREGATED,
    "autoscaling": AUTOSCALING,
    "dualpath": DUALPATH,
    "heroserve": HEROSERVE,
    "netkv": NETKV,
    "never_worse": NEVER_WORSE,
    "prefix_copies": PREFIX_COPIES,
    "prfaas": PRFAAS,
}
"""By folder of the study, then by name of the result."""
CELLS = Path("build") / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    """Make results; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="results to make, although their code is the same")
    parser.add_argument("--list", action="store_true", help="print name, date and changed code of each, and stop")
    parser.add_argument("--workers", type=int, help="number of processes; default: one per core")
    parser.add_argument("--traces", type=Path, help=f"folder of the recorded traces (or set {TRACES_VARIABLE})")
    given = parser.parse_args(arguments)
    try:
        if given.list:
            sys.stdout.writelines(f"{line}\n" for line in states())
            return 0
        traces = Traces.of(given.traces)
        for name in given.names:
            make(name, traces, given.workers)
        for name in () if given.names else stale():
            try:
                run_options(_all()[name][1], CELLS, traces)
            except InputError as error:
                sys.stderr.write(f"{name} is not made: {error}\n")
            else:
                make(name, traces, given.workers)
    except InputError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def states() -> list[str]:
    """Return a line for each result file: whether it is from the code of today."""
    return [
        f"{name} ({result.date}): {f'stale ({changed})' if (changed := ', '.join(result.changed())) else 'current'}"
        for name, result in read_results().items()
    ]


def stale() -> list[str]:
    """Return the results that are missing, or whose code has changed."""
    results = read_results()
    return [name for name in _all() if name not in results or results[name].changed()]


def make(name: str, traces: Traces, workers: int | None = None) -> Path:
    """Run what is missing of the experiments of a result; return the file that was written.

    Raises:
        InputError: there is no such result, or a recorded trace is missing.
    """
    if name not in _all():
        raise InputError(f"there is no result {name!r}", hint=f"choose among {', '.join(_all())}")
    study, quoted = _all()[name]
    path = PACKAGES["kvroute_studies"] / study / "results" / f"{name}.json"
    write_result(path, result_of(quoted, cells_folder(study, quoted), traces, workers))
    sys.stdout.write(f"{name}: {path}\n")
    return path


def cells_folder(study: str, quoted: Quoted) -> Path:
    """Return the folder of finished cells. Records do not count the study's own code: each state of it has its own."""
    own = {entry: code for entry, code in code_digests(quoted.code).items() if entry.startswith("kvroute_studies/")}
    return CELLS / study / digest(own)


def result_of(quoted: Quoted, out: Path, traces: Traces, workers: int | None = None) -> ResultFile:
    """Run what is missing of the experiments in a folder; return what the pages quote of them.

    Raises:
        InputError: a recorded trace is missing.
    """
    code = code_digests(quoted.code)  # before the source can change
    options, given = run_options(quoted, out, traces, workers)
    family = _family(quoted)
    records: list[Record] = []
    for name in quoted.experiments:
        sweeps = family.prepare([family.experiments[name]], options)
        make_folder(sweeps.folder, "--out")
        records += run_sweeps(family, sweeps, family.begin(sweeps)).records[name]
    return ResultFile(
        command=quoted.command(given),
        date=date.today().isoformat(),
        seeds=quoted.seeds,
        code=code,
        tables=dict(quoted.tables(records)),
        figures=dict(quoted.figures(records)),
    )


def run_options(
    quoted: Quoted, out: Path, traces: Traces, workers: int | None = None
) -> tuple[RunOptions, Sequence[str]]:
    """Return the options of a run, and those of its command that name recorded traces.

    Raises:
        InputError: a recorded trace is missing.
    """
    paths = [traces.recorded(name) for name in quoted.traces]
    in_folder = _family(quoted).reads_trace_folder
    options = RunOptions(
        reading=quoted.reading,
        changes=quoted.changes,
        profiles=quoted.profiles,
        trace=None if in_folder or not paths else paths[0],
        cell=None,
        seeds=tuple(range(quoted.seeds)),
        on="local",
        workers=workers,
        out=out,
        as_json=False,
        trace_dir=Path(os.path.commonpath([path.parent for path in paths])) if in_folder and paths else None,
    )
    return options, ["--trace-dir traces"] if in_folder and paths else [f"--trace {path.name}" for path in paths]


def _family(quoted: Quoted) -> ExperimentFamily[Any]:
    return next(family for family in families().values() if quoted.experiments[0] in family.experiments)


def _all() -> dict[str, tuple[str, Quoted]]:
    return {name: (study, quoted) for study, some in STUDIES.items() for name, quoted in some.items()}


if __name__ == "__main__":
    sys.exit(main())
