"""What the pages quote of the simulated day."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvroute.planner.comparison.cells import Record
from kvroute_studies.autoscaling.page import autoscaling_grid, saving
from kvroute_studies.autoscaling.run import QUEUE, STATIC
from kvroute_studies.shared.result_files import ROUTING, Quoted, ResultTable, table_of

CODE = (*ROUTING, "kvroute_studies/autoscaling/run.py")


def _settings(records: Sequence[Record]) -> Mapping[str, ResultTable]:
    return {"settings": table_of(autoscaling_grid(records))}


def _savings(records: Sequence[Record]) -> Mapping[str, str]:
    figures = {}
    for name, policy in (("below-fixed", STATIC), ("below-queue-length", QUEUE)):
        saved = saving(records, policy)
        if saved is not None and saved.half_width is not None:
            figures[name] = f"{100 * saved.mean:.0f} % (±{100 * saved.half_width:.0f} %)"
    return figures


QUOTED: Mapping[str, Quoted] = {"autoscaling": Quoted(("autoscaling",), 2, CODE, _settings, _savings)}
"""By name of the result."""
