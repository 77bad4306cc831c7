"""Serving engines: role, location, limits, endpoint and computing time."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from kvroute.types.protocols import TRAITS, KvProtocol, ProtocolTraits

Role: TypeAlias = Literal["prefill", "decode", "both"]

SAME_NODE, SAME_RACK, SAME_POD, SAME_DATACENTER, CROSS_DATACENTER = range(5)
TIER_COUNT = 5
"""Number of locality tiers: 0-3 as in NetKV III-A; tier 4 connects datacenters."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses of a live engine; simulations need none."""

    url: str
    """`http://host:port` or `https://host:port`, without a path."""
    protocol: KvProtocol = "vllm"
    bootstrap: str = ""
    """`host:port` of a prefill engine's bootstrap server (mooncake, sglang)."""
    kv_events: str = ""
    """ZMQ endpoint that publishes KV events, e.g. `tcp://10.0.0.1:5557`; empty: none."""
    kv_replay: str = ""
    """ZMQ endpoint that replays missed KV events; empty: none."""
    buffer: str = ""
    """URL of the buffer server on the engine's node; empty: the engine reads nothing from a store."""


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """One serving engine: its role, model, location and limits. An instance of role `both` computes prefill and decode
    of a request itself."""

    name: str
    role: Role
    model: str
    node: str
    rack: str
    pod: str
    datacenter: str
    gpus: tuple[str, ...]
    """GPU names `node/index`, tp * pp of them, shard by shard."""
    tp: int = 1
    pp: int = 1
    timing: str = "default"
    batch_max: int = 64
    """Maximum number of requests in one decode iteration (NetKV beta_max)."""
    chunk_tokens: int = 2048
    """Maximum number of tokens in one decode iteration: one of each request in the batch, and those of prompts that are
    computed beside it."""
    kv_capacity_bytes: float = 0.0
    """KV memory of the whole instance, all shards together."""
    cpu_bytes_per_s: float = 50e9
    """Rate at which the whole instance loads KV from CPU memory."""
    disk_bytes_per_s: float = 5e9
    """Rate at which the whole instance loads KV from storage of its own."""
    group: str = ""
    """Group of decode engines that it belongs to; "": the group of all that name none."""
    engine: str = ""
    """Name of the engine, one server, of which it is a data-parallel rank; "": it is an engine of its own."""
    rank: int = 0
    """Its data-parallel rank, from 0 in each engine."""
    ep_group: str = ""
    """Instances with which it shares experts, so that they iterate together; "": it iterates on its own."""
    endpoint: Endpoint | None = None

    @property
    def server(self) -> str:
        """Name of the server process; all data-parallel ranks of an engine have the same."""
        return self.engine or self.name

    @property
    def protocol(self) -> KvProtocol:
        """KV protocol, which the peers of this instance must use, too."""
        return self.endpoint.protocol if self.endpoint else "vllm"

    @property
    def traits(self) -> ProtocolTraits:
        """Traits of its KV protocol."""
        return TRAITS[self.protocol]


class LinearPrefill(msgspec.Struct, frozen=True, tag="linear", kw_only=True):
    """T(l) = per_token_s * l + base_s (NetKV VI-A)."""

    per_token_s: float
    base_s: float = 0.0


class QuadraticPrefill(msgspec.Struct, frozen=True, tag="quadratic", kw_only=True):
    """T(l) = base_s + per_token_s * l + per_token2_s * l^2 (DistServe's form)."""

    base_s: float
    per_token_s: float
    per_token2_s: float


class PiecewisePrefill(msgspec.Struct, frozen=True, tag="piecewise", kw_only=True):
    """Straight lines through measured points, extrapolated at both ends; tokens ascend."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]


PrefillSpec: TypeAlias = LinearPrefill | QuadraticPrefill | PiecewisePrefill


class DecodeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """t(beta, context) = base_s + per_request_s * beta + per_context_token_s * (sum of context tokens).

    The entries of cluster files and custom resources derive from it (`files.units_in_structs`).
    """

    base_s: float
    per_request_s: float = 0.0
    per_context_token_s: float = 0.0

    def seconds(self, batch: float, context_tokens: float = 0.0) -> float:
        """Return the seconds of one iteration."""
        return self.base_s + self.per_request_s * batch + self.per_context_token_s * context_tokens


TransferStart: TypeAlias = Literal["at-once", "between-steps"]


class SchedulerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine divides prompts into steps, and what a request costs besides its steps. The defaults describe an
    engine that computes one prompt after the other and needs no time besides."""

    step_tokens: int | None = None
    """Most tokens of one step (vLLM's `max_num_batched_tokens`): prompts share a step, and a longer prompt takes
    several. None: one prompt after the other."""
    step_s: float = 0.0
    """The part of the prefill's `base` that each step takes, however many prompts it has; the rest passes before the
    first step of a prompt and delays no other. Needs `step_tokens`."""
    decode_request_s: float = 0.0
    """Time of a request on a decode instance besides its steps and its transfer, until its first token."""
    transfers: TransferStart = "at-once"
    """When a decode instance begins to pull a KV cache: at once, or, as in vLLM, between steps, at the end of the next
    step that it plans."""
    asynchronous: bool = True
    """Whether an instance of role `both` plans a step when the one before it starts (vLLM's `async_scheduling`), and
    not when that one has ended."""
    request_s: float = 0.0
    """Time of a request on an instance of role `both` besides its steps, half of it before and half of it after."""
    streaming_request_s: float = 0.0
    """Time that each other request which decodes in the same step adds to an answer of an instance of role `both`."""


class TimingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Computing times of an instance; `timing` turns them into functions."""

    prefill: PrefillSpec
    decode: DecodeSpec
    scheduler: SchedulerSpec = SchedulerSpec()
    """Only simulations use it."""
