"""`prfaas-case-study`: throughput by the closed formula compared with a simulation with queues, at several loads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from kvroute.control import ControlSpec
from kvroute.planner.comparison.cells import Cell, Record
from kvroute.planner.throughput.search import Kind, Optimum, deployment, find
from kvroute.policies.fleet.offload import OffloadSpec
from kvroute.policies.fleet.role_switch import LongTerm
from kvroute.policies.fleet.short_term import Rule, ShortTerm
from kvroute.sim.metrics import Outcomes
from kvroute.sim.run import Run, simulate
from kvroute.sim.settings import SimSpec, Slo
from kvroute.sim.workload import Agents, Trace, fingerprint, read_any, rescale
from kvroute.topology import Cluster
from kvroute.types import BoolArray, FloatArray
from kvroute_studies.prfaas.agents import (
    END_S,
    FROM_S,
    RAMP_S,
    UserGroup,
    agent_lengths,
    answer_tokens,
    answered_per_s,
    in_profile,
    trace_of_groups,
    users_for,
)
from kvroute_studies.prfaas.case_study import (
    DECODE_POLICY,
    OUTPUT_TOKENS,
    Assumptions,
    cluster,
    exact,
    problem,
    published_lengths,
    traced_lengths,
)
from kvroute_studies.prfaas.traffic import even, made, poisson, spread_lengths, two_lengths

AWAY = "prefill-site"
TRACE, AGENTS = "trace", "agents"
"""Profiles of a trace given by the user: with requests, and with agent sessions."""
WARMUP_SHARE = 0.2
_LEAST_FOR_A_LINE = 10


@dataclass(frozen=True, slots=True)
class PrfaasStudy:
    """Settings common to all cells of a results folder."""

    assumed: Assumptions
    trace: str = ""
    """Path of a trace; empty for the published lengths."""


@lru_cache(maxsize=2)
def source(path: str) -> Trace | Agents:
    """Read the user's trace, or its agent sessions up to the lengths of the published profile.

    Raises:
        InputError: the file is invalid; the message gives the reason.
    """
    found = read_any(Path(path))
    return in_profile(found) if isinstance(found, Agents) else found


def whole_trace(path: str) -> Trace:
    """Read a user's trace of requests."""
    found = source(path)
    assert isinstance(found, Trace), "sessions are played, not rescaled"
    return found


def config_of(study: PrfaasStudy) -> dict[str, Any]:
    """Return the configuration that all records of a results folder share."""
    path = Path(study.trace)
    trace = f"{path.name}, XXH64 {fingerprint(path)}" if study.trace else "generated"
    return {"assumptions": msgspec.to_builtins(study.assumed), "trace": trace}


@lru_cache(maxsize=16)
def planned(study: PrfaasStudy, kind: Kind, wan_gbps: float) -> Optimum:
    """Return the planner's optimum for one deployment and the study's traffic."""
    if not study.trace:
        return find(problem(published_lengths(), OUTPUT_TOKENS, wan_gbps), kind)
    trace = source(study.trace)
    if isinstance(trace, Agents):
        return find(problem(agent_lengths(trace), answer_tokens(trace), wan_gbps), kind)
    output_tokens = float(np.mean([request.output_tokens for request in trace.requests]))
    return find(problem(traced_lengths(trace), output_tokens, wan_gbps), kind)


def fixed(threshold_tokens: float, rule: Rule = "scarce") -> OffloadSpec:
    """Return an offload specification with a constant threshold and without role switches."""
    still = ShortTerm(enabled=False, threshold_min_tokens=1.0, threshold_max_tokens=1e9)
    return OffloadSpec(
        threshold_tokens=max(threshold_tokens, 1.0),
        rule=rule,
        short_term=still,
        long_term=LongTerm(role_switches=False),
    )


def case_run(study: PrfaasStudy, cell: Cell) -> Record:
    """Run one cell of `prfaas-case-study`."""
    kind = cast(Kind, cell.policy)
    optimum = planned(study, kind, study.assumed.wan_gbps)
    rate_per_s = cell.settings["load"] * optimum.lambda_max_per_s
    found = deployment(optimum, kind)
    trace, from_s, to_s = _requests(study, cell, optimum, rate_per_s)
    sites = cluster(kind, found.n_prefill, found.n_decode, study.assumed.wan_gbps, study.assumed)
    offload = None if kind == "homogeneous" else fixed(optimum.threshold_tokens, study.assumed.rule)
    spec = ControlSpec(decode=DECODE_POLICY, prefill=study.assumed.prefill_policy, offload=offload)
    settings = SimSpec(
        transfer="layerwise",
        wan=study.assumed.transport,
        slo=Slo(ttft_s=study.assumed.ttft_slo_s),
        warmup_s=from_s,
        measure_s=to_s - from_s,
    )
    run = simulate(sites, trace, spec, settings, seed=cell.seed)
    config = config_of(study) | {
        "offered_per_s": rate_per_s,
        "n_prefill": found.n_prefill,
        "n_decode": found.n_decode,
        "threshold_tokens": found.threshold_tokens,
    }
    return Record(
        key=cell.key,
        cell=cell,
        config=config,
        summary=msgspec.structs.replace(run.summary, policy=cell.policy),
        figures=_model_figures(optimum, kind) | run_figures(run, sites, from_s, to_s, closed=trace.loop is not None),
    )


def _requests(study: PrfaasStudy, cell: Cell, optimum: Optimum, rate_per_s: float) -> tuple[Trace, float, float]:
    """Return the requests of a cell, and the measured interval. The requests are the whole trace, users that play
    sessions, or as many generated requests as the study says, in one order for each seed."""
    if cell.profile == AGENTS:
        agents, found = source(study.trace), deployment(optimum, cast(Kind, cell.policy))
        assert isinstance(agents, Agents)
        users = users_for(agents, found, cell.settings["load"])
        return trace_of_groups(agents, (UserGroup(users, 0.0, RAMP_S, END_S),), cell.seed, places=users), FROM_S, END_S
    trace = _open_loop(study, cell, optimum, rate_per_s)
    return trace, WARMUP_SHARE * trace.duration_s, trace.duration_s


def _open_loop(study: PrfaasStudy, cell: Cell, optimum: Optimum, rate_per_s: float) -> Trace:
    count, draw = study.assumed.requests, np.random.default_rng(cell.seed)
    if cell.profile == TRACE:
        return rescale(whole_trace(study.trace), rate_per_s)
    if cell.profile == "no-variance":
        return made("even, two lengths", even(count, rate_per_s), two_lengths(count, optimum.cell.cut))
    lengths = spread_lengths(count, draw)
    at_s = even(count, rate_per_s) if cell.profile == "lengths" else poisson(count, rate_per_s, draw)
    return made(cell.profile, at_s, lengths)


def _model_figures(optimum: Optimum, kind: Kind) -> dict[str, float]:
    """Return the predictions of the formula."""
    found = deployment(optimum, kind)
    return {
        "lambda_max_per_s": found.lambda_max_per_s,
        "lambda_exact_per_s": exact(optimum),
        "model_ttft_mean_s": found.ttft_s.mean,
        "model_ttft_p90_s": found.ttft_s.p90,
        "model_egress_gbps": found.egress_gbps,
    }


def run_figures(run: Run, sites: Cluster, from_s: float, to_s: float, *, closed: bool = False) -> dict[str, float]:
    """Return the figures of a run by stage; waits are means over the requests of the stage that arrived in [from_s,
    to_s]. `closed`: users wait for their responses, so the sustained rate is the rate of first tokens."""
    rows = run.outcomes
    inside = (rows.arrived_s >= from_s) & np.isfinite(rows.first_token_s)
    away = is_away(rows, sites)
    prefill_s, wait_s = rows.prefill_finished_s - rows.prefill_started_s, rows.prefill_started_s - rows.arrived_s
    figures = {
        "keeps_up_per_s": answered_per_s(rows, from_s, to_s) if closed else keeps_up_per_s(rows, away),
        "ttft_p90_s": _quantile(rows.ttft_s[inside], 0.9),
        "service_mean_s": _mean(prefill_s[inside]),
        "service_p90_s": _quantile(prefill_s[inside], 0.9),
        "prfaas_wait_s": _mean(wait_s[inside & away]),
        "pd_p_wait_s": _mean(wait_s[inside & ~away]),
        "pd_d_wait_s": _mean((rows.admitted_s - rows.landed_s)[inside]),
        "ethernet_s": _mean((rows.landed_s - rows.prefill_finished_s)[inside & away]),
        "offloaded_share": float(away[inside].mean()) if inside.any() else float("nan"),
        "egress_gbps": float(np.nansum(rows.kv_bytes[inside & away])) * 8e-9 / (to_s - from_s),
    }
    figures |= _busy(rows, sites, inside, away, to_s - from_s)
    return {name: value for name, value in figures.items() if np.isfinite(value)}


def is_away(rows: Outcomes, sites: Cluster) -> BoolArray:
    """Return which requests were prefilled at the PrfaaS site."""
    there = np.array([instance.datacenter == AWAY for instance in sites.instances])
    return np.asarray((rows.source >= 0) & there[rows.source])


def keeps_up_per_s(rows: Outcomes, away: BoolArray) -> float:
    """Return the sustained requests per second, from the slope of first-token times over the last three quarters.

    Over the position in the sequence of all requests, the first tokens of offloaded and of local requests lie on two
    lines. The steeper slope is the time that the system needs per request. Below saturation both slopes equal that of
    the arrivals; above it, the line of the slower site has the slope of its bottleneck.
    """
    position = np.arange(len(away))
    counted = np.isfinite(rows.first_token_s) & (position >= len(away) // 4)
    slopes_s = [
        float(np.polyfit(position[some], rows.first_token_s[some], 1)[0])
        for some in (counted & away, counted & ~away)
        if some.sum() >= _LEAST_FOR_A_LINE
    ]
    return 1.0 / max(slopes_s) if slopes_s else float("nan")


def _busy(rows: Outcomes, sites: Cluster, inside: BoolArray, away: BoolArray, seconds: float) -> dict[str, float]:
    """Return the work that arrived at each stage as a share of its capacity in that time."""
    roles = [(instance.role, instance.datacenter == AWAY) for instance in sites.instances]
    prefill_s = rows.prefill_finished_s - rows.prefill_started_s
    slot_s = (rows.finished_s - rows.admitted_s)[inside]
    slots = sum(instance.batch_max for instance in sites.instances if instance.role == "decode")
    work = {
        "prfaas_busy": (prefill_s[inside & away], roles.count(("prefill", True))),
        "pd_p_busy": (prefill_s[inside & ~away], roles.count(("prefill", False))),
        "pd_d_busy": (slot_s, slots),
    }
    return {name: float(np.nansum(each_s)) / (seconds * of) for name, (each_s, of) in work.items() if of}


def _mean(values: FloatArray) -> float:
    return float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")


def _quantile(values: FloatArray, share: float) -> float:
    return float(np.nanquantile(values, share)) if np.isfinite(values).any() else float("nan")
