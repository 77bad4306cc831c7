"""Further terms of a choice: they are added to a cost in seconds, and break ties of any other cost."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from kvroute.policies import preferred
from kvroute.types import Choice, Terms

COUNT = 5
NAMES = tuple(f"d{number}" for number in range(COUNT))
costs = st.lists(st.integers(0, 4), min_size=COUNT, max_size=COUNT)
masks = st.lists(st.booleans(), min_size=COUNT, max_size=COUNT).filter(any)


def chosen(cost: list[int], feasible: list[bool], unit: str) -> Choice:
    """The choice of a policy: the cheapest feasible candidate, the first of equals."""
    index = int(np.where(feasible, cost, np.inf).argmin())
    return Choice(
        index, Terms(NAMES, np.array(cost, dtype=float), np.array(feasible), {"policy": np.zeros(COUNT)}, unit)
    )


@given(costs, masks, costs, costs)
def test_a_cost_in_seconds_gets_the_sum(cost: list[int], feasible: list[bool], one: list[int], two: list[int]) -> None:
    choice = preferred(chosen(cost, feasible, "s"), {"a_s": np.array(one, float), "b_s": -np.array(two, float)})
    whole = np.array(cost) + np.array(one) - np.array(two)
    assert choice.terms.cost.tolist() == whole.tolist()
    assert choice.index == int(np.where(feasible, whole, np.inf).argmin())
    assert feasible[choice.index]
    assert set(choice.terms.parts) == {"policy", "a_s", "b_s"}


@given(costs, masks, costs)
def test_another_cost_is_unchanged_and_only_equals_change_places(
    cost: list[int], feasible: list[bool], extra: list[int]
) -> None:
    before = chosen(cost, feasible, "score")
    after = preferred(before, {"a_s": np.array(extra, float)})
    assert after.terms.cost.tolist() == cost
    assert feasible[after.index]
    assert cost[after.index] == cost[before.index]
    equals = [extra[i] for i in range(COUNT) if feasible[i] and cost[i] == cost[before.index]]
    assert extra[after.index] == min(equals)


@given(costs, masks, st.integers(0, COUNT - 1), st.integers(1, 3))
def test_a_bonus_never_outweighs_a_larger_difference(
    cost: list[int], feasible: list[bool], favourite: int, bonus: int
) -> None:
    """The favourite wins if and only if it is at most the bonus above the cheapest, the first of equals."""
    assume(feasible[favourite])
    before = chosen(cost, feasible, "s")
    bonus_s = np.zeros(COUNT)
    bonus_s[favourite] = -float(bonus)
    after = preferred(before, {"bonus_s": bonus_s})
    assert after.index in (before.index, favourite)
    gap = cost[favourite] - cost[before.index]
    if gap != bonus:
        assert (after.index == favourite) is (gap < bonus or before.index == favourite)
