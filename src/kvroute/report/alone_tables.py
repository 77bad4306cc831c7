"""The table of `alone`: mean response time of the choice compared with each baseline, by cell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvroute.comparison.cells import Record
from kvroute.experiments.alone import AGGREGATED, BASELINES, BOUNDED, CHOICE
from kvroute.report.grid import UNKNOWN, Entry, Grid, Heading
from kvroute.report.series import of_profile, profiles_of

Value = Callable[[Record], float | None]


@dataclass(frozen=True, slots=True)
class Difference:
    """A mean of the choice relative to that of a baseline, less 1, over the same requests, in per cent."""

    percent: float
    width: float | None
    """Two standard errors of the paired differences; None with one seed."""

    @property
    def worse(self) -> bool:
        """Whether the choice is significantly above the baseline."""
        return self.width is not None and self.percent > self.width

    @property
    def better(self) -> bool:
        """Whether the choice is significantly below the baseline."""
        return self.width is not None and self.percent < -self.width


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
    records: Sequence[Record], baseline: str, value: Value = response_s, choice: str = CHOICE
) -> Difference | None:
    """Compare the choice, or another policy, with a baseline in one cell; None if no seed has both."""
    by_policy = {
        name: {record.cell.seed: value(record) for record in records if record.cell.policy == name}
        for name in (choice, baseline)
    }
    pairs = [
        (mine, other)
        for seed, mine in by_policy[choice].items()
        if mine is not None and (other := by_policy[baseline].get(seed)) is not None
    ]
    if not pairs:
        return None
    own, others = np.array(pairs).T
    gaps, mean = own - others, float(others.mean())
    width = 2 * float(gaps.std(ddof=1)) / float(np.sqrt(len(gaps))) if len(gaps) > 1 else None
    return Difference(100 * float(gaps.mean()) / mean, None if width is None else 100 * width / mean)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The cells in which the choice is significantly worse than a baseline, or better than all of them."""

    cells: int
    worse: dict[str, list[str]]
    """Cells by baseline."""
    better: list[str]
    geometric: dict[str, float]
    """Geometric mean of the ratio to each baseline, less 1, in per cent."""


def verdict(records: Sequence[Record], value: Value = response_s, choice: str = CHOICE) -> Verdict:
    """Judge the choice, or another policy, in all cells that have every baseline."""
    worse: dict[str, list[str]] = {name: [] for name in BASELINES}
    ratios: dict[str, list[float]] = {name: [] for name in BASELINES}
    better, count = [], 0
    for profile in profiles_of(records):
        found = {name: difference(of_profile(records, profile), name, value, choice) for name in BASELINES}
        known = {name: each for name, each in found.items() if each is not None}
        if len(known) < len(BASELINES):
            continue
        count += 1
        for name, each in known.items():
            ratios[name].append(1 + each.percent / 100)
            if each.worse:
                worse[name].append(profile)
        if all(each.better for each in known.values()):
            better.append(profile)
    means = {name: 100 * (float(np.exp(np.mean(np.log(each)))) - 1) if each else 0.0 for name, each in ratios.items()}
    return Verdict(count, worse, better, means)


def alone_grid(records: Sequence[Record]) -> Grid:
    """Return one row for each cell: differences with two standard errors, and the share of requests served alone."""
    headings = (
        Heading("cell"),
        Heading("alone %", "Requests that one instance served alone"),
        Heading("response s", "Mean time from arrival to last token"),
        *(Heading(f"to {name} %", "Difference of the mean response time, two standard errors") for name in BASELINES),
        Heading("TTFT %", f"Difference of the mean TTFT to {AGGREGATED}"),
        Heading("TPOT P99 %", f"Difference of the 99th percentile of TPOT to {AGGREGATED}"),
    )
    rows = []
    for profile in profiles_of(records):
        some = of_profile(records, profile)
        mine = [record for record in some if record.cell.policy == CHOICE]
        if mine:
            alone = 100 * float(np.mean([record.figures["alone_share"] for record in mine]))
            seconds = float(np.mean([record.figures["response_s"] for record in mine]))
            compared = [_entry(difference(some, name)) for name in BASELINES]
            more = [_entry(difference(some, AGGREGATED, value)) for value in (ttft_s, tpot_p99_s)]
            rows.append((Entry(profile), Entry(f"{alone:.0f}"), Entry(f"{seconds:.2f}"), *compared, *more))
    return Grid("Choice between pairs and one instance alone", headings, tuple(rows), _caption(records), 1)


def _entry(found: Difference | None) -> Entry:
    if found is None:
        return Entry(UNKNOWN)
    return Entry(f"{found.percent:+.1f}", "" if found.width is None else f"±{found.width:.1f}")


def _caption(records: Sequence[Record]) -> str:
    return f"{_judged(records, CHOICE)} With a bound on the time between tokens: {_judged(records, BOUNDED)}"


def _judged(records: Sequence[Record], choice: str) -> str:
    judged = verdict(records, choice=choice)
    worse = ", ".join(f"{name} in {len(cells)}" for name, cells in judged.worse.items())
    means = ", ".join(f"{name} {percent:+.1f} %" for name, percent in judged.geometric.items())
    return (
        f"{judged.cells} cells: worse than {worse}; better than all baselines in {len(judged.better)}. "
        f"Geometric means: {means}."
    )
