"""Reads a cluster file, its section `placement` and a model into the inputs of the search."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from kvroute.collectives import Aggregation
from kvroute.llm import Model, ModelShape, model
from kvroute.planner.placement.schema import GpuKindEntry, KindRole, PlacementEntry, PlacementTraffic
from kvroute.planner.throughput.lengths import Lengths
from kvroute.planner.throughput.traffic_lengths import traffic_lengths
from kvroute.topology import Cluster, load_network
from kvroute.topology.gpu_paths import Gpu
from kvroute.topology.reading.assembly import read_text
from kvroute.types import InputError
from kvroute_engine.agent.schemes import SCHEMES, Scheme
from kvroute_engine.files.document import read_section
from kvroute_engine.files.form import Lines

SECTION = "placement"


@dataclass(frozen=True, slots=True)
class GpuKind:
    """GPUs of one kind that are free, with the rates that they reach."""

    name: str
    role: KindRole
    gpus: tuple[Gpu, ...]
    """Free GPUs, ascending by node and index."""
    memory_bytes: float
    """Memory of one GPU for weights and KV cache."""
    flop_per_s: float
    """Operations per second that one GPU reaches in a prefill."""
    memory_bytes_per_s: float
    """Memory bandwidth that one GPU reaches in a decode iteration."""
    overhead_s: float


@dataclass(frozen=True, slots=True)
class Objective:
    """Service level objectives, and the share of requests that must meet both."""

    ttft_s: float
    tpot_s: float
    attainment: float = 0.9


@dataclass(frozen=True, slots=True)
class PlacementProblem:
    """The inputs of a search: network, free GPUs, model, traffic and objectives."""

    path: Path
    cluster: Cluster
    kinds: tuple[GpuKind, ...]
    model: Model
    model_name: str
    """As the user gave it: a preset, a Hugging Face name or a config.json."""
    shape: ModelShape
    weights_bytes: float
    element_bytes: float
    lengths: Lengths
    output_tokens: int
    objective: Objective
    aggregation: Aggregation | None
    schemes: tuple[Scheme, ...]
    """All-reduce schemes that groups may use; `ring` is one of them."""
    tp_max: int
    pp_max: int
    batch_max: int
    memory_share: float
    choices: tuple[str, ...]
    """What was assumed, as sentences."""


def read_placement(path: Path, model_name: str, objective: Objective) -> PlacementProblem:
    """Read a cluster file; GPUs of its instances are in use and not free.

    Raises:
        InputErrors: the file is wrong; every fault with its line.
        InputError: the file cannot be read, the model is not known, or its dimensions are not sufficient.
    """
    text = read_text(path)
    cluster = load_network(path)
    entry, lines = read_section(text, str(path), SECTION, PlacementEntry)
    if not entry.gpus:
        hint = "add `placement: {gpus: {a100: {memory: 80 GB, tflops: 312, memory_bandwidth: 2039 GB/s}}}`"
        raise InputError("the GPUs are not described", where=f"{path}: placement.gpus", hint=hint)
    if entry.traffic is None:
        hint = "add `traffic: {lengths: {kind: constant, tokens: 500}, output_tokens: 200}`"
        raise lines.error("the lengths of the requests are missing", (SECTION,), hint)
    found = model(model_name)
    shape = _shape(found, entry)
    lengths, remarks = _lengths(entry.traffic, path.parent, lines)
    kinds = _kinds(cluster, entry, lines)
    return PlacementProblem(
        path=path,
        cluster=cluster,
        kinds=kinds,
        model=found,
        model_name=model_name,
        shape=shape,
        weights_bytes=_weights_bytes(shape, entry, found.name),
        element_bytes=entry.element_bytes,
        lengths=lengths,
        output_tokens=entry.traffic.output_tokens,
        objective=Objective(objective.ttft_s, objective.tpot_s, entry.attainment),
        aggregation=Aggregation.of(cluster.file.collectives.aggregation),
        schemes=_schemes(cluster),
        tp_max=entry.tp_max,
        pp_max=entry.pp_max,
        batch_max=entry.batch_max,
        memory_share=entry.memory_share,
        choices=(*remarks, *_choices(cluster, entry, lengths, kinds)),
    )


def _schemes(cluster: Cluster) -> tuple[Scheme, ...]:
    allowed = cluster.file.collectives.schemes
    return SCHEMES if allowed is None else tuple(scheme for scheme in SCHEMES if scheme == "ring" or scheme in allowed)


def _lengths(traffic: PlacementTraffic, folder: Path, lines: Lines) -> tuple[Lengths, tuple[str, ...]]:
    try:
        return traffic_lengths(traffic.lengths, traffic.step_tokens, folder)
    except InputError as error:
        raise lines.error(error.what, (SECTION, "traffic", "lengths"), error.hint) from error


def _shape(found: Model, entry: PlacementEntry) -> ModelShape:
    if found.shape is None or found.compute is None:
        what = f"the hidden size or the operations of {found.name} are not known"
        raise InputError(what, where="--model", hint="give a config.json of a model without linear attention")
    return found.shape


def _weights_bytes(shape: ModelShape, entry: PlacementEntry, name: str) -> float:
    if entry.weights_bytes is not None:
        return float(entry.weights_bytes)
    if shape.parameters is None:
        what = f"the size of the weights of {name} cannot be computed"
        raise InputError(what, where="placement.weights", hint="add it, such as `weights: 640 GB`")
    return shape.parameters * entry.element_bytes


def _kinds(cluster: Cluster, entry: PlacementEntry, lines: Lines) -> tuple[GpuKind, ...]:
    """Return the kinds with their free GPUs; every node belongs to the first kind whose pattern matches."""
    busy = {gpu for shards in cluster.shards for gpu in shards}
    free: dict[str, list[Gpu]] = {name: [] for name in entry.gpus}
    matched: set[str] = set()
    for position, node in enumerate(cluster.places.nodes):
        name = next((name for name, kind in entry.gpus.items() if fnmatchcase(node.name, kind.nodes)), None)
        if name is not None:
            matched.add(name)
            free[name] += [(position, gpu) for gpu in range(node.gpus) if (position, gpu) not in busy]
    for name, kind in entry.gpus.items():
        if name not in matched:
            hint = f"the file's nodes are called {cluster.places.nodes[0].name} and so on"
            raise lines.error(f"no node is left for the pattern {kind.nodes!r}", (SECTION, "gpus", name, "nodes"), hint)
    return tuple(_kind(name, kind, free[name], entry.memory_share) for name, kind in entry.gpus.items() if free[name])


def _kind(name: str, entry: GpuKindEntry, gpus: list[Gpu], memory_share: float) -> GpuKind:
    return GpuKind(
        name=name,
        role=entry.role,
        gpus=tuple(gpus),
        memory_bytes=float(entry.memory_bytes) * memory_share,
        flop_per_s=entry.tflops * 1e12 * entry.mfu,
        memory_bytes_per_s=float(entry.memory_bytes_per_s) * entry.mbu,
        overhead_s=float(entry.overhead_s),
    )


def _choices(cluster: Cluster, entry: PlacementEntry, lengths: Lengths, kinds: tuple[GpuKind, ...]) -> tuple[str, ...]:
    counted = ", ".join(f"{len(kind.gpus):,} {kind.name}" for kind in kinds) or "none"
    busy = sum(len(shards) for shards in cluster.shards)
    used = f"; {busy:,} more are used by the file's instances" if busy else ""
    return (
        f"free GPUs: {counted}{used}",
        f"prompt lengths: {lengths.about}; mean {lengths.mix.mean_tokens:,.0f} tokens",
        "computing times: roofline of each GPU kind (`mfu`, `mbu`, `overhead`), without all-reduces, which are priced "
        "on the network",
        "an instance consists of GPUs of one kind; requests are independent (Poisson) and spread evenly",
        "the first token comes from the decode instance, so TTFT contains the KV transfer",
    )
