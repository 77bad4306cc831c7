"""A timing is recovered from what clients measure of it, and values that cannot be right are named."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.measurements import BenchmarkRun, fit_runs
from kvroute.timing import IterationTime, prefill_time
from kvroute.types import DecodeSpec, InputError, LinearPrefill

DECODE = DecodeSpec(base_s=8e-3, per_request_s=2e-4, per_context_token_s=1.5e-8)
PREFILL = LinearPrefill(per_token_s=3e-5, base_s=0.02)


def closed_loop(clients: int, prompt: int, output: int, requests: int, seed: int = 0) -> BenchmarkRun:
    """Play a closed loop step by step: a step computes at most one prompt whole, and a token of each other request.

    The first token comes with the end of the prompt's step. The first wave, in which all prompts queue, is left out.
    """
    draw, step, prefill = random.Random(seed), IterationTime.of(DECODE), prefill_time(PREFILL)
    now, sent = 0.0, 0
    waiting: list[tuple[float, int]] = []  # (arrival, tokens to decode)
    running: list[list[float]] = []  # [arrival, first token, tokens left, tokens of output, context]
    ended: list[tuple[float, float, float]] = []  # (first token, TTFT, TPOT)
    while len(ended) < requests:
        while sent < clients or len(waiting) + len(running) < clients:
            waiting.append((now, draw.randint(int(0.8 * output), output)))
            sent += 1
        fresh = waiting.pop(0) if waiting else None
        contexts = sum(request[4] for request in running)
        # The base of a prefill is overhead of the request, and not of the steps of others.
        seconds = step.seconds(len(running), contexts) if running else 0.0
        seconds += PREFILL.per_token_s * prompt if fresh else 0.0
        now += seconds
        for request in running:
            request[2] -= 1
            request[4] += 1
        for request in [request for request in running if not request[2]]:
            running.remove(request)
            ended.append((request[1], request[1] - request[0], (now - request[1]) / (request[3] - 1)))
        if fresh is not None:
            arrival, tokens = fresh
            running.append([arrival, now, tokens - 1, tokens, prompt + 1])
    steady = ended[2 * clients :]
    ttft_s = statistics.median(ttft for _, ttft, _ in steady) + prefill.seconds(0)
    tpot_s = statistics.median(tpot for _, _, tpot in steady)
    mean = 0.9 * output
    return BenchmarkRun("loop", prompt, mean, ttft_s, tpot_s, clients / (ttft_s + tpot_s * (mean - 1)), clients)


def test_a_closed_loop_played_step_by_step_gives_its_times_back() -> None:
    """Within 5 % in TPOT and 10 % in the time of a prompt, although others' prompts take up to a third of the time."""
    loads = [(1, 500), (4, 500), (16, 500), (48, 500), (1, 4000), (4, 4000), (16, 4000), (48, 4000)]
    points = [closed_loop(clients, prompt, 200, 12 * clients) for clients, prompt in loads]
    assert points[-1].tpot_s > 1.3 * IterationTime.of(DECODE).seconds(48, 48 * 4100)
    found = fit_runs(points)
    decode, prefill = IterationTime.of(found.decode.spec), prefill_time(found.prefill.spec)
    for batch, context in ((1, 600), (16, 16 * 2000), (48, 48 * 4100)):
        assert decode.seconds(batch, context) == pytest.approx(
            IterationTime.of(DECODE).seconds(batch, context), rel=0.05
        )
    for tokens in (500, 4000):
        assert prefill.seconds(tokens) == pytest.approx(prefill_time(PREFILL).seconds(tokens), rel=0.1)
    assert found.decode.error.mean_abs_relative < 0.03
    assert found.limits["prompt_tokens"] == [500, 4000]
    assert found.limits["batch"] == [1, 47]


def exact(prompt: float, clients: float, decode: DecodeSpec, prefill: LinearPrefill) -> BenchmarkRun:
    """Return what the two formulas of the module give for a closed loop, by iteration."""
    output, tokens_s = 200.0, prefill.per_token_s * prompt
    point = BenchmarkRun("exact", prompt, output, 1.0, 0.01, 1.0, clients)
    for _ in range(400):
        shared_s = point.others_per_s * point.tpot_s * tokens_s
        step_s = decode.seconds(point.batch, point.context_tokens)
        busy = min(point.others_per_s * tokens_s, 0.9)
        wait_s = tokens_s * busy / (2 * (1 - busy)) + 0.5 * point.tpot_s * (1 - 1 / point.batch)
        ttft_s = prefill.base_s + tokens_s + wait_s
        tpot_s = 0.5 * point.tpot_s + 0.5 * (step_s + shared_s)
        rate = clients / (ttft_s + tpot_s * (output - 1))
        point = replace(point, ttft_s=ttft_s, tpot_s=tpot_s, requests_per_s=rate)
    return point


@settings(deadline=None)
@given(
    base=st.floats(5e-3, 3e-2),
    request=st.floats(1e-5, 5e-4),
    context=st.floats(1e-9, 5e-8),
    token=st.floats(2e-6, 2e-5),
    fixed=st.floats(5e-3, 0.2),
)
def test_the_terms_of_any_timing_are_recovered(
    base: float, request: float, context: float, token: float, fixed: float
) -> None:
    """As long as others' prompts leave steps a tenth of the time or more."""
    decode = DecodeSpec(base_s=base, per_request_s=request, per_context_token_s=context)
    prefill = LinearPrefill(per_token_s=token, base_s=fixed)
    loads = [(prompt, clients) for prompt in (500.0, 2000.0, 8000.0) for clients in (1.0, 2.0, 8.0, 32.0)]
    found = fit_runs([exact(*load, decode, prefill) for load in loads])
    assert isinstance(found.prefill.spec, LinearPrefill)
    assert found.prefill.spec.per_token_s == pytest.approx(token, rel=0.01)
    assert found.prefill.spec.base_s == pytest.approx(fixed, rel=0.02)
    assert found.decode.spec.base_s == pytest.approx(base, rel=0.03)
    assert found.decode.error.max_abs_relative < 0.03


POINT = BenchmarkRun("run", 1000, 200, 0.1, 0.01, 2.0)


def test_prompts_of_one_length_share_ttft_as_tpot_says() -> None:
    """All of TTFT would be 1.3e-4 s per token, and others' prompts then take more time than there is."""
    prefill = LinearPrefill(per_token_s=3e-5, base_s=0.2)
    points = [exact(2000, clients, DECODE, prefill) for clients in (1, 4, 16, 32)]
    found = fit_runs(points)
    assert isinstance(found.prefill.spec, LinearPrefill)
    assert 2e-5 < found.prefill.spec.per_token_s < 7e-5
    assert prefill_time(found.prefill.spec).seconds(2000) == pytest.approx(0.26, rel=0.02)
    assert found.decode.error.max_abs_relative < 0.03
    assert "all prompts have about 2,000 tokens" in found.prefill.remarks[0]
    with pytest.raises(InputError, match="prompts of one length do not determine a quadratic curve"):
        fit_runs(points, "quadratic")


def test_few_runs_say_that_their_error_says_nothing() -> None:
    points = [replace(POINT, requests_per_s=rate, tpot_s=0.01 * rate) for rate in (1.0, 4.0)]
    found = fit_runs(points)
    assert found.prefill.remarks[1] == "TTFT of 1 of 2 runs, at higher load, is not used"
    assert found.decode.remarks[-1] == "as many runs as terms: the error says nothing"
    with pytest.raises(InputError, match="one batch size"):
        fit_runs(points[:1])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"tpot_s": 9.7}, "milliseconds may be given as seconds"),
        ({"tpot_s": 9.7e-6}, "seconds may be given as milliseconds"),
        ({"ttft_s": 1.2e-4}, "a TTFT of 120 us is shorter than a GPU takes to read a model's weights"),
        ({"tpot_s": 1.0, "ttft_s": 0.1}, "a TTFT of 100 ms is much shorter than the TPOT of 1 s"),
        ({"latency_s": 2090.0}, "TTFT and TPOT make requests of 2.09 s, but they take 2,090 s"),
        ({"clients": 4.0, "ttft_s": 100.0}, "are 204 at a time, not 4; TTFT or TPOT may have another unit"),
    ],
)
def test_units_that_cannot_be_right_are_named(change: dict[str, Any], problem: str) -> None:
    assert problem in replace(POINT, **change).problem()


def test_values_that_agree_have_no_problem() -> None:
    assert POINT.problem() == ""
    assert replace(POINT, clients=4.2, latency_s=2.09).problem() == ""
