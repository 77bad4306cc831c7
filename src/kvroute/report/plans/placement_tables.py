"""A placement as sentences and grids: instances by phase, constraints, alternatives, prediction beside simulation."""

from __future__ import annotations

from collections import Counter

from kvroute.planner.placement.plan import PhasePlan, PlacementPlan
from kvroute.planner.placement.schema import Phase
from kvroute.planner.placement.search import PHASES
from kvroute.report.grid import UNKNOWN, Grid, GridEntry, Heading


def placement_verdict(plan: PlacementPlan) -> str:
    """Say in sentences what rate the placement sustains, what limits it, and what the simulation says."""
    parts = [
        f"{plan.model} on {plan.name}: {_three(plan.rate_per_s)} requests/s ({plan.rate_per_gpu:.3g} per GPU on "
        f"{plan.gpus:,} GPUs) with {plan.slo_attainment:.1%} of the requests within both SLOs.",
        f"Limited by {plan.binding}.",
    ]
    if plan.unused_gpus:
        parts.append(f"{plan.unused_gpus:,} free GPUs are not used.")
    if (found := plan.simulated) is not None and found.slo_attainment is not None:
        phases = plan.phases.values()
        whole = sum(len(phase.groups) for phase in phases)
        count = found.prefill_instances + found.decode_instances
        which = "" if count == whole else f" (a selection of {count} of {whole:,} instances at their share of the rate)"
        parts.append(
            f"Simulated{which}, {found.slo_attainment:.1%} of {found.requests:,} requests meet both SLOs at this rate."
        )
    if plan.literal is not None:
        parts.append(_literal(plan))
    return " ".join(parts)


def _literal(plan: PlacementPlan) -> str:
    found = plan.literal
    assert found is not None
    return (
        f"The published equations choose {found.prefill} for prefill and {found.decode} for decode, and predict a TTFT "
        f"of {found.ttft_s:.3g} s, a TPOT of {found.tpot_s:.3g} s, a KV transfer of {found.transfer_s:.2g} s and a "
        f"scalability of {found.scalability_per_s:.3g} requests/s; by the corrected equations this choice sustains "
        f"{_three(found.corrected_rate_per_s)} requests/s."
    )


def phases_grid(plan: PlacementPlan) -> Grid:
    """Return one row per phase and kind of group."""
    rows = tuple(row for phase in PHASES for row in _phase_rows(phase, plan.phases[phase]))
    return Grid(
        "",
        (
            Heading("phase"),
            Heading("instances"),
            Heading("TP x PP"),
            Heading("GPUs", drop=3),
            Heading("servers", "Servers that an instance spans"),
            Heading("all-reduce", "Scheme; 'none' with one rank"),
            Heading("iteration", "Prefill of mean length, or decode iteration of the mean batch", drop=1),
            Heading("in all-reduces", "Share of an iteration", drop=2),
        ),
        rows,
        "Instances by phase, scheme and servers spanned.",
    )


def _phase_rows(phase: Phase, plan: PhasePlan) -> list[tuple[GridEntry, ...]]:
    kinds = ", ".join(plan.gpu_kinds)
    found = Counter(zip(plan.schemes, plan.servers_spanned, strict=True))
    rows = []
    for (scheme, servers), count in sorted(found.items(), key=lambda entry: -entry[1]):
        cells = (
            phase,
            f"{count:,}",
            f"{plan.tp} x {plan.pp}",
            kinds,
            f"{servers}",
            scheme,
            f"{plan.iteration_s * 1e3:,.1f} ms",
            f"{plan.all_reduce_share:.1%}",
        )
        rows.append(tuple(map(GridEntry, cells)))
    return rows


def bounds_grid(plan: PlacementPlan) -> Grid:
    """Return the rate that each constraint would allow alone."""
    rows = tuple(
        (GridEntry(name), GridEntry(UNKNOWN if rate is None else _three(rate)))
        for name, rate in plan.bounds_per_s.items()
    )
    return Grid("Constraints", (Heading("constraint"), Heading("requests/s", "Rate that it would allow alone")), rows)


def alternatives_grid(plan: PlacementPlan) -> Grid:
    """Return the best placements that were evaluated, the highest rate first."""
    rows = tuple(
        tuple(
            map(
                GridEntry,
                (
                    alternative.prefill,
                    alternative.decode,
                    _three(alternative.rate_per_s),
                    f"{alternative.rate_per_gpu:.3g}",
                    f"{alternative.rate_per_s / plan.alternatives[0].rate_per_s - 1:+.1%}",
                    alternative.binding,
                ),
            )
        )
        for alternative in plan.alternatives
    )
    headings = (
        Heading("prefill"),
        Heading("decode"),
        Heading("requests/s"),
        Heading("per GPU", drop=2),
        Heading("difference", "To the best one", drop=3),
        Heading("limited by", drop=1),
    )
    caption = f"The best of {plan.candidates:,} candidates; most are excluded by an upper bound of their rate."
    return Grid("Alternatives", headings, rows, caption, labels=2)


def simulation_grid(plan: PlacementPlan) -> Grid | None:
    """Return prediction and simulation side by side; None without a simulation."""
    found = plan.simulated
    if found is None:
        return None
    rows = (
        ("SLO attainment", f"{plan.slo_attainment:.1%}", _share(found.slo_attainment)),
        ("KV transfer, mean", _ms(plan.transfer_s), _ms(found.transfer_s.mean)),
        ("TPOT, median", _ms(plan.phases["decode"].iteration_s), _ms(found.tpot_s.p50)),
        ("TTFT, p99", UNKNOWN, _ms(found.ttft_s.p99)),
        *(
            (f"all-reduces of {phase}, compared with an idle network", UNKNOWN, f"{cost.slowdown:.3f}")
            for phase, cost in found.all_reduces.items()
            if cost.slowdown is not None
        ),
    )
    headings = (Heading(""), Heading("predicted"), Heading("simulated"))
    return Grid("Prediction and simulation", headings, tuple(tuple(map(GridEntry, row)) for row in rows))


def _share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1%}"


def _ms(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else f"{seconds * 1e3:,.1f} ms"


def _three(number: float) -> str:
    """Return a number with three digits, or as a whole number from 100."""
    return f"{number:,.0f}" if number >= 99.95 else f"{number:.3g}"
