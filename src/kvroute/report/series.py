"""Groups runs by point, profile and policy, and aggregates their seeds for tables and figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvroute.planner.comparison.cells import Record
from kvroute.report.compare import Difference, Metric, difference, mean_ttft_s
from kvroute.report.estimate import Estimate, estimate
from kvroute.sim.metrics import Summary


def policies_of(runs: Iterable[Summary]) -> list[str]:
    """Return policy names in the order of their first run."""
    return list(dict.fromkeys(run.policy for run in runs))


def of_policy(runs: Iterable[Summary], policy: str) -> list[Summary]:
    """Return the runs of one policy in their order."""
    return [run for run in runs if run.policy == policy]


def summaries(records: Iterable[Record]) -> list[Summary]:
    """Return the runs of the records."""
    return [record.summary for record in records]


def profiles_of(records: Iterable[Record]) -> list[str]:
    """Return profile names in the order of their first record."""
    return list(dict.fromkeys(record.cell.profile for record in records))


def of_profile(records: Iterable[Record], profile: str) -> list[Record]:
    """Return the records of one profile in their order."""
    return [record for record in records if record.cell.profile == profile]


def axes_of(records: Iterable[Record]) -> tuple[str, ...]:
    """Return axis names in the order in which the cells list them."""
    return tuple(dict.fromkeys(name for record in records for name in record.cell.settings))


def values_of(records: Iterable[Record], axis: str) -> list[float]:
    """Return the values of an axis in the records, ascending."""
    return sorted({record.cell.settings[axis] for record in records if axis in record.cell.settings})


def by_point(records: Iterable[Record]) -> dict[tuple[float, ...], list[Summary]]:
    """Group runs by their axis values, ascending."""
    groups: dict[tuple[float, ...], list[Summary]] = {}
    for record in records:
        groups.setdefault(tuple(record.cell.settings.values()), []).append(record.summary)
    return dict(sorted(groups.items()))


def line(records: Iterable[Record], axis: str, policy: str, metric: Metric) -> list[tuple[float, Estimate]]:
    """Return (axis value, estimate) ascending, over the policy's runs with that value, without unmeasured values."""
    groups: dict[float, list[float | None]] = {}
    for record in records:
        if record.cell.policy == policy and axis in record.cell.settings:
            groups.setdefault(record.cell.settings[axis], []).append(metric(record.summary))
    found = ((value, estimate(groups[value])) for value in sorted(groups))
    return [(value, known) for value, known in found if known is not None]


def gap(runs: Sequence[Summary], versus: tuple[str, str], metric: Metric = mean_ttft_s) -> Difference | None:
    """Return the paired difference of the pair at one point."""
    return difference(runs, *versus, metric=metric)


def relative_half_width(gap: Difference) -> float | None:
    """Return the half-width of the difference as a share of the second policy's mean; None with one seed."""
    if gap.half_width is None:
        return None
    return gap.half_width * abs(gap.relative / gap.mean) if gap.mean else 0.0
