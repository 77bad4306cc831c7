"""Builds the run of a matrix cell: cluster, requests, telemetry of the router, and CLA* tuned for the case."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvroute.control import ControlSpec
from kvroute.planner.comparison.cells import Cell, Record
from kvroute.sim.metrics import window
from kvroute.sim.run import Run, simulate
from kvroute.sim.settings import Background, SimSpec, Slo
from kvroute.sim.workload import PROFILES
from kvroute.topology.drafts.builders import LLAMA_70B_TP4
from kvroute.types import InputError
from kvroute_engine.files.units import Size
from kvroute_studies.netkv.readings import reading
from kvroute_studies.netkv.setup import (
    Study,
    Weights,
    cluster_of,
    config_of,
    rate_per_s,
    requests_of,
)
from kvroute_studies.never_worse.cases import CASES, Case
from kvroute_studies.never_worse.clairvoyant import descend
from kvroute_studies.never_worse.verdicts import CLAIRVOYANT, FORESEEN, SHORT_S, VARIANTS
from kvroute_studies.shared.runner import finished, run_cells

SHORT_WARMUP_S = 2.0
RATIOS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
"""Ratios of CLA*'s cache weight to its load weight; only the ratio affects decisions."""
TUNING_SEEDS = (0, 1)
TRACES_VARIABLE = "KVROUTE_TRACES"
_FILES = {
    "mooncake": ("conversation_trace.jsonl", "conversation_trace.jsonl.zst"),
    "coding-agent": ("traces_rle.jsonl", "traces_rle.jsonl.zst"),
    "measured": ("vllm_h100_inference_perf.json",),
}
"""By name; `measured` has the runs of the accuracy study."""
_SOURCES = {
    "mooncake": "https://github.com/kvcache-ai/Mooncake/tree/main/FAST25-release/traces",
    "coding-agent": "https://github.com/callanjfox/kv-cache-tester, in the compact form of docs/workloads.md",
    "measured": "inference-sim/training and LLMServingSim, see docs/accuracy.md",
}
_KNOWN = " or ".join(files[0] for files in _FILES.values())
_GIVE = f"give the folder of {_KNOWN} with --trace-dir or {TRACES_VARIABLE}"


@dataclass(frozen=True, slots=True)
class Traces:
    """Paths of recorded traces by the name that cases use; missing traces are absent."""

    paths: tuple[tuple[str, str], ...] = (("generated", ""),)

    @classmethod
    def of(cls, folder: Path | None) -> Traces:
        """Find the traces in a folder and its subfolders; without a folder, use the one in the environment variable.

        Raises:
            InputError: the folder does not exist, or contains none of the traces.
        """
        given = str(folder) if folder is not None else os.environ.get(TRACES_VARIABLE, "")
        found = [("generated", "")]
        if given:
            if not Path(given).is_dir():
                raise InputError("the folder does not exist", where=given, hint=_GIVE)
            for name, files in _FILES.items():
                paths = sorted(path for file in files for path in Path(given).rglob(file))
                found += [(name, str(path)) for path in paths[:1]]
            if len(found) == 1:
                raise InputError("the folder has none of the recorded traces", where=given, hint=_GIVE)
        return cls(tuple(found))

    def path(self, case: Case) -> str | None:
        """Return the path of a case's trace; "" for generated requests, None if the file is missing."""
        return dict(self.paths).get(case.trace)

    def recorded(self, name: str) -> Path:
        """Return the path of a recorded trace. Raises InputError if the file is missing."""
        found = dict(self.paths).get(name)
        if found is None:
            hint = f"get it from {_SOURCES[name]} and give its folder with --traces or {TRACES_VARIABLE}"
            raise InputError("the recorded trace is missing", where=" or ".join(_FILES[name]), hint=hint)
        return Path(found)

    def missing(self, names: Iterable[str]) -> dict[str, str]:
        """Return the cases that cannot be run, each with the remedy."""
        return {
            name: f"not run: {' or '.join(_FILES[CASES[name].trace])} is missing; give --trace-dir"
            for name in names
            if self.path(CASES[name]) is None
        }


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs cells. It is picklable."""

    traces: Traces
    weights: tuple[tuple[str, Weights], ...] = ()
    """CLA* weights by case."""
    tuning: bool = False
    """True for tuning: runs use requests that no measurement uses, and cells have `cache_weight` in their settings."""

    def __call__(self, cell: Cell) -> Record:
        case = CASES[cell.profile]
        weights = Weights(cache=cell.settings["cache_weight"]) if self.tuning else dict(self.weights).get(case.name)
        run = self.run(case, cell, weights)
        summary = msgspec.structs.replace(run.summary, policy=cell.policy)
        figures = figures_of(run, settings_of(case, study_of(case, self.traces, cell, tuning=self.tuning)))
        config = self._config(case, cell, weights)
        return Record(key=cell.key, cell=cell, config=config, summary=summary, figures=figures)

    def run(self, case: Case, cell: Cell, weights: Weights | None) -> Run:
        """Run a cell and return the run with the times of every request."""
        study, inner = study_of(case, self.traces, cell, tuning=self.tuning), _inner(case, cell)
        cluster, trace = cluster_of(study.reading, inner, study.engine), requests_of(study, inner)
        settings = settings_of(case, study)

        def play(spec: ControlSpec) -> Run:
            return simulate(cluster, trace, spec, settings, seed=cell.seed)

        if cell.policy != CLAIRVOYANT:
            return play(spec_of(case, cell.policy, weights))
        starts = [spec_of(case, name, weights) for name in ("foresight", "netkv", "cla")]
        places = [index for index, instance in enumerate(cluster.instances) if instance.role == "decode"]
        return descend(play, starts, places)

    def _config(self, case: Case, cell: Cell, weights: Weights | None) -> dict[str, Any]:
        study = study_of(case, self.traces, cell, tuning=self.tuning)
        return {
            "case": _plain(case),
            "trace": config_of(study)["trace"],
            "rate_per_s": rate_per_s(study, _inner(case, cell)),
            "cla_ratio": weights.cache / weights.load if weights and cell.policy == "cla" else None,
            "variant": _plain(VARIANTS.get(cell.policy)),
        }


def figures_of(run: Run, settings: SimSpec) -> dict[str, float]:
    """Return the mean response time (arrival to last token) and the share of aggregated requests; empty if
    none has ended."""
    rows = run.outcomes
    inside = window(rows, settings)
    response_s = (rows.finished_s - rows.arrived_s)[inside]
    if np.isnan(response_s).all():
        return {}
    aggregated = (rows.source == rows.target)[inside] & (rows.source[inside] >= 0)
    return {"response_s": float(np.nanmean(response_s)), "aggregated_share": float(aggregated.mean())}


def spec_of(case: Case, policy: str, weights: Weights | None) -> ControlSpec:
    """Return the control specification of a policy or of a variant of foresight."""
    name, parameters = VARIANTS.get(policy, (policy, {}))
    if name == "cla" and weights is not None:
        parameters = {"cache_weight": weights.cache, "load_weight": weights.load}
    chosen = reading(case.reading, case.changes)
    return ControlSpec(
        decode=name, parameters=parameters, prefill=chosen.prefill_policy, prefill_cache=chosen.prefill_cache
    )


def settings_of(case: Case, study: Study) -> SimSpec:
    """Return a case's assumptions about engines, network and window."""
    return SimSpec(
        prefill_queueing=study.reading.prefill_queueing,
        background=Background(per_tier=case.background, burst_per_tier=case.burst, burst_every_s=case.burst_every_s),
        oracle_refresh_s=case.refresh_s,
        telemetry="none" if case.oracle == "silent" else "tier",
        reported=case.reported,
        slo=Slo(ttft_s=PROFILES[case.profile].ttft_slo_s),
        warmup_s=0.0 if study.tuning else study.warmup_s,
        measure_s=None if study.tuning else study.measure_s,
    )


def study_of(case: Case, traces: Traces, cell: Cell, *, tuning: bool = False) -> Study:
    """Return the reading, trace, window and engines of a case."""
    path = traces.path(case)
    assert path is not None, "cases without their trace are left out"
    short = cell.experiment == FORESEEN.name
    return Study(
        reading=reading(case.reading, case.changes),
        trace=path,
        tuning=tuning,
        warmup_s=SHORT_WARMUP_S if short else min(case.warmup_s, case.measure_s),
        measure_s=SHORT_S if short else case.measure_s,
        engine=msgspec.structs.replace(LLAMA_70B_TP4, batch_max=case.slots, kv_capacity_bytes=Size(case.kv_gb * 1e9)),
    )


def _inner(case: Case, cell: Cell) -> Cell:
    """Return the equivalent cell in the form of NetKV's experiments."""
    return msgspec.structs.replace(cell, profile=case.profile, settings=dict(case.settings) or {"load": 1.0})


def tune(
    names: Iterable[str],
    traces: Traces,
    path: Path,
    *,
    on: str = "local",
    workers: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[tuple[str, Weights], ...]:
    """Return CLA*'s weights for each case: of eleven ratios the one with the lowest mean TTFT on requests that no
    measurement uses.

    Results are stored in `path` and reused by later calls. On a tie, the ratio nearest to 1 is used.
    """
    cells = [
        Cell(
            experiment="cla-tuning",
            reading=CASES[name].reading,
            profile=name,
            settings={"cache_weight": ratio},
            policy="cla",
            seed=seed,
        )
        for name in names
        for ratio in RATIOS
        for seed in TUNING_SEEDS
    ]
    runner = Runner(traces, tuning=True)
    results_of(path)
    records = run_cells(cells, runner, path, on=on, workers=workers, progress=progress)
    means: dict[str, dict[float, list[float]]] = {}
    for record in records:
        mean_s, of_case = record.summary.ttft_s.mean, means.setdefault(record.cell.profile, {})
        of_case.setdefault(record.cell.settings["cache_weight"], []).append(np.inf if mean_s is None else mean_s)
    return tuple(
        (name, _best({ratio: float(np.mean(s)) for ratio, s in by_ratio.items()})) for name, by_ratio in means.items()
    )


def _best(means: dict[float, float]) -> Weights:
    return Weights(cache=min(means, key=lambda ratio: (means[ratio], abs(np.log(ratio)))))


def results_of(path: Path) -> list[Record]:
    """Return the records that earlier runs of this code stored in a file, limited to cells that the matrix still has.

    Raises:
        InputError: the file holds a different cell of the same name, or a different variant of foresight.
    """
    found = [record for record in finished(path).values() if record.cell.profile in CASES]
    for record in found:
        cell, config, hint = record.cell, record.config, "choose another --out or delete that file"
        if config.get("case") != _plain(CASES[cell.profile]):
            raise InputError(f"the file has results of another cell {cell.profile!r}", where=str(path), hint=hint)
        variant = _plain(VARIANTS.get(cell.policy))
        if config.get("variant", variant) != variant:
            raise InputError(f"the file has results of another {cell.policy!r}", where=str(path), hint=hint)
    return found


def _plain(value: object) -> Any:
    """Return the value in the form in which it is read back from a file."""
    return msgspec.json.decode(msgspec.json.encode(value))
