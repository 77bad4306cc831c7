"""Calibration: deciles contain every request once, in the order of the predictions, and parts can be joined."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.control import Calibration, calibration_deciles, joined_calibration

pairs = st.lists(st.tuples(st.floats(0.0, 100.0), st.floats(0.0, 100.0)), min_size=1, max_size=80)


@given(pairs)
def test_every_request_is_in_one_decile(found: list[tuple[float, float]]) -> None:
    """Sums are kept, sizes differ by one at most, and predictions ascend."""
    predicted_s, actual_s = np.array(found).T
    rows = calibration_deciles(predicted_s, actual_s)
    sizes = [row.requests for row in rows]
    assert sum(sizes) == len(found)
    assert max(sizes) - min(sizes) <= 1
    assert sum(row.requests * row.actual_s for row in rows) == pytest.approx(actual_s.sum())
    assert all(first.predicted_s <= other.predicted_s + 1e-9 for first, other in pairwise(rows))


@given(st.lists(pairs, min_size=1, max_size=4))
def test_rows_of_several_processes_are_joined_without_loss(parts: list[list[tuple[float, float]]]) -> None:
    """The number of requests and the sums are those of all parts."""
    rows = [calibration_deciles(*np.array(part).T) for part in parts]
    joined = joined_calibration(rows)
    assert len(joined) <= 10
    assert sum(row.requests for row in joined) == sum(map(len, parts))
    actual_s = sum(seconds for part in parts for _, seconds in part)
    assert sum(row.requests * row.actual_s for row in joined) == pytest.approx(actual_s)


def test_only_the_last_requests_are_kept() -> None:
    """An estimate that was wrong long ago does not count for ever."""
    calibration = Calibration(most=4)
    assert calibration.rows() == ()
    for number in range(6):
        calibration.add(1.0, float(number))
    assert [row.actual_s for row in calibration.rows()] == [4.0, 5.0, 2.0, 3.0]
    assert calibration.rows()[0].ratio == 4.0
