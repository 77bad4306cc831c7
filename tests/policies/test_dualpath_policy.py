"""Laws of DualPath's decisions against slow, obvious versions."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.policies import PrefillCandidates, prefill_policy
from kvroute.policies.storage.dualpath import ABLATION, DualPathSpec
from kvroute.policies.storage.dualpath_kernels import (
    NO_ENGINE,
    AttentionCost,
    attention_s,
    decode_engine,
    fitting_requests,
    least,
    prefill_blocks,
    prefill_engine,
    quota_tokens,
    token_limit,
)
from kvroute.types import Choice, InputError, Reject, Request

TOKENS = st.integers(0, 20).map(float)
SECONDS = st.floats(0.0, 100.0)
COSTS = st.builds(
    AttentionCost,
    token_s=st.sampled_from([0.0, 1e-6]),
    context_s=st.sampled_from([1e-9, 1e-7]),
    attended_s=st.sampled_from([0.0, 3e-9]),
    attended_tokens=st.sampled_from([0.0, 64.0, 2048.0, math.inf]),
)


@st.composite
def prefill_groups(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens of engines, queues of nodes, and the node of each engine."""
    engines, nodes = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    tokens = np.array(draw(st.lists(TOKENS, min_size=engines, max_size=engines)))
    queues = np.array(draw(st.lists(TOKENS, min_size=nodes, max_size=nodes)))
    node = np.array(draw(st.lists(st.integers(0, nodes - 1), min_size=engines, max_size=engines)))
    return tokens, queues, node


@given(prefill_groups(), st.data())
def test_the_prefill_policy_is_algorithm_1_in_seconds(
    group: tuple[np.ndarray, np.ndarray, np.ndarray], data: st.DataObject
) -> None:
    """Of the allowed instances, if not all are overloaded."""
    work, queues, node = group
    allowed = np.array(data.draw(st.lists(st.booleans(), min_size=len(work), max_size=len(work))))
    names = tuple(f"p{number}" for number in range(len(work)))
    nothing = np.zeros(len(work), dtype=np.int64)
    candidates = PrefillCandidates(names, work, nothing, np.zeros(len(work)), allowed, queues[node])
    choice = prefill_policy("dualpath").choose(Request(id=1, input_tokens=1), candidates, 0)
    if not allowed.any():
        assert isinstance(choice, Reject)
        return
    assert isinstance(choice, Choice)
    those = np.flatnonzero(allowed)
    expected = prefill_engine(work[those], queues, node[those], 0, len(those), 3.0, 5.0)
    if expected == NO_ENGINE:
        assert (work[those] > 5.0).all()
        assert work[choice.index] == work[those].min()
    else:
        assert choice.index == those[expected]
    assert sorted(choice.terms.cost.tolist()) == list(range(len(work)))


@given(prefill_groups(), TOKENS, TOKENS)
def test_a_request_goes_to_the_engine_of_algorithm_1(
    group: tuple[np.ndarray, np.ndarray, np.ndarray], alpha: float, beta: float
) -> None:
    tokens, queues, node = group
    for first in range(len(tokens)):
        engines = range(first, len(tokens))
        short = [e for e in engines if queues[node[e]] <= alpha and tokens[e] <= beta]
        long = [e for e in engines if queues[node[e]] > alpha and tokens[e] <= beta]
        expected = min(short or long, key=lambda e: (tokens[e], e), default=NO_ENGINE)
        assert prefill_engine(tokens, queues, node, first, len(tokens), alpha, beta) == expected


@given(st.lists(TOKENS, min_size=1, max_size=8))
def test_a_request_goes_to_the_decode_group_with_the_fewest_tokens(tokens: list[float]) -> None:
    assert least(np.array(tokens)) == tokens.index(min(tokens))


@given(st.lists(TOKENS, max_size=8), TOKENS)
def test_fitting_requests_are_the_longest_prefix_within_the_free_memory(lengths: list[float], free: float) -> None:
    fits = [count for count in range(len(lengths) + 1) if sum(lengths[:count]) <= free]
    assert fitting_requests(np.array(lengths), free) == max(fits)


@given(st.lists(st.tuples(TOKENS, st.integers(0, 3), TOKENS), min_size=1, max_size=8), TOKENS, TOKENS)
def test_a_request_goes_to_the_decode_engine_of_phase_2(
    group: list[tuple[float, int, float]], length: float, limit: float
) -> None:
    tokens, sequences, free = (np.array(column) for column in zip(*group, strict=True))
    engines = [e for e in range(len(group)) if free[e] >= length]
    light = [e for e in engines if tokens[e] + length <= limit]
    expected = min(engines, key=lambda e: (tokens[e], e), default=NO_ENGINE)
    if light:
        expected = min(light, key=lambda e: (sequences[e], e))
    assert decode_engine(tokens, sequences, free, length, limit, 0, len(group)) == expected


def test_the_token_limit_is_105_percent_of_the_mean() -> None:
    assert token_limit(300.0, 700.0, 4) == pytest.approx(262.5)


@given(st.integers(0, 50), SECONDS, SECONDS, st.sampled_from([0.1, 1.0, 3.0]), st.sampled_from([0.1, 1.0, 3.0]))
def test_no_other_division_of_a_read_ends_earlier(
    blocks: int, prefill_s: float, decode_s: float, prefill_block_s: float, decode_block_s: float
) -> None:
    def end_s(count: int) -> float:
        ends = [prefill_s + count * prefill_block_s] if count else []
        return max(ends + ([decode_s + (blocks - count) * decode_block_s] if count < blocks else []), default=0.0)

    chosen = prefill_blocks(blocks, prefill_s, decode_s, prefill_block_s, decode_block_s)
    assert 0 <= chosen <= blocks
    assert end_s(chosen) <= min(map(end_s, range(blocks + 1))) + 1e-9


@given(st.integers(0, 5000), st.integers(0, 300), COSTS)
def test_attention_time_is_the_sum_over_tokens(cached: int, new: int, cost: AttentionCost) -> None:
    contexts = [cached + i + 0.5 for i in range(new)]
    expected = sum(
        cost.token_s
        + context * cost.context_s
        + (min(context, cost.attended_tokens) * cost.attended_s if cost.attended_s else 0.0)
        for context in contexts
    )
    assert attention_s(cached, new, cost) == pytest.approx(expected, rel=1e-9, abs=1e-15)


@given(st.integers(0, 5000), st.integers(0, 300), st.floats(0.0, 1e-2), COSTS)
def test_the_chunk_is_the_largest_within_the_quota(cached: int, new: int, quota_s: float, cost: AttentionCost) -> None:
    chunk = quota_tokens(cached, new, quota_s, cost)
    assert 0 <= chunk <= new
    assert chunk == 0 or attention_s(cached, chunk, cost) <= quota_s
    assert chunk == new or attention_s(cached, chunk + 1, cost) > quota_s


def test_each_step_of_the_ablation_changes_one_technique() -> None:
    steps = list(ABLATION.values())
    assert list(ABLATION) == ["basic", "layerwise", "dual-path", "scheduling", "split-reads", "oracle"]
    assert [step.layerwise for step in steps] == [False, True, True, True, True, True]
    assert [step.reads for step in steps] == ["prefill", "prefill", "alternating", "shorter", "split", "none"]
    assert [step.scheduling for step in steps] == [False, False, False, True, True, True]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("alpha_s", 0.0, r"^alpha_s: 0.0 s; give finite seconds above 0"),
        ("fetch_s", math.inf, r"^fetch_s: inf s; give finite seconds above 0"),
        ("quota_s", -1.0, r"^quota_s: -1.0 s; give finite seconds above 0, or null"),
        ("forward_tokens", 0, r"^forward_tokens: 0 tokens; give 1 or more"),
    ],
)
def test_settings_out_of_range_are_rejected(field: str, value: float, message: str) -> None:
    with pytest.raises(InputError, match=message):
        msgspec.structs.replace(DualPathSpec(), **{field: value})
