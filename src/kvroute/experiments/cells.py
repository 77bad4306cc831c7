"""A cell is one run of an experiment: what was set, which policy, which seed; its key names it for ever."""

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
        """Unique within a results folder, readable, and what `--cell` takes."""
        values = ",".join(f"{name}={value:g}" for name, value in self.settings.items())
        return f"{self.experiment}/{self.reading}/{self.profile}/{values}/{self.policy}/{self.seed}"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What a cell gave, with all that is needed to run it again."""

    key: str
    cell: Cell
    config: dict[str, Any]
    """Every parameter of the reading, the trace and the tuned weights."""
    summary: Summary
    timeline: Timeline | None = None
    figures: dict[str, float] = {}
    """Numbers of this experiment beyond the summary, by name with their unit; what was not measured is absent."""
    series: dict[str, tuple[tuple[float, float], ...]] = {}
    """What moved during the run: (seconds, value)."""
    code: str = ""
    """Digest of the code that it comes from (`provenance.code_of`); empty: it was not written down."""


class Computed(msgspec.Struct, frozen=True, kw_only=True):
    """What a cell gave that is arithmetic and no run."""

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
    """Axis name to values; the sweep is their product."""
    policies: tuple[str, ...]
    profiles: tuple[str, ...]
    expectation: str
    """The direction that the publication leads one to expect; the report says whether it came out so."""
    versus: tuple[str, str] = ("netkv", "cla")
    """The pair of policies that the figure compares."""
    certain: tuple[str, ...] = ()
    """Profiles without chance: one seed says it all."""


def cells(experiment: Experiment, reading: str, profiles: tuple[str, ...], seeds: tuple[int, ...]) -> list[Cell]:
    """The sweep, seed by seed within a point, so that an interrupted run has whole points first."""
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
