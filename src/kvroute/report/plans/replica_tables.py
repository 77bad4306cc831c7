"""Tables and verdict of `kvroute plan replicas`."""

from __future__ import annotations

from collections.abc import Sequence

from kvroute.planner.replicas import FACTORS, RateRow, ReplicaPlan
from kvroute.report.grid import Grid, GridEntry, Heading

_REASONS = {
    "compute": "Compute",
    "ttft": "TTFT",
    "network": "Network",
    "batch": "Batch size",
    "memory": "KV memory",
    "tpot": "TPOT",
    "backlog": "Backlog",
    "minimum": "Minimum",
    "maximum": "Maximum",
}


def replica_verdict(plan: ReplicaPlan) -> str:
    """Return the result in a few sentences."""
    row = plan.rates[FACTORS.index(1.0)]
    need, day = row.need, plan.day
    slo = f"TTFT {plan.target.ttft_s:g} s"
    if plan.target.tpot_s is not None:
        slo += f" and TPOT {plan.target.tpot_s * 1e3:g} ms"
    reached = ""
    if need.attainment < plan.target.attainment - 1e-9:
        reached = f" No number of instances reaches {plan.target.attainment:.0%}: single requests take too long."
    return (
        f"{row.rate_per_s:,.3g} requests/s need {need.prefill.replicas} prefill and {need.decode.replicas} decode "
        f"instances of {plan.model} ({row.gpus} GPUs) for {slo}. {_REASONS[need.prefill.reason]} sets the first and "
        f"{_REASONS[need.decode.reason]} the second number; predicted attainment {need.attainment:.1%}.{reached} A day "
        f"with this mean rate takes {day.gpu_hours:,.0f} GPU-hours if instances follow the hours, and "
        f"{day.static_gpu_hours:,.0f} with a fixed number for the highest hour ({day.saving:.0%} less)."
    )


def replica_choices(plan: ReplicaPlan) -> tuple[str, ...]:
    """Return the assumptions behind the numbers."""
    return (
        f"Workload: {plan.workload}; mean prefill {plan.mean_prefill_s:.3g} s, mean response "
        f"{plan.mean_output_tokens:,.0f} tokens; {plan.cached_share:.1%} of the prompt tokens are cached.",
        f"No resource is used above {plan.target.utilisation_max:.0%}; each role meets its part of the SLO for "
        f"{plan.target.attainment**0.5:.1%} of the requests.",
        "Arrivals are Poisson around the rate of their hour; prompts share one queue (Allen and Cunneen).",
        "Instances follow the hours without start-up time; see `kvroute experiment autoscaling` for a simulation.",
    )


def rates_grid(plan: ReplicaPlan) -> Grid:
    """Return one row for each rate."""
    return _grid(
        "Instances over the request rate", "requests/s", plan.rates, [f"{r.rate_per_s:,.3g}" for r in plan.rates]
    )


def day_grid(plan: ReplicaPlan) -> Grid:
    """Return one row for each hour."""
    hours = plan.day.hours
    labels = [f"{hour:02}:00, {row.rate_per_s:,.3g}/s" for hour, row in enumerate(hours)]
    return _grid("Instances over the day", "hour", hours, labels)


def _grid(title: str, label: str, rows: Sequence[RateRow], labels: Sequence[str]) -> Grid:
    headings = (
        Heading(label),
        Heading("prefill", "Prefill instances"),
        Heading("limit", "What sets their number"),
        Heading("used", "Utilisation of the most used resource", drop=2),
        Heading("decode", "Decode instances"),
        Heading("limit", "What sets their number"),
        Heading("used", "Utilisation of the most used resource", drop=2),
        Heading("GPUs"),
        Heading("SLO met", "Predicted share of the requests", drop=1),
    )
    return Grid(title, headings, tuple(_row(name, row) for name, row in zip(labels, rows, strict=True)))


def _row(label: str, row: RateRow) -> tuple[GridEntry, ...]:
    texts = [label]
    for need in (row.need.prefill, row.need.decode):
        texts += [f"{need.replicas}", _REASONS[need.reason], f"{need.utilisation:.0%}"]
    return tuple(map(GridEntry, (*texts, f"{row.gpus}", f"{row.need.attainment:.1%}")))
