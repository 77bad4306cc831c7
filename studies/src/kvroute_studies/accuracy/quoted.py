"""What the pages quote of predictions beside measured runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvroute.planner.comparison.cells import Record
from kvroute_studies.accuracy.cases import CALIBRATED, UNCALIBRATED
from kvroute_studies.accuracy.tables import (
    JUDGED,
    calibration_grid,
    layers_grid,
    median_error,
    predictions_grid,
    stages_grid,
    summary_grid,
)
from kvroute_studies.shared.result_files import Quoted, ResultTable, table_of

CODE = (
    "kvroute/llm",
    "kvroute/sim/engine",
    "kvroute/sim/agenda.py",
    "kvroute/timing/steps.py",
    "kvroute/timing/layers.py",
    "kvroute_studies/accuracy/cases.py",
    "kvroute_studies/accuracy/inputs.py",
    "kvroute_studies/accuracy/predictions.py",
    "kvroute_studies/accuracy/run.py",
)


def _tables(records: Sequence[Record]) -> Mapping[str, ResultTable]:
    grids = {
        "summary": summary_grid(records),
        "stages-calibrated": stages_grid(records, CALIBRATED),
        "stages-uncalibrated": stages_grid(records, UNCALIBRATED),
        "predictions": predictions_grid(records),
        "layers": layers_grid(records),
        "calibrations": calibration_grid(records),
    }
    return {name: table_of(grid) for name, grid in grids.items()}


def _figures(records: Sequence[Record]) -> Mapping[str, str]:
    return {
        f"{protocol}-{name.replace('.', '-')}": f"{median_error(records, protocol, name):.1f} %"
        for protocol in (CALIBRATED, UNCALIBRATED)
        for name in JUDGED
    }


QUOTED: Mapping[str, Quoted] = {
    "accuracy": Quoted(("accuracy",), 1, CODE, _tables, _figures, traces=("measured",)),
}
"""By name of the result."""
