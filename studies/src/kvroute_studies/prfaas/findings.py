"""Compares the results of PrfaaS's experiments with the publication's expectations, in sentences with numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt

from kvroute.planner.comparison.cells import Record
from kvroute.report.compare import Difference, difference
from kvroute.report.estimate import Estimate, estimate
from kvroute.report.series import of_profile, profiles_of, summaries
from kvroute.sim.metrics import Summary
from kvroute_studies.prfaas.burst import DUAL
from kvroute_studies.prfaas.queue import AGENTS, TRACE
from kvroute_studies.prfaas.run import BURST, CASE_STUDY
from kvroute_studies.shared.cells import Computed, Experiment
from kvroute_studies.shared.findings import ExpectationFinding, Holds

AGREES_WITHIN = 0.05
"""Largest relative difference between formula and simulation, in the profile without variance."""
WORSE_BY_MOST = 0.03
"""Largest share of goodput that the scheduler may lose against the best threshold in hindsight."""
ALIKE = 0.005
"""Thresholds whose goodput differs by less than this share are equally good."""
CALM = "calm"
DENSE = ("minimax-m2.5", "qwen3-235b")
STAGES = {"prfaas_wait_s": "PrfaaS", "pd_p_wait_s": "PD prefill", "pd_d_wait_s": "PD decode", "ethernet_s": "Ethernet"}


@dataclass(frozen=True, slots=True)
class Gap:
    """A deployment's simulated saturation throughput and the formula's."""

    policy: str
    formula_per_s: float
    exact_per_s: float
    saturation: Estimate

    @property
    def off(self) -> float:
        """Relative difference of the simulation from the formula; negative: the simulation is lower."""
        return self.saturation.mean / self.formula_per_s - 1.0

    @property
    def off_exact(self) -> float:
        """Relative difference of the simulation from the formula with E[T(L)]."""
        return self.saturation.mean / self.exact_per_s - 1.0


def figure(records: Sequence[Record], name: str) -> Estimate | None:
    """Return a figure over seeds."""
    return estimate(record.figures.get(name) for record in records)


def at(records: Sequence[Record], policy: str, **settings: float) -> list[Record]:
    """Return the records of one policy with these axis values."""
    return [r for r in records if r.cell.policy == policy and settings.items() <= r.cell.settings.items()]


def policies_of(records: Sequence[Record]) -> list[str]:
    """Return the names in the order of their first record."""
    return list(dict.fromkeys(record.cell.policy for record in records))


def saturations(records: Sequence[Record]) -> list[Gap]:
    """Return every deployment of one profile at its highest load, if that is above the formula's throughput."""
    found = []
    for policy in policies_of(records):
        load = max(record.cell.settings["load"] for record in records if record.cell.policy == policy)
        there = at(records, policy, load=load)
        saturation = figure(there, "keeps_up_per_s")
        if load > 1.0 and saturation is not None:
            model = there[0].figures
            found.append(Gap(policy, model["lambda_max_per_s"], model["lambda_exact_per_s"], saturation))
    return found


def goodput_per_s(summary: Summary) -> float | None:
    """Return the goodput in the measured window."""
    return summary.goodput_per_s


def statics(records: Sequence[Record]) -> list[str]:
    """Return the policies with a static threshold, ascending by threshold."""
    return [policy for policy in policies_of(records) if policy != DUAL]


def best_static(records: Sequence[Record]) -> str | None:
    """Return the static policy of one profile with the highest mean goodput; on a tie, with the lower mean TTFT."""
    ranked = [(-good_per_s, ttft_s, policy) for good_per_s, ttft_s, policy in _levels(records)]
    return min(ranked)[2] if ranked else None


def old_static(records: Sequence[Record]) -> str | None:
    """Return the policy for the traffic before the disturbance: the fastest of those as good as the best."""
    calm = of_profile(records, CALM)
    good = [(ttft_s, policy) for _, ttft_s, policy in _levels(calm) if is_as_good(calm, policy)]
    return min(good)[1] if good else None


def is_as_good(records: Sequence[Record], policy: str | None) -> bool:
    """Return whether a policy's mean goodput is within ALIKE of the best one's, in one profile."""
    levels = {known: good_per_s for good_per_s, _, known in _levels(records)}
    return policy in levels and levels[policy] >= (1.0 - ALIKE) * max(levels.values())


def _levels(records: Sequence[Record]) -> list[tuple[float, float, str]]:
    """Return mean goodput, mean TTFT and name of every policy with a static threshold."""
    found = []
    for policy in statics(records):
        runs = [record.summary for record in records if record.cell.policy == policy]
        good, ttft = estimate(map(goodput_per_s, runs)), estimate(run.ttft_s.mean for run in runs)
        if good is not None and ttft is not None:
            found.append((good.mean, ttft.mean, policy))
    return found


def lead(records: Sequence[Record], over: str | None) -> Difference | None:
    """Return the scheduler's goodput minus that of a static threshold, paired over seeds."""
    return None if over is None else difference(summaries(records), DUAL, over, goodput_per_s)


def standard_error(found: Difference, records: Sequence[Record]) -> float | None:
    """Return the standard error of the mean difference in goodput, as a share of the second policy's mean; None with
    one seed."""
    first, second = (_by_seed(records, policy) for policy in (found.first, found.second))
    gap = estimate(first[seed] - second[seed] for seed in sorted(first.keys() & second.keys()))
    level = estimate(second.values())
    if gap is None or gap.seeds < 2 or level is None or not level.mean:
        return None
    return gap.std / sqrt(gap.seeds) / level.mean


def _by_seed(records: Sequence[Record], policy: str) -> dict[int, float]:
    return {record.cell.seed: record.summary.goodput_per_s or 0.0 for record in records if record.cell.policy == policy}


def prfaas_findings(
    experiment: Experiment, records: Sequence[Record], points: Sequence[Computed]
) -> list[ExpectationFinding]:
    """Return every claim for every profile with records."""
    if experiment.name == CASE_STUDY.name:
        return [finding for name in profiles_of(records) for finding in _case(name, of_profile(records, name))]
    if experiment.name == BURST.name:
        old, planned = old_static(records), experiment.versus[1]
        return [
            finding
            for name in profiles_of(records)
            for finding in _burst(name, of_profile(records, name), old, planned)
        ]
    return _kv(points)


def _case(profile: str, records: Sequence[Record]) -> list[ExpectationFinding]:
    gaps = saturations(records)
    if not gaps:
        return [
            ExpectationFinding(
                profile, "formula and queues agree", "unclear", "No run has a load above the formula's throughput."
            )
        ]
    found = [_agreement(profile, gaps, records), _order(profile, gaps)]
    return found + _waiting(profile, records)


def _agreement(profile: str, gaps: Sequence[Gap], records: Sequence[Record]) -> ExpectationFinding:
    """Compare formula and simulation. If lengths vary, a convex prefill time makes the mean cost of a request higher
    than the cost of the mean length. With prefixes, the formula has one unlimited cache, not one per instance."""
    certain = profile == "no-variance"
    details = "; ".join(
        f"{gap.policy} {gap.saturation.mean:.2f}/s, formula {gap.formula_per_s:.2f} ({gap.off:+.1%}"
        + ("" if certain else f"; {gap.off_exact:+.1%} of {gap.exact_per_s:.2f} with E[T(L)]")
        + ")"
        for gap in gaps
    )
    worst = max(abs(gap.off) for gap in gaps)
    holds: Holds = "holds" if worst <= AGREES_WITHIN else "does not hold"
    sentence = f"Saturation throughput: {details}."
    if profile in (TRACE, AGENTS):
        hits = {gap.policy: estimate(r.summary.prefill_cache_hit for r in at(records, gap.policy)) for gap in gaps}
        shares = ", ".join(f"{policy} {known.mean:.1%}" for policy, known in hits.items() if known is not None)
        sentence += f" The formula assumes one unlimited cache; hit rates of the instances, over all loads: {shares}."
    elif not certain:
        sentence += " Compared with E[T(L)], variance adds waiting but costs no throughput: the queue never empties."
    return ExpectationFinding(profile, f"formula and queues agree within {AGREES_WITHIN:.0%}", holds, sentence)


def _order(profile: str, gaps: Sequence[Gap]) -> ExpectationFinding:
    claim = "PrfaaS-PD serves more than the alternatives"
    by_name = {gap.policy: gap for gap in gaps}
    if "prfaas" not in by_name or len(by_name) < 2:
        return ExpectationFinding(profile, claim, "unclear", "Some deployments were not run.")
    ours = by_name.pop("prfaas")
    details = "; ".join(
        f"{ours.saturation.mean / gap.saturation.mean - 1:+.1%} against {gap.policy} "
        f"(formula {ours.formula_per_s / gap.formula_per_s - 1:+.1%})"
        for gap in by_name.values()
    )
    wins = all(ours.saturation.mean > gap.saturation.mean for gap in by_name.values())
    return ExpectationFinding(profile, claim, "holds" if wins else "does not hold", f"At saturation {details}.")


def _waiting(profile: str, records: Sequence[Record], load: float = 0.9) -> list[ExpectationFinding]:
    """Describe the parts of TTFT at 90 % of the formula's throughput."""
    there = at(records, "prfaas", load=load)
    ttft, service, p90 = (
        estimate(record.summary.ttft_s.mean for record in there),
        figure(there, "service_mean_s"),
        figure(there, "ttft_p90_s"),
    )
    if ttft is None or service is None or p90 is None:
        return []
    waits = {name: known for key, name in STAGES.items() if (known := figure(there, key)) is not None}
    details = ", ".join(f"{name} {known.mean:.2f} s" for name, known in waits.items())
    most = max(waits, key=lambda name: waits[name].mean)
    model = there[0].figures
    sentence = (
        f"PrfaaS-PD at {load:.0%} of the formula's throughput: mean TTFT {ttft.mean:.2f} s, P90 {p90.mean:.2f} s. "
        f"Prefill only, as published: {service.mean:.2f} s (formula {model['model_ttft_mean_s']:.2f}, "
        f"P90 {model['model_ttft_p90_s']:.2f}). Mean wait of the requests at each stage: {details}; longest: {most}."
    )
    share = service.mean / ttft.mean
    return [
        ExpectationFinding(
            profile, "TTFT is the prefill's time", "holds" if share >= 0.9 else "does not hold", sentence
        )
    ]


def _burst(profile: str, records: Sequence[Record], old: str | None, planned: str) -> list[ExpectationFinding]:
    claim = f"at most {WORSE_BY_MOST:.0%} below the best static threshold"
    found = [_against(profile, records, best_static(records), claim, least=-WORSE_BY_MOST)]
    if profile != CALM and old is not None and is_as_good(records, old):
        found.append(_not_worse(profile, records, old))
    elif profile != CALM:
        found.append(_against(profile, records, old, "above the static threshold of the old traffic"))
    if profile != CALM and planned in statics(records):
        found.append(_against(profile, records, planned, "above the planner's static threshold"))
    return found


def _against(
    profile: str, records: Sequence[Record], other: str | None, claim: str, least: float | None = None
) -> ExpectationFinding:
    """Compare the scheduler with a policy. The claim holds from the relative difference `least` on; if `least` is None,
    it holds for a significant difference above zero."""
    found = lead(records, other)
    if found is None:
        return ExpectationFinding(
            profile,
            claim,
            "unclear",
            "The two policies have no common seed; use the same --seeds.",
        )
    error = standard_error(found, records)
    runs = {name: estimate(r.summary.goodput_per_s for r in records if r.cell.policy == name) for name in (DUAL, other)}
    levels = " against ".join(f"{known.mean:.3f}" for known in runs.values() if known is not None)
    spread = "one seed" if error is None else f"standard error {error:.1%}, {found.seeds} seeds"
    sentence = f"{levels} good requests/s under {other}: {found.relative:+.1%} ({spread})."
    if least is not None:
        return ExpectationFinding(profile, claim, "holds" if found.relative >= least else "does not hold", sentence)
    if found.is_noise:
        caution = " One seed cannot show significance." if error is None else " The 95 % interval includes zero."
        return ExpectationFinding(profile, claim, "unclear", sentence + caution)
    return ExpectationFinding(profile, claim, "holds" if found.mean > 0 else "does not hold", sentence)


def _not_worse(profile: str, records: Sequence[Record], old: str) -> ExpectationFinding:
    """Check that the scheduler is not significantly worse: in this scenario no threshold is better than the old one."""
    claim = "not below the static threshold of the old traffic, which is also the best one here"
    found = _against(profile, records, old, claim)
    if found.holds == "unclear" and lead(records, old) is not None:
        return replace(found, holds="holds")
    return found


def _kv(points: Sequence[Computed]) -> list[ExpectationFinding]:
    found = []
    both = [p for p in points if {"computed_gbps", "published_gbps"} <= p.figures.keys()]
    if both:
        off = max(abs(p.figures["computed_gbps"] / p.figures["published_gbps"] - 1) for p in both)
        holds: Holds = "holds" if off <= 0.01 else "does not hold"
        sentence = (
            f"KV size / prefill time is within {off:.1%} of the throughput at {len(both)} lengths; all are published."
        )
        found.append(ExpectationFinding("8xh200", "eq. 1 gives the measured KV throughput", holds, sentence))
    long = [p for p in points if p.cell.settings["tokens"] >= 8192]
    dense = [p.figures["published_gbps"] for p in long if p.cell.policy in DENSE]
    hybrid = [p.figures["published_gbps"] for p in long if p.cell.policy not in DENSE]
    if dense and hybrid:
        spans = [f"{min(some):.3g} to {max(some):.3g}" for some in (dense, hybrid)]
        sentence = f"From 8K tokens, dense models produce {spans[0]} Gbps, hybrid models {spans[1]} Gbps."
        holds = "holds" if max(hybrid) < 10 < min(dense) else "does not hold"
        found.append(
            ExpectationFinding("8xh200", "hybrid models stay below 10 Gbps, dense ones do not", holds, sentence)
        )
    return found
