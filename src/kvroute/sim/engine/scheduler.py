"""The scheduler of an engine: which prompts and requests each step computes, as in vLLM's V1 engine.

Requests that decode come first, then prompts in the order of their arrival, up to a number of tokens per step and of
requests at once. The KV cache of a request grows block by block; if there is no free block, the request that has
started last is preempted, and computed again later from what is left of its blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from kvroute.sim.engine.blocks import KvBlocks
from kvroute.timing.steps import StepWork


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """An engine; the names in brackets are vLLM's arguments."""

    step_tokens: int = 2048
    """Most tokens of a step (`max_num_batched_tokens`)."""
    requests_max: int = 128
    """Most requests that have started and not ended (`max_num_seqs`)."""
    blocks: int
    """Blocks of KV memory (`num_gpu_blocks`)."""
    block_tokens: int = 16
    prefix_cache: bool = True
    """Free blocks are a prefix cache (`enable_prefix_caching`)."""
    reserve_prompt: bool = True
    """A request starts only if there are blocks for its whole prompt."""
    asynchronous: bool = True
    """A step is planned when the one before it starts, and not when that one has ended (`async_scheduling`)."""
    request_s: float = 0.0
    """Time of a request besides its steps: HTTP and tokens, half of it before and half of it after."""
    streaming_request_s: float = 0.0
    """Time that each other request of a step, which also sends a token, adds to an answer."""


class SchedulingState(Enum):
    """Where a request is in the engine."""

    WAITING = auto()
    PROMPT = auto()
    DECODING = auto()
    ENDING = auto()
    """Its last token is being computed."""
    ENDED = auto()
    ABORTED = auto()


@dataclass(slots=True, eq=False)
class EngineRequest:
    """A request, its times, and how far the engine is with it."""

    number: int
    arrived_s: float
    input_tokens: int
    output_tokens: int
    keys: tuple[Hashable, ...] = ()
    """Keys of the first full blocks of the prompt, which other requests may share; later blocks are its own."""
    group: int = 0
    """Part of a load that it belongs to."""
    started_s: float | None = None
    """Time at which its first step was planned."""
    first_token_s: float | None = None
    ended_s: float | None = None
    failed: bool = False
    """Whether the client gave up."""
    state: SchedulingState = SchedulingState.WAITING
    cached_tokens: int = 0
    """Tokens that its first start found in the cache."""
    preemptions: int = 0
    computed: int = 0
    """Tokens whose KV cache exists or is being computed; for decoding requests only those of the last prompt."""
    target: int = 0
    """Tokens to compute until the next token of the output: the prompt, and after a preemption also the output."""
    generated: int = 0
    """Output tokens that were generated before the last start."""
    since: int = -1
    """Step that computes the last token of the prompt."""
    last: int = -1
    """Step that computes the last token of the output."""
    blocks: list[int] = field(default_factory=list)

    def block_key(self, position: int) -> Hashable:
        """Return the key of one of its blocks."""
        return self.keys[position] if position < len(self.keys) else (self.number, position)


class PlannedStep(NamedTuple):
    """A step, and the requests whose next token it generates first."""

    number: int
    work: StepWork
    first: tuple[EngineRequest, ...]


class StepScheduler:
    """Plans the steps of one rank. It has no clock: `plan` the next step, and report its end with `finish`.

    Requests that decode are not visited in each step. They are kept by the step, modulo the block size, in which they
    begin another block, and by the step in which they end; the number of their tokens grows by theirs in each step.
    """

    def __init__(self, spec: EngineSpec) -> None:
        """Start without requests."""
        self._spec = spec
        self._blocks = KvBlocks(spec.blocks)
        self._waiting: deque[EngineRequest] = deque()
        self._running: list[EngineRequest] = []
        """Requests that have started, in that order."""
        self._prompts: list[EngineRequest] = []
        self._decoding = 0
        self._context_tokens = 0
        """Tokens to which the requests that decode attend in the next step."""
        self._begin_block: list[list[EngineRequest]] = [[] for _ in range(spec.block_tokens)]
        self._end: dict[int, list[EngineRequest]] = {}
        self._number = 0
        self.preemptions = 0

    @property
    def load(self) -> int:
        """What vLLM's router balances between ranks: four times the requests that wait, and those that have started."""
        return 4 * len(self._waiting) + len(self._running)

    @property
    def running(self) -> int:
        """Number of requests that have started and not ended."""
        return len(self._running)

    @property
    def used_blocks(self) -> int:
        """Number of blocks that requests hold."""
        return self._blocks.used

    def fits(self, request: EngineRequest) -> bool:
        """Return whether the KV cache of a request fits into an empty engine."""
        return self._count(request.input_tokens + max(request.output_tokens - 1, 0)) <= self._spec.blocks

    def add(self, request: EngineRequest) -> None:
        """Let a request wait for its start."""
        assert request.output_tokens > 0, "a request has output tokens"
        assert self.fits(request), "the KV cache of the request is larger than the engine's memory"
        self._waiting.append(request)

    def plan(self, at: float) -> PlannedStep | None:
        """Plan the next step; None: there is nothing to compute."""
        step = self._number
        for request in self._end.get(step - 1, ()):  # their last token is computed in the step before
            if request.state is SchedulingState.DECODING:
                self._leave(request, step)
                request.state = SchedulingState.ENDING
        before = self.preemptions
        for request in tuple(self._begin_block[step % self._spec.block_tokens]):
            if request.state is SchedulingState.DECODING:
                self._grow(request, 1, step)
        decoding, context_tokens = self._decoding, self._context_tokens
        budget, work = self._spec.step_tokens - decoding, []
        for request in tuple(self._prompts):
            tokens = min(request.target - request.computed, budget)
            if tokens <= 0 or not self._grow(request, self._missing(request, request.computed + tokens), step):
                break
            work.append(self._compute(request, tokens))
            budget -= tokens
        while self._waiting and budget > 0 and self.preemptions == before:
            tokens = self._start(self._waiting[0], at, budget) if len(self._running) < self._spec.requests_max else 0
            if not tokens:
                break
            work.append(self._compute(self._waiting.popleft(), tokens))
            budget -= tokens
        if not work and not decoding:
            return None
        self._context_tokens += decoding
        first = [request for request in self._prompts if request.computed == request.target]
        for request in first:
            self._begin_decoding(request, step)
        self._number += 1
        return PlannedStep(step, StepWork(tuple(work), decoding, context_tokens), tuple(first))

    def finish(self, step: PlannedStep) -> tuple[EngineRequest, ...]:
        """End a step; return the requests that have their last token, whose blocks are free now."""
        ended = tuple(self._end.pop(step.number, ()))
        for request in ended:
            if request.state is SchedulingState.DECODING:
                self._leave(request, step.number + 1)
            request.state = SchedulingState.ENDED
            self._running.remove(request)
            self._release(request, request.input_tokens + request.output_tokens - 1)
        return ended

    def abort(self, request: EngineRequest) -> bool:
        """Remove a request before its end; return whether it was there. One whose last token is being computed ends."""
        if request.state is SchedulingState.WAITING:
            self._waiting.remove(request)
        elif request.state in (SchedulingState.PROMPT, SchedulingState.DECODING):
            self._stop(request, self._number)
        else:
            return False
        request.state = SchedulingState.ABORTED
        return True

    def _compute(self, request: EngineRequest, tokens: int) -> tuple[int, int]:
        """Add tokens of a prompt to the step; return them as in `StepWork.prompts`. Others find its blocks at once."""
        computed = request.computed
        request.computed += tokens
        self._name(request, request.computed)
        return computed, tokens

    def _count(self, tokens: int) -> int:
        return -(-tokens // self._spec.block_tokens)

    def _missing(self, request: EngineRequest, tokens: int) -> int:
        """Return the number of blocks that a request needs besides its own to hold this many tokens."""
        return self._count(tokens) - len(request.blocks)

    def _grow(self, request: EngineRequest, count: int, step: int) -> bool:
        """Give blocks to a request, and preempt others for them; return whether it has them. False: it was preempted
        itself."""
        while (taken := self._blocks.take(count)) is None:
            latest = next(
                found
                for found in reversed(self._running)
                if found.state in (SchedulingState.PROMPT, SchedulingState.DECODING)
            )
            self._preempt(latest, step)
            if latest is request:
                return False
        request.blocks += taken
        return True

    def _preempt(self, request: EngineRequest, step: int) -> None:
        """Take all blocks from a request. It waits in front of the others and is computed again."""
        if request.state is SchedulingState.DECODING:
            request.generated += step - request.since
        self._stop(request, step)
        request.state, request.computed = SchedulingState.WAITING, 0
        request.preemptions += 1
        self.preemptions += 1
        self._waiting.appendleft(request)

    def _start(self, request: EngineRequest, at: float, budget: int) -> int:
        """Start a request if there are blocks for it; return the tokens that its first step computes, 0: none."""
        request.target = request.input_tokens + request.generated
        found: list[int] = []
        if self._spec.prefix_cache:
            most = (request.target - 1) // self._spec.block_tokens  # the last token is computed in all cases
            found = self._blocks.find(map(request.block_key, range(most)))
        cached = len(found) * self._spec.block_tokens
        tokens = min(request.target - cached, budget)
        needed = self._count(cached + tokens) - len(found)
        reserved = self._count(request.target) - len(found) if self._spec.reserve_prompt else needed
        if self._blocks.free - self._blocks.free_among(found) < reserved:
            return 0
        self._blocks.share(found)
        taken = self._blocks.take(needed)
        assert taken is not None, "the blocks were counted"
        request.blocks = found + taken
        request.computed, request.state = cached, SchedulingState.PROMPT
        if request.started_s is None:
            request.started_s, request.cached_tokens = at, cached
        self._running.append(request)
        self._prompts.append(request)
        return tokens

    def _begin_decoding(self, request: EngineRequest, step: int) -> None:
        """Let a request decode from the next step on; `step` computes the last token of its prompt."""
        self._prompts.remove(request)
        request.since, request.state = step, SchedulingState.DECODING
        request.last = step + request.output_tokens - request.generated - 1
        if request.last > step:
            self._decoding += 1
            self._context_tokens += request.target + 1
            self._block_turn(request).append(request)
        self._end.setdefault(request.last, []).append(request)

    def _block_turn(self, request: EngineRequest) -> list[EngineRequest]:
        return self._begin_block[(request.since + 1 - request.target) % self._spec.block_tokens]

    def _leave(self, request: EngineRequest, step: int) -> None:
        """Remove a request from those that decode in `step`."""
        if request.last > request.since:
            self._decoding -= 1
            self._context_tokens -= request.target + step - request.since
            self._block_turn(request).remove(request)

    def _stop(self, request: EngineRequest, step: int) -> None:
        """Remove a request that has started; its blocks are free, and `step` does not compute it."""
        computed = request.computed
        if request.state is SchedulingState.PROMPT:
            self._prompts.remove(request)
        else:
            self._end[request.last].remove(request)
            self._leave(request, step)
            computed = request.target + step - request.since - 1
        self._running.remove(request)
        self._release(request, computed)

    def _name(self, request: EngineRequest, tokens: int) -> None:
        """Let others find the full blocks of the first `tokens` tokens of a prompt."""
        if self._spec.prefix_cache:
            for position in range(tokens // self._spec.block_tokens):
                self._blocks.name(request.blocks[position], request.block_key(position))

    def _release(self, request: EngineRequest, tokens: int) -> None:
        """Free the blocks of a request, which has computed this many tokens."""
        self._name(request, tokens)
        self._blocks.release(request.blocks)
        request.blocks = []
