"""Rates of counters: steady counts, resets and wrap-arounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute_engine.agent.rates import CounterRate, Total, increase


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=20), st.integers(0, 2**63))
def test_a_total_counts_all_increases(steps: list[int], first: int) -> None:
    total, reading = Total(), first
    total.read(reading)
    for step in steps:
        reading += step
        total.read(reading)
    assert total.value == sum(steps)


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20), st.integers(0, 2**32 - 1))
def test_a_total_survives_the_wrap_around_of_32_bits(steps: list[int], first: int) -> None:
    """Readings of a counter with 32 bits that counts less than half its range between two of them, from where it can be
    told from a counter that has begun again: the upper half."""
    total, count = Total(), first
    total.read(count % 2**32)
    expected = 0
    for step in steps:
        before, count = count % 2**32, count + step
        wrapped = count % 2**32 < before
        if wrapped and not (before >= 2**31 and count % 2**32 < 2**31):
            return
        expected += step
        total.read(count % 2**32)
    assert total.value == expected


def test_a_counter_of_32_bits_wraps_around() -> None:
    """From 100 below 2^32 to 50."""
    assert increase(2**32 - 100, 50) == 150
    assert increase(2**31, 2**31 - 1) == 2**32 - 1
    assert increase(2**31 - 1, 50) == 50, "in the lower half it has begun again"


def test_a_counter_that_begins_again_has_counted_its_value() -> None:
    assert increase(10**12, 500) == 500
    assert increase(1000, 500) == 500


def test_a_rate_is_a_mean_over_the_window() -> None:
    """1,000 in the first second, 3,000 in each of the next ones."""
    rate = CounterRate(2.0)
    assert rate.per_s == 0.0
    rate.read(0.0, 0)
    assert rate.per_s == 0.0
    rate.read(1.0, 1000)
    assert rate.per_s == 1000.0
    rate.read(2.0, 4000)
    assert rate.per_s == 2000.0
    rate.read(3.0, 7000)
    assert rate.per_s == 3000.0


def test_another_incarnation_begins_with_0() -> None:
    """The second one has counted 700 after 7,000 of the first one, which is no wrap-around."""
    rate = CounterRate(10.0)
    rate.read(0.0, 4 * 10**9, 1)
    rate.read(1.0, 4 * 10**9 + 7000, 1)
    rate.read(2.0, 700, 2)
    assert rate.per_s == pytest.approx(3850.0)
    rate.read(3.0, 900, 2)
    assert rate.per_s == pytest.approx(7900 / 3)


def test_another_incarnation_counts_all_even_if_it_is_already_further() -> None:
    """A rank that has counted more than the one before it since it started."""
    rate = CounterRate(10.0)
    rate.read(0.0, 100, 1)
    rate.read(1.0, 250, 2)
    assert rate.per_s == 250.0


def test_a_clock_that_goes_back_begins_anew() -> None:
    """A reboot: neither a negative time nor the last value counts."""
    rate = CounterRate(10.0)
    rate.read(1000.0, 5000, 1)
    rate.read(2.0, 50, 2)
    assert rate.per_s == 0.0
    rate.read(3.0, 80, 2)
    rate.read(3.0, 999, 2)
    assert rate.per_s == 30.0
