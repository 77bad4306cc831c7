"""Prefill groups: all GPUs of a group compute each forward pass together, each on requests of its own."""

from __future__ import annotations

from kvroute.compiled import compiled_in_place
from kvroute.policies.storage.dualpath_kernels import (
    NO_ENGINE,
    NO_READS,
    attention_s,
    prefill_engine,
    quota_tokens,
)
from kvroute.sim.storage import reads
from kvroute.sim.storage.events import FORWARD, push
from kvroute.sim.storage.queues import put, take
from kvroute.sim.storage.state import NOTHING, AgentTurns, RunConstants, StorageState


@compiled_in_place
def fetch(rules: RunConstants, state: StorageState, group: int, now: float) -> None:
    """Give requests without a prefill engine to engines of the group, until all of these are overloaded."""
    first, engines = group * rules.prefill_group, state.engines
    while state.waiting.head[0] != NOTHING:
        engine = prefill_engine(
            engines.prefill_tokens,
            state.nodes.queued_tokens,
            engines.prefill_node,
            first,
            first + rules.prefill_group,
            rules.alpha,
            rules.beta,
        )
        if engine == NO_ENGINE:
            return
        agent = take(state.waiting, 0)
        assign(state, agent, engine)
        if state.turns.decode_engine[agent] != NOTHING:
            reads.begin(rules, state, agent, now)


@compiled_in_place
def assign(state: StorageState, agent: int, engine: int) -> None:
    """Give a request a prefill engine."""
    state.turns.prefill_engine[agent] = engine
    state.engines.prefill_tokens[engine] += state.turns.prompt[agent]


@compiled_in_place
def ready(rules: RunConstants, state: StorageState, agent: int, now: float) -> None:
    """Queue a request whose cached KV has been read; an idle group begins to compute."""
    engine = state.turns.prefill_engine[agent]
    put(state.waiting, 1 + engine, agent)
    group = engine // rules.prefill_group
    if not state.engines.busy[group]:
        start(rules, state, group, now)


@compiled_in_place
def start(rules: RunConstants, state: StorageState, group: int, now: float) -> None:
    """Start a forward pass of a group, if it has requests.

    It takes the maximum attention time and the mean time of the other layers, because the group's GPUs wait for each
    other after each attention layer and share the experts; or the time to copy the KV, if that is longer.
    """
    most_s, total_s, copy_s, tokens, busy = 0.0, 0.0, 0.0, 0, 0
    for engine in range(group * rules.prefill_group, (group + 1) * rules.prefill_group):
        new, spent_s, nbytes = _fill(rules, state, engine)
        most_s, total_s = max(most_s, spent_s), total_s + spent_s
        copy_s = max(copy_s, nbytes / rules.compute_bytes_per_s)
        tokens += new
        busy += new > 0
    state.engines.busy[group] = busy > 0
    if not busy:
        return
    compute_s = rules.forward_s + most_s + rules.dense_token_s * tokens / rules.prefill_group
    if rules.reads == NO_READS:
        copy_s = 0.0
    push(state.agenda, now + (max(compute_s, copy_s) if rules.layerwise else compute_s + copy_s), FORWARD, group)
    _measure(rules, state, most_s, total_s)


@compiled_in_place
def _measure(rules: RunConstants, state: StorageState, most_s: float, total_s: float) -> None:
    """Count the balance of attention times, but not in the tail of the run."""
    measured = state.measured
    if 2 * measured.counts[1] < len(measured.agent_end_s):
        mean_s = total_s / rules.prefill_group
        measured.attention[0] += most_s
        measured.attention[1] += mean_s
        measured.attention[2] += most_s / mean_s if mean_s > 0.0 else 1.0
        measured.attention[3] += 1.0


@compiled_in_place
def _fill(rules: RunConstants, state: StorageState, engine: int) -> tuple[int, float, float]:
    """Fill an engine's batch from the head of its queue, within quota, token limit and memory; the last request may be
    computed in part. Return the tokens to compute, their attention time and the bytes that the compute NIC copies."""
    turns = state.turns
    tokens, spent_s, nbytes, held, count = 0, 0.0, 0.0, 0, 0
    agent = state.waiting.head[1 + engine]
    while agent != NOTHING:
        left = turns.prompt[agent] - turns.cached[agent]
        new = min(left, rules.forward_tokens - tokens)
        new = quota_tokens(turns.cached[agent], new, rules.quota_s - spent_s, rules.attention)
        if new < 1 and count == 0:
            new = 1  # a quota below the time of one token must not stop the engine
        held += turns.cached[agent] + new
        if new < 1 or (not rules.layerwise and held > rules.prefill_kv_tokens and count):
            break
        turns.step[agent] = new
        spent_s += attention_s(turns.cached[agent], new, rules.attention)
        nbytes += _copied_tokens(rules, turns, agent, new) * rules.kv_bytes
        tokens, count = tokens + new, count + 1
        if new < left:
            break
        agent = state.waiting.next[agent]
    state.engines.batch[engine] = count
    return tokens, spent_s, nbytes


@compiled_in_place
def _copied_tokens(rules: RunConstants, turns: AgentTurns, agent: int, new: int) -> float:
    """Return the tokens whose KV passes the prefill GPU's compute NIC in the busier direction of this pass.

    From the NIC to the GPU: all cached tokens. Towards the NIC: what the own node has read, to the GPU and in the first
    pass to the decode node, and the new tokens. Without layer-wise prefill, KV goes to the decode node after the pass.
    """
    if not rules.layerwise:
        return float(turns.cached[agent])
    first = turns.cached[agent] == turns.hit[agent]
    return float(max((2 if first else 1) * turns.prefill_tokens[agent] + new, turns.cached[agent]))


@compiled_in_place
def finish(rules: RunConstants, state: StorageState, group: int) -> int:
    """Take the next request whose prompt is complete out of the group's batch; NOTHING if no further one is complete.

    Requests that were computed in part stay at the head of their queues.
    """
    turns, engines = state.turns, state.engines
    for engine in range(group * rules.prefill_group, (group + 1) * rules.prefill_group):
        if engines.batch[engine]:
            engines.batch[engine] -= 1
            agent = state.waiting.head[1 + engine]
            turns.cached[agent] += turns.step[agent]
            if turns.cached[agent] == turns.prompt[agent]:
                take(state.waiting, 1 + engine)
                engines.prefill_tokens[engine] -= turns.prompt[agent]
                return int(agent)
    return NOTHING
