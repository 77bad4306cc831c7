"""Engines with joint steps: the same times as a slow reference, and each mechanism by hand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sim.engine_reference import SlowEngine, SlowRequest

from kvroute.sim.engine.clients import ClosedLoop, LoadStage, run_engine, stage_arrivals
from kvroute.sim.engine.scheduler import EngineRequest, EngineSpec
from kvroute.sim.engine.serving import ServingEngine
from kvroute.timing.steps import LinearSteps, StepWork
from kvroute.types import InputError

STEPS = LinearSteps(base_s=1.0, prompt_token_s=0.0, request_s=0.0, context_token_s=0.0)
"""Every step takes a second, so that times are counts of steps."""


class Recorder:
    """Steps of one rank, recorded."""

    def __init__(self, steps: LinearSteps = STEPS) -> None:
        self.steps = steps
        self.works: list[StepWork] = []

    def __call__(self, works: Sequence[StepWork]) -> float:
        self.works.append(works[0])
        return self.steps(works[0])


def served(spec: EngineSpec, requests: list[EngineRequest], **how: object) -> tuple[ServingEngine, list[StepWork]]:
    """Serve requests; return the engine and its steps."""
    recorder = Recorder()
    return run_engine(spec, recorder, requests, **how), recorder.works  # type: ignore[arg-type]


def request(number: int, arrived_s: float, input_tokens: int, output_tokens: int, keys: str = "") -> EngineRequest:
    """Return a request; each letter is the key of a block of its prompt."""
    return EngineRequest(number, arrived_s, input_tokens, output_tokens, tuple(keys))


specs = st.builds(
    EngineSpec,
    step_tokens=st.integers(5, 20),
    requests_max=st.integers(1, 5),
    blocks=st.integers(12, 30),
    block_tokens=st.sampled_from([1, 2, 4]),
    prefix_cache=st.booleans(),
    reserve_prompt=st.booleans(),
    asynchronous=st.booleans(),
    request_s=st.sampled_from([0.0, 0.5]),
    streaming_request_s=st.sampled_from([0.0, 0.125]),
)
lines = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 9), st.integers(1, 12), st.integers(0, 2), st.integers(0, 9)),
    min_size=1,
    max_size=8,
)


@given(specs, lines)
def test_steps_and_times_are_those_of_the_reference(spec: EngineSpec, drawn: list[tuple[int, ...]]) -> None:
    """Prompts of one family begin with the same tokens. Times are eighths, so that sums are exact."""
    steps = LinearSteps(base_s=1.0, prompt_token_s=0.125, request_s=0.25, context_token_s=0.125)
    fast, slow = [], []
    for number, (at, input_tokens, output_tokens, family, common) in enumerate(sorted(drawn)):
        if -(-(input_tokens + output_tokens - 1) // spec.block_tokens) > spec.blocks:
            continue
        shared = [(family, place) if place < common else (number, "own", place) for place in range(input_tokens)]
        keys = tuple(tuple(shared[: end + 1]) for end in range(spec.block_tokens - 1, input_tokens, spec.block_tokens))
        fast.append(EngineRequest(number, at / 4, input_tokens, output_tokens, keys))
        slow.append(SlowRequest(number, at / 4, list(shared), output_tokens))
    recorder = Recorder(steps)
    run_engine(spec, recorder, fast)
    assert recorder.works == SlowEngine(spec, steps).run(slow)
    assert [(request.first_token_s, request.ended_s, request.preemptions) for request in fast] == [
        (request.first_token_s, request.ended_s, request.preemptions) for request in slow
    ]


@given(specs, lines)
def test_all_blocks_are_free_at_the_end(spec: EngineSpec, drawn: list[tuple[int, ...]]) -> None:
    fits = [line for line in sorted(drawn) if -(-(line[1] + line[2] - 1) // spec.block_tokens) <= spec.blocks]
    requests = [request(number, at, tokens, out) for number, (at, tokens, out, *_) in enumerate(fits)]
    engine, works = served(spec, requests)
    assert engine.ranks[0].used_blocks == engine.ranks[0].running == 0
    assert all(work.tokens <= spec.step_tokens for work in works)
    assert all(request.ended_s is not None and request.first_token_s is not None for request in requests)


def test_a_step_computes_prompts_beside_requests_that_decode() -> None:
    """Ten tokens a step: a prompt of 12 takes a part of two steps; the first request decodes in both."""
    spec = EngineSpec(step_tokens=10, blocks=100, block_tokens=4, asynchronous=False)
    requests = [request(0, 0.0, 4, 4), request(1, 0.5, 12, 2)]
    _, works = served(spec, requests)
    assert works == [
        StepWork(((0, 4),), 0, 0),
        StepWork(((0, 9),), 1, 5),
        StepWork(((9, 3),), 1, 6),
        StepWork((), 2, 7 + 13),
    ]
    assert (requests[0].first_token_s, requests[0].ended_s) == (1.0, 4.0)
    assert (requests[1].first_token_s, requests[1].ended_s) == (3.0, 4.0)


def test_an_asynchronous_engine_plans_a_step_when_the_one_before_it_starts() -> None:
    """At 0.5 the step from 1 to 2 is planned already, so a prompt is computed from 2 to 3."""
    for asynchronous, first_s in ((False, 2.0), (True, 3.0)):
        requests = [request(0, 0.0, 4, 8), request(1, 0.5, 4, 1)]
        served(EngineSpec(blocks=100, asynchronous=asynchronous), requests)
        assert requests[1].first_token_s == first_s
        assert requests[0].ended_s == 8.0


def test_a_request_costs_time_besides_its_steps() -> None:
    """2 s, half before and half after the steps, and 0.25 s for the other request that sends a token in the step."""
    spec = EngineSpec(blocks=100, asynchronous=False, request_s=2.0, streaming_request_s=0.25)
    requests = [request(0, 0.0, 4, 9), request(1, 0.5, 4, 1)]
    served(spec, requests)
    assert requests[0].first_token_s == 1.0 + 1.0 + 1.0
    assert requests[1].first_token_s == 2.0 + 1.0 + 1.0 + 0.25


def test_the_last_token_of_a_cached_prompt_is_computed() -> None:
    """Two blocks of four are cached; of a prompt with exactly these the second block is computed again."""
    spec = EngineSpec(blocks=100, block_tokens=4, asynchronous=False)
    requests = [request(0, 0.0, 9, 1, "ab"), request(1, 5.0, 8, 1, "ab"), request(2, 9.0, 9, 1, "ab")]
    _, works = served(spec, requests)
    assert [work.prompts for work in works] == [((0, 9),), ((4, 4),), ((8, 1),)]
    assert [request.cached_tokens for request in requests] == [0, 4, 8]


def test_the_longest_free_block_is_taken_first_and_its_content_is_lost() -> None:
    """Three blocks: the third request takes the one that was never used and then a's last block."""
    spec = EngineSpec(blocks=3, block_tokens=4, asynchronous=False)
    requests = [request(0, 0.0, 8, 1, "ab"), request(1, 5.0, 8, 1, "cd"), request(2, 9.0, 8, 1, "ab")]
    _, works = served(spec, requests)
    assert requests[2].cached_tokens == 4
    assert works[-1].prompts == ((4, 4),)


def test_the_request_that_started_last_is_preempted_and_resumes_from_what_is_left_of_its_blocks() -> None:
    """Four blocks of two tokens. Request 1 gives its blocks back when 0 needs a third one, which is 1's last; it waits
    for 0's end and finds the first of its blocks, so it computes one token of the prompt and one of the output."""
    spec = EngineSpec(blocks=4, block_tokens=2, asynchronous=False, step_tokens=10)
    requests = [request(0, 0.0, 3, 3), request(1, 0.0, 2, 3)]
    _, works = served(spec, requests)
    assert works == [
        StepWork(((0, 3), (0, 2)), 0, 0),
        StepWork((), 2, 4 + 3),
        StepWork((), 1, 5),
        StepWork(((2, 2),), 0, 0),
    ]
    assert (requests[0].preemptions, requests[1].preemptions) == (0, 1)
    assert (requests[1].first_token_s, requests[1].ended_s) == (1.0, 4.0)


def test_a_prompt_waits_for_blocks_for_all_of_it() -> None:
    """A prompt of six tokens waits while fewer than six blocks of one token are free, or begins with those that are."""
    for reserve, third in ((True, ()), (False, ((0, 2),))):
        spec = EngineSpec(blocks=8, block_tokens=1, step_tokens=3, asynchronous=False, reserve_prompt=reserve)
        _, works = served(spec, [request(0, 0.0, 4, 3), request(1, 1.5, 6, 1)])
        assert works[2] == StepWork(third, 1, 5)


def test_a_client_gives_up_and_the_engine_drops_its_request() -> None:
    """Request 0 decodes when its client gives up, and request 1 starts then, a second before its own client does."""
    spec = EngineSpec(blocks=100, requests_max=1, asynchronous=False)
    requests = [request(0, 0.0, 4, 9), request(1, 1.0, 4, 3), request(2, 4.5, 4, 1)]
    engine, works = served(spec, requests, timeout_s=4.5)
    assert [request.failed for request in requests] == [True, True, False]
    assert (requests[0].first_token_s, requests[0].ended_s) == (1.0, None)
    assert requests[2].ended_s == 7.0  # after the step that began at 4 and that of request 1
    assert engine.ranks[0].used_blocks == 0
    assert len(works) == 7


def test_a_closed_loop_sends_the_next_request_when_one_has_ended() -> None:
    """Two clients, the second half a second later. The engine plans the step at 2 before the third request arrives."""
    requests = [request(number, 9.9, 4, 2) for number in range(4)]
    spec = EngineSpec(blocks=100, asynchronous=False)
    served(spec, requests, loop=ClosedLoop(2, first_wave_per_s=2.0))
    assert [request.arrived_s for request in requests] == [0.0, 0.5, 2.0, 3.0]
    assert [request.ended_s for request in requests] == [2.0, 3.0, 5.0, 6.0]


def test_a_closed_loop_goes_on_after_a_client_gave_up() -> None:
    requests = [request(number, 0.0, 4, out) for number, out in enumerate((9, 1))]
    served(EngineSpec(blocks=100, asynchronous=False), requests, loop=ClosedLoop(1), timeout_s=2.5)
    assert requests[0].failed
    assert requests[1].arrived_s == 2.5
    assert requests[1].ended_s == 4.0


@given(st.floats(0.5, 30), st.integers(1, 40), st.sampled_from(["exponential", "even"]), st.integers(0, 9))
def test_stages_have_their_requests_in_their_time(rate: float, duration: int, gaps: str, seed: int) -> None:
    stages = [LoadStage(rate, float(duration)), LoadStage(2 * rate, 10.0)]
    times = stage_arrivals(stages, gaps, seed, pause_s=5.0)  # type: ignore[arg-type]
    assert [len(part) for part in times] == [int(rate * duration), int(2 * rate * 10)]
    for part, end in zip(times, (duration, duration + 5.0 + 10.0), strict=True):
        assert all(earlier <= later for earlier, later in pairwise(part))
        assert not part or part[-1] == pytest.approx(end)


def test_gaps_of_stages() -> None:
    (even,) = stage_arrivals([LoadStage(2.0, 3.0)], "even", 0)
    assert even == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.5, 3.0])
    (drawn,) = stage_arrivals([LoadStage(50.0, 200.0)], "exponential", 1)
    gaps = [later - earlier for earlier, later in pairwise(drawn)]
    mean = sum(gaps) / len(gaps)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.1)


def test_ranks_step_together_and_the_less_loaded_one_takes_a_request() -> None:
    """One rank computes 8 tokens and the other 2; both take the time of the slower one."""
    seen: list[list[StepWork]] = []

    def together(works: Sequence[StepWork]) -> float:
        seen.append(list(works))
        return float(max(work.tokens for work in works))

    requests = [request(0, 0.0, 8, 1), request(1, 0.0, 2, 2)]
    run_engine(EngineSpec(blocks=100, asynchronous=False), together, requests, ranks=2)
    assert seen == [[StepWork(((0, 8),)), StepWork(((0, 2),))], [StepWork(), StepWork((), 1, 3)]]
    assert (requests[0].ended_s, requests[1].first_token_s, requests[1].ended_s) == (8.0, 8.0, 9.0)


def test_a_request_larger_than_the_memory_is_refused() -> None:
    with pytest.raises(InputError, match=r"request 7 of 60 \+ 6 tokens does not fit into 4 blocks of 16"):
        served(EngineSpec(blocks=4), [request(7, 0.0, 60, 6)])
