"""Buffers and storage NICs: a request gets its buffers, then its cached KV is read through one or both sides.

The decode node's buffer, which will hold the whole prompt, is reserved before the prefill node's. Holders of a prefill
buffer need no further buffer, so requests cannot wait for each other in a circle. Each NIC reads first in, first out.
"""

from __future__ import annotations

from kvroute.compiled import compiled_in_place
from kvroute.policies.storage.dualpath_kernels import NO_READS, prefill_read_tokens
from kvroute.sim.storage.events import READ, push
from kvroute.sim.storage.queues import put, take
from kvroute.sim.storage.state import (
    ALLOCATED,
    FETCHED,
    NOTHING,
    SCHEDULED,
    RunConstants,
    StorageState,
)


@compiled_in_place
def begin(rules: RunConstants, state: StorageState, agent: int, now: float) -> None:
    """Continue with a request whose engines are chosen: choose the side that reads, and wait for its buffers."""
    turns, nodes = state.turns, state.nodes
    end_phase(state, agent, SCHEDULED, now)
    prefill_node, decode_node = _nodes_of(rules, state, agent)
    turns.prefill_tokens[agent] = _prefill_share(rules, state, agent, prefill_node, decode_node)
    if rules.reads == NO_READS:
        push(state.agenda, now, READ, agent)
        turns.reads[agent] = 1
        return
    nodes.queued_tokens[prefill_node] += turns.prefill_tokens[agent]
    nodes.queued_tokens[decode_node] += turns.hit[agent] - turns.prefill_tokens[agent]
    if state.buffering.head[decode_node] != NOTHING or not _reserve(rules, state, decode_node, turns.prompt[agent]):
        put(state.buffering, decode_node, agent)
    else:
        _begin_prefill_side(rules, state, agent, now)


@compiled_in_place
def _nodes_of(rules: RunConstants, state: StorageState, agent: int) -> tuple[int, int]:
    prefill_node = state.turns.prefill_engine[agent] // rules.gpus
    return prefill_node, rules.prefill_nodes + state.turns.decode_engine[agent] // rules.gpus


@compiled_in_place
def _prefill_share(rules: RunConstants, state: StorageState, agent: int, prefill_node: int, decode_node: int) -> int:
    """Return the tokens that the prefill node reads."""
    queued, token_s = state.nodes.queued_tokens, rules.kv_bytes / rules.storage_bytes_per_s
    state.engines.cursor[2] += 1
    return prefill_read_tokens(
        rules.reads,
        state.turns.hit[agent],
        rules.block_tokens,
        queued[prefill_node] * token_s,
        queued[decode_node] * token_s,
        token_s,
        token_s,
        state.engines.cursor[2],
    )


@compiled_in_place
def _reserve(rules: RunConstants, state: StorageState, node: int, tokens: int) -> bool:
    """Take memory of a node's buffer if there is enough."""
    nbytes = tokens * rules.kv_bytes
    if state.nodes.buffer_free[node] < nbytes:
        return False
    state.nodes.buffer_free[node] -= nbytes
    return True


@compiled_in_place
def _begin_prefill_side(rules: RunConstants, state: StorageState, agent: int, now: float) -> None:
    """Reserve the prefill buffer of a request that has its decode buffer, or wait for it."""
    node = state.turns.prefill_engine[agent] // rules.gpus
    tokens = state.turns.prefill_tokens[agent]
    if tokens and (state.buffering.head[node] != NOTHING or not _reserve(rules, state, node, tokens)):
        put(state.buffering, node, agent)
    else:
        _read(rules, state, agent, now)


@compiled_in_place
def release(rules: RunConstants, state: StorageState, node: int, tokens: int, now: float) -> None:
    """Free memory of a node's buffer and continue with the requests that wait for it and now fit."""
    if rules.reads == NO_READS:
        return
    state.nodes.buffer_free[node] += tokens * rules.kv_bytes
    while state.buffering.head[node] != NOTHING:
        agent = state.buffering.head[node]
        prefill = node < rules.prefill_nodes
        wanted = state.turns.prefill_tokens[agent] if prefill else state.turns.prompt[agent]
        if not _reserve(rules, state, node, wanted):
            return
        take(state.buffering, node)
        if prefill:
            _read(rules, state, agent, now)
        else:
            _begin_prefill_side(rules, state, agent, now)


@compiled_in_place
def _read(rules: RunConstants, state: StorageState, agent: int, now: float) -> None:
    """Queue the reads of a request that has its buffers."""
    end_phase(state, agent, ALLOCATED, now)
    turns = state.turns
    prefill_node, decode_node = _nodes_of(rules, state, agent)
    tokens = turns.prefill_tokens[agent], turns.hit[agent] - turns.prefill_tokens[agent]
    turns.reads[agent] = 0
    for side in range(2):
        if tokens[side] or (side == 1 and turns.reads[agent] == 0):
            node = prefill_node if side == 0 else decode_node
            turns.reads[agent] += 1
            push(state.agenda, _nic_read(rules, state, node, tokens[side] * rules.kv_bytes, now), READ, agent)


@compiled_in_place
def _nic_read(rules: RunConstants, state: StorageState, node: int, nbytes: float, now: float) -> float:
    """Add a read to a node's storage NIC and return its end."""
    nodes = state.nodes
    start = max(now, nodes.read_free_s[node])
    end = start + nbytes / rules.storage_bytes_per_s
    nodes.read_free_s[node] = end
    nodes.read_bytes[node] += nbytes
    last = nodes.window_bytes.shape[1] - 1
    at = start
    while at < end:
        window = int(at / rules.window_s)
        until = min(end, (window + 1) * rules.window_s)
        if window >= last or until <= at:
            until = end
        nodes.window_bytes[node, min(window, last)] += (until - at) * rules.storage_bytes_per_s
        at = until
    return float(end)


@compiled_in_place
def finish(rules: RunConstants, state: StorageState, agent: int, now: float) -> bool:
    """Handle the end of a read; return whether the request can be computed now.

    The length of a storage queue counts until the whole request is read.
    """
    turns = state.turns
    turns.reads[agent] -= 1
    if turns.reads[agent]:
        return False
    if rules.reads != NO_READS:
        prefill_node, decode_node = _nodes_of(rules, state, agent)
        state.nodes.queued_tokens[prefill_node] -= turns.prefill_tokens[agent]
        state.nodes.queued_tokens[decode_node] -= turns.hit[agent] - turns.prefill_tokens[agent]
    end_phase(state, agent, FETCHED, now)
    return True


@compiled_in_place
def end_phase(state: StorageState, agent: int, phase: int, now: float) -> None:
    """Add the time of the phase that ends to the total of the run."""
    state.measured.phase_s[phase] += now - state.turns.since[agent]
    state.turns.since[agent] = now
