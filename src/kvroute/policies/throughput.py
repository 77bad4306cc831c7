"""Throughput of prefill across datacenters (PrfaaS 3.4): stage rates over routing thresholds and prefill/decode splits.

Arithmetic only: the offline planner and the live scheduler of roles both call it. It knows no queue and no variance
in time, so what it calls the most is what a real queue only approaches.
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
"""Seconds or bytes of prompts of these lengths (tokens, not always whole): an array in, one of the same shape out."""
Reading: TypeAlias = Literal["representative", "exact"]
"""What a stage's mean request costs. `representative`: the cost of the mean length, T(E[L | L > t]), as the paper
has it. `exact`: the mean cost, E[T(L) | L > t], which is more where T bends upwards."""
Binding: TypeAlias = Literal["prfaas_compute", "prfaas_egress", "pd_p", "pd_d"]
BINDINGS: tuple[Binding, ...] = get_args(Binding)
"""What limits the system; `StageRates.binding` holds positions in this tuple."""
PRFAAS_COMPUTE, PRFAAS_EGRESS, PD_P, PD_D = range(4)


@dataclass(frozen=True, slots=True)
class Mix:
    """Incremental prompt lengths (without the cached prefix), ascending, and the share of requests of each."""

    tokens: FloatArray
    share: FloatArray
    """Sums to 1."""

    @classmethod
    def of(cls, tokens: npt.ArrayLike, weights: npt.ArrayLike | None = None) -> Mix:
        """From lengths in any order, each with a weight (1 without): equal lengths are merged, no weight is dropped.

        Raises:
            InputError: no request, a length that is negative or not finite, or a weight that is so.
        """
        lengths = np.asarray(tokens, dtype=np.float64)
        mass = np.ones_like(lengths) if weights is None else np.asarray(weights, dtype=np.float64)
        if lengths.ndim != 1 or lengths.shape != mass.shape:
            raise InputError(f"{lengths.size} lengths and {mass.size} weights do not pair", mend="give one per length")
        wrong = ~(np.isfinite(lengths) & np.isfinite(mass)) | (lengths < 0) | (mass < 0)
        if wrong.any():
            shown = f"{lengths[wrong][0]:g} tokens with weight {mass[wrong][0]:g}"
            raise InputError(f"{shown} is not possible", mend="give finite numbers of 0 or more")
        if not mass.sum() > 0:
            raise InputError("the mix of lengths has no request", mend="give a length with a weight above 0")
        kept, where = np.unique(lengths[mass > 0], return_inverse=True)
        share = np.bincount(where, weights=mass[mass > 0], minlength=len(kept))
        return cls(kept, share / share.sum())

    @property
    def mean_tokens(self) -> float:
        """E[L]."""
        return float(self.tokens @ self.share)

    def thresholds(self) -> FloatArray:
        """Every threshold that makes a difference, ascending: 0 offloads everything (of more than 0 tokens), each
        length offloads what is longer, the longest nothing."""
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
    """[T] lengths of the mix that count as short."""

    @cached_property
    def long_share(self) -> FloatArray:
        """[T] p = P(L > t); exactly 0 and 1 at the ends."""
        return np.where(self.below == 0, 1.0, self._long(np.ones_like(self.mix.tokens)))

    @cached_property
    def short_share(self) -> FloatArray:
        """[T] 1 - p; exactly 0 and 1 at the ends."""
        return np.where(self.below == len(self.mix.tokens), 1.0, self._short(np.ones_like(self.mix.tokens)))

    @cached_property
    def long_tokens(self) -> FloatArray:
        """[T] E[L | L > t]; 0 where nothing is longer."""
        return _ratio(self._long(self.mix.tokens), self.long_share)

    @cached_property
    def short_tokens(self) -> FloatArray:
        """[T] E[L | L <= t]; 0 where nothing is as short."""
        return _ratio(self._short(self.mix.tokens), self.short_share)

    def long_mean(self, curve: Curve, reading: Reading) -> FloatArray:
        """[T] what `curve` says of a long request, in one of the two readings; 0 where there is none."""
        if reading == "representative":
            return np.where(self.long_share > 0, curve(self.long_tokens), 0.0)
        return _ratio(self._long(curve(self.mix.tokens)), self.long_share)

    def short_mean(self, curve: Curve, reading: Reading) -> FloatArray:
        """[T] what `curve` says of a short request, in one of the two readings; 0 where there is none."""
        if reading == "representative":
            return np.where(self.short_share > 0, curve(self.short_tokens), 0.0)
        return _ratio(self._short(curve(self.mix.tokens)), self.short_share)

    def _short(self, values: FloatArray) -> FloatArray:
        return np.asarray(np.concatenate(([0.0], np.cumsum(values * self.mix.share)))[self.below])

    def _long(self, values: FloatArray) -> FloatArray:
        """Summed from the far end, so that the last long request is not a difference of two large sums."""
        return np.asarray(np.concatenate(([0.0], np.cumsum((values * self.mix.share)[::-1])))[::-1][self.below])


@dataclass(frozen=True, slots=True)
class PrfaasCluster:
    """Instances that only prefill, behind one egress."""

    instances: int
    prefill_s: Curve
    egress_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class PdCluster:
    """Instances that prefill or decode, joined by a network that is never the limit."""

    prefill_s: Curve
    decode_per_s: float
    """Requests that one decode instance answers per second (`decode_per_s`)."""


@dataclass(frozen=True, slots=True)
class System:
    """Traffic, model and clusters.

    Long requests are spread over PrfaaS clusters as their rates allow, each cluster getting the same mix of lengths.
    A short request is decoded where it was prefilled; a long one in any PD cluster.
    """

    mix: Mix
    kv_bytes: Curve
    prfaas: tuple[PrfaasCluster, ...]
    pd: tuple[PdCluster, ...]
    reading: Reading = "representative"


@dataclass(frozen=True)
class StageRates:
    """The model on a grid of T thresholds and S splits; a stage that gets no request has rate 0 and limits nothing."""

    thresholds: FloatArray
    """[T] tokens."""
    n_prefill: IntArray
    """[S, PD clusters], and `n_decode` alike."""
    n_decode: IntArray
    cut: Cut
    long_kv_bytes: FloatArray
    """[T] S_kv of a long request."""
    prfaas_each_per_s: FloatArray
    """[PrfaaS clusters, T] eq. 3 of every cluster; in these proportions long requests are spread."""
    prfaas_egress_binds: npt.NDArray[np.bool_]
    """[T] more bandwidth for some PrfaaS cluster would raise `prfaas_per_s`."""
    pd_p_each_per_s: FloatArray
    """[PD clusters, T, S] eq. 4 of every cluster; with several, none counts beyond its own decode rate."""
    pd_d_each_per_s: FloatArray
    """[PD clusters, S] eq. 5 of every cluster."""

    @cached_property
    def prfaas_per_s(self) -> FloatArray:
        """[T] Theta_prfaas, the sum over clusters."""
        return np.asarray(self.prfaas_each_per_s.sum(axis=0))

    @cached_property
    def pd_p_per_s(self) -> FloatArray:
        """[T, S] Theta_pd-p, the sum over clusters."""
        return np.asarray(self.pd_p_each_per_s.sum(axis=0))

    @cached_property
    def pd_d_per_s(self) -> FloatArray:
        """[S] Theta_pd-d, the sum over clusters."""
        return np.asarray(self.pd_d_each_per_s.sum(axis=0))

    @cached_property
    def prfaas_bound_per_s(self) -> FloatArray:
        """[T] Theta_prfaas / p: what the system could serve if only PrfaaS limited it; inf where p = 0."""
        return _bound(self.prfaas_per_s, self.cut.long_share)

    @cached_property
    def pd_p_bound_per_s(self) -> FloatArray:
        """[T, S] Theta_pd-p / (1 - p); inf where p = 1."""
        return _bound(self.pd_p_per_s, self.cut.short_share[:, None])

    @cached_property
    def lambda_max_per_s(self) -> FloatArray:
        """[T, S] eq. 6: requests per second of the slowest stage."""
        return np.minimum(self.prefill_bound_per_s, self.pd_d_per_s)

    @cached_property
    def binding(self) -> npt.NDArray[np.int8]:
        """[T, S] positions in BINDINGS of what limits `lambda_max_per_s`; of equals, decode, then PD-P."""
        prfaas = np.where(self.prfaas_egress_binds, PRFAAS_EGRESS, PRFAAS_COMPUTE)[:, None]
        prefill = np.where(self.pd_p_bound_per_s <= self.prfaas_bound_per_s[:, None], PD_P, prfaas)
        return np.where(self.pd_d_per_s <= self.prefill_bound_per_s, PD_D, prefill).astype(np.int8)

    @cached_property
    def egress_bytes_per_s(self) -> FloatArray:
        """[T, S] KV bytes that leave the PrfaaS clusters at `lambda_max_per_s`."""
        return self.lambda_max_per_s * (self.cut.long_share * self.long_kv_bytes)[:, None]

    @cached_property
    def prefill_bound_per_s(self) -> FloatArray:
        """[T, S] what the system could serve if decode never limited it."""
        return np.minimum(self.prfaas_bound_per_s[:, None], self.pd_p_bound_per_s)

    def best(self) -> tuple[int, int]:
        """(threshold, split) positions of the highest rate.

        Of equal rates the one with the most room in its prefill stages, then with the least egress, then the lower
        split: where decode is the limit many thresholds serve the same, and the balanced one stays apart from both
        cliffs.
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

    With several PD clusters the closed form stays exact: short requests need prefill and decode in one cluster, at
    most min(p_j, d_j) in cluster j; the long ones fill what decode is left anywhere.
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
    """Every way to divide each PD cluster's instances: (n_prefill, n_decode), [S, PD clusters]; S is the product of
    (instances + 1)."""
    n_prefill = np.indices([count + 1 for count in instances], dtype=np.int64).reshape(len(instances), -1).T
    return n_prefill, np.array(instances, dtype=np.int64) - n_prefill


def prefill_curve(time: PrefillTime) -> Curve:
    """Seconds of prompts with nothing cached."""
    return _between(lambda tokens: np.array([time.seconds(count) for count in tokens.tolist()]))


def kv_curve(model: Model) -> Curve:
    """KV bytes of prompts with nothing cached, the request-level state included."""
    return _between(model.kv_bytes)


def decode_per_s(batch_max: int, iteration_s: float, output_tokens: float) -> float:
    """Requests that one decode instance answers per second (PrfaaS eq. 5): BS_max / (T_decode * L_out)."""
    return batch_max / (iteration_s * output_tokens)


def _between(each: Callable[[IntArray], FloatArray]) -> Curve:
    """Mean lengths are not whole: straight lines between whole tokens."""

    def curve(tokens: FloatArray) -> FloatArray:
        whole = np.floor(tokens).astype(np.int64)
        part = tokens - whole
        below = each(whole)
        return below + part * (each(whole + 1) - below) if part.any() else below

    return curve


def _ratio(amount: FloatArray, per: FloatArray) -> FloatArray:
    """amount / per, and 0 where per is 0."""
    return np.asarray(np.divide(amount, per, out=np.zeros_like(per), where=per > 0))


def _rate(amount: npt.ArrayLike, each: FloatArray, share: FloatArray) -> FloatArray:
    """Requests per second of a stage that spends `each` of an `amount` per second; 0 where it gets no request or has
    nothing, inf where a request costs nothing."""
    have = np.asarray(amount, dtype=np.float64)
    rate_per_s = np.where((share > 0) & (have > 0), np.inf, np.zeros(np.broadcast_shapes(have.shape, each.shape)))
    np.divide(have, each, out=rate_per_s, where=each > 0)
    return rate_per_s


def _bound(rate_per_s: FloatArray, share: FloatArray) -> FloatArray:
    """rate / share, and inf where no request takes this way."""
    bound_per_s = np.full(np.broadcast_shapes(rate_per_s.shape, share.shape), np.inf)
    np.divide(rate_per_s, share, out=bound_per_s, where=share > 0)
    return bound_per_s
