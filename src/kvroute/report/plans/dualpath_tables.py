"""A DualPath plan as sentences and one grid: every resource and its utilisation."""

from __future__ import annotations

from kvroute.planner.dualpath.plan import DualPathPlan, Interval
from kvroute.report.grid import Grid, GridEntry, Heading


def dualpath_verdict(plan: DualPathPlan) -> str:
    """Say in sentences what limits the cluster, what reading through both sides brings, and which ratios allow it."""
    rate, turns = plan.rate_bytes_per_s, plan.turns_per_s
    storage, compute = _three(turns.storage), _three(turns.compute)
    limit = (
        f"Storage limits this workload: it delivers the KV of {storage} turns/s, and the prefill GPUs could compute "
        f"{compute}."
        if plan.bound == "storage"
        else f"Compute limits this workload: the prefill GPUs compute {compute} turns/s, and storage could deliver the "
        f"KV of {storage}."
    )
    prefill_only = turns.storage * rate.prefill_only / rate.pooled
    gain = min(turns.storage, turns.compute) / min(prefill_only, turns.compute) - 1.0
    brings = f"{gain:+.1%} turns/s" if gain > 1e-9 else "no more turns/s"
    pooled = (
        f"Reading through both sides delivers {_three(rate.pooled / 1e9)} GB/s instead of "
        f"{_three(rate.prefill_only / 1e9)} GB/s through prefill nodes alone: {brings} on these GPUs. "
        f"The resource with the highest utilisation is {plan.binding}."
    )
    return f"{limit} {pooled} {_ratios(plan.pd_interval, plan.obstacles)}"


def _three(number: float) -> str:
    """Return a number with three digits, or as a whole number from 100."""
    return f"{number:,.0f}" if number >= 99.95 else f"{number:.3g}"


def _ratios(found: Interval | None, obstacles: tuple[str, ...]) -> str:
    if found is None:
        why = ", and ".join(obstacles)
        return f"No ratio of prefill to decode nodes lets all storage NICs read at full rate: {why}."
    upper = "or more" if found.high is None else f"to {found.high:.3g}"
    return f"All storage NICs can read at full rate with {found.low:.3g} {upper} prefill nodes per decode node."


def by_utilisation(plan: DualPathPlan) -> list[str]:
    """Return the resources, the most used first."""
    return sorted(plan.utilisation, key=lambda name: -round(plan.utilisation[name], 9))


def utilisation_grid(plan: DualPathPlan) -> Grid:
    """Return one row per resource, the most used first."""
    shares = (plan.utilisation, plan.utilisation_prefill_only)
    return Grid(
        "",
        (
            Heading("resource"),
            Heading("utilisation", "Share in use at the pooled rate"),
            Heading("prefill-only", "Share in use if only prefill nodes read"),
        ),
        tuple(
            tuple(map(GridEntry, (name, *(f"{share[name]:.1%}" for share in shares)))) for name in by_utilisation(plan)
        ),
        "Utilisation at the highest rate of reading. "
        f"Cache-compute ratio: {plan.cached_bytes_per_flop * 1e6:.3g} GB of KV to read per PFLOP.",
    )
