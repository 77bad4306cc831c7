"""How many instances prefill and how many decode: the long-term part of PrfaaS 3.4.3, from observed traffic.

It proposes role switches; the caller drains and switches the instances. It applies the model in `throughput` to the
observed traffic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeAlias

import msgspec
import numpy as np

from kvroute.control.state.traffic import TrafficLengths
from kvroute.policies.fleet.role_switch import (
    Home,
    LongTerm,
    PlannedSwitch,
    Stage,
    StageLoad,
    Verdict,
    busy_stages,
    judge,
)
from kvroute.policies.fleet.throughput import (
    BINDINGS,
    Binding,
    Curve,
    Mix,
    PdCluster,
    PrfaasCluster,
    StageRates,
    System,
    decode_per_s,
    stage_rates,
)
from kvroute.types import FloatArray, IntArray

Seen: TypeAlias = tuple[Mix, FloatArray, float]
"""Observed prompt lengths, the thresholds between them, and the mean length of a response."""
_SPLITS_MAX = 4096
"""Approximate maximum number of splits that a review evaluates."""


@dataclass(frozen=True, slots=True)
class SiteCapacity:
    """Present capacity of the system; `prfaas` holds the sites that are up, with their present egress bandwidth."""

    kv_bytes: Curve
    prfaas: tuple[PrfaasCluster, ...]
    homes: tuple[Home, ...]


class Review(msgspec.Struct, frozen=True, kw_only=True, tag="review"):
    """Result of a review, with the figures behind it."""

    at: float
    verdict: Verdict
    role_switches: tuple[PlannedSwitch, ...]
    threshold_tokens: float | None
    """Best threshold of the present split, or the one in use if it is about as good. None while no PrfaaS site is up:
    keep the old one for its return."""
    rate_per_s: float
    """Arrivals per second."""
    lambda_max_per_s: float
    """Throughput of the present split at its best threshold (PrfaaS eq. 6)."""
    best_per_s: float
    """Throughput of the best split at its best threshold."""
    gain: float
    """Share of the best split's throughput that the present split does not reach, 0 to 1."""
    binding: Binding
    """Stage that limits the present split by the model."""
    busy: tuple[Stage, ...]
    """Stages that are busy as observed."""
    n_prefill: tuple[int, ...]
    """Prefill instances of the best split, by home."""
    n_decode: tuple[int, ...]


class Allocation:
    """Observes traffic and searches the best threshold and split every `review_s`."""

    __slots__ = ("_reviewed_at", "_spec", "_start_requests", "traffic")

    def __init__(self, spec: LongTerm) -> None:
        self._spec = spec
        self.traffic = TrafficLengths(spec.window_s)
        self._reviewed_at: float | None = None
        self._start_requests = spec.start_requests

    def due(self, at: float) -> bool:
        """Whether a review would evaluate the traffic now. Cheap, so a driver may call it often."""
        if self._reviewed_at is not None and at - self._reviewed_at < self._spec.review_s:
            return False
        return self.traffic.requests(at) >= self._spec.requests_min and self.traffic.output_tokens(at) is not None

    def start_due(self, at: float) -> bool:
        """Whether to search a threshold before the first review: after `start_requests` arrivals, and again at each
        doubling. True once for each."""
        if self._reviewed_at is not None or self.traffic.requests(at) < self._start_requests:
            return False
        self._start_requests *= 2
        return True

    def threshold_tokens(self, at: float, capacity: SiteCapacity, base_tokens: float | None = None) -> float | None:
        """The best threshold for the present split, at the start and after a change of capacity. None if traffic or
        capacity do not give one; `base_tokens`, the threshold in use, if it is about as good."""
        seen = self._prompts(at)
        if seen is None or not capacity.homes or not capacity.prfaas:
            return None
        return self._threshold(seen, capacity, _rates(self._spec, seen, capacity, _present(capacity)), base_tokens)

    def limit_tokens(self, at: float, capacity: SiteCapacity) -> float:
        """The highest threshold with which the homes' prefill keeps up with the present arrivals, by the model; inf if
        there is no traffic or capacity to compute it from."""
        seen = self._prompts(at)
        if seen is None or not capacity.homes or not capacity.prfaas:
            return math.inf
        rates = _rates(self._spec, seen, capacity, _present(capacity))
        keeps_up = rates.pd_p_bound_per_s[:, 0] >= self.traffic.recent_per_s(at)
        return float(rates.thresholds[keeps_up].max(initial=0.0))

    def review(
        self,
        at: float,
        capacity: SiteCapacity,
        loads: Mapping[Stage, StageLoad],
        switching: int = 0,
        base_tokens: float | None = None,
        costs_s: Mapping[str, float] | None = None,
    ) -> Review | None:
        """Search the best threshold and split; None if no review is due or no home is up.

        Args:
            at: time in seconds, never decreasing.
            capacity: as it is now; instances in a role switch belong to neither role.
            loads: observed load of each stage; a missing stage counts as idle.
            switching: number of role switches in progress.
            base_tokens: threshold in use, kept if the best one is only slightly better; None: there is none.
            costs_s: cost of switching each instance, in seconds of one instance.
        """
        seen = self._seen(at) if self.due(at) and capacity.homes else None
        if seen is None:
            return None
        self._reviewed_at = at
        present, best = (
            _rates(self._spec, seen, capacity, n_prefill)
            for n_prefill in (_present(capacity), _splits(self._spec, capacity))
        )
        here, there = present.best(), best.best()
        now_per_s, best_per_s = float(present.lambda_max_per_s[here]), float(best.lambda_max_per_s[there])
        gain = max(1.0 - now_per_s / best_per_s, 0.0) if best_per_s else 0.0
        target = best.n_prefill[there[1]]
        peak_per_s, answered_per_s = self.traffic.peak_per_s(at), float(present.pd_d_per_s[0])
        used = min(peak_per_s / now_per_s, 1.0) if now_per_s else 1.0
        used_s = used * self.traffic.seen_s(at)  # traffic that has lasted this long is expected to last as long again
        if answered_per_s:  # slow prefill hides part of the arrivals from decode
            decode = loads.get("decode", StageLoad())
            loads = {**loads, "decode": replace(decode, peak=max(decode.peak, peak_per_s / answered_per_s))}
        verdict, role_switches = judge(self._spec, capacity.homes, target, gain, loads, switching, used_s, costs_s)
        return Review(
            at=at,
            verdict=verdict,
            role_switches=role_switches,
            threshold_tokens=self._threshold(seen, capacity, present, base_tokens) if capacity.prfaas else None,
            rate_per_s=self.traffic.rate_per_s(at),
            lambda_max_per_s=now_per_s,
            best_per_s=best_per_s,
            gain=gain,
            binding=BINDINGS[present.binding[here]],
            busy=busy_stages(self._spec, loads),
            n_prefill=tuple(target.tolist()),
            n_decode=tuple(best.n_decode[there[1]].tolist()),
        )

    def _threshold(self, seen: Seen, capacity: SiteCapacity, present: StageRates, base_tokens: float | None) -> float:
        """The best threshold of the present split, or the one in use if it is about as good."""
        best = present.best()
        if base_tokens is not None:
            mix, _, output_tokens = seen
            present_threshold = (mix, np.array([base_tokens]), output_tokens)
            kept = _prefill_per_s(_rates(self._spec, present_threshold, capacity, _present(capacity)))[0, 0]
            if kept > _prefill_per_s(present)[best] * (1.0 - self._spec.threshold_gain_min):
                return base_tokens
        return float(present.thresholds[best[0]])

    def _prompts(self, at: float) -> Seen | None:
        """Observed prompts. A threshold does not depend on response lengths, so these may be unknown."""
        mix = self.traffic.mix(at)
        return None if mix is None else (*mix, self.traffic.output_tokens(at) or 1.0)

    def _seen(self, at: float) -> Seen | None:
        mix, output_tokens = self.traffic.mix(at), self.traffic.output_tokens(at)
        return None if mix is None or output_tokens is None else (*mix, output_tokens)


def _rates(spec: LongTerm, seen: Seen, capacity: SiteCapacity, n_prefill: IntArray) -> StageRates:
    """Evaluate the model for the observed lengths and these splits, [S, homes]."""
    mix, thresholds, output_tokens = seen
    pd = tuple(
        PdCluster(home.prefill_s, decode_per_s(home.batch_max, home.iteration_s, output_tokens))
        for home in capacity.homes
    )
    instances = np.array([home.instances for home in capacity.homes])
    return stage_rates(
        System(mix, capacity.kv_bytes, capacity.prfaas, pd, spec.reading), thresholds, n_prefill, instances - n_prefill
    )


def _prefill_per_s(rates: StageRates) -> FloatArray:
    """Requests per second that the two prefill stages could serve, [T, S]; a threshold affects only these."""
    return np.minimum(rates.prfaas_bound_per_s[:, None], rates.pd_p_bound_per_s)


def _present(capacity: SiteCapacity) -> IntArray:
    return np.array([[len(home.prefill) for home in capacity.homes]], dtype=np.int64)


def _splits(spec: LongTerm, capacity: SiteCapacity) -> IntArray:
    """The present split, then all that keep the minimum of each role; with many homes, only splits near it."""
    reach = max(int(_SPLITS_MAX ** (1 / len(capacity.homes))) // 2, 1)
    ranges = []
    for home in capacity.homes:
        here = len(home.prefill)
        first, last = max(spec.prefill_min, here - reach), min(home.instances - spec.decode_min, here + reach)
        ranges.append(range(first, last + 1) if first <= last else range(here, here + 1))
    return np.concatenate([_present(capacity), np.array(list(product(*ranges)), dtype=np.int64)])
