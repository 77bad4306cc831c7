"""Prefill and decode instances in virtual time. Iterations between two changes of the batch are computed in one
step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from kvroute.prefix import Evicted, PrefixIndex
from kvroute.sim.chunked_prompts import ChunkedPrompts, WaitingPrompt
from kvroute.timing import IterationTime, PrefillTime


@dataclass(slots=True)
class PrefillInstance:
    """FIFO prefill, one prompt at a time in each pipeline stage; without queueing every prompt starts at once (a pure
    delay).

    Every stage takes an equal part of a prompt's time, and prompts keep their order (a permutation flow shop).
    """

    index: int
    time: PrefillTime
    queueing: bool
    stages: int = 1
    _free_s: list[float] = field(init=False)
    """[stage]: time at which it has finished its last prompt."""

    def __post_init__(self) -> None:
        self._free_s = [0.0] * self.stages

    @property
    def free_at_s(self) -> float:
        """Time at which all stages have finished."""
        return self._free_s[-1]

    def submit(self, at: float, tokens: int, cached_tokens: int) -> tuple[float, float]:
        """Add a prompt; return its (start, finish) in seconds."""
        start = max(at, self._free_s[0]) if self.queueing else at
        stage_s = self.time.seconds(tokens, cached_tokens) / self.stages
        finish = start
        for stage, free_s in enumerate(self._free_s):
            finish = (max(finish, free_s) if self.queueing else finish) + stage_s
            self._free_s[stage] = max(finish, free_s)
        return start, finish


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Changes at one iteration boundary of a decode instance."""

    finished: tuple[int, ...]
    admitted: tuple[int, ...]
    first_token_s: float
    """Time at which the admitted requests have their first token."""
    iteration_s: float
    """Duration of the iteration that starts now; 0 for an idle instance."""
    pulls: tuple[int, ...] = ()
    """Requests whose transfers start now."""
    began: tuple[int, ...] = ()
    """Requests whose prompt gets a slot now."""
    computed: tuple[int, ...] = ()
    """Requests whose prompt is complete; they have their first token now."""
    tokens: int = 0
    """Tokens that the iteration which starts now computes."""
    version: int = 0
    """Version of the plan."""


@dataclass(slots=True)
class DecodeInstance:
    """Continuous batching: requests join and leave at iteration boundaries.

    Between two changes of membership the batch is constant and the context grows by `batch` tokens per iteration. The
    time of any later boundary, and the first boundary at or after a given time, have a closed form
    (`IterationTime.span_s`). While prompts are computed beside the batch, every boundary is a step.
    """

    index: int
    time: IterationTime
    batch_max: int
    boundary_s: float = 0.0
    iteration: int = 0
    batch: int = 0
    context_tokens: int = 0
    version: int = 0
    """Version of the plan: it changes with every new plan, and a wake-up of an older version is ignored."""
    planned_steps: int = 0
    """Number of iterations from the last boundary to the planned one."""
    paused_until_s: float = 0.0
    """End of the last pause."""
    _active: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Heap of (last iteration, sequence, request, tokens at its end)."""
    _waiting: deque[tuple[int, int, int] | WaitingPrompt] = field(default_factory=deque)
    _pulls: deque[tuple[int, int]] = field(default_factory=deque)
    """(iteration at whose end its transfer starts, request), in order."""
    _sequence: int = 0
    prompts: ChunkedPrompts | None = None
    """Prompts that it computes itself; None: it cannot."""

    @property
    def waiting(self) -> int:
        """Number of requests that have no slot yet; the KV of the others has arrived, or they are aggregated."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Number of requests that have a slot: those in the batch, and those whose prompt is being computed."""
        return self.batch + (len(self.prompts) if self.prompts is not None else 0)

    def prompt_arrived(self, at: float, prompt: WaitingPrompt) -> float | None:
        """Add a request whose prompt is computed here. Return the time of the next `step` if it has changed."""
        assert self.prompts is not None, "this instance computes no prompts"
        return self._add(at, prompt)

    def pull(self, at: float, request: int) -> float | None:
        """Add a request whose transfer starts between steps. Return the time of the next `step` if it has changed, else
        None.

        The engine plans the request's transfer with the next iteration and starts it when that one has ended; an idle
        engine starts it at once (vLLM: `start_load_kv` follows the model's forward pass).
        """
        if self.running == 0:
            self._pulls.append((self.iteration, request))
            self.boundary_s, self.planned_steps = max(at, self.paused_until_s), 0
            self.version += 1
            return self.boundary_s
        if self.prompts:
            self._pulls.append((self.iteration + 2, request))
            return None  # every boundary is a step
        steps = self.time.steps_until(at - self.boundary_s, self.batch, self.context_tokens)
        self._pulls.append((self.iteration + max(steps, 1) + 1, request))
        self.planned_steps = self._next_change(self.planned_steps)
        self.version += 1
        return max(at, self.boundary_s + self.time.span_s(self.planned_steps, self.batch, self.context_tokens))

    def _next_change(self, steps: int) -> int:
        """Return the number of iterations until the first of: `steps` iterations, the end of a request, the start of a
        transfer."""
        steps = min(steps, self._active[0][0] - self.iteration)
        return min(steps, self._pulls[0][0] - self.iteration) if self._pulls else steps

    def transfer_done(self, at: float, request: int, input_tokens: int, output_tokens: int) -> float | None:
        """Add a request whose KV has arrived. Return the time of the next `step` if it has changed, else None."""
        return self._add(at, (request, input_tokens, output_tokens))

    def _add(self, at: float, entry: tuple[int, int, int] | WaitingPrompt) -> float | None:
        self._waiting.append(entry)
        if self.running == 0:
            self.boundary_s, self.planned_steps = max(at, self.paused_until_s), 0
            self.version += 1
            return self.boundary_s
        if self.running >= self.batch_max or len(self._waiting) > 1 or self.prompts:
            return None  # no slot before a request leaves, or the next boundary is planned already
        steps = self.time.steps_until(at - self.boundary_s, self.batch, self.context_tokens)
        self.planned_steps = self._next_change(max(steps, 0))
        self.version += 1
        return max(at, self.boundary_s + self.time.span_s(self.planned_steps, self.batch, self.context_tokens))

    def leave(self, at: float, request: int) -> float | None:
        """Remove a request before its output is complete: at the next boundary, or at once if it is waiting.

        Return the time of the next `step` if it has changed, else None. Unknown requests, and those whose prompt is
        being computed, are ignored.
        """
        self._waiting = deque(entry for entry in self._waiting if entry[0] != request)
        self._pulls = deque(entry for entry in self._pulls if entry[1] != request)
        place = next((place for place, entry in enumerate(self._active) if entry[2] == request), None)
        if place is None:
            return None
        last, sequence, _, tokens = self._active[place]
        steps = 1 if self.prompts else self.time.steps_until(at - self.boundary_s, self.batch, self.context_tokens)
        end = min(self.iteration + steps, last)
        self._active[place] = (end, sequence, request, tokens - (last - end))
        heapify(self._active)
        if self.planned_steps <= end - self.iteration:
            return None
        self.planned_steps = end - self.iteration
        self.version += 1
        return max(at, self.boundary_s + self.time.span_s(self.planned_steps, self.batch, self.context_tokens))

    def pause(self, at: float, seconds: float) -> float | None:
        """Stop the batch for some time: the iteration in progress takes longer. Return the time of the next `step` if
        it has changed, else None."""
        self.paused_until_s = max(self.paused_until_s, at) + seconds
        if self.running == 0:
            if not self._waiting:
                return None
            self.boundary_s = self.paused_until_s
            self.version += 1
            return self.boundary_s
        wake_s = self.boundary_s + self.time.span_s(self.planned_steps, self.batch, self.context_tokens)
        self.boundary_s += seconds
        self.version += 1
        return max(at, wake_s + seconds)

    def step(self, at: float) -> tuple[DecodeStep, float | None]:
        """Process the planned boundary at `at`: requests leave and join. Return the changes and the time of the next
        step (None if idle)."""
        self.iteration += self.planned_steps
        self.context_tokens += self.planned_steps * self.batch
        self.boundary_s = at
        computed = self._computed()
        finished = []
        while self._active and self._active[0][0] <= self.iteration:
            _, _, request, tokens = heappop(self._active)
            finished.append(request)
            self.batch -= 1
            self.context_tokens -= tokens
        admitted, began = [], []
        while self._waiting and self.running < self.batch_max:
            entry = self._waiting.popleft()
            if isinstance(entry, WaitingPrompt):
                assert self.prompts is not None
                self.prompts.start(entry)
                began.append(entry.request)
            else:
                self._join(*entry, emitted=0)
                admitted.append(entry[0])
        pulls = []
        while self._pulls and (self.running == 0 or self._pulls[0][0] <= self.iteration):
            pulls.append(self._pulls.popleft()[1])
        self.version += 1
        iteration_s, wake_s = self._plan(at)
        tokens = self.batch + (self.prompts.planned_tokens if self.prompts is not None else 0)
        first_s = at + iteration_s
        changes = DecodeStep(
            finished=tuple(finished),
            admitted=tuple(admitted),
            first_token_s=first_s,
            iteration_s=iteration_s,
            pulls=tuple(pulls),
            began=tuple(began),
            computed=tuple(computed),
            tokens=tokens,
            version=self.version,
        )
        return changes, wake_s

    def _computed(self) -> list[int]:
        """Let the requests whose prompt is complete join the batch, with their first token."""
        prompts = self.prompts.advance() if self.prompts is not None else []
        for request, input_tokens, output_tokens, _, joins in prompts:
            if joins:
                self._join(request, input_tokens, output_tokens, emitted=min(output_tokens, 1))
        return [prompt.request for prompt in prompts]

    def _join(self, request: int, input_tokens: int, output_tokens: int, *, emitted: int) -> None:
        """Add a request to the batch now. Args: `emitted`: tokens that it has generated already."""
        end = self.iteration + output_tokens - emitted
        heappush(self._active, (end, self._sequence, request, input_tokens + output_tokens))
        self._sequence += 1
        self.batch += 1
        self.context_tokens += input_tokens + emitted

    def _plan(self, at: float) -> tuple[float, float | None]:
        """Plan the next step; return the duration of the iteration that starts now, and the time of that step."""
        iteration_s = self.time.seconds(self.batch, self.context_tokens) if self.batch else 0.0
        if self.prompts:
            iteration_s += self.prompts.plan(self.batch)
            self.planned_steps = 1
            return iteration_s, at + iteration_s
        if self.batch == 0:
            return 0.0, None
        self.planned_steps = self._next_change(self._active[0][0] - self.iteration)
        return iteration_s, at + self.time.span_s(self.planned_steps, self.batch, self.context_tokens)


@dataclass(slots=True)
class KvMemory:
    """KV memory of every instance. Live requests reserve blocks; cached prefixes use the rest and are evicted first.

    Used memory is the cached blocks (pinned while a live request needs them) plus the reserved blocks that are in no
    cache: KV in transfer and space for the output. The sum can exceed the capacity by less than one block per request
    in transfer, because the router counts bytes and memory is allocated in whole blocks.
    """

    index: PrefixIndex
    capacity_blocks: list[int]
    reserved_blocks: list[int]

    def free_blocks(self, instance: int) -> int:
        """Number of blocks available to a new request if all unpinned cached prefixes are evicted."""
        return self.capacity_blocks[instance] - self.reserved_blocks[instance] - self.index.pinned_blocks(instance)

    def store(self, instance: int, blocks: tuple[int, ...]) -> list[Evicted]:
        """Cache a computed prompt as far as it fits beside the reserved blocks; return the evicted blocks."""
        return self.index.store(instance, blocks) + self._fit(instance)

    def has_room(self, instance: int, blocks: tuple[int, ...], hit: int) -> bool:
        """Return True if this chain can be reserved, given that `hit` of its blocks are cached."""
        self.index.pin(instance, blocks, hit)
        room = self.free_blocks(instance) >= len(blocks) - hit
        self.index.unpin(instance, blocks, hit)
        return room

    def reserve(self, instance: int, blocks: tuple[int, ...], hit: int, total: int) -> list[Evicted]:
        """Pin the `hit` cached blocks and reserve the other `total - hit`; return the evicted blocks. Called at
        dispatch."""
        if hit:
            pinned = self.index.pin(instance, blocks, hit)
            assert pinned == hit, "the router expected cached blocks that are absent"
        self.reserved_blocks[instance] += total - hit
        return self._fit(instance)

    def transfer_done(self, instance: int, blocks: tuple[int, ...], hit: int) -> list[Evicted]:
        """Turn reserved blocks into cached, pinned blocks: the KV has arrived. Return the evicted blocks."""
        self.reserved_blocks[instance] -= len(blocks) - hit
        evicted = self.index.store(instance, blocks, pin=True)
        if hit:
            self.index.unpin(instance, blocks, hit)  # the whole chain is pinned now
        return evicted + self._fit(instance)

    def give_up(self, instance: int, blocks: tuple[int, ...], hit: int, total: int) -> list[Evicted]:
        """Free the reserved blocks and unpin the cached ones: the KV will not arrive. Return the evicted blocks."""
        if hit:
            self.index.unpin(instance, blocks, hit)
        self.reserved_blocks[instance] -= total - hit
        return self._fit(instance)

    def release(self, instance: int, blocks: tuple[int, ...], total: int) -> list[Evicted]:
        """Release a finished request: its prefix stays cached, and its output blocks are free. Return the evicted
        blocks."""
        self.index.unpin(instance, blocks, len(blocks))
        self.reserved_blocks[instance] -= total - len(blocks)
        return self._fit(instance)

    def _fit(self, instance: int) -> list[Evicted]:
        spare = self.capacity_blocks[instance] - self.reserved_blocks[instance]
        if self.index.used_blocks(instance) <= spare:
            return []
        return self.index.make_room(instance, self.reserved_blocks[instance])
