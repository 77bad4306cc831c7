"""Generated traces: reproducible, and similar to the trace whose statistics they follow."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.sim.workload import PROFILES, Trace, TraceShape, TraceStatistics, apply_profile, generate, read, rescale
from kvroute.types import InputError

CONVERSATION = Path(__file__).resolve().parents[2].parent / "shared/data/mooncake/conversation_trace.jsonl.zst"
SEEDS = range(3)


@lru_cache
def generated(seed: int) -> Trace:
    return generate(12_031, seed=seed)


@lru_cache
def statistics(seed: int) -> TraceStatistics:
    return generated(seed).statistics()


def real() -> Trace:
    if not CONVERSATION.exists():
        if os.environ.get("KVROUTE_REQUIRE_LIVE"):
            pytest.fail(f"{CONVERSATION} is missing")
        pytest.skip(f"{CONVERSATION} is missing")
    return read(CONVERSATION)


@given(st.integers(1, 300), st.integers(0, 2**64), st.floats(1e-2, 1e4))
@settings(max_examples=20, deadline=None)
def test_a_seed_determines_the_trace(n: int, seed: int, rate_per_s: float) -> None:
    trace = generate(n, rate_per_s=rate_per_s, seed=seed)
    assert trace == generate(n, rate_per_s=rate_per_s, seed=seed)
    assert len(trace.requests) == n
    assert trace.requests[0].at_s == 0
    for request in trace.requests:
        assert len(request.blocks) == len(set(request.blocks)) == -(-request.input_tokens // 512)
    if n > 50:
        assert trace != generate(n, rate_per_s=rate_per_s, seed=seed + 1)


def test_another_rate_changes_only_the_times() -> None:
    slow, fast = generate(500, seed=3), generate(500, rate_per_s=17.0, seed=3)
    assert [request.blocks for request in slow.requests] == [request.blocks for request in fast.requests]
    assert rescale(slow, 17.0).statistics().batch_max == fast.statistics().batch_max
    assert fast.duration_s == pytest.approx(slow.duration_s / 5)


def test_an_equal_block_means_an_equal_prefix() -> None:
    """A request with a block has all blocks before it, as a hash of a prefix requires."""
    before: dict[int, int] = {}
    for request in generated(0).requests:
        for parent, block in zip((-1, *request.blocks), request.blocks, strict=False):
            assert before.setdefault(block, parent) == parent


def test_a_turn_shares_the_full_blocks_of_the_one_before_it_and_only_once() -> None:
    """Without edits, the last holder of the deepest shared block is the previous turn, as a whole."""
    trace = generate(3_000, seed=1, shape=TraceShape(kept_share=((0, 1), (100, 1))))
    holder: dict[int, int] = {}
    turns = 0
    for number, request in enumerate(trace.requests):
        hit = next(depth for depth, block in enumerate((*request.blocks, -1)) if block not in holder)
        if hit > 1:
            before = trace.requests[holder[request.blocks[hit - 1]]]
            assert hit == before.input_tokens // 512
            assert before.input_tokens + 128 <= request.input_tokens
            assert before.at_s + 12 <= request.at_s
            turns += 1
        holder.update(dict.fromkeys(request.blocks, number))
    assert turns > 500


def test_a_duration_gives_about_rate_times_duration_requests() -> None:
    trace = generate(duration_s=600, rate_per_s=5, seed=1)
    assert 590 <= trace.duration_s <= 600
    assert len(trace.requests) == pytest.approx(3_000, abs=5 * np.sqrt(3_000))


@pytest.mark.parametrize("seed", SEEDS)
def test_lengths_follow_the_published_quantiles(seed: int) -> None:
    """Sampling alone changes the mean of 12,031 prompts by 1.2 % and their p99 by 4 % (one standard deviation)."""
    prompts, answers = statistics(seed).input_tokens, statistics(seed).output_tokens
    assert prompts is not None
    assert answers is not None
    assert prompts.mean == pytest.approx(12_040, rel=0.05)
    assert prompts.min == pytest.approx(891, abs=1)
    assert prompts.p5 == pytest.approx(901, abs=4)
    for generated_value, published in zip(
        (prompts.p25, prompts.p50, prompts.p75, prompts.p90, prompts.p95),
        (2_306, 6_909, 15_370, 27_370, 39_550),
        strict=True,
    ):
        assert generated_value == pytest.approx(published, rel=0.08)
    assert prompts.p99 == pytest.approx(85_400, rel=0.15)
    assert 110_000 < prompts.max <= 126_200
    assert answers.mean == pytest.approx(342.6, rel=0.03)
    assert answers.p5 == pytest.approx(10, abs=2)
    assert answers.p25 == pytest.approx(156, rel=0.08)
    assert answers.p50 == pytest.approx(350, rel=0.03)
    assert answers.p75 == pytest.approx(472, rel=0.03)
    assert answers.p90 == pytest.approx(597, rel=0.04)
    assert answers.p99 == pytest.approx(1_119, rel=0.12)
    assert 1 <= answers.min <= answers.max <= 2_000


@pytest.mark.parametrize("seed", SEEDS)
def test_arrivals_come_in_three_second_batches(seed: int) -> None:
    measured = statistics(seed)
    times, sizes = np.unique([request.at_s for request in generated(seed).requests], return_counts=True)
    assert measured.duration_s == pytest.approx(3_537, abs=7)
    assert measured.distinct_arrivals == pytest.approx(1_180, abs=3)
    assert np.diff(times) == pytest.approx(3.0, abs=0.004)
    assert measured.batch_mean == pytest.approx(10.2, abs=0.1)
    assert float(np.std(sizes)) == pytest.approx(3.35, abs=0.35)
    assert measured.batch_p95 == pytest.approx(16, abs=1)
    assert measured.gap_cv == pytest.approx(3.034, abs=0.03)


@pytest.mark.parametrize("seed", SEEDS)
def test_prefixes_are_reused_as_in_the_conversation_trace(seed: int) -> None:
    assert statistics(seed).reused_block_share == pytest.approx(0.366, abs=0.03)
    assert statistics(seed).reused_token_share == pytest.approx(0.374, abs=0.03)
    assert statistics(seed).reusing_request_share == pytest.approx(12_030 / 12_031)


@pytest.mark.parametrize("profile", PROFILES)
def test_each_profile_resembles_its_part_of_the_real_trace(profile: str) -> None:
    """The mean of the seeds is compared with the real rows: how many match, and how much of them can be reused."""
    theirs = apply_profile(real(), PROFILES[profile]).statistics()
    ours = [apply_profile(generated(seed), PROFILES[profile]).statistics() for seed in SEEDS]
    assert np.mean([statistics.requests for statistics in ours]) == pytest.approx(theirs.requests, rel=0.03)
    assert np.mean([statistics.reused_block_share for statistics in ours]) == pytest.approx(
        theirs.reused_block_share, abs=0.05
    )


def test_the_real_trace_has_the_published_statistics() -> None:
    measured = real().statistics()
    assert (measured.requests, measured.distinct_arrivals, measured.batch_max) == (12_031, 1_180, 28)
    assert measured.duration_s == pytest.approx(3_537, abs=0.01)
    assert measured.gap_cv == pytest.approx(3.034, abs=1e-3)
    assert measured.reused_block_share == pytest.approx(0.3664, abs=1e-4)
    assert measured.reused_token_share == pytest.approx(0.3736, abs=1e-4)
    assert [len(apply_profile(real(), profile).requests) for profile in PROFILES.values()] == [6_620, 7_675, 2_731]


def test_invalid_options_are_named() -> None:
    with pytest.raises(InputError, match="either"):
        generate(seed=0)
    with pytest.raises(InputError, match="either"):
        generate(5, duration_s=5, seed=0)
    with pytest.raises(InputError, match="n: 0"):
        generate(0, seed=0)
    with pytest.raises(InputError, match="rate_per_s"):
        generate(5, rate_per_s=float("nan"), seed=0)
    with pytest.raises(InputError, match="seed"):
        generate(5, seed=-1)
