"""The network cost oracle: NetKV's formulas and examples, counters, telemetry that ages, and the view by link."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.oracle import (
    LinkView,
    NetworkOracle,
    OracleSpec,
    effective_bytes_per_s,
    network_wins,
    staleness_bound,
)
from kvroute.topology import InstanceCounts, build, fat_tree
from kvroute.types import TIER_COUNT, InputError, IntArray, TierArray

TIER: TierArray = np.array([[0, 2, 3, 3], [2, 0, 3, 3], [3, 3, 0, 1], [3, 3, 1, 0]], dtype=np.int8)
BYTES_PER_S = np.array([450e9, 12.5e9, 6.25e9, 3.125e9, 1.25e9])
LATENCY_S = np.array([1e-6, 3e-6, 8e-6, 15e-6, 10e-3])
ALL: IntArray = np.arange(4)

hits = st.floats(0, 1)
loads = st.floats(0, 0.9)
bandwidths = st.floats(1e6, 1e12)


def oracle(settings: OracleSpec | None = None, links: LinkView | None = None) -> NetworkOracle:
    return NetworkOracle(TIER, BYTES_PER_S, LATENCY_S, settings, links)


def test_worked_example_of_the_cost_model() -> None:
    """NetKV III-D: 2.0 s in the same pod, 0.4 s across pods; 0.64 s once the cross-pod tier is half full."""
    bytes_per_s, in_flight = np.array([6.25e9, 3.125e9]), np.array([1, 0])
    effective = effective_bytes_per_s(bytes_per_s, np.array([0.2, 0.2]), in_flight)
    assert effective == pytest.approx([2.5e9, 2.5e9])
    assert np.array([5e9, 1e9]) / effective == pytest.approx([2.0, 0.4])
    perturbed = effective_bytes_per_s(bytes_per_s, np.array([0.2, 0.5]), in_flight)
    assert 1e9 / perturbed[1] == pytest.approx(0.64)


def test_numerical_examples_of_netkvs_propositions() -> None:
    """NetKV IV-C: 1 < 4 * 0.5 holds, and at k = 2 it would be a tie; V-D: the bound is 0.42."""
    assert network_wins(near_hit=0.0, far_hit=0.5, bandwidth_ratio=4.0)
    assert not network_wins(near_hit=0.0, far_hit=0.5, bandwidth_ratio=2.0)
    assert staleness_bound(4.0, 0.3, 1.0, 0.3) == pytest.approx(0.42)


@given(hits, hits, st.floats(1, 32), loads, loads, bandwidths, st.floats(1e6, 1e12), st.floats(0, 5), st.floats(0, 5))
def test_proposition_1_holds_exactly_if_the_near_instance_is_faster(
    near_hit: float,
    far_hit: float,
    ratio: float,
    near_congestion: float,
    far_congestion: float,
    near_bytes_per_s: float,
    kv_bytes: float,
    near_queue_s: float,
    far_queue_s: float,
) -> None:
    """Eq. 8 <=> lower transfer + queue time, except where rounding decides."""
    near_s = kv_bytes * (1 - near_hit) / (near_bytes_per_s * (1 - near_congestion)) + near_queue_s
    far_s = kv_bytes * (1 - far_hit) / (near_bytes_per_s / ratio * (1 - far_congestion)) + far_queue_s
    wins = network_wins(
        near_hit,
        far_hit,
        ratio,
        near_congestion,
        far_congestion,
        near_bytes_per_s=near_bytes_per_s,
        kv_bytes=kv_bytes,
        queue_gap_s=far_queue_s - near_queue_s,
    )
    if not math.isclose(near_s, far_s, rel_tol=1e-9, abs_tol=1e-9 * kv_bytes / near_bytes_per_s):
        assert wins == (near_s < far_s)


@given(bandwidths, st.floats(1e-3, 1), loads, loads, st.floats(-1, 1), st.floats(-1, 1))
def test_proposition_2_bounds_the_harmless_error(
    fast: float, ratio: float, fast_congestion: float, slow_congestion: float, fast_part: float, slow_part: float
) -> None:
    """Any error below the bound keeps the order of the tiers; the worst error just above it inverts the order."""
    slow = fast * ratio
    bound = staleness_bound(fast, fast_congestion, slow, slow_congestion)
    if bound > 1e-6:
        error = 0.999 * bound
        stale_fast = fast * (1 - fast_congestion - fast_part * error)
        assert stale_fast > slow * (1 - slow_congestion - slow_part * error)
    error = bound + 1e-6
    assert fast * (1 - fast_congestion - error) < slow * (1 - slow_congestion + error)


def test_formulas_reject_inputs_outside_their_domain() -> None:
    with pytest.raises(InputError, match="faster tier first"):
        staleness_bound(1.0, 0.0, 4.0, 0.0)
    with pytest.raises(InputError, match="above zero"):
        network_wins(0.0, 0.5, 4.0, kv_bytes=0.0)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 3)), max_size=60), st.integers(0, 5))
def test_counters_equal_a_simple_count(moves: list[tuple[bool, int, int]], in_flight_max: int) -> None:
    """Counts are per source and tier, never below zero, and capped only when read; without separate telemetry they read
    zero."""
    seeing = oracle(OracleSpec(in_flight_max=in_flight_max))
    blind = oracle(OracleSpec(in_flight_max=in_flight_max, separates_own_traffic=False))
    count = dict.fromkeys(((source, tier) for source in range(4) for tier in range(TIER_COUNT)), 0)
    for starts, source, target in moves:
        key = (source, int(TIER[source, target]))
        count[key] = max(0, count[key] + (1 if starts else -1))
        for network in (seeing, blind):
            (network.transfer_started if starts else network.transfer_finished)(source, target)
    for source in range(4):
        expected = [min(count[source, tier], in_flight_max) for tier in range(TIER_COUNT)]
        assert seeing.costs(source, ALL, 0.0).in_flight.tolist() == expected
        assert not blind.costs(source, ALL, 0.0).in_flight.any()


def test_costs_are_a_snapshot_in_the_candidates_order() -> None:
    network = oracle()
    network.congestion_measured(1.0, [0.0, 0.1, 0.2, 0.3, 0.0])
    before = network.costs(0, np.array([3, 1, 0]), 1.5)
    network.transfer_started(0, 1)
    network.congestion_measured(2.0, [0.5] * 5)
    assert before.tier.tolist() == [3, 2, 0]
    assert before.congestion.tolist() == [0.0, 0.1, 0.2, 0.3, 0.0]
    assert not before.in_flight.any()
    assert network.costs(0, ALL, 2.0).in_flight.tolist() == [0, 0, 1, 0, 0]


def test_telemetry_has_an_age_and_late_messages_are_ignored() -> None:
    network = oracle()
    assert network.staleness_s(5.0) is None
    assert not network.costs(0, ALL, 5.0).congestion.any()
    network.congestion_measured(5.0, [0.5] * 5)
    network.congestion_measured(4.0, [0.1] * 5)
    assert network.staleness_s(7.5) == 2.5
    assert network.costs(0, ALL, 7.5).congestion.tolist() == [0.5] * 5


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, -0.1])
def test_an_invalid_utilisation_is_rejected_and_changes_nothing(wrong: float) -> None:
    network = oracle()
    network.congestion_measured(1.0, [0.5] * 5)
    with pytest.raises(InputError, match=r"per_tier\[3\]: .* is not a utilisation"):
        network.congestion_measured(2.0, [0.1, 0.1, 0.1, wrong, 0.1])
    with pytest.raises(InputError, match="2 values instead of 5"):
        network.congestion_measured(2.0, [0.1, 0.1])
    assert network.costs(0, ALL, 2.0).congestion.tolist() == [0.5] * 5
    assert network.staleness_s(2.0) == 1.0


def test_a_full_tier_still_has_a_hundredth_of_its_capacity() -> None:
    network = oracle()
    network.congestion_measured(0.0, [0.985, 0.99, 0.999, 1.0, 7.0])
    assert network.costs(0, ALL, 0.0).congestion.tolist() == [0.985, 0.99, 0.99, 0.99, 0.99]
    network.congestion_measured(0.0, [-1e-12] * 5)
    assert network.costs(0, ALL, 0.0).congestion.tolist() == [0.0] * 5


@given(st.lists(loads, min_size=1, max_size=8), st.floats(0.01, 1), st.sampled_from(["smooth", "trend"]))
def test_predictions_stay_within_bounds_and_keep_a_constant(values: list[float], alpha: float, prediction: str) -> None:
    settings = OracleSpec(prediction=prediction, alpha=alpha)  # type: ignore[arg-type]
    network, steady = oracle(settings), oracle(settings)
    for at, value in enumerate(values):
        network.congestion_measured(float(at), [value] * 5)
        steady.congestion_measured(float(at), [values[0]] * 5)
        for later in (0.0, 0.7, 1.0, 100.0):
            assert 0.0 <= network.costs(0, ALL, at + later).congestion[0] <= 0.99
            assert steady.costs(0, ALL, at + later).congestion[0] == pytest.approx(values[0])
    if prediction == "smooth":
        assert min(values) - 1e-12 <= network.costs(0, ALL, 99.0).congestion[0] <= max(values) + 1e-12


def test_smoothing_and_trend_by_hand() -> None:
    """Smoothing 0.2, 0.4 with alpha 0.5 gives 0.3; a line through two samples is extrapolated by at most one
    interval."""
    smooth = oracle(OracleSpec(prediction="smooth", alpha=0.5))
    trend = oracle(OracleSpec(prediction="trend", alpha=1.0, beta=1.0))
    for network in (smooth, trend):
        network.congestion_measured(0.0, [0.2] * 5)
        network.congestion_measured(2.0, [0.4] * 5)
    assert smooth.costs(0, ALL, 2.0).congestion[0] == pytest.approx(0.3)
    ahead = [trend.costs(0, ALL, at).congestion[0] for at in (2.0, 3.0, 4.0, 50.0)]
    assert ahead == pytest.approx([0.4, 0.5, 0.6, 0.6])


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_old_telemetry_decays_to_the_static_view(first_s: float, second_s: float) -> None:
    network = oracle(OracleSpec(stale_after_s=10.0))
    network.congestion_measured(0.0, [0.5] * 5)
    early, late = sorted((first_s, second_s))
    believed = [network.costs(0, ALL, at).congestion[0] for at in (early, late)]
    assert believed[0] >= believed[1] >= 0.0
    assert (believed[0] == 0.5) == (early <= 10.0) or math.isclose(early, 10.0)
    assert network.costs(0, ALL, 20.0).congestion[0] == pytest.approx(0.5 * math.exp(-1))


def test_invalid_settings_and_topologies_are_named() -> None:
    with pytest.raises(InputError, match="did you mean 'trend'"):
        OracleSpec(prediction="trends")  # type: ignore[arg-type]
    for wrong in ({"alpha": 0.0}, {"beta": math.nan}, {"stale_after_s": 0.0}, {"in_flight_max": -1}):
        with pytest.raises(InputError, match=f"oracle.{next(iter(wrong))}"):
            OracleSpec(**wrong)
    with pytest.raises(InputError, match="unknown tier"):
        NetworkOracle(np.array([[5]], dtype=np.int8), BYTES_PER_S, LATENCY_S)
    with pytest.raises(InputError, match=r"shape \(1, 4\)"):
        NetworkOracle(TIER[:1], BYTES_PER_S, LATENCY_S)
    with pytest.raises(InputError, match="bytes_per_s"):
        NetworkOracle(TIER, BYTES_PER_S * 0, LATENCY_S)
    with pytest.raises(InputError, match="latency_s: 2 values for 5 tiers"):
        NetworkOracle(TIER, BYTES_PER_S, LATENCY_S[:2])


# Two racks of one node each in one pod: links 0-3 are NICs (up and down of each node), 4-5 the uplinks of rack 0, 6-7
# the downlinks of rack 1.
CAPACITY = np.array([10.0, 10.0, 10.0, 10.0, 4.0, 4.0, 4.0, 4.0])
LINK_TIER: TierArray = np.array([1, 1, 1, 1, 2, 2, 2, 2], dtype=np.int8)
LINK_BYTES_PER_S = np.array([100.0, 10.0, 4.0, 2.0, 1.0])


def hops(source: int, target: int, shard: int) -> tuple[tuple[int, ...], ...]:
    assert (source, target) == (0, 1)
    return ((0,), (4, 5), (6, 7), (3,))


def view(flows: int = 1, ecmp: str = "transfer") -> LinkView:
    return LinkView(CAPACITY, LINK_TIER, LINK_BYTES_PER_S, hops, lambda source, target: flows, ecmp)  # type: ignore[arg-type]


def test_residual_bandwidth_is_that_of_the_tightest_group() -> None:
    """An idle path gives its narrowest link; flows that draw separately fill two uplinks; a busy uplink lowers its
    group."""
    target = np.array([1])
    idle, hot = np.zeros(8), np.array([0, 0, 0, 0, 0.5, 0, 0, 0])
    assert view().residual_bytes_per_s(0, target, idle) == pytest.approx([4.0])
    assert view(2, "transfer").residual_bytes_per_s(0, target, idle) == pytest.approx([4.0])
    assert view(2, "flow").residual_bytes_per_s(0, target, idle) == pytest.approx([8.0])
    assert view().residual_bytes_per_s(0, target, hot) == pytest.approx([3.0])
    assert view().residual_bytes_per_s(0, target, np.array([0.9] + [0.0] * 7)) == pytest.approx([1.0])
    assert view().residual_bytes_per_s(0, target[:0], idle).shape == (0,)


def test_the_slowest_shard_limits_the_rate() -> None:
    """Two shards have a NIC each; one NIC has 1 byte/s left, so the pair has 2, although the path could carry more."""
    paths = [((0,), (4, 5), (6, 7), (2,)), ((1,), (4, 5), (6, 7), (3,))]
    linked = LinkView(
        CAPACITY, LINK_TIER, LINK_BYTES_PER_S, lambda source, target, shard: paths[shard], lambda source, target: 2
    )
    utilisation = np.array([0.9] + [0.0] * 7)
    assert linked.residual_bytes_per_s(0, np.array([1]), utilisation) == pytest.approx([2.0])
    assert linked.residual_bytes_per_s(0, np.array([1]), np.zeros(8)) == pytest.approx([8.0])


@given(st.lists(st.floats(0, 0.99), min_size=8, max_size=8), st.integers(0, 7), st.sampled_from(["flow", "transfer"]))
def test_residual_bandwidth_never_rises_with_utilisation(utilisation: list[float], link: int, ecmp: str) -> None:
    before = np.array(utilisation)
    after = before.copy()
    after[link] = 0.99
    linked = view(3, ecmp)
    assert (
        linked.residual_bytes_per_s(0, np.array([1]), after) <= linked.residual_bytes_per_s(0, np.array([1]), before)
    ).all()


def test_congestion_of_a_tier_aggregates_its_links() -> None:
    """A tier's congestion is the mean of its links weighted by capacity, and higher if the tiers below it leave less
    bandwidth."""
    linked = view()
    assert linked.aggregate(np.zeros(8)) == pytest.approx(np.zeros(5))
    assert linked.aggregate(np.full(8, 0.3)) == pytest.approx([0, 0.3, 0.3, 0, 0])
    # NICs at 0.8 leave 2 bytes/s: half of the tier bandwidth of tier 2, and all that tiers 3 and 4 need.
    nics = np.array([0.8] * 4 + [0.0] * 4)
    assert linked.aggregate(nics) == pytest.approx([0, 0.8, 0.5, 0, 0])


def test_links_without_a_tier_are_ignored() -> None:
    """A storage network (tier -1) has no effect on any tier."""
    storage = LinkView(np.array([10.0, 90.0]), np.array([0, -1], np.int8), LINK_BYTES_PER_S, hops, lambda s, t: 1)
    assert storage.aggregate(np.array([0.2, 0.9])) == pytest.approx([0.2, 0, 0, 0, 0])


@given(st.lists(st.floats(0, 0.99), min_size=8, max_size=8))
def test_the_aggregate_is_a_valid_congestion(utilisation: list[float]) -> None:
    congestion = view().aggregate(np.array(utilisation))
    assert congestion.shape == (TIER_COUNT,)
    assert ((congestion >= 0) & (congestion <= 0.99)).all()


def test_telemetry_by_link_updates_both_views() -> None:
    network = oracle(OracleSpec(stale_after_s=1.0), view())
    assert network.residual_bytes_per_s(0, np.array([1]), 0.0) == pytest.approx([4.0])
    network.links_measured(1.0, [0.0, 0.0, 0.0, 0.0, 0.5, 0.5, 0.5, 0.5])
    assert network.costs(0, ALL, 1.0).congestion == pytest.approx([0, 0, 0.5, 0, 0])
    network.links_measured(0.5, [0.9] * 8)
    assert network.residual_bytes_per_s(0, np.array([1]), 1.0) == pytest.approx([2.0])
    assert network.residual_bytes_per_s(0, np.array([1]), 1e4) == pytest.approx([4.0])
    with pytest.raises(InputError, match=r"utilisation: 3 values instead of 8"):
        network.links_measured(2.0, [0.1] * 3)
    for call in (lambda: oracle().links_measured(0.0, []), lambda: oracle().residual_bytes_per_s(0, ALL, 0.0)):
        with pytest.raises(InputError, match="LinkView"):
            call()


def test_in_an_idle_cluster_every_pair_has_its_tiers_bandwidth() -> None:
    """In an idle regular fat tree the two views are equal, and both decrease with the links of a tier."""
    instances = InstanceCounts(prefill=2, decode=6)
    cluster = build(fat_tree(pods=2, racks_per_pod=2, nodes_per_rack=1, oversubscription=(2, 2), instances=instances))
    network = NetworkOracle.of(cluster)
    source, others = 0, np.arange(1, len(cluster.instances))
    tiers = network.costs(source, others, 0.0).tier
    assert set(tiers.tolist()) >= {0, 2, 3}
    idle = cluster.tier_bytes_per_s[tiers]
    assert network.residual_bytes_per_s(source, others, 0.0) == pytest.approx(idle)
    network.links_measured(0.0, [0.25] * len(cluster.links))
    assert network.residual_bytes_per_s(source, others, 0.0) == pytest.approx(0.75 * idle)
    assert network.costs(source, others, 0.0).congestion[tiers] == pytest.approx(np.full(len(others), 0.25))
