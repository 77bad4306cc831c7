"""Messages for the dashboard, and the load that gauges and dashboard read; no behaviour."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from kvroute.control import CalibrationRow, ShadowTally, SyncState
from kvroute.policies import TierLearned
from kvroute.serve.observe.decision_view import DecisionView
from kvroute.serve.observe.history import HistoryPoint
from kvroute.serve.observe.layout import ClusterLayout
from kvroute.types import TIER_COUNT, MeasuredBy, Replicas, Role

BreakerState: TypeAlias = Literal["closed", "half-open", "open"]


class InstanceLoad(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The gateway's current view of one instance."""

    name: str
    up: bool = True
    """Result of its health check."""
    breaker: BreakerState = "closed"
    requests: int = 0
    """Own requests in progress on the instance."""
    running: int = 0
    """Running requests that the engine reports, those of other routers included; else `requests`."""
    waiting: int = 0
    prefill_pending_s: float = 0.0
    storage_queue_s: float | None = None
    """Own reads in the storage queue of its node, in seconds; None: the cluster has no store."""
    kv_used_share: float | None = None
    scrape_age_s: float | None = None
    """None: never scraped."""
    role: Role | None = None
    """Current role; None: the role in the layout."""


class OracleLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Current state of the network oracle; tuples have length TIER_COUNT."""

    source: str = "static"
    age_s: float | None = None
    """Age of the last telemetry; None: there was none."""
    congestion: tuple[float, ...] = (0.0,) * TIER_COUNT
    learned_ratio: tuple[float | None, ...] = (None,) * TIER_COUNT
    """Measured over static bandwidth; None: not measured."""


class ForesightLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What the foresight policy has learned from own transfers."""

    policy: str
    """The active policy if it is foresight, else the shadow policy."""
    tiers: tuple[TierLearned, ...]
    """Tuple of length TIER_COUNT; nothing is learned from tiers inside a node or a rack."""


class SiteLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A prefill-only datacenter: which prompts are sent there, and the load of its WAN path."""

    name: str
    threshold_tokens: float
    """Prompts with a longer uncached part are prefilled there."""
    base_tokens: float
    """Threshold without congestion, as searched or given."""
    open: bool
    """Whether some instance there is up, and the path has capacity."""
    wan_path: BreakerState
    """State of the path's circuit breaker, by own transfers."""
    utilisation: float
    """Utilisation of the path, 0 to 1, by recent own bytes and by telemetry of other traffic."""
    others: float
    """Utilisation by other traffic alone."""
    bytes_per_s: float
    """Capacity of the path, by the cluster file."""
    sent_bytes_per_s: float | None = None
    """Throughput of own KV on the path, by TCP counters of the senders; None, here and for the next two: not reported,
    or nothing is sent."""
    sent_again_ratio: float | None = None
    """Share of the sent bytes that are retransmissions."""
    queue_delay_s: float | None = None
    """Longest round trip time beyond the shortest one."""
    backlog_bytes: float
    """Own KV bytes that are booked and not yet transferred."""
    backlog_s: float


class ReviewLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the last search of threshold and roles."""

    at: float
    verdict: str
    rate_per_s: float
    """Arrival rate."""
    lambda_max_per_s: float
    """Maximum rate of the current split at its best threshold."""
    best_per_s: float
    gain: float
    """Share of the best split's throughput that the current split misses."""
    binding: str
    n_prefill: tuple[int, ...]
    """Prefill instances of the best split, by datacenter that decodes; `n_decode` likewise."""
    n_decode: tuple[int, ...]


class RoleSwitchLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A role switch in progress."""

    instance: str
    role: Role
    stage: Literal["draining", "hook"]


class ScalingLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Desired numbers of instances, and instances that start or stop."""

    models: tuple[Replicas, ...] = ()
    """The last result for each model; empty in a gateway that leaves this to another one."""
    starting: tuple[str, ...] = ()
    stopping: tuple[str, ...] = ()
    stopped: tuple[str, ...] = ()
    """Instances that were stopped and have not been started since."""


class OffloadLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Current state of prefill across datacenters."""

    sites: tuple[SiteLoad, ...]
    switches_roles: bool
    """Whether a hook for role switches is configured."""
    role_switches: tuple[RoleSwitchLoad, ...] = ()
    roles: dict[str, Role] = {}
    """Current roles that differ from the cluster file, by instance."""
    review: ReviewLoad | None = None


class PanicLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Availability of the instances of one model that serve one role."""

    model: str
    role: Literal["prefill", "decode"]
    active: bool
    """Whether health checks and breakers are ignored because too few instances are available."""
    available: int
    instances: int
    """Instances that count: they are not held, and a process listens."""


class DiscoveryLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Discovered engines at one time."""

    age_s: float | None = None
    """Time since the last report of the source; None: there was none."""
    members: int = 0
    """Engines that are part of the cluster and that the source reports."""
    draining: int = 0
    """Engines that the source no longer reports, and that still have requests."""
    refused: tuple[tuple[str, str], ...] = ()
    """Name of each reported engine that cannot join, and why."""
    failures: tuple[str, ...] = ()
    """Why the last report may be out of date."""
    findings: dict[str, int] = {}
    """Engines that the source leaves out or doubts, by effect."""


class ReplicationLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The stream that this gateway shares with others, at one time."""

    gateway: str
    """Identifier of this process in the stream."""
    state: SyncState
    gateways: int
    """Number of other gateways whose leases have not expired."""
    bookings: int = 0
    """Number of their requests that the view counts."""
    problem: str = ""
    """Why there is no connection; empty: there is one, or none was tried."""


class GatewayStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The gauges of the whole gateway at one time."""

    in_flight: int = 0
    queued: int = 0
    connections: int = 0
    forwarded: int = 0
    """Streams whose chunks a thread forwards."""
    ready: bool = True
    draining: bool = False
    oracle: OracleLoad = OracleLoad()
    foresight: ForesightLoad | None = None
    """None: neither the active nor the shadow policy is foresight."""
    offload: OffloadLoad | None = None
    """None: the settings have no `offload` section."""
    scaling: ScalingLoad | None = None
    """None: the settings have no `autoscaling` section."""
    panics: tuple[PanicLoad, ...] = ()
    discovery: DiscoveryLoad | None = None
    """None: the cluster file has no `discovery` section."""
    replication: ReplicationLoad | None = None
    """None: the settings have no `replication` section."""
    waiting: dict[int, int] | None = None
    """Requests that wait for their turn to be placed, by priority; None: the settings have no classes."""
    deferred: int = 0
    """Requests that wait because their first token would come too late."""
    path_ratios: tuple[float | None, ...] = ()
    """By tier: lowest measured rate of a pair over that of the cluster file; None: no recent measurement."""
    instances: tuple[InstanceLoad, ...] = ()


class TtftBreakdown(msgspec.Struct, frozen=True, gc=False):
    """Parts of a stream's time to the first token; their sum is the client's waiting time, transfer included."""

    queue_s: float
    """Wait in the admission queue."""
    prefill_s: float
    """From the start of the prefill leg to its response, including the wait in the engine."""
    transfer_s: float
    """KV transfer and wait for a decode slot."""
    first_step_s: float = 0.0
    """0 if the engine does not separate it from the transfer."""

    @property
    def total_s(self) -> float:
        """Time to the first token."""
        return self.queue_s + self.prefill_s + self.transfer_s + self.first_step_s


class TransferView(msgspec.Struct, frozen=True, kw_only=True):
    """A KV transfer in progress, or one that ended less than LINGER_S ago."""

    id: int
    request_id: int
    source: int
    """Position in `ClusterLayout.instances`, as in `target`."""
    target: int
    tier: int
    kv_bytes: float
    age_s: float
    expected_s: float
    took_s: float | None
    """None: still in progress."""


class MeasuredPath(msgspec.Struct, frozen=True, kw_only=True):
    """How fast the latest KV transfers between two instances were, and what has measured them."""

    source: str
    target: str
    tier: int
    measured_by: MeasuredBy
    transfers: int
    """Number of measured transfers; later ones count more in the rate."""
    bytes_per_s: float
    """Rate of a transfer, while it shares its path with others."""
    map_bytes_per_s: float
    """Rate of a transfer alone, by the cluster file."""
    ratio: float
    """The first rate over the second one."""
    age_s: float
    """Time since the last measurement."""


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """TTFT and tiers of one policy's requests within the window."""

    policy: str
    requests: int
    streams: int
    """Requests whose first token was observed; the times are of these, and 0 if there are none."""
    ttft_p50_s: float
    ttft_p90_s: float
    part_mean_s: dict[str, float]
    part_p50_s: dict[str, float]
    part_p90_s: dict[str, float]
    tier_requests: tuple[int, ...]
    """Requests per tier of their transfer; requests that stayed on one instance are in `local`."""
    tier_bytes: tuple[float, ...]
    local: int


class WanLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Own KV bytes on one link between datacenters, in the order of `ClusterLayout.wan`; tuples are (forward,
    backward)."""

    in_flight: tuple[int, int]
    """Number of transfers."""
    in_flight_bytes: tuple[float, float]
    utilisation: tuple[float, float]
    """Utilisation by own bytes of recently completed transfers, 0 to about 1."""


class Tile(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Changing values of one instance; sent as a list to save space, as there may be hundreds."""

    up: int
    breaker: int
    """0 closed, 1 half-open, 2 open."""
    requests: int
    running: int
    waiting: int
    load: float
    """In [0, 1], for the colour: a full batch, or a second of pending prefill, is 1."""
    prefill_pending_s: float
    kv_used_share: float | None
    scrape_age_s: float | None
    storage_queue_s: float | None
    """None: the cluster has no store."""


class DashboardUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """All changing values; sent a few times per second while a dashboard is open."""

    at: float
    layout_id: int
    policy: str
    version: str
    load: GatewayStatus
    """Without `instances`."""
    instances: tuple[Tile, ...]
    """Instances in the layout's order."""
    arrivals_per_s: float
    finishes_per_s: float
    rejects_per_s: float
    errors_per_s: float
    requests: int
    rejects: int
    transfers_in_flight: int
    transfers: tuple[TransferView, ...]
    decisions: tuple[DecisionView, ...]
    """The newest decisions, oldest first."""
    window_s: float
    splits: tuple[Split, ...]
    wan: tuple[WanLoad, ...]
    paths: tuple[MeasuredPath, ...]
    """The measured pairs of instances that are slowest compared with the cluster file, the slowest first."""
    shadow: ShadowTally | None
    """None: there is no shadow policy."""
    offloaded_share: float | None
    """Share of the prefills of the last `window_s` sent to prefill-only datacenters; None: no prefills."""
    history: HistoryPoint | None
    """The newest point of the history; None before the first step has ended."""
    calibration: tuple[CalibrationRow, ...] = ()
    """Predicted and actual TTFT of the last 2,048 streams that were predicted, by deciles of the prediction."""


class Distributions(msgspec.Struct, frozen=True, kw_only=True):
    """Times behind the percentiles of a snapshot, each as `distribution.counts_of` returns it."""

    splits: dict[str, tuple[bytes, ...]]
    """By policy: those of the TTFT and of its parts, in their order."""
    history: tuple[bytes, ...]
    """TTFT of each point."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The layout, all changing values, and the last 15 minutes."""

    layout: ClusterLayout
    tick: DashboardUpdate
    history: tuple[HistoryPoint, ...]
    """Oldest first."""
    distributions: Distributions | None = None
    """Sent by a worker to its parent process, which adds those of all workers; else None."""
