"""Published sweeps as data: an experiment, and the cells that it consists of."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import msgspec

from kvroute.planner.comparison.cells import Cell


class Computed(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a cell that is computed by formula, without a run."""

    key: str
    cell: Cell
    config: dict[str, Any]
    figures: dict[str, float]


@dataclass(frozen=True, slots=True)
class Experiment:
    """A published sweep as data."""

    name: str
    title: str
    source: str
    axes: dict[str, tuple[float, ...]]
    """Values by axis name; the sweep is their product."""
    policies: tuple[str, ...]
    profiles: tuple[str, ...]
    expectation: str
    """The direction that the publication suggests; the report states whether the results agree."""
    versus: tuple[str, str] = ("netkv", "cla")
    """The two policies that the figure compares."""
    certain: tuple[str, ...] = ()
    """Profiles without randomness, for which one seed is enough."""


def cells(experiment: Experiment, reading: str, profiles: tuple[str, ...], seeds: tuple[int, ...]) -> list[Cell]:
    """Return the sweep, seed by seed within a point, so an interrupted run leaves complete points first."""
    points = [dict(zip(experiment.axes, values, strict=True)) for values in product(*experiment.axes.values())]
    return [
        Cell(
            experiment=experiment.name,
            reading=reading,
            profile=profile,
            settings={name: float(value) for name, value in point.items()},
            policy=policy,
            seed=seed,
        )
        for profile in profiles
        for point in points
        for seed in (seeds[:1] if profile in experiment.certain else seeds)
        for policy in experiment.policies
    ]
