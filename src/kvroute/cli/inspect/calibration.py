"""Predicted and actual times to the first token of a recorded log, by deciles."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from kvroute.cli.inspect.columns import columns_of
from kvroute.cli.output import console, print_json
from kvroute.control import CalibrationRow, LogRecord, calibration_deciles
from kvroute.control.log import read_log
from kvroute.report.grid import Grid, GridEntry, Heading, rich_table
from kvroute.types import Arrived, Decode, DecodeFailed, Finished, InputError, Prefill, PrefillFailed


def show_calibration(log: Path, *, as_json: bool) -> None:
    """Print the deciles of a log.

    Raises:
        InputError: the log has no request with a prediction and a measured time to the first token.
    """
    header, records = read_log(log)
    pairs = list(_pairs(records, timed=header.spec.predicts))
    if not pairs:
        what = "the log has no request with a predicted and a measured time to the first token"
        hint = "record streams with `gateway: {classes: {default: {}}}`, which turns predictions on"
        raise InputError(what, where=str(log), hint=hint)
    predicted_s, actual_s = np.array(pairs).T
    rows = calibration_deciles(predicted_s, actual_s)
    errors = np.abs(actual_s - predicted_s) / np.maximum(predicted_s, 1e-9)
    median, p90 = np.quantile(errors, (0.5, 0.9)).tolist()
    if as_json:
        print_json({"requests": len(pairs), "error_p50": median, "error_p90": p90, "deciles": [*map(_plain, rows)]})
        return
    out = console()
    out.print(rich_table(_grid(rows), out.width))
    out.print(
        f"{len(pairs)} requests: the actual time differs from the prediction by {median:.0%} at the median and "
        f"{p90:.0%} at the 90th percentile."
    )


def _pairs(records: Iterable[LogRecord], *, timed: bool) -> Iterable[tuple[float, float]]:
    """Yield prediction and actual time of each request that had no failure. Args: `timed`: without it nothing was
    predicted."""
    predicted: dict[int, float] = {}
    for record in records if timed else ():
        event = record.event
        if isinstance(event, Arrived):
            first = record.decisions[0] if record.decisions else None
            if isinstance(first, Prefill | Decode) and first.ttft_s is not None:
                predicted[event.request.id] = first.ttft_s
        elif isinstance(event, PrefillFailed | DecodeFailed):
            predicted.pop(event.request_id, None)
        elif isinstance(event, Finished):
            seconds = predicted.pop(event.request_id, None)
            if seconds is not None and event.ttft_s is not None:
                yield seconds, event.ttft_s


def _plain(row: CalibrationRow) -> dict[str, Any]:
    figures = {"requests": row.requests, "predicted_s": row.predicted_s, "actual_s": row.actual_s}
    return figures | {"actual_p50_s": row.actual_p50_s, "actual_p90_s": row.actual_p90_s, "ratio": row.ratio}


def _grid(rows: tuple[CalibrationRow, ...]) -> Grid:
    labels = (Heading("decile"), tuple(GridEntry(str(number)) for number in range(1, len(rows) + 1)))
    counts = (Heading("requests"), tuple(GridEntry(str(row.requests)) for row in rows))
    figures = {
        "predicted_s": [row.predicted_s for row in rows],
        "actual_p50_s": [row.actual_p50_s for row in rows],
        "actual_p90_s": [row.actual_p90_s for row in rows],
        "actual_s": [row.actual_s for row in rows],
    }
    ratios = (Heading("actual/predicted"), tuple(GridEntry(f"{row.ratio:.2f}") for row in rows))
    columns = [labels, counts, *columns_of(figures), ratios]
    return Grid(
        "Time to the first token by deciles of the prediction",
        tuple(heading for heading, _ in columns),
        tuple(zip(*(texts for _, texts in columns), strict=True)),
    )
