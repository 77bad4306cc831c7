"""Reads rows of InferenceX: runs of closed loops with `conc` clients and random lengths, times in seconds."""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvroute.measurements.benchmark_runs import BenchmarkRun
from kvroute.measurements.reports import ReportedRuns
from kvroute.types import InputError

MEAN_LENGTH = 0.9
"""Mean of the lengths as a share of `isl` and `osl`: they are uniform between 0.8 and 1."""
CONFIGURATION = (
    "model", "hardware", "framework", "precision", "spec_method", "decode_tp", "decode_ep", "decode_dp_attention",
)  # fmt: skip
"""Columns that have one value for one engine."""
OPTIONS = {"model": "model", "hardware": "hardware", "decode_tp": "tp"}
"""Options of the command for some of these columns; the others are chosen by --where."""
_TIMES = ("median_ttft", "median_tpot")
_NUMBERS = ("isl", "osl", "conc", *_TIMES)
_LINES_SHOWN = 5


def is_inferencex(text: str) -> bool:
    """Return whether a file that begins with this text has rows of InferenceX."""
    columns = text[: text.find("\n")].strip().split(",")
    return {"isl", "osl", "conc", "hardware"} <= set(columns)


def read_inferencex(path: Path, text: str, chosen: Mapping[str, str]) -> ReportedRuns:
    """Read the aggregated runs of one engine; repeated runs at one load become their median.

    Args:
        path: the file, for messages.
        text: what is in it.
        chosen: values of columns, by the column's name.

    Raises:
        InputError: a column is missing or has no number, a selection matches nothing, more than one engine is left, or
            most values cannot be right.
    """
    rows = csv.DictReader(text.splitlines())
    columns = rows.fieldnames or ()
    if missing := [name for name in (*CONFIGURATION, "disagg", *_NUMBERS, *chosen) if name not in columns]:
        raise InputError(f"the column {missing[0]} is missing", where=f"{path} line 1", hint="give rows of InferenceX")
    found: list[tuple[int, Mapping[str, str]]] = [(rows.line_num, row) for row in rows]
    for column, value in chosen.items():
        found = _with_value(found, column, value, str(path))
    aggregated = [(line, row) for line, row in found if row["disagg"] != "True"]
    remarks = []
    if pairs := len(found) - len(aggregated):
        remarks.append(f"{pairs} runs with prefill and decode on different engines are left out: TTFT has the handover")
    if not aggregated:
        hint = "choose other rows"
        raise InputError("has no run of an engine that prefills and decodes", where=str(path), hint=hint)
    for column in CONFIGURATION:
        values = sorted({row[column] for _, row in aggregated})
        if len(values) > 1:
            option = f"--{OPTIONS[column]}" if column in OPTIONS else f"--where {column}=VALUE"
            what = f"has several values of {column}: {', '.join(values)}"
            raise InputError(what, where=str(path), hint=f"choose with {option}")
    ranks = int(aggregated[0][1]["decode_tp"]) if aggregated[0][1]["decode_dp_attention"] == "True" else 1
    if ranks > 1:
        remarks.append(f"batches are those of one of {ranks} data-parallel ranks")
    if aggregated[0][1]["spec_method"] not in ("", "none"):
        remarks.append("with speculative decoding, decode is the time per token, not per step")
    points = [(line, _point(row, f"{path} line {line}", ranks)) for line, row in aggregated]
    return ReportedRuns(_repeats(_plausible(points, str(path), remarks)), tuple(remarks))


def _with_value(
    rows: Sequence[tuple[int, Mapping[str, str]]], column: str, value: str, where: str
) -> list[tuple[int, Mapping[str, str]]]:
    left = [(line, row) for line, row in rows if row[column].lower() == value.lower()]
    if not left:
        have = ", ".join(sorted({row[column] for _, row in rows}))
        raise InputError(f"has no rows with {column} {value}", where=where, hint=f"choose one of {have}")
    return left


def _point(row: Mapping[str, str], where: str, ranks: int) -> BenchmarkRun:
    """Return a row as one rank sees it."""
    isl, osl, conc, ttft_s, tpot_s = (_number(row, name, where) for name in _NUMBERS)
    latency_s = _number(row, "median_e2el", where) if row.get("median_e2el") else None
    clients, output_tokens = conc / ranks, MEAN_LENGTH * osl
    return BenchmarkRun(
        where=where,
        input_tokens=MEAN_LENGTH * isl,
        output_tokens=output_tokens,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        requests_per_s=clients / (ttft_s + tpot_s * (output_tokens - 1)),
        clients=clients,
        latency_s=latency_s,
    )


def _number(row: Mapping[str, str], name: str, where: str) -> float:
    try:
        number = float(row[name])
    except (TypeError, ValueError):
        raise InputError(f"{row[name]!r} is not a number", where=f"{where} column {name}", hint="correct it") from None
    if not 0 < number < float("inf"):
        raise InputError(f"{row[name]} is not valid", where=f"{where} column {name}", hint="give a number above 0")
    return number


def _plausible(points: Sequence[tuple[int, BenchmarkRun]], where: str, remarks: list[str]) -> list[BenchmarkRun]:
    """Leave out rows that contradict themselves; if these are most of them, a unit is wrong."""
    problems = {line: problem for line, point in points if (problem := point.problem())}
    if 2 * len(problems) > len(points):
        line, problem = next(iter(problems.items()))
        what = f"{problem} ({len(problems)} of {len(points)} rows are like this)"
        raise InputError(what, where=f"{where} line {line}", hint="correct the units: all times are in seconds")
    if problems:
        lines = ", ".join(map(str, list(problems)[:_LINES_SHOWN])) + (", ..." if len(problems) > _LINES_SHOWN else "")
        remarks.append(f"{len(problems)} rows that contradict themselves are left out (lines {lines})")
    return [point for line, point in points if line not in problems]


def _repeats(points: Sequence[BenchmarkRun]) -> tuple[BenchmarkRun, ...]:
    """Return one point for each load, with the median of TTFT and TPOT."""
    runs: dict[tuple[float, float, float | None], list[BenchmarkRun]] = defaultdict(list)
    for point in points:
        runs[point.input_tokens, point.output_tokens, point.clients].append(point)
    return tuple(_median(alike) for alike in runs.values())


def _median(alike: Sequence[BenchmarkRun]) -> BenchmarkRun:
    first = alike[0]
    ttft_s = statistics.median(point.ttft_s for point in alike)
    tpot_s = statistics.median(point.tpot_s for point in alike)
    assert first.clients is not None, "a closed loop"
    rate = first.clients / (ttft_s + tpot_s * (first.output_tokens - 1))
    return BenchmarkRun(first.where, first.input_tokens, first.output_tokens, ttft_s, tpot_s, rate, first.clients)
