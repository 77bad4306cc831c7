"""CLA*: a 10 x 10 grid search for its two weights on a slice of the trace that no measurement uses (NetKV VI-A)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from kvroute.planner.comparison.cells import Cell, Record
from kvroute_studies.netkv.setup import Study, Weights, config_of, run_cell
from kvroute_studies.shared.runner import run_cells

GRID = tuple(round(float(weight), 1) for weight in np.linspace(0.1, 2.0, 10).round(1))
"""Ten values in [0.1, 2.0] for each weight."""
TUNING_SEEDS = (0, 1, 2)


class Tuned(msgspec.Struct, frozen=True, kw_only=True):
    """The best weights of a profile and the flatness of the optimum."""

    profile: str
    weights: Weights
    ttft_s: float
    ttft_at_ones_s: float
    """Mean TTFT with weights (1, 1) on the same slice."""
    within_one_percent: int
    """Number of grid points whose mean TTFT is within 1 % of the best."""


@dataclass(frozen=True, slots=True)
class _GridRun:
    """Runs one grid point. It is picklable."""

    study: Study

    def __call__(self, cell: Cell) -> Record:
        weights = Weights(cache=cell.settings["cache_weight"], load=cell.settings["load_weight"])
        return run_cell(replace(self.study, tuning=True, weights=((cell.profile, weights),)), cell)


def tune(
    study: Study,
    profiles: Iterable[str],
    path: Path,
    *,
    on: str = "local",
    workers: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Tuned]:
    """Run a grid search per profile; results are stored in `path` and reused by later calls.

    Only the ratio of the weights affects decisions, so grid points with the same ratio give equal results. On a tie,
    the point nearest to (1, 1) is used.
    """
    points = [(cache, load) for cache in GRID for load in GRID]
    cells = [
        _cell(study, profile, cache, load, seed)
        for profile in profiles
        for cache, load in points
        for seed in TUNING_SEEDS
    ]
    records = run_cells(cells, _GridRun(study), path, config_of(study), on=on, workers=workers, progress=progress)
    return [_best(profile, [record for record in records if record.cell.profile == profile]) for profile in profiles]


def _cell(study: Study, profile: str, cache: float, load: float, seed: int) -> Cell:
    return Cell(
        experiment="cla-tuning",
        reading=study.reading.name,
        profile=profile,
        settings={"cache_weight": cache, "load_weight": load},
        policy="cla",
        seed=seed,
    )


def _best(profile: str, records: list[Record]) -> Tuned:
    by_weights: dict[tuple[float, float], list[float]] = {}
    for record in records:
        mean_s = record.summary.ttft_s.mean
        key = (record.cell.settings["cache_weight"], record.cell.settings["load_weight"])
        by_weights.setdefault(key, []).append(float("inf") if mean_s is None else mean_s)
    means = {key: float(np.mean(values)) for key, values in by_weights.items()}
    least = min(means.values())
    flat = [key for key, mean_s in means.items() if mean_s <= least * 1.01]
    best = min((key for key in means if means[key] == least), key=lambda key: (abs(key[0] - 1) + abs(key[1] - 1), key))
    ones = min(means, key=lambda key: (abs(key[0] - 1) + abs(key[1] - 1), key))
    return Tuned(
        profile=profile,
        weights=Weights(cache=best[0], load=best[1]),
        ttft_s=least,
        ttft_at_ones_s=means[ones],
        within_one_percent=len(flat),
    )
