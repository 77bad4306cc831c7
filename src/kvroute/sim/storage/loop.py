"""The event loop of the fast simulation, and the turns of the agents."""

from __future__ import annotations

from kvroute.compiled import compiled_in_place
from kvroute.sim.storage import decode, prefill, reads
from kvroute.sim.storage.events import (
    ARRIVAL,
    FETCH_DECODE,
    FETCH_PREFILL,
    FORWARD,
    LANDED,
    READ,
    pop,
    push,
)
from kvroute.sim.storage.queues import put
from kvroute.sim.storage.state import DECODED, NOTHING, RunConstants, StorageState


@compiled_in_place
def run_events(rules: RunConstants, state: StorageState) -> None:
    """Handle all events until every agent has ended, or until the end of the run."""
    agenda, measured = state.agenda, state.measured
    while measured.counts[1] < len(measured.agent_end_s):
        end, engine = decode.next_end(state)
        decoded = agenda.counts[0] == 0 or end < agenda.time[0]
        now = end if decoded else agenda.time[0]
        if now > rules.end_s:
            return
        measured.times[0] = now
        measured.counts[2] += 1
        if decoded:
            _end_turn(rules, state, decode.finish(rules, state, engine, now), now)
        else:
            _, kind, item = pop(agenda)
            _handle(rules, state, kind, item, now)


@compiled_in_place
def _handle(rules: RunConstants, state: StorageState, kind: int, item: int, now: float) -> None:
    """Handle an event of an agent or a group."""
    if kind == ARRIVAL:
        _arrive(rules, state, item, now)
    elif kind == READ:
        if reads.finish(rules, state, item, now):
            prefill.ready(rules, state, item, now)
    elif kind == FORWARD:
        _end_forward(rules, state, item, now)
    elif kind == LANDED:
        decode.join(rules, state, item, now)
    elif kind == FETCH_PREFILL:
        prefill.fetch(rules, state, item, now)
        push(state.agenda, now + rules.fetch_s, FETCH_PREFILL, item)
    else:
        assert kind == FETCH_DECODE
        decode.fetch(rules, state, item, now)
        push(state.agenda, now + rules.fetch_s, FETCH_DECODE, item)


@compiled_in_place
def _arrive(rules: RunConstants, state: StorageState, agent: int, now: float) -> None:
    """Begin the present turn of an agent."""
    turns, engines = state.turns, state.engines
    context = turns.contexts[turns.turn[agent]]
    turns.hit[agent] = context - context % rules.block_tokens
    turns.cached[agent] = turns.hit[agent]
    turns.prompt[agent] = turns.prompts[turns.turn[agent]]
    turns.arrived[agent] = now
    turns.since[agent] = now
    turns.prefill_engine[agent] = NOTHING
    turns.decode_engine[agent] = NOTHING
    if rules.scheduling:
        put(state.waiting, 0, agent)
        put(state.placing, 0, agent)
        return
    prefill.assign(state, agent, engines.cursor[0] % len(engines.prefill_tokens))
    decode.assign(state, agent, engines.cursor[1] % len(engines.decode_tokens))
    engines.cursor[0] += 1
    engines.cursor[1] += 1
    reads.begin(rules, state, agent, now)


@compiled_in_place
def _end_forward(rules: RunConstants, state: StorageState, group: int, now: float) -> None:
    """End a forward pass: its complete prompts go to decode engines, and the group computes the next batch."""
    turns, measured = state.turns, state.measured
    agent = prefill.finish(rules, state, group)
    while agent != NOTHING:
        node = turns.prefill_engine[agent] // rules.gpus
        reads.release(rules, state, node, turns.prefill_tokens[agent], now)
        measured.first_s[agent] = now
        decode.hold(rules, state, agent, now)
        agent = prefill.finish(rules, state, group)
    prefill.start(rules, state, group, now)


@compiled_in_place
def _end_turn(rules: RunConstants, state: StorageState, agent: int, now: float) -> None:
    """Record a turn and begin the agent's next one."""
    turns, measured = state.turns, state.measured
    reads.end_phase(state, agent, DECODED, now)
    number = measured.counts[0]
    measured.counts[0] += 1
    generated = turns.generated[turns.turn[agent]]
    first = measured.first_s[agent]
    measured.arrived_s[number] = turns.arrived[agent]
    measured.ttft_s[number] = first - turns.arrived[agent]
    if generated > 1:
        measured.ttst_s[number] = measured.second_s[agent] - first
        measured.tpot_s[number] = (now - first) / (generated - 1)
    _write_back(rules, state, agent, generated)
    turns.turn[agent] += 1
    if turns.turn[agent] < turns.end[agent]:
        push(state.agenda, now + turns.think_s[turns.turn[agent]], ARRIVAL, agent)
        return
    measured.agent_end_s[agent] = now
    measured.counts[1] += 1
    if 2 * measured.counts[1] <= len(measured.agent_end_s):
        measured.times[1] = now


@compiled_in_place
def _write_back(rules: RunConstants, state: StorageState, agent: int, generated: int) -> None:
    """Count the whole blocks that the decode node has written to storage during the turn."""
    turns = state.turns
    total = turns.prompt[agent] + generated
    blocks = total // rules.block_tokens - turns.hit[agent] // rules.block_tokens
    node = rules.prefill_nodes + turns.decode_engine[agent] // rules.gpus
    state.nodes.written_bytes[node] += blocks * rules.block_tokens * rules.kv_bytes
