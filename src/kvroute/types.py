"""Request, instance, snapshots, events, decisions and errors: what the rooms say to each other; no behaviour.

Units are seconds and bytes. msgspec Structs are sent, logged or read from a file; frozen dataclasses stay inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.int64]
TierArray: TypeAlias = npt.NDArray[np.int8]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
Role: TypeAlias = Literal["prefill", "decode", "both"]
KvProtocol: TypeAlias = Literal["vllm", "mooncake", "sglang"]
"""How prefill and decode are told of each other over HTTP: the decode leg after the prefill leg has answered with
`kv_transfer_params` (vllm), after it with a `transfer_id` that the router made up (mooncake), or both legs at once
(sglang)."""

SAME_NODE, SAME_RACK, SAME_POD, SAME_DATACENTER, CROSS_DATACENTER = range(5)
TIER_COUNT = 5
"""Locality tiers 0-3 as in NetKV III-A; tier 4 joins datacenters."""


class InputError(ValueError):
    """Wrong input in one sentence: where it is, what is wrong, how to mend it. A command exits with 2."""

    def __init__(self, what: str, *, where: str = "", mend: str = "") -> None:
        self.what, self.where, self.mend = what, where, mend
        super().__init__((f"{where}: " if where else "") + what + (f"; {mend}" if mend else ""))


class InputErrors(InputError):
    """Several faults of one file, so that all can be mended in one go; `problems` keeps them in file order."""

    def __init__(self, problems: Sequence[InputError]) -> None:
        assert problems
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in problems))

    def __reduce__(self) -> tuple[type[InputErrors], tuple[tuple[InputError, ...]]]:
        return type(self), (self.problems,)


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where a live engine is reached; simulations need none."""

    url: str
    """`http://host:port` or `https://host:port`, without a path."""
    protocol: KvProtocol = "vllm"
    bootstrap: str = ""
    """`host:port` of a prefill engine's bootstrap server (mooncake, sglang)."""
    kv_events: str = ""
    """ZMQ endpoint that publishes KV events, e.g. `tcp://10.0.0.1:5557`; empty: none."""
    kv_replay: str = ""
    """ZMQ endpoint that repeats missed KV events; empty: none."""


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """One serving engine: its role, its model, its place and its limits. Role `both` computes a request's prefill and
    decode on itself."""

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
    """Requests in one decode iteration at most (NetKV beta_max)."""
    kv_capacity_bytes: float = 0.0
    """KV memory of the whole instance, all shards together."""
    endpoint: Endpoint | None = None

    @property
    def protocol(self) -> KvProtocol:
        """What a partner of this instance must speak too."""
        return self.endpoint.protocol if self.endpoint else "vllm"


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
    """Straight lines through measured points, prolonged at both ends; tokens ascend."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]


PrefillSpec: TypeAlias = LinearPrefill | QuadraticPrefill | PiecewisePrefill


class DecodeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """t(beta, context) = base_s + per_request_s * beta + per_context_token_s * (sum of context tokens)."""

    base_s: float
    per_request_s: float
    per_context_token_s: float = 0.0


class TimingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How long an instance computes; `timing` turns it into functions."""

    prefill: PrefillSpec
    decode: DecodeSpec


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What a router knows of a request when it arrives. The length of the answer is not known, only its bound."""

    id: int
    input_tokens: int
    blocks: tuple[int, ...] = ()
    """Chained hashes of the prompt's full blocks: an equal hash means an equal prefix up to that block."""
    block_tokens: int = 16
    max_output_tokens: int = 0
    """KV memory is reserved for so many generated tokens."""
    model: str = ""
    """Empty: the cluster's only model."""
    one_leg: bool = False
    """Prefill and decode on one instance, for requests whose KV no protocol can hand over (several prompts or
    answers in one request)."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """Instances to choose from, ascending by name, as arrays of length n: a lower index wins a tie."""

    names: tuple[str, ...]
    batch: IntArray
    """Requests decoding now (NetKV beta_d)."""
    queued: IntArray
    """Requests whose KV has landed or is under way, waiting for a slot (NetKV q_d)."""
    batch_max: IntArray
    free_kv_bytes: FloatArray
    hit_tokens: IntArray
    """Longest cached block prefix of the request, tokens (NetKV lambda)."""
    kv_bytes: FloatArray
    """KV bytes that would cross the network to this candidate (NetKV s_eff, eq. 2)."""
    need_bytes: FloatArray
    """KV memory that the candidate must have free: what crosses plus room for the answer."""
    iteration_base_s: FloatArray
    iteration_per_request_s: FloatArray


@dataclass(frozen=True, slots=True)
class NetworkCosts:
    """What the oracle says of the network between one source and the candidates."""

    tier: TierArray
    """Tier of each candidate, length n; the arrays below are per tier, length TIER_COUNT."""
    bytes_per_s: FloatArray
    latency_s: FloatArray
    congestion: FloatArray
    in_flight: IntArray
    """Own transfers in flight from this source per tier."""
    pair_bytes_per_s: FloatArray | None = None
    """What a lone transfer from the source to each candidate gets, as measured, length n; None: only the tiers' are
    known."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Why: the cost terms of every candidate, in the candidates' order; lower cost is better.

    `cost` is in seconds where the policy prices in seconds, else in the policy's own unit (`unit`).
    """

    names: tuple[str, ...]
    cost: FloatArray
    feasible: npt.NDArray[np.bool_]
    parts: dict[str, FloatArray]
    unit: str = "s"
    left_out: int = 0
    """Candidates that a log has left out, none of them cheaper than those it keeps but the chosen one."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen candidate (index into `Candidates`) and the terms that led there."""

    index: int
    terms: Terms


class Reject(msgspec.Struct, frozen=True, tag="reject"):
    """No instance can take the request now: normal in operation, hence a value."""

    request_id: int
    reason: str
    terms: Terms | None = None


class Prefill(msgspec.Struct, frozen=True, tag="prefill"):
    """Compute the request's KV cache on `instance`; `cached_tokens` of it are there already."""

    request_id: int
    instance: str
    cached_tokens: int = 0
    terms: Terms | None = None


class Decode(msgspec.Struct, frozen=True, tag="decode"):
    """Send `kv_bytes` from `source` to `target` and decode there."""

    request_id: int
    source: str
    target: str
    tier: int
    kv_bytes: float
    need_bytes: float
    hit_tokens: int
    terms: Terms | None = None


Decision: TypeAlias = Prefill | Decode | Reject


class Arrived(msgspec.Struct, frozen=True, tag="arrived"):
    """A request is at the door."""

    at: float
    request: Request


class PrefillFinished(msgspec.Struct, frozen=True, tag="prefill_finished"):
    """The KV cache is complete on the prefill instance."""

    at: float
    request_id: int


class TransferFinished(msgspec.Struct, frozen=True, tag="transfer_finished"):
    """All bytes have landed; the request waits for a slot of the decode batch."""

    at: float
    request_id: int
    free_kv_bytes: float | None = None
    """The target's own report of its memory, if it gives one."""


class Admitted(msgspec.Struct, frozen=True, tag="admitted"):
    """The request has joined the decode batch."""

    at: float
    request_id: int


class Finished(msgspec.Struct, frozen=True, tag="finished", omit_defaults=True):
    """The request is gone: answered, failed or cancelled; whatever it held is free again."""

    at: float
    request_id: int
    free_kv_bytes: float | None = None
    output_tokens: int | None = None
    """Length of the answer, if it was counted; no decision depends on it."""


class PrefillFailed(msgspec.Struct, frozen=True, tag="prefill_failed"):
    """The prefill leg came to nothing; what was booked there is free, and another instance is chosen."""

    at: float
    request_id: int


class DecodeFailed(msgspec.Struct, frozen=True, tag="decode_failed"):
    """The decode leg came to nothing before the first token; another decode instance is chosen, or, where the KV
    cache is gone from its source (`kv_lost`), another prefill."""

    at: float
    request_id: int
    kv_lost: bool = False


class InstanceDown(msgspec.Struct, frozen=True, tag="instance_down"):
    """Give `instance` nothing new: it is dead, ill or being drained."""

    at: float
    instance: str


class InstanceUp(msgspec.Struct, frozen=True, tag="instance_up"):
    """`instance` takes requests (again). All are up at the start."""

    at: float
    instance: str


class InstanceMeasured(msgspec.Struct, frozen=True, tag="instance_measured"):
    """An engine's own word on its load, other routers' requests included."""

    at: float
    instance: str
    running: int
    waiting: int
    kv_used_share: float | None = None
    """Of its KV memory, in [0, 1]; None: it does not say."""


class TransferMeasured(msgspec.Struct, frozen=True, tag="transfer_measured"):
    """KV bytes that crossed from `source` to `target` and the seconds that took, `transfers` of them added up."""

    at: float
    source: str
    target: str
    kv_bytes: float
    seconds: float
    transfers: int = 1


class KvStored(msgspec.Struct, frozen=True, tag="kv_stored"):
    """`instance` now holds the KV of this chain of blocks, from the first one."""

    at: float
    instance: str
    blocks: tuple[int, ...]
    block_tokens: int = 16


class KvEvicted(msgspec.Struct, frozen=True, tag="kv_evicted"):
    """`instance` has dropped the blocks of this chain from position `keep` on."""

    at: float
    instance: str
    blocks: tuple[int, ...]
    keep: int = 0


class KvCleared(msgspec.Struct, frozen=True, tag="kv_cleared"):
    """`instance` holds no KV any more: it has restarted, or said so."""

    at: float
    instance: str


class CongestionMeasured(msgspec.Struct, frozen=True, tag="congestion_measured"):
    """The operator's telemetry: utilisation in [0, 1) per tier, length TIER_COUNT."""

    at: float
    per_tier: tuple[float, ...]


class LinksMeasured(msgspec.Struct, frozen=True, tag="links_measured"):
    """The operator's telemetry by link: utilisation in [0, 1) in the cluster's order of links."""

    at: float
    utilisation: tuple[float, ...]


Event: TypeAlias = (
    Arrived
    | PrefillFinished
    | TransferFinished
    | Admitted
    | Finished
    | PrefillFailed
    | DecodeFailed
    | InstanceDown
    | InstanceUp
    | InstanceMeasured
    | TransferMeasured
    | KvStored
    | KvEvicted
    | KvCleared
    | CongestionMeasured
    | LinksMeasured
)
