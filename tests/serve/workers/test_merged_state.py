"""The dashboard of all workers: sums of what each one has, and times on one clock."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.serve.observe.admin.state import DashboardState
from kvroute.serve.observe.view import GatewayStatus, InstanceLoad, Snapshot, TtftBreakdown
from kvroute.serve.workers.merged_state import merged_snapshot
from kvroute.topology import InstanceCounts, build, fat_tree
from kvroute.types import Decode, TransferMeasured

CLUSTER = build(
    fat_tree(
        pods=1,
        racks_per_pod=1,
        nodes_per_rack=2,
        oversubscription=(1.0, 1.0),
        instances=InstanceCounts(prefill=1, decode=3),
    )
)
BIN = 0.0051
"""Relative error of a percentile: half a bin of a distribution."""
requests = st.lists(st.tuples(st.floats(0.01, 4.0), st.sampled_from([None, 1])), max_size=20)


def state(in_flight: int = 0, *, up: bool = True) -> DashboardState:
    instances = tuple(InstanceLoad(name=instance.name, up=up, requests=in_flight) for instance in CLUSTER.instances)
    status = GatewayStatus(in_flight=in_flight, connections=in_flight, instances=instances)
    return DashboardState(CLUSTER, lambda: status, policy="netkv", version="1", distributions=True)


def served(where: DashboardState, at: float, seconds: float, tier: int | None) -> None:
    where.arrived(at)
    where.first_token(TtftBreakdown(0.0, seconds, 0.0), at, tier=tier, kv_bytes=8.0)
    where.finished(at, 200)


def over_the_wire(where: DashboardState, at: float) -> Snapshot:
    return msgspec.json.decode(msgspec.json.encode(where.snapshot(at)), type=Snapshot)


@settings(max_examples=50, deadline=None)
@given(st.lists(requests, min_size=1, max_size=3))
def test_counts_and_means_are_those_of_one_gateway(workers: list[list[tuple[float, int | None]]]) -> None:
    """Requests, tiers, bytes, mean parts of the TTFT, and percentiles."""
    whole, parts = state(), [state() for _ in workers]
    for part, answers in zip(parts, workers, strict=True):
        for seconds, tier in answers:
            served(part, 5.0, seconds, tier)
            served(whole, 5.0, seconds, tier)
    tick = merged_snapshot([over_the_wire(part, 6.0) for part in parts]).tick
    expected = over_the_wire(whole, 6.0).tick
    assert (tick.requests, tick.rejects) == (expected.requests, expected.rejects)
    assert tick.finishes_per_s == pytest.approx(expected.finishes_per_s)
    for split, wanted in zip(tick.splits, expected.splits, strict=True):
        assert (split.requests, split.streams, split.local) == (wanted.requests, wanted.streams, wanted.local)
        assert (split.tier_requests, split.tier_bytes) == (wanted.tier_requests, wanted.tier_bytes)
        assert split.part_mean_s == pytest.approx(wanted.part_mean_s, abs=2e-3)
        assert split.ttft_p50_s == pytest.approx(wanted.ttft_p50_s, rel=BIN)
        assert split.ttft_p90_s == pytest.approx(wanted.ttft_p90_s, rel=BIN)
        assert split.part_p50_s == pytest.approx(wanted.part_p50_s, rel=BIN)
        assert split.part_p90_s == pytest.approx(wanted.part_p90_s, rel=BIN)


def test_percentiles_are_no_means_of_percentiles() -> None:
    """One worker has 90 short requests, the other one 10 long ones: the mean of their medians is 1.07 s."""
    parts = [state(), state()]
    for part, count, seconds in zip(parts, (90, 10), (0.08, 10.0), strict=True):
        for _ in range(count):
            served(part, 1.0, seconds, 1)
        part.remember(5.5)
    whole = merged_snapshot([over_the_wire(part, 6.0) for part in parts])
    (split,), (point,) = whole.tick.splits, whole.history
    assert (split.ttft_p50_s, point.ttft_p50_s) == pytest.approx((0.08, 0.08), rel=BIN)
    assert split.part_p50_s["prefill"] == pytest.approx(0.08, rel=BIN)
    assert point.ttft_p95_s == pytest.approx(10.0, rel=BIN)
    assert whole.tick.history == point


def test_own_load_is_added_and_the_worst_health_counts() -> None:
    tick = merged_snapshot([over_the_wire(state(2), 1.0), over_the_wire(state(3, up=False), 1.0)]).tick
    assert (tick.load.in_flight, tick.load.connections) == (5, 5)
    assert {(tile.requests, tile.up) for tile in tick.instances} == {(5, 0)}


def test_times_are_those_of_the_first_worker() -> None:
    """The clocks of workers begin at their starts: here 100 s apart."""
    first, second = state(), state()
    first.decided(Decode(1, "prefill0", "decode0", 1, 8.0, 8.0, 0), 105.0)
    second.decided(Decode(1, "prefill0", "decode1", 1, 8.0, 8.0, 0), 4.0)
    decisions = merged_snapshot([over_the_wire(first, 106.0), over_the_wire(second, 6.0)]).tick.decisions
    assert [(decision.chosen, decision.at) for decision in decisions] == [("decode1", 104.0), ("decode0", 105.0)]
    assert len({decision.id for decision in decisions}) == 2


def test_transfers_of_workers_have_different_numbers() -> None:
    parts = [state(), state()]
    for part in parts:
        part.transfer_started(Decode(1, "prefill0", "decode0", 1, 8.0, 8.0, 0), 0.5)
    tick = merged_snapshot([over_the_wire(part, 1.0) for part in parts]).tick
    assert tick.transfers_in_flight == len({transfer.id for transfer in tick.transfers}) == 2


def test_the_newest_measurement_of_a_path_counts() -> None:
    """Each worker shows the paths that are slowest by its own transfers."""
    first, second = state(), state()
    for part, target, seconds, at in (
        (first, "decode0", 8.0, 1.0),
        (second, "decode0", 2.0, 2.0),
        (second, "decode1", 4.0, 2.0),
    ):
        part.transfer_measured(TransferMeasured(at, "prefill0", target, 1e9, seconds, 1, "kvroute"))
    paths = merged_snapshot([over_the_wire(first, 3.0), over_the_wire(second, 3.0)]).tick.paths
    assert {path.target: path.bytes_per_s for path in paths} == {"decode0": 5e8, "decode1": 2.5e8}
    assert [path.ratio for path in paths] == sorted(path.ratio for path in paths)


def test_the_history_adds_steps() -> None:
    parts = [state(), state()]
    for part in parts:
        served(part, 1.0, 0.25, 1)
        part.remember(5.5)
    whole = merged_snapshot([over_the_wire(part, 6.0) for part in parts])
    (point,) = whole.history
    assert point.requests_per_s == pytest.approx(2 / 5.5, abs=2e-3)
    assert point.ttft_p50_s == pytest.approx(0.25, rel=BIN)
    assert whole.tick.history == point


def test_a_worker_with_another_cluster_is_left_out() -> None:
    """It has not followed a change yet."""
    small = build(
        fat_tree(
            pods=1,
            racks_per_pod=1,
            nodes_per_rack=1,
            oversubscription=(1.0, 1.0),
            instances=InstanceCounts(prefill=1, decode=1),
        )
    )
    status = GatewayStatus(in_flight=7)
    other = DashboardState(small, lambda: status, policy="netkv", version="1", distributions=True)
    assert merged_snapshot([over_the_wire(state(1), 1.0), over_the_wire(other, 1.0)]).tick.load.in_flight == 1
