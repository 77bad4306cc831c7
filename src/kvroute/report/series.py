"""Runs grouped by point, profile and policy, and what their seeds say together: what tables and figures show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from kvroute.experiments.cells import Record
from kvroute.report.compare import Difference, Metric, difference, mean_ttft_s
from kvroute.sim.metrics import Summary


@dataclass(frozen=True, slots=True)
class Estimate:
    """A metric over seeds, in the metric's own unit."""

    mean: float
    std: float
    """Sample standard deviation; 0 with one seed."""
    half_width: float | None
    """Half of the 95 % confidence interval of the mean (Student's t); None with one seed."""
    seeds: int


def estimate(values: Iterable[float | None]) -> Estimate | None:
    """Mean and spread of the values that were measured; None where none was."""
    known = np.array([value for value in values if value is not None], dtype=np.float64)
    if not known.size:
        return None
    mean, count = float(known.mean()), int(known.size)
    if count == 1:
        return Estimate(mean, 0.0, None, 1)
    std = float(known.std(ddof=1))
    return Estimate(mean, std, float(stdtrit(count - 1, 0.975)) * std / float(np.sqrt(count)), count)


def policies_of(runs: Iterable[Summary]) -> list[str]:
    """Names in the order of their first run."""
    return list(dict.fromkeys(run.policy for run in runs))


def of_policy(runs: Iterable[Summary], policy: str) -> list[Summary]:
    """The runs of one policy, in their order."""
    return [run for run in runs if run.policy == policy]


def summaries(records: Iterable[Record]) -> list[Summary]:
    """The records' runs."""
    return [record.summary for record in records]


def profiles_of(records: Iterable[Record]) -> list[str]:
    """Names in the order of their first record."""
    return list(dict.fromkeys(record.cell.profile for record in records))


def of_profile(records: Iterable[Record], profile: str) -> list[Record]:
    """The records of one profile, in their order."""
    return [record for record in records if record.cell.profile == profile]


def axes_of(records: Iterable[Record]) -> tuple[str, ...]:
    """Axis names in the order in which the cells give them."""
    return tuple(dict.fromkeys(name for record in records for name in record.cell.settings))


def values_of(records: Iterable[Record], axis: str) -> list[float]:
    """The axis values that occur, ascending."""
    return sorted({record.cell.settings[axis] for record in records if axis in record.cell.settings})


def by_point(records: Iterable[Record]) -> dict[tuple[float, ...], list[Summary]]:
    """Runs by their axis values, ascending."""
    groups: dict[tuple[float, ...], list[Summary]] = {}
    for record in records:
        groups.setdefault(tuple(record.cell.settings.values()), []).append(record.summary)
    return dict(sorted(groups.items()))


def line(records: Iterable[Record], axis: str, policy: str, metric: Metric) -> list[tuple[float, Estimate]]:
    """(axis value, estimate) ascending, over all runs of the policy with that value; unmeasured values are left out."""
    groups: dict[float, list[float | None]] = {}
    for record in records:
        if record.cell.policy == policy and axis in record.cell.settings:
            groups.setdefault(record.cell.settings[axis], []).append(metric(record.summary))
    found = ((value, estimate(groups[value])) for value in sorted(groups))
    return [(value, known) for value, known in found if known is not None]


def gap(runs: Sequence[Summary], versus: tuple[str, str], metric: Metric = mean_ttft_s) -> Difference | None:
    """Paired difference of the pair in one point."""
    return difference(runs, *versus, metric=metric)


def relative_half_width(gap: Difference) -> float | None:
    """Half-width of the difference as a share of the second policy's mean; None with one seed."""
    if gap.half_width is None:
        return None
    return gap.half_width * abs(gap.relative / gap.mean) if gap.mean else 0.0
