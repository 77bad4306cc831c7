"""What is sent to the dashboard, and the load that gauges and dashboard read; no behaviour."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from kvroute.gateway.judgement import Judgement
from kvroute.gateway.layout import Layout
from kvroute.types import TIER_COUNT

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


class OracleLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What the network oracle believes now; tuples have length TIER_COUNT."""

    source: str = "static"
    age_s: float | None = None
    """Of the last telemetry; None: there was none."""
    congestion: tuple[float, ...] = (0.0,) * TIER_COUNT
    learned_ratio: tuple[float | None, ...] = (None,) * TIER_COUNT
    """Measured over static bandwidth; None: nothing measured."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The gauges of the whole gateway at one time."""

    in_flight: int = 0
    queued: int = 0
    connections: int = 0
    ready: bool = True
    draining: bool = False
    oracle: OracleLoad = OracleLoad()
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


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One look at everything."""

    layout: Layout
    tick: Tick
