"""What the pages quote of NetKV's experiments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from statistics import mean, stdev

from kvroute.planner.comparison.cells import Record
from kvroute.report.compare import Difference
from kvroute.report.estimate import estimate
from kvroute.report.grid import UNKNOWN
from kvroute.report.series import gap, summaries, values_of
from kvroute.sim.metrics import Summary
from kvroute_studies.netkv.cases import LADDER, PROFILES
from kvroute_studies.shared.result_files import ROUTING, Quoted, ResultTable

CODE = (
    *ROUTING,
    "kvroute_studies/netkv/cases.py",
    "kvroute_studies/netkv/readings.py",
    "kvroute_studies/netkv/setup.py",
    "kvroute_studies/netkv/tuning.py",
)
VERSUS = ("netkv", "cla")
SWEEPS = ("netkv-load", "netkv-context", "netkv-topology", "netkv-staleness", "netkv-prefix", "netkv-ablation")
_AXES: Mapping[str, tuple[str, str, str]] = {
    "netkv-load": ("load", "{:.0%}", "gain everywhere, most in a busy network"),
    "netkv-context": ("tokens", "{:,.0f}", "grows with length until overload"),
    "netkv-topology": ("background", "{:.0%}", "grows with oversubscription and background"),
    "netkv-staleness": ("refresh_s", "{:g} s", "no change"),
    "netkv-prefix": ("p_share", "{:g}", "about constant"),
    "netkv-scale": ("gpus", "{:,.0f}", "the same at every size"),
}
"""Axis of each row of the table, form of its values, and what the publication says of the gain."""
_STEPS = {
    "netkv-topo": ("tier map", "most of the gain"),
    "netkv-static": ("own transfers counted", "a little more"),
    "netkv": ("congestion", "a little more"),
}
PUBLISHED = {
    "round-robin": ("1969 ± 9", "12.74", "0.907", "993"),
    "cla": ("1812 ± 15", "12.71", "0.923", "835"),
    "netkv": ("1598 ± 10", "12.94", "0.944", "620"),
}
"""NetKV's Table II, RAG at 100 %: mean TTFT in ms, TBT in ms, SLO attainment, transfer in ms."""


def _experiments(records: Sequence[Record]) -> Mapping[str, ResultTable]:
    """Return NetKV's gain over CLA* in mean TTFT by experiment and profile, at each point."""
    rows = []
    for name, (axis, form, expected) in _AXES.items():
        some = [record for record in records if record.cell.experiment == name]
        for ratio in values_of(some, "oversubscription") or [0.0]:
            part = [record for record in some if record.cell.settings.get("oversubscription", 0.0) == ratio]
            points = ", ".join(form.format(value).replace("%", " %") for value in values_of(part, axis))
            title = f"topology {ratio:g}:1" if ratio else name.removeprefix("netkv-")
            if part:
                rows.append([title, expected, points, *_cells(part, axis, VERSUS)])
            if name == "netkv-load" and part:
                rows.append(
                    ["CLA* over round-robin", "gain everywhere", points, *_cells(part, axis, ("cla", "round-robin"))]
                )
    ablation = [record for record in records if record.cell.experiment == "netkv-ablation"]
    for before, after in pairwise(LADDER):
        if ablation:
            title, expected = _STEPS[after]
            rows.append([f"ablation: {title}", expected, "", *_cells(ablation, "", (after, before))])
    lost = [_lost([record for record in records if record.cell.profile == profile]) for profile in PROFILES]
    rows.append(["points where NetKV is slower", "none", "all", *lost])
    return {"experiments": ResultTable(["Experiment", "Published", "Points", *map(_title, PROFILES)], rows)}


def _lost(records: Sequence[Record]) -> str:
    """Return at how many points NetKV's mean TTFT is above CLA*'s."""
    found = [gained for gained in _differences(records) if gained is not None]
    lost = [gained for gained in found if gained.mean > 0]
    beyond = sum(not gained.is_noise for gained in lost)
    most = f", {beyond} beyond noise, at most {100 * max(gained.relative for gained in lost):.1f} %" if lost else ""
    return f"{len(lost)} of {len(found)}{most}"


def _differences(records: Sequence[Record]) -> list[Difference | None]:
    points: dict[tuple[str, str, tuple[float, ...]], list[Summary]] = {}
    for record in records:
        place = record.cell.experiment, record.cell.profile, tuple(record.cell.settings.values())
        points.setdefault(place, []).append(record.summary)
    return [gap(runs, VERSUS) for runs in points.values()]


def _cells(records: Sequence[Record], axis: str, versus: tuple[str, str]) -> list[str]:
    """Return for each profile the gains in percent along an axis; a loss beyond noise is bold."""
    cells = []
    for profile in PROFILES:
        gains = []
        values: Sequence[float | None] = values_of(records, axis) or (None,)
        for value in values:
            runs = [
                record
                for record in records
                if record.cell.profile == profile and record.cell.settings.get(axis, None) == value
            ]
            gains.append(_gain(gap(summaries(runs), versus)))
        cells.append(", ".join(gains))
    return cells


def _gain(found: Difference | None) -> str:
    if found is None:
        return UNKNOWN
    text = (
        f"{-100 * found.relative:.0f}".replace("-0", "0")
        if abs(found.relative) < 0.1
        else f"{-100 * found.relative:.0f}"
    )
    return f"**{text}**" if found.mean > 0 and not found.is_noise else text


def _title(profile: str) -> str:
    return f"{'RAG' if profile == 'rag' else profile}, %"


def _policies(records: Sequence[Record]) -> Mapping[str, ResultTable]:
    """Return RAG at 100 % load beside the publication's Table II."""
    columns = [""]
    for title in ("TTFT, ms", "TBT, ms", "SLO", "transfer, ms"):
        columns += [f"{title}: paper", "here"]
    rows = []
    for policy, published in PUBLISHED.items():
        runs = [record.summary for record in _rag_at_100(records) if record.cell.policy == policy]
        here = (
            _with_deviation(runs),
            _number(runs, lambda run: run.tbt_s.mean, 1e3, 2),
            _number(runs, lambda run: run.slo_attainment, 1, 3),
            _number(runs, lambda run: run.transfer_s.mean, 1e3, 0),
        )
        row = ["CLA*" if policy == "cla" else policy]
        for pair in zip(published, here, strict=True):
            row += pair
        rows.append(row)
    return {"policies": ResultTable(columns, rows)}


def _ratios(records: Sequence[Record]) -> Mapping[str, str]:
    runs = summaries(_rag_at_100(records))
    pairs = {"cla-over-round-robin": ("cla", "round-robin"), "netkv-over-cla": ("netkv", "cla")}
    found = {name: gap(runs, pair) for name, pair in pairs.items()}
    inside = {
        f"in-pod-{policy}": [1 - run.tier_share.get("3", 0.0) for run in runs if run.policy == policy]
        for policy in ("cla", "netkv")
    }
    return {name: f"{1 + gained.relative:.2f}" for name, gained in found.items() if gained is not None} | {
        name: f"{100 * sum(shares) / len(shares):.0f} %" for name, shares in inside.items() if shares
    }


def _rag_at_100(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record.cell.profile == "rag" and record.cell.settings == {"load": 1.0}]


def _number(runs: Sequence[Summary], value: Callable[[Summary], float | None], factor: float, digits: int) -> str:
    known = [factor * number for number in map(value, runs) if number is not None]
    found = estimate(known)
    if found is None:
        return UNKNOWN
    return f"{found.mean:.{digits}f}"


def _with_deviation(runs: Sequence[Summary]) -> str:
    """Return the mean of TTFT in ms, and its standard deviation over seeds."""
    known = [1e3 * run.ttft_s.mean for run in runs if run.ttft_s.mean is not None]
    return f"{mean(known):.0f}" + (f" ± {stdev(known):.0f}" if len(known) > 1 else "") if known else UNKNOWN


_of = partial(Quoted, code=CODE, traces=("mooncake",))
QUOTED: Mapping[str, Quoted] = {
    "netkv-literal": _of(SWEEPS, 1, tables=_experiments, reading="literal"),
    "netkv-paper": _of((*SWEEPS, "netkv-scale"), 5, tables=_experiments),
    "netkv-rag": _of(("netkv-load",), 5, tables=_policies, figures=_ratios, profiles=("rag",)),
    "netkv-realistic": _of((*SWEEPS, "netkv-scale"), 5, tables=_experiments, reading="realistic"),
}
"""By name of the result. In `literal` large overloaded runs of `netkv-scale` take hours."""
