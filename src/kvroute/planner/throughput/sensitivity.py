"""Sensitivity of the optimum to bandwidth, the price of PrfaaS GPUs, and the mean and spread of prompt lengths."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from kvroute.planner.throughput.problem import Problem
from kvroute.planner.throughput.search import Kind, Optimum, deployment, find, kept
from kvroute.policies.fleet.throughput import Binding

EGRESS_FACTORS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0)
PRICE_FACTORS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
LENGTH_FACTORS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
SPREAD_FACTORS = (0.5, 0.75, 1.0, 1.25, 1.5)


class EgressPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The optimum with another egress bandwidth of the PrfaaS clusters."""

    factor: float
    available_gbps: float
    threshold_tokens: int
    n_prefill: int
    egress_gbps: float
    lambda_max_per_s: float
    kept_per_s: float
    """Throughput with the plan's own threshold and split."""
    binding: Binding


class PricePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Requests per unit of price if a PrfaaS GPU cost `factor` times the price in the plan."""

    factor: float
    requests_per_price: dict[Kind, float]


class LengthPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The optimum with every prompt longer by `factor`, or with lengths `factor` times as far apart."""

    factor: float
    mean_tokens: float
    threshold_tokens: int
    n_prefill: int
    lambda_max_per_s: float
    kept_per_s: float
    """Throughput with the plan's own threshold and split."""
    homogeneous_per_s: float
    """Throughput of the homogeneous alternative with its best split."""
    binding: Binding


class Sensitivity(msgspec.Struct, frozen=True, kw_only=True):
    """Results of changing one input at a time and keeping all others as in the plan."""

    egress: tuple[EgressPoint, ...]
    price: tuple[PricePoint, ...]
    break_even_factor: float
    """The PrfaaS price factor at which offloading serves as many requests per price as the homogeneous alternative.
    Offloading is cheaper below it. A negative value means that offloading costs more even with free PrfaaS GPUs."""
    lengths: tuple[LengthPoint, ...]
    """One point per factor, without the factors for which the extrapolated prefill time of the shortest prompts is not
    above 0."""
    spread: tuple[LengthPoint, ...]
    """Points with a changed spread and the same mean, with the same exception as `lengths`."""


def sensitivity(problem: Problem, optima: dict[Kind, Optimum]) -> Sensitivity:
    """Repeat the search for every changed input.

    Args:
        problem: the problem of the plan.
        optima: the optima of the plan by kind.
    """
    return Sensitivity(
        egress=tuple(_egress_point(problem, optima["prfaas"], factor) for factor in EGRESS_FACTORS),
        price=tuple(price_point(optima, factor) for factor in PRICE_FACTORS),
        break_even_factor=break_even_factor(optima),
        lengths=tuple(
            _length_point(changed, optima["prfaas"], factor)
            for factor in LENGTH_FACTORS
            if _takes_time(changed := with_lengths(problem, factor))
        ),
        spread=tuple(
            _length_point(changed, optima["prfaas"], factor)
            for factor in SPREAD_FACTORS
            if _takes_time(changed := with_spread(problem, factor))
        ),
    )


def with_egress(problem: Problem, factor: float) -> Problem:
    """Return the problem with `factor` times the egress of every PrfaaS cluster."""
    sites = tuple(replace(site, egress_bytes_per_s=site.egress_bytes_per_s * factor) for site in problem.prfaas)
    return replace(problem, prfaas=sites)


def with_lengths(problem: Problem, factor: float) -> Problem:
    """Return the problem with every prompt longer by `factor`."""
    return replace(problem, lengths=problem.lengths.scaled(factor))


def with_spread(problem: Problem, factor: float) -> Problem:
    """Return the problem with the logarithms of lengths `factor` times as far from their mean, and the same mean
    length."""
    return replace(problem, lengths=problem.lengths.spread(factor))


def price_point(optima: dict[Kind, Optimum], factor: float) -> PricePoint:
    """Return requests per price for each kind; a price changes no throughput, so no search is repeated."""
    requests_per_price: dict[Kind, float] = {}
    for kind, optimum in optima.items():
        price = sum(site.price for site in optimum.pd) + factor * sum(site.price for site in optimum.prfaas)
        requests_per_price[kind] = 3600 * optimum.lambda_max_per_s / price
    return PricePoint(factor=factor, requests_per_price=requests_per_price)


def break_even_factor(optima: dict[Kind, Optimum]) -> float:
    """Return the f at which Lambda / (price of PD + f * price of PrfaaS) equals Lambda / price of the homogeneous
    alternative."""
    ours, other = optima["prfaas"], optima["homogeneous"]
    worth = other.price * ours.lambda_max_per_s / other.lambda_max_per_s
    return (worth - sum(site.price for site in ours.pd)) / sum(site.price for site in ours.prfaas)


def _takes_time(problem: Problem) -> bool:
    """Return whether every prompt takes time on all hardware that prefills; lines extrapolated below the measured
    lengths can reach 0."""
    tokens = problem.lengths.mix.tokens
    sites = (*problem.prfaas, *problem.pd, problem.homogeneous)
    return all(float(site.hardware.prefill_s(tokens).min()) > 0 for site in sites)


def _egress_point(problem: Problem, optimum: Optimum, factor: float) -> EgressPoint:
    changed = with_egress(problem, factor)
    found = deployment(find(changed))
    assert found.threshold_tokens is not None
    return EgressPoint(
        factor=factor,
        available_gbps=sum(site.egress_bytes_per_s for site in changed.prfaas) * 8 / 1e9,
        threshold_tokens=found.threshold_tokens,
        n_prefill=found.n_prefill,
        egress_gbps=found.egress_gbps,
        lambda_max_per_s=found.lambda_max_per_s,
        kept_per_s=float(kept(changed, optimum).lambda_max_per_s[0, 0]),
        binding=found.binding,
    )


def _length_point(changed: Problem, optimum: Optimum, factor: float) -> LengthPoint:
    found = deployment(find(changed))
    assert found.threshold_tokens is not None
    return LengthPoint(
        factor=factor,
        mean_tokens=changed.lengths.mix.mean_tokens,
        threshold_tokens=found.threshold_tokens,
        n_prefill=found.n_prefill,
        lambda_max_per_s=found.lambda_max_per_s,
        kept_per_s=float(kept(changed, optimum).lambda_max_per_s[0, 0]),
        homogeneous_per_s=find(changed, "homogeneous").lambda_max_per_s,
        binding=found.binding,
    )
