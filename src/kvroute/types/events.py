"""What the control core is told."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from kvroute.types.instances import Role
from kvroute.types.requests import Request


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


class InstanceUp(msgspec.Struct, frozen=True, tag="instance_up", omit_defaults=True):
    """`instance` takes requests (again). All are up at the start."""

    at: float
    instance: str
    returned: bool = False
    """It has been ill or away: its share of the requests rises over the slow-start window."""


class InstanceConverted(msgspec.Struct, frozen=True, tag="instance_converted"):
    """`instance` has been drained and serves `role` from now on."""

    at: float
    instance: str
    role: Role


class CopyFinished(msgspec.Struct, frozen=True, tag="copy_finished"):
    """A copy of a cached prefix is there, as a KvStored before this says; or will not come (`landed`)."""

    at: float
    copy_id: int
    landed: bool = True


class ReviewDue(msgspec.Struct, frozen=True, tag="review_due"):
    """Time to look at how the instances are split between prefill and decode, and at which cached prefixes should be
    elsewhere too; drivers send it now and then."""

    at: float


class ThresholdKnown(msgspec.Struct, frozen=True, tag="threshold_known"):
    """Another core's routing threshold for a PrfaaS site: this one goes on from there."""

    at: float
    site: str
    tokens: float
    base_tokens: float


class CapacityLearned(msgspec.Struct, frozen=True, tag="capacity_learned"):
    """What another core has learned for foresight from transfers and answers: this one goes on from there. Tuples have
    one entry for each tier, but `answers`."""

    at: float
    log_sums: tuple[float, ...]
    """Weighted sums of the logarithms of measured over promised capacity."""
    weights: tuple[float, ...]
    """Sums of the weights."""
    transfers: tuple[int, ...]
    """That have taught."""
    ages_s: tuple[int | None, ...]
    """Since the last of them; None: there was none."""
    answers: tuple[float, ...] = ()
    """Lengths of the last answers in tokens, the oldest first."""


class RatioLearned(msgspec.Struct, frozen=True):
    """Measured over promised bandwidth of a tier, or of a pair of instances beyond that of its tier."""

    log: float
    """Running average of its logarithm."""
    transfers: float
    """How many recent transfers the average counts; older ones fade."""
    ratio: float
    """What is believed by now."""
    at: float
    """Time of the last measurement."""


class BandwidthLearned(msgspec.Struct, frozen=True, tag="bandwidth_learned"):
    """What another core's network oracle has learned from transfers: this one goes on from there."""

    at: float
    tiers: tuple[RatioLearned | None, ...]
    """By tier; None: nothing."""
    pairs: tuple[tuple[str, str, RatioLearned], ...] = ()
    """Source, target, and what is known of them."""


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
    | InstanceConverted
    | CopyFinished
    | ReviewDue
    | ThresholdKnown
    | CapacityLearned
    | BandwidthLearned
    | InstanceMeasured
    | TransferMeasured
    | KvStored
    | KvEvicted
    | KvCleared
    | CongestionMeasured
    | LinksMeasured
)
