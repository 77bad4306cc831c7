"""Number of prefill and decode instances that a demand needs to meet its SLO: pure functions of numbers.

Prefill instances share the prompts, so together they are one queue with several servers. A decode instance holds the
requests that Little's law gives, within its batch, its KV memory and the time per output token. Both also need the
network's rate for the KV caches. No number of instances falls when the rate rises.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

import msgspec
import numpy as np

from kvroute.timing.queueing import DecodeLoad, waiting
from kvroute.types import DecodeSpec, FloatArray, InputError

ScaledRole: TypeAlias = Literal["prefill", "decode"]
SCALED_ROLES: tuple[ScaledRole, ...] = get_args(ScaledRole)
Reason: TypeAlias = Literal["compute", "ttft", "network", "batch", "memory", "tpot", "backlog", "minimum", "maximum"]
"""What sets the number of instances. `compute`: the utilisation of prefill instances; `ttft`: their queue; `network`:
the rate of KV caches; `batch` and `memory`: the slots and the KV memory of decode instances; `tpot`: the time of their
iterations; `backlog`: work that waits already; `minimum` and `maximum`: the configured bounds."""
REASONS: tuple[Reason, ...] = get_args(Reason)
REPLICAS_MAX = 10_000
"""No search goes beyond this number."""
_NEAR = 0.99
"""Part of the best possible attainment that is enough if the target is out of reach."""
_ALONE_PER_S = 1e-12
"""Rate at which no request meets another one."""


class ReplicaBounds(msgspec.Struct, frozen=True, kw_only=True):
    """Least and largest number of instances of a role."""

    least: int = 1
    most: int = REPLICAS_MAX

    def within(self, count: int) -> int:
        """Return the nearest allowed number."""
        return min(max(count, self.least), self.most)


class ReplicaTarget(msgspec.Struct, frozen=True, kw_only=True):
    """SLO and limits that the instances must keep."""

    ttft_s: float = 2.0
    tpot_s: float | None = None
    """None: any time per output token is good enough."""
    attainment: float = 0.9
    """Share of the requests that must meet both."""
    utilisation_max: float = 0.8
    """Utilisation of prefill instances, decode slots, KV memory and network that is never planned to be exceeded."""
    catch_up_s: float = 60.0
    """Time within which work that waits already is to be done, besides new work."""
    prefill: ReplicaBounds = ReplicaBounds()
    decode: ReplicaBounds = ReplicaBounds()

    def __post_init__(self) -> None:
        for name, seconds in (("ttft_s", self.ttft_s), ("tpot_s", self.tpot_s), ("catch_up_s", self.catch_up_s)):
            if seconds is not None:
                _check(name, seconds, 0.0 < seconds < math.inf, "a positive time")
        for name, share in (("attainment", self.attainment), ("utilisation_max", self.utilisation_max)):
            _check(name, share, 0.0 < share < 1.0, "a share between 0 and 1")
        for name, bounds in (("prefill", self.prefill), ("decode", self.decode)):
            right = 0 <= bounds.least <= bounds.most <= REPLICAS_MAX
            _check(name, f"{bounds.least} to {bounds.most}", right, f"0 <= min <= max <= {REPLICAS_MAX}")


def _check(name: str, value: float | str, right: bool, due: str) -> None:
    if not right:
        raise InputError(f"{value} is not {due}", where=f"autoscaling.{name}", hint=f"give {due}")


@dataclass(frozen=True, slots=True)
class ReplicaModel:
    """What one instance of each role is able to do."""

    bytes_per_s: float
    """KV bytes that its network cards send or receive per second, in all transfers together."""
    transfer_bytes_per_s: float
    """Rate of a single transfer."""
    latency_s: float
    """Time of a transfer without bytes."""
    decode: DecodeSpec
    batch_max: int
    kv_bytes: float
    """KV memory of a decode instance; 0: not known, and no limit."""
    stages: int = 1
    """Pipeline stages of a prefill instance, which work on different prompts at the same time."""
    overlaps: bool = False
    """Whether a KV cache is sent while it is computed, so that the transfer takes no time of its own."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests as observed or planned; arrays are [n] groups of requests with equal prefill times."""

    rate_per_s: float
    service_s: FloatArray
    """Time of a prefill instance for the uncached part of a prompt."""
    sent_bytes: FloatArray
    """KV bytes sent to the decode instance."""
    share: FloatArray
    """Shares sum to 1."""
    output_tokens: float
    context_tokens: float
    """Mean number of tokens of a request during its decode."""
    held_bytes: float
    """Mean KV memory of a request on a decode instance."""
    held_bytes2: float
    """Mean of its square."""
    arrival_cv2: float = 1.0
    """Squared coefficient of variation of the times between arrivals."""
    prefill_backlog_s: float = 0.0
    """Prefill work that waits, in seconds of one instance."""
    decode_backlog: float = 0.0
    """Requests that wait for a decode slot."""

    def at(self, rate_per_s: float) -> Demand:
        """Return the same requests at another rate."""
        return replace(self, rate_per_s=rate_per_s)


class RoleNeed(msgspec.Struct, frozen=True, kw_only=True):
    """Instances of one role, and what they are predicted to reach."""

    replicas: int
    reason: Reason
    """What sets this number."""
    utilisation: float
    """Utilisation of the most used resource; above the target's limit only if `maximum` is the reason."""
    attainment: float
    """Predicted share of requests for which this role meets its part of the SLO."""


class ReplicaNeed(msgspec.Struct, frozen=True, kw_only=True):
    """Instances of both roles."""

    prefill: RoleNeed
    decode: RoleNeed

    @property
    def attainment(self) -> float:
        """Predicted share of the requests that meet the SLO in both roles."""
        return self.prefill.attainment * self.decode.attainment

    def of(self, role: ScaledRole) -> RoleNeed:
        """Return the need of one role."""
        return self.prefill if role == "prefill" else self.decode


def needed_replicas(target: ReplicaTarget, demand: Demand, model: ReplicaModel) -> ReplicaNeed:
    """Return the least number of instances of each role that keep the target.

    Each role must reach the square root of the attainment, so that both together reach it. If an SLO cannot be reached
    by any number, because a prompt alone takes longer, almost the best possible attainment is enough.
    """
    return ReplicaNeed(prefill=_prefill(target, demand, model), decode=_decode(target, demand, model))


def predicted(target: ReplicaTarget, demand: Demand, model: ReplicaModel, prefill: int, decode: int) -> ReplicaNeed:
    """Return what given numbers of instances reach. The reasons are those of the most used resource."""
    fixed = msgspec.structs.replace(
        target, prefill=ReplicaBounds(least=prefill, most=prefill), decode=ReplicaBounds(least=decode, most=decode)
    )
    return needed_replicas(fixed, demand, model)


@dataclass(frozen=True, slots=True)
class _Stage:
    """One role: what a number of instances is used for, and reaches."""

    loads: dict[Reason, float]
    """Instances that each resource would use fully."""
    attainment: Callable[[int], float]
    best: float
    """Attainment of a request that has an instance for itself. It does not depend on the rate, so that no higher rate
    lowers the goal."""
    slo: Callable[[int], Reason]
    """The limit behind a low attainment."""
    backlog: float
    """Instances that are busy with work that waits already, for the time in which it is to be done."""

    def need(self, target: ReplicaTarget, bounds: ReplicaBounds) -> RoleNeed:
        reason = max(self.loads, key=lambda resource: self.loads[resource])
        count, load = max(math.ceil(self.loads[reason] / target.utilisation_max - 1e-9), 1), self.loads[reason]
        if not math.isfinite(load):
            count = REPLICAS_MAX
        catching_up = math.ceil(load + self.backlog - 1e-9) if math.isfinite(load) else 0
        if catching_up > count:
            count, reason = catching_up, "backlog"
        enough = min(math.sqrt(target.attainment), _NEAR * self.best)
        if self.attainment(count) < enough:
            reason, count = self.slo(count), _least(count, lambda tried: self.attainment(tried) >= enough)
        allowed = bounds.within(min(count, REPLICAS_MAX))
        if allowed != count:
            reason = "minimum" if allowed > count else "maximum"
        utilisation = load / allowed if allowed else (0.0 if load == 0.0 else math.inf)
        attained = self.attainment(allowed) if allowed else 0.0
        utilisation = min(utilisation, float(REPLICAS_MAX))
        return RoleNeed(replicas=allowed, reason=reason, utilisation=utilisation, attainment=attained)


def _least(low: int, enough: Callable[[int], bool]) -> int:
    """Return the least number above `low`, which is not enough, that is enough; at most REPLICAS_MAX."""
    high = low
    while high < REPLICAS_MAX:
        high = min(2 * high, REPLICAS_MAX)
        if enough(high):
            break
        low = high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _prefill(target: ReplicaTarget, demand: Demand, model: ReplicaModel) -> RoleNeed:
    stage_s = demand.service_s / model.stages
    sent = demand.rate_per_s * float(demand.share @ demand.sent_bytes) / model.bytes_per_s
    transfer_s = model.latency_s + (0.0 if model.overlaps else 1.0) * demand.sent_bytes / model.transfer_bytes_per_s
    first_s = model.decode.seconds(1, demand.context_tokens)
    left_s = target.ttft_s - demand.service_s - transfer_s - first_s

    def attainment(servers: int) -> float:
        queue = waiting(demand.rate_per_s, stage_s, demand.share, servers=servers, arrival_cv2=demand.arrival_cv2)
        return float(demand.share @ queue.within(left_s))

    loads: dict[Reason, float] = {"compute": demand.rate_per_s * float(demand.share @ stage_s), "network": sent}
    backlog = demand.prefill_backlog_s / model.stages / target.catch_up_s
    best = float(demand.share @ (left_s >= 0.0))
    return _Stage(loads, attainment, best, lambda _: "ttft", backlog).need(target, target.prefill)


def _decode(target: ReplicaTarget, demand: Demand, model: ReplicaModel) -> RoleNeed:
    instance = DecodeLoad(
        base_s=model.decode.base_s,
        per_request_s=model.decode.per_request_s + model.decode.per_context_token_s * demand.context_tokens,
        output_tokens=demand.output_tokens,
        batch_max=model.batch_max,
        kv_tokens=model.kv_bytes or math.inf,
        request_tokens=max(demand.held_bytes, 1.0),
        request_tokens2=max(demand.held_bytes2, 1.0),
        peakedness=1.0 + (demand.arrival_cv2 - 1.0) / 2.0,  # exact for exponential residence times (G/M/infinity)
    )

    def attainment(count: int) -> float:
        return _attained(instance, demand.rate_per_s / count, target.tpot_s)

    def slo(count: int) -> Reason:
        rate_per_s = demand.rate_per_s / count
        in_time = 1.0 if target.tpot_s is None else instance.tpot_attainment(rate_per_s, target.tpot_s)
        return "tpot" if in_time < instance.room(rate_per_s) else ("memory" if memory < model.batch_max else "batch")

    memory = instance.kv_tokens / instance.request_tokens
    slots: Reason = "memory" if memory < model.batch_max else "batch"
    batch = max(min(float(model.batch_max), memory), 1.0)
    each_per_s = batch / (demand.output_tokens * instance.step_s(batch))
    # Below its limit a batch is smaller than in proportion to the rate, so a share of the rate is at least a share
    # of the slots.
    loads: dict[Reason, float] = {
        slots: demand.rate_per_s / each_per_s,
        "network": demand.rate_per_s * float(demand.share @ demand.sent_bytes) / model.bytes_per_s,
    }
    backlog = demand.decode_backlog / (each_per_s * target.catch_up_s)
    best = _attained(instance, _ALONE_PER_S, target.tpot_s)
    return _Stage(loads, attainment, best, slo, backlog).need(target, target.decode)


def _attained(instance: DecodeLoad, rate_per_s: float, tpot_s: float | None) -> float:
    """Return the share of requests that find room at once and get their tokens in time."""
    in_time = 1.0 if tpot_s is None else instance.tpot_attainment(rate_per_s, tpot_s)
    return instance.room(rate_per_s) * in_time


def demand_of(
    rate_per_s: float,
    service_s: FloatArray,
    sent_bytes: FloatArray,
    held_bytes: FloatArray,
    output_tokens: float,
    context_tokens: float,
    arrival_cv2: float = 1.0,
) -> Demand:
    """Return the demand of requests with equal weights, one entry of each array for each request."""
    count = len(service_s)
    return Demand(
        rate_per_s=rate_per_s,
        service_s=service_s,
        sent_bytes=sent_bytes,
        share=np.full(count, 1.0 / count),
        output_tokens=max(output_tokens, 1.0),
        context_tokens=context_tokens,
        held_bytes=float(held_bytes.mean()),
        held_bytes2=float((held_bytes**2).mean()),
        arrival_cv2=arrival_cv2,
    )
