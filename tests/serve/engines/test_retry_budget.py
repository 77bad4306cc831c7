"""The retry budget: retries never exceed its bound, the floor always grants some, and unused budget does not
accumulate."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.serve.engines.retry_budget import RetryBudget

shares = st.sampled_from([0.0, 0.01, 0.2, 0.5, 1.0])
floors = st.sampled_from([0.0, 0.1, 1.0, 10.0])
steps = st.lists(st.tuples(st.sampled_from(["request", "retry", "retries"]), st.floats(0, 3)), max_size=200)


@given(shares, floors, steps)
@settings(deadline=None)
def test_retries_stay_below_share_and_floor(share: float, floor_per_s: float, taken: list[tuple[str, float]]) -> None:
    """The bound holds at every moment from the start, for every pattern of demand."""
    budget, now, requests, retries = RetryBudget(share=share, floor_per_s=floor_per_s, now=50.0), 50.0, 0, 0
    for step, elapsed_s in taken:
        now += elapsed_s
        if step == "request":
            requests += 1
            budget.request(now)
        else:
            attempts = 1 if step == "retry" else 30
            retries += sum(budget.spend(now) for _ in range(attempts))
        assert retries <= share * requests + floor_per_s * (now - 50.0 + 1) + 1e-6
        assert budget.left(now) >= 0


@given(floors.filter(bool), steps)
@settings(deadline=None)
def test_the_floor_grants_retries_at_its_rate(floor_per_s: float, taken: list[tuple[str, float]]) -> None:
    budget, now = RetryBudget(share=0.2, floor_per_s=floor_per_s), 0.0
    for step, elapsed_s in taken:
        now += elapsed_s
        if step == "request":
            budget.request(now)
        else:
            budget.spend(now)
    assert budget.spend(now + 1.001 / floor_per_s)


@given(st.integers(1, 10), st.integers(1, 1000), st.floats(60, 1e6))
def test_unused_budget_does_not_accumulate(floor_per_s: int, requests: int, calm_s: float) -> None:
    """After a pause only one second of the floor is left of the saved budget."""
    budget = RetryBudget(share=0.5, floor_per_s=float(floor_per_s))
    for _ in range(requests):
        budget.request(0.0)
    granted = sum(budget.spend(calm_s) for _ in range(10_000))
    assert floor_per_s <= granted <= floor_per_s + 0.5 * requests * 0.0025 + 1


@given(shares.filter(bool), st.integers(1, 50))
def test_each_request_adds_its_share_to_the_budget(share: float, retries: int) -> None:
    budget = RetryBudget(share=share, floor_per_s=0.0)
    for _ in range(round(retries / share)):
        budget.request(1.0)
    assert [budget.spend(1.0) for _ in range(retries + 1)] == [True] * retries + [False]


def test_an_empty_budget_grants_no_retry() -> None:
    assert not RetryBudget(share=0.0, floor_per_s=0.0).spend(1e6)


def test_a_clock_that_stops_or_goes_back_adds_no_budget() -> None:
    budget = RetryBudget(share=0.0, floor_per_s=2.0, now=10.0)
    assert [budget.spend(at) for at in (10.0, 9.0, 10.0)] == [True, True, False]
    assert budget.left(11.0) == pytest.approx(2.0)
