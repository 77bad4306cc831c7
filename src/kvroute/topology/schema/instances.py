"""The instances of a cluster file: timing, endpoint, storage, all-reduces, counts."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, field

from kvroute.files.units_in_structs import with_units, without_units
from kvroute.topology.schema.base import Count, Entry, Name, Ranks
from kvroute.topology.schema.network import Placement
from kvroute.types import (
    DecodeSpec,
    Endpoint,
    KvProtocol,
    LinearPrefill,
    PiecewisePrefill,
    PrefillSpec,
    QuadraticPrefill,
    Role,
    SchedulerSpec,
    TimingSpec,
)
from kvroute_engine.agent.schemes import Scheme
from kvroute_engine.files.units import Bandwidth, Duration, Size

ReadPath: TypeAlias = Literal["prefill", "alternating", "shorter", "split"]
_HOST_PORT = r"(\[[0-9A-Fa-f:.]+\]|[^\s/:@\[\]*]+):[0-9]{1,5}"
ZmqEndpoint: TypeAlias = Annotated[
    str, Meta(pattern=rf"^(tcp://{_HOST_PORT}|ipc://\S+)?\Z", examples=["tcp://10.0.0.1:5557"])
]


@with_units()
class LinearPrefillEntry(LinearPrefill, Entry, frozen=True, kw_only=True, tag="linear", tag_field="kind"):
    """`base + per_token * new tokens`."""


@with_units()
class QuadraticPrefillEntry(QuadraticPrefill, Entry, frozen=True, kw_only=True, tag="quadratic", tag_field="kind"):
    """`base + per_token * tokens + per_token2 * tokens^2`."""


class PiecewisePrefillEntry(Entry, frozen=True, kw_only=True, tag="piecewise", tag_field="kind"):
    """Straight lines through measured points: `times[i]` for `tokens[i]`."""

    tokens: list[Annotated[int, Meta(ge=0)]]
    times_s: list[Duration] = field(name="times")


@with_units()
class DecodeEntry(DecodeSpec, Entry, frozen=True, kw_only=True):
    """One iteration: `base + per_request * batch + per_context_token * all context tokens of the batch`."""


@with_units()
class SchedulerEntry(SchedulerSpec, Entry, frozen=True, kw_only=True):
    """How an engine divides prompts into steps, and what a request costs besides its steps. Only simulations use it."""

    step_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None


class TimingEntry(Entry, frozen=True, kw_only=True):
    """Computing times of an instance."""

    prefill: LinearPrefillEntry | QuadraticPrefillEntry | PiecewisePrefillEntry
    decode: DecodeEntry
    scheduler: SchedulerEntry = SchedulerEntry()

    def spec(self) -> TimingSpec:
        """Return the same in seconds, as a `TimingSpec`."""
        return TimingSpec(
            prefill=self._prefill_spec(),
            decode=without_units(self.decode, DecodeSpec),
            scheduler=without_units(self.scheduler, SchedulerSpec),
        )

    def _prefill_spec(self) -> PrefillSpec:
        match self.prefill:
            case LinearPrefillEntry() as linear:
                return without_units(linear, LinearPrefill)
            case QuadraticPrefillEntry() as quadratic:
                return without_units(quadratic, QuadraticPrefill)
            case PiecewisePrefillEntry(tokens=tokens, times_s=times):
                return PiecewisePrefill(tokens=tuple(tokens), seconds=tuple(float(second) for second in times))


class Storage(Entry, frozen=True, kw_only=True):
    """The store of KV blocks that all nodes share; each node reads it through its storage NIC into a buffer in host
    memory (DualPath 2.2)."""

    bytes_per_s: Bandwidth | None = field(name="bandwidth", default=None)
    """Read bandwidth of the whole store; None: the storage NICs are the only limit."""
    buffer_bytes: Size = field(name="buffer", default=Size(80e9))
    """Host memory of each node for blocks that are being read."""
    reads: ReadPath = "shorter"
    """Which node reads a request's cached KV: the prefill node, the prefill and the decode node in turn, the one with
    the shorter storage queue, or both, each a part."""


class InstanceDefaults(Entry, frozen=True, kw_only=True):
    """Values for instances that do not set them."""

    model: str | None = None
    tp: Count = 1
    pp: Count = 1
    batch_max: Count = 64
    kv_capacity_bytes: Size | None = field(name="kv_capacity", default=None)
    cpu_bytes_per_s: Bandwidth = field(name="cpu_bandwidth", default=Bandwidth(50e9))
    """Rate at which an instance loads KV from CPU memory, all shards together."""
    disk_bytes_per_s: Bandwidth = field(name="disk_bandwidth", default=Bandwidth(5e9))
    """Rate at which an instance loads KV from storage of its own, all shards together."""
    timing: Name = "default"
    chunk_tokens: Count = 2048
    """Tokens that an instance computes in one step at most, those of prompts and of responses together (vLLM:
    `max_num_batched_tokens`)."""


class EndpointEntry(Entry, frozen=True, kw_only=True):
    """Addresses of the live engine; only `kvroute serve` needs them."""

    url: Annotated[str, Meta(pattern=r"^https?://[^/?#@\s]+\Z", examples=["http://10.0.0.1:8000"])]
    """URL of the engine, without a path."""
    protocol: KvProtocol = "vllm"
    bootstrap: Annotated[str, Meta(pattern=rf"^({_HOST_PORT})?\Z", examples=["10.0.0.1:8998"])] = ""
    kv_events: ZmqEndpoint = ""
    kv_replay: ZmqEndpoint = ""
    buffer: Annotated[str, Meta(pattern=r"^(https?://[^/?#@\s]+)?\Z", examples=["http://10.0.0.1:7200"])] = ""
    """URL of the buffer server on the engine's node, which reads KV blocks from the store."""

    def endpoint(self) -> Endpoint:
        """Return the same as an `Endpoint`."""
        return Endpoint(
            url=self.url,
            protocol=self.protocol,
            bootstrap=self.bootstrap,
            kv_events=self.kv_events,
            kv_replay=self.kv_replay,
            buffer=self.buffer,
        )


class AllReduceEntry(Entry, frozen=True, kw_only=True):
    """All-reduces in the iterations of an instance. Its `timing` includes their time on an idle network; `kvroute
    simulate` makes them share links with other traffic."""

    scheme: Scheme | list[Scheme]
    """All-reduce scheme of all pipeline stages, or one for each stage."""
    per_iteration: Count
    """All-reduces of one iteration over all pipeline stages: two per layer of most models."""
    token_bytes: Size
    """Bytes that one token adds to each tensor: hidden size x bytes of an element."""
    element_bytes: Annotated[int, Meta(ge=1, le=8)] = 2
    """Size of an element in GPU memory; switches that aggregate have their own on the wire."""

    def schemes(self, stages: int) -> list[Scheme]:
        """Return the scheme of each stage; a list in the file is returned as written."""
        return self.scheme if isinstance(self.scheme, list) else [self.scheme] * stages


class InstanceEntry(Entry, frozen=True, kw_only=True):
    """One serving engine; `gpus` is "node0:0-3" or "node0:0-7,node1:0-7", shard by shard."""

    name: Name
    role: Role
    gpus: str
    model: str | None = None
    tp: Count | None = None
    pp: Count | None = None
    dp: Ranks | None = None
    """Data-parallel ranks that share the endpoint. Each becomes an instance, and all other values are those of one
    rank, except `gpus`: rank by rank."""
    engine: Name | None = None
    """Engine of which the instance is one data-parallel rank; only if ranks are listed one by one."""
    rank: Annotated[int, Meta(ge=0, le=1023)] | None = None
    """Its data-parallel rank, with `engine`."""
    ep_group: Name | None = None
    """Expert-parallel group: with `kvroute simulate --lock-step`, all instances that name it run each iteration
    together; None: those of the engine."""
    batch_max: Count | None = None
    kv_capacity_bytes: Size | None = field(name="kv_capacity", default=None)
    cpu_bytes_per_s: Bandwidth | None = field(name="cpu_bandwidth", default=None)
    disk_bytes_per_s: Bandwidth | None = field(name="disk_bandwidth", default=None)
    timing: Name | None = None
    chunk_tokens: Count | None = None
    group: Name | None = None
    """Group of decode engines; the decode policy `dualpath` balances groups first, then the instances of a group."""
    all_reduce: AllReduceEntry | None = None
    """None: all-reduces use no links in a simulation; `timing` is all that they cost."""
    endpoint: EndpointEntry | None = None


class InstanceCounts(Entry, frozen=True, kw_only=True):
    """Shorthand: numbers of instances, placed by a rule.

    `packed`: in node order, prefill first. `spread`: round-robin over racks, prefill first. `rack`: prefill fills whole
    racks, decode takes the other racks, so that no transfer stays inside a rack.
    """

    prefill: Count
    decode: Count
    placement: Placement = "packed"
    model: str | None = None
    tp: Count | None = None
    pp: Count | None = None
    dp: Ranks | None = None
    """Data-parallel ranks of each engine; see the same key of an instance."""
    batch_max: Count | None = None
    kv_capacity_bytes: Size | None = field(name="kv_capacity", default=None)
    timing: Name | None = None
    all_reduce: AllReduceEntry | None = None
