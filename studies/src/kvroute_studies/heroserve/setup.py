"""Clusters, workloads and baselines of HeroServe's evaluation, as placement problems."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

from kvroute.planner.comparison.cells import Cell
from kvroute.planner.placement.all_reduce_times import AllReduceTimes
from kvroute.planner.placement.compute import Parallelism
from kvroute.planner.placement.instances import Builder
from kvroute.planner.placement.problem import GpuKind, Objective, PlacementProblem, read_placement
from kvroute.planner.placement.schema import Phase
from kvroute.planner.placement.search import Placement, Search
from kvroute.sim.metrics import RequestCounts, Spread, Summary, TtftParts
from kvroute.topology.place import Shards
from kvroute.topology.schema import WireType
from kvroute.types import InputError
from kvroute_studies.shared.heroserve_baselines import Baseline

GROUPS = 4
"""Groups of GPUs in a unit whose groups span a given number of servers."""
SLOTS, PACKET_BYTES = 512, 1024
WIRES: dict[int, WireType] = {2: "fp16", 4: "int32"}
"""Type of the elements in packets by their bytes."""


@dataclass(frozen=True, slots=True)
class EvaluatedHardware:
    """A model and the servers on which it is evaluated."""

    model: str
    tp: int
    """GPUs of a group in units whose groups span a given number of servers."""
    kind: str
    """GPU kind, as in the section `placement` of a cluster file."""
    nvlink: str
    nic: str
    servers: tuple[tuple[str, int, int, str], ...]
    """Servers on which the planner chooses everything: prefix of the name, number, GPUs of each, NVLink."""
    kinds: str = ""
    """GPU kinds of these servers, if there are several."""


@dataclass(frozen=True, slots=True)
class EvaluatedWorkload:
    """Lengths of the requests and their objectives."""

    lengths: str
    output_tokens: int
    objective: Objective


_A100 = "a100: {memory: 40 GB, tflops: 312, memory_bandwidth: 1555 GB/s}"
_H100 = "h100: {memory: 80 GB, tflops: 989, memory_bandwidth: 3350 GB/s}"
_TESTBED = """a100: {nodes: "a*", memory: 40 GB, tflops: 312, memory_bandwidth: 1555 GB/s}
    v100: {nodes: "v*", memory: 32 GB, tflops: 112, memory_bandwidth: 900 GB/s}"""
HARDWARE = {
    "opt-66b": EvaluatedHardware(
        "opt-66b", 8, _A100, "300 GB/s", "100 Gbps", (("a", 2, 4, "300 GB/s"), ("v", 2, 4, "150 GB/s")), _TESTBED
    ),
    "opt-175b": EvaluatedHardware("opt-175b", 16, _A100, "300 GB/s", "100 Gbps", (("a", 6, 8, "300 GB/s"),)),
    "llama-3.3-70b": EvaluatedHardware("llama-3.3-70b", 8, _H100, "450 GB/s", "400 Gbps", (("h", 4, 8, "450 GB/s"),)),
}
_CHAT = "{kind: log-normal, mu: 5.0, sigma: 1.1, least: 4, most: 2048}"
_SUMMARIES = "{kind: log-normal, mu: 8.0, sigma: 0.7, least: 256, most: 16384}"
"""Median prompt of 2,980 tokens; kvroute's assumption for LongBench. OPT itself was trained for 2,048."""
WORKLOADS = {
    "opt-66b-chat": EvaluatedWorkload(_CHAT, 200, Objective(2.5, 0.15)),
    "opt-66b-summaries": EvaluatedWorkload(_SUMMARIES, 100, Objective(15.0, 0.15)),
    "opt-175b-chat": EvaluatedWorkload(_CHAT, 200, Objective(4.0, 0.2)),
    "opt-175b-summaries": EvaluatedWorkload(_SUMMARIES, 100, Objective(25.0, 0.2)),
    "llama-3.3-70b-chat": EvaluatedWorkload(_CHAT, 200, Objective(1.0, 0.05)),
    "llama-3.3-70b-summaries": EvaluatedWorkload(_SUMMARIES, 100, Objective(5.0, 0.05)),
}
"""By profile: a model of `HARDWARE` and the kind of requests; objectives of OPT as published (V-A)."""


def unit_text(hardware: EvaluatedHardware, span: int, fallback_share: float = 0.0, wire: WireType = "int32") -> str:
    """Return the cluster file of the servers below one access switch that aggregates, without a workload.

    Args:
        hardware: model and servers.
        span: servers of a group, each with 1 / `span` of its GPUs; 0: the servers on which the planner chooses.
        fallback_share: share of the packets without a slot.
        wire: type of the elements in packets.
    """
    rows = hardware.servers if not span else (("s", GROUPS * span, hardware.tp // span, hardware.nvlink),)
    nodes = "\n".join(
        f"  - {{name: {prefix}{number}, rack: access, gpus: {gpus}, nvlink: {nvlink}, "
        f"nics: {{compute: {{count: {gpus}, capacity: {hardware.nic}}}}}}}"
        for prefix, count, gpus, nvlink in rows
        for number in range(count)
    )
    aggregation = (
        f"levels: [rack], slots: {SLOTS}, packet: {PACKET_BYTES} B, wire: {wire}, time: 1 us, "
        f"fallback: {fallback_share:g}"
    )
    return f"""name: {hardware.model}
racks: [{{name: access}}]
nodes:
{nodes}
network: {{latency: {{node: 1 us, rack: 3 us}}}}
collectives: {{aggregation: {{{aggregation}}}}}
"""


@lru_cache(maxsize=64)
def problem_of(profile: str, span: int, wire_bytes: int, baseline: Baseline) -> PlacementProblem:
    """Return the problem of a profile; groups may use the baseline's schemes."""
    model, workload = profile.rpartition("-")[0], WORKLOADS[profile]
    hardware = HARDWARE[model]
    kinds = hardware.kinds if hardware.kinds and not span else hardware.kind
    text = f"""{unit_text(hardware, span, baseline.fallback_share, WIRES[wire_bytes])}
placement:
  gpus:
    {kinds}
  traffic: {{lengths: {workload.lengths}, output_tokens: {workload.output_tokens}}}
"""
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"{profile}.yaml"
        path.write_text(text)
        problem = read_placement(path, model, workload.objective)
    return replace(problem, path=Path(profile), schemes=baseline.schemes)


def best_placement(problem: PlacementProblem, span: int, baseline: Baseline) -> Placement:
    """Return the placement with the highest rate: of groups over `span` servers, or of any groups with a span of 0.

    A baseline that `stays` uses groups inside a server, unless the model fits into none.
    """
    if span:
        return _best_of_groups(problem, span)
    if baseline.stays:
        largest = max(node.gpus for node in problem.cluster.places.nodes)
        try:
            return Search(replace(problem, tp_max=min(problem.tp_max, largest)), "milp").run().best
        except InputError:
            pass  # the model fits into no server
    return Search(problem, "milp").run().best


def _best_of_groups(problem: PlacementProblem, span: int) -> Placement:
    """Return the best division of a unit's groups into prefill and decode instances."""
    searched, groups = Search(problem, "milp"), _groups(problem, span)
    found = []
    for count in range(1, len(groups)):
        sides = [searched.builder.chained(*side) for side in _sides(problem, groups[:count], groups[count:])]
        placed = searched.placement(*sides)
        if placed is not None:
            found.append(searched.refined(placed))
    return max(found, key=lambda placement: placement.rate_per_s)


def fixed_placement(problem: PlacementProblem, span: int, baseline: Baseline) -> Placement:
    """Return one prefill and one decode instance on the first groups of a unit, with the baseline's scheme."""
    schemes = problem.schemes if baseline.scheme is None else (baseline.scheme,)
    times = AllReduceTimes(problem.cluster, problem.aggregation, problem.element_bytes, schemes)
    searched, groups, builder = Search(problem, "milp"), _groups(problem, span), Builder(problem, times)
    placed = searched.placement(*(builder.chained(*side) for side in _sides(problem, groups[:1], groups[1:2])))
    assert placed is not None, "the profiles are chosen so that groups meet the objectives"
    return placed if baseline.scheme is not None else searched.refined(placed)


def chosen_at(problem: PlacementProblem, placed: Placement, rate_per_s: float) -> Placement:
    """Return a placement with the decode schemes that are fastest for its batch at a rate: a choice by size."""
    return Search(problem, "milp").rechosen(placed, rate_per_s) or placed


_Side: TypeAlias = tuple[Phase, GpuKind, Parallelism, list[Shards]]


def _sides(problem: PlacementProblem, prefill: list[Shards], decode: list[Shards]) -> tuple[_Side, _Side]:
    kind = problem.kinds[0]
    split = Parallelism(len(prefill[0]), 1)
    return ("prefill", kind, split, prefill), ("decode", kind, split, decode)


def _groups(problem: PlacementProblem, span: int) -> list[Shards]:
    gpus = problem.kinds[0].gpus
    size = HARDWARE[problem.model_name].tp
    assert len({node for node, _ in gpus[:size]}) == span, "the GPUs of a group are on consecutive servers"
    return [gpus[first : first + size] for first in range(0, len(gpus), size)]


def no_requests(cell: Cell) -> Summary:
    """Return the general numbers of a cell without requests: all are empty."""
    return Summary(
        policy=cell.policy,
        seed=cell.seed,
        requests=RequestCounts(arrived=0, finished=0, rejected=0, in_flight=0),
        measured=0,
        ttft_s=Spread(),
        ttft_parts_s=TtftParts(),
        transfer_s=Spread(),
        tbt_s=Spread(),
        tpot_s=Spread(),
        slo_attainment=None,
        goodput_per_s=None,
        throughput_per_s=None,
        tier_share={},
        cache_hit=None,
        prefill_cache_hit=None,
        kv_bytes=0.0,
        link_load={},
        wall_s=0.0,
        cpu_s=0.0,
    )
