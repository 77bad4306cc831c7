"""The max-min mode of the storage simulation: plain objects, and every copy between GPUs and nodes as a flow.

It follows the same model as the fast mode (`kvroute.sim.storage.run`) and calls the same policy functions, but the
compute NICs are links that flows share max-min fairly. It is slow, and checks the fast mode on small clusters.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from tests.sim.storage_max_min_batch import DecodeBatch
from tests.sim.storage_max_min_events import Action, Copy, TimedActions

from kvroute.policies.storage.dualpath_kernels import (
    NO_ENGINE,
    NO_READS,
    attention_s,
    decode_engine,
    fitting_requests,
    least,
    prefill_engine,
    prefill_read_tokens,
    quota_tokens,
    token_limit,
)
from kvroute.sim.storage.setup import rules_of
from kvroute.sim.storage.spec import AgentRun


@dataclass(slots=True, eq=False)
class _Request:
    """A turn of an agent."""

    agent: int
    turn: int
    prompt: int
    hit: int
    generated: int
    arrived_s: float
    cached: int = 0
    prefill_engine: int = -1
    decode_engine: int = -1
    prefill_tokens: int = 0
    """Tokens that the prefill node reads from storage."""
    reads: int = 0
    first_s: float = math.nan

    @property
    def tokens(self) -> int:
        """Tokens at the end of the turn."""
        return self.prompt + self.generated


@dataclass(frozen=True, slots=True)
class MaxMinResult:
    """Result of a run in max-min mode."""

    end_s: float
    """Time of the last event, in seconds."""
    turns: int
    ttft_mean_s: float
    read_bytes: tuple[float, ...]
    """Bytes read through each node's storage NIC, prefill nodes first."""


def run_max_min(run: AgentRun) -> MaxMinResult:
    """Simulate the agents of a run until all have ended; `run.end_s` must be infinite."""
    assert math.isinf(run.end_s), "the max-min mode runs to the end"
    return _MaxMin(run).play()


class _MaxMin:
    """The state of a run."""

    def __init__(self, run: AgentRun) -> None:
        self.run, self.rules, cluster = run, rules_of(run), run.cluster
        self.prefills, self.decodes = cluster.prefill_nodes * cluster.gpus, cluster.decode_nodes * cluster.gpus
        nodes, engines = cluster.nodes, self.prefills + self.decodes
        storage = [cluster.storage_bytes_per_s] * nodes
        self.events = TimedActions(np.array(storage + [cluster.compute_bytes_per_s] * 2 * engines))
        self.cursor = [0, 0, 0]
        self.waiting, self.unplaced = deque[_Request](), deque[_Request]()
        self.ready = [deque[_Request]() for _ in range(self.prefills)]
        self.batch: list[list[tuple[_Request, int]]] = [[] for _ in range(self.prefills)]
        self.busy = [False] * (self.prefills // self.rules.prefill_group)
        self.placing = [deque[_Request]() for _ in range(self.decodes // self.rules.decode_group)]
        self.held = [deque[_Request]() for _ in range(self.decodes)]
        self.prefill_tokens, self.decode_tokens = np.zeros(self.prefills), np.zeros(self.decodes)
        self.sequences = np.zeros(self.decodes, np.int64)
        self.slots = [0] * self.decodes
        self.decode_free = np.full(self.decodes, float(run.model.decode_kv_tokens))
        self.group_tokens = np.zeros(len(self.placing))
        self.node = np.arange(self.prefills) // cluster.gpus
        self.queued, self.read_bytes = np.zeros(nodes), np.zeros(nodes)
        self.reads = [deque[tuple[float, Action]]() for _ in range(nodes)]
        self.buffer = [cluster.buffer_bytes] * nodes
        self.buffering = [deque[_Request]() for _ in range(nodes)]
        self.batches = [DecodeBatch(self.events, self._step_s, self._end_sequence) for _ in range(self.decodes)]
        self.ttft_s: list[float] = []
        self.ended = 0

    def play(self) -> MaxMinResult:
        """Handle all events."""
        starts = self.run.trajectories.start
        for agent, trajectory in enumerate(self.run.trajectory.tolist()):
            first = int(starts[trajectory])
            self.events.at(
                float(self.run.start_s[agent] + self.run.trajectories.think_s[first]),
                partial(self._arrive, agent, first),
            )
        if self.rules.scheduling:
            for fetch, groups in ((self._fetch_prefill, len(self.busy)), (self._fetch_decode, len(self.placing))):
                for group in range(groups):
                    self.events.at(self.rules.fetch_s * (group + 1) / groups, partial(self._tick, fetch, group))
        while self.ended < len(self.run.trajectory):
            self.events.step()
        mean_s = float(np.mean(self.ttft_s))
        return MaxMinResult(self.events.now, len(self.ttft_s), mean_s, tuple(self.read_bytes.tolist()))

    def _copy(self, path: list[int], tokens: float) -> Copy:
        """Return the copy of tokens' KV over links; the oracle needs none."""
        return path, 0.0 if self.rules.reads == NO_READS else tokens * self.rules.kv_bytes

    def _out(self, engine: int) -> int:
        """Link from a GPU or its node's memory into the GPU's compute NIC; decode engines follow prefill engines."""
        return self.run.cluster.nodes + 2 * engine

    def _in(self, engine: int) -> int:
        return self._out(engine) + 1

    def _decode_node(self, request: _Request) -> int:
        return self.rules.prefill_nodes + request.decode_engine // self.rules.gpus

    # Arrival and placement

    def _arrive(self, agent: int, turn: int) -> None:
        made, block = self.run.trajectories, self.rules.block_tokens
        cached = int(made.cached[turn])
        hit = cached - cached % block
        request = _Request(
            agent, turn, int(made.prompt[turn]), hit, int(made.generated[turn]), self.events.now, cached=hit
        )
        if self.rules.scheduling:
            self.waiting.append(request)
            self.unplaced.append(request)
            return
        self._assign_prefill(request, self.cursor[0] % self.prefills)
        self._assign_decode(request, self.cursor[1] % self.decodes)
        self.cursor[0] += 1
        self.cursor[1] += 1
        self._begin(request)

    def _tick(self, fetch: Callable[[int], None], group: int) -> None:
        fetch(group)
        self.events.at(self.events.now + self.rules.fetch_s, partial(self._tick, fetch, group))

    def _fetch_prefill(self, group: int) -> None:
        first = group * self.rules.prefill_group
        last = first + self.rules.prefill_group
        while self.waiting:
            alpha, beta = self.rules.alpha, self.rules.beta
            engine = prefill_engine(self.prefill_tokens, self.queued, self.node, first, last, alpha, beta)
            if engine == NO_ENGINE:
                return
            request = self.waiting.popleft()
            self._assign_prefill(request, engine)
            if request.decode_engine >= 0:
                self._begin(request)

    def _fetch_decode(self, group: int) -> None:
        while self.unplaced:
            target = least(self.group_tokens)
            self.group_tokens[target] += self.unplaced[0].tokens
            self.placing[target].append(self.unplaced.popleft())
        first, queue = group * self.rules.decode_group, self.placing[group]
        last = first + self.rules.decode_group
        free = float(self.decode_free[first:last].sum())
        lengths = np.array([float(request.tokens) for request in queue])
        fitting = float(lengths[: fitting_requests(lengths, free)].sum())
        limit = token_limit(fitting, float(self.decode_tokens[first:last].sum()), last - first)
        while queue:
            length = float(queue[0].tokens)
            engine = decode_engine(self.decode_tokens, self.sequences, self.decode_free, length, limit, first, last)
            if engine == NO_ENGINE:
                return
            request = queue.popleft()
            self._assign_decode(request, engine)
            self.decode_free[engine] -= length
            if request.prefill_engine >= 0:
                self._begin(request)

    def _assign_prefill(self, request: _Request, engine: int) -> None:
        request.prefill_engine = engine
        self.prefill_tokens[engine] += request.prompt

    def _assign_decode(self, request: _Request, engine: int) -> None:
        request.decode_engine = engine
        self.decode_tokens[engine] += request.tokens
        self.sequences[engine] += 1

    # Buffers and reads

    def _begin(self, request: _Request) -> None:
        """Choose the side that reads, and wait for the buffers."""
        source, target = int(self.node[request.prefill_engine]), self._decode_node(request)
        request.prefill_tokens = self._prefill_share(
            request.hit, float(self.queued[source]), float(self.queued[target])
        )
        if self.rules.reads == NO_READS:
            self.events.at(self.events.now, partial(self._staged, request))
            return
        self.queued[source] += request.prefill_tokens
        self.queued[target] += request.hit - request.prefill_tokens
        self.buffering[target].append(request)
        self._serve_buffer(target)

    def _prefill_share(self, hit: int, source: float, target: float) -> int:
        rules, token_s = self.rules, self.rules.kv_bytes / self.rules.storage_bytes_per_s
        self.cursor[2] += 1
        queues_s = source * token_s, target * token_s
        return prefill_read_tokens(rules.reads, hit, rules.block_tokens, *queues_s, token_s, token_s, self.cursor[2])

    def _serve_buffer(self, node: int) -> None:
        """Give memory to the requests that wait for it, first in, first out: decode nodes first, then prefill nodes."""
        queue, prefill = self.buffering[node], node < self.rules.prefill_nodes
        while queue:
            request = queue[0]
            nbytes = (request.prefill_tokens if prefill else request.prompt) * self.rules.kv_bytes
            if nbytes > self.buffer[node]:
                return
            self.buffer[node] -= nbytes
            queue.popleft()
            source = int(self.node[request.prefill_engine])
            if prefill or not request.prefill_tokens:
                self._read(request)
            else:
                self.buffering[source].append(request)
                self._serve_buffer(source)

    def _read(self, request: _Request) -> None:
        sides = (
            (int(self.node[request.prefill_engine]), request.prefill_tokens),
            (
                self._decode_node(request),
                request.hit - request.prefill_tokens,
            ),
        )
        parts = [(node, tokens) for node, tokens in sides if tokens]
        request.reads = len(parts)
        if not parts:
            self.events.at(self.events.now, partial(self._staged, request))
        for node, tokens in parts:
            self.read_bytes[node] += tokens * self.rules.kv_bytes
            self.reads[node].append((tokens, partial(self._part_read, request, node)))
            if len(self.reads[node]) == 1:
                self.events.copy(*self._copy([node], tokens), self.reads[node][0][1])

    def _part_read(self, request: _Request, node: int) -> None:
        """End a read and begin the node's next one."""
        self.reads[node].popleft()
        if self.reads[node]:
            tokens, landed = self.reads[node][0]
            self.events.copy(*self._copy([node], tokens), landed)
        request.reads -= 1
        if not request.reads:
            self.queued[self.node[request.prefill_engine]] -= request.prefill_tokens
            self.queued[self._decode_node(request)] -= request.hit - request.prefill_tokens
            self._staged(request)

    # Prefill

    def _staged(self, request: _Request) -> None:
        self.ready[request.prefill_engine].append(request)
        group = request.prefill_engine // self.rules.prefill_group
        if not self.busy[group]:
            self._forward(group)

    def _forward(self, group: int) -> None:
        """Start a forward pass of a group: its computation, and the copies of all its engines."""
        first = group * self.rules.prefill_group
        engines = range(first, first + self.rules.prefill_group)
        spent = [self._fill(engine) for engine in engines]
        members = [(engine, request, new) for engine in engines for request, new in self.batch[engine]]
        self.busy[group] = bool(members)
        if not members:
            return
        tokens = sum(new for _, _, new in members)
        compute_s = self.rules.forward_s + max(spent) + self.rules.dense_token_s * tokens / len(engines)
        loads = [part for member in members for part in self._loads(*member)]
        end = partial(self._end_forward, group)
        if self.rules.layerwise:
            pushes = [part for member in members for part in self._pushes(*member)]
            self.events.after_all([*loads, *pushes], compute_s, end)
        else:
            self.events.after_all(loads, 0.0, lambda: self.events.at(self.events.now + compute_s, end))

    def _loads(self, engine: int, request: _Request, new: int) -> list[Copy]:
        """Copies of cached KV to the prefill GPU: from its own node's memory, and from the decode node."""
        target = self.prefills + request.decode_engine
        return [
            self._copy([self._out(engine), self._in(engine)], request.prefill_tokens),
            self._copy([self._out(target), self._in(engine)], request.cached - request.prefill_tokens),
        ]

    def _pushes(self, engine: int, request: _Request, new: int) -> list[Copy]:
        """Copies to the decode node: the new tokens, and in the first pass what the prefill node has read."""
        whole = request.prefill_tokens if request.cached == request.hit else 0
        return [self._copy([self._out(engine), self._in(self.prefills + request.decode_engine)], whole + new)]

    def _fill(self, engine: int) -> float:
        """Choose the requests of an engine's pass; return their attention time."""
        rules, spent_s, tokens, held = self.rules, 0.0, 0, 0
        self.batch[engine] = []
        for request in self.ready[engine]:
            left = request.prompt - request.cached
            most = min(left, rules.forward_tokens - tokens)
            new = quota_tokens(request.cached, most, rules.quota_s - spent_s, rules.attention)
            if new < 1 and not self.batch[engine]:
                new = 1
            held += request.cached + new
            if new < 1 or (not rules.layerwise and held > rules.prefill_kv_tokens and self.batch[engine]):
                break
            self.batch[engine].append((request, new))
            spent_s += attention_s(request.cached, new, rules.attention)
            tokens += new
            if new < left:
                break
        return spent_s

    def _end_forward(self, group: int) -> None:
        first = group * self.rules.prefill_group
        for engine in range(first, first + self.rules.prefill_group):
            for request, new in self.batch[engine]:
                request.cached += new
                if request.cached == request.prompt:
                    self.ready[engine].popleft()
                    self.prefill_tokens[engine] -= request.prompt
                    self._release(int(self.node[engine]), request.prefill_tokens)
                    request.first_s = self.events.now
                    self.ttft_s.append(self.events.now - request.arrived_s)
                    self.held[request.decode_engine].append(request)
                    self._admit(request.decode_engine)
        self._forward(group)

    def _release(self, node: int, tokens: int) -> None:
        if self.rules.reads != NO_READS:
            self.buffer[node] += tokens * self.rules.kv_bytes
            self._serve_buffer(node)

    # Decode

    def _admit(self, engine: int) -> None:
        """Copy prompts to the GPU while there are slots and, if it is not reserved yet, memory."""
        while self.held[engine] and self.slots[engine] < self.rules.sequences_max:
            request = self.held[engine][0]
            if not self.rules.scheduling:
                if self.decode_free[engine] < request.tokens:
                    return
                self.decode_free[engine] -= request.tokens
            self.held[engine].popleft()
            self.slots[engine] += 1
            own = [self._out(self.prefills + engine), self._in(self.prefills + engine)]
            copy = partial(self.events.copy, *self._copy(own, request.prompt), partial(self._join, request))
            if self.rules.layerwise:
                copy()
            else:
                across = [self._out(request.prefill_engine), self._in(self.prefills + engine)]
                self.events.copy(*self._copy(across, request.prompt), copy)

    def _join(self, request: _Request) -> None:
        self._release(self._decode_node(request), request.prompt)
        self.batches[request.decode_engine].join(request, float(request.generated - 1))

    def _step_s(self, batch: int) -> float:
        return self.rules.step_s + self.rules.sequence_s * batch

    def _end_sequence(self, request: _Request) -> None:
        engine = request.decode_engine
        self.slots[engine] -= 1
        self.decode_free[engine] += request.tokens
        self.decode_tokens[engine] -= request.tokens
        self.sequences[engine] -= 1
        if self.rules.scheduling:
            self.group_tokens[engine // self.rules.decode_group] -= request.tokens
        self._admit(engine)
        self._next_turn(request)

    def _next_turn(self, request: _Request) -> None:
        made, following = self.run.trajectories, request.turn + 1
        if following < made.start[self.run.trajectory[request.agent] + 1]:
            self.events.at(
                self.events.now + float(made.think_s[following]), partial(self._arrive, request.agent, following)
            )
        else:
            self.ended += 1
