"""Throughput of prefill across datacenters (PrfaaS 3.4): stage rates over routing thresholds and prefill/decode splits.

Arithmetic only, used by the offline planner and by the live role switches. It has no queues and no variance in time, so
its maximum rate is a limit that a real system only approaches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from kvroute.llm import Model
from kvroute.timing import PrefillTime
from kvroute.types import FloatArray, InputError, IntArray

Curve: TypeAlias = Callable[[FloatArray], FloatArray]
"""Seconds or bytes of prompts by length (tokens, not always whole): an array in, an array of the same shape out."""
Reading: TypeAlias = Literal["representative", "exact"]
"""How the mean cost of a request at a stage is computed. `representative`: T(E[L | L > t]), the cost of the mean
length, as in the paper. `exact`: E[T(L) | L > t], the mean cost, which is higher where T is convex."""
Binding: TypeAlias = Literal["prfaas_compute", "prfaas_egress", "pd_p", "pd_d"]
BINDINGS: tuple[Binding, ...] = get_args(Binding)
"""Stages that can limit the system; `StageRates.binding` holds positions in this tuple."""
PRFAAS_COMPUTE, PRFAAS_EGRESS, PD_P, PD_D = range(4)


@dataclass(frozen=True, slots=True)
class Mix:
    """Incremental prompt lengths (without the cached prefix), ascending, and the share of requests with each."""

    tokens: FloatArray
    share: FloatArray
    """Shares sum to 1."""

    @classmethod
    def of(cls, tokens: npt.ArrayLike, weights: npt.ArrayLike | None = None) -> Mix:
        """Build a mix from lengths in any order, each with a weight (default 1). Equal lengths are merged.

        Raises:
            InputError: no request, or a length or weight that is negative or not finite.
        """
        lengths = np.asarray(tokens, dtype=np.float64)
        mass = np.ones_like(lengths) if weights is None else np.asarray(weights, dtype=np.float64)
        if lengths.ndim != 1 or lengths.shape != mass.shape:
            raise InputError(
                f"{lengths.size} lengths but {mass.size} weights are given", hint="give one weight per length"
            )
        wrong = ~(np.isfinite(lengths) & np.isfinite(mass)) | (lengths < 0) | (mass < 0)
        if wrong.any():
            shown = f"{lengths[wrong][0]:g} tokens with weight {mass[wrong][0]:g}"
            raise InputError(f"{shown} is not valid", hint="give finite numbers of 0 or more")
        if not mass.sum() > 0:
            raise InputError("the mix of lengths has no request", hint="give a length with a weight above 0")
        kept, where = np.unique(lengths[mass > 0], return_inverse=True)
        share = np.bincount(where, weights=mass[mass > 0], minlength=len(kept))
        return cls(kept, share / share.sum())

    @property
    def mean_tokens(self) -> float:
        """E[L]."""
        return float(self.tokens @ self.share)

    def thresholds(self) -> FloatArray:
        """All thresholds that give different results, ascending: 0 offloads every request (of more than 0 tokens), each
        length offloads longer requests, the longest offloads none."""
        return np.unique(np.concatenate(([0.0], self.tokens)))

    def cut(self, thresholds: FloatArray) -> Cut:
        """Divide the requests at each threshold."""
        below = np.searchsorted(self.tokens, thresholds, side="right")
        return Cut(self, below)


@dataclass(frozen=True)
class Cut:
    """A mix divided at T thresholds: short requests have l <= t, long ones l > t (PrfaaS 3.3)."""

    mix: Mix
    below: npt.NDArray[np.intp]
    """Number of lengths of the mix that count as short, [T]."""

    @cached_property
    def long_share(self) -> FloatArray:
        """p = P(L > t), [T]; exactly 0 and 1 at the ends."""
        return np.where(self.below == 0, 1.0, self._long(np.ones_like(self.mix.tokens)))

    @cached_property
    def short_share(self) -> FloatArray:
        """1 - p, [T]; exactly 0 and 1 at the ends."""
        return np.where(self.below == len(self.mix.tokens), 1.0, self._short(np.ones_like(self.mix.tokens)))

    @cached_property
    def long_tokens(self) -> FloatArray:
        """E[L | L > t], [T]; 0 if no length is longer."""
        return _ratio(self._long(self.mix.tokens), self.long_share)

    @cached_property
    def short_tokens(self) -> FloatArray:
        """E[L | L <= t], [T]; 0 if no length is that short."""
        return _ratio(self._short(self.mix.tokens), self.short_share)

    def long_mean(self, curve: Curve, reading: Reading) -> FloatArray:
        """Mean of `curve` over long requests, [T], in one of the two readings; 0 if there are none."""
        if reading == "representative":
            return np.where(self.long_share > 0, curve(self.long_tokens), 0.0)
        return _ratio(self._long(curve(self.mix.tokens)), self.long_share)

    def short_mean(self, curve: Curve, reading: Reading) -> FloatArray:
        """Mean of `curve` over short requests, [T], in one of the two readings; 0 if there are none."""
        if reading == "representative":
            return np.where(self.short_share > 0, curve(self.short_tokens), 0.0)
        return _ratio(self._short(curve(self.mix.tokens)), self.short_share)

    def _short(self, values: FloatArray) -> FloatArray:
        return np.asarray(np.concatenate(([0.0], np.cumsum(values * self.mix.share)))[self.below])

    def _long(self, values: FloatArray) -> FloatArray:
        """Sum from the far end: the last long request must not be a difference of two large sums."""
        return np.asarray(np.concatenate(([0.0], np.cumsum((values * self.mix.share)[::-1])))[::-1][self.below])


@dataclass(frozen=True, slots=True)
class PrfaasCluster:
    """Instances that only prefill, behind one egress link."""

    instances: int
    prefill_s: Curve
    egress_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class PdCluster:
    """Instances that prefill or decode, in a network that is never the limit."""

    prefill_s: Curve
    decode_per_s: float
    """Requests that one decode instance completes per second (`decode_per_s`)."""


@dataclass(frozen=True, slots=True)
class System:
    """Traffic, model and clusters.

    Long requests are distributed over PrfaaS clusters in proportion to their rates; each cluster gets the same mix of
    lengths. A short request is decoded where it was prefilled, a long one in any PD cluster.
    """

    mix: Mix
    kv_bytes: Curve
    prfaas: tuple[PrfaasCluster, ...]
    pd: tuple[PdCluster, ...]
    reading: Reading = "representative"


@dataclass(frozen=True)
class StageRates:
    """The model on a grid of T thresholds and S splits. A stage without requests has rate 0 and is no limit."""

    thresholds: FloatArray
    """Thresholds in tokens, [T]."""
    n_prefill: IntArray
    """Instances by role, [S, PD clusters]; `n_decode` alike."""
    n_decode: IntArray
    cut: Cut
    long_kv_bytes: FloatArray
    """S_kv of a long request, [T]."""
    prfaas_each_per_s: FloatArray
    """Eq. 3 of every cluster, [PrfaaS clusters, T]; long requests are distributed in these proportions."""
    prfaas_egress_binds: npt.NDArray[np.bool_]
    """Whether more bandwidth for some PrfaaS cluster would raise `prfaas_per_s`, [T]."""
    pd_p_each_per_s: FloatArray
    """Eq. 4 of every cluster, [PD clusters, T, S]; with several clusters, each is limited to its own decode rate."""
    pd_d_each_per_s: FloatArray
    """Eq. 5 of every cluster, [PD clusters, S]."""

    @cached_property
    def prfaas_per_s(self) -> FloatArray:
        """Theta_prfaas, [T], the sum over clusters."""
        return np.asarray(self.prfaas_each_per_s.sum(axis=0))

    @cached_property
    def pd_p_per_s(self) -> FloatArray:
        """Theta_pd-p, [T, S], the sum over clusters."""
        return np.asarray(self.pd_p_each_per_s.sum(axis=0))

    @cached_property
    def pd_d_per_s(self) -> FloatArray:
        """Theta_pd-d, [S], the sum over clusters."""
        return np.asarray(self.pd_d_each_per_s.sum(axis=0))

    @cached_property
    def prfaas_bound_per_s(self) -> FloatArray:
        """Theta_prfaas / p, [T]: rate of the system if only PrfaaS limited it; inf where p = 0."""
        return _bound(self.prfaas_per_s, self.cut.long_share)

    @cached_property
    def pd_p_bound_per_s(self) -> FloatArray:
        """Theta_pd-p / (1 - p), [T, S]; inf where p = 1."""
        return _bound(self.pd_p_per_s, self.cut.short_share[:, None])

    @cached_property
    def lambda_max_per_s(self) -> FloatArray:
        """Eq. 6, [T, S]: requests per second of the slowest stage."""
        return np.minimum(self.prefill_bound_per_s, self.pd_d_per_s)

    @cached_property
    def binding(self) -> npt.NDArray[np.int8]:
        """Positions in BINDINGS of the stage that limits `lambda_max_per_s`, [T, S]; on a tie decode, then PD-P."""
        prfaas = np.where(self.prfaas_egress_binds, PRFAAS_EGRESS, PRFAAS_COMPUTE)[:, None]
        prefill = np.where(self.pd_p_bound_per_s <= self.prfaas_bound_per_s[:, None], PD_P, prfaas)
        return np.where(self.pd_d_per_s <= self.prefill_bound_per_s, PD_D, prefill).astype(np.int8)

    @cached_property
    def egress_bytes_per_s(self) -> FloatArray:
        """KV bytes per second that leave the PrfaaS clusters at `lambda_max_per_s`, [T, S]."""
        return self.lambda_max_per_s * (self.cut.long_share * self.long_kv_bytes)[:, None]

    @cached_property
    def prefill_bound_per_s(self) -> FloatArray:
        """Rate of the system if decode never limited it, [T, S]."""
        return np.minimum(self.prfaas_bound_per_s[:, None], self.pd_p_bound_per_s)

    def best(self) -> tuple[int, int]:
        """(threshold, split) positions of the highest rate.

        Ties are broken by the most spare rate in the prefill stages, then the least egress, then the lower split. If
        decode is the limit, many thresholds give the same rate; the balanced one is farthest from the limits of both
        prefill stages.
        """
        rate = self.lambda_max_per_s
        room = np.where(rate == rate.max(), self.prefill_bound_per_s, -np.inf)
        egress = np.where(room == room.max(), self.egress_bytes_per_s, np.inf)
        threshold, split = np.unravel_index(int(np.argmin(egress)), egress.shape)
        return int(threshold), int(split)


def stage_rates(system: System, thresholds: FloatArray, n_prefill: IntArray, n_decode: IntArray) -> StageRates:
    """Evaluate PrfaaS eq. 3 to 6 on a grid.

    Args:
        system: at least one PD cluster.
        thresholds: [T] tokens, finite; requests with more go to PrfaaS.
        n_prefill, n_decode: [S, PD clusters] instances in each role.

    With several PD clusters the closed form stays exact: short requests need prefill and decode in one cluster, at most
    min(p_j, d_j) in cluster j; the long ones use the remaining decode rate of any cluster.
    """
    assert n_prefill.shape == n_decode.shape == (len(n_prefill), len(system.pd))
    cut = system.mix.cut(thresholds)
    long_kv_bytes = cut.long_mean(system.kv_bytes, system.reading)
    prfaas_each_per_s = np.zeros((len(system.prfaas), len(thresholds)))
    egress_binds = np.zeros(len(thresholds), dtype=np.bool_)
    for index, source in enumerate(system.prfaas):
        compute_per_s = _rate(source.instances, cut.long_mean(source.prefill_s, system.reading), cut.long_share)
        egress_per_s = _rate(source.egress_bytes_per_s, long_kv_bytes, cut.long_share)
        limited = (egress_per_s < compute_per_s) & (long_kv_bytes > 0)
        prfaas_each_per_s[index] = np.where(limited, egress_per_s, compute_per_s)
        egress_binds |= limited
    pd_d_each_per_s = n_decode.T * np.array([[cluster.decode_per_s] for cluster in system.pd])
    pd_p_each_per_s = np.zeros((len(system.pd), len(thresholds), len(n_prefill)))
    for index, cluster in enumerate(system.pd):
        mean_s = cut.short_mean(cluster.prefill_s, system.reading)
        pd_p_each_per_s[index] = _rate(n_prefill[:, index], mean_s[:, None], cut.short_share[:, None])
    if len(system.pd) > 1:
        pd_p_each_per_s = np.minimum(pd_p_each_per_s, pd_d_each_per_s[:, None, :])
    return StageRates(
        thresholds=thresholds,
        n_prefill=n_prefill,
        n_decode=n_decode,
        cut=cut,
        long_kv_bytes=long_kv_bytes,
        prfaas_each_per_s=prfaas_each_per_s,
        prfaas_egress_binds=egress_binds,
        pd_p_each_per_s=pd_p_each_per_s,
        pd_d_each_per_s=pd_d_each_per_s,
    )


def splits(instances: Sequence[int]) -> tuple[IntArray, IntArray]:
    """All splits of each PD cluster's instances: (n_prefill, n_decode), [S, PD clusters]; S is the product of
    (instances + 1)."""
    n_prefill = np.indices([count + 1 for count in instances], dtype=np.int64).reshape(len(instances), -1).T
    return n_prefill, np.array(instances, dtype=np.int64) - n_prefill


def prefill_curve(time: PrefillTime) -> Curve:
    """Prefill seconds of prompts without a cached prefix."""
    return _between(lambda tokens: np.array([time.seconds(count) for count in tokens.tolist()]))


def kv_curve(model: Model) -> Curve:
    """KV bytes of prompts without a cached prefix, including the request-level state."""
    return _between(model.kv_bytes)


def decode_per_s(batch_max: int, iteration_s: float, output_tokens: float) -> float:
    """Requests that one decode instance completes per second (PrfaaS eq. 5): BS_max / (T_decode * L_out)."""
    return batch_max / (iteration_s * output_tokens)


def _between(of_tokens: Callable[[IntArray], FloatArray]) -> Curve:
    """Interpolate linearly between whole tokens, because mean lengths are not whole."""

    def curve(tokens: FloatArray) -> FloatArray:
        whole = np.floor(tokens).astype(np.int64)
        part = tokens - whole
        below = of_tokens(whole)
        return below + part * (of_tokens(whole + 1) - below) if part.any() else below

    return curve


def _ratio(amount: FloatArray, per: FloatArray) -> FloatArray:
    """amount / per, or 0 where per is 0."""
    return np.asarray(np.divide(amount, per, out=np.zeros_like(per), where=per > 0))


def _rate(amount: npt.ArrayLike, need: FloatArray, share: FloatArray) -> FloatArray:
    """Requests per second of a stage that uses `need` of an `amount` per second; 0 without requests or amount, inf if a
    request costs nothing."""
    have = np.asarray(amount, dtype=np.float64)
    rate_per_s = np.where((share > 0) & (have > 0), np.inf, np.zeros(np.broadcast_shapes(have.shape, need.shape)))
    np.divide(have, need, out=rate_per_s, where=need > 0)
    return rate_per_s


def _bound(rate_per_s: FloatArray, share: FloatArray) -> FloatArray:
    """rate / share, or inf where no request uses the stage."""
    bound_per_s = np.full(np.broadcast_shapes(rate_per_s.shape, share.shape), np.inf)
    np.divide(rate_per_s, share, out=bound_per_s, where=share > 0)
    return bound_per_s
