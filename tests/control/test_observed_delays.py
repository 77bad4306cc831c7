"""Delays compared with their predictions: worked examples, and laws over random histories."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.control.learning.observed_delays import ObservedDelays

LEAST, MOST = 0.5, 20.0


def delays() -> ObservedDelays:
    return ObservedDelays(LEAST, MOST)


def test_the_factor_approaches_the_observed_one() -> None:
    """The prior is two seconds that were as predicted: after ten delays of three seconds in place of one second the
    factor is (0.97^10 * 2 + 3 * sum) / (0.97^10 * 2 + sum), with the sum of 0.97^k for k below 10."""
    observed = delays()
    assert observed.factor(0.0) == 1.0
    for _ in range(10):
        observed.learn(3.0, 1.0)
    kept, recent = 0.97**10 * 2.0, sum(0.97**number for number in range(10))
    assert observed.factor(0.0) == pytest.approx((kept + 3.0 * recent) / (kept + recent))


def test_delays_in_progress_count_once_they_are_late() -> None:
    """Two delays of one second have been in progress for 21 s: with the prior of two seconds (42 s) / (2 s + 2 s)."""
    observed = delays()
    observed.begin(0.0, 1.0)
    observed.begin(0.0, 1.0)
    assert observed.factor(2.0) == 1.0
    assert observed.factor(21.0) == pytest.approx(42.0 / 4.0)
    observed.drop(0.0, 1.0)
    observed.drop(0.0, 1.0)
    assert observed.factor(21.0) == 1.0


def test_a_delay_that_was_not_predicted_teaches_nothing() -> None:
    observed = delays()
    observed.begin(0.0, 0.0)
    observed.end(100.0, 0.0, 0.0)
    observed.learn(100.0, 0.0)
    assert observed == delays()


@given(
    histories=st.lists(st.tuples(st.floats(0.0, 100.0), st.floats(0.0, 50.0), st.floats(0.0, 10.0), st.booleans())),
    at=st.floats(0.0, 200.0),
)
def test_the_factor_stays_within_its_bounds_and_nothing_remains_in_progress(
    histories: list[tuple[float, float, float, bool]], at: float
) -> None:
    """Every delay begins, and ends or is dropped, in any order; the factor then depends only on those that ended."""
    observed, ended = delays(), delays()
    for began_s, _, predicted_s, _ in histories:
        observed.begin(began_s, predicted_s)
        assert LEAST <= observed.factor(at) <= MOST
    for began_s, lasted_s, predicted_s, ends in reversed(histories):
        if ends:
            observed.end(began_s + lasted_s, began_s, predicted_s)
            ended.learn(began_s + lasted_s - began_s, predicted_s)
        else:
            observed.drop(began_s, predicted_s)
        assert LEAST <= observed.factor(at) <= MOST
    assert observed == ended
