"""The constants of a run and its state before the first event."""

from __future__ import annotations

import math

import numpy as np

from kvroute.policies.storage.dualpath_kernels import READS
from kvroute.sim.storage.events import ARRIVAL, FETCH_DECODE, FETCH_PREFILL, PendingEvents, push
from kvroute.sim.storage.spec import AgentRun
from kvroute.sim.storage.state import (
    CONSIDERED,
    NOTHING,
    WINDOWS,
    AgentTurns,
    DecodeBatches,
    EngineArrays,
    Nodes,
    Queues,
    RunConstants,
    StorageMeasurements,
    StorageState,
)


def rules_of(run: AgentRun) -> RunConstants:
    """Return the constants of a run. alpha and beta are converted to tokens of a mean turn."""
    cluster, model, policy = run.cluster, run.model, run.policy
    prompt, new = _mean_turn(run)
    turn_s = max(model.prefill_s(int(prompt - new), max(int(new), 1)), 1e-9)
    return RunConstants(
        gpus=cluster.gpus,
        prefill_nodes=cluster.prefill_nodes,
        prefill_group=cluster.prefill_group,
        decode_group=cluster.decode_group,
        storage_bytes_per_s=cluster.storage_bytes_per_s,
        compute_bytes_per_s=cluster.compute_bytes_per_s,
        kv_bytes=float(model.kv_bytes),  # one compiled loop for all models
        block_tokens=model.block_tokens,
        attention=model.attention,
        dense_token_s=model.dense_token_s,
        forward_s=model.forward_s,
        step_s=model.step_s,
        sequence_s=model.sequence_s,
        prefill_kv_tokens=float(model.prefill_kv_tokens),
        sequences_max=model.sequences_max,
        layerwise=policy.layerwise,
        reads=READS[policy.reads],
        scheduling=policy.scheduling,
        quota_s=math.inf if policy.quota_s is None else policy.quota_s,
        forward_tokens=policy.forward_tokens,
        alpha=policy.alpha_s * cluster.storage_bytes_per_s / model.kv_bytes,
        beta=policy.beta_s * prompt / turn_s,
        fetch_s=policy.fetch_s,
        window_s=run.window_s,
        end_s=run.end_s,
    )


def _mean_turn(run: AgentRun) -> tuple[float, float]:
    """Return the mean tokens of a prompt and of its part that storage does not have."""
    prompt, cached = run.trajectories.prompt, run.trajectories.cached
    if not len(prompt):
        return 1.0, 1.0
    return float(prompt.mean()), float((prompt - cached + cached % run.model.block_tokens).mean())


def state_of(run: AgentRun) -> StorageState:
    """Return the state before the first event."""
    cluster, agents = run.cluster, len(run.trajectory)
    prefill, decode = cluster.prefill_nodes * cluster.gpus, cluster.decode_nodes * cluster.gpus
    prefill_groups, decode_groups = prefill // cluster.prefill_group, decode // cluster.decode_group
    state = StorageState(
        agenda=_agenda(4 * agents + 2 * (prefill_groups + decode_groups) + 16),
        waiting=_queues(1 + prefill, agents),
        placing=_queues(1 + decode_groups + decode, agents),
        buffering=_queues(cluster.nodes, agents),
        turns=_turns(run),
        engines=EngineArrays(
            prefill_tokens=np.zeros(prefill),
            prefill_node=np.arange(prefill) // cluster.gpus,
            batch=np.zeros(prefill, np.int64),
            busy=np.zeros(prefill_groups, np.int64),
            decode_tokens=np.zeros(decode),
            decode_sequences=np.zeros(decode, np.int64),
            decode_free=np.full(decode, float(run.model.decode_kv_tokens)),
            slots=np.zeros(decode, np.int64),
            group_tokens=np.zeros(decode_groups),
            copy_free_s=np.zeros(decode),
            lengths=np.zeros(CONSIDERED),
            cursor=np.zeros(3, np.int64),
        ),
        decode=_decode(decode, run.model.sequences_max),
        nodes=Nodes(
            queued_tokens=np.zeros(cluster.nodes),
            read_free_s=np.zeros(cluster.nodes),
            buffer_free=np.full(cluster.nodes, cluster.buffer_bytes),
            read_bytes=np.zeros(cluster.nodes),
            written_bytes=np.zeros(cluster.nodes),
            window_bytes=np.zeros((cluster.nodes, WINDOWS)),
        ),
        measured=_measured(run),
    )
    for agent in range(agents):
        first = run.trajectories.start[run.trajectory[agent]]
        push(state.agenda, float(run.start_s[agent] + run.trajectories.think_s[first]), ARRIVAL, agent)
    if run.policy.scheduling:
        for kind, groups in ((FETCH_PREFILL, prefill_groups), (FETCH_DECODE, decode_groups)):
            for group in range(groups):  # staggered, so that no group is always first
                push(state.agenda, run.policy.fetch_s * (group + 1) / groups, kind, group)
    return state


def _agenda(capacity: int) -> PendingEvents:
    return PendingEvents(
        time=np.zeros(capacity),
        order=np.zeros(capacity, np.int64),
        kind=np.zeros(capacity, np.int64),
        item=np.zeros(capacity, np.int64),
        counts=np.zeros(2, np.int64),
    )


def _queues(queues: int, agents: int) -> Queues:
    return Queues(*(np.full(size, NOTHING, np.int64) for size in (queues, queues, agents)))


def _turns(run: AgentRun) -> AgentTurns:
    start, agents = run.trajectories.start, len(run.trajectory)
    hit, prompt, cached, step, prefill, decode, tokens, reads = np.zeros((8, agents), np.int64)
    return AgentTurns(
        prompts=run.trajectories.prompt,
        contexts=run.trajectories.cached,
        generated=run.trajectories.generated,
        think_s=run.trajectories.think_s,
        turn=start[run.trajectory],
        end=start[run.trajectory + 1],
        hit=hit,
        prompt=prompt,
        cached=cached,
        step=step,
        prefill_engine=prefill,
        decode_engine=decode,
        prefill_tokens=tokens,
        reads=reads,
        since=np.zeros(agents),
        arrived=np.zeros(agents),
    )


def _decode(engines: int, sequences_max: int) -> DecodeBatches:
    leaves = 1 << max(engines - 1, 0).bit_length()
    return DecodeBatches(
        progress=np.zeros(engines),
        updated=np.zeros(engines),
        batch=np.zeros(engines, np.int64),
        finish=np.zeros((engines, sequences_max)),
        agent=np.zeros((engines, sequences_max), np.int64),
        tree=np.full(2 * leaves, np.inf),
    )


def _measured(run: AgentRun) -> StorageMeasurements:
    turns = int(np.diff(run.trajectories.start)[run.trajectory].sum())
    return StorageMeasurements(
        ttft_s=np.zeros(turns, np.float32),
        ttst_s=np.zeros(turns, np.float32),
        tpot_s=np.zeros(turns, np.float32),
        arrived_s=np.zeros(turns, np.float32),
        first_s=np.zeros(len(run.trajectory)),
        second_s=np.zeros(len(run.trajectory)),
        agent_end_s=np.full(len(run.trajectory), np.inf),
        phase_s=np.zeros(5),
        attention=np.zeros(4),
        counts=np.zeros(3, np.int64),
        times=np.zeros(2),
    )
