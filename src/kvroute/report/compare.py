"""The best policy of a comparison, its lead, and the significance of the lead: paired over seeds, Student's t."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from kvroute.report.estimate import estimate
from kvroute.sim.metrics import Summary

PREFILL_BOUND = 0.5
"""Share of TTFT from which on the wait for prefill is reported."""
Metric = Callable[[Summary], float | None]


def mean_ttft_s(summary: Summary) -> float | None:
    """Return the mean TTFT, the default metric of comparisons."""
    return summary.ttft_s.mean


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """`first` minus `second` in a metric, paired by seed; a negative value means that the first is lower."""

    first: str
    second: str
    seeds: int
    mean: float
    half_width: float | None
    """Half of the 95 % confidence interval; None with fewer than two seeds."""
    relative: float
    """The mean difference as a share of the mean of `second`."""

    @property
    def is_noise(self) -> bool:
        """True if zero lies inside the interval, or if there is no interval."""
        return self.half_width is None or abs(self.mean) <= self.half_width


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The winner of a comparison and its lead over each other policy."""

    winner: str | None
    leads: tuple[Difference, ...]
    """Winner minus each other policy, closest policy first."""
    sentence: str
    remarks: tuple[str, ...] = ()
    """Reservations about the result, such as rejected requests or a bottleneck that no decode policy changes."""


def difference(runs: Sequence[Summary], first: str, second: str, metric: Metric = mean_ttft_s) -> Difference | None:
    """Compare two policies on the seeds that both have; None if they share none."""
    a, b = (
        {run.seed: value for run in runs if run.policy == name and (value := metric(run)) is not None}
        for name in (first, second)
    )
    seeds = sorted(a.keys() & b.keys())
    if not seeds:
        return None
    gaps = estimate(a[seed] - b[seed] for seed in seeds)
    assert gaps is not None
    level = float(np.mean([b[seed] for seed in seeds]))
    return Difference(
        first=first,
        second=second,
        seeds=len(seeds),
        mean=gaps.mean,
        half_width=gaps.half_width,
        relative=gaps.mean / level if level else 0.0,
    )


def verdict(runs: Sequence[Summary], metric: Metric = mean_ttft_s) -> Verdict:
    """Return the policy with the lowest mean of `metric` over seeds, and the significance of its lead."""
    values: dict[str, list[float]] = {}
    for run in runs:
        value = metric(run)
        if value is not None:
            values.setdefault(run.policy, []).append(value)
    if not values:
        unmeasured = not any(run.measured for run in runs)
        nothing = "No request was measured" if unmeasured else "No policy produced a first token"
        return Verdict(
            winner=None,
            leads=(),
            remarks=_remarks(runs),
            sentence=f"{nothing}, so no comparison is possible.",
        )
    means = {policy: float(np.mean(seconds)) for policy, seconds in values.items()}
    winner = min(means, key=lambda policy: (means[policy], policy))
    others = sorted((policy for policy in means if policy != winner), key=lambda policy: (means[policy], policy))
    leads = tuple(lead for other in others if (lead := difference(runs, winner, other, metric)) is not None)
    single_policy = len({run.policy for run in runs}) == 1
    sentence = _sentence(winner, means[winner], leads, single_policy)
    return Verdict(winner=winner, leads=leads, sentence=sentence, remarks=_remarks(runs))


def _remarks(runs: Sequence[Summary]) -> tuple[str, ...]:
    remarks = []
    refused = {run.policy: [0, 0] for run in runs}
    for run in runs:
        refused[run.policy][0] += run.requests.rejected
        refused[run.policy][1] += run.requests.arrived
    if any(rejected for rejected, _ in refused.values()):
        shares = ", ".join(f"{policy} {rejected / max(of, 1):.1%}" for policy, (rejected, of) in refused.items())
        reasons = [run.reject_reason for run in runs if run.reject_reason]
        why = f" First reason: {reasons[0]}." if reasons else ""
        remarks.append(f"Requests were rejected ({shares}); times cover only the other requests.{why}")
    if any(run.requests.arrived and not run.measured for run in runs):
        remarks.append("No request arrived after the warm-up; shorten it (--warmup).")
    waits = [
        run.ttft_parts_s.prefill_wait / run.ttft_s.mean
        for run in runs
        if run.ttft_parts_s.prefill_wait is not None and run.ttft_s.mean
    ]
    if waits and min(waits) > PREFILL_BOUND:
        what = f"At least {min(waits):.0%} of every policy's TTFT is the wait for prefill"
        remarks.append(f"{what}; decode policies cannot reduce it. Add prefill instances or lower the rate.")
    return tuple(remarks)


def _sentence(winner: str, mean_s: float, leads: tuple[Difference, ...], single_policy: bool) -> str:
    start = f"{winner} has the lowest mean TTFT, {mean_s * 1e3:,.0f} ms"
    if single_policy:
        return f"{winner} has a mean TTFT of {mean_s * 1e3:,.0f} ms; no other policy was run."
    if not leads:
        return f"{start}; no other policy produced a first token with the same seeds."
    equal = [lead.second for lead in leads if lead.mean == 0.0 and not lead.half_width]
    if equal:
        start = f"{_listed([winner, *equal])} have the same mean TTFT, {mean_s * 1e3:,.0f} ms"
        seeds = f" on {leads[0].seeds} seeds" if leads[0].seeds > 1 else ""
        if len(equal) == len(leads):
            return f"{start}{seeds}."
    rival = leads[len(equal)]
    ahead_ms, share = 0.0 - rival.mean * 1e3, 0.0 - rival.relative  # a tie is 0, not -0
    if rival.half_width is None:
        gap = f"{ahead_ms:,.1f} ms below {rival.second}"
        return f"{start}, {gap}; one seed cannot show whether this is noise; use --seeds 5."
    if not rival.half_width:
        return f"{start}, {ahead_ms:,.1f} ms ({share:.1%}) below {rival.second} on each of {rival.seeds} seeds."
    gap = f"{ahead_ms:,.1f} ± {rival.half_width * 1e3:,.1f} ms ({share:.1%}) below {rival.second}"
    if rival.is_noise:
        return f"{start}, {gap}: the difference is noise (95 % interval over {rival.seeds} seeds includes zero)."
    return f"{start}, {gap} (95 % interval over {rival.seeds} seeds)."


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"
