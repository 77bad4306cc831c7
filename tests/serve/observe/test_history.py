"""The history of the last 15 minutes: values of each step against a simple model, in driven time."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.serve.observe.admin.state import DashboardState
from kvroute.serve.observe.history import POINTS_MOST, STEP_S, History, HistoryPoint
from kvroute.serve.observe.recent_requests import REQUESTS_MOST
from kvroute.serve.observe.view import GatewayStatus, TtftBreakdown
from kvroute.topology import InstanceCounts, build, fat_tree

CLUSTER = build(fat_tree(pods=1, racks_per_pod=2, nodes_per_rack=2, instances=InstanceCounts(prefill=2, decode=2)))
FIRST_TOKEN = TtftBreakdown(queue_s=0.1, prefill_s=0.2, transfer_s=0.3, first_step_s=0.4)
responses = st.tuples(st.floats(0.0, 20.0), st.floats(0.0, 1e12))
durations_s = st.integers(int(STEP_S * 16), 960).map(lambda sixteenths: sixteenths / 16)
"""Their sums are exact, so no step is shorter than STEP_S because of rounding."""
steps = st.lists(st.tuples(durations_s, st.integers(0, 50), st.lists(responses, max_size=20)), max_size=30)


def _state() -> DashboardState:
    return DashboardState(CLUSTER, GatewayStatus, policy="netkv", version="1.2")


@given(steps)
@settings(deadline=None)
def test_points_have_the_values_of_their_steps(drawn: list[tuple[float, int, list[tuple[float, float]]]]) -> None:
    """Rates times durations add up to the counts, and percentiles are values that occurred."""
    history, at, arrivals, answered = History(), 0.0, 0, 0
    for duration_s, arrived, times in drawn:
        at += duration_s
        assert history.is_due(at)
        arrivals, answered = arrivals + arrived, answered + len(times)
        ttft_s, kv_bytes = np.array([seconds for seconds, _ in times]), np.array([nbytes for _, nbytes in times])
        history.add(at, arrivals=arrivals, answers=answered, ttft_s=ttft_s, kv_bytes=kv_bytes)
        assert not history.is_due(at + 0.9 * STEP_S)
        point = history.newest
        assert point is not None
        assert point.requests_per_s * duration_s == pytest.approx(arrived, abs=0.001 * duration_s)
        assert point.kv_bytes_per_s * duration_s == pytest.approx(kv_bytes.sum(), rel=1e-6, abs=duration_s)
        if times:
            assert point.ttft_p50_s is not None
            assert point.ttft_p95_s is not None
            assert point.ttft_p50_s <= point.ttft_p95_s
            assert np.mean(ttft_s <= point.ttft_p50_s + 1e-6) >= 0.5
            assert np.mean(ttft_s <= point.ttft_p95_s + 1e-6) >= 0.95
        else:
            assert (point.ttft_p50_s, point.ttft_p95_s) == (None, None)


def test_the_memory_is_bounded() -> None:
    """Old points are dropped after 15 minutes; the newest one is the last."""
    history = History()
    for step in range(1, 3 * POINTS_MOST):
        history.add(step * STEP_S, arrivals=step, answers=0, ttft_s=np.empty(0), kv_bytes=np.empty(0))
    assert len(history.points) == POINTS_MOST == 900 / STEP_S
    assert history.points[-1] == history.newest
    assert [point.at for point in history.points[:2]] == [(2 * POINTS_MOST) * STEP_S, (2 * POINTS_MOST + 1) * STEP_S]


def test_a_step_of_the_gateway() -> None:
    """A step counts what happened in it and nothing of the step before, whatever the number of calls."""
    state = _state()
    for number in range(10):
        state.arrived(0.1 * number)
    for number in range(4):
        state.first_token(FIRST_TOKEN, 2.0 + number / 4, tier=1, kv_bytes=5e9)
    state.whole_answer(3.5, tier=1, kv_bytes=5e9)
    for quarter in range(1, 41):
        state.remember(quarter / 4)
    assert state.snapshot(10.0).history == (
        HistoryPoint(5.0, 2.0, 1.0, 1.0, 5e9),
        HistoryPoint(10.0, 0.0, None, None, 0),
    )
    assert state.tick(10.0).history == state.snapshot(10.0).history[-1]
    assert msgspec.json.decode(msgspec.json.encode(state.snapshot(10.0)))["history"][0] == [5.0, 2.0, 1.0, 1.0, 5e9]


def test_no_point_before_the_first_step_has_ended() -> None:
    state = _state()
    state.remember(4.9)
    assert (state.tick(4.9).history, state.snapshot(4.9).history) == (None, ())


def test_more_requests_than_are_kept() -> None:
    """The bytes of a step with more answers than the ring holds are estimated from those that it holds."""
    state = _state()
    for number in range(2 * REQUESTS_MOST):
        state.first_token(FIRST_TOKEN, number / REQUESTS_MOST, tier=1, kv_bytes=1e6)
    state.remember(5.0)
    point = state.tick(5.0).history
    assert point is not None
    assert point.kv_bytes_per_s == pytest.approx(2 * REQUESTS_MOST * 1e6 / 5.0, rel=1e-6)
    assert point.ttft_p95_s == pytest.approx(1.0)
