"""The router's view of cached prefixes: an answer that is kept for the next question follows every change."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.control.test_aggregated import TEXT

from kvroute import llm
from kvroute.control.state.caches import PrefixCaches
from kvroute.topology import parse
from kvroute.types import Request

BLOCK = 16
CHAIN, OTHER = tuple(range(1, 9)), tuple(range(101, 109))
steps = st.lists(
    st.tuples(
        st.sampled_from(("stored", "evicted", "cleared", "left")), st.integers(0, 3), st.integers(0, len(CHAIN) - 1)
    ),
    min_size=1,
    max_size=12,
)


@given(steps)
def test_a_repeated_question_gets_the_answer_of_the_moment(changes: list[tuple[str, int, int]]) -> None:
    """The same chain before and after each change; the depths are those of the changes so far."""
    instances = parse(TEXT).instances
    models = {instance.model: llm.model(instance.model) for instance in instances}
    caches, ids, depths = PrefixCaches(instances, models, 0), np.arange(len(instances)), [0] * len(instances)
    for change, index, keep in changes:
        if change == "stored":
            caches.stored(index, CHAIN[: keep + 1])
            depths[index] = max(depths[index], keep + 1)
        elif change == "evicted":
            caches.evicted(index, CHAIN, keep)
            depths[index] = min(depths[index], keep)
        elif change == "cleared":
            caches.cleared(index)
            depths[index] = 0
        else:  # another instance takes its place
            caches.change(instances, models, np.where(ids == index, -1, ids))
            depths[index] = 0
        assert held_of(caches, CHAIN, len(ids)) == depths
        assert held_of(caches, OTHER, len(ids)) == [0] * len(ids)
        assert held_of(caches, CHAIN, len(ids)) == depths


def test_an_instance_that_joins_counts_at_once() -> None:
    """The index has one column more than at the question before."""
    instances = parse(TEXT).instances
    models = {instance.model: llm.model(instance.model) for instance in instances}
    caches = PrefixCaches(instances[:3], models, 0)
    caches.stored(2, CHAIN)
    assert held_of(caches, CHAIN, 3) == [0, 0, len(CHAIN)]
    caches.change(instances, models, np.array([0, 1, 2, -1]))
    assert held_of(caches, CHAIN, 4) == [0, 0, len(CHAIN), 0]


def held_of(caches: PrefixCaches, chain: tuple[int, ...], instances: int) -> list[int]:
    """Return the number of blocks of a chain that each instance holds."""
    request = Request(id=1, input_tokens=len(chain) * BLOCK, blocks=chain, block_tokens=BLOCK)
    tokens: list[int] = caches.hit_tokens(request, np.arange(instances), request.input_tokens).tolist()
    return [token // BLOCK for token in tokens]
