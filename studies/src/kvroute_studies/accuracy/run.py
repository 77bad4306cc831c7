"""`accuracy`: measured runs of vLLM, each predicted from what is known before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvroute.planner.comparison.cells import Cell, Record
from kvroute.sim.metrics import RequestCounts, Spread, Summary, TtftParts
from kvroute.timing.steps import LinearSteps
from kvroute.types import InputError
from kvroute_studies.accuracy.cases import (
    AT_CAPACITY,
    CALIBRATED,
    LAYERS,
    LAYERS_CASES,
    PERF_CASES,
    UNCALIBRATED,
)
from kvroute_studies.accuracy.inputs import LAYERS_FOLDER, PERF_FILE, PerfRun, data_folder, read_layers, read_perf
from kvroute_studies.accuracy.predictions import (
    QUANTITIES,
    STATISTICS,
    EngineCosts,
    StagePrediction,
    costs_of,
    measured_layers,
    predict_layers,
    predict_perf,
    uncalibrated,
)
from kvroute_studies.shared.cells import Experiment

EXPERIMENT = Experiment(
    name="accuracy",
    title="Predictions of measured engines",
    source="kvroute",
    axes={},
    policies=(CALIBRATED, UNCALIBRATED, LAYERS),
    profiles=(*PERF_CASES, *LAYERS_CASES),
    expectation="below 80 % of the slots: within 5 % after one calibrating run, within 12 % without one",
    versus=(CALIBRATED, UNCALIBRATED),
    certain=tuple(LAYERS_CASES),
)
EXPERIMENTS = {EXPERIMENT.name: EXPERIMENT}
STEP_FACTORS = {"faster": 0.9, "slower": 1.1}
"""Factors of the time of all steps, for the range that is given where an engine is at capacity."""


def applies(policy: str, profile: str) -> bool:
    """Return whether a protocol predicts a case: layers those that have tables."""
    return (policy == LAYERS) == (profile in LAYERS_CASES)


def run_cell(folder: Path, cell: Cell) -> Record:
    """Predict a run. The figures have predicted and measured values of each stage; a case without a calibrating run has
    none under that protocol."""
    figures = _layers(folder, cell.profile) if cell.policy == LAYERS else _perf(folder, cell)
    counts = [int(value) for name, value in figures.items() if name.endswith(".requests")]
    failed = [int(value) for name, value in figures.items() if name.endswith(".failed") and "measured" not in name]
    summary = Summary(
        policy=cell.policy,
        seed=cell.seed,
        requests=RequestCounts(
            arrived=sum(counts), finished=sum(counts) - sum(failed), rejected=sum(failed), in_flight=0
        ),
        measured=sum(counts) - sum(failed),
        ttft_s=Spread(mean=figures.get("0.ttft.mean"), p50=figures.get("0.ttft.median")),
        ttft_parts_s=TtftParts(),
        transfer_s=Spread(),
        tbt_s=Spread(),
        tpot_s=Spread(mean=figures.get("0.tpot.mean"), p50=figures.get("0.tpot.median")),
        slo_attainment=None,
        goodput_per_s=None,
        throughput_per_s=figures.get("0.rate"),
        tier_share={},
        cache_hit=None,
        prefill_cache_hit=None,
        kv_bytes=0.0,
        link_load={},
        wall_s=0.0,
        cpu_s=0.0,
    )
    return Record(key=cell.key, cell=cell, config={"case": cell.profile}, summary=summary, figures=figures)


def _layers(folder: Path, name: str) -> dict[str, float]:
    run = read_layers(folder / LAYERS_FOLDER, name)
    figures = _figures("0", predict_layers(run))
    if run.measured:
        figures |= _spreads("measured.0", measured_layers(run))
    return figures | _theirs(folder / LAYERS_FOLDER / name / "their_summary.txt")


def _theirs(path: Path) -> dict[str, float]:
    """Return the errors of LLMServingSim's own prediction, which it publishes beside some runs."""
    if not path.is_file():
        return {}
    names = {"TTFT": "ttft", "TPOT": "tpot", "Latency": "e2e"}
    rows = (line.split() for line in path.read_text(encoding="utf-8").splitlines())
    return {
        f"theirs.0.{names[row[0]]}.{row[1].lower()}": float(row[3]) / float(row[2]) - 1
        for row in rows
        if len(row) == 5 and row[0] in names
    }


def _perf(folder: Path, cell: Cell) -> dict[str, float]:
    runs = read_perf(folder / PERF_FILE)
    run = next(found for found in runs if found.id == cell.profile)
    costs = costs_of(run, runs) if cell.policy == CALIBRATED else uncalibrated(run)
    if costs is None:
        return {}
    stages = predict_perf(run, costs, cell.seed)
    figures: dict[str, float] = {}
    for number, (stage, load) in enumerate(zip(stages, run.workload.stages, strict=True)):
        figures |= _figures(str(number), stage) | _measured(run, number)
        figures[f"{number}.load"] = load.rate
        if (e2e_s := figures.get(f"measured.{number}.e2e.mean")) is not None:
            figures[f"measured.{number}.slots"] = load.rate * e2e_s / stage.capacity
    if isinstance(costs.steps, LinearSteps):
        terms = asdict(costs.steps) | {"overhead_s": costs.request_s, "streaming_request_s": costs.streaming_request_s}
        figures |= {f"calibration.{name}": value for name, value in terms.items()}
    if max(stage.slots for stage in stages) >= AT_CAPACITY:
        for name, factor in STEP_FACTORS.items():
            for number, stage in enumerate(predict_perf(run, costs, cell.seed, factor)):
                figures |= _spreads(f"{number}.{name}", stage.spreads)
    return figures


def _measured(run: PerfRun, number: int) -> dict[str, float]:
    """Return what was measured in a stage. The client's time per token is divided by 2 L + 1 in place of L - 1."""
    measured = run.stages[number].measured if run.stages else None
    if measured is None:
        return {}
    prefix, output = f"measured.{number}", run.workload.shared_prefix.output_len
    times = {
        "ttft": (measured.ttft_s, 1.0),
        "tpot": (measured.tpot_s, (2 * output + 1) / (output - 1)),
        "e2e": (measured.request_latency_s, 1.0),
    }
    figures = {
        f"{prefix}.{quantity}.{statistic}": value * factor
        for quantity, (spread, factor) in times.items()
        for statistic in STATISTICS
        if (value := getattr(spread, statistic)) is not None
    }
    if measured.throughput is not None:
        figures[f"{prefix}.rate"] = measured.throughput.requests_per_sec
    if (failures := run.stages[number].failures) is not None:
        figures[f"{prefix}.failed"] = failures
    return figures


def _figures(prefix: str, stage: StagePrediction) -> dict[str, float]:
    counts = {"requests": stage.requests, "failed": stage.failed, "rate": stage.rate_per_s, "slots": stage.slots}
    return {f"{prefix}.{name}": float(value) for name, value in counts.items()} | _spreads(prefix, stage.spreads)


def _spreads(prefix: str, spreads: dict[str, dict[str, float]]) -> dict[str, float]:
    return {
        f"{prefix}.{quantity}.{statistic}": spreads[quantity][statistic]
        for quantity in QUANTITIES
        for statistic in STATISTICS
        if quantity in spreads
    }


def predicted_cases(file: Path, folder: Path | None, seed: int = 0) -> list[dict[str, Any]]:
    """Predict the runs of a file without results: one prediction for each stage, in order.

    Steps are calibrated by a run of the same model, degree and GPU with results, from the file itself or the folder of
    measured runs; without one, they are those of the data sheet, and `protocol` says so.

    Raises:
        InputError: see `read_perf` and `data_folder`.
    """
    cases = read_perf(file)
    runs = list(cases)
    try:
        runs += read_perf(data_folder(folder) / PERF_FILE)
    except InputError:
        if folder is not None:
            raise
    found = []
    for run in cases:
        costs = costs_of(run, runs)
        protocol = UNCALIBRATED if costs is None else CALIBRATED
        found += _stages(run, costs or uncalibrated(run), protocol, seed)
    return found


def _stages(run: PerfRun, costs: EngineCosts, protocol: str, seed: int) -> list[dict[str, Any]]:
    stages = predict_perf(run, costs, seed)
    ranges: dict[str, Sequence[StagePrediction]] = {}
    if max(stage.slots for stage in stages) >= AT_CAPACITY:
        ranges = {name: predict_perf(run, costs, seed, factor) for name, factor in STEP_FACTORS.items()}
    return [
        {
            "id": run.id,
            "stage": number,
            "protocol": protocol,
            **{f"{quantity}_s": stage.spreads.get(quantity) for quantity in QUANTITIES},
            "output_tput_per_gpu": stage.output_tokens / stage.seconds / run.tensor_parallel,
            "tput_per_gpu": stage.tokens / stage.seconds / run.tensor_parallel,
            "requests_per_s": stage.rate_per_s,
            "requests": stage.requests,
            "failures": stage.failed,
            "slots": stage.slots,
            "at_capacity": stage.slots >= AT_CAPACITY,
            "with_step_times": {
                f"{factor:g}": {f"{name}_s": ranges[key][number].spreads.get(name) for name in QUANTITIES}
                for key, factor in STEP_FACTORS.items()
                if key in ranges and stage.slots >= AT_CAPACITY
            },
        }
        for number, stage in enumerate(stages)
    ]
