"""The command that repeats an experiment, derived from its results: reading, profiles and seeds."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from kvroute.planner.comparison.cells import Cell
from kvroute_studies.shared.cells import Experiment


def sweep_options(experiment: Experiment, cells: Sequence[Cell]) -> str:
    """Return profiles (unless all ran) and seeds as options, with a leading blank."""
    ran = {cell.profile for cell in cells}
    profiles = [name for name in experiment.profiles if name in ran]
    command = (
        "" if len(profiles) == len(experiment.profiles) else "".join(f" --profile {shlex.quote(p)}" for p in profiles)
    )
    return command + seed_options(cells)


def seed_options(cells: Sequence[Cell]) -> str:
    """Return the option for the range from the first to the last seed."""
    first, last = min(cell.seed for cell in cells), max(cell.seed for cell in cells)
    return f"{f' --seed {first}' if first else ''} --seeds {last - first + 1}"


def cell_options(cell: Cell) -> str:
    """Return the options for one cell."""
    point = ",".join((cell.profile, *(f"{value:g}" for value in cell.settings.values()), cell.policy))
    return f" --cell {shlex.quote(point)} --seed {cell.seed}"


def reading_options(cell: Cell, *, named: bool) -> str:
    """Return options for the reading and the changed assumptions; `named`: the experiment has several readings."""
    name, *changes = cell.reading.split("+")
    return (f" --reading {shlex.quote(name)}" if named else "") + "".join(f" --set {shlex.quote(c)}" for c in changes)
