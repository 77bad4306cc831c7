"""The matrix as grids of texts: the losses and their reasons, every cell, every term, and the clairvoyant search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvroute.experiments.cells import Record
from kvroute.experiments.never_worse import BASELINES, CLAIRVOYANT, RIVALS, SEEN
from kvroute.experiments.never_worse_cases import CASES
from kvroute.report.estimate import estimate
from kvroute.report.grid import UNKNOWN, Entry, Grid, Heading
from kvroute.report.never_worse_findings import (
    OURS,
    Pairing,
    geometric_mean,
    goodput_per_s,
    honest,
    losses,
    p99_s,
    pair,
    pairs,
    refused_share,
    tbt_s,
    terms,
)
from kvroute.report.series import of_profile, profiles_of

WHY: dict[str, str] = {
    "lies": "It believes that the far way is taken, or the near one free, and there is nothing to check that with but "
    "its own transfers: what they teach comes after ten of them, and fades the lie without undoing it.",
    "literal/load=2": "Five times what the rack's uplinks carry: transfers pile up until decode instances have no room "
    "for one more, and a quarter of the requests is refused under each policy. The near places go to whoever comes "
    "first; from then on their memory is held by transfers that wait, all others cross pods, and the pods' uplinks are "
    "the last to empty. CLA*, which looks at no path, keeps a third near all along. A price for near memory would have "
    "to know that the overload lasts.",
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
        Heading("the other's ms"),
        Heading("difference", "Paired over seeds, with its standard error"),
        Heading("P99", "Ratio"),
        Heading("TBT ms", "foresight's less the other's"),
        Heading("refused", "Share of requests; below it the other's"),
        Heading("why", prose=True),
    )
    rows = []
    for each in losses(matrix):
        p99, tbt, refused = (
            pair(of_profile(matrix, each.case), each.case, OURS, each.second, metric)
            for metric in (p99_s, tbt_s, refused_share)
        )
        rows.append(
            (
                Entry(each.case),
                Entry(each.second),
                Entry(CASES[each.case].oracle),
                Entry(f"{each.ours * 1e3:,.1f}"),
                Entry(f"{each.theirs * 1e3:,.1f}"),
                Entry(f"{each.ratio - 1:+.2%}", f"{each.difference * 1e3:+.1f} ± {(each.error or 0) * 1e3:.1f} ms"),
                Entry(UNKNOWN if p99 is None else f"{p99.ratio:.3f}"),
                Entry(UNKNOWN if tbt is None else f"{tbt.difference * 1e3:+.2f}"),
                _refused(refused),
                Entry(WHY.get(each.case) or WHY.get(CASES[each.case].axis) or UNEXPLAINED),
            )
        )
    seeds = max((each.seeds for each in losses(matrix)), default=0)
    caption = "Two standard errors of the paired difference; equal policies would differ by so much now and then, too."
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
        Heading("foresight ms", "Mean TTFT; below it P99"),
        *(Heading(f"/ {name}", f"Mean TTFT of foresight over that of {name}; two standard errors") for name in others),
        *(Heading(f"P99 / {name}", "Ratio of P99 of TTFT") for name in RIVALS),
        Heading("TBT - cla ms", "foresight's less CLA*'s"),
        Heading("good /s", "Requests in time; below it less CLA*'s"),
        Heading("refused", "Share of requests; below it CLA*'s. Times are of the others"),
    )
    rows = []
    for case in profiles_of(matrix):
        some = of_profile(matrix, case)
        found = {name: pair(some, case, OURS, name) for name in others}
        p99 = {name: pair(some, case, OURS, name, p99_s) for name in RIVALS}
        tbt, good = pair(some, case, OURS, "cla", tbt_s), pair(some, case, OURS, "cla", goodput_per_s)
        rows.append(
            (
                Entry(case),
                Entry(CASES[case].axis),
                _level(some),
                *(_ratio(found[name]) for name in others),
                *(_ratio(p99[name]) for name in RIVALS),
                Entry(UNKNOWN if tbt is None else f"{tbt.difference * 1e3:+.2f}"),
                Entry(
                    UNKNOWN if good is None else f"{good.ours:.2f}", "" if good is None else f"{good.difference:+.2f}"
                ),
                _refused(pair(some, case, OURS, "cla", refused_share)),
            )
        )
    empty = [Entry(UNKNOWN)] * (len(headings) - 3)
    rows += [(Entry(case), Entry(CASES[case].axis), Entry(why), *empty) for case, why in missing.items()]
    caption = "Below a ratio, two standard errors. Bold: foresight is lower by more than that; (!): it is higher."
    return Grid("Every cell", headings, tuple(rows), caption)


def _level(some: Sequence[Record]) -> Entry:
    runs = [record.summary for record in some if record.cell.policy == OURS]
    mean, p99 = estimate(run.ttft_s.mean for run in runs), estimate(run.ttft_s.p99 for run in runs)
    if mean is None:
        return Entry(UNKNOWN)
    return Entry(f"{mean.mean * 1e3:,.0f}", "" if p99 is None else f"{p99.mean * 1e3:,.0f}")


def _refused(found: Pairing | None) -> Entry:
    if found is None:
        return Entry(UNKNOWN)
    if not (found.ours or found.theirs):
        return Entry("0")
    return Entry(f"{found.ours:.1%}", f"{found.theirs:.1%}")


def _ratio(found: Pairing | None) -> Entry:
    if found is None:
        return Entry(UNKNOWN)
    text = f"{found.ratio:.3f}" + (" (!)" if found.is_higher else "")
    spread = "one seed" if found.error is None else f"±{2 * found.error / found.theirs:.3f}" if found.theirs else ""
    return Entry(text, spread, found.is_lower)


def terms_grid(ablation: Sequence[Record], matrix: Sequence[Record]) -> Grid:
    """Compare foresight without each term with the better of CLA* and NetKV, and with all terms."""
    headings = (
        Heading("foresight with"),
        Heading("geometric mean", "Of mean TTFT over the better of CLA*'s and NetKV's"),
        Heading("worst", "The highest of these ratios"),
        Heading("where", prose=True),
        Heading("/ whole", "Geometric mean of mean TTFT over the whole policy's"),
        Heading("TBT - cla ms", "Mean over cells"),
    )
    rows = tuple(
        (
            Entry(each.variant if each.variant != OURS else "everything"),
            Entry(f"{each.mean:.4f}"),
            Entry(f"{each.worst:.3f}"),
            Entry(each.worst_case),
            Entry(UNKNOWN if each.beside is None else f"{each.beside:.4f}"),
            Entry(f"{each.tbt_s * 1e3:+.2f}"),
        )
        for each in terms(ablation, matrix)
    )
    cells = max((each.cells for each in terms(ablation, matrix)), default=0)
    return Grid("Every term left out in turn", headings, rows, f"{cells} cells, the same requests for all.")


def seen_grid(seen: Sequence[Record]) -> Grid:
    """Compare every policy with the clairvoyant search."""
    names = [name for name in SEEN if name != CLAIRVOYANT]
    headings = (Heading("cell"), Heading("descent ms", "Mean TTFT"), *(Heading(f"{name} / descent") for name in names))
    rows = []
    for case in profiles_of(seen):
        found = {name: pair(of_profile(seen, case), case, name, CLAIRVOYANT) for name in names}
        level = next((each.theirs for each in found.values() if each is not None), None)
        if level is None:
            continue
        rows.append((Entry(case), Entry(f"{level * 1e3:,.0f}"), *(_ratio(found[name]) for name in names)))
    caption = (
        "Windows of six seconds. The descent sends each request in turn wherever the mean TTFT of all is least, until "
        "no single one could be moved to the good of the mean."
    )
    return Grid("Against those who know the future", headings, tuple(rows), caption)


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
        found = honest(pairs(matrix, name))
        if not found:
            continue
        ratios = [each.ratio for each in found]
        mean = geometric_mean(ratios)
        assert mean is not None, "there is a ratio"
        rows.append(
            (
                Entry(name),
                Entry(str(len(found))),
                Entry(f"{mean:.4f}"),
                Entry(f"{max(ratios):.3f}"),
                Entry(str(sum(each.is_lower for each in found))),
                Entry(str(sum(each.is_higher for each in found))),
            )
        )
    caption = "Mean TTFT of foresight over each policy's; cells whose oracle tells the truth or nothing."
    return Grid("foresight", headings, tuple(rows), caption)
