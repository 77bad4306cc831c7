"""Whether storage or compute limits turns that read cached KV, and what decode nodes add (DualPath 4.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvroute.planner.dualpath.problem import DualPathProblem
from kvroute.planner.dualpath.storage_paths import Saturation, best_reads, saturation


@dataclass(frozen=True, slots=True)
class StorageRates:
    """KV bytes per second of the whole cluster that are read from storage."""

    pooled: float
    """Through prefill and decode nodes."""
    prefill_only: float


@dataclass(frozen=True, slots=True)
class TurnRates:
    """Turns per second."""

    storage: float
    """Turns whose cached KV is read at the pooled rate."""
    compute: float
    """Turns whose appended tokens the prefill GPUs compute."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Range of the number of prefill nodes per decode node. `high` None: without limit."""

    low: float
    high: float | None


@dataclass(frozen=True, slots=True)
class DualPathPlan:
    """What the formulas give for one file."""

    name: str
    pd_interval: Interval | None
    """Ratios with which all storage NICs can read at full rate; None: there is no such ratio."""
    binding: str
    """The resource with the highest utilisation at the pooled rate."""
    utilisation: dict[str, float]
    """Share of each resource that is in use at the pooled rate."""
    utilisation_prefill_only: dict[str, float]
    """Share of each resource that is in use if only prefill nodes read, as fast as they can."""
    rate_bytes_per_s: StorageRates
    bound: Literal["storage", "compute"]
    turns_per_s: TurnRates
    cached_bytes_per_flop: float
    """Cache-compute ratio (table 1)."""
    obstacles: tuple[str, ...]
    """Resources that prevent full rate at every ratio."""
    choices: tuple[str, ...]
    """What was assumed, as sentences."""


@dataclass(frozen=True, slots=True)
class RatioPoint:
    """The rates with another ratio of prefill to decode nodes and the same number of nodes."""

    ratio: float
    """Prefill nodes per decode node."""
    rate_bytes_per_s: StorageRates
    compute_turns_per_s: float


def plan_dualpath(problem: DualPathProblem) -> DualPathPlan:
    """Return what the formulas give."""
    prefill, decode, found = problem.prefill_nodes, problem.decode_nodes, problem.loads
    reads = best_reads(found, prefill, decode)
    only = best_reads(found, prefill, decode, prefill_only=True)
    utilisation = _utilisation(problem, reads)
    range_ = saturation(found)
    turns = TurnRates(sum(reads) / problem.turn_cached_bytes, prefill * problem.node_flop_per_s / problem.turn_flop)
    return DualPathPlan(
        name=problem.name,
        pd_interval=Interval(range_.low, range_.high if math.isfinite(range_.high) else None)
        if range_.possible
        else None,
        binding=max(utilisation, key=lambda name: round(utilisation[name], 9)),
        utilisation=utilisation,
        utilisation_prefill_only=_utilisation(problem, only),
        rate_bytes_per_s=StorageRates(sum(reads), only[0]),
        bound="storage" if turns.storage < turns.compute else "compute",
        turns_per_s=turns,
        cached_bytes_per_flop=problem.turn_cached_bytes / problem.turn_flop,
        obstacles=() if range_.possible else _obstacles(range_),
        choices=problem.choices,
    )


def over_ratios(problem: DualPathProblem, points: int = 81) -> tuple[RatioPoint, ...]:
    """Return the rates over the ratio of prefill to decode nodes, on a logarithmic scale.

    The number of nodes stays that of the file, and their shares need not be whole. The ratios reach twice beyond the
    file's own and beyond the range at which all storage NICs can read at full rate, and farther without such a range.
    """
    range_, own = saturation(problem.loads), problem.prefill_nodes / problem.decode_nodes
    marks = [own, *(mark for mark in (range_.low, range_.high) if range_.possible and 0.01 <= mark <= 100.0)]
    beyond = 2.0 if range_.possible else 8.0
    nodes = problem.prefill_nodes + problem.decode_nodes
    found = []
    for ratio in sorted({*np.geomspace(min(marks) / beyond, max(marks) * beyond, points).tolist(), *marks}):
        prefill, decode = nodes * ratio / (1.0 + ratio), nodes / (1.0 + ratio)
        pooled = sum(best_reads(problem.loads, prefill, decode))
        only = best_reads(problem.loads, prefill, decode, prefill_only=True)[0]
        compute = prefill * problem.node_flop_per_s / problem.turn_flop
        found.append(RatioPoint(ratio, StorageRates(pooled, only), compute))
    return tuple(found)


def _utilisation(problem: DualPathProblem, reads: tuple[float, float]) -> dict[str, float]:
    """Return the share of each resource that these read rates of prefill and decode nodes use."""
    nodes = {"prefill": problem.prefill_nodes, "decode": problem.decode_nodes}
    return {
        load.name: (load.per_prefill_read * reads[0] + load.per_decode_read * reads[1])
        / (load.capacity * nodes[load.side])
        for load in problem.loads
    }


def _obstacles(found: Saturation) -> tuple[str, ...]:
    assert found.high_by is not None
    if found.high < 0.0 or found.low_by is None:
        return (f"{found.high_by.name} is overloaded at every ratio",)
    return (
        f"{found.low_by.name} needs at least {found.low:.3g} prefill nodes per decode node",
        f"{found.high_by.name} allows at most {found.high:.3g}",
    )
