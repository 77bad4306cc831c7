"""What the pages quote of HeroServe's experiments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvroute.planner.comparison.cells import Record
from kvroute_studies.heroserve.run import AGGREGATION, ONLINE, RINGS, STALE, TABLE
from kvroute_studies.heroserve.serving import LATENCY, SCALABILITY
from kvroute_studies.heroserve.tables import range_grids
from kvroute_studies.shared.provenance import MODULES
from kvroute_studies.shared.result_files import Quoted, ResultTable, table_of

ONLINE_CODE = (
    "kvroute/compiled.py",
    "kvroute/flows",
    "kvroute/collectives",
    "kvroute/sim/groups",
    "kvroute_studies/heroserve/run.py",
)
SERVING_CODE = (
    *(entry for entry in MODULES if not entry.startswith("kvroute_studies/")),
    "kvroute_studies/heroserve/serving.py",
    "kvroute_studies/heroserve/setup.py",
    "kvroute_studies/shared/heroserve_baselines.py",
)
_TITLES = {
    TABLE: "`periodic-table`, 10 ms",
    STALE: "eight stale replicas of `outstanding`",
    RINGS: "`outstanding`, rings only",
    AGGREGATION: "`outstanding`, aggregation only",
}


def _slowdowns(records: Sequence[Record]) -> Mapping[str, ResultTable]:
    """Return the mean slowdown by policy and point."""
    spans, backgrounds = ONLINE.axes["span"], ONLINE.axes["background"]
    points = [(span, background) for background in backgrounds for span in spans]
    columns = [f"span {span:g}{', other traffic' if background else ''}" for span, background in points]
    rows = []
    for policy in ONLINE.policies:
        row = [_TITLES.get(policy, f"`{policy}`")]
        for span, background in points:
            point = {"span": span, "background": background}
            some = [
                record.figures["slowdown_mean"]
                for record in records
                if record.cell.policy == policy and record.cell.settings == point
            ]
            row.append(f"{sum(some) / len(some):.2f}")
        rows.append(row)
    return {"slowdowns": ResultTable(["policy", *columns], rows)}


def _rates(records: Sequence[Record]) -> Mapping[str, ResultTable]:
    [rates] = range_grids(SCALABILITY, records)
    return {"rates": table_of(rates)}


def _times(records: Sequence[Record]) -> Mapping[str, ResultTable]:
    ttft, tpot = range_grids(LATENCY, records)
    return {"ttft": table_of(ttft), "tpot": table_of(tpot)}


QUOTED: Mapping[str, Quoted] = {
    "heroserve-latency": Quoted("heroserve-latency", 1, SERVING_CODE, _times, profiles=("opt-66b-chat",)),
    "heroserve-online": Quoted("heroserve-online", 5, ONLINE_CODE, _slowdowns),
    "heroserve-scalability": Quoted("heroserve-scalability", 1, SERVING_CODE, _rates),
}
"""By name of the result."""
