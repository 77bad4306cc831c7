"""The state of the fast simulation in arrays, which its compiled functions change in place.

Engines and nodes are numbered with prefill first: prefill engine e is on node e // gpus, decode engine e on node
prefill_nodes + e // gpus. An agent has at most one request in progress, so a request is identified by its agent.
"""

from __future__ import annotations

from typing import NamedTuple

from kvroute.policies.storage.dualpath_kernels import AttentionCost
from kvroute.sim.storage.events import PendingEvents
from kvroute.types import FloatArray, IntArray

NOTHING = -1
SCHEDULED, ALLOCATED, FETCHED, COMPUTED, DECODED = range(5)
"""Phases of a request, in order: until engines are chosen, until it has buffers, until its KV is read, until its first
token, until its last token."""
CONSIDERED = 4096
"""Maximum number of requests of its queue that one fetch of a decode group considers."""
WINDOWS = 20_000
"""Maximum number of windows of the balance; reads after them count into the last one."""


class RunConstants(NamedTuple):
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


class AgentTurns(NamedTuple):
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


class EngineArrays(NamedTuple):
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


class DecodeBatches(NamedTuple):
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


class StorageMeasurements(NamedTuple):
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


class StorageState(NamedTuple):
    """All arrays of a run."""

    agenda: PendingEvents
    waiting: Queues
    """Requests without a prefill engine (queue 0), then those of each prefill engine whose KV has been read."""
    placing: Queues
    """Requests without a decode group (queue 0), without an engine of each group, then those that wait for KV memory of
    each decode engine."""
    buffering: Queues
    """Requests that wait for a buffer of each node."""
    turns: AgentTurns
    engines: EngineArrays
    decode: DecodeBatches
    nodes: Nodes
    measured: StorageMeasurements
