"""The page of the matrix: the cells that foresight loses and why, then its leads, and every number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from kvroute.planner.comparison.cells import Record
from kvroute.report.page import Picture, picture, write_page
from kvroute.types import InputError
from kvroute_studies.never_worse.cases import CASES
from kvroute_studies.never_worse.figures import ratios, trade, worth
from kvroute_studies.never_worse.findings import (
    OURS,
    geometric_mean,
    losses,
    matrix_findings,
    pairs,
    without_lying_oracle,
)
from kvroute_studies.never_worse.tables import (
    cells_grid,
    headline_grid,
    losses_grid,
    seen_grid,
    terms_grid,
)
from kvroute_studies.shared.rerun import cell_options, seed_options

_NOTES = (
    "every cell: all policies of a seed have the same requests, ECMP draws and background traffic",
    "CLA* (cla) is tuned for each cell: the best of eleven weight ratios on requests that are not measured",
    "paper, literal, realistic: readings of NetKV's evaluation (docs/decisions/0005); nicN-flow: every instance behind "
    "one NIC of N Gbps, each flow of a transfer draws its own uplink; nicN-transfer: all flows use the same uplink",
    "background: a share of every NIC and uplink, or of the named tier; bursts: on uplinks, on and off at random",
    "silent: the router has no telemetry of other traffic; lying: its telemetry is wrong",
    "spread: a prefill and a decode instance share each node; node: prefill instances fill a node of every other rack",
    "goodput: requests with the first token within NetKV's limit for the profile",
)


def write_never_worse(
    matrix: Sequence[Record],
    ablation: Sequence[Record],
    seen: Sequence[Record],
    out: Path,
    missing: Mapping[str, str],
) -> Path:
    """Write `out`/report.html and the figures as PNG and SVG in `out`/figures.

    Args:
        matrix: its finished runs, at least one.
        ablation, seen: runs of the two other sweeps; may be empty.
        out: folder, created if needed.
        missing: cases that were not run, and the reason.

    Returns:
        The path of the page.

    Raises:
        InputError: there is no result, or the folder cannot be written.
    """
    if not matrix:
        raise InputError("the matrix has no result to report", where=str(out), hint="run never-worse-matrix")
    tables = [headline_grid(matrix), terms_grid(ablation, matrix), seen_grid(seen), cells_grid(matrix, missing)]
    return write_page(
        "never_worse.html.j2",
        out / "report.html",
        package="kvroute_studies",
        title="foresight: never worse",
        verdict=verdict(matrix),
        losses=losses_grid(matrix),
        findings=matrix_findings(matrix, seen),
        pictures=_pictures(matrix, ablation, out),
        tables=[grid for grid in tables if grid.rows],
        notes=(*_NOTES, *_unsigned([*matrix, *ablation, *seen])),
        commands=_commands(matrix),
        cells=len(matrix) + len(ablation) + len(seen),
    )


def verdict(matrix: Sequence[Record]) -> str:
    """Summarize all cells in one sentence."""
    lost = {loss.case for loss in losses(matrix)}
    gaps = []
    for rival in ("netkv", "cla"):
        mean = geometric_mean(pairing.ratio for pairing in without_lying_oracle(pairs(matrix, rival)))
        if mean is not None:
            gap = f"{abs(1 - mean):.1%}"
            gaps.append(f"equal to {rival}'s" if gap == "0.0%" else f"{gap} {'below' if mean < 1 else 'above'} {rival}")
    cells = {record.cell.profile for record in matrix if record.cell.policy == OURS}
    lying = sum(CASES[case].oracle == "lying" for case in lost)
    where = f"{len(lost)} of {len(cells)} cells" + (f" ({lying} of them with a lying oracle)" if lying else "")
    return f"foresight's mean TTFT is {' and '.join(gaps)} in the geometric mean, and above one or both in {where}."


def _pictures(matrix: Sequence[Record], ablation: Sequence[Record], out: Path) -> list[Picture]:
    drawn: list[tuple[Figure, str, str]] = [
        (
            ratios(matrix),
            "ratios",
            "Mean TTFT by each rival's, two standard errors; red: lying oracle; diamond: higher; arrow: below 0.5",
        ),
        (trade(matrix), "trade", "Change of TTFT and of TBT relative to CLA*, one dot per cell"),
    ]
    if ablation:
        drawn.append(
            (worth(ablation, matrix), "terms", "foresight without each of its terms, and with wrong NIC speeds")
        )
    return [picture(figure, out, name, caption) for figure, name, caption in drawn]


def _unsigned(records: Sequence[Record]) -> list[str]:
    """Return a note on results that do not record their code."""
    count = sum(not record.code for record in records)
    return [f"{count:,} of {len(records):,} results do not record their code version"] if count else []


def _commands(matrix: Sequence[Record]) -> list[str]:
    traces = any(CASES[record.cell.profile].trace != "generated" for record in matrix)
    more = " --trace-dir FOLDER" if traces else ""
    cells = [record.cell for record in matrix]
    matrix_command = f"kvroute experiment never-worse-matrix{more}{cell_options(cells[0])}"
    return [f"kvroute experiment never-worse{more}{seed_options(cells)}", matrix_command]
