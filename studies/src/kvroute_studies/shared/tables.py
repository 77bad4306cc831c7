"""Tables of an experiment: a row per profile and point, a column per policy."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from kvroute.planner.comparison.cells import Record
from kvroute.report.compare import Difference, mean_ttft_s
from kvroute.report.estimate import estimate
from kvroute.report.grid import UNKNOWN, Grid, GridEntry, Heading, rich_table, with_ties
from kvroute.report.series import axes_of, by_point, gap, of_policy, of_profile, profiles_of, relative_half_width
from kvroute.report.tables import digits_for
from kvroute.sim.metrics import Summary
from kvroute_studies.shared.cells import Experiment

AXIS_HEADINGS = {
    "load": "load",
    "tokens": "prompt tokens",
    "oversubscription": "oversub.",
    "background": "background",
    "refresh_s": "refresh s",
    "p_share": "p_share",
    "gpus": "GPUs",
}


def experiment_table(experiment: Experiment, records: Sequence[Record], *, width: int | None = None) -> Table:
    """Return axis values by policies: mean TTFT ± standard deviation of seeds, SLO attainment, gap of `versus`."""
    return rich_table(experiment_grid(experiment, records), width)


def experiment_grid(experiment: Experiment, records: Sequence[Record]) -> Grid:
    """Return the sweep as texts, a row per profile and point; the last column is the gap of the `versus` pair."""
    axes = axes_of(records)
    present = {record.cell.policy for record in records}
    policies = [name for name in experiment.policies if name in present]
    first, second = experiment.versus
    headings = [Heading("profile"), *(Heading(AXIS_HEADINGS.get(axis, axis)) for axis in axes)]
    headings += [
        Heading(policy, f"{policy}: mean TTFT in ms ± standard deviation; SLO attainment") for policy in policies
    ]
    headings.append(
        Heading(
            f"{first} vs {second}", f"Mean TTFT of {first} minus {second}, paired over seeds, with the 95 % interval"
        )
    )
    rows = []
    for profile in profiles_of(records):
        for point, runs in by_point(of_profile(records, profile)).items():
            labels = [GridEntry(profile), *(GridEntry(f"{value:,g}") for value in point)]
            rows.append((*labels, *_point_entries(runs, policies), gap_entry(gap(runs, experiment.versus))))
    caption = (
        "Mean TTFT in ms ± standard deviation over seeds; below: requests within the TTFT SLO. "
        "Last column: paired difference, 95 % interval."
    )
    title = f"{experiment.title} ({experiment.source})"
    return Grid(title, tuple(headings), tuple(rows), caption, 1 + len(axes), "Bold: best mean, even if it is noise.")


def _point_entries(runs: Sequence[Summary], policies: Sequence[str]) -> list[GridEntry]:
    ttfts = [estimate(mean_ttft_s(run) for run in of_policy(runs, policy)) for policy in policies]
    slos = [estimate(run.slo_attainment for run in of_policy(runs, policy)) for policy in policies]
    means = [known.mean for known in ttfts if known is not None]
    best = min(means) if means and min(means) < max(means) else None
    digits = digits_for(max(means) * 1e3) if means else 0
    entries = []
    for ttft, slo in zip(ttfts, slos, strict=True):
        text = UNKNOWN if ttft is None else f"{ttft.mean * 1e3:,.{digits}f}"
        if ttft is not None and ttft.seeds > 1:
            text += f" ±{ttft.std * 1e3:,.{digits}f}"
        entries.append(
            GridEntry(text, "" if slo is None else f"{slo.mean:.1%}", ttft is not None and ttft.mean == best)
        )
    return with_ties(entries)


def gap_entry(gap: Difference | None) -> GridEntry:
    """Return a paired difference as a percentage with its interval, and whether it is noise."""
    if gap is None:
        return GridEntry(UNKNOWN)
    half_width = relative_half_width(gap)
    if half_width is None:
        return GridEntry(f"{gap.relative:+.1%}", "one seed")
    return GridEntry(f"{gap.relative:+.1%}", f"±{half_width:.1%}" + (" noise" if gap.is_noise else ""))
