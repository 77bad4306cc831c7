"""What is sent to the dashboard, and the load that gauges and dashboard read; no behaviour."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from kvroute.control import ShadowTally
from kvroute.gateway.judgement import Judgement
from kvroute.gateway.layout import Layout
from kvroute.policies import TierLearned
from kvroute.types import TIER_COUNT, Role

BreakerState: TypeAlias = Literal["closed", "half-open", "open"]


class InstanceLoad(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One instance as the gateway sees it now."""

    name: str
    up: bool = True
    """Its health check says so."""
    breaker: BreakerState = "closed"
    requests: int = 0
    """Of this gateway, on the instance now."""
    running: int = 0
    """By the engine's own word, other routers' requests included; else `requests`."""
    waiting: int = 0
    prefill_pending_s: float = 0.0
    kv_used_share: float | None = None
    scrape_age_s: float | None = None
    """None: never scraped."""
    role: Role | None = None
    """That it serves now; None: the layout's."""


class OracleLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What the network oracle believes now; tuples have length TIER_COUNT."""

    source: str = "static"
    age_s: float | None = None
    """Of the last telemetry; None: there was none."""
    congestion: tuple[float, ...] = (0.0,) * TIER_COUNT
    learned_ratio: tuple[float | None, ...] = (None,) * TIER_COUNT
    """Measured over static bandwidth; None: nothing measured."""


class ForesightLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What foresight has learned from own transfers."""

    policy: str
    """The acting one, else the one in the shadow."""
    tiers: tuple[TierLearned, ...]
    """Of length TIER_COUNT; those inside a node or a rack teach nothing."""


class SiteLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A datacenter that only prefills: who is sent there, and how full its way home is."""

    name: str
    threshold_tokens: float
    """Prompts with a longer part that is not cached are prefilled there."""
    base_tokens: float
    """Where the threshold is when all is quiet, as searched or given."""
    open: bool
    """Something is up there and the way carries something."""
    way: BreakerState
    """What own transfers say of the way."""
    utilisation: float
    """Of the way home, 0 to 1, by own bytes of late and by what telemetry says of others."""
    others: float
    """By others alone."""
    bytes_per_s: float
    """What the way carries, by the cluster file."""
    sent_bytes_per_s: float | None = None
    """Own KV on the way home, by the kernels that send it; None: they do not say, or nothing is sent, as the next."""
    sent_again_ratio: float | None = None
    """Of it, what had to be sent again."""
    queue_delay_s: float | None = None
    """Round trip beyond the shortest."""
    backlog_bytes: float
    """Own KV bytes booked and not landed."""
    backlog_s: float


class ReviewLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What the last search of threshold and roles found."""

    at: float
    verdict: str
    rate_per_s: float
    """Arrivals."""
    lambda_max_per_s: float
    """What the present split could serve at its best threshold."""
    best_per_s: float
    gain: float
    """Share of the best split's throughput that the present one misses."""
    binding: str
    n_prefill: tuple[int, ...]
    """Of the best split, by datacenter that decodes."""
    n_decode: tuple[int, ...]


class ConversionLoad(msgspec.Struct, frozen=True, kw_only=True):
    """An instance on its way to another role."""

    instance: str
    role: Role
    stage: Literal["draining", "hook"]


class OffloadLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill across datacenters, now."""

    sites: tuple[SiteLoad, ...]
    converts: bool
    """A hook is there."""
    conversions: tuple[ConversionLoad, ...] = ()
    roles: dict[str, Role] = {}
    """Of instances that serve another role than the cluster file says."""
    review: ReviewLoad | None = None


class PanicLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How many instances of one model that serve one role are available."""

    model: str
    role: Literal["prefill", "decode"]
    active: bool
    """Health checks and breakers are ignored, for too few are."""
    available: int
    instances: int
    """The instances that count: they are not held, and a process listens."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The gauges of the whole gateway at one time."""

    in_flight: int = 0
    queued: int = 0
    connections: int = 0
    ready: bool = True
    draining: bool = False
    oracle: OracleLoad = OracleLoad()
    foresight: ForesightLoad | None = None
    """None: neither the policy nor the one in the shadow is foresight."""
    offload: OffloadLoad | None = None
    """None: prefills do not leave their datacenter by plan."""
    panics: tuple[PanicLoad, ...] = ()
    instances: tuple[InstanceLoad, ...] = ()


class Ttft(msgspec.Struct, frozen=True, gc=False):
    """Where a stream's time to the first token went; the sum is what the client waited, transfer included."""

    queue_s: float
    """At the gateway's door."""
    prefill_s: float
    """From the prefill leg's start to its answer, waiting in the engine included."""
    transfer_s: float
    """KV transfer and waiting for a decode slot."""
    first_step_s: float = 0.0
    """0 where the engine does not tell it from the transfer."""

    @property
    def total_s(self) -> float:
        """TTFT."""
        return self.queue_s + self.prefill_s + self.transfer_s + self.first_step_s


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """A KV cache under way, or one that ended less than LINGER_S ago."""

    id: int
    request_id: int
    source: int
    """Position in `Layout.instances`, as `target`."""
    target: int
    tier: int
    kv_bytes: float
    age_s: float
    expected_s: float
    took_s: float | None
    """None: still under way."""


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """TTFT and tiers of one policy's requests within the window."""

    policy: str
    requests: int
    streams: int
    """Requests whose first token was seen; the times are theirs, and 0 where there are none."""
    ttft_p50_s: float
    ttft_p90_s: float
    part_mean_s: dict[str, float]
    part_p50_s: dict[str, float]
    part_p90_s: dict[str, float]
    tier_requests: tuple[int, ...]
    """Requests per tier of their transfer; those that stayed on one instance are in `local`."""
    tier_bytes: tuple[float, ...]
    local: int


class WanLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Own KV bytes on one link between datacenters, in the order of `Layout.wan`; (forward, backward) as it stands."""

    in_flight: tuple[int, int]
    """Transfers."""
    in_flight_bytes: tuple[float, float]
    utilisation: tuple[float, float]
    """By own bytes that have landed of late, 0 to about 1."""


class Tile(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What moves about one instance; sent as a list, for there may be hundreds."""

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


class Tick(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that moves; sent a few times a second while somebody looks."""

    at: float
    layout_id: int
    policy: str
    version: str
    load: Load
    """Without its instances."""
    instances: tuple[Tile, ...]
    """In the layout's order."""
    arrivals_per_s: float
    finishes_per_s: float
    rejects_per_s: float
    errors_per_s: float
    requests: int
    rejects: int
    transfers_under_way: int
    transfers: tuple[Transfer, ...]
    decisions: tuple[Judgement, ...]
    """The newest, oldest first."""
    window_s: float
    splits: tuple[Split, ...]
    wan: tuple[WanLoad, ...]
    shadow: ShadowTally | None
    """None: no policy is in the shadow."""
    offloaded_share: float | None
    """Of the prefills of the last `window_s`, those sent to a datacenter that only prefills; None: there were none."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One look at everything."""

    layout: Layout
    tick: Tick
