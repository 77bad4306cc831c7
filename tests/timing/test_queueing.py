"""Queueing formulas against simulated queues, and their limits."""

from __future__ import annotations

import math
from heapq import heappop, heappush

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtr, pdtr

from kvroute.timing.queueing import DecodeLoad, highest_rate, normal_share, poisson_share, token_s, waiting

LOAD = DecodeLoad(
    base_s=0.02,
    per_request_s=0.0004,
    output_tokens=100,
    batch_max=256,
    kv_tokens=200_000,
    request_tokens=600,
    request_tokens2=600.0**2,
)


@given(st.integers(0, 20_000), st.floats(1e-9, 1e4), st.floats(-40, 40))
def test_distributions_are_those_of_scipy(count: int, mean: float, deviations: float) -> None:
    """The gateway computes them without scipy, which takes 15 MB."""
    assert poisson_share(count, mean) == pytest.approx(float(pdtr(count, mean)), rel=1e-9, abs=1e-300)
    assert normal_share(deviations) == pytest.approx(float(ndtr(deviations)), rel=1e-12, abs=1e-300)


@pytest.mark.parametrize("utilisation", [0.3, 0.7, 0.9])
def test_waiting_is_that_of_a_simulated_queue(utilisation: float) -> None:
    """300,000 Poisson arrivals with two service times: the mean wait within 5 %, and the tail within 0.05."""
    service_s, share = np.array([0.05, 0.4]), np.array([0.8, 0.2])
    rate = utilisation / float(service_s @ share)
    draw = np.random.default_rng(3)
    gaps, served = draw.exponential(1 / rate, 300_000), draw.choice(service_s, 300_000, p=share)
    waits, wait = np.empty(len(gaps)), 0.0
    for number, (gap, before) in enumerate(zip(gaps.tolist(), [0.0, *served[:-1].tolist()], strict=True)):
        wait = max(wait + before - gap, 0.0)
        waits[number] = wait
    found = waiting(rate, service_s, share)
    assert found.mean_s == pytest.approx(waits.mean(), rel=0.05)
    for limit in np.quantile(waits, [0.5, 0.9, 0.99]):
        assert float(found.within(np.array(limit))) == pytest.approx(np.mean(waits <= limit), abs=0.06)


def test_overload_has_no_finite_wait() -> None:
    """From a utilisation of 1 nobody is served in time."""
    found = waiting(10.0, np.array([0.1]), np.array([1.0]))
    assert found.mean_s == math.inf
    assert found.within(np.array([1e9])).tolist() == [0.0]


def test_a_limit_below_zero_is_never_met() -> None:
    assert waiting(1.0, np.array([0.1]), np.array([1.0])).within(np.array([-0.1])).tolist() == [0.0]


@given(st.floats(0.01, 20.0))
def test_the_mean_batch_is_a_fixed_point_of_littles_law(rate: float) -> None:
    batch = LOAD.mean_batch(rate)
    if math.isfinite(batch):
        assert batch == pytest.approx(rate * LOAD.output_tokens * LOAD.step_s(batch))
    else:
        assert rate * LOAD.output_tokens * LOAD.per_request_s >= 1.0


def simulated_tpot_s(load: DecodeLoad, rate: float, seconds: float) -> list[float]:
    """Continuous batching with Poisson arrivals, iteration by iteration: the mean iteration of each request."""
    draw = np.random.default_rng(5)
    now, arrives = 0.0, float(draw.exponential(1 / rate))
    active: list[tuple[int, float]] = []
    step, found = 0, list[float]()
    while now < seconds:
        while arrives <= now:
            heappush(active, (step + int(load.output_tokens), now))
            arrives += float(draw.exponential(1 / rate))
        if not active:
            now = arrives
            continue
        now += load.step_s(len(active))
        step += 1
        while active and active[0][0] <= step:
            _, since = heappop(active)
            found.append((now - since) / load.output_tokens)
    return found[len(found) // 5 :]


@pytest.mark.parametrize("rate", [4.0, 8.0])
def test_tpot_attainment_is_that_of_a_simulated_batch(rate: float) -> None:
    """Limits around the mean iteration: the predicted share is within 0.1 of the simulated one."""
    found = np.array(simulated_tpot_s(LOAD, rate, 2_000.0))
    assert float(found.mean()) == pytest.approx(LOAD.step_s(LOAD.mean_batch(rate)), rel=0.03)
    for limit in np.quantile(found, [0.3, 0.5, 0.9]):
        assert LOAD.tpot_attainment(rate, float(limit)) == pytest.approx(float(np.mean(found <= limit)), abs=0.12)


@given(st.floats(0.1, 15.0), st.floats(1.01, 1.5))
def test_attainment_does_not_increase_with_the_rate(rate: float, factor: float) -> None:
    more = rate * factor
    assert LOAD.tpot_attainment(more, 0.04) <= LOAD.tpot_attainment(rate, 0.04) + 1e-12
    assert LOAD.room(more) <= LOAD.room(rate) + 1e-12


def test_without_memory_there_is_no_room() -> None:
    small = DecodeLoad(0.02, 0.0004, 100, 256, 500.0, 600.0, 600.0**2)
    assert small.room(0.001) < 0.01
    assert small.rate_bound_per_s(0.1) < 500 / 600 / (100 * 0.02)


def test_the_rate_bound_is_the_constant_batch_at_the_limit() -> None:
    """A TPOT of 40 ms allows 50 requests, which leave after 100 iterations of 40 ms."""
    assert LOAD.rate_bound_per_s(0.04) == pytest.approx(50 / (100 * 0.04))


def test_bisection_finds_the_highest_rate() -> None:
    assert highest_rate(0.9, lambda rate: 1.0 - rate / 10.0, 100.0) == pytest.approx(1.0)
    assert highest_rate(0.9, lambda rate: 0.5, 100.0) == 0.0
    assert highest_rate(0.9, lambda rate: 1.0, 100.0) == pytest.approx(100.0)


def test_what_happens_once_is_spread_over_the_tokens() -> None:
    assert token_s(0.03, 0.2, 101) == pytest.approx(0.032)
