"""Tests of `kvroute.sim.storage`: agents that read their cached KV from storage."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.policies.storage.dualpath import ABLATION, DualPathSpec
from kvroute.policies.storage.dualpath_kernels import AttentionCost, attention_s
from kvroute.sim.storage.run import StorageResult, run_agents
from kvroute.sim.storage.spec import AgentRun, ServedModel, StorageCluster
from kvroute.sim.workload.trajectories import Trajectories
from kvroute.types import InputError

COST = AttentionCost(token_s=1e-6, context_s=1e-9, attended_s=0.0, attended_tokens=math.inf)
MODEL = ServedModel(
    name="small",
    kv_bytes=1e5,
    attention=COST,
    dense_token_s=1e-5,
    forward_s=0.01,
    step_s=0.02,
    sequence_s=0.001,
    prefill_kv_tokens=100_000,
    decode_kv_tokens=100_000,
)
CLUSTER = StorageCluster(
    prefill_nodes=1,
    decode_nodes=2,
    gpus=2,
    prefill_group=2,
    decode_group=2,
    storage_bytes_per_s=1e9,
    compute_bytes_per_s=4e9,
)


def trajectories(*turns: list[tuple[int, int]]) -> Trajectories:
    """Return trajectories of (appended, generated) turns."""
    flat = [turn for session in turns for turn in session]
    start = np.concatenate([[0], np.cumsum([len(session) for session in turns])])
    appended, generated = np.array(flat).T
    return Trajectories.growing(appended.copy(), generated.copy(), start)


def agents(turns: Trajectories, count: int, policy: DualPathSpec, **changes: Any) -> AgentRun:
    settings: dict[str, Any] = {"cluster": CLUSTER, "model": MODEL, "start_s": np.zeros(count)} | changes
    return AgentRun(policy=policy, trajectories=turns, trajectory=np.arange(count) % len(turns), **settings)


def hit_bytes(run: AgentRun) -> float:
    """Return the KV that all agents read, turn by turn."""
    tokens, turns = 0, run.trajectories
    for number in run.trajectory:
        context = 0
        for turn in range(turns.start[number], turns.start[number + 1]):
            tokens += context - context % run.model.block_tokens
            context = int(turns.prompt[turn] + turns.generated[turn])
    return tokens * run.model.kv_bytes


TURNS = st.lists(
    st.lists(st.tuples(st.integers(1, 2000), st.integers(1, 100)), min_size=1, max_size=8), min_size=1, max_size=4
)


@settings(max_examples=60, deadline=None)
@given(TURNS, st.integers(1, 30), st.sampled_from(sorted(ABLATION)), st.sampled_from([1, 2]), st.integers(3, 20))
def test_every_turn_ends_once_and_every_byte_is_read_once(
    turns: list[list[tuple[int, int]]], count: int, step: str, sequences_max: int, buffer_blocks: int
) -> None:
    """Also with hardly any room: buffers for few requests, and one or two sequences per decode GPU."""
    made = trajectories(*turns)
    model = replace(MODEL, sequences_max=sequences_max, decode_kv_tokens=made.longest_tokens)
    cluster = replace(CLUSTER, buffer_bytes=made.longest_tokens * MODEL.kv_bytes * (1 + buffer_blocks / 20))
    run = agents(made, count, ABLATION[step], model=model, cluster=cluster)
    result = run_agents(run)
    assert result.agents == count
    assert result.turns == sum(np.diff(made.start)[run.trajectory])
    assert result.read_bytes.sum() == pytest.approx(0.0 if step == "oracle" else hit_bytes(run))
    assert np.isfinite(result.agent_s).all()
    assert (result.ttft_s > 0).all()
    assert result.end_s == pytest.approx(result.agent_s.max())
    waits = result.phases
    parts = [waits.scheduling_s, waits.allocation_s, waits.reading_s, waits.prefill_s, waits.decode_s]
    assert min(parts) >= 0
    assert sum(parts) * result.turns == pytest.approx(result.agent_s.sum())
    assert sum(parts[:4]) * result.turns == pytest.approx(result.ttft_s.sum(), rel=1e-5)


@pytest.mark.parametrize("step", sorted(ABLATION))
def test_the_same_run_gives_the_same_result(step: str) -> None:
    made = trajectories([(500, 20)] * 10, [(1500, 5)] * 4)
    first, second = (run_agents(agents(made, 20, ABLATION[step])) for _ in range(2))
    assert first.end_s == second.end_s
    assert np.array_equal(first.ttft_s, second.ttft_s)


def test_a_lone_agent_takes_the_time_of_each_step() -> None:
    """Two turns of one agent without waiting: read, forward pass, copy to the decode GPU, decode steps."""
    made = trajectories([(1000, 30), (500, 11)])
    result = run_agents(agents(made, 1, ABLATION["layerwise"]))
    step_s = MODEL.step_s + MODEL.sequence_s
    copy_s = 1000 * 1e5 / 4e9
    first_s = max(0.01 + attention_s(0, 1000, COST) + 1000 * 1e-5 / 2, copy_s)
    assert result.ttft_s[0] == pytest.approx(first_s)
    assert result.ttst_s[0] == pytest.approx(copy_s + step_s)
    assert result.tpot_s[0] == pytest.approx((copy_s + 29 * step_s) / 29)
    hit = 1030 - 1030 % 64
    new = 1530 - hit
    read_s = hit * 1e5 / 1e9
    compute_s = 0.01 + attention_s(hit, new, COST) + new * 1e-5 / 2
    nic_s = (2 * hit + new) * 1e5 / 4e9
    assert nic_s > compute_s, "the copies of the layers take longer"
    assert result.ttft_s[1] == pytest.approx(read_s + nic_s)
    assert result.phases.reading_s * 2 == pytest.approx(read_s)
    assert result.written_bytes.sum() == (1541 // 64) * 64 * 1e5
    assert result.end_s == pytest.approx(
        first_s + copy_s + 29 * step_s + read_s + nic_s + 1530 * 1e5 / 4e9 + 10 * step_s
    )


def test_without_layerwise_prefill_the_copies_do_not_overlap() -> None:
    made = trajectories([(1000, 30), (500, 11)])
    result = run_agents(agents(made, 1, ABLATION["basic"]))
    hit = 1030 - 1030 % 64
    new = 1530 - hit
    compute_s = 0.01 + attention_s(hit, new, COST) + new * 1e-5 / 2
    assert result.ttft_s[1] == pytest.approx(hit * 1e5 / 1e9 + hit * 1e5 / 4e9 + compute_s)
    assert result.ttst_s[1] == pytest.approx(2 * 1530 * 1e5 / 4e9 + MODEL.step_s + MODEL.sequence_s)


def slow_storage(step: str, **changes: Any) -> StorageResult:
    """Run 60 agents whose reads take far longer than everything else."""
    made = trajectories([(8000, 10)] + [(64, 10)] * 20)
    cluster = replace(CLUSTER, storage_bytes_per_s=1e8, **changes)
    return run_agents(agents(made, 60, ABLATION[step], cluster=cluster))


def test_slow_storage_nics_bound_the_job_by_the_sides_that_read() -> None:
    """One prefill and two decode nodes: with prefill reads one NIC carries everything, with split reads three do."""
    one, three = slow_storage("layerwise"), slow_storage("split-reads")
    assert np.flatnonzero(one.read_bytes).tolist() == [0]
    for result, nics in ((one, 1), (three, 3)):
        bound_s = result.read_bytes.sum() / (nics * 1e8)
        assert bound_s <= result.end_s <= 1.1 * bound_s
    assert three.storage_balance < 1.1


def test_alternating_sides_load_the_only_prefill_node_with_half_of_the_reads() -> None:
    """Maximum to mean is 1.5 on one prefill and two decode nodes."""
    result = slow_storage("dual-path")
    share = result.read_bytes / result.read_bytes.sum()
    assert share == pytest.approx([0.5, 0.25, 0.25], abs=0.02)
    assert result.storage_balance == pytest.approx(1.5, abs=0.1)


def test_a_quota_divides_a_long_prompt_into_chunks() -> None:
    made = trajectories([(40_000, 2)])
    cluster = replace(CLUSTER, compute_bytes_per_s=1e12)
    policy = msgspec.structs.replace(ABLATION["layerwise"], forward_tokens=10**6)
    one = run_agents(agents(made, 1, policy, cluster=cluster))
    several = run_agents(agents(made, 1, msgspec.structs.replace(policy, quota_s=0.1), cluster=cluster))
    passes = math.ceil(attention_s(0, 40_000, COST) / 0.1)
    assert passes > 3
    assert several.ttft_s[0] - one.ttft_s[0] == pytest.approx((passes - 1) * MODEL.forward_s, abs=1.1e-2)


def test_an_agent_pauses_before_each_turn() -> None:
    made = trajectories([(1000, 30), (500, 11)])
    waiting = replace(made, think_s=np.array([3.0, 10.0]))
    without, with_pauses = (run_agents(agents(sessions, 1, ABLATION["layerwise"])) for sessions in (made, waiting))
    assert with_pauses.end_s == pytest.approx(without.end_s + 13.0)
    assert with_pauses.ttft_s == pytest.approx(without.ttft_s, rel=1e-5)


def test_agents_start_at_their_times_and_a_run_ends_at_its_end() -> None:
    made = trajectories([(1000, 100)] * 3)
    starts = np.array([0.0, 5.0, 1000.0])
    result = run_agents(agents(made, 3, ABLATION["scheduling"], start_s=starts, end_s=100.0))
    assert (result.agents, result.turns) == (2, 6)
    assert np.isfinite(result.agent_s).tolist() == [True, True, False]
    assert sorted(result.arrived_s)[0] == 0.0
    assert 5.0 in result.arrived_s
    assert result.end_s <= 100.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefill_nodes": 0}, r"^prefill_nodes: 0; give 1 or more"),
        ({"storage_bytes_per_s": 0.0}, r"^storage_bytes_per_s: 0.0; give a finite number above 0"),
        ({"buffer_bytes": -1.0}, r"^buffer_bytes: -1.0; give a finite number above 0"),
        ({"decode_group": 3}, r"^decode_group: 4 GPUs cannot be divided into groups of 3; give a divisor"),
    ],
)
def test_a_wrong_cluster_is_rejected(changes: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(CLUSTER, **changes)  # type: ignore[arg-type]


def test_a_request_that_fits_nowhere_is_rejected() -> None:
    made = trajectories([(2000, 10)])
    policy = ABLATION["scheduling"]
    with pytest.raises(InputError, match=r"^buffer_bytes: the longest request has 0.2 GB of KV; give more"):
        agents(made, 1, policy, cluster=replace(CLUSTER, buffer_bytes=1e8))
    with pytest.raises(InputError, match=r"^decode_kv_tokens: the longest request has 2010 tokens, more than fit"):
        agents(made, 1, policy, model=replace(MODEL, decode_kv_tokens=1000))
    with pytest.raises(InputError, match=r"^start_s: the two arrays differ in length"):
        agents(made, 2, policy, start_s=np.zeros(1))
