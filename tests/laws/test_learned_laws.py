"""Laws of self-measured bandwidth: correct values change nothing, a change is detected, one outlier has little effect,
values expire."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvroute.oracle import NetworkOracle, OracleSpec, effective_bytes_per_s
from kvroute.policies import decode_policy
from kvroute.types import Candidates, Choice, FloatArray, InputError, IntArray, Request, TierArray

TIER: TierArray = np.array([[0, 2, 3, 3], [2, 0, 3, 3], [3, 3, 0, 1], [3, 3, 1, 0]], dtype=np.int8)
BYTES_PER_S = np.array([450e9, 12.5e9, 6.25e9, 3.125e9, 1.25e9])
LATENCY_S = np.array([1e-6, 3e-6, 8e-6, 15e-6, 10e-3])
ALL: IntArray = np.arange(4)
PAIRS = st.tuples(st.integers(0, 3), st.integers(0, 3))
SIZES = st.floats(2e6, 1e10)
CONGESTION = st.floats(0, 0.9)
FACTORS = st.floats(0.02, 3.5)


def oracle(**settings: float) -> NetworkOracle:
    return NetworkOracle(TIER, BYTES_PER_S, LATENCY_S, OracleSpec(self_measured=True, **settings))  # type: ignore[arg-type]


def idle_bandwidth(network: NetworkOracle, source: int, at: float = 0.0) -> FloatArray:
    """Return the oracle's bandwidths of an idle network; the static ones where nothing was measured."""
    costs = network.costs(source, ALL, at)
    return costs.bytes_per_s.take(costs.tier) if costs.pair_bytes_per_s is None else costs.pair_bytes_per_s


def transfer(
    network: NetworkOracle, at: float, pair: tuple[int, int], kv_bytes: float, *, factor: float = 1.0, together: int = 1
) -> None:
    """Report `together` equal transfers of a pair as one sum, on a network with `factor` of the static bandwidth."""
    source, target = pair
    costs = network.costs(source, np.array([target]), at)
    tier = int(costs.tier[0])
    for _ in range(together):
        network.transfer_started(source, target)
    for _ in range(together):
        network.transfer_finished(source, target)
    bytes_per_s = BYTES_PER_S[tier] * factor * (1 - costs.congestion[tier]) / together
    seconds = LATENCY_S[tier] + kv_bytes / bytes_per_s
    network.transfer_measured(at, source, target, kv_bytes * together, float(seconds * together), together)


@given(st.lists(st.tuples(PAIRS, SIZES, st.integers(1, 12)), max_size=20), st.lists(CONGESTION, min_size=5, max_size=5))
def test_correct_measurements_do_not_change_the_static_map(
    transfers: list[tuple[tuple[int, int], float, int]], congestion: list[float]
) -> None:
    """For any telemetry and any number of concurrent transfers, predicted times change nothing."""
    network = oracle()
    network.congestion_measured(0.0, congestion)
    for at, (pair, kv_bytes, together) in enumerate(transfers):
        transfer(network, float(at), pair, kv_bytes, together=together)
    for source in range(4):
        assert idle_bandwidth(network, source) == pytest.approx(BYTES_PER_S[TIER[source]], rel=1e-9)


@given(PAIRS, FACTORS, st.integers(1, 4), CONGESTION)
def test_a_changed_capacity_is_learned(pair: tuple[int, int], factor: float, together: int, congested: float) -> None:
    """The value is within 1 % after 60 measurements of one pair, and at least half way after 10; only its tier changes
    with it."""
    network = oracle()
    network.congestion_measured(0.0, [congested] * 5)
    source, target = pair
    predicted = []
    for at in range(60):
        transfer(network, float(at), pair, 1e11, factor=factor, together=together)
        predicted.append(idle_bandwidth(network, source)[target] / BYTES_PER_S[TIER[pair]])
    assert predicted[-1] == pytest.approx(factor, rel=0.01)
    assert abs(math.log(predicted[9])) >= abs(math.log(factor)) / 2 - 1e-9
    others = TIER[source] != TIER[pair]
    assert (idle_bandwidth(network, source)[others] == BYTES_PER_S[TIER[source]][others]).all()
    unheard = idle_bandwidth(network, (source + 1) % 4)
    same = TIER[(source + 1) % 4] == TIER[pair]
    assert unheard[same] == pytest.approx(factor * BYTES_PER_S[TIER[pair]], rel=0.01)


def test_a_slow_pair_is_distinguished_from_its_tier() -> None:
    """One of two pairs of a tier has a quarter of the other's bandwidth: each value is learned; a third pair gets a
    value in between."""
    network = oracle()
    for at in range(100):
        transfer(network, float(at), (0, 2), 1e10, factor=0.25)
        transfer(network, float(at), (0, 3), 1e10, factor=1.0)
    static = BYTES_PER_S[3]
    assert idle_bandwidth(network, 0)[2:] == pytest.approx([0.25 * static, static], rel=0.2)
    assert 0.25 * static < idle_bandwidth(network, 1)[2] < static


@given(
    st.lists(st.tuples(PAIRS, FACTORS), max_size=12),
    PAIRS,
    st.floats(0, 1e15),
    st.floats(0, 1e9),
    st.integers(1, 10**6),
)
# many concurrent transfers raise the weight of the pair as well as its average
@example([((0, 0), 0.5)], (0, 0), 2_097_152.0, 1.0, 32)
def test_one_outlier_has_a_bounded_effect(
    before: list[tuple[tuple[int, int], float]], pair: tuple[int, int], kv_bytes: float, seconds: float, transfers: int
) -> None:
    """The change is at most a factor of four (two by the tier, two by the pair), and values stay within the bounds."""
    network = oracle()
    for at, (ends, factor) in enumerate(before):
        transfer(network, float(at), ends, 1e10, factor=factor)
    old = np.array([idle_bandwidth(network, source, 99.0) for source in range(4)])
    network.transfer_measured(99.0, *pair, kv_bytes, seconds, transfers)
    new = np.array([idle_bandwidth(network, source, 99.0) for source in range(4)])
    assert (np.abs(np.log(new / old)) <= math.log(4) + 1e-9).all()
    assert (new >= 0.01 * BYTES_PER_S[TIER] * (1 - 1e-12)).all()
    assert (new <= 4 * BYTES_PER_S[TIER] * (1 + 1e-12)).all()


@given(st.floats(1e5, 1e15), st.floats(1e-4, 1e9), st.integers(1, 100))
def test_the_next_correct_measurement_reduces_an_outliers_effect(
    kv_bytes: float, seconds: float, transfers: int
) -> None:
    """The next correct measurement moves the tier back, by at least a part of the outlier's effect."""
    network = oracle()
    network.transfer_measured(0.0, 0, 2, kv_bytes, seconds, transfers)
    static = BYTES_PER_S[3]
    astray = abs(math.log(idle_bandwidth(network, 1)[2] / static))
    transfer(network, 1.0, (0, 2), 1e10)
    back = abs(math.log(idle_bandwidth(network, 1)[2] / static))
    assert back <= astray * 0.81 + 1e-12


@given(PAIRS, FACTORS, st.floats(0, 100), st.floats(0, 100))
def test_learned_values_decay(pair: tuple[int, int], factor: float, first_s: float, second_s: float) -> None:
    """The value stays for 10 s and then approaches the static one, which it reaches at twice that age."""
    network = oracle(stale_after_s=10.0)
    transfer(network, 0.0, pair, 1e11, factor=factor)
    static = BYTES_PER_S[TIER[pair]]
    early, late = (abs(idle_bandwidth(network, pair[0], at)[pair[1]] - static) for at in sorted((first_s, second_s)))
    fresh = abs(idle_bandwidth(network, pair[0], 0.0)[pair[1]] - static)
    assert fresh >= early >= late - 1e-6
    assert (abs(idle_bandwidth(network, pair[0], 10.0)[pair[1]] - static)) == fresh
    assert idle_bandwidth(network, pair[0], 20.0)[pair[1]] == pytest.approx(static, rel=1e-12)


def test_one_measurement_by_hand() -> None:
    """One measurement of half the bandwidth changes the tier by 2^-0.2 and the pair by another 2^-(0.8 * 0.2) / 5; then
    both expire."""
    network = oracle(stale_after_s=10.0)
    transfer(network, 0.0, (0, 2), 1e10, factor=0.5)
    tier, pair = 0.5**0.2, 0.5 ** (0.8 * 0.2 / 5)
    slow = BYTES_PER_S[3]
    assert idle_bandwidth(network, 0) == pytest.approx([450e9, 6.25e9, slow * tier * pair, slow * tier], rel=1e-3)
    halfway = slow * (1 + (tier - 1) / 2) * (1 + (pair - 1) / 2)
    assert idle_bandwidth(network, 0, 15.0)[2] == pytest.approx(halfway, rel=1e-3)


def test_transfers_without_a_recorded_count_use_the_present_count() -> None:
    """Two transfers are in flight and one of them is measured: it shared with one other, so it was as fast as
    predicted."""
    network = oracle()
    for _ in range(2):
        network.transfer_started(0, 2)
    network.transfer_measured(1.0, 0, 2, 1e9, 1e9 * 2 / BYTES_PER_S[3] + LATENCY_S[3])
    assert idle_bandwidth(network, 0) == pytest.approx(BYTES_PER_S[TIER[0]])


@pytest.mark.parametrize(
    ("kv_bytes", "seconds"), [(60_000.0, 1.0), (1e9, 0.0), (1e9, 2 * 15e-6), (0.0, 0.0)], ids=["few", "0s", "rtt", "0"]
)
def test_measurements_without_bandwidth_are_ignored(kv_bytes: float, seconds: float) -> None:
    network = oracle()
    network.transfer_measured(0.0, 0, 2, kv_bytes, seconds)
    assert network.costs(0, ALL, 0.0).pair_bytes_per_s is None


def test_invalid_measurements_are_named_and_change_nothing() -> None:
    network = oracle()
    for wrong in ((-1.0, 1.0, 1), (math.nan, 1.0, 1), (1e9, math.inf, 1), (1e9, -1.0, 1), (1e9, 1.0, 0)):
        with pytest.raises(InputError, match=r"kv_bytes|seconds|transfers"):
            network.transfer_measured(0.0, 0, 2, *wrong)
    assert network.costs(0, ALL, 0.0).pair_bytes_per_s is None


def test_learning_is_off_by_default() -> None:
    network = NetworkOracle(TIER, BYTES_PER_S, LATENCY_S)
    network.transfer_measured(0.0, 0, 2, 1e9, 100.0)
    assert network.costs(0, ALL, 0.0).pair_bytes_per_s is None


def test_costs_without_own_transfers_have_the_same_tiers() -> None:
    """A policy with a table of transfers needs neither their number nor their measured rates."""
    network = oracle()
    network.transfer_started(0, 2)
    network.transfer_measured(0.0, 0, 2, 1e9, 1.0)
    whole, bare = network.costs(0, ALL, 0.0), network.costs(0, ALL, 0.0, own_transfers=False)
    assert whole.pair_bytes_per_s is not None
    assert whole.in_flight.sum() == 1
    assert bare.pair_bytes_per_s is None
    assert not bare.in_flight.any()
    for name in ("tier", "bytes_per_s", "latency_s", "congestion"):
        assert getattr(bare, name).tolist() == getattr(whole, name).tolist()


def candidates() -> Candidates:
    whole: IntArray = np.zeros(3, dtype=np.int64)
    return Candidates(
        names=("a", "b", "c"),
        batch=whole,
        queued=whole,
        batch_max=whole + 8,
        free_kv_bytes=np.full(3, 1e12),
        hit_tokens=whole,
        kv_bytes=np.full(3, 1e9),
        need_bytes=np.full(3, 1e9),
        iteration_base_s=np.full(3, 0.01),
        iteration_per_request_s=np.full(3, 1e-4),
    )


def effective(policy: str, network: NetworkOracle) -> FloatArray:
    costs = network.costs(0, np.array([1, 2, 3]), 1.0)
    choice = decode_policy(policy).choose(Request(id=0, input_tokens=1000), candidates(), costs, 0)
    assert isinstance(choice, Choice)
    return choice.terms.parts["effective_bytes_per_s"]


@pytest.mark.parametrize("policy", ["netkv", "netkv-static", "netkv-topo"])
def test_policies_use_the_measured_bandwidth(policy: str) -> None:
    """The pair's bandwidth replaces that of the tier, and other factors stay; unmeasured values are equal to the last
    bit."""
    plain, measuring = NetworkOracle(TIER, BYTES_PER_S, LATENCY_S), oracle()
    for network in (plain, measuring):
        network.congestion_measured(0.0, [0.1, 0.2, 0.3, 0.4, 0.5])
        network.transfer_started(0, 2)
    assert effective(policy, measuring).tolist() == effective(policy, plain).tolist()
    measuring.transfer_measured(0.5, 0, 2, 1e9, 5.0)
    pair = measuring.costs(0, np.array([1, 2, 3]), 1.0).pair_bytes_per_s
    assert pair is not None
    congestion, own = np.array([0.3, 0.4, 0.4]), np.array([0, 1, 1])
    expected = {
        "netkv": effective_bytes_per_s(pair, congestion, own),
        "netkv-static": pair / (1 + own),
        "netkv-topo": pair,
    }
    assert effective(policy, measuring) == pytest.approx(expected[policy])
    assert effective(policy, measuring)[1] < effective(policy, plain)[1]
