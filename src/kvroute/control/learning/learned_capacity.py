"""What foresight learns from finished transfers and responses: each tier's capacity, and the mean response length.

It has no clock of its own.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from kvroute.policies.foresight.sight import TierLearned
from kvroute.policies.foresight.spec import ForesightSpec
from kvroute.types import SAME_POD, SAME_RACK, TIER_COUNT, CapacityLearned, FloatArray, InputError

_UNSEEN_S = 0.1
"""Delay of a transfer inside a rack that teaches nothing: engines start and report transfers between two steps."""


class LearnedCapacity:
    """Capacity of the tiers as measured by finished transfers: a factor on the map's nominal capacity.

    Each tier has a mean of log factors that fades with transfers and with time. Beyond the rack, a prior draws it to
    the mean of all tiers, and that mean to a factor of 1, the map as given. Inside a rack it is a factor on the speed
    of all NICs, which a prior draws to 1.
    """

    def __init__(self, spec: ForesightSpec) -> None:
        self._spec = spec
        self._log: FloatArray = np.zeros(TIER_COUNT)
        self._weight: FloatArray = np.zeros(TIER_COUNT)
        self.factor: FloatArray = np.ones(TIER_COUNT)
        self._transfers = [0] * TIER_COUNT
        self._last: list[int | None] = [None] * TIER_COUNT
        """Time of the last transfer that taught the tier, in whole seconds."""
        self._second = 0

    def grown_old(self, at: float) -> None:
        """Advance the time to `at`, never decreasing: older knowledge loses weight. Call it at least once a second."""
        passed_s = math.floor(at) - self._second
        if passed_s <= 0:
            return
        self._second += passed_s
        if self._weight.any():
            share = math.exp(-passed_s / self._spec.fading_s)
            self._log *= share
            self._weight *= share
            self._settle(self._log, self._weight, self.factor)

    def ended(
        self,
        tier: int,
        kv_bytes: float,
        predicted_bytes: float,
        limited_bytes: float,
        believed: float = 1.0,
        lasted_s: float = math.inf,
    ) -> None:
        """Learn from a transfer of `kv_bytes` that is complete.

        Args:
            tier: of the transfer.
            kv_bytes: its size.
            predicted_bytes: bytes that the model had sent by then. The model does not stop, so they may exceed the
                size.
            limited_bytes: those of them sent at the path's ceiling.
            believed: learned factor when the transfer started. The present factor would be wrong: transfers in
                flight together would each add what they all observed once.
            lasted_s: time that it took. Inside a rack a part of it counts as unseen.
        """
        spec = self._spec
        if tier < SAME_RACK or not (kv_bytes > 0 and predicted_bytes > 0):
            return
        if tier == SAME_RACK and predicted_bytes > kv_bytes:
            predicted_bytes = max(predicted_bytes * (1.0 - _UNSEEN_S / max(lasted_s, _UNSEEN_S)), kv_bytes)
        surprise = min(max(math.log(kv_bytes / predicted_bytes), -spec.surprise_max), spec.surprise_max)
        by_links = limited_bytes <= spec.path_limited_share * predicted_bytes
        if tier > SAME_RACK and by_links and surprise >= spec.late_log:
            return  # a NIC or a crowded uplink limited the rate: this teaches nothing about the paths
        target = math.log(believed) + surprise
        self._log[tier] = spec.remembered * self._log[tier] + target
        self._weight[tier] = spec.remembered * self._weight[tier] + 1.0
        self._transfers[tier] += 1
        self._last[tier] = self._second
        self._settle(self._log, self._weight, self.factor)

    def _settle(self, logs: FloatArray, weights: FloatArray, factor: FloatArray) -> None:
        spec = self._spec
        far = slice(SAME_POD, TIER_COUNT)
        pooled = float(logs[far].sum()) / (float(weights[far].sum()) + spec.pooled_prior_transfers)
        for tier in range(SAME_RACK, TIER_COUNT):
            prior = pooled if tier > SAME_RACK else 0.0
            log = (logs[tier] + spec.prior_transfers * prior) / (weights[tier] + spec.prior_transfers)
            factor[tier] = min(max(math.exp(log), spec.factor_min), spec.factor_max)

    def resume(self, at: float, known: CapacityLearned) -> None:
        """Restore what another instance had learned by this time (`known_at`).

        Raises:
            InputError: the number of tiers does not match, or a number is not finite.
        """
        numbers = (*known.log_sums, *known.weights)
        shape = (len(known.log_sums), len(known.weights), len(known.transfers), len(known.ages_s))
        if shape != (TIER_COUNT,) * 4 or not all(math.isfinite(number) for number in numbers):
            hint = f"give {TIER_COUNT} finite numbers of each kind"
            raise InputError(
                "the learned state has the wrong form", where="log_sums, weights, transfers, ages_s", hint=hint
            )
        self.grown_old(at)
        self._log[:], self._weight[:] = known.log_sums, known.weights
        self._transfers = list(known.transfers)
        self._last = [None if age_s is None else self._second - age_s for age_s in known.ages_s]
        self._settle(self._log, self._weight, self.factor)

    def known_at(self, at: float, answers: tuple[float, ...]) -> CapacityLearned:
        """What is known at this time, for another instance to restore. Changes nothing."""
        passed_s = max(math.floor(at) - self._second, 0)
        share = math.exp(-passed_s / self._spec.fading_s)
        second = self._second + passed_s
        return CapacityLearned(
            at,
            log_sums=tuple((self._log * share).tolist()),
            weights=tuple((self._weight * share).tolist()),
            transfers=tuple(self._transfers),
            ages_s=tuple(None if last is None else second - last for last in self._last),
            answers=answers,
        )

    def seen(self, at: float) -> tuple[TierLearned, ...]:
        """What is learned of each tier at this time, [TIER_COUNT], without `bytes_per_s`. Changes nothing: reading it
        must not affect later decisions, not even in the last digit."""
        passed_s = max(math.floor(at) - self._second, 0)
        share = math.exp(-passed_s / self._spec.fading_s)
        weights, factor = self._weight * share, self.factor.copy()
        if passed_s and self._weight.any():
            self._settle(self._log * share, weights, factor)
        second = self._second + passed_s
        ages_s = (None if last is None else float(second - last) for last in self._last)
        rows = zip(factor.tolist(), weights.tolist(), self._transfers, ages_s, strict=True)
        return tuple(TierLearned(*row) for row in rows)


class Answers:
    """Mean length of the last responses; the prior fills the window at the start."""

    def __init__(self, spec: ForesightSpec) -> None:
        window = int(spec.output_window)
        self._last = deque([float(spec.output_tokens)] * window, maxlen=window)
        self._sum = float(spec.output_tokens) * window
        self._prior = float(spec.output_tokens)
        self._seen = 0

    def finished(self, output_tokens: float) -> None:
        """Add the length of one response."""
        self._sum += output_tokens - self._last[0]
        self._last.append(float(output_tokens))
        self._seen = min(self._seen + 1, len(self._last))

    @property
    def last(self) -> tuple[float, ...]:
        """Lengths of the last responses, without those filled in by the prior."""
        return tuple(self._last)[len(self._last) - self._seen :]

    @property
    def short_tokens(self) -> float:
        """Length that 99 of 100 responses exceed, at least one token; before 100 have been seen the shortest one, and
        at most a tenth of the prior."""
        seen = sorted(self.last)
        if len(seen) >= 100:
            return max(seen[len(seen) // 100], 1.0)
        return max(min([*seen[:1], self._prior / 10]), 1.0)

    @property
    def mean_tokens(self) -> float:
        """Mean length of a response, at least one token."""
        return max(self._sum / len(self._last), 1.0)
