"""Bandwidth learned from the router's own transfers: measured over predicted bandwidth, by tier and by pair.

The inputs are bytes and seconds, and the prediction of the oracle's formula at that time; no engine clock and no true
network state is used. It stores ratios and not bandwidths, so telemetry and own transfers are never counted twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvroute.slots import Slots
from kvroute.types import TIER_COUNT, BoolArray, FloatArray, InputError, IntArray, RatioLearned, TierArray

RATIO_MIN, RATIO_MAX = 0.01, 4.0
"""Bounds of a measured ratio. They keep every cost finite and every path from looking free."""
KV_BYTES_MIN = 65_536
"""Mean size of a transfer below which a measurement shows set-up time instead of bandwidth."""
LATENCIES_MIN = 2.0
"""Minimum mean duration of a transfer as a multiple of the base latency, for the same reason."""
_WEIGHT = 0.2
"""Weight of one transfer in the running averages."""
_WEIGHT_MAX = 0.5
"""Maximum weight of all transfers that are reported at once."""
_STEP_MAX = math.log(4.0)
"""Bound of the log difference between a measurement and its average. It moves a tier by a factor of two at most, and a
pair by two more."""
_TIER_TRANSFERS = 4.0
"""Number of transfers after which a pair's own average counts as much as its tier's."""


class _Ratios:
    """Averages of log ratios that shrink towards zero while there is little data and when the data is old."""

    def __init__(self, count: int, prior_transfers: float, stale_after_s: float | None) -> None:
        self._prior_transfers = prior_transfers
        self._stale_after_s = stale_after_s
        self._log: FloatArray = np.zeros(count)
        self._transfers: FloatArray = np.zeros(count)
        self._at: FloatArray = np.full(count, np.inf)
        """Time of the last measurement; inf if there is none, so it does not age."""
        self._ratio: FloatArray = np.ones(count)
        self._oldest_at = math.inf

    @property
    def measured(self) -> BoolArray:
        """Mask of the averages that have at least one measurement."""
        seen: BoolArray = self._transfers > 0
        return seen

    def learn(self, at: float, index: int, log_ratio: float, transfers: int) -> None:
        """Move one average towards a measurement. The change of the average and of its effective ratio is bounded."""
        fading = self._fading(at, float(self._at[index]))
        before, believed = _faded(float(self._log[index]), fading), _faded(math.log(self._ratio[index]), fading)
        surprise = min(max(log_ratio - before, -_STEP_MAX), _STEP_MAX)
        weight = min(1.0 - (1.0 - _WEIGHT) ** transfers, _WEIGHT_MAX)
        seen = self._transfers[index] * fading + transfers
        self._log[index], self._transfers[index] = before + weight * surprise, seen
        step_max = _WEIGHT_MAX * _STEP_MAX
        shrunk = self._log[index] * seen / (seen + self._prior_transfers)
        self._ratio[index] = math.exp(min(max(shrunk, believed - step_max), believed + step_max))
        self._at[index] = at if math.isinf(self._at[index]) else max(at, self._at[index])
        self._oldest_at = float(self._at.min())

    def at(self, at: float) -> FloatArray:
        """All ratios at this time, as arrays that are never written in place; 1 if nothing was measured."""
        stale_s = self._stale_after_s
        if stale_s is None or at - self._oldest_at <= stale_s:
            return self._ratio
        # Linear and not exponential: IEEE arithmetic gives the same result on every machine, numpy's exp does not.
        fading = np.minimum(np.maximum(2.0 - (at - self._at) / stale_s, 0.0), 1.0)
        believed: FloatArray = 1.0 + (self._ratio - 1.0) * fading
        return believed

    def known(self, index: int) -> RatioLearned | None:
        """All stored values of one average; None if nothing was measured."""
        if not self._transfers[index]:
            return None
        values = (self._log[index], self._transfers[index], self._ratio[index], self._at[index])
        return RatioLearned(*(float(value) for value in values))

    def resume(self, index: int, known: RatioLearned) -> None:
        """Restore the values of another average."""
        self._log[index], self._transfers[index] = known.log, known.transfers
        self._ratio[index], self._at[index] = known.ratio, known.at
        self._oldest_at = float(self._at.min())

    def forget(self, index: int) -> None:
        """Discard one average; there may be none."""
        if index < len(self._log) and self._transfers[index]:
            self._log[index], self._transfers[index], self._ratio[index], self._at[index] = 0.0, 0.0, 1.0, np.inf
            self._oldest_at = float(self._at.min())

    def grow(self, count: int) -> None:
        """Have at least `count` averages."""
        more = max(count, 2 * len(self._log)) - len(self._log)
        if count > len(self._log):
            self._log = np.concatenate([self._log, np.zeros(more)])
            self._transfers = np.concatenate([self._transfers, np.zeros(more)])
            self._at = np.concatenate([self._at, np.full(more, np.inf)])
            self._ratio = np.concatenate([self._ratio, np.ones(more)])

    def scale(self, factors: FloatArray) -> None:
        """Multiply the ratios, as the bandwidths that they refer to were divided by `factors`."""
        measured = self._transfers > 0
        self._log = np.where(measured, self._log + np.log(factors), self._log)
        self._ratio = np.where(measured, self._ratio * factors, self._ratio)

    def _fading(self, at: float, measured_at: float) -> float:
        if self._stale_after_s is None or math.isinf(measured_at):
            return 1.0
        return min(max(2.0 - (at - measured_at) / self._stale_after_s, 0.0), 1.0)


def _faded(log_ratio: float, fading: float) -> float:
    return log_ratio if fading == 1.0 else math.log(1.0 + (math.exp(log_ratio) - 1.0) * fading)


@dataclass(slots=True)
class _Company:
    """Counts of the transfers of one pair and of those beside them, since its last measurement."""

    beside: int = 0
    ended: int = 0


class LearnedBandwidth:
    """Effective bandwidth as measured by own KV transfers (the engines' counters of bytes and seconds).

    A measurement of s bytes in t seconds, with n own transfers beside it, implies B' = s (1 + n) / (t - latency) for a
    transfer alone, which is NetKV eq. 4 solved for B. Its ratio to B (1 - c), the prediction of the static map and of
    the telemetry at that time, goes into the average of its tier. The ratio over that average goes into the average of
    its pair. With correct maps and telemetry every ratio is 1. After `stale_after_s` a ratio fades linearly and is
    dropped at twice that age: a pair then uses its tier's ratio, and a tier the static map.
    """

    def __init__(
        self, tier: TierArray, bytes_per_s: FloatArray, latency_s: FloatArray, stale_after_s: float | None
    ) -> None:
        """Args: as in `NetworkOracle`."""
        self._tier = tier
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._stale_after_s = stale_after_s
        self._tiers = _Ratios(TIER_COUNT, 0.0, stale_after_s)
        self._slots = Slots(len(tier))
        self._pairs: dict[int, _Ratios] = {}
        """By slot of the source, the averages by slot of the target; created with the first measurement."""
        self._company: dict[tuple[int, int], _Company] = {}
        """By slots of source and target."""
        self._known = False

    def change(self, tier: TierArray, bytes_per_s: FloatArray, latency_s: FloatArray, before: IntArray) -> None:
        """Follow a change of the cluster: tiers and pairs that stay keep what was learned, in bytes per second. Args:
        as in `NetworkOracle`; `before` as in `Slots.change`."""
        if (bytes_per_s != self._bytes_per_s).any():
            self._tiers.scale(self._bytes_per_s / bytes_per_s)
        self._tier, self._bytes_per_s, self._latency_s = tier, bytes_per_s, latency_s
        left = set(self._slots.change(before)[0])
        for slot in left:
            self._pairs.pop(slot, None)
        for ratios in self._pairs.values():
            for slot in left:
                ratios.forget(slot)
        self._company = {pair: company for pair, company in self._company.items() if left.isdisjoint(pair)}

    def started(self, source: int, target: int, beside: int) -> None:
        """Record that an own transfer starts beside `beside` others from its source in its tier."""
        self._beside(source, target).beside += beside

    def ended(self, source: int, target: int, beside: int) -> None:
        """Record that an own transfer ends while `beside` others continue."""
        company = self._beside(source, target)
        company.beside += beside
        company.ended += 1

    def _beside(self, source: int, target: int) -> _Company:
        pair = self._slots.pair(source, target)
        company = self._company.get(pair)
        if company is None:
            company = self._company[pair] = _Company()
        return company

    def measured(
        self,
        at: float,
        source: int,
        target: int,
        kv_bytes: float,
        seconds: float,
        transfers: int,
        congestion: float,
        in_flight: int,
    ) -> None:
        """Process the sums over some transfers of a pair.

        Args:
            at: time of the report.
            source, target: indices of the instances.
            kv_bytes, seconds: summed over the transfers.
            transfers: number of transfers.
            congestion: congestion of the tier by telemetry at this time.
            in_flight: own transfers of this source and tier now; used if the end of no transfer was counted.

        Raises:
            InputError: a value is not finite or negative, or there is no transfer. The view does not change.
        """
        _check(kv_bytes, seconds, transfers)
        tier = int(self._tier[source, target])
        beside = self._mean_beside(source, target, in_flight)
        sending_s = seconds / transfers - self._latency_s[tier]
        if kv_bytes / transfers < KV_BYTES_MIN or sending_s <= (LATENCIES_MIN - 1.0) * self._latency_s[tier]:
            return
        lone_bytes_per_s = kv_bytes / transfers * (1.0 + beside) / float(sending_s)
        ratio = lone_bytes_per_s / (float(self._bytes_per_s[tier]) * (1.0 - congestion))
        log_ratio = math.log(min(max(ratio, RATIO_MIN), RATIO_MAX))
        self._known = True
        self._tiers.learn(at, tier, log_ratio, transfers)
        self._of(source).learn(at, self._slots.slot(target), log_ratio - math.log(self._tiers.at(at)[tier]), transfers)

    def _mean_beside(self, source: int, target: int, in_flight: int) -> float:
        """Mean number of own transfers beside one of this pair, over those that ended since its last measurement.

        It adds the transfers found at the start and those left at the end. This is exact if transfers of equal size
        share a link from start to end, and correct on average if they start and end at random. In between, a transfer
        that overlaps others only for a part of its time counts them in full.
        """
        company = self._company.pop(self._slots.pair(source, target), None)
        if company is None or not company.ended:
            return float(max(in_flight - 1, 0))
        return company.beside / company.ended

    def known(self) -> tuple[tuple[RatioLearned | None, ...], list[tuple[int, int, RatioLearned]]]:
        """All stored values by tier, and by source and target. Changes nothing."""
        tiers = tuple(self._tiers.known(tier) for tier in range(TIER_COUNT))
        index = self._slots.indices.tolist()
        pairs = [
            (index[source], index[target], known)
            for source, ratios in self._pairs.items()
            for target in np.flatnonzero(ratios.measured).tolist()
            if (known := ratios.known(target)) is not None
        ]
        return tiers, sorted(pairs, key=lambda pair: pair[:2])

    def resume(self, tiers: Sequence[RatioLearned | None], pairs: Iterable[tuple[int, int, RatioLearned]]) -> None:
        """Restore what another instance has learned (`known`). Raises InputError if it does not fit."""
        pairs = list(pairs)
        if len(tiers) != TIER_COUNT:
            raise InputError(
                f"{len(tiers)} tiers are given",
                where="tiers",
                hint=f"give {TIER_COUNT} values, null for an unmeasured tier",
            )
        for known in (*(tier for tier in tiers if tier is not None), *(pair[2] for pair in pairs)):
            numbers = (known.log, known.transfers, known.ratio, known.at)
            if not (all(map(math.isfinite, numbers)) and known.transfers > 0 and known.ratio > 0):
                raise InputError(
                    "a learned ratio is not positive and finite", where="tiers, pairs", hint="give finite numbers"
                )
        for number, tier in enumerate(tiers):
            if tier is not None:
                self._known = True
                self._tiers.resume(number, tier)
        for source, target, known in pairs:
            self._known = True
            self._of(source).resume(self._slots.slot(target), known)

    def _of(self, source: int) -> _Ratios:
        slot = self._slots.slot(source)
        pairs = self._pairs.get(slot)
        if pairs is None:
            pairs = self._pairs[slot] = _Ratios(self._slots.count, _TIER_TRANSFERS, self._stale_after_s)
        pairs.grow(self._slots.count)
        return pairs

    def tier_ratio(self, at: float) -> tuple[float | None, ...]:
        """Measured over nominal bandwidth by tier, for displays; None if nothing was measured."""
        ratios = self._tiers.at(at).tolist()
        return tuple(r if seen else None for r, seen in zip(ratios, self._tiers.measured.tolist(), strict=True))

    def bytes_per_s(self, source: int, targets: IntArray, tier: TierArray, at: float) -> FloatArray | None:
        """Rate of a transfer alone from `source` on an idle network, [m]; None while nothing has been measured.

        Args:
            source: index of the prefill instance.
            targets: [m] indices of the candidates.
            tier: [m] their tiers relative to the source.
            at: time of the call.
        """
        if not self._known:
            return None
        slot = self._slots.slot(source)
        ratio = self._tiers.at(at).take(tier)
        if slot in self._pairs:
            pair_ratio = self._of(source).at(at).take(self._slots.slots(targets))
            ratio = np.minimum(np.maximum(ratio * pair_ratio, RATIO_MIN), RATIO_MAX)
        lone: FloatArray = self._bytes_per_s.take(tier) * ratio
        return lone


def _check(kv_bytes: float, seconds: float, transfers: int) -> None:
    for value, where in ((kv_bytes, "kv_bytes"), (seconds, "seconds")):
        if not 0 <= value < math.inf:
            raise InputError(f"{value} is not a measurement", where=where, hint="give a finite number of 0 or more")
    if transfers < 1:
        raise InputError(f"{transfers} transfers", where="transfers", hint="give 1 or more")
