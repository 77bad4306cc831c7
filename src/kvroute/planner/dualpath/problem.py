"""Reads the file of `kvroute plan dualpath` into the numbers that the formulas need."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvroute.llm import Model, model
from kvroute.planner.dualpath.schema import DualPathFile, GivenKv, NodesEntry
from kvroute.planner.dualpath.storage_paths import KvRatios, NodeBandwidth, ResourceLoad, loads
from kvroute.planner.throughput.cache_compute import mean_context
from kvroute.types import InputError
from kvroute_engine.files.document import read_mapping_file
from kvroute_engine.files.form import Lines
from kvroute_engine.files.units import about_bandwidth

_BEGINS = "begin with `name: my-plan`, `kv:`, `prefill:`, `decode:`, `turn:` and `compute:`"


@dataclass(frozen=True, slots=True)
class DualPathProblem:
    """Loads of the resources, nodes of both sides, and the mean turn."""

    name: str
    loads: tuple[ResourceLoad, ...]
    prefill_nodes: int
    decode_nodes: int
    turn_cached_bytes: float
    """KV that one turn reads."""
    turn_flop: float
    """Operations of the prefill of one turn."""
    node_flop_per_s: float
    """Operations per second that one prefill node reaches."""
    choices: tuple[str, ...]
    """What was assumed, as sentences."""


def read_dualpath(path: Path) -> DualPathProblem:
    """Read a file.

    Raises:
        InputError: the file cannot be read, or a value in it is wrong; gives file and line.
    """
    file, lines = read_mapping_file(path, DualPathFile, _BEGINS)
    kv, turn = _kv(file, lines), _turn(file)
    token_flop, about_compute = _token_flop(file, kv, lines)
    return DualPathProblem(
        name=file.name,
        loads=loads(_node(file, "prefill", kv, lines), _node(file, "decode", kv, lines), turn, bounce=file.bounce),
        prefill_nodes=file.prefill.nodes,
        decode_nodes=file.decode.nodes,
        turn_cached_bytes=file.turn.cached_tokens * kv.token_bytes,
        turn_flop=file.turn.appended_tokens * token_flop,
        node_flop_per_s=file.prefill.gpus * file.compute.gpu_tflops * 1e12 * file.compute.mfu,
        choices=(*_choices(file, kv, turn), about_compute),
    )


@dataclass(frozen=True, slots=True)
class _Kv:
    about: str
    token_bytes: float
    layers: int
    model: Model | None
    replicated: bool

    def copies(self, tp: int) -> float:
        """Return the copies of the KV cache on `tp` ranks together."""
        if self.model is not None:
            return self.model.kv_bytes_per_token_shard(tp) * tp / self.token_bytes
        return float(tp) if self.replicated else 1.0


def _kv(file: DualPathFile, lines: Lines) -> _Kv:
    if isinstance(file.kv, GivenKv):
        return _Kv("given sizes", float(file.kv.token_bytes), file.kv.layers, None, file.kv.replicated)
    found = _model(file.kv.model, lines, ("kv", "model"))
    if not found.kv_bytes_per_token or found.request_state_bytes or any(g.kind == "sliding" for g in found.layers):
        what = f"{found.name} has layers without KV for every token, which this analysis does not cover"
        raise lines.error(what, ("kv", "model"), "give a model with attention or MLA layers only")
    layers = sum(group.count for group in found.layers)
    return _Kv(f"the layers of {found.name}", found.kv_bytes_per_token, layers, found, False)


def _model(name: str, lines: Lines, where: tuple[str, ...]) -> Model:
    try:
        return model(name)
    except InputError as error:
        raise lines.error(error.what, where, error.hint) from error


def _token_flop(file: DualPathFile, kv: _Kv, lines: Lines) -> tuple[float, str]:
    """Return the operations for one appended token, and a sentence that says where they come from."""
    entry, turn = file.compute, file.turn
    if entry.token_gflop is not None:
        if entry.model is not None:
            raise lines.error(
                "both `gflop_per_token` and `model` are given", ("compute", "model"), "remove one of them"
            )
        return entry.token_gflop * 1e9, f"compute: {entry.token_gflop:,.4g} GFLOP per appended token, as given"
    if entry.model is None and kv.model is None:
        hint = "add `gflop_per_token`, or `model`, whose operations are then computed"
        raise lines.error("the operations per appended token are missing", ("compute",), hint)
    found = kv.model if entry.model is None else _model(entry.model, lines, ("compute", "model"))
    assert found is not None
    context = mean_context(turn.cached_tokens, turn.appended_tokens)
    try:
        flop = found.token_flop(context)
    except InputError as error:
        where = ("kv", "model") if entry.model is None else ("compute", "model")
        raise lines.error(error.what, where, "give `gflop_per_token` instead") from error
    about = f"of {found.name} at the mean context of {context:,.0f} tokens"
    return flop, f"compute: {flop / 1e9:,.4g} GFLOP per appended token {about}"


def _node(file: DualPathFile, side: Literal["prefill", "decode"], kv: _Kv, lines: Lines) -> NodeBandwidth:
    entry: NodesEntry = getattr(file, side)
    nic = float(entry.compute_nic_bytes_per_s)
    if file.post_s:
        nic = min(nic, file.block_tokens * kv.token_bytes / kv.layers / float(file.post_s))
    carries, nic = nic, nic - float(entry.expert_bytes_per_s or 0.0)
    if nic <= 0.0:
        what = f"expert-parallel traffic leaves nothing of a compute NIC that carries {about_bandwidth(carries)}"
        raise lines.error(what, (side, "expert_traffic"), "give less traffic, faster NICs or a shorter `post`")
    return NodeBandwidth(
        compute_nics=entry.gpus * nic,
        storage_read=float(entry.storage_read_bytes_per_s),
        storage_write=float(entry.storage_write_bytes_per_s or entry.storage_read_bytes_per_s),
        dram=float(entry.dram_bytes_per_s),
        replication=1.0 if entry.broadcast else kv.copies(entry.tp),
    )


def _turn(file: DualPathFile) -> KvRatios:
    turn = file.turn
    if turn.counts == "cached":
        return KvRatios(persisted=False)
    return KvRatios(turn.appended_tokens / turn.cached_tokens, turn.generated_tokens / turn.cached_tokens)


def _choices(file: DualPathFile, kv: _Kv, turn: KvRatios) -> tuple[str, ...]:
    counted = (
        "only KV that is read from storage counts, as in the publication (`counts: cached`)"
        if not turn.persisted
        else f"appended tokens add {turn.miss:.2%} and generated tokens {turn.generated:.2%} of the cached KV"
    )
    copies = [f"{side} {kv.copies(tp):.3g}" for side, tp in (("prefill", file.prefill.tp), ("decode", file.decode.tp))]
    return (
        f"KV sizes: {kv.about}, {kv.token_bytes:,.0f} bytes per token",
        counted,
        f"copies of the KV cache on the ranks of an engine: {', '.join(copies)}",
        "all nodes are loaded evenly, and the compute network between them is not congested",
    )
