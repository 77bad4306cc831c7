"""Prefill and decode instances in virtual time. Iterations between two changes of the batch are computed in one
step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from kvroute.prefix import Evicted, PrefixIndex
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
class Step:
    """Changes at one iteration boundary of a decode instance."""

    finished: tuple[int, ...]
    admitted: tuple[int, ...]
    first_token_s: float
    """Time at which the admitted requests have their first token."""
    iteration_s: float
    """Duration of the iteration that starts now; 0 for an idle instance."""
    pulls: tuple[int, ...] = ()
    """Requests whose transfers start now."""


@dataclass(slots=True)
class DecodeInstance:
    """Continuous batching: requests join and leave at iteration boundaries.

    Between two changes of membership the batch is constant and the context grows by `batch` tokens per iteration. The
    time of any later boundary, and the first boundary at or after a given time, have a closed form
    (`IterationTime.span_s`).
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
    _active: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Heap of (last iteration, sequence, request, tokens at its end)."""
    _waiting: deque[tuple[int, int, int]] = field(default_factory=deque)
    _pulls: deque[tuple[int, int]] = field(default_factory=deque)
    """(iteration at whose end its transfer starts, request), in order."""
    _sequence: int = 0

    @property
    def waiting(self) -> int:
        """Number of requests whose KV has arrived and that have no slot yet."""
        return len(self._waiting)

    def pull(self, at: float, request: int) -> float:
        """Add a request whose transfer starts between steps. Return the time of the next `step`, which has changed.

        The engine plans the request's transfer with the next iteration and starts it when that one has ended; an idle
        engine starts it at once (vLLM: `start_load_kv` follows the model's forward pass).
        """
        if self.batch == 0:
            self._pulls.append((self.iteration, request))
            self.boundary_s, self.planned_steps = at, 0
            self.version += 1
            return at
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
        self._waiting.append((request, input_tokens, output_tokens))
        if self.batch == 0:
            self.boundary_s, self.planned_steps = at, 0
            self.version += 1
            return at
        if self.batch >= self.batch_max or len(self._waiting) > 1:
            return None  # no slot before a request leaves, or the next boundary is planned already
        steps = self.time.steps_until(at - self.boundary_s, self.batch, self.context_tokens)
        self.planned_steps = self._next_change(max(steps, 0))
        self.version += 1
        return max(at, self.boundary_s + self.time.span_s(self.planned_steps, self.batch, self.context_tokens))

    def leave(self, at: float, request: int) -> float | None:
        """Remove a request before its output is complete: at the next boundary, or at once if it is waiting.

        Return the time of the next `step` if it has changed, else None. Unknown requests are ignored.
        """
        self._waiting = deque(entry for entry in self._waiting if entry[0] != request)
        self._pulls = deque(entry for entry in self._pulls if entry[1] != request)
        place = next((place for place, entry in enumerate(self._active) if entry[2] == request), None)
        if place is None:
            return None
        last, sequence, _, tokens = self._active[place]
        steps = self.time.steps_until(at - self.boundary_s, self.batch, self.context_tokens)
        end = min(self.iteration + steps, last)
        self._active[place] = (end, sequence, request, tokens - (last - end))
        heapify(self._active)
        if self.planned_steps <= end - self.iteration:
            return None
        self.planned_steps = end - self.iteration
        self.version += 1
        return max(at, self.boundary_s + self.time.span_s(self.planned_steps, self.batch, self.context_tokens))

    def step(self, at: float) -> tuple[Step, float | None]:
        """Process the planned boundary at `at`: requests leave and join. Return the changes and the time of the next
        step (None if idle)."""
        self.iteration += self.planned_steps
        self.context_tokens += self.planned_steps * self.batch
        self.boundary_s = at
        finished = []
        while self._active and self._active[0][0] <= self.iteration:
            _, _, request, tokens = heappop(self._active)
            finished.append(request)
            self.batch -= 1
            self.context_tokens -= tokens
        admitted = []
        while self._waiting and self.batch < self.batch_max:
            request, input_tokens, output_tokens = self._waiting.popleft()
            heappush(
                self._active, (self.iteration + output_tokens, self._sequence, request, input_tokens + output_tokens)
            )
            self._sequence += 1
            self.batch += 1
            self.context_tokens += input_tokens
            admitted.append(request)
        pulls = []
        while self._pulls and (self.batch == 0 or self._pulls[0][0] <= self.iteration):
            pulls.append(self._pulls.popleft()[1])
        self.version += 1
        if self.batch == 0:
            return Step(tuple(finished), (), at, 0.0, tuple(pulls)), None
        iteration_s = self.time.seconds(self.batch, self.context_tokens)
        self.planned_steps = self._next_change(self._active[0][0] - self.iteration)
        wake_s = at + self.time.span_s(self.planned_steps, self.batch, self.context_tokens)
        return Step(tuple(finished), tuple(admitted), at + iteration_s, iteration_s, tuple(pulls)), wake_s


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
