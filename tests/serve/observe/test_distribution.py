"""Distributions of times that can be added: their quantiles beside those of the times themselves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.serve.observe.distribution import Distribution, counts_of

TIMES = st.lists(st.floats(0.0, 1e4) | st.sampled_from([0.0, 1e-6, 0.25]), max_size=60)
SHARES = st.floats(0.001, 1.0)
EXACT = 0.0051
"""Relative error: half a bin."""


@given(TIMES, SHARES)
def test_a_quantile_is_right_to_half_a_percent(times: list[float], share: float) -> None:
    """With and without interpolation; times up to 1 us are 0."""
    found = Distribution([counts_of(np.array(times))])
    assert found.count == len(times)
    if not times:
        assert (found.quantile_s(share), found.least_above_s(share)) == (0.0, None)
        return
    assert found.quantile_s(share) == pytest.approx(float(np.quantile(times, share)), rel=EXACT, abs=1.1e-6)
    above = float(np.quantile(times, share, method="inverted_cdf"))
    assert found.least_above_s(share) == pytest.approx(above, rel=EXACT, abs=1.1e-6)


@given(st.lists(TIMES, max_size=4), SHARES)
def test_the_sum_of_parts_is_the_whole(parts: list[list[float]], share: float) -> None:
    """However the times are divided."""
    merged = Distribution([counts_of(np.array(part)) for part in parts])
    whole = Distribution([counts_of(np.array([ttft_s for part in parts for ttft_s in part]))])
    assert merged.count == whole.count
    assert merged.quantile_s(share) == whole.quantile_s(share)
    assert merged.least_above_s(share) == whole.least_above_s(share)


def test_counts_of_many_times_are_short() -> None:
    """They travel once per second: 4,096 times between 1 ms and 100 s take less than 5 KB."""
    times_s = np.geomspace(1e-3, 100.0, 4096)
    assert len(counts_of(times_s)) < 5_000
    assert Distribution([counts_of(times_s)] * 16).count == 16 * 4096
