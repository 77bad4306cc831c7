"""What the pages quote of never-worse: its targets, for the seeds that were visible while the policy was made and for
fresh ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvroute.planner.comparison.cells import Record
from kvroute_studies.never_worse.cases import CASES
from kvroute_studies.never_worse.findings import (
    LEADS,
    P99_SHARE,
    SEEN_WITHIN,
    TBT_WITHIN_S,
    PolicyPairing,
    geometric_mean,
    p99_s,
    pairs,
    tbt_s,
    without_lying_oracle,
)
from kvroute_studies.never_worse.verdicts import CLAIRVOYANT, FORESEEN, MATRIX, RIVALS
from kvroute_studies.shared.result_files import ROUTING, Quoted, ResultTable

CODE = (
    *ROUTING,
    "kvroute_studies/netkv/readings.py",
    "kvroute_studies/netkv/setup.py",
    "kvroute_studies/never_worse/cases.py",
    "kvroute_studies/never_worse/clairvoyant.py",
    "kvroute_studies/never_worse/run.py",
    "kvroute_studies/never_worse/verdicts.py",
)
VISIBLE_SEEDS = 8
"""Number of seeds, from 0, with which parameters of the policy were chosen."""
_NAMES = {"cla": "CLA*", "netkv": "NetKV"}
_TITLES = (
    *(
        (f"geometric mean of mean TTFT, against {_NAMES[rival]}", f"{100 * least:.0f} % below")
        for rival, least in LEADS.items()
    ),
    *((f"cells worse than {_NAMES[rival]} by more than two standard errors", "none") for rival in RIVALS),
    ("P99 worse", f"{100 * P99_SHARE:.0f} %"),
    (f"TBT more than {1e3 * TBT_WITHIN_S:.0f} ms above CLA*'s", "none"),
    *((f"wrong telemetry: cells worse than {_NAMES[rival]}", "bounded") for rival in RIVALS),
    ("above a local search that knows all future requests", f"{100 * SEEN_WITHIN:.0f} %"),
)


def _targets(records: Sequence[Record]) -> Mapping[str, ResultTable]:
    matrix = [record for record in records if record.cell.experiment == MATRIX.name]
    seen = [record for record in records if record.cell.experiment == FORESEEN.name]
    groups = [
        [record for record in matrix if (record.cell.seed < VISIBLE_SEEDS) == visible] for visible in (True, False)
    ]
    columns = ["", "target"]
    cells: list[list[str]] = []
    for group in groups:
        if group:
            seeds = sorted({record.cell.seed for record in group})
            columns.append(f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}")
            cells.append([*_of(group), _foreseen(seen) if group is groups[0] else ""])
    rows = [[*title, *(column[number] for column in cells)] for number, title in enumerate(_TITLES)]
    return {"targets": ResultTable(columns, rows)}


def _of(matrix: Sequence[Record]) -> list[str]:
    fair = {rival: without_lying_oracle(pairs(matrix, rival)) for rival in RIVALS}
    texts = []
    for rival, least in LEADS.items():
        mean = geometric_mean(pairing.ratio for pairing in fair[rival])
        texts.append(_marked(f"{100 * (1 - mean):.1f} %", 1 - mean >= least) if mean is not None else "")
    texts += [_lost(fair[rival], len(fair[rival])) for rival in RIVALS]
    tails = [pairing for rival in RIVALS for pairing in without_lying_oracle(pairs(matrix, rival, p99_s))]
    worse = sum(pairing.is_higher for pairing in tails)
    texts.append(
        _marked(f"{worse} of {len(tails)} ({100 * worse / max(len(tails), 1):.1f} %)", worse <= P99_SHARE * len(tails))
    )
    slow = [pairing.difference for pairing in without_lying_oracle(pairs(matrix, "cla", tbt_s))]
    slow = [excess_s for excess_s in slow if excess_s > TBT_WITHIN_S]
    spread = f", {1e3 * min(slow):+.1f} to {1e3 * max(slow):+.1f} ms" if slow else ""
    texts.append(_marked(f"{len(slow)} cells{spread}", not slow))
    for rival in RIVALS:
        lying = [pairing for pairing in pairs(matrix, rival) if CASES[pairing.case].oracle == "lying"]
        texts.append(_lost(lying, len(lying)))
    return texts


def _lost(found: Sequence[PolicyPairing], cells: int) -> str:
    """Return the cells that foresight loses, the worst first, by name."""
    lost = sorted((pairing for pairing in found if pairing.is_higher), key=lambda pairing: -pairing.ratio)
    if not any(pairing.error is not None for pairing in found):
        above = sum(pairing.ratio > 1 for pairing in found)
        most = max((pairing.ratio for pairing in found), default=1.0)
        return f"not known with one seed; above in {above} of {cells}, at most {100 * (most - 1):+.1f} %"
    names = "; ".join(f"`{pairing.case}` {100 * (pairing.ratio - 1):+.1f} %" for pairing in lost)
    return _marked(f"{len(lost)} of {cells}" + (f": {names}" if names else ""), not lost)


def _foreseen(seen: Sequence[Record]) -> str:
    ratios = {pairing.case: pairing.ratio for pairing in pairs(seen, CLAIRVOYANT)}
    mean = geometric_mean(ratios.values())
    if mean is None:
        return ""
    worst = max(ratios, key=lambda case: ratios[case])
    over = sum(ratio > 1 + SEEN_WITHIN for ratio in ratios.values())
    text = f"{100 * (mean - 1):.1f} % in the mean of {len(ratios)} cells"
    return _marked(f"{text}; {over} above, at most {100 * (ratios[worst] - 1):.1f} % (`{worst}`)", not over)


def _marked(text: str, met: bool) -> str:
    """Return a text, bold if the target is missed."""
    return text if met else f"**{text}**"


QUOTED: Mapping[str, Quoted] = {
    "never-worse": Quoted(
        (MATRIX.name, FORESEEN.name), 2 * VISIBLE_SEEDS, CODE, _targets, traces=("mooncake", "coding-agent")
    )
}
"""By name of the result."""
