"""Policies by worked examples: their preferences, their rejects, and the effect of a topology constraint."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvroute.oracle import NetworkOracle
from kvroute.policies import (
    DECODE_POLICIES,
    PREFILL_POLICIES,
    PrefillCandidates,
    TopologyConstraint,
    constrain,
    decode_policy,
    prefill_mask,
    prefill_policy,
)
from kvroute.policies.storage.dualpath_kernels import NO_ENGINE, decode_engine, least, token_limit
from kvroute.types import Candidates, Choice, InputError, NetworkCosts, Reject, Request, TierArray

REQUEST = Request(id=7, input_tokens=32_768)
BYTES_PER_S = np.array([450e9, 12.5e9, 6.25e9, 3.125e9, 1e9])


def candidates(n: int) -> Candidates:
    """Return idle candidates with room and empty caches; t_iter(b) = 12 ms + 0.1 ms * b."""
    return Candidates(
        names=tuple(f"decode{index}" for index in range(n)),
        batch=np.zeros(n, dtype=np.int64),
        queued=np.zeros(n, dtype=np.int64),
        batch_max=np.full(n, 64, dtype=np.int64),
        free_kv_bytes=np.full(n, 100e9),
        hit_tokens=np.zeros(n, dtype=np.int64),
        kv_bytes=np.full(n, 10e9),
        need_bytes=np.full(n, 11e9),
        iteration_base_s=np.full(n, 0.012),
        iteration_per_request_s=np.full(n, 0.0001),
    )


def network(*tiers: int, congestion: float = 0.0) -> NetworkCosts:
    return NetworkCosts(
        tier=np.array(tiers, dtype=np.int8),
        bytes_per_s=BYTES_PER_S,
        latency_s=np.zeros(5),
        congestion=np.full(5, congestion),
        in_flight=np.zeros(5, dtype=np.int64),
    )


def chosen(result: Choice | Reject) -> int:
    assert isinstance(result, Choice)
    return result.index


def rejection_reason(result: Choice | Reject) -> str:
    assert isinstance(result, Reject)
    assert result.request_id == REQUEST.id
    return result.reason


def worked_example() -> tuple[Candidates, NetworkCosts]:
    """NetKV III-D: same pod, half cached, one transfer in flight; other pod, nine tenths cached, idle tier."""
    pool = replace(candidates(2), hit_tokens=np.array([16_384, 29_491]), kv_bytes=np.array([5e9, 1e9]))
    costs = replace(network(2, 3, congestion=0.2), in_flight=np.array([0, 0, 1, 0, 0]))
    return pool, costs


def test_worked_example_through_the_policy() -> None:
    """2.0 s against 0.4 s; at c3 = 0.5 it is 0.64 s, and a queue of more than 1.36 s reverses the choice."""
    pool, costs = worked_example()
    netkv = decode_policy("netkv")
    choice = netkv.choose(REQUEST, pool, costs, 0)
    assert isinstance(choice, Choice)
    assert choice.index == 1
    assert choice.terms.parts["transfer_s"] == pytest.approx([2.0, 0.4])
    assert choice.terms.parts["effective_bytes_per_s"] == pytest.approx([2.5e9, 2.5e9])
    assert choice.terms.cost == pytest.approx([2.0121, 0.4121])
    busy = replace(costs, congestion=np.array([0, 0, 0.2, 0.5, 0]))
    choice = netkv.choose(REQUEST, pool, busy, 0)
    assert isinstance(choice, Choice)
    assert choice.terms.parts["transfer_s"] == pytest.approx([2.0, 0.64])
    # A full batch: every earlier request costs one iteration of 12 + 6.4 ms.
    for queued, winner in ((70, 1), (75, 0)):
        loaded = replace(pool, batch=np.array([0, 64]), queued=np.array([0, queued]))
        assert chosen(netkv.choose(REQUEST, loaded, busy, 0)) == winner


def test_the_policy_uses_the_oracles_costs() -> None:
    """The worked example is computed with the oracle's own counters and telemetry."""
    tier: TierArray = np.array([[0, 2, 3], [2, 0, 3], [3, 3, 0]], dtype=np.int8)
    oracle = NetworkOracle(tier, BYTES_PER_S, np.zeros(5))
    oracle.transfer_started(0, 1)
    oracle.congestion_measured(0.0, [0.2] * 5)
    pool, _ = worked_example()
    choice = decode_policy("netkv").choose(REQUEST, pool, oracle.costs(0, np.array([1, 2]), 0.5), 0)
    assert isinstance(choice, Choice)
    assert choice.terms.parts["transfer_s"] == pytest.approx([2.0, 0.4])


def test_each_netkv_variant_uses_one_more_signal() -> None:
    """The signals are topology alone, then own transfers, then congestion (NetKV VI-H)."""
    pool, costs = worked_example()
    transfer_s = {}
    for name in ("netkv-topo", "netkv-static", "netkv"):
        choice = decode_policy(name).choose(REQUEST, pool, costs, 0)
        assert isinstance(choice, Choice)
        transfer_s[name] = choice.terms.parts["transfer_s"][0]
    assert transfer_s == pytest.approx({"netkv-topo": 0.8, "netkv-static": 1.6, "netkv": 2.0})


def test_netkv_queued_counts_requests_that_will_be_in_the_batch() -> None:
    """Equation 7 with t(batch + queued + 1): ten transfers in flight to the first of two equal instances make
    its first step longer by 10 x 0.1 ms. `netkv` sees no difference and takes the first of equals."""
    pool, costs = candidates(2), network(2, 2)
    queued = replace(pool, queued=np.array([10, 0]), iteration_per_request_s=np.full(2, 1e-4))
    assert chosen(decode_policy("netkv").choose(REQUEST, queued, costs, 0)) == 0
    choice = decode_policy("netkv-queued").choose(REQUEST, queued, costs, 0)
    assert isinstance(choice, Choice)
    assert choice.index == 1
    decode_s = choice.terms.parts["decode_s"]
    assert decode_s[0] - decode_s[1] == pytest.approx(10 * 1e-4)
    assert choice.terms.parts["queue_s"].tolist() == [0.0, 0.0]


def test_round_robin_alternates_among_candidates_with_room() -> None:
    policy = decode_policy("round-robin")
    pool, costs = candidates(4), network(2, 2, 2, 2)
    assert [chosen(policy.choose(REQUEST, pool, costs, turn)) for turn in range(5)] == [0, 1, 2, 3, 0]
    full = replace(pool, free_kv_bytes=np.array([100e9, 0.0, 100e9, 100e9]))
    assert [chosen(policy.choose(REQUEST, full, costs, turn)) for turn in range(4)] == [0, 2, 3, 0]


def test_load_aware_counts_only_requests_that_wait() -> None:
    """Three queued requests with room in the batch cost nothing, one queued at a full batch costs an iteration (eq.
    6)."""
    pool = replace(candidates(2), batch=np.array([10, 64]), queued=np.array([3, 1]))
    choice = decode_policy("load-aware").choose(REQUEST, pool, network(3, 0), 0)
    assert isinstance(choice, Choice)
    assert choice.terms.parts["queue_s"] == pytest.approx([0.0, 0.0184])
    assert choice.terms.parts["decode_s"] == pytest.approx([0.0131, 0.0185])
    assert choice.index == 0


def test_cache_aware_uses_load_only_to_break_ties() -> None:
    policy = decode_policy("cache-aware")
    pool = replace(
        candidates(3), hit_tokens=np.array([0, 16, 16]), batch=np.array([0, 64, 3]), queued=np.array([0, 90, 0])
    )
    assert chosen(policy.choose(REQUEST, pool, network(2, 2, 2), 0)) == 2
    assert chosen(policy.choose(REQUEST, replace(pool, hit_tokens=np.array([0, 17, 16])), network(2, 2, 2), 0)) == 1


def test_cla_weighs_cache_against_load() -> None:
    """A quarter of the prompt cached equals a quarter of the batch taken at equal weights; the name breaks the tie."""
    pool = replace(candidates(2), hit_tokens=np.array([0, 8_192]), batch=np.array([0, 12]), queued=np.array([0, 4]))
    costs = network(2, 2)
    choice = decode_policy("cla").choose(REQUEST, pool, costs, 0)
    assert isinstance(choice, Choice)
    assert choice.terms.cost.tolist() == [1.0, 1.0]
    assert choice.index == 0
    assert chosen(decode_policy("cla", cache_weight=1.5, load_weight=0.7).choose(REQUEST, pool, costs, 0)) == 1
    assert chosen(decode_policy("cla", load_weight=2.0).choose(REQUEST, pool, costs, 0)) == 0


@pytest.mark.parametrize("name", DECODE_POLICIES)
def test_a_rejection_names_what_is_missing(name: str) -> None:
    policy = decode_policy(name)
    full = replace(candidates(3), free_kv_bytes=np.array([1e9, 3.5e9, 2e9]))
    reason = rejection_reason(policy.choose(REQUEST, full, network(2, 2, 2), 0))
    assert "decode1" in reason
    assert "11 GB" in reason
    assert "3.5 GB" in reason
    assert "there is no decode instance" in rejection_reason(policy.choose(REQUEST, candidates(0), network(), 0))


@pytest.mark.parametrize("name", DECODE_POLICIES)
def test_an_exact_fit_has_enough_room(name: str) -> None:
    exact = replace(candidates(2), free_kv_bytes=np.array([11e9 - 1, 11e9]))
    assert chosen(decode_policy(name).choose(REQUEST, exact, network(0, 3), 0)) == 1


def test_unknown_names_and_parameters_are_rejected_with_a_hint() -> None:
    with pytest.raises(InputError, match="did you mean 'netkv'"):
        decode_policy("net-kv")
    with pytest.raises(InputError, match="known: round-robin, load-aware"):
        decode_policy("?")
    with pytest.raises(InputError, match=r"load_weigth: .*; did you mean 'load_weight'"):
        decode_policy("cla", load_weigth=1.0)
    with pytest.raises(InputError, match="it takes cache_weight, load_weight"):
        decode_policy("cla", alpha=1.0)
    with pytest.raises(InputError, match="it takes none"):
        decode_policy("netkv", alpha=1.0)
    with pytest.raises(InputError, match="give a number"):
        decode_policy("cla", cache_weight="1")  # type: ignore[arg-type]
    for wrong in (-1.0, math.nan, math.inf):
        with pytest.raises(InputError, match="load_weight"):
            decode_policy("cla", load_weight=wrong)
    with pytest.raises(InputError, match="both weights are zero"):
        decode_policy("cla", cache_weight=0.0, load_weight=0.0)
    with pytest.raises(InputError, match="did you mean 'least-loaded'"):
        prefill_policy("least-load")


def test_prefill_policies_by_hand() -> None:
    """Shortest queue; earliest finish, where a cached prefix outweighs a queue; round-robin; constraint."""
    pool = PrefillCandidates(
        names=("prefill0", "prefill1", "prefill2"),
        pending_s=np.array([1.0, 0.5, 0.9]),
        hit_tokens=np.array([0, 0, 16_000]),
        prefill_s=np.array([3.0, 3.0, 1.5]),
    )
    assert chosen(prefill_policy("least-loaded").choose(REQUEST, pool, 0)) == 1
    assert chosen(prefill_policy("cache-aware").choose(REQUEST, pool, 0)) == 2
    behind = replace(pool, pending_s=np.array([1.0, 0.5, 2.5]))
    assert chosen(prefill_policy("cache-aware").choose(REQUEST, behind, 0)) == 1
    assert [chosen(prefill_policy("round-robin").choose(REQUEST, pool, turn)) for turn in range(4)] == [0, 1, 2, 0]
    ruled_out = replace(pool, allowed=np.array([True, False, False]))
    none_allowed = replace(pool, allowed=np.zeros(3, dtype=np.bool_))
    empty = PrefillCandidates((), np.zeros(0), np.zeros(0, dtype=np.int64), np.zeros(0))
    for name in PREFILL_POLICIES:
        assert chosen(prefill_policy(name).choose(REQUEST, ruled_out, 1)) == 0
        assert "topology constraint" in rejection_reason(prefill_policy(name).choose(REQUEST, none_allowed, 1))
        assert "no prefill instance exists" in rejection_reason(prefill_policy(name).choose(REQUEST, empty, 1))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pod", TopologyConstraint("pod", "required")),
        ("pod:fail", TopologyConstraint("pod", "required")),
        ("node:required", TopologyConstraint("node", "required")),
        ("rack:fallback", TopologyConstraint("rack", "preferred", None)),
        ("rack:preferred", TopologyConstraint("rack", "preferred", 1.0)),
        ("datacenter:preferred:0.5", TopologyConstraint("datacenter", "preferred", 0.5)),
        (" rack : preferred : 0.5 ", TopologyConstraint("rack", "preferred", 0.5)),
    ],
)
def test_constraints_are_read_from_text(text: str, expected: TopologyConstraint) -> None:
    assert TopologyConstraint.parse(text) == expected
    assert TopologyConstraint.parse(str(expected)) == expected


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("", "known: node, rack, pod, datacenter"),
        ("pods:fail", "did you mean 'pod'"),
        ("pod:requird", "did you mean 'required'"),
        ("pod:", "unknown enforcement ''"),
        ("pod:required:0.5", "write pod:preferred:0.5"),
        ("pod:preferred:heavy", "is not a number"),
        ("pod:preferred:0", r"outside \(0, 1\]"),
        ("pod:preferred:nan", r"outside \(0, 1\]"),
        ("pod:preferred:0.5:1", "too many parts"),
    ],
)
def test_invalid_constraints_are_rejected_with_a_hint(text: str, hint: str) -> None:
    with pytest.raises(InputError, match=hint):
        TopologyConstraint.parse(text)


def test_required_never_leaves_the_domain() -> None:
    policy, constraint = decode_policy("load-aware"), TopologyConstraint.parse("pod:required")
    pool = replace(candidates(3), batch=np.array([0, 50, 60]))
    choice = constrain(policy, constraint, REQUEST, pool, network(3, 2, 1), 0)
    assert isinstance(choice, Choice)
    assert choice.index == 1
    assert choice.terms.feasible.tolist() == [False, True, True]
    assert choice.terms.parts["same_domain"].tolist() == [0.0, 1.0, 1.0]
    none = constrain(policy, constraint, REQUEST, pool, network(3, 3, 4), 0)
    assert "no decode instance in the prefill instance's pod" in rejection_reason(none)
    full = replace(pool, free_kv_bytes=np.array([100e9, 2e9, 1e9]))
    reason = rejection_reason(constrain(policy, constraint, REQUEST, full, network(3, 2, 1), 0))
    assert "decode1 comes closest" in reason
    assert "in the prefill instance's pod" in reason


def test_fallback_leaves_the_domain_only_when_it_is_full() -> None:
    policy, constraint = decode_policy("load-aware"), TopologyConstraint.parse("rack:fallback")
    pool = replace(candidates(2), batch=np.array([0, 64]), queued=np.array([0, 500]))
    assert chosen(constrain(policy, constraint, REQUEST, pool, network(2, 1), 0)) == 1
    full = replace(pool, free_kv_bytes=np.array([100e9, 1e9]))
    assert chosen(constrain(policy, constraint, REQUEST, full, network(2, 1), 0)) == 0
    assert chosen(constrain(policy, constraint, REQUEST, pool, network(2, 3), 0)) == 0


def test_a_weight_discounts_the_domain_and_decides_ties() -> None:
    """exp(-tanh(0.5)) = 0.63: a load of 1.5 times the other's is still preferred, twice is not; zero costs tie."""
    policy, constraint = decode_policy("cla", cache_weight=0.0), TopologyConstraint.parse("rack:preferred:0.5")
    for batch, winner in ((15, 1), (20, 0)):
        pool = replace(candidates(2), batch=np.array([10, batch]))
        choice = constrain(policy, constraint, REQUEST, pool, network(3, 1), 0)
        assert isinstance(choice, Choice)
        assert choice.index == winner
        assert choice.terms.cost[1] == pytest.approx(batch / 64 * math.exp(-math.tanh(0.5)))
        assert choice.terms.parts["policy_cost"].tolist() == [10 / 64, batch / 64]
    assert chosen(constrain(policy, constraint, REQUEST, candidates(3), network(3, 1, 1), 0)) == 1


def test_prefill_is_masked_to_domains_that_can_decode() -> None:
    """Prefill 0 shares its pod with decode 2; prefill 1 shares only the datacenter with a decode instance."""
    tier: TierArray = np.array([[0, 3, 2], [3, 0, 3], [2, 3, 0]], dtype=np.int8)
    prefill, decode = np.array([0, 1]), np.array([2])
    masks = {
        level: prefill_mask(TopologyConstraint.parse(level), tier, prefill, decode).tolist()
        for level in ("node", "rack", "pod", "datacenter")
    }
    assert masks == {"node": [False] * 2, "rack": [False] * 2, "pod": [True, False], "datacenter": [True] * 2}
    assert prefill_mask(TopologyConstraint.parse("pod"), tier, prefill, decode[:0]).tolist() == [False, False]


engine_loads = st.tuples(st.integers(0, 10), st.integers(0, 20), st.integers(0, 20))


@given(st.lists(engine_loads, min_size=1, max_size=12), st.integers(1, 10))
def test_dualpath_chooses_the_engine_of_its_phase_2(loads: list[tuple[int, int, int]], need: int) -> None:
    """The compiled function of the storage simulation, with one request in the queue and all instances as a group."""
    used, batch, queued = (np.array(column) for column in zip(*loads, strict=True))
    count, free = len(loads), 10.0 - used
    pool = replace(
        candidates(count),
        batch=batch,
        queued=queued,
        free_kv_bytes=free,
        need_bytes=np.full(count, float(need)),
        capacity_bytes=np.full(count, 10.0),
    )
    limit = token_limit(float(need) if (free >= need).any() else 0.0, float(used.sum()), count)
    expected = decode_engine(used.astype(np.float64), batch + queued, free, float(need), limit, 0, count)
    choice = decode_policy("dualpath").choose(REQUEST, pool, network(*[0] * count), 0)
    assert (choice.index if isinstance(choice, Choice) else NO_ENGINE) == expected


@given(st.data(), st.integers(1, 4), st.integers(1, 4), st.integers(1, 10))
def test_dualpath_chooses_the_group_of_its_phase_1(data: st.DataObject, groups: int, size: int, need: int) -> None:
    """The compiled functions of the storage simulation, with equal groups of which only those with room count."""
    count = groups * size
    loads = data.draw(st.lists(engine_loads, min_size=count, max_size=count))
    used, batch, queued = (np.array(column) for column in zip(*loads, strict=True))
    free = 10.0 - used
    pool = replace(
        candidates(count),
        batch=batch,
        queued=queued,
        free_kv_bytes=free,
        need_bytes=np.full(count, float(need)),
        capacity_bytes=np.full(count, 10.0),
        group=np.repeat(np.arange(groups), size),
    )
    has_room = (free >= need).reshape(groups, size).any(axis=1)
    group = least(np.where(has_room, used.reshape(groups, size).sum(axis=1), np.inf).astype(np.float64))
    first, last = group * size, group * size + size
    limit = token_limit(float(need), float(used[first:last].sum()), size)
    expected = decode_engine(used.astype(np.float64), batch + queued, free, float(need), limit, first, last)
    choice = decode_policy("dualpath").choose(REQUEST, pool, network(*[0] * count), 0)
    assert (choice.index if isinstance(choice, Choice) else NO_ENGINE) == expected
