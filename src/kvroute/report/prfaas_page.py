"""The page of one of PrfaaS's experiments: the expectation, the result, and every number."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from kvroute.comparison.cells import Cell, Record
from kvroute.experiments.cells import Computed, Experiment
from kvroute.experiments.prfaas import BURST, CASE_STUDY
from kvroute.experiments.prfaas_burst import SCENARIOS
from kvroute.report.experiment_page import headline, shared_parameters
from kvroute.report.figures.prfaas import keeps_up, kv_lines, over_thresholds, over_time, ttft_lines, waiting
from kvroute.report.page import Picture, picture, write_page
from kvroute.report.prfaas_findings import prfaas_findings
from kvroute.report.prfaas_tables import prfaas_grids
from kvroute.report.rerun import cell_options, reading_options, sweep_options
from kvroute.types import InputError

_NOTES = {
    "prfaas-case-study": (
        "load: offered rate divided by the formula's throughput of the same deployment",
        "no-variance: evenly spaced arrivals of two lengths, E[L | L > t] and E[L | L <= t], in their shares",
        "lengths: evenly spaced arrivals, the log-normal's quantiles in a random order; poisson: random arrivals too",
        "agents: users play recorded sessions, each turn after the last responses; load: number of users that would "
        "offer this share of the formula's rate without waiting",
        "prefill times of H20 are derived from the paper's own stage rates, so absolute values do not validate it",
    ),
    "prfaas-burst": (
        *(f"{scenario.name}: {scenario.about}" for scenario in SCENARIOS.values()),
        "good: TTFT and 40 tokens/s met; static thresholds also prefill at home while the link is down",
        "the old static threshold is the best one of `calm` on the same seeds, which favours it",
    ),
    "prfaas-kv-throughput": ("the paper's tables; nothing is simulated",),
}


def write_prfaas(experiment: Experiment, records: Sequence[Record], points: Sequence[Computed], out: Path) -> Path:
    """Write `out`/report.html and the figures as PNG and SVG in `out`/figures.

    Args:
        experiment: the sweep.
        records: its finished runs.
        points: its computed cells, for `prfaas-kv-throughput`.
        out: folder, created if needed.

    Returns:
        The path of the page.

    Raises:
        InputError: there is no result, or the folder cannot be written.
    """
    used = points if experiment.name == "prfaas-kv-throughput" else records
    if not used:
        raise InputError(f"{experiment.name} has no result to report", where=str(out), hint="run at least one cell")
    found = prfaas_findings(experiment, records, points)
    return write_page(
        "experiment.html.j2",
        out / "report.html",
        title=f"{experiment.title} ({experiment.source})",
        experiment=experiment,
        verdict=headline(found),
        findings=found,
        pictures=_pictures(experiment, records, points, out),
        tables=prfaas_grids(experiment, records, points),
        config=shared_parameters(records),
        notes=_NOTES[experiment.name],
        commands=_commands(experiment, [each.cell for each in used], str(used[0].config.get("trace", "generated"))),
        cells=len(used),
        seeds=len({each.cell.seed for each in used}),
    )


def _pictures(
    experiment: Experiment, records: Sequence[Record], points: Sequence[Computed], out: Path
) -> list[Picture]:
    drawn: list[tuple[Figure, str, str]]
    if experiment.name == CASE_STUDY.name:
        drawn = [
            (
                keeps_up(records),
                "keeps-up",
                "Served rate by offered rate; queues saturate at the bend",
            ),
            (ttft_lines(records), "ttft", "TTFT with queues and Ethernet; dotted: prefill only, as published"),
            (
                waiting(records),
                "waiting",
                "PrfaaS-PD: prefill and waits, mean over the requests at each stage",
            ),
        ]
    elif experiment.name == BURST.name:
        drawn = [
            (over_thresholds(records), "thresholds", "Good requests per second by static threshold and scenario"),
            (
                over_time(records),
                "time",
                "Grey: not measured; yellow: disturbance. Lower rows: one line per seed",
            ),
        ]
    else:
        drawn = [(kv_lines(points), "kv-throughput", "KV throughput by prompt length; dashed: dense models")]
    return [picture(figure, out, name, caption) for figure, name, caption in drawn]


def _commands(experiment: Experiment, cells: Sequence[Cell], trace: str) -> list[str]:
    """Return the command for the whole sweep, and the one for its first cell."""
    start = f"kvroute experiment {shlex.quote(experiment.name)}{reading_options(cells[0], named=False)}"
    if not trace.startswith("generated"):
        start += f" --trace {shlex.quote(trace.split(',')[0])}"
    return [start + sweep_options(experiment, cells), start + cell_options(cells[0])]
