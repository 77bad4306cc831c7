"""A table once per period: what it knows, and when."""

from __future__ import annotations

import numpy as np
import pytest

from kvroute.collectives.policy import Option
from kvroute.sim.groups.periodic_table import PeriodicTable

PERIOD_S = 0.01
OPTIONS = [[Option(f"link {link}", np.array([link]), np.array([1.0])) for link in (0, 1)] for _ in range(2)]


def reduce(table: PeriodicTable, at: float, group: int, nbytes: float = 1e6) -> int:
    ticket, number = table.start(at, group, nbytes)
    table.finish(ticket)
    return number


def test_choices_change_at_the_end_of_a_period_only() -> None:
    """Before, both groups use the same link; afterwards each has one of its own."""
    table = PeriodicTable(OPTIONS, np.full(2, 1e9), PERIOD_S)
    for step in range(1, 10):
        at = step * 1e-3
        assert [reduce(table, at, group) for group in (0, 1)] == [0, 0]
        table.measured(at, np.array([2e6, 0.0]))
    table.measured(PERIOD_S, np.zeros(2))
    assert sorted(reduce(table, PERIOD_S, group) for group in (0, 1)) == [0, 1]


def test_other_traffic_is_avoided_from_the_next_period_on() -> None:
    """Counters show 9 MB in 10 ms on a link of 1 GB/s, of which 1 MB is the group's own."""
    table = PeriodicTable(OPTIONS[:1], np.full(2, 1e9), PERIOD_S)
    assert reduce(table, 0.001, 0) == 0
    table.measured(0.005, np.array([5e6, 0.0]))
    assert reduce(table, 0.006, 0) == 0
    table.measured(PERIOD_S, np.array([5e6, 0.0]))
    assert reduce(table, 0.011, 0) == 1


def test_own_traffic_alone_is_no_background() -> None:
    """A group with a demand alone stays where it is."""
    table = PeriodicTable(OPTIONS[:1], np.full(2, 1e9), PERIOD_S)
    for period in range(1, 6):
        assert reduce(table, (period - 0.5) * PERIOD_S, 0, 9e6) == 0
        table.measured(period * PERIOD_S, np.array([9e6, 0.0]))


def test_every_size_has_an_entry() -> None:
    table = PeriodicTable(OPTIONS, np.full(2, 1e9), PERIOD_S)
    assert {reduce(table, 0.0, 1, nbytes) for nbytes in (1.0, 1e3, 1e6, 1e12)} == {0}
    with pytest.raises(KeyError):
        table.finish(99)
