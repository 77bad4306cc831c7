"""PrfaaS's experiments as grids of texts, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Sequence

from kvroute.planner.comparison.cells import Record
from kvroute.report.estimate import Estimate, estimate
from kvroute.report.grid import UNKNOWN, Grid, GridEntry, Heading, with_ties
from kvroute.report.plans.throughput_tables import TITLES
from kvroute.report.series import of_profile, profiles_of, values_of
from kvroute_studies.prfaas.burst import DUAL
from kvroute_studies.prfaas.findings import (
    at,
    best_static,
    figure,
    goodput_per_s,
    lead,
    old_static,
    policies_of,
    saturations,
    standard_error,
    statics,
)
from kvroute_studies.prfaas.run import BURST, CASE_STUDY
from kvroute_studies.shared.cells import Computed, Experiment

_WAITS = (
    Heading("PrfaaS wait s", "Before prefill at the PrfaaS site, mean of offloaded requests"),
    Heading("PD-P wait s", "Before prefill at home, mean of the other requests"),
    Heading("PD-D wait s", "For a slot of a decode instance"),
    Heading("Ethernet s", "From the end of prefill to the arrival of the KV cache, mean of offloaded requests"),
)
_WAIT_KEYS = ("prfaas_wait_s", "pd_p_wait_s", "pd_d_wait_s", "ethernet_s")


def prfaas_grids(experiment: Experiment, records: Sequence[Record], points: Sequence[Computed]) -> list[Grid]:
    """Return the tables of one experiment, the most important first."""
    if experiment.name == CASE_STUDY.name:
        return [grid for grid in (_throughput(records), _times(records)) if grid.rows]
    if experiment.name == BURST.name:
        return [_leads(records, experiment.versus[1]), _all_statics(records)]
    return [_kv(points)]


def _throughput(records: Sequence[Record]) -> Grid:
    headings = (
        Heading("profile"),
        Heading("deployment"),
        Heading("P/D", "Prefill and decode instances of the local cluster"),
        Heading("formula /s", "Eq. 6 with T(E[L]), as in the paper"),
        Heading("E[T(L)] /s", "Eq. 6 with the mean cost of a request"),
        Heading("saturation /s", "Maximum served rate, 95 % interval"),
        Heading("against formula"),
        Heading("against E[T(L)]"),
        Heading("over homogeneous", "Saturation; below: the formula"),
    )
    rows = []
    for profile in profiles_of(records):
        some = of_profile(records, profile)
        gaps = saturations(some)
        base = next((gap for gap in gaps if gap.policy == "homogeneous"), None)
        for gap in gaps:
            config = at(some, gap.policy)[0].config
            gain = gap.saturation.mean / base.saturation.mean - 1 if base else None
            formula = gap.formula_per_s / base.formula_per_s - 1 if base else None
            rows.append((
                GridEntry(profile),
                GridEntry(TITLES[gap.policy]),  # type: ignore[index]  # policies of this experiment are the kinds
                GridEntry(f"{config['n_prefill']}/{config['n_decode']}"),
                GridEntry(f"{gap.formula_per_s:.3f}"),
                GridEntry(f"{gap.exact_per_s:.3f}"),
                _entry(gap.saturation, 3),
                GridEntry(f"{gap.off:+.1%}"),
                GridEntry(f"{gap.off_exact:+.1%}"),
                GridEntry(UNKNOWN if gain is None else f"{gain:+.1%}", "" if formula is None else f"{formula:+.1%}"),
            ))  # fmt: skip
    caption = "Saturation: served rate at the highest load, measured from the growing delay of first tokens."
    return Grid("Throughput", headings, tuple(rows), caption, 2)


def _times(records: Sequence[Record]) -> Grid:
    headings = (
        Heading("profile"),
        Heading("deployment"),
        Heading("load"),
        Heading("TTFT mean s", "With queues and Ethernet"),
        Heading("P90 s"),
        Heading("prefill only s", "TTFT as published: service time; below: the formula"),
        Heading("its P90 s"),
        *_WAITS,
        Heading("busy PrfaaS/P/D %", "Arrived work divided by the capacity of the stage"),
        Heading("egress Gbps"),
    )
    rows = []
    for profile in profiles_of(records):
        for policy in policies_of(records):
            for load in values_of(records, "load"):
                there = at(of_profile(records, profile), policy, load=load)
                if there:
                    title = GridEntry(TITLES[policy])  # type: ignore[index]
                    rows.append((GridEntry(profile), title, GridEntry(f"{load:g}"), *_time_entries(there)))
    caption = "Above a load of 1, waits grow until the run ends. ± 95 % interval over seeds."
    return Grid("Time to first token", headings, tuple(rows), caption, 3)


def _time_entries(records: Sequence[Record]) -> list[GridEntry]:
    model = records[0].figures
    ttft = estimate(record.summary.ttft_s.mean for record in records)
    busy = [figure(records, key) for key in ("prfaas_busy", "pd_p_busy", "pd_d_busy")]
    shares = "/".join("-" if estimated is None else f"{estimated.mean * 100:.0f}" for estimated in busy)
    return [
        _entry(ttft, 2),
        _entry(figure(records, "ttft_p90_s"), 2),
        _beside(figure(records, "service_mean_s"), model.get("model_ttft_mean_s")),
        _beside(figure(records, "service_p90_s"), model.get("model_ttft_p90_s")),
        *(_entry(figure(records, key), 2) for key in _WAIT_KEYS),
        GridEntry(shares),
        _entry(figure(records, "egress_gbps"), 1),
    ]


def _leads(records: Sequence[Record], planned: str) -> Grid:
    headings = (
        Heading("scenario"),
        Heading("scheduler good/s", "Requests per second that meet both SLOs"),
        Heading("best static", "Best threshold in hindsight; below: its goodput"),
        Heading("against best", "Paired over seeds, ± standard error"),
        Heading("old static", "Best for the old traffic; below: its goodput"),
        Heading("against old"),
        Heading("planned static", "The planner's threshold; below: its goodput"),
        Heading("against planned"),
        Heading("TTFT P95 s", "Scheduler; below: best static"),
        Heading("role switches", "Mean over seeds"),
        Heading("failed transfers", "Scheduler; their requests were retried"),
    )
    old = old_static(records)
    rows = []
    for profile in profiles_of(records):
        some = of_profile(records, profile)
        best, dual = best_static(some), at(some, DUAL)
        rows.append((
            GridEntry(profile),
            _entry(_goodput(some, DUAL), 3),
            *_other(some, best),
            *_other(some, old),
            *_other(some, planned if planned in statics(some) else None),
            GridEntry(_p95(some, DUAL), _p95(some, best or "")),
            _entry(estimate(float(record.summary.role_switches) for record in dual), 1),
            _entry(estimate(float(record.summary.failed_transfers.transfers) for record in dual), 1),
        ))  # fmt: skip
    return Grid("Goodput", headings, tuple(rows), "Mean over seeds ± 95 % interval; differences ± standard error.")


def _other(records: Sequence[Record], policy: str | None) -> tuple[GridEntry, GridEntry]:
    found = lead(records, policy)
    good = None if policy is None else _goodput(records, policy)
    if found is None or policy is None or good is None:
        return GridEntry(policy or UNKNOWN), GridEntry(UNKNOWN)
    error = standard_error(found, records)
    return GridEntry(policy, f"{good.mean:.3f}"), GridEntry(
        f"{found.relative:+.1%}", "" if error is None else f"±{error:.1%}"
    )


def _all_statics(records: Sequence[Record]) -> Grid:
    policies = [DUAL, *statics(records)]
    rows = []
    for profile in profiles_of(records):
        some = of_profile(records, profile)
        goods = [_goodput(some, policy) for policy in policies]
        most = max((known.mean for known in goods if known is not None), default=None)
        entries = [_entry(known, 3, best=known is not None and known.mean == most) for known in goods]
        rows.append((GridEntry(profile), *with_ties(entries)))
    headings = (Heading("scenario"), *(Heading(policy.replace("static-", "t ")) for policy in policies))
    return Grid("Every threshold", headings, tuple(rows), "Good requests per second, ± 95 % interval. Bold: highest.")


def _goodput(records: Sequence[Record], policy: str) -> Estimate | None:
    return estimate(goodput_per_s(record.summary) for record in records if record.cell.policy == policy)


def _p95(records: Sequence[Record], policy: str) -> str:
    known = estimate(record.summary.ttft_s.p95 for record in at(records, policy))
    return UNKNOWN if known is None else f"{known.mean:.1f}"


def _kv(points: Sequence[Computed]) -> Grid:
    headings = (
        Heading("model"),
        Heading("tokens"),
        Heading("measured Gbps", "PrfaaS Tables 3 and 5, 8 H200"),
        Heading("computed Gbps", "Eq. 1, if size and time are published"),
        Heading("KV MiB", "Published (Table 5), or from the model's layers"),
        Heading("implied prefill s", "KV size divided by measured throughput; no published value"),
        Heading("512 GPUs need Gbps", "Eq. 2"),
    )
    keys = (("published_gbps", 2), ("computed_gbps", 2), ("kv_mib", 1), ("implied_prefill_s", 3), ("need_gbps", 0))
    rows = tuple(
        (
            GridEntry(point.cell.policy),
            GridEntry(f"{point.cell.settings['tokens']:,.0f}"),
            *(
                GridEntry(f"{point.figures[key]:,.{digits}f}" if key in point.figures else UNKNOWN)
                for key, digits in keys
            ),
        )
        for point in sorted(points, key=lambda point: (point.cell.policy, point.cell.settings["tokens"]))
    )
    caption = "A size that was fitted to the table (the 1T model's layers) is not compared with it."
    return Grid("KV throughput", headings, rows, caption, 2)


def _entry(known: Estimate | None, digits: int, *, best: bool = False) -> GridEntry:
    if known is None:
        return GridEntry(UNKNOWN)
    detail = "" if known.half_width is None else f"±{known.half_width:,.{digits}f}"
    return GridEntry(f"{known.mean:,.{digits}f}", detail, best)


def _beside(known: Estimate | None, formula: float | None) -> GridEntry:
    if known is None:
        return GridEntry(UNKNOWN)
    return GridEntry(f"{known.mean:,.2f}", "" if formula is None else f"{formula:,.2f}")
