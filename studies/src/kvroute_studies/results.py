"""`python -m kvroute_studies.results [NAME...]`: make the result files again whose code has changed, or those named.

Finished cells are kept in build/results, so that a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from kvroute.cli.output import make_folder
from kvroute.planner.comparison.cells import Record
from kvroute.types import InputError
from kvroute_studies.aggregated.quoted import QUOTED as AGGREGATED
from kvroute_studies.autoscaling.quoted import QUOTED as AUTOSCALING
from kvroute_studies.command import families
from kvroute_studies.dualpath.quoted import QUOTED as DUALPATH
from kvroute_studies.heroserve.quoted import QUOTED as HEROSERVE
from kvroute_studies.prefix_copies.quoted import QUOTED as PREFIX_COPIES
from kvroute_studies.shared.family import ExperimentFamily, run_sweeps
from kvroute_studies.shared.provenance import PACKAGES
from kvroute_studies.shared.result_files import (
    Quoted,
    ResultFile,
    code_digests,
    read_results,
    write_result,
)
from kvroute_studies.shared.sweeps import RunOptions

STUDIES: Mapping[str, Mapping[str, Quoted]] = {
    "aggregated": AGGREGATED,
    "autoscaling": AUTOSCALING,
    "dualpath": DUALPATH,
    "heroserve": HEROSERVE,
    "prefix_copies": PREFIX_COPIES,
}
"""By folder of the study, then by name of the result."""
CELLS = Path("build") / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    """Make results; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="results to make, although their code is the same")
    parser.add_argument("--list", action="store_true", help="print name, date and changed code of each, and stop")
    parser.add_argument("--workers", type=int, help="number of processes; default: one per core")
    given = parser.parse_args(arguments)
    try:
        if given.list:
            sys.stdout.writelines(f"{line}\n" for line in states())
            return 0
        for name in given.names or stale():
            make(name, given.workers)
    except InputError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def states() -> list[str]:
    """Return a line for each result file: whether it is from the code of today."""
    lines = []
    for name, result in read_results().items():
        changed = ", ".join(result.changed())
        by_hand = "" if name in _all() else f"; by hand: {result.command}"
        lines.append(f"{name} ({result.date}): {f'stale ({changed}){by_hand}' if changed else 'current'}")
    return lines


def stale() -> list[str]:
    """Return the results that are missing, or whose code has changed."""
    results = read_results()
    return [name for name in _all() if name not in results or results[name].changed()]


def make(name: str, workers: int | None = None) -> Path:
    """Run what is missing of the experiment of a result; return the file that was written.

    Raises:
        InputError: there is no such result, or no command makes it.
    """
    if name not in _all():
        raise InputError(f"no run is known for {name!r}", hint=f"choose among {', '.join(_all())}")
    study, quoted = _all()[name]
    path = PACKAGES["kvroute_studies"] / study / "results" / f"{name}.json"
    write_result(path, result_of(quoted, CELLS / study, workers))
    sys.stdout.write(f"{name}: {path}\n")
    return path


def result_of(quoted: Quoted, out: Path, workers: int | None = None) -> ResultFile:
    """Run what is missing of an experiment in a folder; return what the pages quote of it."""
    code = code_digests(quoted.code)  # before the source can change
    records = _records(quoted, out, workers)
    return ResultFile(
        command=quoted.command,
        date=date.today().isoformat(),
        seeds=quoted.seeds,
        code=code,
        tables=dict(quoted.tables(records)),
        figures=dict(quoted.figures(records)),
    )


def _all() -> dict[str, tuple[str, Quoted]]:
    return {name: (study, quoted) for study, some in STUDIES.items() for name, quoted in some.items()}


def _records(quoted: Quoted, out: Path, workers: int | None) -> Sequence[Record]:
    family: ExperimentFamily[Any] = next(
        members for members in families().values() if quoted.experiment in members.experiments
    )
    options = RunOptions(
        reading="paper",
        changes=(),
        profiles=quoted.profiles,
        trace=None,
        cell=None,
        seeds=tuple(range(quoted.seeds)),
        on="local",
        workers=workers,
        out=out,
        as_json=False,
    )
    sweeps = family.prepare([family.experiments[quoted.experiment]], options)
    make_folder(sweeps.folder, "--out")
    return run_sweeps(family, sweeps, family.begin(sweeps)).records[quoted.experiment]


if __name__ == "__main__":
    sys.exit(main())
