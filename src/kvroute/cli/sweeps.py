"""The options of an experiment, and the cells that they select."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvroute.comparison.cells import Cell
from kvroute.experiments.cells import Experiment, cells
from kvroute.types import InputError


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of `kvroute experiment`."""

    reading: str
    changes: Sequence[str]
    profiles: Sequence[str]
    """Selected profiles; empty for all."""
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

    def sweep(self, one: Experiment, reading: str) -> list[Cell]:
        """Return the selected cells of an experiment, checked before any run.

        Raises:
            InputError: the experiment does not have a selected profile or cell.
        """
        for name in self.profiles:
            if name not in one.profiles:
                hint = f"choose among {', '.join(one.profiles)}"
                raise InputError(f"there is no profile {name!r}", where="--profile", hint=hint)
        wanted = tuple(name for name in one.profiles if not self.profiles or name in self.profiles)
        sweep = cells(one, reading, wanted, self.seeds)
        return sweep if self.cell is None else _matching(sweep, one, self.cell)


def _matching(sweep: list[Cell], one: Experiment, text: str) -> list[Cell]:
    """Return the cells that match a profile, one value per axis and a policy."""
    parts = [part.strip() for part in text.split(",")]
    form = ",".join(("profile", *one.axes, "policy"))
    if len(parts) != len(one.axes) + 2:
        raise InputError(f"{text!r} is not a cell of {one.name}", where="--cell", hint=f"write {form}")
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
        points = [f"{axis}: {', '.join(f'{value:g}' for value in values)}" for axis, values in one.axes.items()]
        hint = "; ".join((f"profiles: {', '.join(one.profiles)}", *points, f"policies: {', '.join(one.policies)}"))
        raise InputError(f"{one.name} has no cell {text!r}", where="--cell", hint=hint)
    return found
