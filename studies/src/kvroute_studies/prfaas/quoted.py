"""What the pages quote of PrfaaS's experiments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from kvroute.planner.comparison.cells import Record
from kvroute.planner.throughput.search import KINDS
from kvroute.report.estimate import Estimate, estimate
from kvroute.report.grid import UNKNOWN
from kvroute.report.plans.throughput_tables import TITLES
from kvroute.report.series import of_profile, profiles_of, values_of
from kvroute_studies.prfaas.burst import DUAL, TRACE_THRESHOLDS, static
from kvroute_studies.prfaas.findings import (
    at,
    best_static,
    figure,
    goodput_per_s,
    lead,
    old_static,
    saturations,
    standard_error,
    statics,
)
from kvroute_studies.prfaas.run import BURST, CASE_STUDY
from kvroute_studies.shared.result_files import ROUTING, Quoted, ResultTable

CODE = (
    *ROUTING,
    "kvroute/planner/throughput",
    "kvroute_studies/netkv/readings.py",
    *(
        f"kvroute_studies/prfaas/{name}.py"
        for name in ("agents", "burst", "case_study", "kv", "queue", "run", "traffic")
    ),
)
_PROFILES = {"no-variance": "no variance", "lengths": "log-normal lengths", "poisson": "Poisson arrivals too"}


def _sustained(records: Sequence[Record]) -> Mapping[str, ResultTable]:
    """Return the requests per second by the formula and with queues, for the generated profiles."""
    found = {profile: {gap.policy: gap for gap in saturations(of_profile(records, profile))} for profile in _PROFILES}
    rows = []
    for kind in KINDS:
        gaps = [found[profile][kind] for profile in _PROFILES]
        numbers = [f"{gaps[0].formula_per_s:.3f}", f"{gaps[0].exact_per_s:.3f}"]
        rows.append([TITLES[kind], *numbers, *(_interval(gap.saturation, 3) for gap in gaps)])
    return {"systems": ResultTable(["", "formula, T(E[L])", "with E[T(L)]", *_PROFILES.values()], rows)}


def _over_others(records: Sequence[Record]) -> Mapping[str, str]:
    """Return how much more PrfaaS-PD serves than the others under Poisson arrivals, or with the one profile of a trace,
    and by the formula."""
    profiles = profiles_of(records)
    gaps = {gap.policy: gap for gap in saturations(of_profile(records, profiles[-1]))}
    ours = gaps["prfaas"]
    found = {}
    for kind in KINDS:
        if kind in gaps and kind != "prfaas":
            other = gaps[kind]
            found[f"over-{kind}"] = f"{100 * (ours.saturation.mean / other.saturation.mean - 1):+.0f} %"
            found[f"formula-over-{kind}"] = f"{100 * (ours.formula_per_s / other.formula_per_s - 1):+.0f} %"
    return found


def _loads(records: Sequence[Record]) -> Mapping[str, ResultTable]:
    """Return TTFT and the waits of PrfaaS-PD by load, up to the throughput of the formula, under Poisson arrivals."""
    rows = []
    for load in values_of(records, "load"):
        there = at(of_profile(records, "poisson"), "prfaas", load=load)
        if there and load <= 1:
            ttft = estimate(record.summary.ttft_s.mean for record in there)
            keys = ("ttft_p90_s", "prfaas_wait_s", "pd_p_wait_s", "ethernet_s", "pd_d_wait_s")
            rows.append([f"{100 * load:.0f} %", _seconds(ttft), *(_seconds(figure(there, key)) for key in keys)])
    waits = ["wait for PrfaaS", "wait for PD prefill", "Ethernet after prefill", "wait for PD decode"]
    return {"loads": ResultTable(["load", "TTFT mean", "P90", *waits], rows)}


def _traced(records: Sequence[Record]) -> Mapping[str, ResultTable]:
    """Return the requests per second by the formula and with queues, for a trace."""
    rows = [
        [
            TITLES[gap.policy],  # type: ignore[index]  # policies of this experiment are the kinds
            _split(at(records, gap.policy)[0]),
            f"{gap.formula_per_s:.2f} /s",
            f"{gap.saturation.mean:.2f} /s",
            f"{100 * gap.off:+.0f} %",
        ]
        for gap in saturations(records)
    ]
    columns = ["", "P/D, threshold", "formula", "sustained with queues", "against the formula"]
    return {"systems": ResultTable(columns, rows)}


def _agents(records: Sequence[Record]) -> Mapping[str, ResultTable]:
    """Return what is served by deployment and load; users wait for their responses."""
    rows = []
    for kind in KINDS:
        for load in values_of(records, "load"):
            there = at(records, kind, load=load)
            if not there:
                continue
            waits = [_seconds(figure(there, key)) for key in ("prfaas_wait_s", "pd_p_wait_s")]
            cached = estimate(record.summary.prefill_cache_hit for record in there)
            rows.append(
                [
                    f"{TITLES[kind]}, {100 * load:.0f} %",
                    _split(there[0]),
                    f"{there[0].figures['lambda_max_per_s']:.2f} /s",
                    f"{there[0].config['offered_per_s']:.2f} /s",
                    _plain(figure(there, "keeps_up_per_s"), 2),
                    ", ".join(waits),
                    UNKNOWN if cached is None else f"{100 * cached.mean:.1f} %",
                ]
            )
    columns = ["load", "P/D, threshold", "formula", "offered", "served, turns/s", "prefill wait, PrfaaS and home"]
    return {"systems": ResultTable([*columns, "of the prompt cached"], rows)}


def _scenarios(records: Sequence[Record]) -> Mapping[str, ResultTable]:
    """Return the scheduler's goodput beside static thresholds: the best one of each scenario, the best one for the old
    traffic, and the planner's."""
    old, planned = old_static(records), _planned(records)
    rows = []
    for profile in profiles_of(records):
        some = of_profile(records, profile)
        best = best_static(some)
        rows.append(
            [
                profile,
                _plain(_goodput(some, DUAL), 3),
                f"{_plain(_goodput(some, best), 3)} ({_tokens(best)})",
                *(_lead(some, other) for other in (best, old, planned)),
            ]
        )
    columns = ["scenario", "scheduler", "best static in hindsight", "difference"]
    columns += [f"to the best for the old traffic ({_tokens(old)})", f"to the planner's ({_tokens(planned)})"]
    return {"scenarios": ResultTable(columns, rows)}


def _planned(records: Sequence[Record]) -> str | None:
    """Return the policy with the planner's threshold: the published one, or with a trace the one that is added."""
    known = statics(records)
    if static(19_600) in known:
        return static(19_600)
    return next((policy for policy in known if policy not in map(static, TRACE_THRESHOLDS)), None)


def _goodput(records: Sequence[Record], policy: str | None) -> Estimate | None:
    return estimate(goodput_per_s(record.summary) for record in records if record.cell.policy == policy)


def _lead(records: Sequence[Record], over: str | None) -> str:
    found = lead(records, over)
    if found is None:
        return UNKNOWN
    error = standard_error(found, records)
    return f"{100 * found.relative:+.1f} %" + ("" if error is None else f" ± {100 * error:.1f} %")


def _tokens(policy: str | None) -> str:
    return UNKNOWN if policy is None else f"{float(policy.removeprefix('static-')):,.0f}"


def _split(record: Record) -> str:
    config = record.config
    threshold = config["threshold_tokens"]
    return f"{config['n_prefill']}/{config['n_decode']}" + ("" if threshold is None else f", {threshold:,.0f}")


def _interval(known: Estimate, digits: int) -> str:
    return f"{known.mean:.{digits}f}" + ("" if known.half_width is None else f" ± {known.half_width:.{digits}f}")


def _plain(known: Estimate | None, digits: int) -> str:
    return UNKNOWN if known is None else f"{known.mean:.{digits}f}"


def _seconds(known: Estimate | None) -> str:
    return UNKNOWN if known is None else f"{known.mean:.2f} s"


_case = partial(Quoted, (CASE_STUDY.name,), code=CODE)
_burst = partial(Quoted, (BURST.name,), code=CODE, tables=_scenarios)
QUOTED: Mapping[str, Quoted] = {
    "prfaas-agents": _case(1, tables=_agents, figures=_over_others, changes=("rule=auto",), traces=("coding-agent",)),
    "prfaas-burst": _burst(5),
    "prfaas-burst-agents": _burst(2, changes=("rule=auto",), traces=("coding-agent",)),
    "prfaas-burst-mooncake": _burst(2, traces=("mooncake",)),
    "prfaas-mooncake": _case(1, tables=_traced, figures=_over_others, traces=("mooncake",)),
    "prfaas-sustained": _case(5, tables=_sustained, figures=_over_others),
    "prfaas-ttft": _case(5, tables=_loads),
}
"""By name of the result."""
