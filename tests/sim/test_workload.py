"""Laws of every trace that is rescaled, cut, resized or given drawn prefixes."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvroute.sim.workload import (
    PROFILES,
    Trace,
    TracedRequest,
    apply_profile,
    filter_lengths,
    generate,
    rescale,
    rescale_if_spread,
    share_prefixes,
    take,
    window,
    with_lengths,
)
from kvroute.types import InputError


@st.composite
def traces(draw: st.DrawFn, least: int = 0) -> Trace:
    """Draw batches of requests, some with chains of blocks from three prompts, the last block partial or missing."""
    at_s, requests = 0.0, []
    for gap_s in draw(st.lists(st.sampled_from([0.0, 0.0, 0.25, 3.0]), min_size=least, max_size=30)):
        at_s += gap_s
        tokens, prompt = draw(st.integers(1, 200)), draw(st.integers(0, 3))
        count = draw(st.sampled_from([tokens // 16, -(-tokens // 16)])) if prompt else 0
        chain = tuple(prompt * 1_000 + depth for depth in range(count))
        requests.append(TracedRequest(at_s, tokens, draw(st.integers(0, 9)), chain, 16))
    return Trace("law", tuple(requests))


rates = st.floats(1e-3, 1e3)


@given(traces(least=2), rates)
@settings(max_examples=50, deadline=None)
def test_rescaling_reaches_the_rate_and_keeps_order_and_batches(trace: Trace, rate_per_s: float) -> None:
    assume(trace.duration_s > 0)
    scaled = rescale(trace, rate_per_s)
    assert scaled.rate_per_s == pytest.approx(rate_per_s)
    for before, after in zip(trace.requests, scaled.requests, strict=True):
        assert msgspec.structs.replace(after, at_s=before.at_s) == before
    same_time = [a.at_s == b.at_s for a, b in zip(trace.requests[1:], trace.requests, strict=False)]
    assert [a.at_s == b.at_s for a, b in zip(scaled.requests[1:], scaled.requests, strict=False)] == same_time


@given(traces(), st.floats(0, 50))
@settings(max_examples=50, deadline=None)
def test_windows_partition_a_trace(trace: Trace, cut_s: float) -> None:
    parts = window(trace, 0, cut_s), window(trace, cut_s, float("inf"))
    assert all(request.at_s >= 0 for part in parts for request in part.requests)
    whole = [msgspec.structs.replace(request, at_s=0.0) for request in trace.requests]
    assert [msgspec.structs.replace(request, at_s=0.0) for part in parts for request in part.requests] == whole


@given(traces(), st.floats(0, 1), st.floats(0, 1), st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_drawn_prefixes_keep_lengths_and_are_shared_only_within_groups(
    trace: Trace, p_share: float, shared: float, seed: int
) -> None:
    drawn = share_prefixes(trace, p_share, groups=3, shared=shared, block_tokens=16, seed=seed).requests
    for before, after in zip(trace.requests, drawn, strict=True):
        assert (after.at_s, after.input_tokens, after.output_tokens) == (
            before.at_s,
            before.input_tokens,
            before.output_tokens,
        )
        assert len(after.blocks) == before.input_tokens // 16
    for number, request in enumerate(drawn):
        for other in drawn[:number]:
            together = request.group is not None and request.group == other.group
            reach = min(int(shared * request.input_tokens / 16) for request in (request, other))
            common = min(reach, len(request.blocks), len(other.blocks)) if together else 0
            assert request.blocks[:common] == other.blocks[:common]
            assert not set(request.blocks[common:]) & set(other.blocks)


@given(st.integers(0, 1_000), st.sampled_from([0.0, 0.1, 0.7, 1.0]))
@settings(max_examples=6, deadline=None)
def test_the_share_of_members_is_p_share(seed: int, p_share: float) -> None:
    trace = Trace("many", tuple(TracedRequest(float(n), 64, 1, (), 16) for n in range(2_000)))
    members = [request.group is not None for request in share_prefixes(trace, p_share, seed=seed).requests]
    assert np.mean(members) == pytest.approx(p_share, abs=5 * np.sqrt(p_share * (1 - p_share) / 2_000))
    more = [request.group is not None for request in share_prefixes(trace, 1.0, seed=seed).requests]
    assert all(b or not a for a, b in zip(members, more, strict=True))


@given(traces(), st.integers(1, 400))
@settings(max_examples=50, deadline=None)
def test_equal_lengths_keep_common_prefixes_and_add_none(trace: Trace, tokens: int) -> None:
    resized = with_lengths(trace, input_tokens=tokens, output_tokens=7)
    for before, after in zip(trace.requests, resized.requests, strict=True):
        assert (after.at_s, after.input_tokens, after.output_tokens) == (before.at_s, tokens, 7)
        full = min(before.input_tokens, tokens) // 16
        assert after.blocks[:full] == before.blocks[:full]
        if before.blocks and before.input_tokens != tokens:
            assert len(after.blocks) in (tokens // 16, -(-tokens // 16))
    if all(request.input_tokens < tokens for request in trace.requests):
        new = [
            block for a, b in zip(resized.requests, trace.requests, strict=True) for block in a.blocks[len(b.blocks) :]
        ]
        assert len(new) == len(set(new))


@given(traces(), st.integers(0, 40))
@settings(max_examples=50, deadline=None)
def test_take_returns_the_first_requests(trace: Trace, n: int) -> None:
    assert take(trace, n).requests == trace.requests[:n]


def test_a_profile_keeps_lengths_within_inclusive_bounds() -> None:
    lengths = (1, 4_095, 4_096, 8_192, 8_193, 16_384, 16_385, 65_536, 65_537)
    trace = Trace("bounds", tuple(TracedRequest(0.0, length, 1, (), 16) for length in lengths))
    kept = {
        name: [request.input_tokens for request in apply_profile(trace, profile).requests]
        for name, profile in PROFILES.items()
    }
    assert kept == {
        "chatbot": [1, 4_095, 4_096, 8_192],
        "rag": [4_096, 8_192, 8_193, 16_384, 16_385, 65_536],
        "long-context": [16_385, 65_536, 65_537],
    }
    assert [(profile.p_share, profile.ttft_slo_s) for profile in PROFILES.values()] == [(0.3, 2), (0.7, 5), (0.1, 10)]


def test_statistics_of_four_requests() -> None:
    rows = [(0.0, 40, (1, 2, 3)), (0.0, 40, (1, 2, 4)), (6.0, 20, (1, 2)), (9.0, 10, (9,))]
    trace = Trace("four", tuple(TracedRequest(at_s, tokens, 5, blocks, 16) for at_s, tokens, blocks in rows))
    statistics = trace.statistics()
    assert (statistics.requests, statistics.duration_s, statistics.rate_per_s) == (4, 9.0, 4 / 9)
    assert (statistics.distinct_arrivals, statistics.batch_max, statistics.batch_mean, statistics.gap_p50_s) == (
        3,
        2,
        4 / 3,
        4.5,
    )
    assert statistics.gap_cv == pytest.approx(np.std([0, 6, 3]) / 3)
    assert (statistics.blocks, statistics.unique_blocks, statistics.reused_block_share) == (9, 5, 4 / 9)
    # The third prompt reuses 20 tokens, not two blocks of 16: its last block is partial.
    assert statistics.reused_token_share == pytest.approx((32 + 20) / 110)
    assert statistics.reusing_request_share == 0.5
    assert statistics.input_tokens is not None
    assert (statistics.input_tokens.mean, statistics.input_tokens.min, statistics.input_tokens.p50) == (27.5, 10, 30.0)


def test_an_empty_trace_has_statistics_too() -> None:
    statistics = Trace("nothing", ()).statistics()
    assert (statistics.requests, statistics.rate_per_s, statistics.batch_max, statistics.input_tokens) == (
        0,
        0.0,
        0,
        None,
    )
    assert msgspec.json.decode(msgspec.json.encode(statistics), type=type(statistics)) == statistics


@pytest.mark.parametrize("rate_per_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_is_positive_and_finite(rate_per_s: float) -> None:
    with pytest.raises(InputError, match="rate"):
        rescale(generate(50, seed=0), rate_per_s)


def test_invalid_options_are_named() -> None:
    trace = generate(50, seed=0)
    with pytest.raises(InputError, match="no rate"):
        rescale(take(trace, 1), 2.0)
    with pytest.raises(InputError, match="no request has a prompt"):
        filter_lengths(trace, 10**6)
    with pytest.raises(InputError, match="p_share"):
        share_prefixes(trace, 1.5, seed=0)
    with pytest.raises(InputError, match="groups"):
        share_prefixes(trace, 0.5, groups=0, seed=0)
    with pytest.raises(InputError, match="window"):
        window(trace, 5, 4)
    with pytest.raises(InputError, match="take"):
        take(trace, -1)
    with pytest.raises(InputError, match="input_tokens"):
        with_lengths(trace, input_tokens=0)


@given(traces(least=1), st.floats(0.01, 100))
def test_any_part_of_a_trace_can_be_given_a_rate(trace: Trace, rate_per_s: float) -> None:
    """A part that has a rate gets the new one; otherwise the requests stay the same, with a remark."""
    scaled = rescale_if_spread(trace, rate_per_s)
    if trace.rate_per_s:
        assert scaled == rescale(trace, rate_per_s)
    else:
        assert scaled.requests == trace.requests
        assert len(scaled.remarks) == (len(trace.requests) > 1)
