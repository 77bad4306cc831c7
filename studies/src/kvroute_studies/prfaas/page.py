"""The page of one of PrfaaS's experiments: the expectation, the result, and every number."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from kvroute.planner.comparison.cells import Cell, Record
from kvroute.report.page import Picture, picture
from kvroute.types import InputError
from kvroute_studies.prfaas.burst import SCENARIOS
from kvroute_studies.prfaas.figures import (
    keeps_up,
    kv_lines,
    over_thresholds,
    over_time,
    ttft_lines,
    waiting,
)
from kvroute_studies.prfaas.findings import prfaas_findings
from kvroute_studies.prfaas.run import BURST, CASE_STUDY
from kvroute_studies.prfaas.tables import prfaas_grids
from kvroute_studies.shared.cells import Computed, Experiment
from kvroute_studies.shared.page import write_results
from kvroute_studies.shared.rerun import reading_options

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
    cells = [record.cell for record in used]
    return write_results(
        experiment,
        records,
        out,
        found=prfaas_findings(experiment, records, points),
        pictures=_pictures(experiment, records, points, out),
        tables=prfaas_grids(experiment, records, points),
        notes=_NOTES[experiment.name],
        start=_command(experiment, cells[0], str(used[0].config.get("trace", "generated"))),
        cells=cells,
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


def _command(experiment: Experiment, cell: Cell, trace: str) -> str:
    """Return the command that runs the sweep, without the options of its cells."""
    start = f"kvroute experiment {shlex.quote(experiment.name)}{reading_options(cell, named=False)}"
    return start if trace.startswith("generated") else f"{start} --trace {shlex.quote(trace.split(',')[0])}"
