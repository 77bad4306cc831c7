"""A complete plan: the deployments, their sensitivity to the inputs, and the curves behind the figures."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from kvroute.planner.throughput.kv_throughput import egress_bytes_per_s, mean_kv_bytes_per_s
from kvroute.planner.throughput.problem import Problem, Site
from kvroute.planner.throughput.search import (
    KINDS,
    Kind,
    Optimum,
    PlannedDeployment,
    deployment,
    find,
    find_home,
)
from kvroute.planner.throughput.sensitivity import Sensitivity, sensitivity
from kvroute.policies.fleet.throughput import StageRates, splits, stage_rates


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Throughput relative to price; a GPU without a price costs 1 per hour."""

    gpus: int
    made_of: str
    """GPUs by hardware, such as "32 h200 + 64 h20"."""
    price: float
    """Price of all GPUs per hour."""
    requests_per_price: float


class EgressNeed(msgspec.Struct, frozen=True, kw_only=True):
    """Eq. 2 for one PrfaaS cluster: the egress at which its GPUs never wait for the link."""

    cluster: str
    gpus: int
    available_gbps: float
    offloaded_gbps: float
    """Egress needed for the prompts that the optimum offloads, in Gbps."""
    all_gbps: float
    """Egress needed if every prompt were offloaded, in Gbps."""


class PlanReport(msgspec.Struct, frozen=True, kw_only=True):
    """All results of a plan, as written to plan.json."""

    name: str
    choices: tuple[str, ...]
    deployments: dict[Kind, PlannedDeployment]
    """Deployments by kind; `home` is missing if the PD clusters are too small to serve alone."""
    bounds_per_s: dict[str, float | None]
    """Requests per second that `prfaas` could serve if one stage alone limited it: Theta_prfaas / p,
    Theta_pd-p / (1 - p) and Theta_pd-d; None if no request uses the stage."""
    gain_over: dict[Kind, float]
    """Lambda_max of `prfaas` divided by Lambda_max of each alternative, minus 1."""
    costs: dict[Kind, Cost]
    egress_need: tuple[EgressNeed, ...]
    sensitivity: Sensitivity
    splits: dict[str, tuple[int, int]]
    """Prefill and decode instances of each PD cluster."""


@dataclass(frozen=True)
class Plan:
    """A problem, its optima, and the report on both."""

    problem: Problem
    optima: dict[Kind, Optimum]
    report: PlanReport


def make_plan(problem: Problem) -> Plan:
    """Search all deployments and their sensitivity.

    Raises:
        InputError: a deployment could serve nothing, or there are too many splits to try.
    """
    optima = {kind: find(problem, kind) for kind in KINDS}
    if home := find_home(problem):
        optima["home"] = home
    best = optima["prfaas"]
    deployments = {kind: deployment(optimum, kind) for kind, optimum in optima.items()}
    report = PlanReport(
        name=problem.name,
        choices=problem.choices,
        deployments=deployments,
        bounds_per_s=_bounds_per_s(best),
        gain_over={
            kind: best.lambda_max_per_s / optimum.lambda_max_per_s - 1
            for kind, optimum in optima.items()
            if kind != "prfaas"
        },
        costs={
            kind: Cost(
                gpus=optimum.gpus,
                made_of=optimum.made_of,
                price=optimum.price,
                requests_per_price=optimum.requests_per_price,
            )
            for kind, optimum in optima.items()
        },
        egress_need=tuple(_egress_need(problem, best, site) for site in problem.prfaas),
        sensitivity=sensitivity(problem, optima),
        splits={
            site.name: (int(n_prefill), int(n_decode))
            for site, n_prefill, n_decode in zip(best.pd, best.cell.n_prefill[0], best.cell.n_decode[0], strict=True)
        },
    )
    return Plan(problem, optima, report)


def over_splits(plan: Plan) -> StageRates:
    """Evaluate every split at the optimal threshold: Figure 5 (a)."""
    best = plan.optima["prfaas"]
    return stage_rates(best.system, best.cell.thresholds, *splits([site.instances for site in best.pd]))


def over_thresholds(plan: Plan) -> StageRates:
    """Evaluate every threshold at the optimal split: Figure 5 (b)."""
    best = plan.optima["prfaas"]
    return stage_rates(best.system, plan.problem.lengths.thresholds, best.cell.n_prefill, best.cell.n_decode)


def _bounds_per_s(best: Optimum) -> dict[str, float | None]:
    cell = best.cell
    bounds = {
        "prfaas": cell.prfaas_bound_per_s[0],
        "pd_p": cell.pd_p_bound_per_s[0, 0],
        "pd_d": cell.pd_d_per_s[0],
    }
    return {name: float(bound) if np.isfinite(bound) else None for name, bound in bounds.items()}


def _egress_need(problem: Problem, best: Optimum, site: Site) -> EgressNeed:
    def need_gbps(threshold_tokens: float) -> float:
        kv_bytes_per_s = mean_kv_bytes_per_s(
            problem.lengths.mix, threshold_tokens, problem.kv_bytes, site.hardware.prefill_s, problem.reading
        )
        return egress_bytes_per_s(site.gpus, problem.gpus_per_instance, kv_bytes_per_s) * 8 / 1e9

    return EgressNeed(
        cluster=site.name,
        gpus=site.gpus,
        available_gbps=site.egress_bytes_per_s * 8 / 1e9,
        offloaded_gbps=need_gbps(best.threshold_tokens),
        all_gbps=need_gbps(float(problem.lengths.thresholds[0])),
    )
