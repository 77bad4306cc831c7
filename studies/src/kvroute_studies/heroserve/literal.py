"""What the published equations choose, beside what the corrected ones say of that choice."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from kvroute.planner.placement.compute import Parallelism
from kvroute.planner.placement.instances import DESIGN_BATCH
from kvroute.planner.placement.problem import GpuKind, PlacementProblem
from kvroute.planner.placement.published_choices import LiteralPlan
from kvroute.planner.placement.schema import Phase
from kvroute.planner.placement.search import PHASES, Search, possible_splits
from kvroute.topology.gpu_paths import Gpu, GpuPaths
from kvroute.topology.place import Shards
from kvroute.types import InputError
from kvroute_studies.heroserve import published


@dataclass(frozen=True, slots=True)
class _Choice:
    kind: GpuKind
    split: Parallelism
    stages: tuple[Shards, ...]


def literal_plan(search: Search, rate_per_s: float) -> LiteralPlan | None:
    """Return the choice with the highest H among one prefill and one decode instance, the groups as kvroute forms them;
    None if no choice meets the SLOs by the published equations.

    K_in is the mean prompt in the prefill, and that of `DESIGN_BATCH` requests in the decode phase.
    """
    problem = search.problem
    sides = {phase: list(_choices(search, phase)) for phase in PHASES}
    best: tuple[float, _Choice, _Choice, tuple[float, float, float]] | None = None
    for prefill, decode in product(sides["prefill"], sides["decode"]):
        if prefill.kind == decode.kind and prefill.split.gpus + decode.split.gpus > len(prefill.kind.gpus):
            continue
        ttft_s, transfer_s, tpot_s = _latencies_s(problem, prefill, decode)
        if ttft_s > problem.objective.ttft_s or tpot_s > problem.objective.tpot_s:
            continue
        serve_s = ttft_s + tpot_s  # eq. 2: one step of the prefill and one of the decode phase
        found = published.scalability_per_s(serve_s + published.queueing_s(rate_per_s, serve_s))
        if best is None or found > best[0]:
            best = found, prefill, decode, (ttft_s, tpot_s, transfer_s)
    if best is None:
        return None
    found, prefill, decode, (ttft_s, tpot_s, transfer_s) = best
    placed = search.of(prefill.split, decode.split)
    return LiteralPlan(
        prefill=_about(prefill),
        decode=_about(decode),
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        transfer_s=transfer_s,
        scalability_per_s=found,
        corrected_rate_per_s=placed.rate_per_s if placed else 0.0,
    )


def _about(choice: _Choice) -> str:
    return f"TP{choice.split.tp} PP{choice.split.pp} on {choice.kind.name}"


def _choices(search: Search, phase: Phase) -> list[_Choice]:
    """Return the parallelisms whose weights fit (algorithm 1, lines 5 to 8), each with the first groups of its size."""
    problem, found = search.problem, []
    for kind in problem.kinds:
        for split in possible_splits(problem, kind) if kind.role in ("both", phase) else ():
            # The share of memory is part of `kind.memory_bytes`.
            if published.least_memory_bytes(problem.weights_bytes, split.tp, split.pp, 1.0) <= kind.memory_bytes:
                stages = tuple(search.groups(phase, kind, split.tp)[: split.pp])
                if len(stages) == split.pp:
                    found.append(_Choice(kind, split, stages))
    return found


def _latencies_s(problem: PlacementProblem, prefill: _Choice, decode: _Choice) -> tuple[float, float, float]:
    """Return T_pre, T_f and T_dec."""
    hidden, mean = problem.shape.hidden, problem.lengths.mix.mean_tokens
    width, mix = 4 * hidden, problem.lengths.mix
    prefill_s = published.prefill_compute_s(
        _prefill_fit(problem, prefill.kind), prefill.split.tp, hidden, width, mean, float(mix.tokens**2 @ mix.share)
    )
    ttft_s = published.prefill_latency_s(_network_s(problem, prefill, mean, decode=False), prefill_s)
    elements = published.kv_elements(mean, hidden, problem.shape.heads, prefill.split.tp)
    target = decode.stages[0][0]
    transfer_s = max(published.transfer_s([elements], [_hops(problem, source, target)]) for source in prefill.stages[0])
    batch_tokens = mean * DESIGN_BATCH
    decode_s = published.decode_compute_s(
        _decode_fit(problem, decode.kind), decode.split.tp, decode.split.pp, hidden, width, batch_tokens
    )
    tpot_s = published.decode_latency_s(_network_s(problem, decode, batch_tokens, decode=True), decode_s, transfer_s)
    return ttft_s, transfer_s, tpot_s


def _prefill_fit(problem: PlacementProblem, kind: GpuKind) -> tuple[float, float, float]:
    """Return C1 to C3 of the model's roofline: all layers, as a fit of whole prefills has them."""
    layers = problem.model.layer_count
    return 2.0 * layers / kind.flop_per_s, 16 * 4.0 / 3.0 * layers / kind.flop_per_s, kind.overhead_s


def _decode_fit(problem: PlacementProblem, kind: GpuKind) -> tuple[float, float, float]:
    """Return C4 to C6: the weights, and the KV of the context, over the memory bandwidth."""
    per_element_s = problem.model.layer_count * problem.element_bytes / kind.memory_bytes_per_s
    return per_element_s, per_element_s * 2.0 / 3.0, kind.overhead_s


def _network_s(problem: PlacementProblem, choice: _Choice, tokens: float, *, decode: bool) -> float:
    hidden = problem.shape.hidden
    elements = published.pipeline_elements(tokens, hidden, decode=decode)
    sends = [
        published.hops_s(elements, _hops(problem, here[0], there[0]))
        for here, there in zip(choice.stages[:-1], choice.stages[1:], strict=True)
    ]
    group = choice.stages[0]
    if len(group) == 1:
        return published.network_s(sends, 0.0)
    synchronised = published.decode_elements(tokens, hidden)
    paths = [_hops(problem, group[0], other) for other in group[1:]]
    least = min(bits for path in paths for bits in path)
    step_s = published.ring_s(synchronised, len(group), least)
    if problem.aggregation is not None and len({node for node, _ in group}) > 1:
        to_switch = [path[:1] for path in paths]
        step_s = min(step_s, published.aggregation_s(synchronised, to_switch))
    return published.network_s(sends, step_s)


def _hops(problem: PlacementProblem, source: Gpu, target: Gpu) -> list[float]:
    """Return the bandwidths on the path between two GPUs, in bits per second; NVLink is one hop."""
    if source == target:
        return []
    try:
        links = GpuPaths(problem.cluster, (source, target)).between(source, target)
    except InputError:
        return []
    rates = [float(problem.cluster.capacity_bytes_per_s[link]) * 8.0 for link in links]
    return rates[:1] if source[0] == target[0] else rates
