"""A placement as a cluster file, and as launch commands of vLLM."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import msgspec

from kvroute.planner.placement.instances import PlacedInstance
from kvroute.planner.placement.problem import PlacementProblem
from kvroute.planner.placement.schema import Phase
from kvroute.topology import ClusterFile, InstanceEntry, TimingEntry
from kvroute.topology.gpu_paths import Gpu
from kvroute.topology.schema import AllReduceEntry, DecodeEntry, QuadraticPrefillEntry
from kvroute_engine.files.units import Size

_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


@dataclass(frozen=True, slots=True)
class Named:
    """An instance and its name in the cluster file."""

    name: str
    instance: PlacedInstance


def named(
    problem: PlacementProblem, prefill: Sequence[PlacedInstance], decode: Sequence[PlacedInstance]
) -> list[Named]:
    """Return the instances as `prefill-0` and so on; names that the cluster file uses are skipped."""
    taken = {instance.name for instance in problem.cluster.instances}
    return [*_named("prefill", prefill, taken), *_named("decode", decode, taken)]


def _named(phase: Phase, instances: Sequence[PlacedInstance], taken: set[str]) -> Iterator[Named]:
    number = 0
    for instance in instances:
        while f"{phase}-{number}" in taken:
            number += 1
        yield Named(f"{phase}-{number}", instance)
        number += 1


def gpu_name(problem: PlacementProblem, gpu: Gpu) -> str:
    """Return a GPU as `node/index`."""
    return f"{problem.cluster.places.nodes[gpu[0]].name}/{gpu[1]}"


def cluster_file(problem: PlacementProblem, instances: Sequence[Named]) -> ClusterFile:
    """Return the problem's cluster file, expanded, with the instances and their times.

    Times contain the all-reduces on an idle network; `all_reduce` of each instance describes them.
    """
    file = problem.cluster.file
    timings: dict[str, TimingEntry] = {}
    names: dict[TimingEntry, str] = {}
    entries = []
    for instance in instances:
        timing = _timing(instance.instance)
        if timing not in names:
            names[timing] = f"{instance.instance.phase}-{instance.instance.roofline.kind.name}-{len(names)}"
            timings[names[timing]] = timing
        entries.append(_entry(problem, instance, names[timing]))
    existing = file.instances if isinstance(file.instances, list) else []
    return msgspec.structs.replace(file, timing=file.timing | timings, instances=[*existing, *entries])


def _timing(instance: PlacedInstance) -> TimingEntry:
    times = instance.times()
    return TimingEntry(
        prefill=QuadraticPrefillEntry(**msgspec.structs.asdict(times.prefill)),
        decode=DecodeEntry(**msgspec.structs.asdict(times.decode)),
    )


def _entry(problem: PlacementProblem, named: Named, timing: str) -> InstanceEntry:
    instance = named.instance
    capacity = instance.roofline.kv_tokens() * problem.model.kv_bytes_per_token
    return InstanceEntry(
        name=named.name,
        role=instance.phase,
        gpus=",".join(_ranges(problem, instance.gpus)),
        model=problem.model_name,
        tp=instance.split.tp,
        pp=instance.split.pp,
        batch_max=problem.batch_max * instance.split.pp,
        kv_capacity_bytes=Size(capacity),
        timing=timing,
        all_reduce=_all_reduce(problem, instance),
    )


def _all_reduce(problem: PlacementProblem, instance: PlacedInstance) -> AllReduceEntry | None:
    schemes = [scheme for scheme in instance.schemes if scheme is not None]
    if not schemes:
        return None
    return AllReduceEntry(
        scheme=schemes[0] if len(set(schemes)) == 1 else schemes,
        per_iteration=instance.roofline.all_reduces,
        token_bytes=Size(instance.roofline.hidden_bytes),
        element_bytes=max(round(problem.element_bytes), 1),
    )


def _ranges(problem: PlacementProblem, gpus: Sequence[Gpu]) -> Iterator[str]:
    """Yield GPUs in their order as `node:first-last`."""
    runs = groupby(enumerate(gpus), key=lambda place: (place[1][0], place[1][1] - place[0]))
    for (node, _), run in runs:
        indices = [gpu for _, (_, gpu) in run]
        last = f"-{indices[-1]}" if len(indices) > 1 else ""
        yield f"{problem.cluster.places.nodes[node].name}:{indices[0]}{last}"


def launch_commands(problem: PlacementProblem, named: Named) -> list[str]:
    """Return the commands that start an instance with vLLM: one per server, the first one on the server of rank 0."""
    instance = named.instance
    nodes = list(dict.fromkeys(node for node, _ in instance.gpus))
    transfer = msgspec.json.encode({"kv_connector": "NixlConnector", "kv_role": _ROLES[instance.phase]}).decode()
    common = ["vllm", "serve", problem.model_name, "--tensor-parallel-size", str(instance.split.tp)]
    common += ["--pipeline-parallel-size", str(instance.split.pp), "--max-num-seqs", str(problem.batch_max)]
    common += ["--gpu-memory-utilization", f"{problem.memory_share:g}", "--kv-transfer-config", transfer]
    found = []
    for rank, node in enumerate(nodes):
        local = ",".join(str(gpu) for host, gpu in instance.gpus if host == node)
        words = [*common]
        if len(nodes) > 1:
            first = problem.cluster.places.nodes[nodes[0]].name
            words += ["--nnodes", str(len(nodes)), "--node-rank", str(rank), "--master-addr", first]
            words += ["--headless"] if rank else []
        found.append(f"CUDA_VISIBLE_DEVICES={local} {shlex.join(words)}  # on {_node(problem, node)}")
    return found


def _node(problem: PlacementProblem, node: int) -> str:
    return problem.cluster.places.nodes[node].name
