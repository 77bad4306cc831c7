"""The page of a comparison: the winner and its lead first, then the parts of the time."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvroute.planner.comparison.cells import Record
from kvroute.planner.comparison.requests import Workload
from kvroute.planner.comparison.served import service_of, settings_of
from kvroute.report.compare import Difference, Metric, difference, verdict
from kvroute.report.figures import link_utilisation, threshold_over_time, tier_split, ttft_breakdown
from kvroute.report.grid import Grid, GridEntry, Heading
from kvroute.report.page import parameters, picture, write_page
from kvroute.report.series import policies_of, relative_half_width, summaries
from kvroute.report.tables import comparison_grid
from kvroute.serve.config.modelled import simulated_spec
from kvroute.serve.config.settings import GatewaySettings
from kvroute.sim.metrics import Summary, Timeline
from kvroute.sim.settings import Slo
from kvroute.types import InputError

_MEASURES: tuple[tuple[str, Metric], ...] = (
    ("mean TTFT", lambda run: run.ttft_s.mean),
    ("P99 TTFT", lambda run: run.ttft_s.p99),
    ("mean KV transfer", lambda run: run.transfer_s.mean),
)
_DECODE = "control.decode"
_GATEWAY = GatewaySettings()
_DEFAULTS = frozenset(
    parameters(
        {
            "workload": msgspec.to_builtins(Workload()),
            "settings": msgspec.to_builtins(settings_of(_GATEWAY)),
            "control": msgspec.to_builtins(simulated_spec(_GATEWAY)),
            "service": msgspec.to_builtins(service_of(_GATEWAY)),
        }
    )
) | {("control.parameters", "none")}


def write_report(records: Sequence[Record], out: Path, title: str, *, command: str = "") -> Path:
    """Write `out`/report.html and the figures as PNG and SVG in `out`/figures.

    Args:
        records: runs of one question, one per policy and seed.
        out: folder, created if needed.
        title: the page's heading.
        command: the command that repeats the comparison; empty: derived from the records, with a placeholder for the
            cluster.

    Returns:
        The path of the page.

    Raises:
        InputError: there is no record, or the folder cannot be written.
    """
    if not records:
        raise InputError("no run to report", where=str(out), hint="run at least one policy")
    runs = summaries(records)
    timelines, seed = _timelines(records)
    config = _parameters(records)
    pictures = [
        picture(ttft_breakdown(runs), out, "ttft-breakdown", "Parts of the time to first token, mean over seeds"),
        picture(tier_split(runs), out, "tier-split", "KV transfers by tier, mean over seeds"),
    ]
    if timelines:
        changes = _changes(records[0])
        marked = (
            "; vertical lines: changes of a link's capacity, enlarged on the right if they are short" if changes else ""
        )
        caption = f"Own traffic as a share of each tier's capacity, mean between telemetry updates, seed {seed}{marked}"
        pictures.append(picture(link_utilisation(timelines, changes), out, "link-utilisation", caption))
        thresholds = {policy: timeline for policy, timeline in timelines.items() if timeline.threshold_tokens}
        if thresholds:
            caption = (
                f"Longer prompts are prefilled in another datacenter: the threshold over time, seed {seed}{marked}"
            )
            pictures.append(picture(threshold_over_time(thresholds, changes), out, "threshold", caption))
    return write_page(
        "comparison.html.j2",
        out / "report.html",
        title=title,
        verdict=verdict(runs).sentence,
        remarks=verdict(runs).remarks,
        table=comparison_grid(runs, _slo(records[0])),
        pictures=pictures,
        differences=differences_grid(runs),
        command=command or _command(records),
        config=config,
        changed=[row for row in config if row not in _DEFAULTS],
    )


def _parameters(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Return the settings of all runs, including every policy's parameters."""
    found: dict[str, str] = {}
    for record in records:
        for name, text in parameters(record.config):
            found.setdefault(name, text)
    if _DECODE in found:
        found[_DECODE] = ", ".join(policies_of(summaries(records)))
    return list(found.items())


def _slo(record: Record) -> Slo | None:
    slo: Mapping[str, Any] | None = record.config.get("settings", {}).get("slo")
    return msgspec.convert(slo, Slo) if slo else None


def _changes(record: Record) -> list[tuple[float, str]]:
    """Return the times of a run's link changes, each with the new share of the link's capacity in words."""
    words = {0.0: "cut", 1.0: "restored"}
    settings: Mapping[str, Any] = record.config.get("settings", {})
    return [
        (float(change["at_s"]), f"{change['link']} {words.get(change['share'], format(change['share'], '.0%'))}")
        for change in settings.get("changes", ())
    ]


def differences_grid(runs: Sequence[Summary]) -> Grid:
    """Compare the winner with every other policy: differences paired over seeds, and their significance in words."""
    found = verdict(runs)
    rows = []
    for lead in found.leads:
        cells = [_gap(difference(runs, lead.first, lead.second, metric)) for _, metric in _MEASURES]
        rows.append((GridEntry(f"{lead.first} - {lead.second}"), *cells, GridEntry(in_words(lead))))
    headings = (
        Heading("difference"),
        *(Heading(f"{name} ms") for name, _ in _MEASURES),
        Heading("effect on mean TTFT", prose=True),
    )
    return Grid("", headings, tuple(rows), "Paired over seeds; ± half of the 95 % interval (Student's t).")


def _gap(found: Difference | None) -> GridEntry:
    if found is None:
        return GridEntry("-")
    half_width, relative = found.half_width, relative_half_width(found)
    text = f"{found.mean * 1e3:+,.1f}" + (f" ±{half_width * 1e3:,.1f}" if half_width else "")
    return GridEntry(text, f"{found.relative:+.1%}" + (f" ±{relative:.1%}" if relative else ""))


def in_words(found: Difference) -> str:
    """Return a sentence on the significance of a difference."""
    if found.half_width is None:
        return "Unknown: one seed cannot separate a difference from noise; use --seeds 5."
    if found.mean == 0:
        return "None: both have the same mean."
    word = "lower" if found.mean < 0 else "higher"
    if found.is_noise:
        return f"Noise: the interval over {found.seeds} seeds includes zero."
    return f"{found.first} is {word} by {abs(found.relative):.1%}; the interval over {found.seeds} seeds excludes zero."


def _timelines(records: Sequence[Record]) -> tuple[dict[str, Timeline], int]:
    """Return timelines by policy, all of the first seed that has any, with the seed."""
    seed = min((record.cell.seed for record in records if record.timeline is not None), default=0)
    some = {r.summary.policy: r.timeline for r in records if r.timeline is not None and r.cell.seed == seed}
    return some, seed


def _command(records: Sequence[Record]) -> str:
    policies = " ".join(f"--policy {shlex.quote(name)}" for name in policies_of(summaries(records)))
    seeds = sorted({record.cell.seed for record in records})
    return (
        f"kvroute simulate CLUSTER.yaml {policies} --seed {seeds[0]} --seeds {seeds[-1] - seeds[0] + 1} --out results"
    )
