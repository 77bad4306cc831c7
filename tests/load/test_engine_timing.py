"""Step times from arrivals: the same step for all requests is found whatever their starts and their events are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.load.timing import MeasurementLimits, batches_of, lengths_of
from kvroute.load.timing.measurement import LEAST_STEPS, step_time
from kvroute.types import InputError

STEP_S = st.floats(1e-3, 1.0)
LAST_FIRST_S = 10.0


@given(STEP_S, st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(1, 3), st.integers(64, 96))
def test_steps_of_equal_length(step_s: float, starts: list[int], per_event: int, tokens: int) -> None:
    """Requests join in different steps; an engine may send several tokens in one event."""
    tokens -= tokens % per_event
    times = [[(start + per_event * (event + 1)) * step_s for event in range(tokens // per_event)] for start in starts]
    overlap = tokens - (max(starts) - min(starts))
    found = step_time(times, tokens, prompt_tokens=100)
    if overlap < LEAST_STEPS:
        assert found is None
    elif overlap > LEAST_STEPS + 2 * per_event:
        assert found is not None
        assert found[0] == pytest.approx(step_s)
        assert 100 < found[1] <= 100 + tokens


@given(STEP_S, st.integers(16, 64))
def test_only_steps_of_the_whole_batch_count(step_s: float, tokens: int) -> None:
    """The first request decodes twice as fast until the second one has its first token, and again after its end."""
    first = [step_s / 2 * (index + 1) for index in range(tokens)]
    joined_s = first[-1]
    first += [joined_s + step_s * (index + 1) for index in range(tokens)]
    second = [joined_s + step_s * (index + 1) for index in range(2 * tokens)]
    found = step_time([first, second], 2 * tokens, prompt_tokens=10)
    assert found is not None
    assert found[0] == pytest.approx(step_s)


def test_requests_that_decode_one_after_the_other_have_no_step() -> None:
    """Also one without any token."""
    assert step_time([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], 3, 10) is None
    assert step_time([[1.0, 2.0, 3.0], []], 3, 10) is None


@given(st.integers(64, 100_000), st.integers(0, 200_000))
def test_the_lengths_fit_into_the_context(most: int, context: int) -> None:
    try:
        lengths = lengths_of(MeasurementLimits(prompt_tokens=most), context)
    except InputError:
        assert min(most, context or most) < 200
        return
    assert lengths == sorted(set(lengths))
    assert len(lengths) >= 3
    assert lengths[-1] <= most
    assert not context or lengths[-1] < context


@given(st.integers(2, 4096), st.integers(0, 200_000))
def test_the_batches_tell_requests_from_contexts(most: int, context: int) -> None:
    try:
        batches = batches_of(MeasurementLimits(batch=most), context)
    except InputError:
        assert 0 < context < 200
        return
    assert {batch.requests for batch in batches} >= {1, most}
    assert all(not context or batch.prompt_tokens + 64 < context for batch in batches)
    if not context or context > 400:
        assert len({batch.prompt_tokens for batch in batches if batch.requests == 1}) == 2


def test_the_smaller_half_of_the_batches_is_measured_with_long_prompts_too() -> None:
    """The time per token of context would otherwise come from the smallest batches alone."""
    batches = batches_of(MeasurementLimits(batch=16), 0)
    assert [batch.requests for batch in batches if batch.prompt_tokens == 32] == [1, 2, 4, 8, 16]
    assert [batch.requests for batch in batches if batch.prompt_tokens == 1_024] == [1, 2, 4]


def test_what_cannot_be_measured() -> None:
    """One sentence each, with the option to change."""
    for attempt in (
        lambda: lengths_of(MeasurementLimits(prompt_tokens=100), 0),
        lambda: batches_of(MeasurementLimits(batch=1), 0),
        lambda: batches_of(MeasurementLimits(output_tokens=1000), 500),
    ):
        with pytest.raises(InputError, match=r"--(max-prompt-tokens|max-batch|output-tokens): "):
            attempt()
