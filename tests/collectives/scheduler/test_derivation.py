"""Derivation of a table from loads: laws over random groups, and worked examples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvroute.collectives.policy import Option
from kvroute.collectives.scheduler.derivation import (
    EXPONENTS,
    AllReduceDemand,
    Cell,
    Period,
    SchemeOption,
    derive,
    size_class,
)

LINKS = 4
SIZES = st.integers(EXPONENTS.start, EXPONENTS.stop - 1)


def over(
    *links: int, share: float = 1.0, latency_s: float = 0.0, slots: tuple[tuple[str, int], ...] = ()
) -> SchemeOption:
    """Return an option that puts `share` bytes on each of these links."""
    option = Option("x", np.array(sorted(links), np.int64), np.full(len(links), share))
    return SchemeOption(option, latency_s, 0.0, slots)


def of(
    demand: Mapping[Cell, AllReduceDemand],
    background: Sequence[float] = (0.0,) * LINKS,
    slots: Mapping[str, int] | None = None,
) -> Period:
    return Period(demand, np.full(LINKS, 1e9), np.array(background), 1.0, slots or {})


option = st.builds(
    lambda links, share, latency_s, slots: over(*links, share=share, latency_s=latency_s, slots=slots),
    st.sets(st.integers(0, LINKS - 1), min_size=1),
    st.floats(0.1, 2.0),
    st.floats(0.0, 1e-3),
    st.sampled_from([(), (("s", 3),), (("s", 5), ("t", 1))]),
)
group = st.lists(option, max_size=3).map(lambda more: [over(0), *more])
groups_ = st.lists(group, min_size=1, max_size=4)
backgrounds = st.lists(st.floats(0.0, 1.0), min_size=LINKS, max_size=LINKS)


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[list[SchemeOption]], Period, dict[Cell, int]]:
    """Groups, the loads of a period, and an earlier table."""
    groups = draw(groups_)
    cells = st.tuples(st.integers(0, len(groups) - 1), SIZES)
    demands = st.builds(AllReduceDemand, st.floats(1.0, 1e4), st.floats(1.0, 1e9))
    slots = draw(st.dictionaries(st.sampled_from(["s", "t"]), st.integers(0, 12)))
    period = of(draw(st.dictionaries(cells, demands, max_size=8)), draw(backgrounds), slots)
    previous = {}
    for cell in draw(st.sets(cells, max_size=8)):
        previous[cell] = draw(st.integers(0, len(groups[cell[0]]) - 1))
    return groups, period, previous


@given(situations())
def test_every_group_has_an_option_for_every_size_and_the_same_input_gives_the_same_table(
    situation: tuple[list[list[SchemeOption]], Period, dict[Cell, int]],
) -> None:
    groups, period, previous = situation
    found = derive(groups, period, previous)
    assert set(found) == {(number, exponent) for number in range(len(groups)) for exponent in EXPONENTS}
    assert all(0 <= found[cell] < len(groups[cell[0]]) for cell in found)
    shuffled = Period(
        dict(reversed(list(period.demand.items()))), period.capacity_bytes_per_s, period.background, 1.0, period.slots
    )
    assert derive(groups, shuffled, previous) == found


@given(situations())
def test_groups_never_get_more_slots_than_there_are(
    situation: tuple[list[list[SchemeOption]], Period, dict[Cell, int]],
) -> None:
    """A switch without slots, or one that does not answer, is used by no group."""
    groups, period, previous = situation
    used = {(cell[0], number) for cell, number in derive(groups, period, previous).items()}
    for switch in ("s", "t"):
        taken = sum(dict(groups[number][option].slots).get(switch, 0) for number, option in used)
        assert taken <= period.slots.get(switch, 0)


@given(groups_, backgrounds, st.floats(1e3, 1e9), SIZES, st.integers(0, 3), st.floats(0, 1))
def test_more_background_on_the_own_links_of_an_option_never_makes_it_chosen(
    groups: list[list[SchemeOption]], background: list[float], nbytes: float, exponent: int, number: int, more: float
) -> None:
    """An option that is not chosen stays so when other traffic on links that no other option uses grows."""
    choices = groups[0]
    number %= len(choices)
    others = {link for group, choice in enumerate(choices) if group != number for link in choice.option.links.tolist()}
    heavier = list(background)
    for link in set(choices[number].option.links.tolist()) - others:
        heavier[link] = max(background[link], more)
    demand, slots = {(0, exponent): AllReduceDemand(100.0, nbytes)}, {"s": 100, "t": 100}
    before = derive([choices], of(demand, background, slots), {})[0, exponent]
    after = derive([choices], of(demand, heavier, slots), {})[0, exponent]
    assert after != number or before == number


@given(st.integers(1, 12), st.integers(1, LINKS), st.floats(1e3, 1e10), st.integers(0, 5))
def test_equal_groups_spread_over_equal_links(count: int, links: int, nbytes: float, idle: int) -> None:
    """The loads of disjoint equal links differ by one group's demand at most, also if they are too high."""
    groups = [[over(link) for link in range(links)] for _ in range(count + idle)]
    demand = {(number, 20): AllReduceDemand(1.0, nbytes) for number in range(count)}
    chosen = derive(groups, of(demand), {})
    loads = [sum(chosen[number, 20] == link for number in range(count)) for link in range(links)]
    assert max(loads) - min(loads) <= 1


def test_the_largest_demand_is_placed_first() -> None:
    """Longest processing time first: 3 on one link, 2 + 2 on the other."""
    groups = [[over(0), over(1)] for _ in range(3)]
    chosen = derive(
        groups,
        of({(0, 20): AllReduceDemand(1, 2e8), (1, 20): AllReduceDemand(1, 2e8), (2, 20): AllReduceDemand(1, 3e8)}),
        {},
    )
    assert chosen[2, 20] == 0
    assert (chosen[0, 20], chosen[1, 20]) == (1, 1)


def test_latency_decides_for_small_tensors_and_bytes_for_large_ones() -> None:
    """50 us against 0.5 bytes less for each byte: equal at 100 kB on links of 1 GB/s."""
    groups = [[over(0, share=1.5), over(1, share=1.0, latency_s=5e-5)]]
    chosen = derive(groups, of({}), {})
    assert [chosen[0, exponent] for exponent in EXPONENTS] == [0 if e <= 16 else 1 for e in EXPONENTS]
    many = AllReduceDemand(1e4, 1e4 * 2**14)
    assert derive(groups, of({(0, 14): many}), {})[0, 14] == 0


def test_a_choice_changes_only_if_it_pays() -> None:
    """Background of 5 % moves nothing with a hysteresis of 10 %; 20 % does."""
    groups, demand = [[over(0), over(1)]], {(0, 20): AllReduceDemand(10, 1e8)}
    first = derive(groups, of(demand), {})
    assert first[0, 20] == 0
    assert derive(groups, of(demand, [0.05, 0, 0, 0]), first, 0.1)[0, 20] == 0
    assert derive(groups, of(demand, [0.05, 0, 0, 0]), first, 0.0)[0, 20] == 1
    assert derive(groups, of(demand, [0.2, 0, 0, 0]), first, 0.1)[0, 20] == 1


def test_a_group_with_slots_keeps_them_from_a_larger_one() -> None:
    """Two groups want the one place; the first one there stays, so the table does not flap."""
    groups = [[over(0), over(1, share=0.5, slots=(("s", 2),))], [over(2), over(3, share=0.5, slots=(("s", 2),))]]
    alone = derive(groups, of({(0, 20): AllReduceDemand(1, 1e8)}, slots={"s": 2}), {})
    assert alone[0, 20] == 1
    both = of({(0, 20): AllReduceDemand(1, 1e8), (1, 20): AllReduceDemand(1, 5e8)}, slots={"s": 2})
    later = derive(groups, both, alone)
    assert (later[0, 20], later[1, 20]) == (1, 0)
    fresh = derive(groups, both, {})
    assert (fresh[0, 20], fresh[1, 20]) == (0, 1)


@given(st.integers(0, 63))
def test_every_size_has_a_class(exponent: int) -> None:
    assert size_class(exponent) in EXPONENTS
    assert size_class(exponent) == exponent or exponent not in EXPONENTS
    assert math.isfinite(size_class(exponent))
