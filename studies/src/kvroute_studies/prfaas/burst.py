"""`prfaas-burst`: static thresholds against the dual-timescale scheduler, while load, link or lengths change."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import msgspec
import numpy as np

from kvroute.control import ControlSpec, LogHeader
from kvroute.control.log import EventLog, read_log
from kvroute.planner.comparison.cells import Cell, Record
from kvroute.planner.throughput.search import deployment
from kvroute.policies.fleet.offload import OffloadSpec
from kvroute.policies.fleet.short_term import Rule
from kvroute.sim.metrics import NOT_ARRIVED, Outcomes
from kvroute.sim.run import Run, simulate
from kvroute.sim.settings import CapacityChange, SimSpec, Slo
from kvroute.sim.workload import Agents, Trace
from kvroute.topology import Cluster
from kvroute.types import InputError, Prefill, Role, RoleSwitched
from kvroute_studies.prfaas.agents import UserGroup, trace_of_groups, users_for
from kvroute_studies.prfaas.case_study import DECODE_POLICY, TPOT_MAX_S, cluster
from kvroute_studies.prfaas.queue import (
    AWAY,
    PrfaasStudy,
    config_of,
    fixed,
    planned,
    run_figures,
    source,
)
from kvroute_studies.prfaas.traffic import Disturbance

DUAL = "dual-timescale"
THRESHOLDS = (6_000, 8_000, 12_500, 16_000, 19_600, 25_000, 32_000, 40_000)
"""Thresholds of the static policies; 19,600 is the planner's."""
TRACE_THRESHOLDS = (1_000, 2_000, 4_000, 8_000, 12_500, 16_000, 24_000, 32_000)
"""Thresholds of the static policies on a trace."""
WARMUP_S, FROM_S, TO_S, END_S = 240.0, 300.0, 900.0, 1_200.0
"""Measurement starts at WARMUP_S, the disturbance lasts from FROM_S to TO_S, and arrivals end at END_S."""
RAMP_S = 200.0
"""Agent users start within this time after the start of the run."""
CUT_S = FROM_S + 0.4
"""Time of the link failure. It lies between two telemetry readings, as a real failure does."""
STALL_S = 10.0
REVIEW_S = 10.0
"""Interval between the driver's review calls; the scheduler decides when a review is due."""
STEP_S = 20.0
"""Step of the time series."""


_NONE = Disturbance(FROM_S, TO_S)


@dataclass(frozen=True, slots=True)
class BurstScenario:
    """A change of conditions between FROM_S and TO_S, or at the given times."""

    name: str
    about: str
    traffic: Disturbance = _NONE
    link_shares: tuple[tuple[float, float], ...] = ()
    """(seconds, share of the link's capacity from that time on)."""
    on_traces: bool = True
    """True if the scenario applies to a trace from a file."""

    @property
    def changes(self) -> tuple[CapacityChange, ...]:
        """The capacity changes for the simulator."""
        return tuple(CapacityChange(at_s=at, link="wan", share=share) for at, share in self.link_shares)


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        BurstScenario("calm", "unchanged traffic"),
        BurstScenario("load-doubles", "twice the request rate for 600 s", Disturbance(FROM_S, TO_S, rate_factor=2.0)),
        BurstScenario("link-30", "link capacity at 30 % for 600 s", link_shares=((CUT_S, 0.3), (TO_S, 1.0))),
        BurstScenario("link-cut", "link cut for 60 s, then restored", link_shares=((CUT_S, 0.0), (CUT_S + 60.0, 1.0))),
        BurstScenario(
            "longer-prompts",
            "prompts about twice as long for 600 s",
            Disturbance(FROM_S, TO_S, mu=10.6),
            on_traces=False,
        ),
    )
}


_MOST_FACTOR = max(scenario.traffic.rate_factor for scenario in SCENARIOS.values())


def static(threshold_tokens: float) -> str:
    """Return the name of the policy with this fixed threshold."""
    return f"static-{threshold_tokens:g}"


def offload_of(policy: str, rule: Rule = "scarce") -> OffloadSpec:
    """Return the offload specification of a policy: the scheduler with its defaults, or a fixed threshold."""
    return OffloadSpec() if policy == DUAL else fixed(float(policy.removeprefix("static-")), rule)


def burst_run(study: PrfaasStudy, cell: Cell) -> Record:
    """Run one cell of `prfaas-burst`. All policies start from the planner's split; only dual-timescale changes it."""
    scenario, assumed = SCENARIOS[cell.profile], study.assumed
    found = deployment(planned(study, "prfaas", assumed.burst_wan_gbps))
    rate_per_s = assumed.burst_load * found.lambda_max_per_s
    sites = cluster("prfaas", found.n_prefill, found.n_decode, assumed.burst_wan_gbps, assumed)
    spec = ControlSpec(
        decode=DECODE_POLICY, prefill=assumed.prefill_policy, offload=offload_of(cell.policy, assumed.rule)
    )
    settings = SimSpec(
        transfer="layerwise",
        wan=assumed.transport,
        changes=scenario.changes,
        stall_s=STALL_S,
        review_s=REVIEW_S if cell.policy == DUAL else None,
        slo=Slo(ttft_s=assumed.ttft_slo_s, tpot_s=TPOT_MAX_S),
        warmup_s=WARMUP_S,
        measure_s=END_S - WARMUP_S,
    )
    trace = requests_of(study, scenario, rate_per_s, cell.seed)
    run, moved = _observed(sites, trace, spec, settings, cell.seed)
    good = good_over_time(run.outcomes, settings.slo)
    config = config_of(study) | {
        "rate_per_s": rate_per_s,
        "n_prefill": found.n_prefill,
        "n_decode": found.n_decode,
        "link_gbps": assumed.burst_wan_gbps,
    }
    return Record(
        key=cell.key,
        cell=cell,
        config=config,
        summary=msgspec.structs.replace(run.summary, policy=cell.policy),
        figures=run_figures(run, sites, WARMUP_S, END_S, closed=trace.loop is not None),
        series={"good_share": good} | moved,
    )


def requests_of(study: PrfaasStudy, scenario: BurstScenario, rate_per_s: float, seed: int) -> Trace:
    """Return the requests, the same for every policy of a seed. Each seed uses another part of a trace, the same in all
    scenarios.

    Raises:
        InputError: the trace is too short for the scenario that needs the most requests.
    """
    if not study.trace:
        return scenario.traffic.requests(rate_per_s, END_S, seed)
    trace = source(study.trace)
    if isinstance(trace, Agents):
        return _sessions(study, trace, scenario, seed)
    needed = ceil(rate_per_s * (END_S + (_MOST_FACTOR - 1.0) * (TO_S - FROM_S)))
    room = len(trace.requests) - needed
    if room < 0:
        what = f"{len(trace.requests)} requests are too few: at {rate_per_s:.2f}/s a run may need {needed}"
        raise InputError(what, where=trace.name, hint="give a longer trace, or reduce burst_load with --set")
    first = int(room * ((seed * 0.6180339887) % 1.0))
    part = Trace(trace.name, trace.requests[first : first + needed])
    return scenario.traffic.of_trace(part, rate_per_s, END_S)


def _sessions(study: PrfaasStudy, agents: Agents, scenario: BurstScenario, seed: int) -> Trace:
    """Return the users of the usual traffic, and the additional users during the disturbance."""
    found = deployment(planned(study, "prfaas", study.assumed.burst_wan_gbps))
    users, factor = users_for(agents, found, study.assumed.burst_load), scenario.traffic.rate_factor
    usual = UserGroup(users, 0.0, RAMP_S, END_S)
    more = UserGroup(round(users * (factor - 1.0)), scenario.traffic.from_s, 0.0, scenario.traffic.to_s)
    return trace_of_groups(agents, (usual, more), seed, places=round(users * _MOST_FACTOR))


def good_over_time(rows: Outcomes, slo: Slo) -> tuple[tuple[float, float], ...]:
    """Return the share of requests that meet the SLO by arrival time in steps of STEP_S, without empty steps."""
    steps = np.maximum(rows.output_tokens - 1, 1)
    good = rows.ttft_s <= slo.ttft_s
    if slo.tpot_s is not None:
        good &= (rows.finished_s - rows.first_token_s) / steps <= slo.tpot_s
    came = rows.state != NOT_ARRIVED
    slot = (rows.arrived_s[came] // STEP_S).astype(np.int64)
    counts, hits = np.bincount(slot), np.bincount(slot, weights=good[came])
    return tuple((float(k * STEP_S), float(hits[k] / counts[k])) for k in np.flatnonzero(counts).tolist())


def _observed(
    sites: Cluster, trace: Trace, spec: ControlSpec, settings: SimSpec, seed: int
) -> tuple[Run, dict[str, tuple[tuple[float, float], ...]]]:
    """Return a run and, if reviews are enabled, its threshold and its number of prefill instances at home over time."""
    if settings.review_s is None:
        return simulate(sites, trace, spec, settings, seed=seed), {}
    with tempfile.TemporaryDirectory(prefix="kvroute-") as folder:
        path = Path(folder, "run.log")
        with EventLog(path, LogHeader(cluster="", spec=spec)) as log:
            run = simulate(sites, trace, spec, settings, seed=seed, log=log)
        return run, _moved(sites, path)


def _moved(sites: Cluster, path: Path) -> dict[str, tuple[tuple[float, float], ...]]:
    thresholds, roles = dict[float, float](), {instance.name: instance.role for instance in sites.instances}
    prefill: list[tuple[float, float]] = [(0.0, float(_at_home(sites, roles)))]
    for record in read_log(path)[1]:
        for decision in record.decisions:
            if isinstance(decision, Prefill) and decision.offload is not None:
                at = record.event.at
                thresholds[at // STEP_S * STEP_S] = decision.offload.terms.get("threshold_tokens", 0.0)
        if isinstance(record.event, RoleSwitched):
            roles[record.event.instance] = record.event.role
            prefill.append((record.event.at, float(_at_home(sites, roles))))
    return {"threshold_tokens": tuple(sorted(thresholds.items())), "n_prefill": tuple(prefill)}


def _at_home(sites: Cluster, roles: Mapping[str, Role]) -> int:
    return sum(roles[instance.name] == "prefill" for instance in sites.instances if instance.datacenter != AWAY)
