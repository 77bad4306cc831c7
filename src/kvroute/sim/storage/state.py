"""The state of the fast simulation in arrays, which its compiled functions change in place.

Engines and nodes are numbered with prefill first: prefill engine e is on node e // gpus, decode engine e on node
prefill_nodes + e // gpus. An agent has at most one request in progress, so a request is identified by its agent.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from kvroute.policies.dualpath import ReadSide
from kvroute.policies.dualpath_kernels import AttentionCost
from kvroute.sim.storage.events import ARRIVAL, FETCH_DECODE, FETCH_PREFILL, Agenda, push
from kvroute.sim.storage.spec import AgentRun
from kvroute.types import FloatArray, IntArray

NOTHING = -1
NO_READS, PREFILL_READS, ALTERNATING_READS, SHORTER_READS, SPLIT_READS = range(5)
READS: dict[ReadSide, int] = {
    "none": NO_READS,
    "prefill": PREFILL_READS,
    "alternating": ALTERNATING_READS,
    "shorter": SHORTER_READS,
    "split": SPLIT_READS,
}
SCHEDULED, ALLOCATED, FETCHED, COMPUTED, DECODED = range(5)
"""Phases of a request, in order: until engines are chosen, until it has buffers, until its KV is read, until its first
token, until its last token."""
CONSIDERED = 4096
"""Maximum number of requests of its queue that one fetch of a decode group considers."""
WINDOWS = 20_000
"""Maximum number of windows of the balance; reads after them count into the last one."""


class Rules(NamedTuple):
    """Constants of a run: sizes in tokens, bytes and seconds."""

    gpus: int
    prefill_nodes: int
    prefill_group: int
    """Engines of a prefill group."""
    decode_group: int
    """Engines of a decode group."""
    storage_bytes_per_s: float
    compute_bytes_per_s: float
    kv_bytes: float
    block_tokens: int
    attention: AttentionCost
    dense_token_s: float
    forward_s: float
    step_s: float
    sequence_s: float
    prefill_kv_tokens: float
    sequences_max: int
    layerwise: bool
    reads: int
    scheduling: bool
    quota_s: float
    forward_tokens: int
    alpha: float
    """Longest short storage queue, in tokens."""
    beta: float
    """Most tokens of an engine that takes requests."""
    fetch_s: float
    window_s: float
    end_s: float


class Queues(NamedTuple):
    """First-in, first-out queues of agents as linked lists; an agent is in at most one queue of a family at a time."""

    head: IntArray
    """First agent of each queue, or NOTHING, [queues]."""
    tail: IntArray
    """Last agent of each queue, [queues]."""
    next: IntArray
    """Next agent in the same queue, or NOTHING, [agents]."""


class Turns(NamedTuple):
    """Trajectories, and the present turn of each agent, [agents] unless given."""

    prompts: IntArray
    """See `Trajectories`, [turns of all trajectories]."""
    contexts: IntArray
    """Cached tokens of each of these turns."""
    generated: IntArray
    think_s: FloatArray
    turn: IntArray
    """Present turn, an index of `prompts`."""
    end: IntArray
    """End of the agent's trajectory, an index of `prompts`."""
    hit: IntArray
    """Tokens of the prompt that storage has: whole blocks."""
    prompt: IntArray
    """Tokens of the prompt."""
    cached: IntArray
    """Tokens of the prompt whose KV exists."""
    step: IntArray
    """Tokens that the present forward pass computes."""
    prefill_engine: IntArray
    decode_engine: IntArray
    prefill_tokens: IntArray
    """Tokens that the prefill node reads from storage; the decode node reads the rest of `hit`."""
    reads: IntArray
    """Storage reads in progress."""
    since: FloatArray
    """Start of the present phase, in seconds."""
    arrived: FloatArray
    """Arrival of the turn, in seconds."""


class Engines(NamedTuple):
    """Engines, [prefill engines] or [decode engines]."""

    prefill_tokens: FloatArray
    """Tokens of the unfinished requests of each prefill engine."""
    prefill_node: IntArray
    batch: IntArray
    """Requests of each prefill engine in the present forward pass."""
    busy: IntArray
    """Whether a prefill group computes, [prefill groups]."""
    decode_tokens: FloatArray
    """Tokens of the unfinished requests of each decode engine."""
    decode_sequences: IntArray
    """Number of these requests."""
    decode_free: FloatArray
    """Free KV memory of each decode engine, in tokens."""
    slots: IntArray
    """Sequences in the batch of each decode engine or on their way to its GPU."""
    group_tokens: FloatArray
    """Tokens of the unfinished requests of each decode group, [decode groups]."""
    copy_free_s: FloatArray
    """Time from which each decode engine's compute NIC is free for copies to its GPU."""
    lengths: FloatArray
    """Lengths of the requests that one fetch of a decode group considers, [CONSIDERED]."""
    cursor: IntArray
    """Next prefill engine, decode engine and read side in turn, [3]."""


class Decode(NamedTuple):
    """Batches of the decode engines as fluid: all sequences of a batch progress equally."""

    progress: FloatArray
    """Tokens that a sequence of each engine has generated since the start of the run, [decode engines]."""
    updated: FloatArray
    """Time of `progress`."""
    batch: IntArray
    """Sequences of each engine."""
    finish: FloatArray
    """Heap of the values of `progress` at which sequences end, [decode engines, sequences_max]."""
    agent: IntArray
    """Agents in the same order."""
    tree: FloatArray
    """Next end of each engine as the leaves of a tree of minima, [2 * leaves]."""


class Nodes(NamedTuple):
    """Nodes, [nodes]."""

    queued_tokens: FloatArray
    """Tokens to be read from storage: assigned and not read yet."""
    read_free_s: FloatArray
    """Time from which the storage NIC is free."""
    buffer_free: FloatArray
    """Free bytes of the buffers."""
    read_bytes: FloatArray
    written_bytes: FloatArray
    window_bytes: FloatArray
    """Bytes read in each window, [nodes, WINDOWS]."""


class Measured(NamedTuple):
    """What a run measures."""

    ttft_s: FloatArray
    """Time to first token of each finished turn, in the order of the ends, [turns]."""
    ttst_s: FloatArray
    """Time from the first to the second token; 0 if there is none."""
    tpot_s: FloatArray
    """Time per token after the first; 0 if there is none."""
    arrived_s: FloatArray
    """Arrival of the turn."""
    first_s: FloatArray
    """Time of the first token of each agent's present turn, [agents]."""
    second_s: FloatArray
    """Time of the second token, [agents]."""
    agent_end_s: FloatArray
    """End of each agent's last turn; infinite if it has not ended, [agents]."""
    phase_s: FloatArray
    """Total time of all finished turns in each phase, [5]."""
    attention: FloatArray
    """Sums over forward passes of the maximum and mean attention time of the engines, of their ratio, and the number of
    passes, [4]; without the tail of the run."""
    counts: IntArray
    """Finished turns, finished agents and events, [3]."""
    times: FloatArray
    """Present time, and the end of the time in which at least half of the agents were active, [2]."""


class State(NamedTuple):
    """All arrays of a run."""

    agenda: Agenda
    waiting: Queues
    """Requests without a prefill engine (queue 0), then those of each prefill engine whose KV has been read."""
    placing: Queues
    """Requests without a decode group (queue 0), without an engine of each group, then those that wait for KV memory of
    each decode engine."""
    buffering: Queues
    """Requests that wait for a buffer of each node."""
    turns: Turns
    engines: Engines
    decode: Decode
    nodes: Nodes
    measured: Measured


def rules_of(run: AgentRun) -> Rules:
    """Return the constants of a run. alpha and beta are converted to tokens of a mean turn."""
    cluster, model, policy = run.cluster, run.model, run.policy
    prompt, new = _mean_turn(run)
    turn_s = max(model.prefill_s(int(prompt - new), max(int(new), 1)), 1e-9)
    return Rules(
        gpus=cluster.gpus,
        prefill_nodes=cluster.prefill_nodes,
        prefill_group=cluster.prefill_group,
        decode_group=cluster.decode_group,
        storage_bytes_per_s=cluster.storage_bytes_per_s,
        compute_bytes_per_s=cluster.compute_bytes_per_s,
        kv_bytes=model.kv_bytes,
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


def state_of(run: AgentRun) -> State:
    """Return the state before the first event."""
    cluster, agents = run.cluster, len(run.trajectory)
    prefill, decode = cluster.prefill_nodes * cluster.gpus, cluster.decode_nodes * cluster.gpus
    prefill_groups, decode_groups = prefill // cluster.prefill_group, decode // cluster.decode_group
    state = State(
        agenda=_agenda(4 * agents + 2 * (prefill_groups + decode_groups) + 16),
        waiting=_queues(1 + prefill, agents),
        placing=_queues(1 + decode_groups + decode, agents),
        buffering=_queues(cluster.nodes, agents),
        turns=_turns(run),
        engines=Engines(
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


def _agenda(capacity: int) -> Agenda:
    return Agenda(
        time=np.zeros(capacity),
        order=np.zeros(capacity, np.int64),
        kind=np.zeros(capacity, np.int64),
        item=np.zeros(capacity, np.int64),
        counts=np.zeros(2, np.int64),
    )


def _queues(queues: int, agents: int) -> Queues:
    return Queues(*(np.full(size, NOTHING, np.int64) for size in (queues, queues, agents)))


def _turns(run: AgentRun) -> Turns:
    start, agents = run.trajectories.start, len(run.trajectory)
    hit, prompt, cached, step, prefill, decode, tokens, reads = np.zeros((8, agents), np.int64)
    return Turns(
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


def _decode(engines: int, sequences_max: int) -> Decode:
    leaves = 1 << max(engines - 1, 0).bit_length()
    return Decode(
        progress=np.zeros(engines),
        updated=np.zeros(engines),
        batch=np.zeros(engines, np.int64),
        finish=np.zeros((engines, sequences_max)),
        agent=np.zeros((engines, sequences_max), np.int64),
        tree=np.full(2 * leaves, np.inf),
    )


def _measured(run: AgentRun) -> Measured:
    turns = int(np.diff(run.trajectories.start)[run.trajectory].sum())
    return Measured(
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
