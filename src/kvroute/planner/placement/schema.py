"""The section `placement` of a cluster file as msgspec Structs: GPU kinds and traffic, as the user wrote them."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, field

from kvroute.planner.throughput.schema import LengthsEntry
from kvroute.topology.schema import Count, Entry
from kvroute_engine.files.units import Bandwidth, Duration, Size

Phase: TypeAlias = Literal["prefill", "decode"]
KindRole: TypeAlias = Literal["both", "prefill", "decode"]
Share: TypeAlias = Annotated[float, Meta(gt=0, le=1)]


class GpuKindEntry(Entry, frozen=True, kw_only=True):
    """GPUs of one kind: their nodes and what they compute."""

    nodes: str = "*"
    """Shell pattern of the names of the nodes, such as `a*`; a node belongs to the first kind that matches."""
    role: KindRole = "both"
    """Phases for which the GPUs may be used."""
    memory_bytes: Size = field(name="memory")
    """Memory of one GPU."""
    tflops: Annotated[float, Meta(gt=0, le=1e5)]
    """Peak of one GPU at the precision of the weights, in TFLOPS."""
    memory_bytes_per_s: Bandwidth = field(name="memory_bandwidth")
    """Memory bandwidth of one GPU."""
    mfu: Share = 0.6
    """Share of the peak that a prefill reaches without its all-reduces."""
    mbu: Share = 0.85
    """Share of the memory bandwidth that a decode iteration reaches."""
    overhead_s: Duration = field(name="overhead", default=Duration(0.01))
    """Time of one iteration that does not depend on the batch: scheduling and kernel launches."""


class PlacementTraffic(Entry, frozen=True, kw_only=True):
    """Lengths of the requests."""

    lengths: LengthsEntry
    """Prompt tokens that a prefill computes."""
    output_tokens: Annotated[int, Meta(ge=2, le=1_000_000)]
    step_tokens: Annotated[int, Meta(ge=1, le=10_000)] = 100
    """Step in tokens by which lengths are grouped."""


class PlacementEntry(Entry, frozen=True, kw_only=True):
    """GPUs and traffic, for `kvroute plan placement`."""

    gpus: dict[str, GpuKindEntry] = field(default_factory=dict)
    """GPU kinds by name."""
    traffic: PlacementTraffic | None = None
    attainment: Annotated[float, Meta(gt=0, lt=1)] = 0.9
    """Share of the requests that meet both SLOs."""
    memory_share: Share = 0.9
    """Share of GPU memory for weights and KV cache."""
    weights_bytes: Size | None = field(name="weights", default=None)
    """All weights; None: computed from a dense model's dimensions."""
    element_bytes: Annotated[float, Meta(gt=0, le=8)] = 2.0
    """Bytes of one number of weights and activations."""
    tp_max: Annotated[int, Meta(ge=1, le=64)] = 16
    pp_max: Annotated[int, Meta(ge=1, le=16)] = 8
    batch_max: Count = 256
    """Maximum number of requests in a decode batch of one pipeline stage."""
