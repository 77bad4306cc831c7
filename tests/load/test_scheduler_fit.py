"""The scheduler's costs are found again from times that a known engine would have."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.load.timing import CachedPrompt, Scheduling, Together, fit_engine
from kvroute.load.timing.scheduler import shared_time_s
from kvroute.sim.agenda import Agenda
from kvroute.sim.groups.chunked_prefill import ChunkedPrefill
from kvroute.sim.groups.pipelines import PipelinePrompt
from kvroute.timing import Profile, prefill_time
from kvroute.types import DecodeSpec, InputError, QuadraticPrefill, SchedulerSpec

DECODE = DecodeSpec(base_s=0.008, per_request_s=0.0004, per_context_token_s=1e-6)
LENGTHS = np.array([64.0, 128.0, 256.0, 512.0, 1024.0, 1536.0])


def ends(prefill: QuadraticPrefill, step_tokens: int, step_s: float, prompts: list[int]) -> list[float]:
    """Return the times of prompts that are sent together to a simulated engine, the second one a moment later."""
    agenda, found = Agenda(), []
    engine = ChunkedPrefill(agenda, prefill_time(prefill), step_tokens, step_s, 256)
    for number, tokens in enumerate(prompts):
        agenda.now = 1e-9 * number
        prompt = PipelinePrompt(number, tokens, 0.0, lambda _, __: None, lambda _: found.append(agenda.now))
        engine.submit(prompt)
    while agenda.due:
        agenda.now = agenda.due[0][0]
        agenda.act()
    return found


def measured(prefill: QuadraticPrefill, step_tokens: int, step_s: float) -> tuple[Profile, Scheduling]:
    """Return what `timing measure` would find."""
    one_prompt_s = np.array([ends(prefill, step_tokens, step_s, [round(length)])[-1] for length in LENGTHS])
    batches = np.array([1.0, 2.0, 4.0, 8.0, 1.0, 2.0])
    contexts = np.array([64.0, 128.0, 256.0, 512.0, 1056.0, 2112.0])
    steps_s = DECODE.base_s + DECODE.per_request_s * batches + DECODE.per_context_token_s * contexts
    short = step_tokens // 8
    scheduling = Scheduling(
        step_tokens,
        ends(prefill, step_tokens, step_s, [step_tokens])[-1],
        Together(8, step_tokens, ends(prefill, step_tokens, step_s, [step_tokens] * 8)[-1]),
        Together(17, short, ends(prefill, step_tokens, step_s, [short] * 17)[-1]),
    )
    return Profile("engine", LENGTHS, one_prompt_s, batches, steps_s, contexts), scheduling


@given(st.floats(1e-3, 2e-2), st.floats(0, 1e-2), st.sampled_from([256, 512, 2048]))
def test_step_and_request_times_are_found_again(step_s: float, request_s: float, step_tokens: int) -> None:
    """Also where prompts took several steps, and with the time of a request on the decode engine."""
    prefill = QuadraticPrefill(base_s=step_s + request_s, per_token_s=2e-4, per_token2_s=7e-8)
    profile, scheduling = measured(prefill, step_tokens, step_s)
    step_of_one_s = DECODE.base_s + DECODE.per_request_s + DECODE.per_context_token_s * 129
    cached = [CachedPrompt(129, 1, step_of_one_s + 0.004)] * 3
    found = fit_engine(profile, "quadratic", scheduling, cached, "between-steps")
    assert found.scheduler.step_tokens == step_tokens
    assert found.scheduler.transfers == "between-steps"
    assert found.scheduler.step_s == pytest.approx(step_s, abs=1e-4)
    assert found.scheduler.decode_request_s == pytest.approx(0.004, abs=1e-5)
    assert isinstance(found.prefill.spec, QuadraticPrefill)
    assert found.prefill.spec.base_s == pytest.approx(step_s + request_s, abs=1e-4)
    assert found.prefill.spec.per_token_s == pytest.approx(2e-4, rel=0.01)
    assert found.shared_s == pytest.approx(scheduling.short.seconds, rel=0.02)


def test_without_scheduling_there_are_no_steps() -> None:
    """As before: the times of the profile alone; a fault names the engine."""
    profile, _ = measured(QuadraticPrefill(base_s=0.01, per_token_s=2e-4, per_token2_s=0.0), 100_000, 0.01)
    found = fit_engine(profile, "linear", None, [], "at-once")
    assert found.scheduler == SchedulerSpec()
    assert found.shared_s is None
    one = Profile("http://x", LENGTHS[:1], LENGTHS[:1], profile.batch, profile.iteration_s, profile.context_tokens)
    with pytest.raises(InputError, match=r"http://x: 1 different token counts"):
        fit_engine(one, "linear", None, [], "at-once")


def test_the_first_prompt_has_a_step_of_its_own() -> None:
    """17 prompts of 100 tokens at 1 ms each, in steps of 800 tokens and 10 ms; 5 ms pass before the first."""
    prefill = QuadraticPrefill(base_s=0.015, per_token_s=1e-3, per_token2_s=0.0)
    scheduler = SchedulerSpec(step_tokens=800, step_s=0.01)
    assert shared_time_s(prefill, scheduler, Together(17, 100, 0.0)) == pytest.approx(0.005 + 3 * 0.01 + 1.7)
