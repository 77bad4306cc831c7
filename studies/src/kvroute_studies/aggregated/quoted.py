"""What the pages quote of the default policy beside its alternatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvroute.planner.comparison.cells import Record
from kvroute_studies.aggregated.run import CHOICE, PAIRS
from kvroute_studies.aggregated.tables import verdict, verdict_grid, worst_grid
from kvroute_studies.shared.result_files import ROUTING, Quoted, ResultTable, table_of

CODE = (
    *ROUTING,
    "kvroute_studies/netkv/readings.py",
    "kvroute_studies/netkv/setup.py",
    "kvroute_studies/never_worse/cases.py",
    "kvroute_studies/never_worse/run.py",
    "kvroute_studies/never_worse/verdicts.py",
    "kvroute_studies/aggregated/cases.py",
    "kvroute_studies/aggregated/network_cases.py",
    "kvroute_studies/aggregated/run.py",
)


def _tables(records: Sequence[Record]) -> Mapping[str, ResultTable]:
    return {"verdicts": table_of(verdict_grid(records)), "worst": table_of(worst_grid(records))}


def _figures(records: Sequence[Record]) -> Mapping[str, str]:
    judged = verdict(records)
    assert judged.worst is not None
    return {
        "cells": str(judged.cells),
        "equal": str(judged.equal),
        "most-above-best": f"{judged.worst.percent:.0f} %",
        "ttft": f"{-judged.ttft:.0f} %",
        "tpot-p99": f"{judged.tpot_p99:.0f} %",
        "rejected": f"{judged.rejected[CHOICE]:,}",
        "rejected-pairs": f"{judged.rejected[PAIRS]:,}",
    }


QUOTED: Mapping[str, Quoted] = {"default-policy": Quoted(("aggregated",), 2, CODE, _tables, _figures)}
"""By name of the result."""
