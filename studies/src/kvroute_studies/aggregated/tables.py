"""The tables of `aggregated`: how far the default policy is from the best of the others in each set of cells, and the
cells in which it is farthest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvroute.planner.comparison.cells import Record
from kvroute.report.grid import UNKNOWN, Grid, GridEntry, Heading
from kvroute.report.series import of_profile, profiles_of
from kvroute_studies.aggregated.cases import queues
from kvroute_studies.aggregated.run import BASELINES, BOUNDED, CHOICE, PAIRS

Value = Callable[[Record], float | None]
ALLOWED_PERCENT = 2.0
"""A cell in which the default is above the best of the others by no more than this, beyond noise, counts as equal."""
WORST = 10
_BASES = ", ".join(BASELINES)


@dataclass(frozen=True, slots=True)
class RelativeDifference:
    """A mean of the choice relative to that of a baseline, less 1, over the same requests, in per cent."""

    percent: float
    width: float | None
    """Two standard errors of the paired differences; None with one seed."""

    def above(self, percent: float) -> bool:
        """Return whether the choice is more than `percent` above the baseline, beyond noise."""
        return self.percent - (self.width or 0.0) > percent


def response_s(record: Record) -> float | None:
    """Return the mean time from arrival to last token."""
    return record.figures.get("response_s")


def ttft_s(record: Record) -> float | None:
    """Return the mean time to the first token."""
    return record.summary.ttft_s.mean


def tpot_p99_s(record: Record) -> float | None:
    """Return the 99th percentile of the time per output token."""
    return record.summary.tpot_s.p99


def difference(
    records: Sequence[Record], baselines: Sequence[str], value: Value = response_s, choice: str = CHOICE
) -> RelativeDifference | None:
    """Compare the choice in one cell with that baseline which has the lowest mean; None if a seed lacks a policy."""
    by_policy = {
        name: {record.cell.seed: found for record in records if record.cell.policy == name and (found := value(record))}
        for name in (choice, *baselines)
    }
    seeds = sorted(by_policy[choice])
    if not seeds or any(sorted(of_seed) != seeds for of_seed in by_policy.values()):
        return None
    own = np.array([by_policy[choice][seed] for seed in seeds])
    others = min(
        (np.array([by_policy[name][seed] for seed in seeds]) for name in baselines),
        key=lambda values: float(values.mean()),
    )
    gaps, mean = own - others, float(others.mean())
    width = 2 * float(gaps.std(ddof=1)) / float(np.sqrt(len(gaps))) if len(gaps) > 1 else None
    return RelativeDifference(100 * float(gaps.mean()) / mean, None if width is None else 100 * width / mean)


@dataclass(frozen=True, slots=True)
class CellsVerdict:
    """What the cells of one set show of the default, or of another policy; times in per cent of the others'."""

    cells: int
    equal: int
    """Cells in which its mean response time is at most 2 % above that of the best baseline."""
    worst: RelativeDifference | None
    """Highest difference of the mean response time to the best baseline."""
    above_pairs: int
    """Cells in which prompts queue and its mean response time is more than 2 % above that of pairs."""
    ttft_above: int
    """Cells in which its mean TTFT is more than 2 % above the lower of pairs' and the bounded choice's."""
    ttft: float
    """Geometric mean of the mean TTFT relative to pairs."""
    tpot_p99: float
    """Geometric mean of the 99th percentile of TPOT relative to pairs."""
    tpot_p99_p90: float
    """90th percentile of the same ratios."""
    rejected: dict[str, int]
    """Rejected requests by policy."""


def verdict(records: Sequence[Record], choice: str = CHOICE) -> CellsVerdict:
    """Judge the choice in all cells that have every policy."""
    cells = {profile: of_profile(records, profile) for profile in profiles_of(records)}
    found = {name: gap for name, some in cells.items() if (gap := difference(some, BASELINES, choice=choice))}
    ratios = {
        value: [1 + gap.percent / 100 for name in found if (gap := difference(cells[name], (PAIRS,), value, choice))]
        for value in (ttft_s, tpot_p99_s)
    }
    rejected = dict.fromkeys((choice, *BASELINES), 0)
    for name in found:
        for record in cells[name]:
            if record.cell.policy in rejected:
                rejected[record.cell.policy] += int(record.figures["rejected"])
    return CellsVerdict(
        cells=len(found),
        equal=sum(not gap.above(ALLOWED_PERCENT) for gap in found.values()),
        worst=max(found.values(), key=lambda gap: gap.percent, default=None),
        above_pairs=_above(difference(cells[name], (PAIRS,), response_s, choice) for name in found if queues(name)),
        ttft_above=_above(difference(cells[name], (PAIRS, BOUNDED), ttft_s, choice) for name in found),
        ttft=_geometric_percent(ratios[ttft_s]),
        tpot_p99=_geometric_percent(ratios[tpot_p99_s]),
        tpot_p99_p90=100 * (float(np.quantile(ratios[tpot_p99_s], 0.9)) - 1) if ratios[tpot_p99_s] else 0.0,
        rejected=rejected,
    )


def _above(found: Iterable[RelativeDifference | None]) -> int:
    return sum(gap is not None and gap.above(ALLOWED_PERCENT) for gap in found)


def _geometric_percent(ratios: Sequence[float]) -> float:
    return 100 * (float(np.exp(np.mean(np.log(ratios)))) - 1) if ratios else 0.0


def verdict_grid(records: Sequence[Record]) -> Grid:
    """Return a row for the default and for each baseline, for each set of cells."""
    headings = (
        Heading("cells"),
        Heading("policy"),
        Heading("within 2 %", "Cells in which the mean response time is at most 2 % above the best of " + _BASES),
        Heading("worst %", "Highest mean response time relative to the best of " + _BASES),
        Heading("above pairs", "Cells with queues in which the mean response time is more than 2 % above pairs'"),
        Heading(
            "TTFT above", f"Cells in which the mean TTFT is more than 2 % above the lower of {PAIRS} and {BOUNDED}"
        ),
        Heading("TTFT %", "Geometric mean of the mean TTFT relative to pairs"),
        Heading("TPOT P99 %", "Geometric mean of the 99th percentile of TPOT relative to pairs"),
        Heading("its P90 %", "90th percentile of the same differences"),
        Heading("rejected", "Rejected requests"),
    )
    sets = {name.split("/")[0]: None for name in profiles_of(records)}
    rows = []
    for cells in sets:
        some = [record for record in records if record.cell.profile.startswith(f"{cells}/")]
        rows += [_row(cells, policy, verdict(some, policy)) for policy in (CHOICE, *BASELINES)]
    return Grid("The default policy beside its alternatives", headings, tuple(rows), labels=2)


def _row(cells: str, policy: str, judged: CellsVerdict) -> tuple[GridEntry, ...]:
    worst = f"{judged.worst.percent:+.1f}" if judged.worst else UNKNOWN
    return (
        GridEntry(cells),
        GridEntry(policy),
        GridEntry(f"{judged.equal} of {judged.cells}"),
        GridEntry(worst),
        GridEntry(str(judged.above_pairs)),
        GridEntry(str(judged.ttft_above)),
        GridEntry(f"{judged.ttft:+.0f}"),
        GridEntry(f"{judged.tpot_p99:+.0f}"),
        GridEntry(f"{judged.tpot_p99_p90:+.0f}"),
        GridEntry(str(judged.rejected[policy])),
    )


def worst_grid(records: Sequence[Record], count: int = WORST) -> Grid:
    """Return the cells in which the default's mean response time is farthest above the best baseline's."""
    cells = {profile: of_profile(records, profile) for profile in profiles_of(records)}
    found = {name: gap for name, some in cells.items() if (gap := difference(some, BASELINES))}
    worst = sorted(found, key=lambda name: -found[name].percent)[:count]
    headings = (
        Heading("cell"),
        Heading("aggr. %", "Requests that one instance served, without a KV transfer"),
        Heading("response s", "Mean time from arrival to last token"),
        Heading("to the best %", "Difference of the mean response time to the best of the others, two standard errors"),
        *(Heading(f"{name} %", f"Difference of the mean response time to {name}") for name in BASELINES),
        Heading("TTFT %", "Difference of the mean TTFT to pairs"),
        Heading("TPOT P99 %", "Difference of the 99th percentile of TPOT to pairs"),
    )
    rows = []
    for name in worst:
        mine = [record for record in cells[name] if record.cell.policy == CHOICE]
        aggregated = 100 * float(np.mean([record.figures["aggregated_share"] for record in mine]))
        seconds = float(np.mean([record.figures["response_s"] for record in mine]))
        compared = [_entry(difference(cells[name], (base,))) for base in BASELINES]
        more = [_entry(difference(cells[name], (PAIRS,), value)) for value in (ttft_s, tpot_p99_s)]
        rows.append(
            (
                GridEntry(name),
                GridEntry(f"{aggregated:.0f}"),
                GridEntry(f"{seconds:.2f}"),
                _entry(found[name]),
                *compared,
                *more,
            )
        )
    return Grid("Cells in which the default is farthest from the best", headings, tuple(rows))


def _entry(found: RelativeDifference | None) -> GridEntry:
    if found is None:
        return GridEntry(UNKNOWN)
    return GridEntry(f"{found.percent:+.1f}", "" if found.width is None else f"±{found.width:.1f}")
