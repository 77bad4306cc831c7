"""The soft topology cost: laws of its weight, and the proposal's example by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvroute.policies import TopologyConstraint, constrain, decode_policy
from kvroute.types import Candidates, Choice, InputError, NetworkCosts, Reject, Request

REQUEST = Request(id=1, input_tokens=4096)
TOKEN_BYTES = 131_072.0
BYTES_PER_S = np.array([450e9, 50e9, 25e9, 12.5e9, 1e9])
LATENCY_S = np.array([1e-6, 3e-6, 8e-6, 15e-6, 2e-3])
WEIGHTS = st.sampled_from([0.0, 0.5, 50.0, 1e6])


def candidates(used_blocks: list[int], **changes: np.ndarray) -> Candidates:
    """Return candidates with this many KV blocks in use."""
    n = len(used_blocks)
    used_bytes = np.array(used_blocks) * TOKEN_BYTES * REQUEST.block_tokens
    pool = Candidates(
        names=tuple(f"decode{index}" for index in range(n)),
        batch=np.array(used_blocks, dtype=np.int64) // 256,
        queued=np.zeros(n, dtype=np.int64),
        batch_max=np.full(n, 64, dtype=np.int64),
        free_kv_bytes=200e9 - used_bytes,
        hit_tokens=np.zeros(n, dtype=np.int64),
        kv_bytes=np.full(n, TOKEN_BYTES * REQUEST.input_tokens),
        need_bytes=np.full(n, TOKEN_BYTES * REQUEST.input_tokens),
        iteration_base_s=np.full(n, 0.012),
        iteration_per_request_s=np.full(n, 0.0001),
        capacity_bytes=np.full(n, 200e9),
    )
    return replace(pool, **changes)


def network(tiers: list[int]) -> NetworkCosts:
    return NetworkCosts(
        tier=np.array(tiers, dtype=np.int8),
        bytes_per_s=BYTES_PER_S,
        latency_s=LATENCY_S,
        congestion=np.full(5, 0.5),
        in_flight=np.full(5, 3, dtype=np.int64),
    )


def choice_of(weight: float, pool: Candidates, costs: NetworkCosts) -> Choice:
    found = decode_policy("soft-topology", kv_transfer_weight=weight).choose(REQUEST, pool, costs, 0)
    assert isinstance(found, Choice)
    return found


SITUATIONS = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 4)), min_size=1, max_size=8)


@given(SITUATIONS, st.permutations(range(5)))
def test_weight_zero_ignores_distance(situation: list[tuple[int, int]], order: list[int]) -> None:
    """The choice has the least load, wherever the instances are."""
    used = [blocks for blocks, _ in situation]
    pool = candidates(used)
    near = choice_of(0.0, pool, network([tier for _, tier in situation]))
    far = choice_of(0.0, pool, network([order[tier] for _, tier in situation]))
    assert near.index == far.index == used.index(min(used))


@given(st.integers(0, 5000), st.lists(st.integers(0, 4), min_size=1, max_size=8), WEIGHTS)
def test_at_equal_load_the_nearest_instance_wins(used: int, tiers: list[int], weight: float) -> None:
    """With any weight above 0; the first of equals."""
    found = choice_of(weight, candidates([used] * len(tiers)), network(tiers))
    assert found.index == (tiers.index(min(tiers)) if weight else 0)


@given(SITUATIONS, WEIGHTS, WEIGHTS)
def test_a_larger_weight_never_chooses_a_farther_instance(
    situation: list[tuple[int, int]], one: float, other: float
) -> None:
    """At any loads."""
    pool, tiers = candidates([blocks for blocks, _ in situation]), [tier for _, tier in situation]
    low, high = (choice_of(weight, pool, network(tiers)).index for weight in sorted((one, other)))
    assert tiers[high] <= tiers[low]


@given(SITUATIONS, WEIGHTS)
def test_the_boundary_is_hard(situation: list[tuple[int, int]], weight: float) -> None:
    """With a constraint no weight leads outside, and the policy chooses among those inside."""
    pool, tiers = candidates([blocks for blocks, _ in situation]), [tier for _, tier in situation]
    policy = decode_policy("soft-topology", kv_transfer_weight=weight)
    found = constrain(policy, TopologyConstraint.parse("pod:fail"), REQUEST, pool, network(tiers), 0)
    if min(tiers) > 2:
        assert isinstance(found, Reject)
        return
    assert isinstance(found, Choice)
    assert tiers[found.index] <= 2
    cost = choice_of(weight, pool, network(tiers)).terms.cost
    assert cost[found.index] == min(cost[index] for index, tier in enumerate(tiers) if tier <= 2)


def test_the_proposals_formula() -> None:
    """decode_blocks + w * (latency + kv_bytes / bandwidth), without congestion, rivals and cached prefixes."""
    pool = candidates([1000, 990], hit_tokens=np.array([0, 2048]), kv_bytes=np.array([1.0, 0.5]) * TOKEN_BYTES * 4096)
    found = choice_of(50.0, pool, network([1, 4]))
    kv_bytes = TOKEN_BYTES * 4096
    expected = [1000 + 50 * (3e-6 + kv_bytes / 50e9), 990 + 50 * (2e-3 + kv_bytes / 1e9)]
    assert found.terms.cost == pytest.approx(expected)
    assert found.terms.unit == "blocks"
    assert found.index == 0


def test_load_without_known_memory() -> None:
    """Counts requests, each with the blocks of this one."""
    pool = replace(candidates([0, 0]), capacity_bytes=None, batch=np.array([2, 0]), queued=np.array([1, 0]))
    found = choice_of(50.0, pool, network([1, 3]))
    assert found.terms.parts["decode_blocks"].tolist() == [3 * 256, 0]
    assert found.index == 1


@pytest.mark.parametrize("weight", [-1.0, float("inf"), float("nan")])
def test_weights_out_of_bounds(weight: float) -> None:
    """Are refused."""
    with pytest.raises(InputError, match="kv_transfer_weight"):
        decode_policy("soft-topology", kv_transfer_weight=weight)
