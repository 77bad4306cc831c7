"""The command that gives an experiment's results again, told from the results: reading, profiles and seeds."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from kvroute.experiments.cells import Cell, Experiment


def sweep_options(experiment: Experiment, cells: Sequence[Cell]) -> str:
    """Profiles, where not all ran, and seeds, as options; begins with a blank."""
    ran = {cell.profile for cell in cells}
    profiles = [name for name in experiment.profiles if name in ran]
    told = (
        "" if len(profiles) == len(experiment.profiles) else "".join(f" --profile {shlex.quote(p)}" for p in profiles)
    )
    return told + seed_options(cells)


def seed_options(cells: Sequence[Cell]) -> str:
    """From the first seed to the last."""
    first, last = min(cell.seed for cell in cells), max(cell.seed for cell in cells)
    return f"{f' --seed {first}' if first else ''} --seeds {last - first + 1}"


def cell_options(cell: Cell) -> str:
    """One cell alone."""
    point = ",".join((cell.profile, *(f"{value:g}" for value in cell.settings.values()), cell.policy))
    return f" --cell {shlex.quote(point)} --seed {cell.seed}"


def reading_options(cell: Cell, *, named: bool) -> str:
    """The reading and the assumptions that were changed; `named`: whether the experiment has several readings."""
    name, *changes = cell.reading.split("+")
    return (f" --reading {shlex.quote(name)}" if named else "") + "".join(f" --set {shlex.quote(c)}" for c in changes)
