"""Predictions of measured runs: the step time of their engine, and the simulation of their load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvroute import llm
from kvroute.sim.engine.clients import LoadStage, run_engine, stage_arrivals
from kvroute.sim.engine.scheduler import EngineRequest, EngineSpec
from kvroute.timing.layers import AllReduceLink, LayerSteps, LayerTables
from kvroute.timing.steps import LinearSteps, RanksTime, RooflineSteps, ScaledSteps, StepTime
from kvroute.types import FloatArray, InputError
from kvroute_studies.accuracy.cases import (
    CALIBRATING,
    COSTS,
    GPUS,
    LAYERS_CASES,
    MEMORY_BYTES,
    PROMPTS,
    REQUEST_S,
    RETOKENISED,
    STAGE_PAUSE_S,
    STEP_S,
    STREAMING_REQUEST_S,
    TIMEOUT_S,
    kv_blocks,
)
from kvroute_studies.accuracy.inputs import LayersRun, PerfRun

STATISTICS: dict[str, Callable[[FloatArray], float]] = {
    "mean": lambda values: float(values.mean()),
    "median": lambda values: float(np.quantile(values, 0.5)),
    "p90": lambda values: float(np.quantile(values, 0.9)),
    "p99": lambda values: float(np.quantile(values, 0.99)),
}
QUANTITIES = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """What a step takes, and a request besides its steps."""

    steps: StepTime
    request_s: float = REQUEST_S
    streaming_request_s: float = STREAMING_REQUEST_S


@dataclass(frozen=True, slots=True)
class StagePrediction:
    """Predicted times of the requests of a stage that were answered."""

    spreads: dict[str, dict[str, float]]
    """Seconds by quantity and statistic; empty if no request was answered."""
    requests: int
    failed: int
    tokens: int
    """Input and output tokens of the answered requests."""
    output_tokens: int
    seconds: float
    """Time from the begin of the stage to its last answer, or to the last client's end."""
    capacity: float
    """Requests that the engine can have at once: its limit, or those that fit into its KV memory."""
    held: float
    """Mean number of requests that it had."""

    @property
    def slots(self) -> float:
        """Share of the capacity that was in use."""
        return self.held / self.capacity

    @property
    def rate_per_s(self) -> float:
        """Answered requests per second."""
        return (self.requests - self.failed) / self.seconds


def costs_of(run: PerfRun, runs: Sequence[PerfRun]) -> EngineCosts | None:
    """Return costs calibrated by the run of the same model and degree at the lowest load; None: there is none."""
    same = (run.preset, run.tensor_parallel, run.hardware)
    for other in runs:
        usable = CALIBRATING in other.id and other.measured and len(other.stages) > 1
        if usable and (other.preset, other.tensor_parallel, other.hardware) == same:
            return calibrated(other)
    return None


def uncalibrated(run: PerfRun) -> EngineCosts:
    """Return costs by operations and bytes."""
    return EngineCosts(_roofline(run))


def calibrated(run: PerfRun) -> EngineCosts:
    """Fit a linear step to two stages of a run.

    The terms of a prompt token and of a context token are those of the GPU's data sheet; the constant and the term of a
    request follow from the mean time per token of the two stages, and the time of a request besides its steps from the
    median TTFT, of which the prompt takes two and a half steps: it arrives in the middle of one, waits for the next,
    which is planned already, and is computed in the one after that.
    """
    given, output = _roofline(run).linear(), run.workload.shared_prefix.output_len
    loads, steps_s, rests_s = [], [], []
    for stage, load in zip(run.stages[:2], run.workload.stages, strict=False):
        assert stage.measured is not None, "a calibrating run has results"
        ttft, total = stage.measured.ttft_s, stage.measured.request_latency_s
        step_s = (total.mean - ttft.mean) / (output - 1)
        decoding = load.rate * step_s * (output - 1)
        context = decoding * (_prompt_tokens(run) + output / 2)
        loads.append(decoding)
        steps_s.append(step_s - given.context_token_s * context)
        rests_s.append((ttft.median or ttft.mean) - 2.5 * step_s)
    if loads[0] == loads[1]:
        raise InputError(f"two stages of {run.id} have one load", hint="calibrate with stages of different rates")
    request_s = (steps_s[1] - steps_s[0]) / (loads[1] - loads[0])
    streaming_s = max(0.0, (rests_s[1] - rests_s[0]) / (loads[1] - loads[0]))
    steps = LinearSteps(steps_s[0] - request_s * loads[0], given.prompt_token_s, request_s, given.context_token_s)
    return EngineCosts(steps, max(0.0, rests_s[0] - streaming_s * loads[0]), streaming_s)


def predict_perf(run: PerfRun, costs: EngineCosts, seed: int, factor: float = 1.0) -> list[StagePrediction]:
    """Predict the stages of a run of inference-perf. Args: `factor`: of the time of all steps."""
    model = COSTS[run.preset]
    spec = EngineSpec(
        step_tokens=run.max_num_batched_tokens,
        requests_max=run.max_num_seqs,
        blocks=kv_blocks(model, run.tensor_parallel, MEMORY_BYTES[run.hardware]),
        request_s=costs.request_s,
        streaming_request_s=costs.streaming_request_s,
    )
    requests = _perf_requests(run, seed, spec.block_tokens)
    steps = ScaledSteps(costs.steps, factor)
    run_engine(spec, lambda works: steps(works[0]), requests, timeout_s=TIMEOUT_S)
    begin_s, found = 0.0, []
    for group, stage in enumerate(run.workload.stages):
        of_stage = [request for request in requests if request.group == group]
        found.append(_summarised(of_stage, spec, 1, begin_s, stage.duration))
        begin_s += stage.duration + STAGE_PAUSE_S
    return found


def predict_layers(run: LayersRun) -> StagePrediction:
    """Predict a run of LLMServingSim's examples with the tables of its layers."""
    case = LAYERS_CASES[run.name]
    model, shape = COSTS[case.model], llm.model(case.model).shape
    assert shape is not None, "the cases' models have shapes"
    spec = EngineSpec(
        step_tokens=run.step_tokens,
        requests_max=run.requests_max,
        blocks=run.blocks or kv_blocks(model, case.tp, MEMORY_BYTES[run.hardware]),
    )
    link = AllReduceLink(run.link_bytes_per_s, run.link_latency_s, 2.0 * shape.hidden)
    steps = LayerSteps(
        LayerTables.read(run.profile, case.tp),
        model.layers,
        case.tp,
        link if max(case.tp, case.ranks) > 1 else None,
        case.experts,
        STEP_S,
    )
    time: RanksTime = steps.together if case.ranks > 1 else lambda works: steps(works[0])
    first_s = run.requests[0].arrival_time
    requests = [
        EngineRequest(number, request.arrival_time - first_s, request.input_toks, request.output_toks)
        for number, request in enumerate(run.requests)
    ]
    run_engine(spec, time, requests, ranks=case.ranks)
    return _summarised(requests, spec, case.ranks)


def measured_layers(run: LayersRun) -> dict[str, dict[str, float]]:
    """Return the measured times by quantity and statistic. The engine's clock is aligned with that of the arrivals by
    the shortest time from a request's arrival to the engine's queue."""
    rows = [
        (request.arrival_time, request.queued_ts, request.first_token_ts, request.last_token_ts, request.output_toks)
        for request in run.requests
    ]
    arrived, queued, first, last, output = np.array(rows, np.float64).T
    offset_s = (queued - arrived).min()
    ttft, e2e = first - arrived - offset_s, last - arrived - offset_s
    return _spreads(ttft, (last - first) / np.maximum(output - 1, 1), e2e)


def _roofline(run: PerfRun) -> RooflineSteps:
    return RooflineSteps(COSTS[run.preset], GPUS[run.hardware], run.tensor_parallel)


def _prompt_tokens(run: PerfRun) -> int:
    known = run.stages[0].prompt_tokens if run.stages else None
    prefix = run.workload.shared_prefix
    return round(known.mean if known else RETOKENISED * (prefix.system_prompt_len + prefix.question_len))


def _perf_requests(run: PerfRun, seed: int, block_tokens: int) -> list[EngineRequest]:
    """Return the requests of all stages, which cycle through the distinct prompts."""
    tokens, output = _prompt_tokens(run), run.workload.shared_prefix.output_len
    blocks = range(tokens // block_tokens)
    keys = [tuple((prompt, place) for place in blocks) for prompt in range(PROMPTS)]
    stages = [LoadStage(stage.rate, stage.duration) for stage in run.workload.stages]
    requests: list[EngineRequest] = []
    for group, times in enumerate(stage_arrivals(stages, "exponential", seed, STAGE_PAUSE_S)):
        for at in times:
            number = len(requests)
            requests.append(EngineRequest(number, at, tokens, output, keys[number % PROMPTS], group))
    return requests


def _summarised(
    requests: Sequence[EngineRequest], spec: EngineSpec, ranks: int = 1, begin_s: float = 0.0, duration_s: float = 0.0
) -> StagePrediction:
    """Summarise the requests of a stage."""
    done = [request for request in requests if not request.failed]
    arrived = np.array([request.arrived_s for request in done])
    first = np.array([request.first_token_s for request in done], np.float64)
    ended = np.array([request.ended_s for request in done], np.float64)
    tokens = np.array([request.output_tokens for request in done])
    failed = len(requests) - len(done)
    end_s = max([begin_s + duration_s + (TIMEOUT_S if failed else 0.0), *ended.tolist()])
    held = sum(request.ended_s - request.started_s for request in done if request.ended_s and request.started_s)
    tokens_mean = sum(request.input_tokens + request.output_tokens for request in requests) / len(requests)
    capacity = ranks * min(spec.requests_max, spec.blocks * spec.block_tokens / tokens_mean)
    return StagePrediction(
        _spreads(first - arrived, (ended - first) / np.maximum(tokens - 1, 1), ended - arrived) if done else {},
        len(requests),
        failed,
        sum(request.input_tokens for request in done) + int(tokens.sum()),
        int(tokens.sum()),
        end_s - begin_s,
        capacity,
        held / (duration_s or end_s - begin_s),
    )


def _spreads(ttft: FloatArray, tpot: FloatArray, e2e: FloatArray) -> dict[str, dict[str, float]]:
    of = dict(zip(QUANTITIES, (ttft, tpot, e2e), strict=True))
    return {name: {key: count(values) for key, count in STATISTICS.items()} for name, values in of.items()}
