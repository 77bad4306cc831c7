"""The plan of a placement: groups, schemes, the rate, what limits it, alternatives, and a simulation of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from kvroute.control import ControlSpec
from kvroute.planner.placement.grouping import Method, published_grouping
from kvroute.planner.placement.instances import PlacedInstance
from kvroute.planner.placement.output import Named, gpu_name, launch_commands, named
from kvroute.planner.placement.problem import PlacementProblem
from kvroute.planner.placement.published_choices import LiteralPlan, from_studies
from kvroute.planner.placement.schema import Phase
from kvroute.planner.placement.search import PHASES, Found, Placement, Search, search
from kvroute.planner.placement.simulation import PAIRS, Simulated, simulated

_ALTERNATIVES = 8


class PhasePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Instances of one phase."""

    tp: int
    pp: int
    gpu_kinds: dict[str, int]
    """Number of instances on each kind of GPU."""
    groups: list[list[str]]
    """[instance][GPU]: `node/index`, stage by stage."""
    schemes: list[str]
    """[instance]: all-reduce scheme, or `none` with TP 1; several of them, joined by commas, if stages differ."""
    servers_spanned: list[int]
    """[instance]."""
    all_reduce_share: float
    """Share of the time of an iteration of the first instance that its all-reduces take."""
    iteration_s: float
    """Time of a prefill of mean length, or of a decode iteration of the mean batch, of the first instance."""


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """Another placement that was evaluated."""

    prefill: str
    """Such as `2 x TP4 PP2 on a100`."""
    decode: str
    rate_per_s: float
    rate_per_gpu: float
    gpus: int
    binding: str


class PlacementPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All results of a plan, as `--json` prints them."""

    name: str
    model: str
    plan_s: float
    """Wall time of the search."""
    phases: dict[Phase, PhasePlan]
    rate_per_s: float
    """Requests per second at which the required share of requests meets both SLOs."""
    rate_per_gpu: float
    gpus: int
    """GPUs of all instances."""
    unused_gpus: int
    binding: str
    """Constraint that would allow the lowest rate alone."""
    bounds_per_s: dict[str, float | None]
    """Rate that each constraint would allow alone; None: it never limits."""
    slo_attainment: float
    """Share of the requests that meet both SLOs at `rate_per_s`."""
    prefill_utilisation: float
    decode_batch: float
    """Mean requests in the batch of a decode instance."""
    transfer_s: float
    """Mean time of a KV transfer."""
    candidates: int
    alternatives: tuple[Alternative, ...]
    launch: dict[str, list[str]]
    """Commands of vLLM for the first instance of each phase."""
    simulated: Simulated | None
    literal: LiteralPlan | None
    """What the published equations choose and predict; None if not requested."""
    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan with the objects behind it."""

    problem: PlacementProblem
    placement: Placement
    instances: tuple[Named, ...]
    report: PlacementPlan


def plan_placement(
    problem: PlacementProblem,
    method: Method = "milp",
    *,
    literal: bool = False,
    simulates: bool = True,
    spec: ControlSpec = PAIRS,
) -> Planned:
    """Search a placement and simulate it.

    Args:
        problem: the problem.
        method: how GPUs are grouped.
        literal: also evaluate the published equations.
        simulates: simulate the placement at the predicted rate.
        spec: configuration of the core in this simulation.

    Raises:
        InputError: no placement meets the SLOs, or kvroute-studies is needed and not installed.
    """
    equations: Callable[[Search, float], LiteralPlan | None] | None = None
    if literal:
        equations = from_studies("equations", "--equations")
    if method == "paper":
        published_grouping()  # before the search, which takes a while
    began_s = time.perf_counter()
    found = search(problem, method)
    published = equations(found.search, found.best.rate_per_s) if equations is not None else None
    plan_s = time.perf_counter() - began_s
    best = found.best
    instances = named(problem, best.prefill, best.decode)
    operation, bounds = best.evaluation.operation(best.rate_per_s), best.evaluation.bounds_per_s()
    report = PlacementPlan(
        name=problem.cluster.name,
        model=problem.model.name,
        plan_s=plan_s,
        phases={phase: _phase(problem, getattr(best, phase), operation.decode_batch) for phase in PHASES},
        rate_per_s=best.rate_per_s,
        rate_per_gpu=best.rate_per_gpu,
        gpus=best.gpus,
        unused_gpus=sum(len(kind.gpus) for kind in problem.kinds) - best.gpus,
        binding=next(iter(bounds)),
        bounds_per_s={name: rate if rate != float("inf") else None for name, rate in bounds.items()},
        slo_attainment=operation.attainment,
        prefill_utilisation=operation.prefill_utilisation,
        decode_batch=operation.decode_batch,
        transfer_s=operation.transfer_s,
        candidates=found.candidates,
        alternatives=_alternatives(found),
        launch={phase: _launch(problem, instances, phase) for phase in PHASES},
        simulated=simulated(problem, best, best.rate_per_s, spec) if simulates else None,
        literal=published,
        choices=problem.choices,
    )
    return Planned(problem, best, tuple(instances), report)


def _launch(problem: PlacementProblem, instances: Sequence[Named], phase: Phase) -> list[str]:
    return launch_commands(problem, next(instance for instance in instances if instance.instance.phase == phase))


def _phase(problem: PlacementProblem, instances: Sequence[PlacedInstance], batch: float) -> PhasePlan:
    first = instances[0]
    kinds: dict[str, int] = {}
    for instance in instances:
        kinds[instance.roofline.kind.name] = kinds.get(instance.roofline.kind.name, 0) + 1
    mean = problem.lengths.mix.mean_tokens
    if first.phase == "prefill":
        tokens, iteration_s = mean, first.times().prefill_at(mean)
    else:
        tokens = batch / first.split.pp
        iteration_s = first.times().decode_s(batch, mean + problem.output_tokens / 2)
    latency_s, token_s = first.roofline.communication_s(first.communication)
    return PhasePlan(
        tp=first.split.tp,
        pp=first.split.pp,
        gpu_kinds=kinds,
        groups=[[gpu_name(problem, gpu) for gpu in instance.gpus] for instance in instances],
        schemes=[",".join(dict.fromkeys(scheme or "none" for scheme in instance.schemes)) for instance in instances],
        servers_spanned=[instance.servers for instance in instances],
        all_reduce_share=(latency_s + token_s * tokens) / iteration_s,
        iteration_s=iteration_s,
    )


def _alternatives(found: Found) -> tuple[Alternative, ...]:
    rows: dict[tuple[str, str], Alternative] = {}
    for placed in found.evaluated:
        row = Alternative(
            prefill=_about(placed.prefill),
            decode=_about(placed.decode),
            rate_per_s=placed.rate_per_s,
            rate_per_gpu=placed.rate_per_gpu,
            gpus=placed.gpus,
            binding=next(iter(placed.evaluation.bounds_per_s())),
        )
        rows.setdefault((row.prefill, row.decode), row)
    return tuple(rows.values())[:_ALTERNATIVES]


def _about(instances: Sequence[PlacedInstance]) -> str:
    counts: dict[str, int] = {}
    for instance in instances:
        key = f"TP{instance.split.tp} PP{instance.split.pp} on {instance.roofline.kind.name}"
        counts[key] = counts.get(key, 0) + 1
    return ", ".join(f"{count:,} x {key}" for key, count in counts.items())
