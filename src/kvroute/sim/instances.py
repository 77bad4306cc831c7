"""Prefill and decode instances in virtual time; iterations between changes of membership are skipped, not stepped."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from kvroute.prefix import Evicted, PrefixIndex
from kvroute.timing import IterationTime, PrefillTime


@dataclass(slots=True)
class PrefillInstance:
    """One prompt after the other, first in first out; without queueing every prompt starts at once (a pure delay)."""

    index: int
    time: PrefillTime
    queueing: bool
    free_at_s: float = 0.0
    busy_s: float = 0.0

    def submit(self, at: float, tokens: int, cached_tokens: int) -> tuple[float, float]:
        """Take a prompt; returns (start, finish) in seconds."""
        start = max(at, self.free_at_s) if self.queueing else at
        finish = start + self.time.seconds(tokens, cached_tokens)
        self.free_at_s = max(finish, self.free_at_s)
        self.busy_s += finish - start
        return start, finish


@dataclass(frozen=True, slots=True)
class Step:
    """What happened at one iteration boundary of a decode instance."""

    finished: tuple[int, ...]
    admitted: tuple[int, ...]
    first_token_s: float
    """When the admitted ones have their first token."""
    iteration_s: float
    """Length of the iteration that starts now; 0 for an idle instance."""


@dataclass(slots=True)
class DecodeInstance:
    """Continuous batching: requests join and leave at iteration boundaries.

    Between two changes of membership the batch is constant and the context grows by `batch` tokens an iteration, so the
    time of any later boundary has a closed form (`IterationTime.span_s`), and so has the boundary at or after a time.
    """

    index: int
    time: IterationTime
    batch_max: int
    boundary_s: float = 0.0
    iteration: int = 0
    batch: int = 0
    context_tokens: int = 0
    version: int = 0
    """Changes with every new plan: a wake-up of an older version is void."""
    planned_steps: int = 0
    """Iterations from the last boundary to the planned one."""
    _active: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Heap of (last iteration, sequence, request, tokens at its end)."""
    _waiting: deque[tuple[int, int, int]] = field(default_factory=deque)
    _sequence: int = 0

    @property
    def waiting(self) -> int:
        """Requests that have landed and have no slot yet."""
        return len(self._waiting)

    def land(self, at: float, request: int, input_tokens: int, output_tokens: int) -> float | None:
        """A request's KV is here. Returns when to `step` next if that has changed, else None."""
        self._waiting.append((request, input_tokens, output_tokens))
        if self.batch == 0:
            self.boundary_s, self.planned_steps = at, 0
            self.version += 1
            return at
        if self.batch >= self.batch_max or len(self._waiting) > 1:
            return None  # no slot before somebody leaves, or the next boundary is planned already
        steps = self.time.steps_until(at - self.boundary_s, self.batch, self.context_tokens)
        self.planned_steps = min(max(steps, 0), self._active[0][0] - self.iteration)
        self.version += 1
        return max(at, self.boundary_s + self.time.span_s(self.planned_steps, self.batch, self.context_tokens))

    def leave(self, at: float, request: int) -> float | None:
        """A request goes before its answer is complete, at the next boundary; a waiting one at once.

        Returns when to `step` next if that has changed, else None; unknown requests are left alone.
        """
        self._waiting = deque(entry for entry in self._waiting if entry[0] != request)
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
        """The planned boundary, at `at`: some leave, some join. Returns that and when to step next, None if idle."""
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
        self.version += 1
        if self.batch == 0:
            return Step(tuple(finished), (), at, 0.0), None
        iteration_s = self.time.seconds(self.batch, self.context_tokens)
        self.planned_steps = self._active[0][0] - self.iteration
        wake_s = at + self.time.span_s(self.planned_steps, self.batch, self.context_tokens)
        return Step(tuple(finished), tuple(admitted), at + iteration_s, iteration_s), wake_s


@dataclass(slots=True)
class KvMemory:
    """The KV memory of every instance: live requests reserve, cached prefixes fill the rest and are dropped first.

    What is used is the cached blocks (pinned while a live request needs them) and the reserved blocks that are in no
    cache: KV on its way and room for the answers. The sum stays within the capacity, but for less than one block per
    request on its way: the router counts bytes, and memory comes in whole blocks.
    """

    index: PrefixIndex
    capacity_blocks: list[int]
    reserved_blocks: list[int]

    def free_blocks(self, instance: int) -> int:
        """What a new request could have, cached prefixes dropped."""
        return self.capacity_blocks[instance] - self.reserved_blocks[instance] - self.index.pinned_blocks(instance)

    def store(self, instance: int, blocks: tuple[int, ...]) -> list[Evicted]:
        """A prompt was computed here and is cached, as far as it fits beside what is reserved; what went."""
        return self.index.store(instance, blocks) + self._fit(instance)

    def has_room(self, instance: int, blocks: tuple[int, ...], hit: int) -> bool:
        """Whether this chain could be reserved, with the `hit` blocks of it that are cached."""
        self.index.pin(instance, blocks, hit)
        room = self.free_blocks(instance) >= len(blocks) - hit
        self.index.unpin(instance, blocks, hit)
        return room

    def reserve(self, instance: int, blocks: tuple[int, ...], hit: int, total: int) -> list[Evicted]:
        """At dispatch: pin the `hit` cached blocks, hold room for the other `total - hit`."""
        if hit:
            pinned = self.index.pin(instance, blocks, hit)
            assert pinned == hit, "the router counted on blocks that are not there"
        self.reserved_blocks[instance] += total - hit
        return self._fit(instance)

    def land(self, instance: int, blocks: tuple[int, ...], hit: int) -> list[Evicted]:
        """The KV is here: reserved room becomes cached, pinned blocks."""
        self.reserved_blocks[instance] -= len(blocks) - hit
        evicted = self.index.store(instance, blocks, pin=True)
        if hit:
            self.index.unpin(instance, blocks, hit)  # the whole chain has its own pin now
        return evicted + self._fit(instance)

    def give_up(self, instance: int, blocks: tuple[int, ...], hit: int, total: int) -> list[Evicted]:
        """The KV will not come: what was reserved is free, and the cached blocks may go."""
        if hit:
            self.index.unpin(instance, blocks, hit)
        self.reserved_blocks[instance] -= total - hit
        return self._fit(instance)

    def release(self, instance: int, blocks: tuple[int, ...], total: int) -> list[Evicted]:
        """The request is answered: its prefix stays cached, the room for its answer is free."""
        self.index.unpin(instance, blocks, len(blocks))
        self.reserved_blocks[instance] -= total - len(blocks)
        return self._fit(instance)

    def _fit(self, instance: int) -> list[Evicted]:
        spare = self.capacity_blocks[instance] - self.reserved_blocks[instance]
        if self.index.used_blocks(instance) <= spare:
            return []
        return self.index.make_room(instance, self.reserved_blocks[instance])
