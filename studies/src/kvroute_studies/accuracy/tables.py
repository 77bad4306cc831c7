"""The tables of `accuracy`: errors of each set, of each stage, and predictions of cases whose results are not given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvroute.planner.comparison.cells import Record
from kvroute.report.grid import UNKNOWN, Grid, GridEntry, Heading
from kvroute_studies.accuracy.cases import AT_CAPACITY, CALIBRATED, CALIBRATING, LAYERS, UNCALIBRATED
from kvroute_studies.accuracy.run import STEP_FACTORS

JUDGED = ("ttft.median", "ttft.p90", "tpot.mean", "e2e.mean")
"""Figures of a stage that are compared in the summary."""
TARGETS_PERCENT: Mapping[str, tuple[float, ...]] = {
    CALIBRATED: (5.0, 5.0, 5.0, 5.0),
    UNCALIBRATED: (12.0, 12.0, 12.0, 12.0),
}
"""Highest median error of each of these below 80 % of the slots."""
_TITLES = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "latency"}
OVERLOADED = 0.01
"""Share of requests that fail from which on a stage counts as overloaded."""


@dataclass(frozen=True, slots=True)
class PredictedStage:
    """A stage of a case under one protocol, with what was measured."""

    case: str
    protocol: str
    number: int
    figures: Mapping[str, float]

    def predicted(self, name: str) -> float | None:
        """Return a predicted figure such as `ttft.mean`."""
        return self.figures.get(f"{self.number}.{name}")

    def measured(self, name: str) -> float | None:
        """Return the measured one; None: not given."""
        return self.figures.get(f"measured.{self.number}.{name}")

    def error(self, name: str) -> float | None:
        """Return predicted over measured, less 1."""
        predicted, measured = self.predicted(name), self.measured(name)
        return predicted / measured - 1 if predicted is not None and measured else None

    @property
    def slots(self) -> float:
        """Share of its slots that the engine has in use: measured, or else predicted."""
        measured = self.measured("slots")
        return measured if measured is not None else self.figures[f"{self.number}.slots"]

    @property
    def regime(self) -> str:
        """How loaded the engine is."""
        if self.figures[f"{self.number}.failed"] > OVERLOADED * self.figures[f"{self.number}.requests"]:
            return "overloaded"
        return "at capacity" if self.slots >= AT_CAPACITY else "normal"


def stages_of(records: Sequence[Record], *protocols: str) -> Iterator[PredictedStage]:
    """Yield the stages of the records under these protocols."""
    for record in records:
        if record.cell.policy in protocols:
            number = 0
            while f"{number}.requests" in record.figures:
                yield PredictedStage(record.cell.profile, record.cell.policy, number, record.figures)
                number += 1


def summary_grid(records: Sequence[Record]) -> Grid:
    """Return the errors of the runs under inference-perf by protocol and regime: median and p90 over stages."""
    headings = [Heading("protocol"), Heading("load"), Heading("stages")]
    headings += [Heading(_title(name)) for name in JUDGED]
    rows = []
    for protocol in (CALIBRATED, UNCALIBRATED):
        for regime in ("normal", "at capacity", "overloaded"):
            found = [stage for stage in _measured(records, protocol) if stage.regime == regime]
            if found:
                targets = TARGETS_PERCENT[protocol] if regime == "normal" else ()
                rows.append((*map(GridEntry, (protocol, regime, str(len(found)))), *_spreads(found, targets)))
    caption = (
        "Median / 90th percentile over stages of the absolute error, in per cent; after it the target of the median."
    )
    return Grid("vLLM on H100 under inference-perf", tuple(headings), tuple(rows), caption, 2)


def median_error(records: Sequence[Record], protocol: str, name: str) -> float:
    """Return the median of the absolute error of a figure below 80 % of the slots, in per cent."""
    found = [stage for stage in _measured(records, protocol) if stage.regime == "normal"]
    return float(np.median(_errors(found, name)))


def stages_grid(records: Sequence[Record], protocol: str) -> Grid:
    """Return measured values and errors of every stage whose results are given."""
    headings = [Heading("case"), Heading("requests/s"), Heading("slots")]
    headings += [Heading(f"{_title(name)}", "measured, and error of the prediction") for name in JUDGED]
    rows = []
    for stage in _measured(records, protocol):
        entries = [_compared(stage, name) for name in JUDGED]
        rows.append((*_labels(stage), *entries))
    caption = "Measured, and predicted over measured less 1. At capacity: in brackets for steps 10 % faster and slower."
    return Grid(f"Every stage, {protocol}", tuple(headings), tuple(rows), caption, 2)


def predictions_grid(records: Sequence[Record]) -> Grid:
    """Return the predictions of cases whose results are left out, calibrated where a run of the model is given."""
    calibrated = {(stage.case, stage.number): stage for stage in stages_of(records, CALIBRATED)}
    headings = [Heading("case"), Heading("requests/s"), Heading("slots"), Heading("protocol")]
    headings += [Heading(_title(name)) for name in (*JUDGED[:1], "ttft.mean", *JUDGED[1:])]
    headings.append(Heading("failed %"))
    rows = []
    for other in stages_of(records, UNCALIBRATED):
        stage = calibrated.get((other.case, other.number), other)
        if stage.measured("ttft.mean") is None:
            entries = [_in_range(stage, name) for name in (*JUDGED[:1], "ttft.mean", *JUDGED[1:])]
            failed = 100 * stage.figures[f"{stage.number}.failed"] / stage.figures[f"{stage.number}.requests"]
            rows.append((*_labels(stage), GridEntry(stage.protocol), *entries, GridEntry(f"{failed:.0f}")))
    caption = "At capacity and above: in brackets for steps 10 % faster and slower."
    return Grid("Cases whose results are not given", tuple(headings), tuple(rows), caption, 2)


def layers_grid(records: Sequence[Record]) -> Grid:
    """Return LLMServingSim's runs, with its own errors."""
    headings = [Heading("run")]
    for name in ("ttft.mean", "tpot.mean", "e2e.mean"):
        headings += [Heading(_title(name)), Heading("error"), Heading("LLMServingSim's")]
    rows = []
    for stage in stages_of(records, LAYERS):
        entries = [GridEntry(stage.case)]
        for name in ("ttft.mean", "tpot.mean", "e2e.mean"):
            predicted, error = stage.predicted(name), stage.error(name)
            theirs = stage.figures.get(f"theirs.0.{name}")
            entries += [GridEntry(_time(predicted)), GridEntry(_percent(error)), GridEntry(_percent(theirs))]
        rows.append(tuple(entries))
    return Grid("vLLM 0.19, steps from tables of layers", tuple(headings), tuple(rows), "Predicted, and its error.")


def calibration_grid(records: Sequence[Record]) -> Grid:
    """Return the terms of the calibrated engines."""
    terms = {
        "base_s": ("base ms", 1e3),
        "prompt_token_s": ("prompt token us", 1e6),
        "request_s": ("request us", 1e6),
        "context_token_s": ("context token ns", 1e9),
        "overhead_s": ("overhead ms", 1e3),
        "streaming_request_s": ("streaming request us", 1e6),
    }
    rows = [
        (
            GridEntry(record.cell.profile.split("-", 2)[2]),
            *(GridEntry(f"{record.figures[f'calibration.{name}'] * scale:.3g}") for name, (_, scale) in terms.items()),
        )
        for record in records
        if CALIBRATING in record.cell.profile and "calibration.base_s" in record.figures
    ]
    headings = (Heading("calibrated by"), *(Heading(title) for title, _ in terms.values()))
    return Grid("Terms of a step", headings, tuple(rows))


def _measured(records: Sequence[Record], protocol: str) -> list[PredictedStage]:
    return [stage for stage in stages_of(records, protocol) if stage.measured("ttft.mean") is not None]


def _errors(stages: Sequence[PredictedStage], name: str) -> list[float]:
    return [100 * abs(error) for stage in stages if (error := stage.error(name)) is not None]


def _spreads(stages: Sequence[PredictedStage], targets: Sequence[float]) -> list[GridEntry]:
    entries = []
    for place, name in enumerate(JUDGED):
        errors = _errors(stages, name)
        text = f"{np.median(errors):.1f} / {np.quantile(errors, 0.9):.1f}"
        entries.append(GridEntry(text, f"(target {targets[place]:g})" if targets else ""))
    return entries


def _labels(stage: PredictedStage) -> tuple[GridEntry, ...]:
    load = stage.figures[f"{stage.number}.load"]
    return GridEntry(stage.case.split("-", 2)[2]), GridEntry(f"{load:g}"), GridEntry(f"{100 * stage.slots:.0f} %")


def _compared(stage: PredictedStage, name: str) -> GridEntry:
    text = f"{_time(stage.measured(name))} {_percent(stage.error(name))}"
    measured = stage.measured(name)
    ends = [stage.predicted(f"{key}.{name}") for key in STEP_FACTORS]
    if stage.regime == "normal" or None in ends or not measured:
        return GridEntry(text)
    return GridEntry(text, f"({', '.join(_percent(end / measured - 1) for end in ends if end is not None)})")


def _in_range(stage: PredictedStage, name: str) -> GridEntry:
    ends = [stage.predicted(f"{key}.{name}") for key in STEP_FACTORS]
    shown = "" if stage.regime == "normal" or None in ends else f"({' to '.join(map(_time, ends))})"
    return GridEntry(_time(stage.predicted(name)), shown)


def _title(name: str) -> str:
    quantity, _, statistic = name.partition(".")
    return f"{_TITLES[quantity]} {statistic}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return UNKNOWN
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{100 * share:+.1f} %"
