"""Runs as grids of texts, one row per policy or point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.table import Table

from kvroute.report.compare import Metric, mean_ttft_s
from kvroute.report.estimate import Estimate, estimate
from kvroute.report.grid import UNKNOWN, Grid, GridEntry, Heading, rich_table, with_ties
from kvroute.report.series import (
    of_policy,
    policies_of,
)
from kvroute.sim.metrics import Summary
from kvroute.sim.settings import Slo
from kvroute.types import CROSS_DATACENTER
from kvroute_engine.files.units import about_duration


@dataclass(frozen=True, slots=True)
class _Column:
    heading: Heading
    value: Metric
    scale: float = 1.0
    least_wins: bool | None = None
    digits: int | None = None
    """Number of decimals; None: derived from the column's largest value."""


_IN_TIME = "SLO met %"
_COLUMNS = (
    _Column(Heading("TTFT mean ms", "Mean time to first token, arrival to first token"), mean_ttft_s, 1e3, True),
    _Column(Heading("P50 ms", "Median TTFT", 2), lambda run: run.ttft_s.p50, 1e3, True),
    _Column(Heading("P95 ms", "95th percentile of TTFT", 8), lambda run: run.ttft_s.p95, 1e3, True),
    _Column(Heading("P99 ms", "99th percentile of TTFT"), lambda run: run.ttft_s.p99, 1e3, True),
    _Column(Heading("KV transfer ms", "Mean KV transfer time", 9), lambda run: run.transfer_s.mean, 1e3, True),
    _Column(Heading("TBT ms", "Mean decode iteration of a request", 1), lambda run: run.tbt_s.mean, 1e3, True),
    _Column(Heading("TPOT ms", "Mean time per output token", 5), lambda run: run.tpot_s.mean, 1e3, True),
    _Column(Heading(_IN_TIME, "Requests within the SLO"), lambda run: run.slo_attainment, 100, False, 1),
    _Column(Heading("good /s", "Good requests per second", 6), lambda run: run.goodput_per_s, 1, False),
    _Column(Heading("hit %", "Prompt tokens found at decode", 4), lambda run: run.cache_hit, 100, False, 1),
    _Column(Heading("rejected", "Rejected requests", 10), lambda run: run.requests.rejected, 1, True, 0),
    _Column(Heading("in flight", "Unfinished at the end", 3), lambda run: run.requests.in_flight, 1, None, 0),
)  # fmt: skip
_ACROSS = str(CROSS_DATACENTER)
_BETWEEN_SITES = (
    _Column(
        Heading("threshold tokens", "Longer prompts are offloaded; median over time", 12),
        lambda run: run.threshold_tokens,
        digits=0,
    ),
    _Column(
        Heading("remote KV %", "KV caches from another datacenter", 13),
        lambda run: run.tier_share.get(_ACROSS, 0.0),
        scale=100,
        digits=1,
    ),
    _Column(
        Heading("failed transfers", "Failed transfers; their requests were retried", 14),
        lambda run: run.failed_transfers.transfers,
        least_wins=True,
        digits=0,
    ),
    _Column(
        Heading("copied prefixes", "Cached prefixes copied for a request or ahead of demand", 11),
        lambda run: run.copied_prefixes.transfers + run.copied_ahead.transfers,
        digits=0,
    ),
)
"""Columns shown if KV cache is sent between datacenters."""
_AGGREGATED = (
    _Column(
        Heading("aggr. %", "Requests that one instance served, without a KV transfer", 10),
        lambda run: run.aggregated_share,
        scale=100,
        digits=0,
    ),
)
"""Columns shown if one instance served a request."""
_FROM_STORE = (
    _Column(
        Heading("store read GB", "Cached KV read from the store", 12),
        lambda run: (run.store.prefill_bytes + run.store.decode_bytes) / 1e9 if run.store else None,
    ),
    _Column(
        Heading("NIC max/mean", "Bytes of the busiest storage NIC divided by the mean", 13),
        lambda run: run.store.balance if run.store else None,
        least_wins=True,
        digits=2,
    ),
)
"""Columns shown if cached KV is read from a store."""


def _slowdown(phase: str) -> Metric:
    return lambda run: run.all_reduces[phase].slowdown if phase in run.all_reduces else None


_SHARED_ALL_REDUCES = tuple(
    _Column(
        Heading(f"all-reduce {phase}", f"Time of all-reduces in {phase}, divided by that on an idle network", 15),
        _slowdown(phase),
        least_wins=True,
        digits=2,
    )
    for phase in ("prefill", "decode")
)
"""Columns shown if all-reduces share links with other traffic."""
_TIERS_AFTER = "good /s"


def comparison_table(runs: Sequence[Summary], *, width: int | None = None, slo: Slo | None = None) -> Table:
    """Return one row per policy: the mean over seeds and, below it, ± half of the 95 % confidence interval.

    Args:
        runs: one summary per policy and seed.
        width: maximum width in characters, None for the terminal's; less important columns are dropped.
        slo: for the heading; None: unknown.
    """
    return rich_table(comparison_grid(runs, slo), width)


def comparison_grid(runs: Sequence[Summary], slo: Slo | None = None) -> Grid:
    """Return the comparison as texts; "-" marks unmeasured values."""
    policies = policies_of(runs)
    columns = [[GridEntry(policy) for policy in policies]]
    headings = [Heading("policy")]
    reads = any(run.store is not None and run.store.reads for run in runs)
    shown = [
        *_COLUMNS,
        *(_AGGREGATED if any(run.aggregated_share for run in runs) else ()),
        *(_BETWEEN_SITES if _between_sites(runs) else ()),
        *(_FROM_STORE if reads else ()),
    ]
    for column in (*shown, *(_SHARED_ALL_REDUCES if any(run.all_reduces for run in runs) else ())):
        headings.append(_with_slo(column.heading, slo))
        columns.append(
            _entries(column, [estimate(column.value(run) for run in of_policy(runs, name)) for name in policies])
        )
        if column.heading.title == _TIERS_AFTER:
            headings.append(_tier_heading(runs))
            columns.append([GridEntry(_tiers(of_policy(runs, name))) for name in policies])
    seeds = len({run.seed for run in runs})
    caption = f"Mean of {seeds} seeds, ± 95 % interval of the mean." if seeds > 1 else "One seed."
    if seeds > 1 and not any(entry.detail for column in columns for entry in column):
        caption = f"{seeds} seeds, which all give these numbers."
    bold = "Bold: best mean of the column, even if it is noise." if len(policies) > 1 else ""
    return Grid("", tuple(headings), tuple(zip(*columns, strict=True)), caption, bold=bold)


def _with_slo(heading: Heading, slo: Slo | None) -> Heading:
    """Add the limits to the heading of the column of requests within the SLO."""
    if heading.title != _IN_TIME or slo is None:
        return heading
    ttft = about_duration(slo.ttft_s).replace(" ", "")
    title, about = f"TTFT ≤{ttft}", f"Requests with the first token within {ttft}"
    if slo.tpot_s is not None:
        tpot = about_duration(slo.tpot_s).replace(" ", "")
        title, about = f"{title} TPOT ≤{tpot}", f"{about} and a TPOT of at most {tpot}"
    return replace(heading, title=f"{title} %", about=about)


def _between_sites(runs: Sequence[Summary]) -> bool:
    return any(
        run.threshold_tokens is not None
        or run.tier_share.get(_ACROSS)
        or run.failed_transfers.transfers + run.copied_prefixes.transfers + run.copied_ahead.transfers
        for run in runs
    )


def _entries(column: _Column, estimates: list[Estimate | None]) -> list[GridEntry]:
    means = [known.mean * column.scale for known in estimates if known is not None]
    if not means:
        return [GridEntry(UNKNOWN) for _ in estimates]
    digits = column.digits if column.digits is not None else digits_for(max(map(abs, means)))
    best = None
    if column.least_wins is not None and max(means) > min(means):
        best = min(means) if column.least_wins else max(means)
    return with_ties([_entry(known, column.scale, digits, best) for known in estimates])


def _entry(known: Estimate | None, scale: float, digits: int, best: float | None) -> GridEntry:
    if known is None:
        return GridEntry(UNKNOWN)
    mean = known.mean * scale
    fraction = 1 if digits == 0 and known.half_width is not None and mean != round(mean) and abs(mean) < 10 else digits
    detail = f"±{known.half_width * scale:,.{fraction}f}" if known.half_width else ""
    return GridEntry(f"{mean:,.{fraction}f}", detail, mean == best)


def digits_for(largest: float) -> int:
    """Return the decimals that show at least three digits of the largest number of a column, at most four."""
    if largest >= 100:
        return 0
    return int(np.clip(2 - np.floor(np.log10(max(largest, 1e-9))), 1, 4))


def tier_means(runs: Sequence[Summary]) -> dict[str, float]:
    """Return the mean share of transfers per tier over the runs with transfers; empty if there are none."""
    sent = [run.tier_share for run in runs if sum(run.tier_share.values()) > 0]
    names = sorted({name for share in sent for name in share})
    return {name: float(np.mean([share.get(name, 0.0) for share in sent])) for name in names}


def _tier_heading(runs: Sequence[Summary]) -> Heading:
    last = max((name for run in runs for name in run.tier_share), default="3")
    return Heading(f"tier 0/../{last} %", "Share of transfers per tier, nearest (same node) first", 7)


def _tiers(runs: Sequence[Summary]) -> str:
    return "/".join(f"{share * 100:.0f}" for share in tier_means(runs).values()) or UNKNOWN
