"""An emulated decode engine computes prompts in chunks beside its batch, as the simulated decode instance does. The
batch of an engine of another role waits for them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.emulator.virtual_engine import DECODE, SPEC, VirtualClock, engine_on, prompt_of, timed
from tests.sim.single_token_model import Arrival, arrivals, modelled

from kvroute.emulator.engine.engine import Engine
from kvroute.emulator.engine.sequence import EngineSequence
from kvroute.timing import IterationTime, prefill_time

CHUNK_TOKENS = 64
PREFILL = prefill_time(SPEC.prefill)
STEP = IterationTime.of(DECODE)


def start(
    clock: VirtualClock, engine: Engine, number: int, arrival: Arrival, times: list[float], *, streaming: bool = True
) -> EngineSequence:
    """Start a request now: its KV has arrived, or the engine computes its prompt. `times` gets the time of each token
    that it streams, or of the last one."""
    prompt = prompt_of(number, *range(arrival.input_tokens - 1))
    job = engine.arrive(prompt, arrival.output_tokens, streaming=streaming)
    step = engine.transfer_done if arrival.cached_tokens is None else engine.prefill_beside
    engine.reserve(timed(clock, job, times, {"reserved": step}))
    return job


def apart(number: int, arrival: Arrival) -> Arrival:
    """Return a request that arrives at another time than all others, whose prompt is not cached."""
    cached_tokens = None if arrival.cached_tokens is None else 0
    return replace(arrival, at=arrival.at + number * 1e-7, cached_tokens=cached_tokens)


@given(arrivals, st.booleans())
@settings(deadline=None, max_examples=100)
def test_token_times_equal_the_model_of_single_tokens(arrived: list[Arrival], streaming: bool) -> None:
    """First and last tokens, with transferred requests beside requests whose prompt is computed here."""
    arrived = [apart(number, arrival) for number, arrival in enumerate(arrived)]
    clock = VirtualClock()
    engine = engine_on(clock, role="decode", chunk_tokens=CHUNK_TOKENS)
    times: list[list[float]] = [[] for _ in arrived]
    for number, arrival in enumerate(arrived):
        clock.call(arrival.at, partial(start, clock, engine, number, arrival, times[number], streaming=streaming))
    clock.run()
    for number, (first_s, last_s) in modelled(arrived, STEP, PREFILL, 4, CHUNK_TOKENS).items():
        assert len(times[number]) == arrived[number].output_tokens
        assert times[number][-1] == pytest.approx(last_s, abs=1e-6)
        if streaming:
            assert times[number][0] == pytest.approx(first_s, abs=1e-6)
    prompts = [arrival for arrival in arrived if arrival.cached_tokens is not None]
    assert engine.counters.prompt_tokens == sum(arrival.input_tokens for arrival in prompts)
    assert (engine.running, engine.waiting, engine.kv_used_share) == (0, 0, 0.0)


@given(arrivals, st.lists(st.integers(0, 400), max_size=20), st.integers(150, 400))
@settings(deadline=None, max_examples=100)
def test_requests_that_leave_free_their_memory(
    arrived: list[Arrival], leaving_ms: list[int], capacity_blocks: int
) -> None:
    """Before, while and after their prompt is computed; the others complete."""
    clock = VirtualClock()
    engine = engine_on(clock, capacity_blocks, role="decode", chunk_tokens=CHUNK_TOKENS)
    jobs: dict[int, EngineSequence] = {}

    def begin(number: int, arrival: Arrival) -> None:
        job = jobs[number] = start(clock, engine, number % 3, arrival, [])
        if number < len(leaving_ms):
            clock.call(clock.now() + leaving_ms[number] / 1000, lambda: engine.leave(job))

    for number, arrival in enumerate(arrived):
        clock.call(arrival.at, partial(begin, number, arrival))
    clock.run()
    assert (engine.running, engine.waiting, engine.kv_used_share) == (0, 0, 0.0)
    assert {job.stage for job in jobs.values()} <= {"answered", "gone"}
    assert all(job.stage == "answered" for number, job in jobs.items() if number >= len(leaving_ms))


def test_a_cached_prefix_is_not_computed_again() -> None:
    """The second prompt lacks 101 of 200 tokens: the first 99 are cached, in whole blocks of 4 tokens."""
    clock = VirtualClock()
    engine = engine_on(clock, role="decode")
    first, second = list[float](), list[float]()
    start(clock, engine, 7, Arrival(0.0, 101, 1, 0), first)
    clock.call(1.0, lambda: start(clock, engine, 7, Arrival(1.0, 200, 1, 0), second))
    clock.run()
    assert first == pytest.approx([0.02 + 101e-3])
    assert second == pytest.approx([1.0 + 0.02 + (200 - 100) * 1e-3])


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_a_slow_engine_computes_prompts_slower(factor: float) -> None:
    """Those that begin later; the one in progress keeps its time."""
    clock = VirtualClock()
    engine = engine_on(clock, role="decode")
    ends: list[list[float]] = [[], []]
    start(clock, engine, 0, Arrival(0.0, 100, 1, 0), ends[0])
    clock.call(0.05, lambda: engine.slow(factor))
    clock.call(1.0, lambda: start(clock, engine, 1, Arrival(1.0, 100, 1, 0), ends[1]))
    clock.run()
    assert ends[0] + ends[1] == pytest.approx([0.12, 1.0 + factor * 0.12])


def test_a_prompt_beside_a_batch_of_a_slow_engine_has_no_base() -> None:
    """Its 100 tokens take 300 ms, and the step of the batch 33 ms."""
    clock, times = VirtualClock(), list[float]()
    engine = engine_on(clock, role="decode")
    start(clock, engine, 0, Arrival(0.0, 1, 100, None), times)
    clock.call(0.5, partial(engine.slow, 3.0))
    clock.call(1.0, partial(start, clock, engine, 1, Arrival(1.0, 100, 1, 0), []))
    clock.run()
    assert max(np.diff(times)) == pytest.approx(0.333, abs=1e-3)


def test_an_iteration_with_a_prompt_keeps_its_time_when_the_engine_becomes_slow() -> None:
    """A request decodes, and 50 of another one's 100 prompt tokens take 50 ms beside each of its steps of 11 ms."""
    times: dict[float, list[float]] = {}
    for factor in (1.0, 3.0):
        clock = VirtualClock()
        engine = engine_on(clock, role="decode", chunk_tokens=51)
        found = times[factor] = list[float]()
        start(clock, engine, 0, Arrival(0.0, 1, 6, None), found)
        clock.call(0.001, partial(start, clock, engine, 1, Arrival(0.001, 100, 1, 0), []))
        clock.call(0.03, partial(engine.slow, factor))
        clock.run()
    assert np.diff(times[1.0]) == pytest.approx([0.061, 0.061, 0.011, 0.011, 0.011], abs=1e-4)
    assert np.diff(times[3.0]) == pytest.approx([0.061, 0.083, 0.033, 0.033, 0.033], abs=1e-4)


@pytest.mark.parametrize("output_tokens", [1, 2, 5])
def test_a_prefill_instance_goes_on_with_the_second_token(output_tokens: int) -> None:
    """The end of a prompt of 30 tokens gives the first token after 50 ms. The second one waits for the next prompt."""
    clock, times = VirtualClock(), list[float]()
    engine = engine_on(clock, role="prefill")
    job = engine.arrive(prompt_of(*range(30)), output_tokens, streaming=True)
    engine.prefill(timed(clock, job, times, {"prefilled": engine.reserve, "reserved": engine.go_on}))
    engine.prefill(engine.arrive(prompt_of(7, *range(29)), 1))
    clock.run()
    assert times == pytest.approx(([0.05] + [0.1 + 0.011 * token for token in range(1, 5)])[:output_tokens], abs=1e-3)
    assert job.stage == "answered"
    assert (engine.running, engine.waiting, engine.kv_used_share) == (0, 0, 0.0)
    assert engine.counters.ttft_s.sum_s == pytest.approx(0.05)


def test_the_batch_of_another_role_waits_for_a_prompt() -> None:
    """A prompt of 30 tokens takes 50 ms, by which the iteration in progress takes longer."""
    clock, times = VirtualClock(), list[float]()
    engine = engine_on(clock, role="prefill")
    start(clock, engine, 0, Arrival(0.0, 1, 6, None), times)
    clock.call(0.025, lambda: engine.prefill(engine.arrive(prompt_of(*range(30)), 1)))
    clock.run()
    assert np.diff(times) == pytest.approx([0.011, 0.061, 0.011, 0.011, 0.011], abs=1e-4)
