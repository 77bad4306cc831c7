"""The input file of a plan as msgspec Structs: traffic, hardware and clusters as the user wrote them."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, field

from kvroute.policies.fleet.throughput import Reading
from kvroute.topology.schema import (
    Count,
    Entry,
    LinearPrefillEntry,
    Name,
    PiecewisePrefillEntry,
    QuadraticPrefillEntry,
)
from kvroute_engine.files.units import Bandwidth, Duration, Size

Tokens: TypeAlias = Annotated[int, Meta(ge=1, le=100_000_000)]
Form: TypeAlias = Literal["linear", "quadratic", "piecewise"]


class LogNormalLengths(Entry, frozen=True, kw_only=True, tag="log-normal", tag_field="kind"):
    """Lengths drawn from exp(N(mu, sigma)), truncated to `least` to `most` tokens."""

    mu: Annotated[float, Meta(ge=0, le=20)]
    sigma: Annotated[float, Meta(gt=0, le=10)]
    least: Tokens
    most: Tokens


class ConstantLengths(Entry, frozen=True, kw_only=True, tag="constant", tag_field="kind"):
    """Every prompt has this number of tokens."""

    tokens: Tokens


class TableLengths(Entry, frozen=True, kw_only=True, tag="table", tag_field="kind"):
    """Lengths and the frequency of each; the shares need not add up to 1."""

    tokens: list[Tokens]
    shares: list[Annotated[float, Meta(ge=0)]]


class TraceLengths(Entry, frozen=True, kw_only=True, tag="trace", tag_field="kind"):
    """The prompts of a trace without the prefix that a cache would hold."""

    file: str
    """Path relative to the folder of the plan."""
    cache: Literal["infinite", "none"] | Tokens = "infinite"
    """Number of tokens that one cache keeps; it evicts the least recently used blocks first."""
    block_tokens: Count = 512
    """Number of tokens behind one hash id, unless a line of the trace gives another."""


LengthsEntry: TypeAlias = LogNormalLengths | ConstantLengths | TableLengths | TraceLengths


class Traffic(Entry, frozen=True, kw_only=True):
    """The traffic: incremental prompt lengths and the length of the responses."""

    lengths: LengthsEntry
    output_tokens: Count
    slo_tokens_per_s: Annotated[float, Meta(gt=0)] | None = None
    """Minimum tokens per second of every request; it limits the duration of a decode iteration."""
    step_tokens: Annotated[int, Meta(ge=1, le=10_000)] = 100
    """Step in tokens by which lengths are grouped and thresholds are tried."""


class ModelKv(Entry, frozen=True, kw_only=True, tag="model", tag_field="kind"):
    """KV sizes computed from a model's layers: a preset or a config.json."""

    model: str


class MeasuredKv(Entry, frozen=True, kw_only=True, tag="measured", tag_field="kind"):
    """KV sizes from measured points: linear interpolation, or one line (a state per request plus bytes per token)."""

    tokens: list[Tokens]
    sizes: list[Size]
    form: Literal["linear", "piecewise"] = "piecewise"


class MeasuredPrefill(Entry, frozen=True, kw_only=True, tag="measured", tag_field="kind"):
    """Prefill times from measured points, fitted with one of the forms of `kvroute timing fit`."""

    tokens: list[Tokens]
    times_s: list[Duration] = field(name="times")
    form: Form = "quadratic"


class ProfiledPrefill(Entry, frozen=True, kw_only=True, tag="profile", tag_field="kind"):
    """Like `measured`, but from a CSV file with the columns tokens,seconds."""

    file: str
    """Path relative to the folder of the plan."""
    form: Form = "quadratic"


class DecodeLimits(Entry, frozen=True, kw_only=True):
    """A full decode batch within the SLO (BS_max and T_decode of PrfaaS eq. 5)."""

    batch_max: Count
    iteration_s: Duration = field(name="iteration")


class HardwareEntry(Entry, frozen=True, kw_only=True):
    """One instance of the model on one kind of GPU."""

    prefill: LinearPrefillEntry | QuadraticPrefillEntry | PiecewisePrefillEntry | MeasuredPrefill | ProfiledPrefill
    decode: DecodeLimits | None = None
    """Decode limits; None if this hardware only prefills."""
    gpu_price: Annotated[float, Meta(gt=0)] = field(name="price", default=1.0)
    """Price of one GPU per hour, in any currency."""


class ClusterEntry(Entry, frozen=True, kw_only=True):
    """GPUs of one kind in one place. `prefill`: a PrfaaS cluster; `pd`: prefill and decode, connected by fast links."""

    name: Name
    role: Literal["prefill", "pd"]
    hardware: Name
    gpus: Annotated[int, Meta(ge=1, le=10_000_000)]
    egress_bytes_per_s: Bandwidth | None = field(name="egress", default=None)
    """Bandwidth of a `prefill` cluster towards the other clusters, summed over all links."""


class Homogeneous(Entry, frozen=True, kw_only=True):
    """The PD-only alternative."""

    hardware: Name
    gpus: Annotated[int, Meta(ge=1, le=10_000_000)]


class PlanFile(Entry, frozen=True, kw_only=True):
    """The complete file of `kvroute plan prfaas`."""

    name: Name
    gpus_per_instance: Annotated[int, Meta(ge=1, le=1024)] = 8
    reading: Reading = "representative"
    traffic: Traffic
    kv: ModelKv | MeasuredKv
    hardware: dict[str, HardwareEntry]
    clusters: list[ClusterEntry]
    homogeneous: Homogeneous | None = None
    """PD-only alternative. Default: as many GPUs as all clusters have, all with the hardware of the first `pd`
    cluster."""
