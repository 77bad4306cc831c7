"""What the pages quote of copies of cached prefixes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvroute.planner.comparison.cells import Record
from kvroute_studies.prefix_copies.page import copies_grid
from kvroute_studies.shared.result_files import ROUTING, Quoted, ResultTable, table_of

CODE = (
    *ROUTING,
    "kvroute/planner/throughput",
    "kvroute_studies/netkv/readings.py",
    "kvroute_studies/netkv/setup.py",
    "kvroute_studies/prfaas/case_study.py",
    "kvroute_studies/prefix_copies/run.py",
)


_TITLES = {
    "own-caches": "each site its own",
    "own-caches+pool": "its own, and siblings'",
    "exchange": "exchanged",
    "exchange+ahead": "exchanged, and ahead of demand",
    "exchange+pool": "exchanged, and siblings'",
    "exchange+pool+ahead": "all three",
}
_COLUMNS = {"out GB": "remote to home, GB", "in GB": "home to remote, GB"}
_SHOWN = 8
"""Columns of the terminal's table that the page has: those after them are parts of the bytes."""


def _caches(records: Sequence[Record]) -> Mapping[str, ResultTable]:
    whole = table_of(copies_grid(records))
    rows = [[profile, _TITLES[policy], *numbers] for profile, policy, *numbers in whole.rows]
    columns = [_COLUMNS.get(title, title) for title in whole.columns[:_SHOWN]]
    return {"caches": ResultTable(columns, [row[:_SHOWN] for row in rows])}


QUOTED: Mapping[str, Quoted] = {"prefix-copies": Quoted(("prefix-copies",), 5, CODE, _caches)}
"""By name of the result."""
