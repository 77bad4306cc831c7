"""A cell is one run of an experiment: settings, policy and seed. Its key identifies it permanently."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import msgspec

from kvroute.sim.metrics import Summary, Timeline


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One point of a sweep, one policy, one seed."""

    experiment: str
    reading: str
    profile: str
    settings: dict[str, float]
    """Axis values, e.g. {"load": 1.0}."""
    policy: str
    seed: int

    @property
    def key(self) -> str:
        """The cell's name, unique within a results folder and readable; the argument of `--cell`."""
        values = ",".join(f"{name}={value:g}" for name, value in self.settings.items())
        return f"{self.experiment}/{self.reading}/{self.profile}/{values}/{self.policy}/{self.seed}"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a cell, with everything needed to run it again."""

    key: str
    cell: Cell
    config: dict[str, Any]
    """Every parameter of the reading, the trace and the tuned weights."""
    summary: Summary
    timeline: Timeline | None = None
    figures: dict[str, float] = {}
    """Further numbers of this experiment by name with unit; values that were not measured are absent."""
    series: dict[str, tuple[tuple[float, float], ...]] = {}
    """Values that changed during the run: (seconds, value)."""
    code: str = ""
    """Digest of the code that produced the record (`provenance.code_of`); empty if it was not recorded."""


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
