"""The page of a published experiment: the expectation, the findings by profile, and every number."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from kvroute.planner.comparison.cells import Cell, Record
from kvroute.report.figures import ablation_bars, heat_map, load_sweep, sweep_lines, tier_split, ttft_breakdown
from kvroute.report.grid import Grid
from kvroute.report.page import Picture, parameters, picture, write_page
from kvroute.report.series import axes_of, of_profile, profiles_of, summaries
from kvroute.types import InputError
from kvroute_studies.shared.cells import Experiment
from kvroute_studies.shared.findings import ExpectationFinding, findings
from kvroute_studies.shared.rerun import cell_options, reading_options, sweep_options
from kvroute_studies.shared.tables import experiment_grid


def write_experiment(experiment: Experiment, records: Sequence[Record], out: Path, notes: Sequence[str] = ()) -> Path:
    """Write `out`/report.html and the figures as PNG and SVG in `out`/figures.

    Args:
        experiment: the sweep and its expected direction.
        records: the cells that ran; a part of the sweep is enough.
        out: folder, created if needed.
        notes: sentences printed beside the parameters.

    Returns:
        The path of the page.

    Raises:
        InputError: there is no record, or the folder cannot be written.
    """
    if not records:
        raise InputError(f"{experiment.name} has no result to report", where=str(out), hint="run at least one cell")
    return write_results(
        experiment,
        records,
        out,
        found=findings(experiment, records),
        pictures=_pictures(experiment, records, out),
        tables=[experiment_grid(experiment, records)],
        notes=notes,
        start=_command(experiment, records),
    )


def write_results(
    experiment: Experiment,
    records: Sequence[Record],
    out: Path,
    *,
    found: Sequence[ExpectationFinding],
    pictures: Sequence[Picture],
    tables: Sequence[Grid],
    notes: Sequence[str],
    without: str = "All cells are in the table.",
    start: str = "",
    cells: Sequence[Cell] = (),
) -> Path:
    """Write the page of an experiment; return its path.

    Args:
        experiment: the sweep and its expected direction.
        records: the cells that ran, whose configuration is printed.
        out: folder of the page, `out`/report.html, and of the pictures.
        found: whether its claims hold.
        pictures, tables, notes: what the page shows.
        without: the verdict if nothing is found.
        start: the command that runs the sweep, without the options of its cells; empty: without any option.
        cells: the cells, if there are others than those of `records`.

    Raises:
        InputError: the folder cannot be written.
    """
    cells = cells or [record.cell for record in records]
    start = start or f"kvroute experiment {shlex.quote(experiment.name)}"
    return write_page(
        "experiment.html.j2",
        out / "report.html",
        package="kvroute_studies",
        title=f"{experiment.title} ({experiment.source})",
        experiment=experiment,
        verdict=headline(found) if found else without,
        findings=found,
        pictures=pictures,
        tables=tables,
        config=shared_parameters(records),
        notes=notes,
        commands=[start + sweep_options(experiment, cells), start + cell_options(cells[0])],
        cells=len(cells),
        seeds=len({cell.seed for cell in cells}),
    )


def write_index(pages: Mapping[str, Path], path: Path, title: str = "Experiments") -> Path:
    """Write an overview that links to pages by title; links are relative to `path`.

    Raises:
        InputError: the path cannot be written.
    """
    links = [(name, os.path.relpath(page, path.parent)) for name, page in pages.items()]
    return write_page("index.html.j2", path, package="kvroute_studies", title=title, links=links)


def headline(found: Sequence[ExpectationFinding]) -> str:
    """Summarize all profiles and claims in one sentence."""
    claims: dict[str, dict[str, list[str]]] = {}
    for finding in found:
        claims.setdefault(finding.claim, {}).setdefault(finding.holds, []).append(finding.profile)
    parts = []
    for claim, outcomes in claims.items():
        everywhere = len(outcomes) == 1 and len(next(iter(outcomes.values()))) > 1
        verdicts = (word + (" everywhere" if everywhere else f" for {_and(names)}") for word, names in outcomes.items())
        parts.append(f"{claim}: {', '.join(verdicts)}")
    return "; ".join(parts) + "."


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _pictures(experiment: Experiment, records: Sequence[Record], out: Path) -> list[Picture]:
    axes, (first, second) = axes_of(records), experiment.versus
    interval = f"{first} compared with {second}, 95 % intervals; hollow: the difference is noise"
    drawn: list[tuple[Figure, str, str]] = []
    if len(axes) >= 2:
        caption = f"Mean TTFT of {first} compared with {second}, %; in parentheses: the difference is noise"
        drawn.append((heat_map(records, experiment.versus), "heat-map", caption))
    elif not axes:
        drawn.append(
            (
                ablation_bars(records),
                "ablation",
                "Mean TTFT with 95 % intervals; in parentheses: difference from the first",
            )
        )
        for number, profile in enumerate(profiles_of(records)):
            runs = summaries(of_profile(records, profile))
            drawn.append(
                (ttft_breakdown(runs), f"ttft-breakdown-{number}", f"{profile}: parts of the time to first token")
            )
            drawn.append((tier_split(runs), f"tier-split-{number}", f"{profile}: transfers by tier"))
    else:
        draw = (
            load_sweep(records, experiment.versus)
            if axes[0] == "load"
            else sweep_lines(records, axes[0], experiment.versus)
        )
        drawn.append((draw, "sweep", f"Bands: ± one standard deviation over seeds; at the bottom, {interval}"))
    return [picture(figure, out, name, caption) for figure, name, caption in drawn]


def shared_parameters(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Return the configuration as (name, text); values that differ between cells are marked as such."""
    texts: dict[str, dict[str, None]] = {}
    for record in records:
        for name, text in parameters(record.config):
            texts.setdefault(name, {})[text] = None
    return [(name, next(iter(some)) if len(some) == 1 else _variety(list(some))) for name, some in texts.items()]


def _variety(texts: Sequence[str]) -> str:
    if len(texts) <= 4:
        return "by cell: " + "; ".join(texts)
    try:
        numbers = [float(text) for text in texts]
    except ValueError:
        return f"by cell, {len(texts)} values"
    return f"by cell, {min(numbers):g} to {max(numbers):g}"


def _command(experiment: Experiment, records: Sequence[Record]) -> str:
    """Return the command that runs the sweep, without the options of its cells."""
    trace = str(records[0].config.get("trace", ""))
    start = f"kvroute experiment {shlex.quote(experiment.name)}{reading_options(records[0].cell, named=True)}"
    return start if not trace or trace.startswith("generated") else f"{start} --trace {shlex.quote(trace)}"
