"""Reads reports of load generators: `vllm bench serve`, AIPerf, GuideLLM and inference-perf."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvroute.measurements.benchmark_runs import BenchmarkRun
from kvroute.timing.reports import load_generator_of
from kvroute.types import InputError

SECONDS = {"s": 1.0, "sec": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
"""Seconds of each unit that AIPerf names."""
_NEEDED = ("input_tokens", "output_tokens", "ttft_s", "tpot_s", "requests_per_s")
_OPTIONAL = ("clients", "latency_s")
_Of = TypeVar("_Of")


@dataclass(frozen=True, slots=True)
class ReportedRuns:
    """The runs of one file, and remarks on what was left out."""

    runs: tuple[BenchmarkRun, ...]
    remarks: tuple[str, ...] = ()


class _VllmRun(msgspec.Struct):
    """`vllm bench serve --save-result`; SGLang's bench_serving writes the same names."""

    completed: int
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    median_ttft_ms: float
    median_tpot_ms: float
    request_rate: float | str | None = None
    max_concurrency: int | None = None
    median_e2el_ms: float | None = None


class _Summary(msgspec.Struct):
    """Statistics of one metric; the names of all load generators together."""

    mean: float | None = None
    median: float | None = None
    avg: float | None = None
    p50: float | None = None
    unit: str = ""

    @property
    def typical(self) -> float:
        """The median, or the mean if there is no median; NaN without both."""
        return next((value for value in (self.median, self.p50, self.mean, self.avg) if value is not None), math.nan)

    @property
    def average(self) -> float:
        """The mean, or the median if there is no mean; NaN without both."""
        return next((value for value in (self.mean, self.avg, self.median, self.p50) if value is not None), math.nan)


class _AiperfRun(msgspec.Struct):
    """AIPerf's `profile_export_aiperf.json`."""

    request_throughput: _Summary
    time_to_first_token: _Summary
    inter_token_latency: _Summary
    input_sequence_length: _Summary
    output_sequence_length: _Summary
    request_latency: _Summary | None = None
    input_config: dict[str, Any] = {}


class _Statuses(msgspec.Struct):
    successful: _Summary


class _GuidellmMetrics(msgspec.Struct):
    requests_per_second: _Statuses
    request_concurrency: _Statuses
    prompt_token_count: _Statuses
    output_token_count: _Statuses
    time_to_first_token_ms: _Statuses
    inter_token_latency_ms: _Statuses
    request_latency: _Statuses | None = None


class _GuidellmRun(msgspec.Struct):
    metrics: _GuidellmMetrics
    config: dict[str, Any] = {}
    args: dict[str, Any] = {}
    scheduler: dict[str, Any] = {}

    @property
    def strategy(self) -> str:
        """How requests were sent; each version has another place for it."""
        for part in (self.config, self.scheduler, self.args):
            strategy = part.get("strategy")
            if isinstance(strategy, dict):
                return str(strategy.get("kind") or strategy.get("type_") or "")
        return ""


class _GuidellmReport(msgspec.Struct):
    benchmarks: list[_GuidellmRun]


class _StageLatencies(msgspec.Struct):
    request_latency: _Summary
    time_to_first_token: _Summary


class _StageThroughput(msgspec.Struct):
    requests_per_sec: float


class _StageSuccesses(msgspec.Struct):
    count: int
    latency: _StageLatencies
    throughput: _StageThroughput
    prompt_len: _Summary
    output_len: _Summary


class _StageLoad(msgspec.Struct):
    achieved_rate: float


class _StageReport(msgspec.Struct):
    """inference-perf's `stage_N_lifecycle_metrics.json`."""

    load_summary: _StageLoad
    successes: _StageSuccesses


def is_report(text: str) -> bool:
    """Return whether a file that begins with this text is a report that `read_report` reads."""
    return load_generator_of(text) in _READERS


def read_report(path: Path, text: str) -> ReportedRuns:
    """Read a report; a file may have several runs.

    Raises:
        InputError: a needed field is missing or has another type, all requests were sent at once, or a value cannot be
            right.
    """
    generator = load_generator_of(text)
    reported = _READERS[generator](_documents(text, path, generator), str(path), generator)
    if not reported.runs:
        raise InputError("has no runs", where=str(path), hint="give the report of runs at several loads")
    for point in reported.runs:
        for name in (*_NEEDED, *(name for name in _OPTIONAL if getattr(point, name) is not None)):
            if not 0 < getattr(point, name) < math.inf:
                what = f"{name} is {getattr(point, name):g}"
                raise InputError(
                    what, where=point.where, hint="give the report of a run that streams and measures TTFT"
                )
        if problem := point.problem():
            raise InputError(problem, where=point.where, hint="give the report as the load generator wrote it")
    return reported


def _documents(text: str, path: Path, generator: str) -> list[Any]:
    """Return the JSON documents of a file: one, or one in each line."""
    try:
        return [msgspec.json.decode(text)]
    except msgspec.DecodeError:
        pass
    try:
        return list(msgspec.json.Decoder().decode_lines(text))
    except msgspec.DecodeError as error:
        what = f"is a report of {generator}, but not JSON ({error})"
        raise InputError(what, where=str(path), hint="give its report in JSON") from None


def _converted(document: Any, kind: type[_Of], where: str, generator: str) -> _Of:
    try:
        return msgspec.convert(document, kind, strict=False)
    except msgspec.ValidationError as error:
        what = f"is a report of {generator} without what a fit needs ({error})"
        raise InputError(what, where=where, hint="give the report of a run that streams and measures TTFT") from None


def _vllm(documents: list[Any], where: str, generator: str) -> ReportedRuns:
    points = []
    for document in documents:
        run = _converted(document, _VllmRun, where, generator)
        if not run.completed:
            raise InputError("no request was completed", where=where, hint="give the report of a run that succeeded")
        if run.max_concurrency is None and run.request_rate in (None, "inf", math.inf):
            what = "all requests were sent at once, so that TTFT is the wait of the queue"
            raise InputError(what, where=where, hint="give runs with --max-concurrency or --request-rate")
        latency_ms = run.median_e2el_ms
        points.append(
            BenchmarkRun(
                where=where,
                input_tokens=run.total_input_tokens / run.completed,
                output_tokens=run.total_output_tokens / run.completed,
                ttft_s=1e-3 * run.median_ttft_ms,
                tpot_s=1e-3 * run.median_tpot_ms,
                requests_per_s=run.request_throughput,
                clients=run.max_concurrency if run.request_rate in (None, "inf", math.inf) else None,
                latency_s=None if latency_ms is None else 1e-3 * latency_ms,
            )
        )
    return ReportedRuns(tuple(points))


def _aiperf(documents: list[Any], where: str, generator: str) -> ReportedRuns:
    if len(documents) > 1:
        raise InputError("has one request per line", where=where, hint="give profile_export_aiperf.json of this run")
    run = _converted(documents[0], _AiperfRun, where, generator)
    load = run.input_config.get("loadgen") or {}
    closed = load.get("concurrency") if not load.get("request_rate") else None
    point = BenchmarkRun(
        where=where,
        input_tokens=run.input_sequence_length.average,
        output_tokens=run.output_sequence_length.average,
        ttft_s=_seconds(run.time_to_first_token, "time_to_first_token", where),
        tpot_s=_seconds(run.inter_token_latency, "inter_token_latency", where),
        requests_per_s=run.request_throughput.average,
        clients=None if closed is None else float(closed),
        latency_s=_seconds(run.request_latency, "request_latency", where) if run.request_latency else None,
    )
    return ReportedRuns((point,))


def _seconds(summary: _Summary, name: str, where: str) -> float:
    if summary.unit not in SECONDS:
        hint = f"it has to be one of {', '.join(SECONDS)}"
        raise InputError(f"{name} has the unit {summary.unit!r}", where=where, hint=hint)
    return SECONDS[summary.unit] * summary.typical


def _guidellm(documents: list[Any], where: str, generator: str) -> ReportedRuns:
    report = _converted(documents[0], _GuidellmReport, where, generator)
    at_once = [run for run in report.benchmarks if run.strategy == "throughput"]
    points = []
    for run in report.benchmarks:
        if run in at_once:
            continue
        metrics = run.metrics
        latency = metrics.request_latency
        closed = run.strategy in ("synchronous", "concurrent")
        points.append(
            BenchmarkRun(
                where=where,
                input_tokens=metrics.prompt_token_count.successful.average,
                output_tokens=metrics.output_token_count.successful.average,
                ttft_s=1e-3 * metrics.time_to_first_token_ms.successful.typical,
                tpot_s=1e-3 * metrics.inter_token_latency_ms.successful.typical,
                requests_per_s=metrics.requests_per_second.successful.average,
                clients=max(metrics.request_concurrency.successful.average, 1.0) if closed else None,
                latency_s=latency.successful.typical if latency else None,
            )
        )
    remark = f"{len(at_once)} runs that send all requests at once are left out: TTFT is the wait of the queue"
    return ReportedRuns(tuple(points), (remark,) if at_once else ())


def _inference_perf(documents: list[Any], where: str, generator: str) -> ReportedRuns:
    stage = _converted(documents[0], _StageReport, where, generator).successes
    output_tokens = stage.output_len.average
    latency, ttft = stage.latency.request_latency, stage.latency.time_to_first_token
    # Not time_per_output_token: some versions divide by the number of chunks, twice that of the tokens.
    point = BenchmarkRun(
        where=where,
        input_tokens=stage.prompt_len.average,
        output_tokens=output_tokens,
        ttft_s=ttft.typical,
        tpot_s=(latency.average - ttft.average) / max(output_tokens - 1, 1.0),
        requests_per_s=stage.throughput.requests_per_sec,
    )
    return ReportedRuns((point,))


_Reader = Callable[[list[Any], str, str], ReportedRuns]
_READERS: Mapping[str, _Reader] = {
    "`vllm bench serve` or SGLang's bench_serving": _vllm,
    "AIPerf": _aiperf,
    "AIPerf or GenAI-Perf": _aiperf,
    "GuideLLM": _guidellm,
    "inference-perf": _inference_perf,
}
"""By the name that `load_generator_of` has for it."""
