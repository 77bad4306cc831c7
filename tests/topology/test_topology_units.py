"""Units: every accepted text gives SI numbers, every written number reads back to itself, invalid text is rejected."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.topology import bandwidth_bytes_per_s, bandwidth_text, duration_s, duration_text, size_bytes, size_text
from kvroute.types import InputError
from kvroute_engine.files.units import (
    Bandwidth,
    Duration,
    Size,
    about_bandwidth,
    about_duration,
    about_size,
)

Reader = Callable[[str], float]
READERS: list[Reader] = [bandwidth_bytes_per_s, duration_s, size_bytes]


@given(st.floats(125.0, 12.5e12))
def test_bandwidth_text_reads_back_to_itself(bytes_per_s: float) -> None:
    assert bandwidth_bytes_per_s(bandwidth_text(bytes_per_s)) == bytes_per_s


@given(st.floats(0.0, 1e7))
def test_duration_text_reads_back_to_itself(seconds: float) -> None:
    assert duration_s(duration_text(seconds)) == seconds


@given(st.floats(1.0, 1e18))
def test_size_text_reads_back_to_itself(nbytes: float) -> None:
    assert size_bytes(size_text(nbytes)) == nbytes


@given(st.text(max_size=20), st.sampled_from(READERS))
def test_any_text_is_a_finite_number_or_rejected(text: str, read: Reader) -> None:
    try:
        value = read(text)
    except InputError:
        return
    assert math.isfinite(value)
    assert value >= 0


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (bandwidth_bytes_per_s, "100 Gbps", 12.5e9),
        (bandwidth_bytes_per_s, "100 Gb/s", 12.5e9),
        (bandwidth_bytes_per_s, "450 GB/s", 450e9),
        (bandwidth_bytes_per_s, "1e2Gbps", 12.5e9),
        (bandwidth_bytes_per_s, "1 GiB/s", 2.0**30),
        (duration_s, "3 us", 3e-6),
        (duration_s, "3 µs", 3e-6),
        (duration_s, "0.1 ms", 1e-4),
        (duration_s, "0 s", 0.0),
        (duration_s, "2 min", 120.0),
        (size_bytes, "80 GB", 80e9),
        (size_bytes, "160 GiB", 160 * 2.0**30),
    ],
)
def test_units_by_hand(read: Reader, text: str, value: float) -> None:
    assert read(text) == value


@pytest.mark.parametrize(
    ("read", "text", "why"),
    [
        (bandwidth_bytes_per_s, "100 Gb", "the unit 'Gb'.*Gbps"),
        (bandwidth_bytes_per_s, "100", "has no unit"),
        (bandwidth_bytes_per_s, "nan Gbps", "not a bandwidth"),
        (bandwidth_bytes_per_s, "inf Gbps", "not a bandwidth"),
        (bandwidth_bytes_per_s, "0 Gbps", "out of range"),
        (bandwidth_bytes_per_s, "-1 Gbps", "out of range"),
        (bandwidth_bytes_per_s, "101 Tbps", "out of range"),
        (bandwidth_bytes_per_s, "0.9 Kbps", "out of range"),
        (duration_s, "3 Gbps", "the unit 'Gbps'"),
        (duration_s, "-3 us", "out of range"),
        (duration_s, "1e999 s", "out of range"),
        (duration_s, "", "not a duration"),
        (size_bytes, "0 B", "out of range"),
        (size_bytes, "80 Gb", "the unit 'Gb'"),
    ],
)
def test_invalid_text_is_rejected(read: Reader, text: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        read(text)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("kind", [Bandwidth, Duration, Size])
def test_numbers_out_of_range_are_rejected(kind: type[Bandwidth] | type[Duration] | type[Size], value: float) -> None:
    with pytest.raises(InputError, match="out of range"):
        kind(value)


def test_text_has_the_usual_form() -> None:
    assert [bandwidth_text(x) for x in (12.5e9, 450e9, 3.125e9, 1e9)] == ["100 Gbps", "450 GB/s", "25 Gbps", "8 Gbps"]
    assert [duration_text(x) for x in (3e-6, 12.5e-3, 0.0, 9e-5, 60.0)] == ["3 us", "12.5 ms", "0 s", "90 us", "60 s"]
    assert [size_text(x) for x in (180e9, 160 * 2.0**30)] == ["180 GB", "160 GiB"]


@given(st.floats(1e-9, 1e15))
def test_approximate_text_is_within_half_a_percent(value: float) -> None:
    """Three significant figures, in a unit that cluster files accept."""
    for about, read in (
        (about_bandwidth, bandwidth_bytes_per_s),
        (about_size, size_bytes),
        (about_duration, duration_s),
    ):
        try:
            exact = read(about(value).replace(",", ""))
        except InputError:
            continue  # beyond the range of a file
        assert exact == pytest.approx(value, rel=6e-3)


def test_approximate_text_has_the_usual_unit() -> None:
    """Bandwidth is always in bits, so that two values can be compared at a glance; there is never an exponent."""
    assert [about_bandwidth(value) for value in (4e11, 1.13913e10, 0.0, 12.5e6)] == [
        "3.2 Tbps", "91.1 Gbps", "0 bps", "100 Mbps"
    ]  # fmt: skip
    assert [about_size(value) for value in (1.67772e7, 5e9, 999.9, 9.996e5)] == ["16.8 MB", "5 GB", "1 KB", "1 MB"]
    assert [about_duration(value) for value in (0.0123, 145.2, 4000.0, 2e-7, 0.0)] == [
        "12.3 ms", "145 s", "4,000 s", "200 ns", "0 s"
    ]  # fmt: skip
