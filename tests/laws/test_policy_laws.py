"""Laws of every policy: always a result, feasibility, invariance under names and scales, and the effect of a
constraint."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import fields, replace

from kvroute.policies import DECODE_POLICIES, TopologyConstraint, constrain, decode_policy
from kvroute.types import Candidates, Choice, NetworkCosts, Reject, Request

names = st.sampled_from(sorted(DECODE_POLICIES))
levels = st.sampled_from(["node", "rack", "pod", "datacenter"])
constraints = st.builds(
    TopologyConstraint,
    levels,
    st.sampled_from(["required", "preferred"]),
    st.none() | st.floats(0.01, 1),
)
turns = st.integers(0, 1000)


@st.composite
def situations(draw: st.DrawFn) -> tuple[Request, Candidates, NetworkCosts]:
    """Draw a request, 1 to 12 candidates (some full) and the network; values have few levels, so that ties are
    common."""
    n = draw(st.integers(1, 12))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    coarse = draw(st.booleans())
    tokens = draw(st.integers(1, 100_000))
    batch_max = random.choice([1, 8, 64], n)
    hit_tokens = np.minimum(random.integers(0, 3 if coarse else tokens + 1, n) * (tokens // 2 if coarse else 1), tokens)
    kv_bytes = 327_680.0 * (tokens - hit_tokens)
    pool = Candidates(
        names=tuple(f"decode{index:02}" for index in range(n)),
        batch=random.integers(0, batch_max + 1),
        queued=random.integers(0, 2 if coarse else 100, n),
        batch_max=batch_max,
        free_kv_bytes=random.choice([0.0, 1e9, 200e9], n) if coarse else random.uniform(0, 200e9, n),
        hit_tokens=hit_tokens,
        kv_bytes=kv_bytes,
        need_bytes=np.full(n, 327_680.0 * tokens),
        iteration_base_s=random.choice([0.0, 0.0125, 0.02], n),
        iteration_per_request_s=random.choice([0.0, 0.0001], n),
        capacity_bytes=np.full(n, 200e9),
        group=random.integers(0, 3, n) if coarse else np.zeros(n, dtype=np.int64),
        prompts_s=np.zeros(n),
    )
    costs = NetworkCosts(
        tier=random.integers(0, 5, n).astype(np.int8),
        bytes_per_s=np.sort(random.uniform(1e8, 5e11, 5))[::-1],
        latency_s=random.uniform(0, 1e-2, 5),
        congestion=random.choice([0.0, 0.2, 0.99], 5),
        in_flight=random.integers(0, 17, 5),
    )
    return Request(id=1, input_tokens=tokens), pool, costs


def permuted(pool: Candidates, costs: NetworkCosts, order: list[int]) -> tuple[Candidates, NetworkCosts]:
    """Return the same instances in another order, and therefore under other names."""
    moved = {item.name: getattr(pool, item.name)[order] for item in fields(pool) if item.name != "names"}
    return Candidates(names=pool.names, **moved), replace(costs, tier=costs.tier[order])


@given(situations(), names, turns)
def test_a_policy_chooses_the_first_cheapest_feasible_candidate(
    situation: tuple[Request, Candidates, NetworkCosts], name: str, turn: int
) -> None:
    """A policy rejects exactly if no candidate has room; costs and parts are finite, costs >= 0, and the choice has the
    lowest cost."""
    request, pool, costs = situation
    has_room = [need <= free for need, free in zip(pool.need_bytes, pool.free_kv_bytes, strict=True)]
    choice = decode_policy(name).choose(request, pool, costs, turn)
    assert isinstance(choice, Reject) != any(has_room)
    if isinstance(choice, Choice):
        terms = choice.terms
        assert terms.feasible.tolist() == has_room
        assert all(np.isfinite(part).all() for part in (terms.cost, *terms.parts.values()))
        assert (terms.cost >= 0).all()
        assert (
            choice.index == min((cost, index) for index, cost in enumerate(terms.cost.tolist()) if has_room[index])[1]
        )
        msgspec.json.encode({part: values.tolist() for part, values in terms.parts.items()})


@given(situations(), turns)
def test_netkv_is_algorithm_1(situation: tuple[Request, Candidates, NetworkCosts], turn: int) -> None:
    """The arrays give the same values as NetKV's loop, candidate by candidate."""
    request, pool, costs = situation
    best, winner = float("inf"), None
    for d in range(len(pool.names)):
        if pool.free_kv_bytes[d] < pool.need_bytes[d]:
            continue
        base_s, per_request_s = float(pool.iteration_base_s[d]), float(pool.iteration_per_request_s[d])
        tau, beta = int(costs.tier[d]), int(pool.batch[d])
        b_eff = float(costs.bytes_per_s[tau]) * (1.0 - float(costs.congestion[tau])) / (1 + int(costs.in_flight[tau]))
        t_xfer = float(pool.kv_bytes[d]) / b_eff + float(costs.latency_s[tau])
        t_queue = max(0, int(pool.queued[d]) - (int(pool.batch_max[d]) - beta)) * (base_s + per_request_s * beta)
        t_decode = base_s + per_request_s * (beta + 1)
        if t_xfer + t_queue + t_decode < best * (1 - 1e-12):
            best, winner = t_xfer + t_queue + t_decode, d
    choice = decode_policy("netkv").choose(request, pool, costs, turn)
    if winner is None:
        assert isinstance(choice, Reject)
    else:
        assert isinstance(choice, Choice)
        assert choice.terms.cost[choice.index] == pytest.approx(best, rel=1e-9)
        assert choice.index == winner or choice.terms.cost[winner] == pytest.approx(best, rel=1e-9)


@given(situations(), names, turns, st.sampled_from([2.0**-20, 0.5, 4.0, 2.0**20]))
def test_the_choice_is_invariant_under_scaling_of_bytes(
    situation: tuple[Request, Candidates, NetworkCosts], name: str, turn: int, scale: float
) -> None:
    """If all bytes and bandwidths are multiplied by the same power of two (which is exact), choice and cost stay the
    same."""
    request, pool, costs = situation
    scaled_pool = replace(
        pool,
        free_kv_bytes=pool.free_kv_bytes * scale,
        kv_bytes=pool.kv_bytes * scale,
        need_bytes=pool.need_bytes * scale,
        capacity_bytes=np.full(len(pool.names), 200e9 * scale),
    )
    scaled_costs = replace(costs, bytes_per_s=costs.bytes_per_s * scale)
    first = decode_policy(name).choose(request, pool, costs, turn)
    second = decode_policy(name).choose(request, scaled_pool, scaled_costs, turn)
    if isinstance(first, Choice):
        assert isinstance(second, Choice)
        assert (first.index, first.terms.cost.tolist()) == (second.index, second.terms.cost.tolist())
    else:
        assert isinstance(second, Reject)


@given(situations(), names, turns, st.randoms(use_true_random=False))
def test_names_only_break_ties(
    situation: tuple[Request, Candidates, NetworkCosts], name: str, turn: int, random: object
) -> None:
    """Under other names the cost is the same, and without a tie the same instance is chosen. The cost of `dualpath` is
    a rank, in which ties are broken by name already."""
    assume(name not in ("round-robin", "dualpath"))
    request, pool, costs = situation
    order = list(range(len(pool.names)))
    random.shuffle(order)  # type: ignore[attr-defined]
    first = decode_policy(name).choose(request, pool, costs, turn)
    second = decode_policy(name).choose(request, *permuted(pool, costs, order), turn)
    if isinstance(first, Reject):
        assert isinstance(second, Reject)
        return
    assert isinstance(second, Choice)
    paid = first.terms.cost[first.index]
    assert second.terms.cost[second.index] == paid
    if np.count_nonzero((first.terms.cost == paid) & first.terms.feasible) == 1:
        assert order[second.index] == first.index


@given(situations())
def test_round_robin_is_even(situation: tuple[Request, Candidates, NetworkCosts]) -> None:
    """Over as many turns as there are feasible candidates, each one is chosen once."""
    request, pool, costs = situation
    feasible = np.flatnonzero(pool.need_bytes <= pool.free_kv_bytes).tolist()
    results = [decode_policy("round-robin").choose(request, pool, costs, turn) for turn in range(5, 5 + len(feasible))]
    assert sorted(result.index for result in results if isinstance(result, Choice)) == feasible


@given(situations(), names, turns)
def test_a_choice_does_not_modify_the_snapshot(
    situation: tuple[Request, Candidates, NetworkCosts], name: str, turn: int
) -> None:
    """Policies get live arrays: they do not write to them, and their terms do not change when the load changes."""
    request, pool, costs = situation
    arrays = [getattr(pool, item.name) for item in fields(pool) if item.name != "names"]
    before = [array.copy() for array in arrays]
    choice = decode_policy(name).choose(request, pool, costs, turn)
    assert all((array == copy).all() for array, copy in zip(arrays, before, strict=True))
    if isinstance(choice, Choice):
        kept = [choice.terms.cost, choice.terms.feasible, *choice.terms.parts.values()]
        assert not any(np.shares_memory(array, live) for array in kept for live in arrays)


@given(situations(), names, turns, constraints)
def test_a_constraint_holds(
    situation: tuple[Request, Candidates, NetworkCosts], name: str, turn: int, constraint: TopologyConstraint
) -> None:
    """Required: inside the domain or rejected. Preferred rejects no more than the policy itself, and without a weight
    it leaves the domain only if no instance inside has room. Inside the domain, the choice is the policy's own
    cheapest."""
    request, pool, costs = situation
    policy = decode_policy(name)
    inside = costs.tier <= constraint.tier_max
    room = pool.need_bytes <= pool.free_kv_bytes
    free = policy.choose(request, pool, costs, turn)
    choice = constrain(policy, constraint, request, pool, costs, turn)
    if constraint.enforcement == "required":
        assert isinstance(choice, Choice) == bool((inside & room).any())
    else:
        assert isinstance(choice, Choice) == isinstance(free, Choice)
    if isinstance(choice, Reject):
        assert len(choice.reason) > 20
        assert "inf" not in choice.reason
        return
    assert room[choice.index]
    assert all(np.isfinite(part).all() for part in (choice.terms.cost, *choice.terms.parts.values()))
    strict = constraint.enforcement == "required" or constraint.weight is None
    if strict and (inside & room).any():
        assert inside[choice.index]
        eligible = choice.terms.cost[inside & room]
        assert choice.terms.cost[choice.index] == eligible.min()
    elif strict:
        assert isinstance(free, Choice)
        assert choice.index == free.index


@given(situations(), names, turns, levels, st.floats(0.01, 1), st.floats(0.01, 1))
def test_a_larger_weight_never_leaves_the_domain(
    situation: tuple[Request, Candidates, NetworkCosts], name: str, turn: int, level: str, one: float, other: float
) -> None:
    """If a weight keeps a request inside, a larger weight does too; no weight moves a request out that was inside
    without it."""
    request, pool, costs = situation
    policy = decode_policy(name)
    free = policy.choose(request, pool, costs, turn)
    assume(isinstance(free, Choice))
    assert isinstance(free, Choice)
    light, heavy = (
        constrain(policy, TopologyConstraint(level, "preferred", weight), request, pool, costs, turn)  # type: ignore[arg-type]
        for weight in sorted((one, other))
    )
    assert isinstance(light, Choice)
    assert isinstance(heavy, Choice)
    inside = costs.tier <= TopologyConstraint(level).tier_max  # type: ignore[arg-type]
    assert inside[free.index] <= inside[light.index] <= inside[heavy.index]


@given(situations(), names, turns, constraints)
def test_a_constraint_that_all_candidates_meet_changes_nothing(
    situation: tuple[Request, Candidates, NetworkCosts], name: str, turn: int, constraint: TopologyConstraint
) -> None:
    request, pool, costs = situation
    near = replace(costs, tier=np.zeros_like(costs.tier))
    free = decode_policy(name).choose(request, pool, near, turn)
    choice = constrain(decode_policy(name), constraint, request, pool, near, turn)
    if isinstance(free, Choice):
        assert isinstance(choice, Choice)
        # A discount may round two costs one bit apart to the same number.
        assert free.terms.cost[choice.index] == pytest.approx(free.terms.cost[free.index], rel=1e-14)
    else:
        assert isinstance(choice, Reject)


@given(situations(), turns)
def test_more_congestion_never_attracts_netkv_to_a_tier(
    situation: tuple[Request, Candidates, NetworkCosts], turn: int
) -> None:
    """A choice outside a tier stays the same when that tier becomes congested."""
    request, pool, costs = situation
    before = decode_policy("netkv").choose(request, pool, costs, turn)
    assume(isinstance(before, Choice))
    assert isinstance(before, Choice)
    own = int(costs.tier[before.index])
    for tier in set(range(5)) - {own}:
        congestion = costs.congestion.copy()
        congestion[tier] = 0.99
        after = decode_policy("netkv").choose(request, pool, replace(costs, congestion=congestion), turn)
        assert isinstance(after, Choice)
        assert after.index == before.index
