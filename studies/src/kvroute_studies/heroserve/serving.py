"""`heroserve-scalability`, `heroserve-prediction`, `heroserve-latency` and `heroserve-memory`: placements of several
baselines, planned and simulated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvroute.collectives import INA_SCHEMES
from kvroute.control import ControlSpec
from kvroute.llm import model
from kvroute.planner.comparison.cells import Cell, Record
from kvroute.planner.placement.evaluation import decode_load
from kvroute.planner.placement.instances import PlacedInstance
from kvroute.planner.placement.output import cluster_file, named
from kvroute.planner.placement.problem import PlacementProblem
from kvroute.planner.placement.search import Placement
from kvroute.planner.placement.simulation import poisson_trace
from kvroute.sim.metrics import Outcomes
from kvroute.sim.run import Run, simulate
from kvroute.sim.settings import SimSpec, Slo
from kvroute.topology import Cluster, build
from kvroute.types import FloatArray
from kvroute_studies.heroserve.setup import (
    WORKLOADS,
    best_placement,
    chosen_at,
    fixed_placement,
    problem_of,
)
from kvroute_studies.shared.cells import Experiment
from kvroute_studies.shared.heroserve_baselines import BASELINES, HERO, WITHOUT

REQUESTS_MIN, REQUESTS_MAX = 1_000, 4_000
RELAXATIONS, WARMUP_RELAXATIONS = 4.0, 2.0
"""Length of a run, and of its beginning that is not counted, in times in which the batch of a decode settles."""
SAMPLES, WINDOWS = 600, 20
"""Times at which the use of KV memory is computed, and windows whose means a record keeps."""
_HALF = 2
"""Bytes of an element in packets."""
_GAIN = "a placement with hierarchical aggregation sustains at least the rate of every baseline"

SCALABILITY = Experiment(
    name="heroserve-scalability",
    title="Rate per GPU within the SLOs",
    source="HeroServe V, scalability",
    axes={"span": (0.0, 2.0, 4.0, 8.0), "wire": (2.0, 4.0)},
    policies=tuple(BASELINES),
    profiles=tuple(WORKLOADS),
    expectation=_GAIN,
    versus=(HERO, WITHOUT),
    certain=tuple(WORKLOADS),
)
PREDICTION = Experiment(
    name="heroserve-prediction",
    title="Requests within the SLOs around the predicted rate",
    source="none: the planner's formulas and the simulator",
    axes={"span": (4.0,), "load": (1.0, 1.15, 1.3)},
    policies=tuple(BASELINES),
    profiles=("opt-66b-chat", "opt-66b-summaries"),
    expectation="at the predicted rate 90 % of the requests meet both SLOs, above it fewer, for every policy alike",
    versus=(HERO, WITHOUT),
)
LATENCY = Experiment(
    name="heroserve-latency",
    title="TTFT and TPOT against the request rate",
    source="HeroServe V, latency",
    axes={"span": (2.0, 4.0, 8.0), "wire": (2.0, 4.0), "load": (0.25, 0.5, 0.75, 1.0)},
    policies=tuple(BASELINES),
    profiles=("opt-66b-chat", "llama-3.3-70b-summaries"),
    expectation="hierarchical aggregation has the lowest TTFT and TPOT at every rate",
    versus=(HERO, WITHOUT),
)
MEMORY = Experiment(
    name="heroserve-memory",
    title="KV memory at the sustained rate",
    source="HeroServe V, memory",
    axes={"span": (0.0, 2.0, 4.0, 8.0)},
    policies=tuple(BASELINES),
    profiles=("opt-175b-summaries", "opt-66b-chat"),
    expectation="a higher rate uses more of the KV memory, whose size does not depend on the scheme",
    versus=(HERO, WITHOUT),
)


@dataclass(frozen=True, slots=True)
class _Case:
    """A cell's placement, and the rate at which it is simulated."""

    problem: PlacementProblem
    placement: Placement
    rate_per_s: float


def run_scalability(cell: Cell) -> Record:
    """Plan a placement, and simulate it at the rate that it should sustain."""
    case = _planned(cell, int(cell.settings["wire"]))
    _, run, settings = _simulated(case, cell.seed)
    planned = {
        "rate_per_s": case.rate_per_s,
        "rate_per_gpu": case.placement.rate_per_gpu,
        "gpus": float(case.placement.gpus),
        "aggregated_share": _aggregated(case.placement),
        "decode_all_reduce_share": _all_reduce_share(case),
    }
    return _record(cell, case, run, settings, planned)


def run_prediction(cell: Cell) -> Record:
    """Simulate a placement at a multiple of the rate that it should sustain, with elements of half precision in
    packets."""
    case = _planned(cell, _HALF)
    offered = replace(case, rate_per_s=cell.settings["load"] * case.rate_per_s)
    _, run, settings = _simulated(offered, cell.seed)
    return _record(cell, offered, run, settings, {"rate_per_s": offered.rate_per_s, "predicted_per_s": case.rate_per_s})


def run_latency(cell: Cell) -> Record:
    """Simulate one prefill and one decode instance at a share of the rate that rings without aggregation sustain.

    HeroServe uses the scheme that is fastest for the batch at the simulated rate.
    """
    span, wire = int(cell.settings["span"]), int(cell.settings["wire"])
    reference = BASELINES[WITHOUT]
    rate_per_s = fixed_placement(problem_of(cell.profile, span, wire, reference), span, reference).rate_per_s
    baseline = BASELINES[cell.policy]
    problem = problem_of(cell.profile, span, wire, baseline)
    placed = fixed_placement(problem, span, baseline)
    rate_per_s *= cell.settings["load"]
    used = chosen_at(problem, placed, rate_per_s) if baseline.scheme is None else placed
    case = _Case(problem, used, rate_per_s)
    _, run, settings = _simulated(case, cell.seed)
    figures = {"rate_per_s": case.rate_per_s, "sustained_per_s": placed.rate_per_s}
    return _record(cell, case, run, settings, figures)


def run_memory(cell: Cell) -> Record:
    """Simulate a placement at the rate that it sustains, with elements of half precision in packets, and compute the
    use of its KV memory."""
    case = _planned(cell, _HALF)
    cluster, run, settings = _simulated(case, cell.seed)
    at_s, shares = kv_shares(cluster, run.outcomes, settings.warmup_s)
    decode = [instance for instance in cluster.instances if instance.role == "decode"]
    capacity_gb = sum(instance.kv_capacity_bytes for instance in decode) / 1e9
    gpus = sum(len(instance.gpus) for instance in case.placement.decode)
    figures = {
        "rate_per_gpu": case.placement.rate_per_gpu,
        "decode_gpus": float(gpus),
        "kv_gb_per_gpu": capacity_gb / gpus,
        "kv_mean_share": float(shares.mean()),
        "kv_peak_share": float(shares.max()),
        "kv_mean_gb_per_gpu": float(shares.mean()) * capacity_gb / gpus,
    }
    middle_s, mean = at_s.reshape(WINDOWS, -1).mean(axis=1), shares.mean(axis=0).reshape(WINDOWS, -1).mean(axis=1)
    series = {"kv_share": tuple(zip(middle_s.tolist(), mean.tolist(), strict=True))}
    return _record(cell, case, run, settings, figures, series)


def _planned(cell: Cell, wire: int) -> _Case:
    span, baseline = int(cell.settings["span"]), BASELINES[cell.policy]
    problem = problem_of(cell.profile, span, wire, baseline)
    placed = best_placement(problem, span, baseline)
    return _Case(problem, placed, placed.rate_per_s)


def _simulated(case: _Case, seed: int) -> tuple[Cluster, Run, SimSpec]:
    """Run Poisson arrivals; the decode instances keep no cache, because requests share no prefix."""
    problem, placed = case.problem, case.placement
    cluster = build(cluster_file(problem, named(problem, placed.prefill, placed.decode)))
    relaxation_s = _relaxation_s(case)
    count = round(min(max(REQUESTS_MIN, case.rate_per_s * RELAXATIONS * relaxation_s), REQUESTS_MAX))
    slo = Slo(ttft_s=problem.objective.ttft_s, tpot_s=problem.objective.tpot_s)
    warmup_s = min(WARMUP_RELAXATIONS * relaxation_s, 0.5 * count / case.rate_per_s)
    settings = SimSpec(slo=slo, warmup_s=warmup_s, decode_cache=False)
    trace = poisson_trace(problem, count, case.rate_per_s, seed)
    return cluster, simulate(cluster, trace, ControlSpec(decode="foresight"), settings, seed=seed), settings


def _relaxation_s(case: _Case) -> float:
    """Return the time in which the batch of a decode instance settles: that of a request in the batch, times step(Q) /
    step(0), because a larger batch keeps requests longer."""
    decode = case.placement.decode
    load = decode_load(case.problem, decode[0])
    batch = min(load.mean_batch(case.rate_per_s / len(decode)), load.kv_tokens / load.request_tokens, load.batch_max)
    return load.output_tokens * load.step_s(batch) ** 2 / load.base_s


def _record(
    cell: Cell,
    case: _Case,
    run: Run,
    settings: SimSpec,
    figures: dict[str, float],
    series: dict[str, tuple[tuple[float, float], ...]] | None = None,
) -> Record:
    summary, placed = run.summary, case.placement
    simulated = {
        "ttft_mean_s": summary.ttft_s.mean,
        "ttft_p99_s": summary.ttft_s.p99,
        "tpot_mean_ms": None if summary.tpot_s.mean is None else 1e3 * summary.tpot_s.mean,
        "attainment": summary.slo_attainment,
    }
    config: dict[str, Any] = {
        "lengths": case.problem.lengths.about,
        "output_tokens": case.problem.output_tokens,
        "ttft_s": case.problem.objective.ttft_s,
        "tpot_s": case.problem.objective.tpot_s,
        "warmup_s": settings.warmup_s,
        "prefill": _about(placed.prefill),
        "decode": _about(placed.decode),
    }
    measured = {name: float(value) for name, value in simulated.items() if value is not None}
    return Record(
        key=cell.key, cell=cell, config=config, summary=summary, figures=figures | measured, series=series or {}
    )


def _about(instances: tuple[PlacedInstance, ...]) -> str:
    """Return instances such as `2 x TP8 PP1 over 4 servers, hierarchical-ina`."""
    first = instances[0]
    schemes = ",".join(dict.fromkeys(scheme or "none" for instance in instances for scheme in instance.schemes))
    count, split = len(instances), first.split
    return f"{count} x TP{split.tp} PP{split.pp} over {first.servers} servers, {schemes}"


def _aggregated(placed: Placement) -> float:
    stages = [scheme for instance in (*placed.prefill, *placed.decode) for scheme in instance.schemes]
    return sum(scheme in INA_SCHEMES for scheme in stages) / len(stages)


def _all_reduce_share(case: _Case) -> float:
    """Return the share of a decode iteration that all-reduces take, at the rate of the placement."""
    instance, problem = case.placement.decode[0], case.problem
    batch = case.placement.evaluation.operation(case.rate_per_s).decode_batch
    latency_s, token_s = instance.roofline.communication_s(instance.communication)
    context = problem.lengths.mix.mean_tokens + problem.output_tokens / 2
    return (latency_s + token_s * batch / instance.split.pp) / instance.times().decode_s(batch, context)


def kv_shares(cluster: Cluster, outcomes: Outcomes, warmup_s: float) -> tuple[FloatArray, FloatArray]:
    """Return times [n] from the end of the warm-up to the last arrival, and the share of each decode instance's KV
    memory that is reserved then, [instance, n].

    Memory for prompt and output is reserved from the end of the prefill to the last token.
    """
    at_s = np.linspace(warmup_s, float(outcomes.arrived_s.max()), SAMPLES)
    decode = [number for number, instance in enumerate(cluster.instances) if instance.role == "decode"]
    shares = np.zeros((len(decode), SAMPLES))
    tokens = (outcomes.input_tokens + outcomes.output_tokens).astype(np.float64)
    begin_s = np.where(np.isfinite(outcomes.prefill_finished_s), outcomes.prefill_finished_s, np.inf)
    end_s = np.where(np.isfinite(outcomes.finished_s), outcomes.finished_s, np.inf)
    for row, number in enumerate(decode):
        own = outcomes.target == number
        capacity = cluster.instances[number].kv_capacity_bytes / _token_bytes(cluster, number)
        inside = (begin_s[own, None] <= at_s) & (at_s < end_s[own, None])
        shares[row] = tokens[own] @ inside / capacity
    return at_s, shares


def _token_bytes(cluster: Cluster, number: int) -> float:
    return model(cluster.instances[number].model).kv_bytes_per_token
