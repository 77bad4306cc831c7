"""Tests of `kvroute.sim.workload.trajectories`."""

from __future__ import annotations

import numpy as np
import pytest

from kvroute.sim.workload.trajectories import TABLE_2, Trajectories, generate_trajectories, statistics_of


@pytest.mark.parametrize("name", sorted(TABLE_2))
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_column_of_table_2_is_within_one_percent(name: str, seed: int) -> None:
    wanted = TABLE_2[name]
    trajectories = generate_trajectories(wanted, seed)
    measured = statistics_of(trajectories, wanted.tokens_max)
    for column in ("turns", "appended", "generated", "total", "context"):
        assert getattr(measured, column) == pytest.approx(getattr(wanted, column), rel=0.01), column
    assert len(trajectories) == 500
    assert trajectories.longest_tokens <= 1.01 * wanted.tokens_max
    assert min((trajectories.prompt - trajectories.cached).min(), trajectories.generated.min()) >= 1


def test_statistics_follow_their_definitions() -> None:
    """Recomputed turn by turn."""
    trajectories = generate_trajectories(TABLE_2["32K"], seed=4, count=20)
    means, totals, contexts = [], [], []
    for number in range(len(trajectories)):
        first, last = trajectories.start[number : number + 2]
        context = 0
        for turn in range(first, last):
            contexts.append(context)
            assert trajectories.cached[turn] == context
            context = trajectories.prompt[turn] + trajectories.generated[turn]
        totals.append(context)
        means.append((trajectories.prompt - trajectories.cached)[first:last].mean())
    measured = statistics_of(trajectories, 32_768)
    assert measured.total == pytest.approx(np.mean(totals))
    assert measured.appended == pytest.approx(np.mean(means))
    assert measured.context == pytest.approx(np.mean(contexts))


def test_scaled_trajectories_are_cut_at_their_maximum() -> None:
    trajectories = Trajectories.growing(np.array([10, 20, 30, 5]), np.array([1, 1, 1, 5]), np.array([0, 3, 4]))
    assert trajectories.prompt.tolist() == [10, 31, 62, 5]
    assert trajectories.cached.tolist() == [0, 11, 32, 0]
    scaled = trajectories.scaled(2.0, 3.0, tokens_max=70)
    assert scaled.prompt.tolist() == [20, 63, 10]
    assert scaled.cached.tolist() == [0, 23, 0]
    assert scaled.generated.tolist() == [3, 3, 15]
    assert scaled.start.tolist() == [0, 2, 3]


def test_the_same_seed_gives_the_same_trajectories() -> None:
    first, second, other = (generate_trajectories(TABLE_2["32K"], seed) for seed in (1, 1, 2))
    assert np.array_equal(first.prompt, second.prompt)
    assert not np.array_equal(first.prompt[:50], other.prompt[:50])
