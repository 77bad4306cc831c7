"""Settings of a run beyond the cluster and the trace; every choice that the publications leave open is a field here."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from kvroute.flows import connection_bytes_per_s
from kvroute.flows.network import WEIGHT_MAX, WEIGHT_MIN
from kvroute.types import TIER_COUNT, InputError

Telemetry: TypeAlias = Literal["tier", "link", "none"]
TransferMode: TypeAlias = Literal["serial", "layerwise"]


class Background(msgspec.Struct, frozen=True, kw_only=True):
    """Background traffic: a share of the capacity of every link of a tier, steady or in bursts."""

    per_tier: tuple[float, ...] = (0.0,) * TIER_COUNT
    """Share in [0, 1) for tiers 0 to 4."""
    burst_per_tier: tuple[float, ...] = (0.0,) * TIER_COUNT
    """Share added during a burst."""
    burst_every_s: float = 0.0
    """Mean time between start and end of bursts (exponential, seeded); 0: no bursts."""

    def __post_init__(self) -> None:
        for name, shares in (("per_tier", self.per_tier), ("burst_per_tier", self.burst_per_tier)):
            if len(shares) != TIER_COUNT or any(not 0 <= share < 1 for share in shares):
                raise InputError(f"background.{name} is {shares}", hint=f"give {TIER_COUNT} shares in [0, 1)")
        if any(a + b >= 1 for a, b in zip(self.per_tier, self.burst_per_tier, strict=True)):
            raise InputError("background and burst of a tier add up to 1 or more", hint="keep their sum below 1")
        if not 0 <= self.burst_every_s < float("inf"):
            raise InputError(f"background.burst_every_s is {self.burst_every_s}", hint="give seconds, 0 for none")

    @classmethod
    def uniform(cls, share: float) -> Background:
        """Return the same share for every network tier (1 and up); NVLink inside a node carries no background
        traffic."""
        return cls(per_tier=(0.0,) + (share,) * (TIER_COUNT - 1))


class CapacityChange(msgspec.Struct, frozen=True, kw_only=True):
    """A change of a link's capacity: from `at_s` until its next change it has this share of its nominal capacity."""

    at_s: float
    link: str
    """A link's name, `A to B` for all links from A to B in one direction, or `wan` for every link between
    datacenters."""
    share: float
    """Share of the nominal capacity, 0 to 1; 0 cuts the link."""

    def __post_init__(self) -> None:
        if not 0 <= self.at_s < float("inf"):
            raise InputError(f"changes.at_s is {self.at_s}", hint="give finite seconds, 0 or more")
        if not 0 <= self.share <= 1:
            raise InputError(f"changes.share is {self.share}", hint="give a share of the nominal capacity, 0 to 1")


class Fluctuation(msgspec.Struct, frozen=True, kw_only=True):
    """A random fluctuation: at random times the link's capacity changes to a random share, uniform between two
    bounds."""

    link: str
    """Link name as in `CapacityChange`; all links that it selects change together."""
    every_s: float
    """Mean time between changes (exponential, seeded)."""
    share_min: float
    share_max: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.every_s < float("inf"):
            raise InputError(f"fluctuations.every_s is {self.every_s}", hint="give finite seconds above 0")
        if not 0 < self.share_min <= self.share_max <= 1:
            what = f"fluctuations move between {self.share_min} and {self.share_max}"
            raise InputError(what, hint="give 0 < share_min <= share_max <= 1; cuts belong to `changes`")


class WanTransport(msgspec.Struct, frozen=True, kw_only=True):
    """TCP connections of a transfer between datacenters; each is limited by its window and its packet loss."""

    connections: int = 8
    window_bytes: float = 4 * 2**20
    """TCP window in bytes: the smaller of the send and receive buffers."""
    loss: float = 0.0
    """Share of segments lost on the path, in [0, 1)."""
    mss_bytes: float = 1460.0

    def __post_init__(self) -> None:
        if self.connections < 1:
            raise InputError(f"wan.connections is {self.connections}", hint="give 1 or more")
        for name, size in (("window_bytes", self.window_bytes), ("mss_bytes", self.mss_bytes)):
            if not 0 < size < float("inf"):
                raise InputError(f"wan.{name} is {size}", hint="give bytes above 0")
        if not 0 <= self.loss < 1:
            raise InputError(f"wan.loss is {self.loss}", hint="give a share of segments in [0, 1)")

    def ceiling_bytes_per_s(self, latency_s: float) -> float:
        """Return the maximum rate of one connection on a path with this one-way latency; infinity if nothing limits
        it."""
        return connection_bytes_per_s(2 * latency_s, self.window_bytes, self.loss, self.mss_bytes)


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """Service level objective: a request is good when its first token and, if set, its time per output token are in
    time."""

    ttft_s: float = 5.0
    tpot_s: float | None = None

    def __post_init__(self) -> None:
        for name, limit_s in (("ttft_s", self.ttft_s), ("tpot_s", self.tpot_s)):
            if limit_s is not None and not 0 < limit_s < float("inf"):
                raise InputError(f"slo.{name} is {limit_s}", hint="give finite seconds above 0")


class QueueRule(msgspec.Struct, frozen=True, kw_only=True):
    """Kubernetes' horizontal autoscaler on queue lengths, with its default tolerance and stabilisation."""

    prefill: float
    """Requests per prefill instance, waiting and running, to which the number of instances is adjusted."""
    decode: float
    tolerance: float = 0.1
    scale_in_s: float = 300.0


class ScalingRun(msgspec.Struct, frozen=True, kw_only=True):
    """Instances that start and stop during a run. The cluster file lists as many as there may be."""

    prefill: int
    """Instances that serve at the start."""
    decode: int
    review_s: float = 15.0
    startup_s: float = 60.0
    """Time from the order of an instance to its first request."""
    queue: QueueRule | None = None
    """A rule instead of the decisions of the core, which needs `ControlSpec.scaling`."""

    def __post_init__(self) -> None:
        if not (0 < self.review_s < float("inf") and 0 <= self.startup_s < float("inf")):
            what = f"review_s is {self.review_s} and startup_s is {self.startup_s}"
            raise InputError(what, where="scaling", hint="give finite seconds")
        if self.queue is not None and not (self.queue.prefill > 0 and self.queue.decode > 0):
            raise InputError("a queue length is not above 0", where="scaling.queue", hint="give more than 0")


class SimSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one run."""

    prefill_queueing: bool = True
    """FIFO prefill, one prompt at a time; False: prefill is a pure delay (NetKV's Table II has no queue)."""
    decode_cache: bool = True
    """Decode instances keep the KV of finished requests and match it block by block."""
    background: Background = Background()
    oracle_refresh_s: float = 1.0
    """Period at which the router receives link telemetry (NetKV's Delta_oracle)."""
    separates_own_traffic: bool = True
    """Telemetry excludes the router's own transfers (marked by a DSCP class); False: it reports the sum."""
    telemetry: Telemetry = "tier"
    """Telemetry that the router receives: utilisation by tier, by link, or none. The background traffic exists in all
    cases."""
    reported: tuple[float, ...] | None = None
    """Fixed report of the background traffic by tier, independent of the real traffic; None: the real values."""
    measures_transfers: bool = False
    """At every refresh the router also receives the durations of its own transfers, as a gateway does from engine
    counters."""
    transfer: TransferMode = "serial"
    """"serial": a KV cache is sent after its prefill; "layerwise": layer by layer during prefill, if the target is
    known."""
    all_reduce_slice_s: float = 0.025
    """Longest slice of an iteration whose all-reduces share links: a slice computes, then runs its part of the
    all-reduces. There are at most as many slices as all-reduces."""
    all_reduce_weight: float = 1.0
    """Weight of each flow of an all-reduce on a shared link; a flow of a KV transfer has 1."""
    lock_step: bool = False
    """The data-parallel ranks of an engine run each iteration together, as with a mixture of experts; False: each rank
    iterates on its own, as with a dense model."""
    lock_step_tokens: int = 8192
    """Largest number of prompt tokens that a rank computes in one iteration of a lock-step (vLLM's
    `--max-num-batched-tokens`)."""
    wan: WanTransport | None = None
    """Transport of transfers between datacenters; None: like any other transfer."""
    changes: tuple[CapacityChange, ...] = ()
    """Cuts, degradations and recoveries, in any order."""
    fluctuations: tuple[Fluctuation, ...] = ()
    stall_s: float | None = None
    """Time after which a transfer without progress fails and its request starts again; None: it waits."""
    role_switch_s: float = 30.0
    """Time from an instance's last request in its old role to its first in the new one; it restarts with an empty
    cache."""
    review_s: float | None = None
    """Period at which the router reviews the split between prefill and decode; None: never."""
    scaling: ScalingRun | None = None
    """None: all instances serve all the time."""
    gateways: int = 1
    """Number of gateways; each has a core of its own and decides for its part of the requests."""
    sync_s: float | None = 0.0
    """Time from a step of a request until the other gateways know it; None: they never do and have only the engines'
    metrics."""
    slo: Slo = Slo()
    warmup_s: float = 0.0
    """Requests that arrive before this time are simulated and not counted."""
    measure_s: float | None = None
    """Requests that arrive later than warmup_s + measure_s are simulated and not counted; None: all count."""
    until_s: float | None = None
    """End of the run, even with requests in flight; None: run until the last request has ended."""

    def __post_init__(self) -> None:
        if not self.oracle_refresh_s > 0:
            raise InputError(f"oracle_refresh_s is {self.oracle_refresh_s}", hint="give seconds above 0")
        if self.reported is not None and (
            len(self.reported) != TIER_COUNT or any(not 0 <= share < 1 for share in self.reported)
        ):
            raise InputError(f"reported is {self.reported}", hint=f"give {TIER_COUNT} shares in [0, 1) or null")
        if self.lock_step_tokens < 1:
            raise InputError(f"lock_step_tokens is {self.lock_step_tokens}", hint="give 1 or more")
        if not 0 < self.all_reduce_slice_s < float("inf"):
            raise InputError(f"all_reduce_slice_s is {self.all_reduce_slice_s}", hint="give finite seconds above 0")
        if not WEIGHT_MIN <= self.all_reduce_weight <= WEIGHT_MAX:
            what = f"all_reduce_weight is {self.all_reduce_weight}"
            raise InputError(what, hint=f"give a weight from {WEIGHT_MIN:g} to {WEIGHT_MAX:g}")
        measure_s = 1.0 if self.measure_s is None else self.measure_s
        if not (0 <= self.warmup_s < float("inf") and 0 < measure_s < float("inf")):
            hint = "give finite warmup_s >= 0 and measure_s > 0"
            raise InputError("the measurement window is empty or has no end", hint=hint)
        for name, period_s in (("stall_s", self.stall_s), ("review_s", self.review_s)):
            if period_s is not None and not 0 < period_s < float("inf"):
                raise InputError(f"{name} is {period_s}", hint="give finite seconds above 0, or null")
        if self.gateways > 1 and self.scaling is not None:
            raise InputError("several gateways and autoscaling", where="scaling", hint="simulate one gateway")
        if self.gateways < 1 or not 0 <= (self.sync_s or 0.0) < float("inf"):
            what = f"{self.gateways} gateways with an exchange of {self.sync_s} s"
            raise InputError(what, hint="give 1 or more gateways, and finite seconds, 0 or more, or null")
        if not 0 <= self.role_switch_s < float("inf"):
            raise InputError(f"role_switch_s is {self.role_switch_s}", hint="give finite seconds, 0 or more")
        if self.until_s is not None and not self.until_s >= 0:
            raise InputError(f"until_s is {self.until_s}", hint="give seconds, 0 or more")
