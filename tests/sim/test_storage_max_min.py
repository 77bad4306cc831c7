"""The fast storage simulation against the max-min mode, which shares no code with it but the policies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sim.storage_max_min import run_max_min
from tests.sim.test_storage_run import CLUSTER, MODEL, TURNS, agents, trajectories

from kvroute.policies.storage.dualpath import ABLATION
from kvroute.sim.storage.run import run_agents
from kvroute.sim.storage.spec import AgentRun


def growing_agents(step: str, count: int, **changes: float) -> AgentRun:
    """Return agents with twelve turns each, of different lengths, that start within a second."""
    generator = np.random.default_rng(7)
    made = trajectories(
        *([tuple(row) for row in generator.integers((50, 5), (900, 60), (12, 2)).tolist()] for _ in range(9))
    )
    cluster = replace(CLUSTER, compute_bytes_per_s=20e9, **changes)  # type: ignore[arg-type]  # floats only
    starts = np.sort(generator.uniform(0.0, 1.0, count))
    return agents(made, count, ABLATION[step], cluster=cluster, start_s=starts)


@pytest.mark.parametrize("step", ABLATION)
@pytest.mark.parametrize("storage_bytes_per_s", [4e8, 1e10])
def test_both_modes_agree_on_the_job_completion_time(step: str, storage_bytes_per_s: float) -> None:
    """Storage is the limit in one case and compute in the other."""
    run = growing_agents(step, 40, storage_bytes_per_s=storage_bytes_per_s)
    fast, slow = run_agents(run), run_max_min(run)
    assert fast.turns == slow.turns
    assert fast.end_s == pytest.approx(slow.end_s, rel=0.05)
    assert float(fast.ttft_s.mean()) == pytest.approx(slow.ttft_mean_s, rel=0.2)
    assert fast.read_bytes.sum() == pytest.approx(sum(slow.read_bytes))


def test_both_modes_put_the_systems_in_the_same_order() -> None:
    steps = ("basic", "layerwise", "dual-path", "split-reads", "oracle")
    runs = [growing_agents(step, 60, storage_bytes_per_s=3e8) for step in steps]
    fast, slow = ([mode(run).end_s for run in runs] for mode in (run_agents, run_max_min))
    assert np.argsort(fast).tolist() == np.argsort(slow).tolist()


@settings(max_examples=40, deadline=None)
@given(TURNS, st.integers(1, 12), st.sampled_from(sorted(ABLATION)))
def test_both_modes_end_every_turn_and_read_the_same_bytes(
    turns: list[list[tuple[int, int]]], count: int, step: str
) -> None:
    made = trajectories(*turns)
    cluster = replace(CLUSTER, buffer_bytes=1.5 * made.longest_tokens * MODEL.kv_bytes)
    run = agents(made, count, ABLATION[step], cluster=cluster, model=replace(MODEL, sequences_max=1))
    fast, slow = run_agents(run), run_max_min(run)
    assert fast.turns == slow.turns
    assert fast.read_bytes.sum() == pytest.approx(sum(slow.read_bytes))
