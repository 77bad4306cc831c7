"""Decode engines: placement, the copy of a prompt's KV to the GPU, and batches as a fluid.

All sequences of a batch progress equally, so a sequence ends when the progress of its engine has grown by its tokens.
"""

from __future__ import annotations

import numpy as np

from kvroute.compiled import compiled_in_place
from kvroute.policies.storage.dualpath_kernels import (
    NO_ENGINE,
    NO_READS,
    decode_engine,
    fitting_requests,
    least,
    token_limit,
)
from kvroute.sim.storage import reads
from kvroute.sim.storage.events import LANDED, push
from kvroute.sim.storage.queues import put, take
from kvroute.sim.storage.state import COMPUTED, CONSIDERED, NOTHING, RunConstants, StorageState


@compiled_in_place
def fetch(rules: RunConstants, state: StorageState, group: int, now: float) -> None:
    """Distribute requests over the decode groups, then place requests of this group on its engines."""
    engines, queue = state.engines, 1 + group
    while state.placing.head[0] != NOTHING:
        agent = take(state.placing, 0)
        target = least(engines.group_tokens)
        engines.group_tokens[target] += _length(state, agent)
        put(state.placing, 1 + target, agent)
    first = group * rules.decode_group
    last = first + rules.decode_group
    if state.placing.head[queue] == NOTHING or not _first_fits(state, queue, first, last):
        return
    limit = _limit(state, queue, first, last)
    while state.placing.head[queue] != NOTHING:
        length = _length(state, state.placing.head[queue])
        tokens, sequences, free = engines.decode_tokens, engines.decode_sequences, engines.decode_free
        engine = decode_engine(tokens, sequences, free, length, limit, first, last)
        if engine == NO_ENGINE:
            return
        agent = take(state.placing, queue)
        assign(state, agent, engine)
        engines.decode_free[engine] -= length
        if state.turns.prefill_engine[agent] != NOTHING:
            reads.begin(rules, state, agent, now)


@compiled_in_place
def _first_fits(state: StorageState, queue: int, first: int, last: int) -> bool:
    """Return whether an engine has memory for the first request of a queue."""
    length = _length(state, state.placing.head[queue])
    for engine in range(first, last):  # noqa: SIM110 (kernels have no generators)
        if state.engines.decode_free[engine] >= length:
            return True
    return False


@compiled_in_place
def _length(state: StorageState, agent: int) -> float:
    """Return the tokens of a request at its end, for which KV memory is reserved."""
    return float(state.turns.prompt[agent] + state.turns.generated[state.turns.turn[agent]])


@compiled_in_place
def _limit(state: StorageState, queue: int, first: int, last: int) -> float:
    """Return the token count above which an engine counts as loaded."""
    lengths = state.engines.lengths
    free, assigned = 0.0, 0.0
    for engine in range(first, last):
        free += state.engines.decode_free[engine]
        assigned += state.engines.decode_tokens[engine]
    count, total, agent = 0, 0.0, state.placing.head[queue]
    while agent != NOTHING and count < CONSIDERED and total <= free:
        lengths[count] = _length(state, agent)
        total += lengths[count]
        count += 1
        agent = state.placing.next[agent]
    fitting = fitting_requests(lengths[:count], free)
    return token_limit(lengths[:fitting].sum(), assigned, last - first)


@compiled_in_place
def assign(state: StorageState, agent: int, engine: int) -> None:
    """Give a request a decode engine."""
    state.turns.decode_engine[agent] = engine
    state.engines.decode_tokens[engine] += _length(state, agent)
    state.engines.decode_sequences[engine] += 1


@compiled_in_place
def hold(rules: RunConstants, state: StorageState, agent: int, now: float) -> None:
    """Continue with a request whose prompt is complete: copy its KV to the GPU, or wait for memory or a free slot."""
    reads.end_phase(state, agent, COMPUTED, now)
    engine = state.turns.decode_engine[agent]
    queue = len(state.placing.head) - len(state.engines.slots) + engine
    if state.placing.head[queue] == NOTHING and _admits(rules, state, agent, engine):
        _copy(rules, state, agent, engine, now)
    else:
        put(state.placing, queue, agent)


@compiled_in_place
def _admits(rules: RunConstants, state: StorageState, agent: int, engine: int) -> bool:
    """Return whether the engine has a free slot, and memory if that is not reserved yet."""
    if state.engines.slots[engine] >= rules.sequences_max:
        return False
    return bool(rules.scheduling or state.engines.decode_free[engine] >= _length(state, agent))


@compiled_in_place
def _copy(rules: RunConstants, state: StorageState, agent: int, engine: int, now: float) -> None:
    """Copy the KV of a prompt from the node's buffer to the GPU. Without layer-wise prefill it first crosses the
    compute network as a whole."""
    engines = state.engines
    engines.slots[engine] += 1
    if not rules.scheduling:
        engines.decode_free[engine] -= _length(state, agent)
    end = now
    if rules.reads != NO_READS:
        copies = 1.0 if rules.layerwise else 2.0
        copy_s = copies * state.turns.prompt[agent] * rules.kv_bytes / rules.compute_bytes_per_s
        end = max(now, engines.copy_free_s[engine]) + copy_s
        engines.copy_free_s[engine] = end
    push(state.agenda, end, LANDED, agent)


@compiled_in_place
def join(rules: RunConstants, state: StorageState, agent: int, now: float) -> None:
    """Add a sequence whose KV is on the GPU to the batch; its buffer is free."""
    engine = state.turns.decode_engine[agent]
    reads.release(rules, state, rules.prefill_nodes + engine // rules.gpus, state.turns.prompt[agent], now)
    decode = state.decode
    _advance(rules, state, engine, now)
    finish, agents = decode.finish[engine], decode.agent[engine]
    value = decode.progress[engine] + state.turns.generated[state.turns.turn[agent]] - 1
    place = decode.batch[engine]
    decode.batch[engine] += 1
    while place > 0 and finish[(place - 1) >> 1] > value:
        finish[place], agents[place] = finish[(place - 1) >> 1], agents[(place - 1) >> 1]
        place = (place - 1) >> 1
    finish[place], agents[place] = value, agent
    state.measured.second_s[agent] = now + step_s(rules, decode.batch[engine])
    _update(rules, state, engine)


@compiled_in_place
def step_s(rules: RunConstants, batch: int) -> float:
    """Return the time of a decode step, in seconds."""
    return rules.step_s + rules.sequence_s * batch


@compiled_in_place
def next_end(state: StorageState) -> tuple[float, int]:
    """Return when the next sequence of any engine ends, and the engine; infinite if no engine has a sequence."""
    tree, place = state.decode.tree, 1
    leaves = len(tree) // 2
    while place < leaves:
        place = 2 * place if tree[2 * place] <= tree[2 * place + 1] else 2 * place + 1
    return tree[1], place - leaves


@compiled_in_place
def finish(rules: RunConstants, state: StorageState, engine: int, now: float) -> int:
    """Remove the first sequence of an engine that ends and return its agent; waiting requests take its place."""
    decode, engines = state.decode, state.engines
    _advance(rules, state, engine, now)
    agent = decode.agent[engine, 0]
    decode.progress[engine] = max(decode.progress[engine], decode.finish[engine, 0])
    _remove_first(decode.finish[engine], decode.agent[engine], decode.batch[engine])
    decode.batch[engine] -= 1
    _update(rules, state, engine)
    length = _length(state, agent)
    engines.slots[engine] -= 1
    engines.decode_free[engine] += length
    engines.decode_tokens[engine] -= length
    engines.decode_sequences[engine] -= 1
    if rules.scheduling:
        engines.group_tokens[engine // rules.decode_group] -= length
    queue = len(state.placing.head) - len(engines.slots) + engine
    while state.placing.head[queue] != NOTHING and _admits(rules, state, state.placing.head[queue], engine):
        _copy(rules, state, take(state.placing, queue), engine, now)
    return int(agent)


@compiled_in_place
def _remove_first(finish: np.ndarray, agents: np.ndarray, count: int) -> None:
    """Remove the root of a heap of `count` values."""
    value, agent = finish[count - 1], agents[count - 1]
    place, child = 0, 1
    while child < count - 1:
        if child + 1 < count - 1 and finish[child + 1] < finish[child]:
            child += 1
        if finish[child] >= value:
            break
        finish[place], agents[place] = finish[child], agents[child]
        place, child = child, 2 * child + 1
    finish[place], agents[place] = value, agent


@compiled_in_place
def _advance(rules: RunConstants, state: StorageState, engine: int, now: float) -> None:
    """Bring the progress of an engine to the present."""
    decode = state.decode
    if decode.batch[engine]:
        decode.progress[engine] += (now - decode.updated[engine]) / step_s(rules, decode.batch[engine])
    decode.updated[engine] = now


@compiled_in_place
def _update(rules: RunConstants, state: StorageState, engine: int) -> None:
    """Enter the next end of an engine into the tree."""
    decode = state.decode
    end = np.inf
    if decode.batch[engine]:
        left = max(decode.finish[engine, 0] - decode.progress[engine], 0.0)
        end = decode.updated[engine] + left * step_s(rules, decode.batch[engine])
    tree = decode.tree
    place = len(tree) // 2 + engine
    tree[place] = end
    while place > 1:
        place >>= 1
        tree[place] = min(tree[2 * place], tree[2 * place + 1])
