"""Findings of the matrix in numbers: the cells that foresight loses, its leads, and the contribution of each term.

A policy loses a cell if the paired difference over seeds is above zero by more than two standard errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

import numpy as np

from kvroute.planner.comparison.cells import Record
from kvroute.report.compare import Metric, mean_ttft_s
from kvroute.report.series import of_profile, profiles_of
from kvroute.sim.metrics import Summary
from kvroute_studies.never_worse.cases import CASES
from kvroute_studies.never_worse.verdicts import CLAIRVOYANT, RIVALS
from kvroute_studies.shared.findings import ExpectationFinding, Holds

OURS = "foresight"
ERRORS = 2.0
"""Number of standard errors above which a paired difference is significant."""
LEADS = {"netkv": 0.08, "cla": 0.12}
"""Minimum lead over each rival: one minus the geometric mean of the ratios."""
P99_SHARE, TBT_WITHIN_S, SEEN_WITHIN = 0.02, 1e-3, 0.05
_ROUNDING = 1e-9
"""Relative differences below this count as zero."""


@dataclass(frozen=True, slots=True)
class PolicyPairing:
    """One metric of two policies in one cell, paired over the seeds that both have."""

    case: str
    first: str
    second: str
    ours: float
    theirs: float
    difference: float
    error: float | None
    """Standard error of the difference; None with one seed."""
    seeds: int

    @property
    def ratio(self) -> float:
        """`first` divided by `second`."""
        return self.ours / self.theirs if self.theirs else 1.0

    @property
    def is_higher(self) -> bool:
        """True if the first is significantly above the second."""
        return self._beyond(self.difference)

    @property
    def is_lower(self) -> bool:
        """True if the first is significantly below the second."""
        return self._beyond(-self.difference)

    def _beyond(self, difference: float) -> bool:
        if self.error is None or difference <= _ROUNDING * abs(self.theirs):
            return False
        return difference > ERRORS * self.error


def p99_s(run: Summary) -> float | None:
    """Return the 99th percentile of TTFT."""
    return run.ttft_s.p99


def tbt_s(run: Summary) -> float | None:
    """Return the mean time between tokens as NetKV defines it."""
    return run.tbt_s.mean


def refused_share(run: Summary) -> float | None:
    """Return the share of requests that were rejected for lack of room; all times are of the other requests."""
    return run.requests.rejected / run.requests.arrived if run.requests.arrived else None


def goodput_per_s(run: Summary) -> float | None:
    """Return the requests per second that met the SLO."""
    return run.goodput_per_s


def pair(
    records: Sequence[Record], case: str, first: str, second: str, metric: Metric = mean_ttft_s
) -> PolicyPairing | None:
    """Pair the two policies in a cell; None if they have no seed in common."""
    a, b = (
        {
            record.cell.seed: value
            for record in records
            if record.cell.policy == name and (value := metric(record.summary)) is not None
        }
        for name in (first, second)
    )
    seeds = sorted(a.keys() & b.keys())
    if not seeds:
        return None
    gaps = np.array([a[seed] - b[seed] for seed in seeds])
    error = float(gaps.std(ddof=1)) / sqrt(len(seeds)) if len(seeds) > 1 else None
    ours, theirs = (float(np.mean([some[seed] for seed in seeds])) for some in (a, b))
    return PolicyPairing(case, first, second, ours, theirs, float(gaps.mean()), error, len(seeds))


def pairs(
    records: Sequence[Record], second: str, metric: Metric = mean_ttft_s, first: str = OURS
) -> list[PolicyPairing]:
    """Pair one policy with another in every cell that has both."""
    found = (pair(of_profile(records, case), case, first, second, metric) for case in profiles_of(records))
    return [pairing for pairing in found if pairing is not None]


def without_lying_oracle(found: Iterable[PolicyPairing]) -> list[PolicyPairing]:
    """Return the pairings of cells whose oracle does not lie."""
    return [pairing for pairing in found if CASES[pairing.case].oracle != "lying"]


def losses(records: Sequence[Record]) -> list[PolicyPairing]:
    """Return the cells where foresight's mean TTFT is significantly above a rival's, the worst first."""
    found = [pair for rival in RIVALS for pair in pairs(records, rival) if pair.is_higher]
    return sorted(found, key=lambda pairing: (-pairing.ratio, pairing.case, pairing.second))


def geometric_mean(ratios: Iterable[float]) -> float | None:
    """Return the geometric mean of positive numbers; None if there are none."""
    logs = [log(ratio) for ratio in ratios]
    return exp(float(np.mean(logs))) if logs else None


@dataclass(frozen=True, slots=True)
class Term:
    """The result of foresight without a term, compared with the better of its rivals in each cell."""

    variant: str
    mean: float
    """Geometric mean of the ratios of mean TTFT."""
    worst: float
    worst_case: str
    cells: int
    beside: float | None
    """Geometric mean of the ratios to foresight with all terms."""
    tbt_s: float
    """Mean of its TBT minus CLA*'s TBT, in seconds."""


def terms(ablation: Sequence[Record], matrix: Sequence[Record]) -> list[Term]:
    """Evaluate every variant on the cells that have it and both rivals, in the order of their first record."""
    found = []
    for variant in dict.fromkeys(record.cell.policy for record in ablation):
        ratios: dict[str, float] = {}
        slower = []
        for case in profiles_of(ablation):
            some = [*of_profile(ablation, case), *(r for r in of_profile(matrix, case) if r.cell.policy in RIVALS)]
            against = [pair(some, case, variant, rival) for rival in RIVALS]
            known = [pairing.ratio for pairing in against if pairing is not None]
            if len(known) == len(RIVALS):
                ratios[case] = max(known)
            tbt = pair(some, case, variant, "cla", tbt_s)
            slower += [tbt.difference] if tbt is not None else []
        mean = geometric_mean(ratios.values())
        if mean is None:
            continue
        worst = max(ratios, key=lambda case: ratios[case])
        beside = geometric_mean(pair.ratio for pair in pairs(ablation, OURS, first=variant))
        found.append(Term(variant, mean, ratios[worst], worst, len(ratios), beside, float(np.mean(slower))))
    return found


def matrix_findings(matrix: Sequence[Record], seen: Sequence[Record]) -> list[ExpectationFinding]:
    """Return every claim on the matrix, and on the cells compared with the clairvoyant search."""
    return [*_nowhere_worse(matrix), *_leads(matrix), _p99(matrix), _tbt(matrix), *_goodput(matrix), *_seen(seen)]


def _nowhere_worse(matrix: Sequence[Record]) -> list[ExpectationFinding]:
    found = []
    for rival in RIVALS:
        all_pairs = pairs(matrix, rival)
        fair = without_lying_oracle(all_pairs)
        lost, won = (
            [pairing for pairing in fair if pairing.is_higher],
            [pairing for pairing in fair if pairing.is_lower],
        )
        worst = max(lost, key=lambda pairing: pairing.ratio, default=None)
        sentence = f"Over {len(fair)} cells, it is lower in {len(won)} and higher in {len(lost)}"
        sentence += f", by at most {worst.ratio - 1:.2%} ({worst.case})." if worst else "."
        found.append(
            _finding("truthful or silent oracle", f"mean TTFT not above {rival} in any cell", not lost, sentence, fair)
        )
        lied = [pairing for pairing in all_pairs if CASES[pairing.case].oracle == "lying"]
        if lied:
            most = max(lied, key=lambda pairing: pairing.ratio)
            many = sum(pairing.is_higher for pairing in lied)
            details = f"Higher in {many} of {len(lied)} cells; the worst ratio is {most.ratio:.3f} ({most.case})."
            found.append(
                _finding("lying oracle", f"mean TTFT at most 10 % above {rival}", most.ratio <= 1.1, details, lied)
            )
    return found


def _leads(matrix: Sequence[Record]) -> list[ExpectationFinding]:
    found = []
    for rival, least in LEADS.items():
        fair = without_lying_oracle(pairs(matrix, rival))
        mean = geometric_mean(pairing.ratio for pairing in fair)
        if mean is not None:
            sentence = f"Geometric mean of {len(fair)} ratios of mean TTFT: {mean:.4f}, {1 - mean:.1%} below."
            claim = f"at least {least:.0%} below {rival}"
            found.append(_finding("truthful or silent oracle", claim, 1 - mean >= least, sentence, fair))
    return found


def _p99(matrix: Sequence[Record]) -> ExpectationFinding:
    fair = [pairing for rival in RIVALS for pairing in without_lying_oracle(pairs(matrix, rival, p99_s))]
    worse = [pairing for pairing in fair if pairing.is_higher]
    share = len(worse) / max(len(fair), 1)
    details = ", ".join(
        f"{pairing.case} against {pairing.second} ({pairing.ratio - 1:+.1%})" for pairing in _worst(worse)
    )
    sentence = f"Higher in {len(worse)} of {len(fair)} comparisons with {' and '.join(RIVALS)}, {share:.1%}."
    sentence += f" The largest: {details}." if details else ""
    claim = f"P99 TTFT higher in at most {P99_SHARE:.0%}"
    return _finding("truthful or silent oracle", claim, share <= P99_SHARE, sentence, fair)


def _tbt(matrix: Sequence[Record]) -> ExpectationFinding:
    fair = without_lying_oracle(pairs(matrix, "cla", tbt_s))
    over = [pairing for pairing in fair if pairing.difference > TBT_WITHIN_S]
    theirs = {pair.case: pair.difference for pair in pairs(matrix, "cla", tbt_s, first="netkv")}
    details = "; ".join(
        f"{pairing.case} {pairing.difference * 1e3:+.2f} ms (netkv {theirs.get(pairing.case, 0.0) * 1e3:+.2f})"
        for pairing in sorted(over, key=lambda pairing: -pairing.difference)[:6]
    )
    sentence = f"More than 1 ms above in {len(over)} of {len(fair)} cells" + (f": {details}." if details else ".")
    return _finding("truthful or silent oracle", "TBT within 1 ms of cla", not over, sentence, fair)


def _goodput(matrix: Sequence[Record]) -> list[ExpectationFinding]:
    found = []
    for rival in RIVALS:
        fair = without_lying_oracle(pairs(matrix, rival, goodput_per_s))
        lost, won = (
            [pairing for pairing in fair if pairing.is_lower],
            [pairing for pairing in fair if pairing.is_higher],
        )
        worst = min(lost, key=lambda pairing: pairing.ratio, default=None)
        sentence = f"Over {len(fair)} cells, it is higher in {len(won)} and lower in {len(lost)}"
        if worst is not None:
            sentence += (
                f", by at most {1 - worst.ratio:.2%} ({worst.case}: {worst.ours:.2f}/s instead of {worst.theirs:.2f}/s)"
            )
        found.append(
            _finding(
                "truthful or silent oracle", f"goodput not below {rival} in any cell", not lost, f"{sentence}.", fair
            )
        )
    return found


def _seen(seen: Sequence[Record]) -> list[ExpectationFinding]:
    ratios = {name: [pair.ratio for pair in pairs(seen, CLAIRVOYANT, first=name)] for name in (OURS, "netkv", "cla")}
    means = {name: mean for name, some in ratios.items() if (mean := geometric_mean(some)) is not None}
    if OURS not in means:
        return []
    details = ", ".join(f"{name} {mean - 1:+.1%}" for name, mean in means.items())
    sentence = (
        f"Over {len(ratios[OURS])} cells, geometric means: {details}; foresight at most {max(ratios[OURS]) - 1:+.1%}."
    )
    holds = means[OURS] - 1 <= SEEN_WITHIN
    return [
        _finding("future known", f"within {SEEN_WITHIN:.0%} of the descent", holds, sentence, pairs(seen, CLAIRVOYANT))
    ]


def _worst(found: Sequence[PolicyPairing]) -> list[PolicyPairing]:
    return sorted(found, key=lambda pairing: (-pairing.ratio, pairing.case))[:3]


def _finding(profile: str, claim: str, holds: bool, sentence: str, some: Sequence[PolicyPairing]) -> ExpectationFinding:
    if not some or any(pairing.error is None for pairing in some):
        return ExpectationFinding(profile, claim, "unclear", sentence + " One seed cannot show significance.")
    verdict: Holds = "holds" if holds else "does not hold"
    return ExpectationFinding(profile, claim, verdict, sentence)
