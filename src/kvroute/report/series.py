"""Runs grouped by point, profile and policy, and what their seeds say together: what tables and figures show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvroute.experiments.cells import Record
from kvroute.report.compare import Difference, Metric, difference, mean_ttft_s
from kvroute.report.estimate import Estimate, estimate
from kvroute.sim.metrics import Summary


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
