"""Laws of the policies for all-reduces: gaps between links, debits, seeds, and the error of the published table."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.collectives import Aggregation, AllReduce, all_reduce
from kvroute.collectives.policy import (
    COLLECTIVE_POLICIES,
    CollectiveScheduler,
    CorrectedTable,
    LinkLoads,
    Option,
    UtilisationTable,
)
from kvroute.topology import load
from kvroute.types import InputError


def option(*links: int, share: float = 1.0) -> Option:
    return Option(f"over {links}", np.array(links), np.full(len(links), share))


def disjoint(count: int, groups: int = 1) -> list[list[Option]]:
    """Every group may use each of `count` links."""
    return [[option(link) for link in range(count)] for _ in range(groups)]


sizes = st.floats(1e3, 1e8)


@given(
    count=st.integers(2, 6),
    nbytes=sizes,
    events=st.lists(st.booleans(), min_size=1, max_size=120),
    data=st.data(),
)
def test_the_gap_between_equal_links_is_at_most_one_increment(
    count: int, nbytes: float, events: list[bool], data: st.DataObject
) -> None:
    """Sequential decisions without completions on disjoint equal links: outstanding bytes differ by one tensor at
    most; with completions the next decision takes a link with the least bytes."""
    scheduler = CollectiveScheduler(disjoint(count, 3), np.full(count, 1e10))
    for _ in events:
        group = data.draw(st.integers(0, 2))
        scheduler.start(0.0, group, nbytes)
        bytes_ = scheduler.loads.outstanding_bytes
        assert bytes_.max() - bytes_.min() <= nbytes * (1 + 1e-9)


@given(
    count=st.integers(2, 6),
    tensors=st.lists(sizes, min_size=1, max_size=60),
    policy=st.sampled_from(COLLECTIVE_POLICIES),
)
def test_debits_return_to_nothing(count: int, tensors: list[float], policy: str) -> None:
    """When all tensors are reduced, in any order of sizes, no byte is outstanding; none is ever negative."""
    scheduler = CollectiveScheduler(disjoint(count), np.full(count, 1e10), policy, seed=1)
    tickets = [scheduler.start(number * 1e-4, 0, nbytes)[0] for number, nbytes in enumerate(tensors)]
    for ticket in sorted(tickets, key=lambda number: tensors[number - 1]):
        scheduler.finish(ticket)
        scheduler.finish(ticket)
        assert (scheduler.loads.outstanding_bytes >= 0).all()
    assert scheduler.loads.outstanding_bytes.max() <= 1e-6 * max(tensors)


@given(
    tensors=st.lists(sizes, min_size=1, max_size=40),
    policy=st.sampled_from(COLLECTIVE_POLICIES),
    seed=st.integers(0, 5),
)
def test_the_same_seed_decides_the_same(tensors: list[float], policy: str, seed: int) -> None:
    schedulers = [CollectiveScheduler(disjoint(4, 2), np.full(4, 1e10), policy, seed) for _ in range(2)]
    found = [
        [scheduler.start(number * 1e-4, number % 2, nbytes)[1] for number, nbytes in enumerate(tensors)]
        for scheduler in schedulers
    ]
    assert found[0] == found[1]


@given(
    loads=st.lists(st.floats(0, 1e9), min_size=5, max_size=5),
    background=st.lists(st.floats(0, 0.9), min_size=5, max_size=5),
    shares=st.lists(st.lists(st.floats(0.1, 2), min_size=5, max_size=5), min_size=1, max_size=4),
    nbytes=sizes,
)
def test_the_default_takes_the_option_that_ends_first(
    loads: list[float], background: list[float], shares: list[list[float]], nbytes: float
) -> None:
    """A slow version, link by link, finds the same option."""
    options = [Option(str(number), np.arange(5), np.array(share)) for number, share in enumerate(shares)]
    capacity = np.array([1e9, 2e9, 3e9, 4e9, 5e9])
    scheduler = CollectiveScheduler([options], capacity)
    scheduler.loads.outstanding_bytes[:] = loads
    scheduler.loads.background[:] = background
    slow = [
        max((loads[link] + share[link] * nbytes) / (capacity[link] * (1 - background[link])) for link in range(5))
        for share in shares
    ]
    _, number = scheduler.start(0.0, 0, nbytes)
    assert slow[number] == pytest.approx(min(slow))


def test_a_background_moves_tensors_to_the_idle_link() -> None:
    """Link 0 carries other traffic at 80 %: three of four tensors take link 1 until it has as much to do."""
    scheduler = CollectiveScheduler(disjoint(2), np.full(2, 1e9))
    scheduler.measured(1.0, np.array([0.8e9, 0.0]))
    assert scheduler.loads.background.tolist() == [0.8, 0.0]
    found = [scheduler.start(1.0, 0, 1e6)[1] for _ in range(12)]
    assert found.count(1) == 10


def test_own_traffic_is_no_background() -> None:
    """Counters contain the bytes of tensors that were reduced since the last ones."""
    scheduler = CollectiveScheduler(disjoint(2), np.full(2, 1e9))
    ticket, number = scheduler.start(0.0, 0, 4e8)
    scheduler.finish(ticket)
    counted = np.zeros(2)
    counted[number] = 4e8
    scheduler.measured(1.0, counted)
    assert scheduler.loads.background.tolist() == [0.0, 0.0]
    scheduler.measured(2.0, counted)
    assert scheduler.loads.background[number] == pytest.approx(0.4)


def test_slots_are_a_link() -> None:
    """An option whose slots are busy costs as much as one with a busy cable."""
    cable, slots, other = 0, 1, 2
    choices = [option(cable, slots), option(other)]
    scheduler = CollectiveScheduler([choices, [option(slots)]], np.array([1e10, 1e9, 2e9]))
    scheduler.start(0.0, 1, 1e8)
    assert scheduler.start(0.0, 0, 1e8)[1] == 1


def test_the_published_table_prefers_the_busier_option() -> None:
    """With k = D / (T C) = 1, an option with b = 1 costs 2 and one with b = 0.1 costs 10.1."""
    table = UtilisationTable(disjoint(2), window_s=1e-3)
    capacity = np.full(2, 1e9)
    loads = LinkLoads(capacity)
    table._cost[0][:] = [0.1, 1.0]
    assert table.choose(0.0, 0, 1e6, loads) == 1
    corrected = CorrectedTable(disjoint(2), 2, window_s=1e-3)
    corrected._virtual[:] = [0.1, 1.0]
    assert corrected.choose(0.0, 0, 1e6, loads) == 0


def test_the_published_table_never_decays() -> None:
    """The cost of an option only grows; the corrected one returns to 0 within some windows."""
    table, corrected = UtilisationTable(disjoint(2)), CorrectedTable(disjoint(2), 2)
    loads = LinkLoads(np.full(2, 1e9))
    before = 0.0
    for number in range(50):
        table.choose(float(number), 0, 1e6, loads)
        assert sum(table._cost[0]) > before
        before = float(sum(table._cost[0]))
    corrected.choose(0.0, 0, 1e6, loads)
    corrected.choose(1.0, 0, 0.0, loads)
    assert corrected._virtual.max() < 1e-12


def test_penalties_weight_links_by_their_available_bandwidth() -> None:
    """Eq. 18: of two shared links the congested one counts less."""
    choices = [[option(0, 1), option(0, 2)]]
    table = UtilisationTable(choices, smoothing=1.0)
    table.measured(LinkLoads(np.full(3, 1e9)), np.array([0.9, 0.0, 0.0]))
    assert table._penalty[0, 0][0][1] == pytest.approx(0.1 / 1.1)


def test_options_come_from_schemes() -> None:
    """A ring over two servers puts its bytes on both NICs; the option has them for one byte."""
    cluster = load("examples/small.yaml")
    found = all_reduce("ring", AllReduce(((0, 0), (1, 0)), 1e6), cluster, Aggregation())
    assert found is not None
    made = Option.of(found, 1e6)
    assert made.name == "ring"
    assert made.share.tolist() == pytest.approx([1.0] * len(made.links))


def test_wrong_names_and_groups_are_one_sentence() -> None:
    with pytest.raises(InputError, match="'random' is not a policy for all-reduces"):
        CollectiveScheduler(disjoint(2), np.ones(2), "random")
    with pytest.raises(InputError, match="group 1 has no option"):
        CollectiveScheduler([*disjoint(2), []], np.ones(2))
    assert math.isfinite(CollectiveScheduler(disjoint(2), np.ones(2)).start(0.0, 0, 1.0)[1])
