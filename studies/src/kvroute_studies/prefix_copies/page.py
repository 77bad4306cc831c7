"""The results of `prefix-copies`: one table for the terminal and the page, and one figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from kvroute.planner.comparison.cells import Record
from kvroute.report.drawing import INK, grid, panels, plain, style
from kvroute.report.estimate import Estimate, estimate, estimate_entry
from kvroute.report.grid import Grid, GridEntry, Heading
from kvroute.report.page import picture
from kvroute.report.series import of_profile, profiles_of
from kvroute_studies.prefix_copies.run import OWN, PREFIX_COPIES
from kvroute_studies.shared.cells import Experiment
from kvroute_studies.shared.findings import ExpectationFinding, Holds, below
from kvroute_studies.shared.page import write_results

Number = Callable[[Record], float | None]


def _percent(record: Record) -> float | None:
    share = record.summary.prefill_cache_hit
    return None if share is None else 100.0 * share


_COLUMNS: tuple[tuple[Heading, Number, int], ...] = (
    (Heading("TTFT s", "Mean"), lambda record: record.summary.ttft_s.mean, 2),
    (Heading("P95 s"), lambda record: record.summary.ttft_s.p95, 2),
    (Heading("good /s", "Requests with the first token within 5 s"), lambda record: record.summary.goodput_per_s, 3),
    (Heading("hit %", "Prompt tokens from caches"), _percent, 1),
    (Heading("out GB", "All KV traffic from the PrfaaS site to home"), lambda record: record.figures["egress_gb"], 0),
    (Heading("in GB", "All KV traffic from home to the PrfaaS site"), lambda record: record.figures["ingress_gb"], 0),
    (
        Heading("copied GB", "Prefixes copied for requests, also within a site"),
        lambda record: record.figures["copied_gb"],
        0,
    ),
    (Heading("ahead GB", "Prefixes copied ahead of demand"), lambda record: record.figures["ahead_gb"], 0),
)
_BASE = {"exchange+ahead": "exchange", "exchange+pool+ahead": "exchange+pool"}
"""Baseline of a policy with copies ahead: the same policy without them; for all others, own caches."""
_PAIRS = (("exchange", OWN), ("exchange+pool", "exchange"), ("exchange+ahead", "exchange"))
"""Pairs of policies; the first should have the lower mean TTFT."""
_COLOURS = {"ttft": "#5b7fa6", "out": "#d55e00"}


def copies_grid(records: Sequence[Record]) -> Grid:
    """Return means over seeds with 95 % intervals; the last column pairs runs of the same requests."""
    headings = (
        Heading("requests"),
        Heading("caches"),
        *(heading for heading, _, _ in _COLUMNS),
        Heading(
            "good /s gained", "Compared with the same mode without copies ahead, or with own caches; paired by seed"
        ),
    )
    rows = []
    for profile in profiles_of(records):
        some = of_profile(records, profile)
        for policy in PREFIX_COPIES.policies:
            runs = [record for record in some if record.cell.policy == policy]
            if runs:
                numbers = (estimate_entry(estimate(map(value, runs)), digits) for _, value, digits in _COLUMNS)
                gained = estimate_entry(gain(some, policy), 3, signed=True)
                rows.append((GridEntry(profile), GridEntry(policy), *numbers, gained))
    caption = "own-caches: each site uses its own cache; exchange: the longer prefix is copied to the prefill instance."
    return Grid(PREFIX_COPIES.title, headings, tuple(rows), caption, 2)


def gain(records: Sequence[Record], policy: str) -> Estimate | None:
    """Return the goodput gained over a policy's baseline, paired by seed; None if either is missing."""
    if policy == OWN:
        return None
    goodput = {(record.cell.policy, record.cell.seed): record.summary.goodput_per_s or 0.0 for record in records}
    base = _BASE.get(policy, OWN)
    pairs = [(goodput[policy, seed], goodput.get((base, seed))) for name, seed in goodput if name == policy]
    return estimate([mine - other for mine, other in pairs if other is not None])


def copies_findings(records: Sequence[Record]) -> list[ExpectationFinding]:
    """Return which policy is faster, and whether copies ahead of demand cost goodput, by kind of requests."""
    found = []
    for profile in profiles_of(records):
        some = of_profile(records, profile)
        found += [ExpectationFinding(profile, *below(PREFIX_COPIES, some, pair)) for pair in _PAIRS]
        found += [ExpectationFinding(profile, *_harmless(some, policy)) for policy in _BASE]
    return found


def _harmless(records: Sequence[Record], policy: str) -> tuple[str, Holds, str]:
    claim, gained = f"{policy} costs no goodput", gain(records, policy)
    if gained is None or gained.half_width is None:
        return claim, "unclear", "At least two seeds are needed."
    holds: Holds = "does not hold" if gained.mean + gained.half_width < 0 else "holds"
    return claim, holds, f"{gained.mean:+.4f} ±{gained.half_width:.4f} good requests/s compared with {_BASE[policy]}."


def copies_bars(records: Sequence[Record]) -> Figure:
    """Draw mean TTFT and bytes between the sites by policy, one row for each kind of requests."""
    profiles = profiles_of(records)
    with style():
        figure, rows = panels(len(profiles), 2, width=3.6, height=1.9, sharey="row")
        for row, profile in zip(rows, profiles, strict=True):
            some = of_profile(records, profile)
            names = [name for name in PREFIX_COPIES.policies if any(record.cell.policy == name for record in some)]
            panes: tuple[tuple[str, str, Callable[[Record], float | None]], ...] = (
                ("ttft", "mean TTFT, s", lambda record: record.summary.ttft_s.mean),
                ("out", "between the sites, GB", _between),
            )
            for axes, (colour, label, value) in zip(row, panes, strict=True):
                found = [estimate(value(record) for record in some if record.cell.policy == name) for name in names]
                widths = [estimated.mean if estimated else 0.0 for estimated in found]
                errors = [estimated.half_width or 0.0 if estimated else 0.0 for estimated in found]
                axes.barh(names, widths, xerr=errors, color=_COLOURS[colour], ecolor=INK, height=0.6)
                axes.set_title(plain(profile))
                axes.set_xlabel(label)
                axes.set_xlim(left=0)
                grid(axes, "x")
        for row in rows:
            row[0].invert_yaxis()
    return figure


def write_copies(experiment: Experiment, records: Sequence[Record], out: Path) -> Path:
    """Write `out`/report.html and the figure; return the path of the page. Raises InputError for an unusable folder."""
    return write_results(
        experiment,
        records,
        out,
        found=copies_findings(records),
        pictures=[picture(copies_bars(records), out, "copies", "Mean over seeds, 95 % interval")],
        tables=[copies_grid(records)],
        notes=(
            "documents: texts of 20,000 to 80,000 tokens, each requested for four minutes, with skewed popularity",
            "conversations: generated from the statistics of Mooncake's trace; each turn extends the previous one",
            "the model is hybrid: a cached prefix is usable only where a prompt ended; its state is copied with it",
        ),
    )


def _between(record: Record) -> float:
    return record.figures["egress_gb"] + record.figures["ingress_gb"]
