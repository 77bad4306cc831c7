"""The options of an experiment, and the cells that they select."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from kvroute.planner.comparison.cells import Cell
from kvroute.types import InputError
from kvroute_studies.shared.cells import Experiment, cells

_LISTED = 20
"""Maximum number of names that an error lists."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of `kvroute experiment`."""

    reading: str
    changes: Sequence[str]
    profiles: Sequence[str]
    """Names or shell patterns of selected profiles; empty for all."""
    trace: Path | None
    cell: str | None
    seeds: tuple[int, ...]
    on: str
    workers: int | None
    out: Path
    as_json: bool
    trace_dir: Path | None = None
    """Folder of recorded traces, for sweeps that use several."""

    def folder(self, reading: str) -> Path:
        """Return the results folder of a reading."""
        return self.out / reading / (self.trace.name if self.trace else "generated")

    def sweep(self, experiment: Experiment, reading: str) -> list[Cell]:
        """Return the selected cells of an experiment, checked before any run.

        Raises:
            InputError: the experiment does not have a selected profile or cell.
        """
        for name in self.profiles:
            if not fnmatch.filter(experiment.profiles, name):
                raise InputError(
                    f"there is no profile {name!r}", where="--profile", hint=_choices(name, experiment.profiles)
                )
        wanted = tuple(
            profile
            for profile in experiment.profiles
            if not self.profiles or any(fnmatch.fnmatchcase(profile, name) for name in self.profiles)
        )
        sweep = cells(experiment, reading, wanted, self.seeds)
        return sweep if self.cell is None else _matching(sweep, experiment, self.cell)


def _choices(name: str, profiles: Sequence[str]) -> str:
    """Return the names to choose from: all, or of many those that are most like the given one."""
    if len(profiles) <= _LISTED:
        return f"choose among {', '.join(profiles)}"
    near = get_close_matches(name, profiles, 3, cutoff=0.3) or profiles[:3]
    return f"choose among {len(profiles)}, such as {', '.join(near)}"


def _matching(sweep: list[Cell], experiment: Experiment, text: str) -> list[Cell]:
    """Return the cells that match a profile, one value per axis and a policy."""
    parts = [part.strip() for part in text.split(",")]
    form = ",".join(("profile", *experiment.axes, "policy"))
    if len(parts) != len(experiment.axes) + 2:
        raise InputError(f"{text!r} is not a cell of {experiment.name}", where="--cell", hint=f"write {form}")
    try:
        values = [float(part) for part in parts[1:-1]]
    except ValueError:
        raise InputError(
            f"{text!r} has an axis value that is not a number", where="--cell", hint=f"write {form}"
        ) from None
    found = [
        cell
        for cell in sweep
        if (cell.profile, cell.policy) == (parts[0], parts[-1]) and list(cell.settings.values()) == values
    ]
    if not found:
        points = [f"{axis}: {', '.join(f'{value:g}' for value in values)}" for axis, values in experiment.axes.items()]
        profiles = _choices(parts[0], experiment.profiles)
        hint = "; ".join((f"profiles: {profiles}", *points, f"policies: {', '.join(experiment.policies)}"))
        raise InputError(f"{experiment.name} has no cell {text!r}", where="--cell", hint=hint)
    return found
