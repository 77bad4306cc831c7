"""The input file of `kvroute plan dualpath` as msgspec Structs: nodes, KV cache, turns and compute, as the user wrote
them."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, field

from kvroute.planner.throughput.schema import ModelKv, Tokens
from kvroute.topology.schema import Count, Entry, Name
from kvroute_engine.files.units import Bandwidth, Duration, Size

Tp: TypeAlias = Annotated[int, Meta(ge=1, le=1024)]


class GivenKv(Entry, frozen=True, kw_only=True, tag="given", tag_field="kind"):
    """KV sizes of a model that is not a preset."""

    token_bytes: Size = field(name="per_token")
    """KV of one token, all layers."""
    layers: Count
    replicated: bool = False
    """Whether every tensor-parallel rank holds all of it, as with MLA."""


class NodesEntry(Entry, frozen=True, kw_only=True):
    """Equal nodes of one side."""

    nodes: Count
    gpus: Annotated[int, Meta(ge=1, le=1024)] = 8
    """GPUs of one node; each has one compute NIC."""
    compute_nic_bytes_per_s: Bandwidth = field(name="compute_nic")
    storage_read_bytes_per_s: Bandwidth = field(name="storage_read")
    """Storage NICs of one node together."""
    storage_write_bytes_per_s: Bandwidth | None = field(name="storage_write", default=None)
    """None: as fast as reading."""
    dram_bytes_per_s: Bandwidth = field(name="dram")
    """Memory bandwidth of one node, reads and writes together."""
    tp: Tp = 1
    """Tensor-parallel ranks of an engine."""
    broadcast: bool = False
    """Whether replicated KV crosses the compute NICs once and is then copied over NVLink."""
    expert_bytes_per_s: Bandwidth | None = field(name="expert_traffic", default=None)
    """Expert-parallel traffic of each GPU on its compute NIC."""


class TurnEntry(Entry, frozen=True, kw_only=True):
    """The mean turn of an agent."""

    cached_tokens: Tokens
    """Prompt tokens whose KV is read from storage."""
    appended_tokens: Tokens
    """Prompt tokens that the prefill computes."""
    generated_tokens: Tokens
    counts: Literal["all", "cached"] = "all"
    """KV traffic that is counted: `all`, or `cached`, only what is read from storage (the publication's analysis)."""


class ComputeEntry(Entry, frozen=True, kw_only=True):
    """Prefill compute of one GPU."""

    token_gflop: Annotated[float, Meta(gt=0, le=1e6)] | None = field(name="gflop_per_token", default=None)
    """Operations for one appended token at the mean context, in GFLOP. None: computed from `model`."""
    model: str | None = None
    """A preset or a config.json whose operations are computed; None: the model of `kv`."""
    gpu_tflops: Annotated[float, Meta(gt=0, le=1e5)]
    """Peak of one GPU, in TFLOPS."""
    mfu: Annotated[float, Meta(gt=0, le=1)]
    """Share of the peak that a prefill reaches."""


class DualPathFile(Entry, frozen=True, kw_only=True):
    """The complete file of `kvroute plan dualpath`."""

    name: Name
    kv: ModelKv | GivenKv
    prefill: NodesEntry
    decode: NodesEntry
    turn: TurnEntry
    compute: ComputeEntry
    bounce: bool = True
    """Whether KV passes through the decode node's DRAM before it enters its GPUs."""
    block_tokens: Count = 64
    """Tokens of one block in storage. Each layer of a block is one copy."""
    post_s: Duration | None = field(name="post", default=None)
    """Time to submit one copy on a compute NIC; None: it does not limit the NIC."""
