"""The decode batch on a clock: the simulator's decode instance, with an alarm at the next boundary that has an effect.
A decode instance also computes prompts in it, in chunks.

A boundary takes effect at the time it was due, even if the alarm fires late, so delays do not add up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvroute.emulator.clock import Alarm, Clock
from kvroute.emulator.engine.sequence import EngineSequence
from kvroute.sim.chunked_prompts import ChunkedPrompts, WaitingPrompt
from kvroute.sim.instances import DecodeInstance, DecodeStep
from kvroute.timing import IterationTime
from kvroute.types import DecodeSpec


@dataclass(slots=True, eq=False)
class Batch:
    """Sequences that decode or wait for a slot. Tokens are emitted at every boundary only while a sequence streams."""

    spec: DecodeSpec
    prompts: ChunkedPrompts
    """Prompts that are computed in chunks beside the batch."""
    batch_max: int
    clock: Clock
    on_step: Callable[[DecodeStep, list[EngineSequence]], None]
    """Called at a boundary at which sequences join or leave, with the sequences that joined."""
    on_computed: Callable[[EngineSequence, float], None]
    """Called when the prompt of a sequence has been computed here, with the time."""
    on_left: Callable[[EngineSequence, float], None]
    """Called when a sequence leaves, answered or gone, with the time."""
    _decode: DecodeInstance = field(init=False)
    _sequences: dict[int, EngineSequence] = field(default_factory=dict)
    """Sequences in the batch or waiting for a slot, by number."""
    _running: dict[int, EngineSequence] = field(default_factory=dict)
    _streams: int = 0
    """Number of running sequences that stream."""
    _ticked: int = 0
    """Iterations since the last step whose tokens have been emitted."""
    _step_s: float = 0.0
    _due_s: float = 0.0
    _alarm: Alarm | None = None

    def __post_init__(self) -> None:
        self._decode = DecodeInstance(0, IterationTime.of(self.spec), self.batch_max, prompts=self.prompts)

    @property
    def running(self) -> int:
        """Number of sequences in the batch, those included whose prompt is being computed there."""
        return len(self._running)

    @property
    def adapters(self) -> list[str]:
        """LoRA adapter of each sequence in the batch or waiting for a slot; empty: none."""
        return [sequence.prompt.adapter for sequence in self._sequences.values()]

    @property
    def waiting(self) -> int:
        """Number of sequences without a slot."""
        return len(self._sequences) - len(self._running)

    def transfer_done(self, sequence: EngineSequence) -> None:
        """Add a sequence whose KV is here, with the tokens that it has emitted. It joins at the next boundary."""
        now, emitted = self.clock.now(), sequence.emitted
        self._catch_up(now)
        if emitted == sequence.output_tokens:
            sequence.stage = "answered"
            self.on_left(sequence, now)
            sequence.on_change()
            return
        self._sequences[sequence.number] = sequence
        sequence.set_stage("decoding")
        tokens = sequence.input_tokens + emitted, sequence.output_tokens - emitted
        self._plan(self._decode.transfer_done(now, sequence.number, *tokens))

    def prompt_arrived(self, sequence: EngineSequence) -> None:
        """Add a sequence whose prompt is to be computed beside the batch. It gets a slot at the next boundary."""
        now = self.clock.now()
        self._catch_up(now)
        self._sequences[sequence.number] = sequence
        sequence.set_stage("chunked")
        tokens = sequence.input_tokens, sequence.output_tokens, sequence.cached_tokens
        self._plan(self._decode.prompt_arrived(now, WaitingPrompt(sequence.number, *tokens)))

    def pause(self, at: float, seconds: float) -> None:
        """Let the batch wait from `at` on, because a prompt is computed first."""
        self._catch_up(at)
        self._plan(self._decode.pause(at, seconds))

    def leave(self, sequence: EngineSequence) -> None:
        """Remove a sequence at the next boundary, or at once if it has no slot. A prompt in progress is completed."""
        now = self.clock.now()
        self._catch_up(now)
        if sequence.number not in self._sequences:
            return
        step_s = self._decode.leave(now, sequence.number)
        if sequence.number in self._running:
            self._plan(step_s)
        else:
            del self._sequences[sequence.number]
            self.on_left(sequence, now)

    def slow(self, factor: float) -> None:
        """Make iterations take `factor` times as long as the model says. Completed iterations do not change, nor does
        one in progress that computes prompts."""
        self._catch_up(self.clock.now())
        decode, steps, spec = self._decode, self._ticked, self.spec
        if decode.batch:
            decode.boundary_s += decode.time.span_s(steps, decode.batch, decode.context_tokens)
            decode.iteration += steps
            decode.context_tokens += steps * decode.batch
            decode.planned_steps -= steps
        self._ticked = 0
        decode.time = IterationTime(
            base_s=factor * spec.base_s,
            per_request_s=factor * spec.per_request_s,
            per_context_token_s=factor * spec.per_context_token_s,
        )
        if decode.batch and not self.prompts:
            span_s = decode.time.span_s(decode.planned_steps, decode.batch, decode.context_tokens)
            self._plan(decode.boundary_s + span_s)

    def close(self) -> None:
        """Cancel the pending alarm."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _plan(self, step_s: float | None) -> None:
        if step_s is not None:
            self._step_s = step_s
            self._set_alarm()

    def _set_alarm(self) -> None:
        decode, steps = self._decode, self._ticked + 1
        self.close()
        self._due_s = self._step_s
        if self._streams and steps < decode.planned_steps:
            self._due_s = decode.boundary_s + decode.time.span_s(steps, decode.batch, decode.context_tokens)
        self._alarm = self.clock.at(self._due_s, self._wake)

    def _wake(self) -> None:
        self._alarm = None
        self._next_boundary()
        self._catch_up(self.clock.now())

    def _catch_up(self, now: float) -> None:
        """Process everything that was due by `now`."""
        while self._alarm is not None and self._due_s <= now:
            self.close()
            self._next_boundary()

    def _next_boundary(self) -> None:
        if self._due_s < self._step_s:
            self._ticked += 1
            self._emit(self._ticked)
            self._set_alarm()
        else:
            self._step(self._step_s)

    def _emit(self, steps: int) -> None:
        iteration = self._decode.iteration + steps
        for sequence in self._running.values():
            if sequence.streaming and sequence.stage == "decoding":
                sequence.emitted = iteration - sequence.entry
                sequence.on_change()

    def _step(self, at: float) -> None:
        step, step_s = self._decode.step(at)
        self._ticked = 0
        gone = self._computed(step, at)
        self._emit(0)
        for number in step.finished:
            self._finish(self._running.pop(number), at)
        joined = [self._sequences[number] for number in step.admitted]
        for sequence in joined:
            sequence.entry = self._decode.iteration - sequence.emitted
            self._running[sequence.number] = sequence
            self._streams += sequence.streaming
        self._running.update((number, self._sequences[number]) for number in step.began)
        self._plan(step_s)
        for number in gone:
            self._plan(self._decode.leave(at, number))
        self.on_step(step, joined)

    def _computed(self, step: DecodeStep, at: float) -> list[int]:
        """Let the sequences whose prompt is complete decode, with their first token; return those that are gone."""
        gone = []
        for number in step.computed:
            sequence = self._running[number]
            sequence.entry = self._decode.iteration - 1
            self._streams += sequence.streaming
            self.on_computed(sequence, at)
            if sequence.stage == "gone":
                gone.append(number)
            else:
                sequence.set_stage("decoding")
        return gone

    def _finish(self, sequence: EngineSequence, at: float) -> None:
        del self._sequences[sequence.number]
        self._streams -= sequence.streaming
        if sequence.stage != "gone":
            sequence.emitted = sequence.output_tokens
            sequence.stage = "answered"
        self.on_left(sequence, at)
        sequence.on_change()
