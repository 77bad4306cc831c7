"""One engine's prompts, KV memory and batch, timed by the simulator's models. It uses no sockets and no event loop.

A request is an `EngineSequence` that its owner moves from stage to stage: `prefill`, then either `hold` until a
decode leg fetches the KV, or `reserve` and `transfer_done`. A decode instance that serves a request aggregated uses
`reserve` and `prefill_beside`. `leave` is valid at any stage and releases everything.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from kvroute.emulator.clock import Alarm, Clock
from kvroute.emulator.engine.adapters import LoraSlots, distinct
from kvroute.emulator.engine.batch import Batch
from kvroute.emulator.engine.counters import EngineCounters
from kvroute.emulator.engine.faults import SlowedPrefill
from kvroute.emulator.engine.prefix_import import PrefixImport
from kvroute.emulator.engine.sequence import EngineSequence, HeldKv, KvListener, OnKv
from kvroute.emulator.kv.storage_tier import StorageTier
from kvroute.emulator.prompt import EmulatedPrompt
from kvroute.llm import Model
from kvroute.prefix import Evicted, PrefixIndex
from kvroute.sim.chunked_prompts import ChunkedPrompts
from kvroute.sim.instances import DecodeStep, KvMemory, PrefillInstance
from kvroute.timing import prefill_time, step_base_s
from kvroute.types import Instance, TimingSpec


@dataclass(slots=True, eq=False)
class Engine:
    """One emulated engine. All times are those of `clock`, in seconds."""

    instance: Instance
    spec: TimingSpec
    model: Model
    clock: Clock
    block_tokens: int
    on_kv: OnKv
    kv_expiry_s: float = 480.0
    kv_patience_s: float = math.inf
    """Time without progress after which an incoming transfer is aborted, in seconds."""
    aliases: tuple[str, ...] = ()
    """Additional names of the model, like those of vLLM's `--served-model-name`."""
    counters: EngineCounters = field(default_factory=EngineCounters)
    held: dict[str, HeldKv] = field(default_factory=dict)
    kv_listener: KvListener | None = None
    adapters: LoraSlots = field(default_factory=LoraSlots)
    storage: StorageTier | None = None
    """The store as this instance uses it; None: there is none."""
    capacity_blocks: int = field(init=False)
    batch: Batch = field(init=False)
    _block_bytes: float = field(init=False)
    _prefill: PrefillInstance = field(init=False)
    _memory: KvMemory = field(init=False)
    numbers: count[int] = field(default_factory=lambda: count(1))
    """Numbers that are unique in this engine."""
    _queue: deque[EngineSequence] = field(default_factory=deque)
    _computing: EngineSequence | None = None
    _alarm: Alarm | None = None
    _reserving: deque[EngineSequence] = field(default_factory=deque)
    _reserved: int = 0
    """Number of sequences whose KV is being transferred to this engine."""
    _intakes: int = 0
    """Number of prompt prefixes that are being transferred to this engine."""
    _closed: bool = False

    def __post_init__(self) -> None:
        self._block_bytes = self.model.block_bytes(self.block_tokens)
        self.capacity_blocks = int(self.instance.kv_capacity_bytes // self._block_bytes)
        self._prefill = PrefillInstance(0, prefill_time(self.spec.prefill), True)
        self._memory = KvMemory(PrefixIndex(1, [self.capacity_blocks]), [self.capacity_blocks], [0])
        prompts = ChunkedPrompts(self._prefill.time, self.instance.chunk_tokens, step_base_s(self.spec))
        self.batch = Batch(
            self.spec.decode,
            prompts,
            self.instance.batch_max,
            self.clock,
            on_step=self._stepped,
            on_computed=self._chunks_computed,
            on_left=self._left,
        )

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that clients may use for the model, the cluster file's name first."""
        return (self.instance.model, *self.aliases, *self.adapters.load_s)

    @property
    def running(self) -> int:
        """Number of requests being computed now."""
        return self.batch.running + (self._computing is not None)

    @property
    def waiting(self) -> int:
        """Number of requests that wait for prefill, memory, KV or a batch slot."""
        return len(self._queue) + self._intakes + len(self._reserving) + self._reserved + self.batch.waiting

    @property
    def kv_used_share(self) -> float:
        """Used share of the KV memory. A cached block that no request uses counts as free."""
        return 1.0 - self._memory.free_blocks(0) / self.capacity_blocks if self.capacity_blocks else 0.0

    @property
    def context_tokens(self) -> int:
        """Approximate length of the longest request that fits, in tokens."""
        return self.capacity_blocks * self.block_tokens

    def adapters_in_use(self) -> tuple[list[str], list[str]]:
        """Return the adapters of requests that are computed, and of those that wait for their prefill."""
        computing = [] if self._computing is None else [self._computing.prompt.adapter]
        waiting = [job.prompt.adapter for job in self._queue]
        return distinct([*self.batch.adapters, *computing]), distinct(waiting)

    @property
    def chunks_prompts(self) -> bool:
        """Whether prompts without a transfer are computed beside the batch; if not, the batch waits for them."""
        return self.instance.role == "decode"

    def fits(self, input_tokens: int, output_tokens: int) -> bool:
        """Return whether a request of this size could ever be served here."""
        return self._blocks_for(input_tokens + output_tokens) <= self.capacity_blocks

    def output_room(self, input_tokens: int, wanted: int) -> int:
        """Return how many of `wanted` output tokens fit beside a prompt, at least 1."""
        if self.fits(input_tokens, wanted):
            return wanted
        room = bisect_left(range(1, wanted), True, key=lambda tokens: not self.fits(input_tokens, tokens))
        return max(room, 1)

    def _blocks_for(self, tokens: int) -> int:
        return -int(-self.model.kv_bytes(tokens) // self._block_bytes)

    def arrive(
        self,
        prompt: EmulatedPrompt,
        output_tokens: int,
        *,
        streaming: bool = False,
        news: Callable[[], None] = lambda: None,
    ) -> EngineSequence:
        """Create a sequence at stage `new`."""
        return EngineSequence(next(self.numbers), prompt, output_tokens, self.clock.now(), streaming, news)

    def import_prefix(self, prompt: EmulatedPrompt, tokens: int) -> PrefixImport:
        """Reserve memory for the first whole blocks of a prompt, up to `tokens` tokens, which another instance has."""
        blocks = prompt.blocks[: tokens // self.block_tokens]
        prefix_import = PrefixImport(prompt, blocks, self._memory, self._changed, self._taken_in)
        self._intakes += prefix_import.lacking > 0
        return prefix_import

    def _changed(self, prompt: EmulatedPrompt | None, before: int, now: int, evicted: list[Evicted]) -> None:
        if not self._closed:
            self.on_kv(prompt, before, now, evicted)

    def _taken_in(self) -> None:
        self._intakes -= 1
        if not self._closed:
            self._grant()

    def cached_tokens(self, prompt: EmulatedPrompt) -> int:
        """Return the number of prompt tokens that are cached."""
        return self._memory.index.match_one(0, prompt.blocks) * self.block_tokens

    def prefill(self, job: EngineSequence, staged_tokens: int = 0) -> None:
        """Queue the prompt; the stage later becomes `prefilled`. Cache hits are those of now, as in the simulator.

        Args:
            job: the sequence.
            staged_tokens: tokens whose KV arrives from the store while the rest is computed.
        """
        depth = self._memory.index.touch(0, job.prompt.blocks)
        job.cached_tokens = min(max(depth * self.block_tokens, staged_tokens), job.input_tokens - 1)
        self.counters.looked_up(job.input_tokens, job.cached_tokens)
        job.stage = "queued"
        self._queue.append(job)
        self._compute(self.clock.now())

    def recompute(self, job: EngineSequence) -> None:
        """Queue a prefilled prompt again, without cached tokens, because staged KV has not arrived."""
        assert job.stage == "prefilled"
        job.cached_tokens = 0
        job.stage = "queued"
        self._queue.append(job)
        self._compute(self.clock.now())

    def _compute(self, at: float) -> None:
        if self._computing is not None or not self._queue:
            return
        job = self._computing = self._queue.popleft()
        load_s = self.adapters.use(job.prompt.adapter)
        begin_s = max(at, job.arrived_s, self._prefill.free_at_s) + load_s if load_s else max(at, job.arrived_s)
        start, finish = self._prefill.submit(begin_s, job.input_tokens, job.cached_tokens)
        job.begins_s, job.ends_s = start, finish
        self.counters.queue_s.add(start - job.arrived_s)
        self.counters.prefill_s.add(finish - start)
        job.set_stage("computing")
        self.batch.pause(start, finish - start)
        self._alarm = self.clock.at(finish, self._computed)
        if job.name and self.kv_listener is not None:
            self.kv_listener.computing(job)

    def computing_sequence(self, name: str) -> EngineSequence | None:
        """Return the sequence of this name if it is being computed now."""
        job = self._computing
        return job if job is not None and job.name == name and job.stage == "computing" else None

    def _computed(self) -> None:
        job, self._computing, self._alarm = self._computing, None, None
        assert job is not None
        self.counters.prompt_tokens += job.input_tokens
        self._store(job.prompt)
        self._compute(self._prefill.free_at_s)
        if job.stage == "computing":
            job.set_stage("prefilled")

    def _store(self, prompt: EmulatedPrompt) -> None:
        index = self._memory.index
        before = index.match_one(0, prompt.blocks)
        evicted = index.store(0, prompt.blocks)
        self.on_kv(prompt, before, index.match_one(0, prompt.blocks), evicted)
        # Reserved memory may evict the end of this same chain, so the store is reported before the eviction.
        self._evicted(index.make_room(0, self._memory.reserved_blocks[0]))

    def hold(self, job: EngineSequence, key: str) -> bool:
        """Hold the KV of a prefilled sequence until it is fetched (`release`) or expires.

        Returns:
            False if the KV of another prompt is held under this key. That KV stays.
        """
        assert job.stage == "prefilled"
        held = self.held.get(key)
        if held is not None and not held.job.prompt.same(job.prompt):
            return False
        self.release(key)  # the same KV, requested a second time
        job.pinned_blocks = self._memory.index.pin(0, job.prompt.blocks, len(job.prompt.blocks))
        self.held[key] = HeldKv(job)
        job.set_stage("held")
        self.keep(key)
        if self.kv_listener is not None:
            self.kv_listener.held(key)
        return True

    def keep(self, key: str) -> None:
        """Restart the expiry timer of held KV."""
        self.fetching(key)
        self.held[key].expiry = self.clock.at(self.clock.now() + self.kv_expiry_s, partial(self._expire, key))

    def fetching(self, key: str) -> None:
        """Stop the expiry timer while the KV is being fetched."""
        held = self.held[key]
        if held.expiry is not None:
            held.expiry.cancel()
            held.expiry = None

    def _expire(self, key: str) -> None:
        self.counters.kv_expired += 1
        self.release(key)

    def release(self, key: str) -> None:
        """Release held KV that has been fetched or is no longer needed. No effect if none is held."""
        held = self.held.get(key)
        if held is None:
            return
        self.fetching(key)
        del self.held[key]
        if held.job.pinned_blocks:
            self._memory.index.unpin(0, held.job.prompt.blocks, held.job.pinned_blocks)
        held.job.set_stage("answered")
        self._grant()

    def reserve(self, job: EngineSequence) -> None:
        """Request memory for prompt and output, first come, first served. The stage becomes `reserved` when granted."""
        job.total_blocks = max(self._blocks_for(job.input_tokens + job.output_tokens), len(job.prompt.blocks))
        job.set_stage("reserving")
        self._reserving.append(job)
        self._grant()

    def _grant(self) -> None:
        memory = self._memory
        while self._reserving and self._reserving[0].total_blocks <= memory.free_blocks(0):
            job = self._reserving.popleft()
            self.adapters.use(job.prompt.adapter)
            job.hit_blocks = memory.index.match_one(0, job.prompt.blocks)
            job.cached_tokens = min(job.hit_blocks * self.block_tokens, job.input_tokens)
            self._evicted(memory.reserve(0, job.prompt.blocks, job.hit_blocks, job.total_blocks))
            self._reserved += 1
            job.set_stage("reserved")

    def _evicted(self, evicted: list[Evicted]) -> None:
        if evicted:
            self.on_kv(None, 0, 0, evicted)

    def transfer_done(self, job: EngineSequence) -> None:
        """Put a reserved sequence whose KV has arrived into the batch, at the next boundary."""
        if self._closed:
            return
        assert job.stage == "reserved"
        self._reserved -= 1
        self._kv_stored(job)
        self.batch.transfer_done(job)

    def go_on(self, job: EngineSequence) -> None:
        """Put a reserved sequence whose prompt was computed here into the batch. The end of the prompt has given its
        first token."""
        if not self._closed:
            self.counters.ttft_s.add(self.clock.now() - job.arrived_s)
            job.emitted = 1
            self.transfer_done(job)

    def prefill_beside(self, job: EngineSequence) -> None:
        """Compute the prompt of a reserved sequence in chunks beside the batch, from the next boundary on."""
        if self._closed:
            return
        assert job.stage == "reserved"
        self._reserved -= 1
        job.cached_tokens = min(job.cached_tokens, job.input_tokens - 1)
        self.counters.looked_up(job.input_tokens, job.cached_tokens)
        self.batch.prompt_arrived(job)

    def _chunks_computed(self, job: EngineSequence, at: float) -> None:
        self.counters.prompt_tokens += job.input_tokens
        self.counters.ttft_s.add(at - job.arrived_s)
        self._kv_stored(job)

    def _kv_stored(self, job: EngineSequence) -> None:
        """Cache the prompt of a sequence in its reserved blocks."""
        index, blocks = self._memory.index, job.prompt.blocks
        before = index.match_one(0, blocks)
        evicted = self._memory.transfer_done(0, blocks, job.hit_blocks)
        self.on_kv(job.prompt, before, index.match_one(0, blocks), evicted)
        job.kv_stored = True

    def leave(self, job: EngineSequence) -> None:
        """Cancel a sequence. Held KV stays, because a decode leg may fetch it; a prompt being computed is completed."""
        stage = job.stage
        if self._closed or stage in ("held", "answered", "gone"):
            return
        job.stage = "gone"
        if stage == "queued":
            self._queue.remove(job)
        elif stage == "reserving":
            self._reserving.remove(job)
        elif stage == "reserved":
            self._reserved -= 1
            self._memory.reserved_blocks[0] -= job.total_blocks - job.hit_blocks
            if job.hit_blocks:
                self._memory.index.unpin(0, job.prompt.blocks, job.hit_blocks)
        elif stage in ("chunked", "decoding"):
            self.batch.leave(job)
        self._grant()
        if job.name and self.kv_listener is not None:
            self.kv_listener.given_up(job.name)

    def _stepped(self, step: DecodeStep, joined: list[EngineSequence]) -> None:
        for job in joined:
            if not job.emitted:
                self.counters.ttft_s.add(step.first_token_s - job.arrived_s)
        self.counters.iteration(step.iteration_s, self.batch.running)
        if step.finished:
            self._grant()

    def _left(self, job: EngineSequence, at: float) -> None:
        """Free the memory of a sequence that has left the batch. Its prefix stays cached if it was computed."""
        blocks = job.prompt.blocks
        if job.kv_stored:
            self._evicted(self._memory.release(0, blocks, job.total_blocks))
        else:
            self._evicted(self._memory.give_up(0, blocks, job.hit_blocks, job.total_blocks))
        if job.stage == "answered":
            self.counters.answered(job.output_tokens, at - job.arrived_s)

    def slow(self, factor: float) -> None:
        """Multiply the time of the next prefills, and of decode iterations from the current one on, by `factor`."""
        self._prefill.time = self.batch.prompts.time = SlowedPrefill(prefill_time(self.spec.prefill), factor)
        self.batch.prompts.base_s = factor * step_base_s(self.spec)
        self.batch.slow(factor)

    def clear_cache(self) -> bool:
        """Drop every cached block, as /reset_prefix_cache does. Return False, without effect, if any is in use."""
        if self._memory.index.pinned_blocks(0):
            return False
        self._memory.index.clear(0)
        return True

    def close(self) -> None:
        """Stop permanently: cancel all alarms. No sequence makes further progress."""
        self._closed = True
        self.batch.close()
        for key in list(self.held):
            self.fetching(key)
        self.held.clear()
        if self._alarm is not None:
            self._alarm.cancel()
