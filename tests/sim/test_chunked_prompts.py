"""Decode instances that compute prompts in chunks beside their batch equal a slow model that makes one iteration after
the other and one token of a prompt after the other."""

from __future__ import annotations

from dataclasses import replace
from heapq import heappop, heappush

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sim.single_token_model import Arrival, arrivals, modelled, prompts_of_prefill

from kvroute.sim.chunked_prompts import ChunkedPrompts, WaitingPrompt
from kvroute.sim.instances import DecodeInstance, PrefillInstance
from kvroute.timing import IterationTime, PrefillTime, prefill_time
from kvroute.types import DecodeSpec, LinearPrefill, QuadraticPrefill


def simulated(
    arrivals: list[Arrival],
    time: IterationTime,
    prefill: PrefillTime,
    batch_max: int,
    chunk_tokens: int,
    *,
    whole_alone: bool = False,
) -> tuple[dict[int, tuple[float, float]], int]:
    """Run the same on `DecodeInstance`; return also the number of steps."""
    prompts = ChunkedPrompts(prefill, chunk_tokens, prefill.seconds(0), whole_alone=whole_alone)
    instance = DecodeInstance(0, time, batch_max, prompts=prompts)
    events = [(arrival.at, -1, number) for number, arrival in enumerate(arrivals)]
    events.sort()
    first: dict[int, float] = {}
    ends: dict[int, tuple[float, float]] = {}
    began: set[int] = set()
    steps = 0
    while events:
        at, version, number = heappop(events)
        if version < 0:
            arrival = arrivals[number]
            sizes = number, arrival.input_tokens, arrival.output_tokens
            if arrival.cached_tokens is None:
                wake_s = instance.transfer_done(at, *sizes)
            else:
                wake_s = instance.prompt_arrived(at, WaitingPrompt(*sizes, arrival.cached_tokens, arrival.joins))
        elif version != instance.version:
            continue
        else:
            step, wake_s = instance.step(at)
            steps += 1
            began |= set(step.began)
            first |= dict.fromkeys(step.computed, at)
            ends |= {request: (at, at) for request in step.computed if not arrivals[request].joins}
            ends |= {request: (first[request], at) for request in step.finished}
            first |= dict.fromkeys(step.admitted, step.first_token_s)
            assert instance.running <= batch_max
        if wake_s is not None:
            heappush(events, (wake_s, instance.version, 0))
    assert began == {number for number, arrival in enumerate(arrivals) if arrival.cached_tokens is not None}
    assert instance.running == instance.waiting == instance.context_tokens == 0
    return ends, steps


times = st.builds(
    lambda a, b, k: IterationTime.of(DecodeSpec(base_s=a, per_request_s=b, per_context_token_s=k)),
    st.sampled_from([0.0125, 0.03]),
    st.sampled_from([0.0, 1e-4, 1e-3]),
    st.sampled_from([0.0, 2e-8]),
)
prefills = st.sampled_from(
    [
        prefill_time(LinearPrefill(per_token_s=90e-6, base_s=20e-3)),
        prefill_time(LinearPrefill(per_token_s=1e-3)),
        prefill_time(QuadraticPrefill(base_s=5e-3, per_token_s=50e-6, per_token2_s=1e-7)),
    ]
)


@settings(deadline=None, max_examples=200)
@given(arrivals, times, prefills, st.sampled_from([1, 2, 4, 64]), st.sampled_from([1, 7, 64, 2048]))
def test_prompts_in_chunks_equal_a_model_of_single_tokens(
    arrived: list[Arrival], time: IterationTime, prefill: PrefillTime, batch_max: int, chunk_tokens: int
) -> None:
    """First tokens and ends are equal, with transferred requests beside requests served alone."""
    expected = modelled(arrived, time, prefill, batch_max, chunk_tokens)
    ends, _ = simulated(arrived, time, prefill, batch_max, chunk_tokens)
    assert ends.keys() == expected.keys()
    for number, pair in expected.items():
        assert ends[number] == pytest.approx(pair, rel=1e-9, abs=1e-7)


@settings(deadline=None, max_examples=200)
@given(prompts_of_prefill, times, prefills, st.sampled_from([1, 2, 4, 64]), st.sampled_from([1, 7, 64, 2048]))
def test_a_prefill_instance_that_decodes_equals_a_model_of_single_tokens(
    arrived: list[Arrival], time: IterationTime, prefill: PrefillTime, batch_max: int, chunk_tokens: int
) -> None:
    """Some of its prompts go on to decode there, the others leave; without a batch a prompt is computed as a whole."""
    expected = modelled(arrived, time, prefill, batch_max, chunk_tokens, whole_alone=True)
    ends, _ = simulated(arrived, time, prefill, batch_max, chunk_tokens, whole_alone=True)
    assert ends.keys() == expected.keys()
    for number, pair in expected.items():
        assert ends[number] == pytest.approx(pair, rel=1e-9, abs=1e-7)


@settings(deadline=None)
@given(prompts_of_prefill, prefills, st.sampled_from([1, 4]), st.sampled_from([7, 2048]))
def test_without_decodes_prompts_take_their_times_one_after_the_other(
    arrived: list[Arrival], prefill: PrefillTime, batch_max: int, chunk_tokens: int
) -> None:
    """An instance that mixes prompts and steps equals one that never decodes, as long as none of its prompts joins."""
    leaving = [replace(arrival, joins=False) for arrival in arrived]
    ends, _ = simulated(leaving, DECODE, prefill, batch_max, chunk_tokens, whole_alone=True)
    queue = PrefillInstance(0, prefill, queueing=True)
    for number in sorted(range(len(leaving)), key=lambda number: (leaving[number].at, number)):
        arrival = leaving[number]
        _, finish = queue.submit(arrival.at, arrival.input_tokens, arrival.cached_tokens or 0)
        assert ends[number] == pytest.approx((finish, finish), abs=1e-7)


DECODE = IterationTime.of(DecodeSpec(base_s=10e-3, per_request_s=1e-3))
PREFILL = prefill_time(LinearPrefill(per_token_s=1e-3, base_s=0.0))


def test_a_prompt_delays_the_running_request_by_its_time() -> None:
    """A prompt of 250 tokens in chunks of 100 takes three iterations of 11 ms more than its own 250 ms."""
    running = Arrival(0.0, 1, 100, None)
    ends, _ = simulated([running, Arrival(0.005, 250, 1, 0)], DECODE, PREFILL, 8, 101)
    assert ends[1][0] == pytest.approx(0.011 + 3 * 0.011 + 0.25)
    alone, _ = simulated([running], DECODE, PREFILL, 8, 101)
    assert ends[0][1] == pytest.approx(alone[0][1] + 0.25)


def test_iterations_without_a_prompt_are_still_skipped() -> None:
    """One step begins the prompt, four end a chunk, one is the end of the output."""
    _, steps = simulated([Arrival(0.0, 1_000, 10_000, 0)], DECODE, PREFILL, 8, 250)
    assert steps == 6


def test_a_request_without_output_ends_with_its_prompt() -> None:
    instance = DecodeInstance(0, DECODE, 8, prompts=ChunkedPrompts(PREFILL, 64, 0.0))
    assert instance.prompt_arrived(1.0, WaitingPrompt(7, 10, 0, 0)) == 1.0
    step, wake_s = instance.step(1.0)
    assert (step.began, step.tokens) == ((7,), 10)
    assert wake_s is not None
    assert wake_s == pytest.approx(1.01)
    step, wake_s = instance.step(wake_s)
    assert (step.computed, step.finished, wake_s) == ((7,), (7,), None)


def test_a_pause_delays_the_batch_by_its_time() -> None:
    """Prompts on a prefill instance come first. The output of 20 tokens takes 220 ms, and both pauses."""
    instance = DecodeInstance(0, DECODE, 8)
    assert instance.transfer_done(0.0, 1, 100, 20) == 0.0
    step, wake_s = instance.step(0.0)
    assert step.admitted == (1,)
    assert wake_s == pytest.approx(0.22)
    assert instance.pause(0.1, 0.5) == pytest.approx(0.72)
    wake_s = instance.pause(0.6, 1.0)
    assert wake_s == pytest.approx(1.72)
    assert wake_s is not None
    step, wake_s = instance.step(wake_s)
    assert (step.finished, wake_s) == ((1,), None)


def test_a_request_that_arrives_in_a_pause_waits_for_its_end() -> None:
    """Also if it has arrived just before the pause, at the same time."""
    instance = DecodeInstance(0, DECODE, 8)
    assert instance.pause(1.0, 0.5) is None
    assert instance.transfer_done(1.2, 1, 100, 1) == 1.5
    other = DecodeInstance(0, DECODE, 8)
    assert other.transfer_done(1.0, 1, 100, 1) == 1.0
    assert other.pause(1.0, 0.5) == 1.5
    step, _ = other.step(1.5)
    assert step.admitted == (1,)
    assert step.first_token_s == pytest.approx(1.511)
