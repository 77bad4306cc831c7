"""A plan as grids of texts, for the terminal and the page: deployments, sensitivity of the optimum, egress need."""

from __future__ import annotations

from collections.abc import Sequence

from kvroute.planner.throughput.plan import PlanReport
from kvroute.planner.throughput.search import Kind, PlannedDeployment
from kvroute.planner.throughput.sensitivity import LENGTH_FACTORS, SPREAD_FACTORS, LengthPoint, Sensitivity
from kvroute.policies.fleet.throughput import Binding
from kvroute.report.grid import UNKNOWN, Grid, GridEntry, Heading, with_ties

TITLES: dict[Kind, str] = {
    "prfaas": "PrfaaS-PD",
    "homogeneous": "homogeneous PD",
    "naive": "naive heterogeneous",
    "home": "home GPUs alone",
}
_WORTH = 0.005
"""Gains below this share count as zero."""
BINDING_TEXTS: dict[Binding, str] = {
    "prfaas_compute": "PrfaaS compute",
    "prfaas_egress": "PrfaaS egress",
    "pd_p": "PD prefill",
    "pd_d": "PD decode",
}
_TWICE = ("new plan /s", "plan unchanged /s")
_UNCHANGED = "Plan unchanged: throughput with the threshold and the split of the plan above."
STAGE_TEXTS = {"prfaas": "PrfaaS", "pd_p": "PD prefill", "pd_d": "PD decode"}


def verdict(report: PlanReport) -> str:
    """Say in sentences whether to offload, the throughput compared with the alternatives, and the limiting stage."""
    home = report.deployments.get("home")
    if home is not None and report.gain_over["home"] < _WORTH:
        remote = report.deployments["prfaas"].n_prfaas
        return (
            f"Do not offload: {_alternative(report, 'home')} already {_served(home)}, and {remote} remote prefill "
            f"instances would add {max(report.gain_over['home'], 0.0):.1%}. Split the PD clusters into "
            f"{home.n_prefill} prefill and {home.n_decode} decode instances."
        )
    start = "Offload"
    if report.gain_over["homogeneous"] < -_WORTH:
        other = report.deployments["homogeneous"]
        start = (
            f"Do not offload if you can choose your GPUs: {_alternative(report, 'homogeneous')} {_served(other)}, "
            f"{other.lambda_max_per_s / report.deployments['prfaas'].lambda_max_per_s - 1:.1%} more than offloading. "
            "With the GPUs where they are, offload"
        )
    best = report.deployments["prfaas"]
    kinds: list[Kind] = [kind for kind in ("home", "homogeneous", "naive") if kind in report.gain_over]
    gains = [f"{report.gain_over[kind]:+.1%} against {_alternative(report, kind)}" for kind in kinds]
    return (
        f"{start} {_what(best)}; "
        f"split the PD clusters into {best.n_prefill} prefill and {best.n_decode} decode instances. "
        f"The plan {_served(best)}: {', '.join(gains[:-1])} and {gains[-1]}. "
        f"The bottleneck is {BINDING_TEXTS[best.binding]}{_room(report)}. {_link(report)}"
    )


def _served(found: PlannedDeployment) -> str:
    return f"serves {found.lambda_max_per_s:.3g} requests/s"


def _alternative(report: PlanReport, kind: Kind) -> str:
    """Return the alternative's name and its GPUs."""
    about = {"naive": "every prompt prefilled remotely"}.get(kind, report.costs[kind].made_of)
    return f"{TITLES[kind]} ({about})"


def _link(report: PlanReport) -> str:
    """Describe the KV traffic of the plan, and why it is below the rate that the remote GPUs could send."""
    used_gbps = report.deployments["prfaas"].egress_gbps
    available_gbps = sum(need.available_gbps for need in report.egress_need)
    needed_gbps = sum(need.offloaded_gbps for need in report.egress_need)
    usage = f"The KV cache takes {used_gbps:.3g} of {available_gbps:.4g} Gbps."
    busy = used_gbps / needed_gbps if needed_gbps else 1.0
    if busy > 1 - _WORTH:
        return usage
    gpus = sum(need.gpus for need in report.egress_need)
    return (
        f"{usage} The {gpus:,} remote GPUs would send {needed_gbps:.4g} Gbps if they prefilled without pause; "
        f"the plan uses them {busy:.0%} of the time."
    )


def _what(best: PlannedDeployment) -> str:
    if best.offloaded_share in (0, 1):
        return "every prompt" if best.offloaded_share else "nothing"
    return f"prompts of more than {best.threshold_tokens:,} tokens ({best.offloaded_share:.1%} of the requests)"


def _room(report: PlanReport) -> str:
    """Describe the spare capacity of the stages that do not limit the plan."""
    best = report.deployments["prfaas"]
    above = [
        f"{STAGE_TEXTS[stage]} {bound / best.lambda_max_per_s - 1:.1%}"
        for stage, bound in report.bounds_per_s.items()
        if bound is not None and not best.binding.startswith(stage)
    ]
    return f" (capacity of {' and '.join(above)} higher)" if above else ""


def deployment_grid(report: PlanReport) -> Grid:
    """Return one row per deployment."""
    headings = (
        Heading("deployment"),
        Heading("instances PrfaaS/P/D", "Prefill only, prefill and decode of the PD clusters"),
        Heading("threshold tokens", "Longer prompts are offloaded"),
        Heading("offloaded", "Share of the requests"),
        Heading("Θ PrfaaS", "Requests per second of the stage (eq. 3)", 4),
        Heading("Θ PD-P", "Eq. 4", 5),
        Heading("Θ PD-D", "Eq. 5", 6),
        Heading("Λ max /s", "Requests per second of the system (eq. 6)"),
        Heading("bound by"),
        Heading("egress Gbps", "KV traffic between the clusters at that rate", 8),
        Heading("TTFT mean s", "Prefill only, without queue and transfer", 7),
        Heading("P90 s", "P90 of the prefill time", 3),
        Heading("GPUs", "By hardware", 2),
        Heading("requests per price unit", "At the maximum rate, with the prices of the plan", 1),
    )
    highest = max(deployment.lambda_max_per_s for deployment in report.deployments.values())
    rows = tuple(
        (
            GridEntry(TITLES[kind]),
            *_deployment_entries(deployment, highest),
            GridEntry(report.costs[kind].made_of),
            GridEntry(f"{report.costs[kind].requests_per_price:,.1f}"),
        )
        for kind, deployment in report.deployments.items()
    )
    caption = (
        "Home GPUs alone: the PD clusters of the plan without remote GPUs. Homogeneous PD: all GPUs in one place. "
        "TTFT is the prefill's service time, as in the paper: no queue, no transfer."
    )
    return Grid("", headings, rows, caption, bold="Bold: the highest.")


def _deployment_entries(deployment: PlannedDeployment, highest: float) -> list[GridEntry]:
    stages = (deployment.stage_per_s[name] for name in ("prfaas", "pd_p", "pd_d"))
    return [
        GridEntry(f"{deployment.n_prfaas}/{deployment.n_prefill}/{deployment.n_decode}"),
        GridEntry(UNKNOWN if deployment.threshold_tokens is None else f"{deployment.threshold_tokens:,}"),
        GridEntry(f"{deployment.offloaded_share:.1%}"),
        *(GridEntry(f"{rate_per_s:.2f}" if rate_per_s else UNKNOWN) for rate_per_s in stages),
        GridEntry(f"{deployment.lambda_max_per_s:.2f}", best=f"{deployment.lambda_max_per_s:.2f}" == f"{highest:.2f}"),
        GridEntry(BINDING_TEXTS[deployment.binding]),
        GridEntry(f"{deployment.egress_gbps:.2f}" if deployment.egress_gbps else UNKNOWN),
        GridEntry(f"{deployment.ttft_s.mean:.2f}"),
        GridEntry(f"{deployment.ttft_s.p90:.2f}"),
    ]


def egress_grid(found: Sensitivity) -> Grid:
    """Return the optimum over bandwidth."""
    rows = tuple(
        (
            GridEntry(f"{point.available_gbps:,.4g}"),
            GridEntry(f"{point.lambda_max_per_s:.2f}"),
            GridEntry(f"{point.kept_per_s:.2f}"),
            GridEntry(f"{point.threshold_tokens:,}"),
            GridEntry(str(point.n_prefill)),
            GridEntry(f"{point.egress_gbps:.2f}"),
            GridEntry(BINDING_TEXTS[point.binding]),
        )
        for point in found.egress
    )
    headings = (
        *_headings("egress Gbps", *_TWICE, "threshold tokens"),
        Heading("prefill instances", drop=1),
        Heading("used Gbps"),
        Heading("bound by", drop=2),
    )
    return Grid("Bandwidth", headings, rows, _UNCHANGED)


def length_grid(found: Sensitivity) -> Grid:
    """Return the optimum over the length of prompts."""
    about = "All prompt lengths times a factor. Homogeneous: optimal split for each factor."
    return _length_grid("Prompt length", "lengths times", found.lengths, len(LENGTH_FACTORS), about)


def spread_grid(found: Sensitivity) -> Grid:
    """Return the optimum over the spread of lengths."""
    about = "Spread of the logarithms of lengths (sigma of a log-normal mix) times a factor, with the same mean length."
    return _length_grid("Length mix", "spread times", found.spread, len(SPREAD_FACTORS), about)


def _length_grid(title: str, factor: str, points: Sequence[LengthPoint], tried: int, caption: str) -> Grid:
    rows = tuple(
        (
            GridEntry(f"{point.factor:g}"),
            GridEntry(f"{point.mean_tokens:,.0f}"),
            GridEntry(f"{point.lambda_max_per_s:.2f}"),
            GridEntry(f"{point.kept_per_s:.2f}"),
            GridEntry(f"{point.homogeneous_per_s:.2f}"),
            GridEntry(f"{point.threshold_tokens:,}"),
            GridEntry(str(point.n_prefill)),
            GridEntry(BINDING_TEXTS[point.binding]),
        )
        for point in points
    )
    headings = (
        Heading(factor),
        Heading("mean tokens", drop=2),
        *_headings(*_TWICE, "homogeneous /s", "threshold tokens"),
    )
    if len(rows) < tried:
        caption += " Omitted: factors for which the extrapolated prefill time is not above 0."
    caption += f" {_UNCHANGED}"
    return Grid(title, (*headings, Heading("prefill instances", drop=1), Heading("bound by", drop=3)), rows, caption)


def price_grid(found: Sensitivity) -> Grid:
    """Return requests per unit of price over the price of PrfaaS GPUs."""
    kinds = [kind for kind in TITLES if kind in found.price[0].requests_per_price]
    rows = tuple(
        (
            GridEntry(f"{point.factor:g}"),
            *with_ties(
                [
                    GridEntry(f"{point.requests_per_price[kind]:,.1f}", best=_dearest(point.requests_per_price, kind))
                    for kind in kinds
                ]
            ),
        )
        for point in found.price
    )
    headings = _headings("PrfaaS price times", *(f"{TITLES[kind]} requests/price" for kind in kinds))
    even = found.break_even_factor
    text = f"at {even:.2f} times the plan's" if even > 0 else "at no price, not even 0"
    return Grid("Price per GPU", headings, rows, f"PrfaaS-PD and homogeneous PD have equal requests per price {text}.")


def need_grid(report: PlanReport) -> Grid:
    """Return eq. 2 for every PrfaaS cluster."""
    rows = tuple(
        (
            GridEntry(need.cluster),
            GridEntry(f"{need.gpus:,}"),
            GridEntry(f"{need.offloaded_gbps:,.4g}"),
            GridEntry(f"{need.all_gbps:,.4g}"),
            GridEntry(f"{need.available_gbps:,.4g}"),
        )
        for need in report.egress_need
    )
    headings = _headings("PrfaaS cluster", "GPUs", "needed Gbps", "all prompts Gbps", "available Gbps")
    caption = (
        "Needed: minimum egress at which GPUs that prefill without pause never wait for the link (eq. 2), for the "
        "offloaded prompts and for all prompts. A plan with a lower utilisation uses less."
    )
    return Grid("Egress", headings, rows, caption)


def _headings(*titles: str) -> tuple[Heading, ...]:
    return tuple(Heading(title) for title in titles)


def _dearest(requests_per_price: dict[Kind, float], kind: Kind) -> bool:
    return requests_per_price[kind] == max(requests_per_price.values())


def grids(report: PlanReport) -> Sequence[Grid]:
    """Return all grids in reading order."""
    found = report.sensitivity
    return (
        deployment_grid(report),
        egress_grid(found),
        length_grid(found),
        spread_grid(found),
        price_grid(found),
        need_grid(report),
    )
