"""What the pages quote of DualPath's experiments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from kvroute.planner.comparison.cells import Record
from kvroute.policies.storage.dualpath import ABLATION
from kvroute.report.series import of_profile, profiles_of, values_of
from kvroute_studies.dualpath.run import BASIC, DUAL_PATH
from kvroute_studies.dualpath.tables import METRICS, TIME, UNCLEAR, ComparedMetric, gain, points, records_at
from kvroute_studies.shared.result_files import Quoted, ResultTable

CODE = (
    "kvroute/compiled.py",
    "kvroute/llm",
    "kvroute/policies/storage",
    "kvroute/sim/storage",
    "kvroute/sim/workload/trajectories.py",
    "kvroute_studies/dualpath/run.py",
    "kvroute_studies/dualpath/setup.py",
)
"""Its simulation is one of storage NICs and compute NICs alone."""
_ADDS = {
    "basic": "prefill nodes read, whole requests are loaded before they are computed, engines are chosen in turn",
    "layerwise": "one layer is copied to the GPU while the previous one computes",
    "dual-path": "prefill and decode nodes read in turn",
    "scheduling": "engines by load, the side with the shorter storage queue reads, compute quota",
    "split-reads": "both sides read a part of each request, so that both end at the same time",
    "oracle": "no reads and no transfers: the bound",
}
_AXES = {
    "mfu": "MFU {:g}",
    "buffer": "buffers of {:g} GB",
    "storage": "{:.0%} of the storage NIC's rate",
    "quota": "compute quota of {:g} s",
}
"""Titles of the assumptions by axis."""


def _mean(records: Sequence[Record], policy: str, figure: str) -> float:
    values = [record.figures[figure] for record in records if record.cell.policy == policy]
    return sum(values) / len(values)


def _gains(records: Sequence[Record], policy: str, base: str, metric: ComparedMetric = TIME) -> list[float]:
    """Return how many times better a policy is at each point, in the order of the points; means of seeds."""
    found = (gain(metric, records_at(records, *point), policy, base) for point in points(records))
    return [estimated.mean for estimated in found if estimated is not None]


def _range(values: Sequence[float], digits: int = 2) -> str:
    ends = dict.fromkeys(f"{value:.{digits}f}" for value in (min(values), max(values)))
    return " to ".join(ends)


def _where(records: Sequence[Record], axis: str, value: float) -> list[Record]:
    return [record for record in records if record.cell.settings[axis] == value]


def _systems(records: Sequence[Record]) -> Mapping[str, ResultTable]:
    agents = values_of(records, "agents")
    columns = ["System", "Adds"]
    rows = [[f"`{policy}`", _ADDS[policy]] for policy in ABLATION]
    for count in agents:
        some = _where(records, "agents", count)
        columns += [f"{count:,.0f} agents, s", "Gain"]
        for row, policy in zip(rows, ABLATION, strict=True):
            [gained] = _gains(some, policy, BASIC)
            row += [f"{_mean(some, policy, 'end_s'):,.0f}", f"{gained:.2f}"]
    return {"systems": ResultTable(columns, rows)}


def _split_gain(records: Sequence[Record]) -> Mapping[str, str]:
    gains = [100 * (gain - 1) for gain in _gains(records, "split-reads", DUAL_PATH)]
    return {"split-reads": f"{_range(gains, 0)} %"}


def _offline(records: Sequence[Record]) -> Mapping[str, str]:
    return {"gain": _range(_gains(records, DUAL_PATH, BASIC))}


def _ratio(records: Sequence[Record]) -> Mapping[str, str]:
    def seconds(prefill: int, decode: int, policy: str) -> str:
        some = _where(_where(records, "prefill", prefill), "decode", decode)
        return f"{_mean(some, policy, 'end_s'):,.0f}"

    return {"prefill-only-2p1d": seconds(2, 1, BASIC), "both-sides-1p1d": seconds(1, 1, DUAL_PATH)}


def _append(records: Sequence[Record]) -> Mapping[str, str]:
    generated = _where(records, "generate", 1)
    return {
        f"append-{factor:g}": f"{_gains(_where(generated, 'append', factor), DUAL_PATH, BASIC)[0]:.2f}"
        for factor in (1, 4)
    }


def _online(records: Sequence[Record]) -> Mapping[str, str]:
    metric = METRICS["dualpath-online"]
    return {
        profile: _range(_gains(of_profile(records, profile), DUAL_PATH, BASIC, metric))
        for profile in profiles_of(records)
    }


def _balance(records: Sequence[Record]) -> Mapping[str, str]:
    policies = ("dual-path", DUAL_PATH, "split-reads")
    windows = values_of(records, "window")
    nics = {
        policy: ", ".join(
            f"{_mean(_where(records, 'window', window), policy, 'storage_balance'):.2f}" for window in windows
        )
        for policy in policies
    }
    return nics | {
        f"attention-{policy}": f"{_mean(records, policy, 'attention_balance'):.2f}" for policy in policies[:2]
    }


def _scale(records: Sequence[Record]) -> Mapping[str, str]:
    spreads = []
    for policy in dict.fromkeys(record.cell.policy for record in records):
        times = [record.figures["end_s"] for record in records if record.cell.policy == policy]
        spreads.append(max(times) / min(times) - 1)
    return {"spread": f"{100 * max(spreads):.0f} %"}


def _assumptions(records: Sequence[Record]) -> Mapping[str, ResultTable]:
    steps, by_value = [], []
    for before, after in (*pairwise(list(ABLATION)[:4]), (BASIC, DUAL_PATH)):
        gains = _gains(records, after, before)
        faster = sum(gain > 1 + UNCLEAR for gain in gains)
        slower = sum(gain < 1 - UNCLEAR for gain in gains)
        steps.append([f"`{after}`", f"`{before}`", f"{faster} of {len(gains)}", str(slower), _range(gains)])
    for axis, title in _AXES.items():
        for value in values_of(records, axis):
            gains = _gains(_where(records, axis, value), DUAL_PATH, BASIC)
            by_value.append([title.format(value).replace("%", " %"), f"{sum(gains) / len(gains):.2f}", _range(gains)])
    return {
        "steps": ResultTable(["Step", "Compared with", "Points where it is faster", "slower", "Times as fast"], steps),
        "assumptions": ResultTable(["Assumption", "Mean", "Range"], by_value),
    }


QUOTED: Mapping[str, Quoted] = {
    "dualpath-ablation": Quoted(("dualpath-ablation",), 5, CODE, _systems, _split_gain),
    "dualpath-append": Quoted(("dualpath-append",), 5, CODE, figures=_append),
    "dualpath-assumptions": Quoted(("dualpath-assumptions",), 2, CODE, _assumptions),
    "dualpath-balance": Quoted(("dualpath-balance",), 5, CODE, figures=_balance),
    "dualpath-offline": Quoted(("dualpath-offline",), 5, CODE, figures=_offline),
    "dualpath-online": Quoted(("dualpath-online",), 5, CODE, figures=_online),
    "dualpath-ratio": Quoted(("dualpath-ratio",), 5, CODE, figures=_ratio),
    "dualpath-scale": Quoted(("dualpath-scale",), 1, CODE, figures=_scale),
}
"""By name of the result."""
