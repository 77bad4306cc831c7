"""Events: inputs of the control core."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from kvroute.types.discovered import Joined
from kvroute.types.instances import Role
from kvroute.types.kv_events import KvCleared, KvEvicted, KvStored
from kvroute.types.peers import AdmissionCounts, PeerBooking, UsageCounts
from kvroute.types.requests import Request

Side: TypeAlias = Literal["prefill", "decode"]
"""Node of the prefill instance, or of the decode instance."""


class Arrived(msgspec.Struct, frozen=True, tag="arrived", omit_defaults=True):
    """A request has arrived."""

    at: float
    request: Request
    only: tuple[str, ...] | None = None
    """Names of the instances that may serve it, because a proxy before the router reaches no others; None: all may."""
    both_on_arrival: bool = False
    """True if the decode instance orders the prefill itself, so that both must be chosen now, whatever the protocol."""
    ttft_max_s: float | None = None
    """Longest time from now to the first token: the request is rejected if the predicted one is longer; None: none."""


class PrefillFinished(msgspec.Struct, frozen=True, tag="prefill_finished", omit_defaults=True):
    """The KV cache is complete on the prefill instance."""

    at: float
    request_id: int
    kept_tokens: int = 0
    """Leading tokens of the decode node's part of a `ReadKv` that are still in that node's buffer. The decode instance
    named there takes them from the buffer, so they do not cross the network."""


class TransferFinished(msgspec.Struct, frozen=True, tag="transfer_finished"):
    """All KV bytes have arrived; the request waits for a slot of the decode batch."""

    at: float
    request_id: int
    free_kv_bytes: float | None = None
    """Free KV memory that the target reports; None if it does not."""


class Admitted(msgspec.Struct, frozen=True, tag="admitted"):
    """The request has joined the decode batch."""

    at: float
    request_id: int


class Finished(msgspec.Struct, frozen=True, tag="finished", omit_defaults=True):
    """The request has ended: completed, failed or cancelled. Its resources are free again."""

    at: float
    request_id: int
    free_kv_bytes: float | None = None
    output_tokens: int | None = None
    """Number of output tokens, if counted; no decision depends on it."""
    ttft_s: float | None = None
    """Time from `Arrived` to the first token, if it was observed; no decision depends on it."""


class PrefillFailed(msgspec.Struct, frozen=True, tag="prefill_failed"):
    """The prefill leg has failed. Its booking is released, and another instance is chosen."""

    at: float
    request_id: int


class DecodeFailed(msgspec.Struct, frozen=True, tag="decode_failed"):
    """The decode leg has failed before the first token. Another decode instance is chosen, or another prefill instance
    if the KV cache at the source is lost (`kv_lost`)."""

    at: float
    request_id: int
    kv_lost: bool = False


class Served(msgspec.Struct, frozen=True, tag="served"):
    """Another instance than the chosen one serves the decode leg: a proxy that sends the leg itself went on to the next
    instance of its list, or replaced one that it does not know. Everything booked for the decode moves there."""

    at: float
    request_id: int
    instance: str


class InstanceDown(msgspec.Struct, frozen=True, tag="instance_down"):
    """`instance` takes no new requests: it is dead, unhealthy or draining."""

    at: float
    instance: str


class InstanceUp(msgspec.Struct, frozen=True, tag="instance_up", omit_defaults=True):
    """`instance` takes requests (again). All instances are up at the start."""

    at: float
    instance: str
    returned: bool = False
    """True if it was unhealthy or unreachable: its share of requests rises over the slow-start window."""


class RoleSwitched(msgspec.Struct, frozen=True, tag="role_switched"):
    """`instance` has been drained and serves `role` from now on."""

    at: float
    instance: str
    role: Role


class CopyFinished(msgspec.Struct, frozen=True, tag="copy_finished"):
    """The copy of a cached prefix has ended: complete (`landed`; a KvStored came before) or failed."""

    at: float
    copy_id: int
    landed: bool = True


class ReadFinished(msgspec.Struct, frozen=True, tag="read_finished"):
    """A node has read its part of a `ReadKv` from the store, or has failed to."""

    at: float
    read_id: int
    side: Side


class ReviewDue(msgspec.Struct, frozen=True, tag="review_due"):
    """Periodic request of the driver to review the split between prefill and decode, and which cached prefixes to
    copy."""

    at: float


class ScalingDue(msgspec.Struct, frozen=True, tag="scaling_due", omit_defaults=True):
    """Periodic request of the driver to compute the number of instances that each model needs."""

    at: float
    queued: int = 0
    """Requests that the driver holds back and has not reported as arrived."""


class ScaleEnded(msgspec.Struct, frozen=True, tag="scale_ended"):
    """`instance` has been started or stopped, or that has failed."""

    at: float
    instance: str
    serves: bool
    """True if it serves now, false if it has stopped."""


class ThresholdKnown(msgspec.Struct, frozen=True, tag="threshold_known"):
    """Routing threshold of a PrfaaS site, carried over from another core; this core continues from it."""

    at: float
    site: str
    tokens: float
    base_tokens: float


class CapacityLearned(msgspec.Struct, frozen=True, tag="capacity_learned"):
    """State that another core's foresight policy has learned from transfers and outputs; this core continues from it.
    Tuples have one entry for each tier, except `answers`."""

    at: float
    log_sums: tuple[float, ...]
    """Weighted sums of the logarithms of measured over nominal capacity."""
    weights: tuple[float, ...]
    """Sums of the weights."""
    transfers: tuple[int, ...]
    """Number of transfers learned from."""
    ages_s: tuple[int | None, ...]
    """Age of the last of these transfers in seconds; None if there was none."""
    answers: tuple[float, ...] = ()
    """Lengths of the last outputs in tokens, oldest first."""


class RatioLearned(msgspec.Struct, frozen=True):
    """Ratio of measured to nominal bandwidth of a tier, or of a pair of instances beyond that of its tier."""

    log: float
    """Running average of the ratio's logarithm."""
    transfers: float
    """Number of recent transfers in the average; older ones fade."""
    ratio: float
    """Current estimate of the ratio."""
    at: float
    """Time of the last measurement."""


class BandwidthLearned(msgspec.Struct, frozen=True, tag="bandwidth_learned"):
    """State that another core's network oracle has learned from transfers; this core continues from it."""

    at: float
    tiers: tuple[RatioLearned | None, ...]
    """State by tier; None: nothing learned."""
    pairs: tuple[tuple[str, str, RatioLearned], ...] = ()
    """Source, target and state of each pair."""


class InstanceMeasured(msgspec.Struct, frozen=True, tag="instance_measured"):
    """Load that an engine reports, including requests of other routers."""

    at: float
    instance: str
    running: int
    waiting: int
    kv_used_share: float | None = None
    """Used share of its KV memory, in [0, 1]; None if it does not report it."""


class AdaptersMeasured(msgspec.Struct, frozen=True, tag="adapters_measured", omit_defaults=True):
    """LoRA adapters that an engine uses for requests in progress, and for how many it has room in GPU memory."""

    at: float
    instance: str
    adapters: tuple[str, ...]
    slots: int = 0
    """0: the engine does not report it."""


class SessionsServed(msgspec.Struct, frozen=True, tag="sessions_served"):
    """Another core of this gateway, or another gateway, has served these sessions. Those that are known already keep
    their instances."""

    at: float
    sessions: tuple[tuple[int, str, str], ...]
    """Hash of each session, and its last instances for prefill and for decode; empty: none. The session that was served
    last is at the end."""


MeasuredBy: TypeAlias = Literal["", "kvroute", "nixl", "sglang", "tcp", "first-byte"]
"""What has measured a KV transfer: the counters of an engine's connector (kvroute, nixl, sglang), the sender's kernel
(tcp), the gateway by the first byte of the response (first-byte); empty: not known."""


class TransferMeasured(msgspec.Struct, frozen=True, tag="transfer_measured"):
    """KV bytes transferred from `source` to `target` and the seconds that took, summed over `transfers` transfers."""

    at: float
    source: str
    target: str
    kv_bytes: float
    seconds: float
    transfers: int = 1
    measured_by: MeasuredBy = ""


class CongestionMeasured(msgspec.Struct, frozen=True, tag="congestion_measured"):
    """Link telemetry by tier: utilisation in [0, 1), [TIER_COUNT]."""

    at: float
    per_tier: tuple[float, ...]


class LinksMeasured(msgspec.Struct, frozen=True, tag="links_measured"):
    """Link telemetry by link: utilisation in [0, 1) in the cluster's order of links."""

    at: float
    utilisation: tuple[float, ...]


class ClusterChanged(msgspec.Struct, frozen=True, tag="cluster_changed", omit_defaults=True):
    """Discovered engines have become instances of the cluster, and others are no longer. An engine in both tuples
    replaces the one of this name.

    An engine that joins is down until `InstanceUp`. An instance leaves after its requests: while a leg of a request is
    in progress there, the event is not possible.
    """

    at: float
    joined: tuple[Joined, ...] = ()
    left: tuple[str, ...] = ()


class RoleDraining(msgspec.Struct, frozen=True, tag="role_draining"):
    """Another gateway drains `instance` for a role switch. It takes no new requests until `RoleSwitched`."""

    at: float
    instance: str


PeerEvent: TypeAlias = (
    KvStored
    | TransferMeasured
    | ThresholdKnown
    | BandwidthLearned
    | CapacityLearned
    | RoleDraining
    | RoleSwitched
    | SessionsServed
    | ScaleEnded
)
"""What a gateway has learned from its own traffic and other gateways cannot observe."""


class PeerReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """One entry of the stream that the gateways of a cluster share."""

    gateway: str
    """Identifier of the process that wrote it."""
    sequence: int
    """Number of the report, counted from 1 for each gateway."""
    at: float
    """Time of the report by the clock of this gateway, as are the times in `events`."""
    bookings: tuple[PeerBooking, ...] = ()
    """Requests whose bookings have changed since the report before; with `whole`, all requests with bookings."""
    events: tuple[PeerEvent, ...] = ()
    whole: bool = False
    """Whether requests that are not in `bookings` have none."""
    asks: tuple[str, ...] = ()
    """Gateways that are asked for a whole report; `*`: all of them."""
    asks_knowledge: bool = False
    """Whether one of the others is asked for what it knows: cached prefixes, learned bandwidths, roles."""
    knowledge: tuple[PeerEvent, ...] = ()
    """A part of the answer to `asks_knowledge`."""
    knowledge_ends: bool = False
    """Whether it is the last part."""
    admissions: AdmissionCounts | None = None
    """Counts that have changed since the report before; always in a whole report, if limits hold together."""
    usage: UsageCounts | None = None
    """Charges that have changed since the report before; always in a whole report."""


class PeerReported(msgspec.Struct, frozen=True, tag="peer_reported"):
    """Another gateway of this cluster has reported."""

    at: float
    report: PeerReport


class PeerLost(msgspec.Struct, frozen=True, tag="peer_lost"):
    """Another gateway of this cluster has not reported for the time of its lease: its bookings are released."""

    at: float
    gateway: str


Event: TypeAlias = (
    Arrived
    | PrefillFinished
    | TransferFinished
    | Admitted
    | Finished
    | PrefillFailed
    | DecodeFailed
    | Served
    | InstanceDown
    | InstanceUp
    | RoleSwitched
    | CopyFinished
    | ReadFinished
    | ReviewDue
    | ScalingDue
    | ScaleEnded
    | ThresholdKnown
    | CapacityLearned
    | BandwidthLearned
    | InstanceMeasured
    | AdaptersMeasured
    | SessionsServed
    | TransferMeasured
    | KvStored
    | KvEvicted
    | KvCleared
    | CongestionMeasured
    | LinksMeasured
    | ClusterChanged
    | PeerReported
    | PeerLost
)
