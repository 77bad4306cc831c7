"""Exhaustive search over thresholds and splits (PrfaaS 3.4.2), for offloading and its alternatives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from kvroute.planner.throughput.problem import Problem, Site
from kvroute.policies.fleet.throughput import (
    BINDINGS,
    Binding,
    PdCluster,
    PrfaasCluster,
    StageRates,
    System,
    splits,
    stage_rates,
)
from kvroute.types import FloatArray, InputError, IntArray

Kind: TypeAlias = Literal["prfaas", "homogeneous", "naive", "home"]
KINDS: tuple[Kind, ...] = ("prfaas", "homogeneous", "naive")
"""The published kinds. `home` uses only the PD clusters of the plan, without any remote GPU."""
_MOST_SPLITS = 100_000
_CELLS_AT_ONCE = 2_000_000


class PrefillTtft(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill time in seconds over all requests, without queueing and transfer, as in the paper's tables."""

    mean: float
    p90: float


class PlannedDeployment(msgspec.Struct, frozen=True, kw_only=True):
    """The search result for one deployment, as `--json` prints it."""

    threshold_tokens: int | None
    """Longer prompts are offloaded; None if the deployment does not route by length."""
    n_prfaas: int
    """Number of PrfaaS instances, summed over all clusters; `n_prefill` and `n_decode` are sums likewise."""
    n_prefill: int
    n_decode: int
    offloaded_share: float
    egress_gbps: float
    """KV traffic out of the PrfaaS clusters at `lambda_max_per_s`, in Gbps (1e9 bits per second)."""
    stage_per_s: dict[str, float]
    """Theta of `prfaas`, `pd_p` and `pd_d` (eq. 3 to 5), in requests per second; 0 if a stage has no work."""
    lambda_max_per_s: float
    ttft_s: PrefillTtft
    binding: Binding


@dataclass(frozen=True)
class Optimum:
    """The best cell of a search, stored as a grid of one cell so that every array of the model is available."""

    prfaas: tuple[Site, ...]
    pd: tuple[Site, ...]
    system: System
    cell: StageRates

    @property
    def threshold_tokens(self) -> float:
        """Length in tokens above which prompts are offloaded."""
        return float(self.cell.thresholds[0])

    @property
    def lambda_max_per_s(self) -> float:
        """Maximum throughput at the optimum (eq. 6)."""
        return float(self.cell.lambda_max_per_s[0, 0])

    @property
    def made_of(self) -> str:
        """GPUs by hardware, such as "32 h200 + 64 h20"."""
        gpus: dict[str, int] = {}
        for site in (*self.prfaas, *self.pd):
            gpus[site.hardware.name] = gpus.get(site.hardware.name, 0) + site.gpus
        return " + ".join(f"{count:,} {name}" for name, count in gpus.items())

    @property
    def gpus(self) -> int:
        """Number of GPUs in all clusters."""
        return sum(site.gpus for site in (*self.prfaas, *self.pd))

    @property
    def price(self) -> float:
        """Price of all GPUs per hour."""
        return sum(site.price for site in (*self.prfaas, *self.pd))

    @property
    def requests_per_price(self) -> float:
        """Requests served per unit of price, at `lambda_max_per_s`."""
        return 3600 * self.lambda_max_per_s / self.price


def find(problem: Problem, kind: Kind = "prfaas") -> Optimum:
    """Search one deployment.

    `prfaas` tries every threshold and every split of every PD cluster. `home` tries every split of the PD clusters
    without offloading. `homogeneous` tries every split of one larger PD cluster without offloading. `naive` prefills
    everything in the PrfaaS clusters and decodes everything in the PD clusters (4: "all prefill on the H200s, all
    decode on the H20s").

    Raises:
        InputError: the deployment can serve no request, or there are too many splits to try.
    """
    pd, thresholds = _sites(problem, kind)[1], problem.lengths.thresholds
    if kind == "naive":
        n_decode = np.array([[site.instances for site in pd]], dtype=np.int64)
        return _best(problem, kind, thresholds[:1], np.zeros_like(n_decode), n_decode)
    if kind in ("homogeneous", "home"):
        thresholds = thresholds[-1:]
    count = int(np.prod([site.instances + 1 for site in pd], dtype=np.float64))
    if count > _MOST_SPLITS:
        what = f"{count:,} ways to split {len(pd)} PD clusters are too many to search"
        raise InputError(what, where=problem.name, hint="merge equal PD clusters into one")
    n_prefill, n_decode = splits([site.instances for site in pd])
    return _best(problem, kind, thresholds, n_prefill, n_decode)


def find_home(problem: Problem) -> Optimum | None:
    """Search the PD clusters alone; None if they cannot both prefill and decode."""
    if all(site.instances < 2 for site in problem.pd):
        return None
    return find(problem, "home")


def kept(problem: Problem, optimum: Optimum) -> StageRates:
    """Evaluate the threshold and split of an optimum for other traffic or links, in this problem: a grid of one
    cell."""
    system = _system(problem, problem.prfaas, problem.pd)
    return stage_rates(system, optimum.cell.thresholds, optimum.cell.n_prefill, optimum.cell.n_decode)


def deployment(optimum: Optimum, kind: Kind = "prfaas") -> PlannedDeployment:
    """Return the numbers of an optimum."""
    cell = optimum.cell
    return PlannedDeployment(
        threshold_tokens=int(optimum.threshold_tokens) if kind == "prfaas" else None,
        n_prfaas=sum(site.instances for site in optimum.prfaas),
        n_prefill=int(cell.n_prefill.sum()),
        n_decode=int(cell.n_decode.sum()),
        offloaded_share=float(cell.cut.long_share[0]),
        egress_gbps=float(cell.egress_bytes_per_s[0, 0]) * 8 / 1e9,
        stage_per_s={
            "prfaas": float(cell.prfaas_per_s[0]),
            "pd_p": float(cell.pd_p_per_s[0, 0]),
            "pd_d": float(cell.pd_d_per_s[0]),
        },
        lambda_max_per_s=optimum.lambda_max_per_s,
        ttft_s=_ttft(optimum),
        binding=BINDINGS[cell.binding[0, 0]],
    )


def _best(problem: Problem, kind: Kind, thresholds: FloatArray, n_prefill: IntArray, n_decode: IntArray) -> Optimum:
    """Return the best of all chunks of splits; on a tie the earlier one, as within a chunk."""
    prfaas, pd = _sites(problem, kind)
    system = _system(problem, prfaas, pd)
    at_once = max(_CELLS_AT_ONCE // (len(thresholds) * len(pd)), 1)
    best: tuple[tuple[float, float, float], float, int] | None = None
    for start in range(0, len(n_prefill), at_once):
        part = slice(start, start + at_once)
        rates = stage_rates(system, thresholds, n_prefill[part], n_decode[part])
        row, column = rates.best()
        rank = (
            float(rates.lambda_max_per_s[row, column]),
            float(rates.prefill_bound_per_s[row, column]),
            -float(rates.egress_bytes_per_s[row, column]),
        )
        if best is None or rank > best[0]:
            best = rank, float(thresholds[row]), start + column
    assert best is not None, "there is at least one split"
    if not best[0][0] > 0:
        what = f"the {kind} deployment cannot serve requests: a stage has no instance"
        raise InputError(what, where=problem.name, hint="add GPUs to the clusters that decode")
    chosen = slice(best[2], best[2] + 1)
    cell = stage_rates(system, np.array([best[1]]), n_prefill[chosen], n_decode[chosen])
    return Optimum(prfaas, pd, system, cell)


def _sites(problem: Problem, kind: Kind) -> tuple[tuple[Site, ...], tuple[Site, ...]]:
    """Return the PrfaaS and PD clusters of a deployment."""
    if kind == "homogeneous":
        return (), (problem.homogeneous,)
    return () if kind == "home" else problem.prfaas, problem.pd


def _system(problem: Problem, prfaas: tuple[Site, ...], pd: tuple[Site, ...]) -> System:
    return System(
        problem.lengths.mix,
        problem.kv_bytes,
        tuple(PrfaasCluster(site.instances, site.hardware.prefill_s, site.egress_bytes_per_s) for site in prfaas),
        tuple(PdCluster(site.hardware.prefill_s, site.hardware.decode_per_s) for site in pd),
        problem.reading,
    )


def _ttft(optimum: Optimum) -> PrefillTtft:
    """Return mean and p90 of the prefill seconds, each cluster weighted with its share of the requests."""
    cell, mix = optimum.cell, optimum.system.mix
    short = np.arange(len(mix.tokens)) < cell.cut.below[0]
    stages = (
        (optimum.prfaas, cell.prfaas_each_per_s[:, 0], ~short),
        (optimum.pd, cell.pd_p_each_per_s[:, 0, 0], short),
    )
    seconds, weights = [], []
    for sites, rates_per_s, mine in stages:
        for site, rate_per_s in zip(sites, rates_per_s.tolist(), strict=True):
            if rate_per_s > 0:
                seconds.append(site.hardware.prefill_s(mix.tokens[mine]))
                weights.append(mix.share[mine] * (rate_per_s / rates_per_s.sum()))
    all_s, share = np.concatenate(seconds), np.concatenate(weights)
    order = np.argsort(all_s, kind="stable")
    at = int(np.searchsorted(np.cumsum(share[order]), 0.9 - 1e-12))
    return PrefillTtft(mean=float(all_s @ share), p90=float(all_s[order][at]))
