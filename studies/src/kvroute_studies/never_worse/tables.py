"""The matrix as grids of texts: the losses and their reasons, every cell, every term, and the clairvoyant search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvroute.planner.comparison.cells import Record
from kvroute.report.estimate import estimate
from kvroute.report.grid import UNKNOWN, Grid, GridEntry, Heading
from kvroute.report.series import of_profile, profiles_of
from kvroute_studies.never_worse.cases import CASES
from kvroute_studies.never_worse.findings import (
    OURS,
    PolicyPairing,
    geometric_mean,
    goodput_per_s,
    losses,
    p99_s,
    pair,
    pairs,
    refused_share,
    tbt_s,
    terms,
    without_lying_oracle,
)
from kvroute_studies.never_worse.verdicts import BASELINES, CLAIRVOYANT, RIVALS, SEEN

WHY: dict[str, str] = {
    "lies": "Telemetry wrongly reports the far path as busy, or the near one as free. The policy can check this "
    "only with its own transfers: the correction starts after ten of them and does not remove the error completely.",
    "literal/load=2": "The load is five times the capacity of the rack uplinks: transfers queue until decode instances "
    "have no free memory, and each policy rejects a quarter of the requests. The first requests take the near places; "
    "waiting transfers then hold the memory there, all later transfers cross pods, and the pod uplinks drain last. "
    "CLA*, which ignores paths, keeps a third of the transfers near. A price for near memory would need to predict the "
    "duration of the overload.",
}
"""Reason for a loss by case, or by axis if all cases of the axis have the same reason."""
UNEXPLAINED = "no reason found"


def losses_grid(matrix: Sequence[Record]) -> Grid:
    """List the cells where foresight's mean TTFT is above a rival's by more than two standard errors, with reasons."""
    headings = (
        Heading("cell"),
        Heading("against"),
        Heading("oracle"),
        Heading("mean TTFT ms", "foresight's"),
        Heading("rival's ms"),
        Heading("difference", "Paired over seeds, with its standard error"),
        Heading("P99", "Ratio"),
        Heading("TBT ms", "foresight minus rival"),
        Heading("rejected", "Share of requests; below: the rival's"),
        Heading("why", prose=True),
    )
    rows = []
    for loss in losses(matrix):
        p99, tbt, refused = (
            pair(of_profile(matrix, loss.case), loss.case, OURS, loss.second, metric)
            for metric in (p99_s, tbt_s, refused_share)
        )
        rows.append(
            (
                GridEntry(loss.case),
                GridEntry(loss.second),
                GridEntry(CASES[loss.case].oracle),
                GridEntry(f"{loss.ours * 1e3:,.1f}"),
                GridEntry(f"{loss.theirs * 1e3:,.1f}"),
                GridEntry(f"{loss.ratio - 1:+.2%}", f"{loss.difference * 1e3:+.1f}{_error(loss)} ms"),
                GridEntry(UNKNOWN if p99 is None else f"{p99.ratio:.3f}"),
                GridEntry(UNKNOWN if tbt is None else f"{tbt.difference * 1e3:+.2f}"),
                _refused(refused),
                GridEntry(WHY.get(loss.case) or WHY.get(CASES[loss.case].axis) or UNEXPLAINED),
            )
        )
    seeds = max((loss.seeds for loss in losses(matrix)), default=0)
    caption = "The paired difference exceeds two standard errors; by chance, this also happens for equal policies."
    if seeds:
        caption = f"{seeds} seeds. {caption}"
    return Grid("Cells where foresight loses", headings, tuple(rows), caption)


def cells_grid(matrix: Sequence[Record], missing: Mapping[str, str]) -> Grid:
    """List every cell with foresight's mean TTFT and its ratio to every other policy's."""
    present = {record.cell.policy for record in matrix}
    others = [name for name in (*BASELINES, "foresight-closed", "foresight-joint") if name in present]
    headings = (
        Heading("cell"),
        Heading("axis"),
        Heading("foresight ms", "Mean TTFT; below: P99"),
        *(
            Heading(f"/ {name}", f"Mean TTFT of foresight divided by that of {name}; two standard errors")
            for name in others
        ),
        *(Heading(f"P99 / {name}", "Ratio of P99 TTFT") for name in RIVALS),
        Heading("TBT - cla ms", "foresight minus CLA*"),
        Heading("good /s", "Requests within the SLO; below: difference from CLA*"),
        Heading("rejected", "Share of requests; below: CLA*'s. Times cover the other requests"),
    )
    rows = []
    for case in profiles_of(matrix):
        some = of_profile(matrix, case)
        found = {name: pair(some, case, OURS, name) for name in others}
        p99 = {name: pair(some, case, OURS, name, p99_s) for name in RIVALS}
        tbt, good = pair(some, case, OURS, "cla", tbt_s), pair(some, case, OURS, "cla", goodput_per_s)
        rows.append(
            (
                GridEntry(case),
                GridEntry(CASES[case].axis),
                _level(some),
                *(_ratio(found[name]) for name in others),
                *(_ratio(p99[name]) for name in RIVALS),
                GridEntry(UNKNOWN if tbt is None else f"{tbt.difference * 1e3:+.2f}"),
                GridEntry(
                    UNKNOWN if good is None else f"{good.ours:.2f}", "" if good is None else f"{good.difference:+.2f}"
                ),
                _refused(pair(some, case, OURS, "cla", refused_share)),
            )
        )
    empty = [GridEntry(UNKNOWN)] * (len(headings) - 3)
    rows += [(GridEntry(case), GridEntry(CASES[case].axis), GridEntry(why), *empty) for case, why in missing.items()]
    caption = "Below a ratio, two standard errors. Bold: foresight is lower by more than that; (!): it is higher."
    return Grid("Every cell", headings, tuple(rows), caption)


def _level(some: Sequence[Record]) -> GridEntry:
    runs = [record.summary for record in some if record.cell.policy == OURS]
    mean, p99 = estimate(run.ttft_s.mean for run in runs), estimate(run.ttft_s.p99 for run in runs)
    if mean is None:
        return GridEntry(UNKNOWN)
    return GridEntry(f"{mean.mean * 1e3:,.0f}", "" if p99 is None else f"{p99.mean * 1e3:,.0f}")


def _refused(found: PolicyPairing | None) -> GridEntry:
    if found is None:
        return GridEntry(UNKNOWN)
    if not (found.ours or found.theirs):
        return GridEntry("0")
    return GridEntry(f"{found.ours:.1%}", f"{found.theirs:.1%}")


def _error(found: PolicyPairing) -> str:
    return f" ± {found.error * 1e3:.1f}" if found.error else ""


def _ratio(found: PolicyPairing | None) -> GridEntry:
    if found is None:
        return GridEntry(UNKNOWN)
    text = f"{found.ratio:.3f}" + (" (!)" if found.is_higher else "")
    spread = "one seed" if found.error is None else f"±{2 * found.error / found.theirs:.3f}" if found.theirs else ""
    return GridEntry(text, spread, found.is_lower)


def terms_grid(ablation: Sequence[Record], matrix: Sequence[Record]) -> Grid:
    """Compare foresight without each term with the better of CLA* and NetKV, and with all terms."""
    headings = (
        Heading("foresight with"),
        Heading("geometric mean", "Of mean TTFT divided by the better of CLA*'s and NetKV's"),
        Heading("worst", "The highest of these ratios"),
        Heading("where", prose=True),
        Heading("/ complete", "Geometric mean of mean TTFT divided by that of the complete policy"),
        Heading("TBT - cla ms", "Mean over cells"),
    )
    rows = tuple(
        (
            GridEntry(term.variant if term.variant != OURS else "all terms"),
            GridEntry(f"{term.mean:.4f}"),
            GridEntry(f"{term.worst:.3f}"),
            GridEntry(term.worst_case),
            GridEntry(UNKNOWN if term.beside is None else f"{term.beside:.4f}"),
            GridEntry(f"{term.tbt_s * 1e3:+.2f}"),
        )
        for term in terms(ablation, matrix)
    )
    cells = max((term.cells for term in terms(ablation, matrix)), default=0)
    return Grid("Ablation: one term removed at a time", headings, rows, f"{cells} cells, all with the same requests.")


def seen_grid(seen: Sequence[Record]) -> Grid:
    """Compare every policy with the clairvoyant search."""
    names = [name for name in SEEN if name != CLAIRVOYANT]
    headings = (Heading("cell"), Heading("descent ms", "Mean TTFT"), *(Heading(f"{name} / descent") for name in names))
    rows = []
    for case in profiles_of(seen):
        found = {name: pair(of_profile(seen, case), case, name, CLAIRVOYANT) for name in names}
        level = next((pairing.theirs for pairing in found.values() if pairing is not None), None)
        if level is None:
            continue
        rows.append((GridEntry(case), GridEntry(f"{level * 1e3:,.0f}"), *(_ratio(found[name]) for name in names)))
    caption = (
        "Windows of six seconds. The descent moves one request at a time to the instance that gives the lowest mean "
        "TTFT of all requests, until no single move reduces it."
    )
    return Grid("Comparison with known future", headings, tuple(rows), caption)


def headline_grid(matrix: Sequence[Record]) -> Grid:
    """Return the geometric means against every policy, for the terminal."""
    headings = (
        Heading("against"),
        Heading("cells"),
        Heading("geometric mean"),
        Heading("worst"),
        Heading("lower in"),
        Heading("higher in"),
    )
    rows = []
    for name in (*BASELINES, "foresight-closed", "foresight-joint"):
        found = without_lying_oracle(pairs(matrix, name))
        if not found:
            continue
        ratios = [pairing.ratio for pairing in found]
        mean = geometric_mean(ratios)
        assert mean is not None, "there is a ratio"
        rows.append(
            (
                GridEntry(name),
                GridEntry(str(len(found))),
                GridEntry(f"{mean:.4f}"),
                GridEntry(f"{max(ratios):.3f}"),
                GridEntry(str(sum(pairing.is_lower for pairing in found))),
                GridEntry(str(sum(pairing.is_higher for pairing in found))),
            )
        )
    caption = "Mean TTFT of foresight divided by each policy's; cells with a truthful or silent oracle."
    return Grid("foresight", headings, tuple(rows), caption)
