"""Prefill pipelines whose stages run as iterations with all-reduces on shared links, event by event."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from kvroute.collectives import IterationTraffic
from kvroute.sim.groups.iterations import Iterations


@dataclass(frozen=True, slots=True, eq=False)
class PipelinePrompt:
    """A prompt, or a request for a cached prefix, which computes no token."""

    number: int
    tokens: int
    """Tokens to compute."""
    seconds: float
    """Time on an idle network, over all stages."""
    begun: Callable[[int, int], None]
    """Called with its number and its slices, over all stages, when the first stage begins."""
    ended: Callable[[int], None]
    """Called with its number when the last stage has ended."""
    progressed: Callable[[int, float], None] | None = None
    """Called with its number and the share of it that is computed, whenever a slice or stage ends before the last."""
    cached_tokens: int = 0
    """Tokens before those to compute."""


class PrefillQueue(Protocol):
    """Prefill event by event: the end of a prompt is not known when it is submitted."""

    def submit(self, prompt: PipelinePrompt) -> None:
        """Add a prompt now."""
        ...


@dataclass(slots=True)
class PrefillPipeline:
    """FIFO prefill, one prompt at a time in each stage, in the same order in all stages (a permutation flow shop).

    Without queueing every prompt starts each stage at once. On an idle network the times are those of
    `PrefillInstance`.
    """

    stages: Sequence[IterationTraffic]
    iterations: Iterations
    queueing: bool
    _waiting: list[deque[PipelinePrompt]] = field(init=False)
    """[stage]: prompts that have not begun it."""
    _busy: list[bool] = field(init=False)

    def __post_init__(self) -> None:
        self._waiting = [deque() for _ in self.stages]
        self._busy = [False for _ in self.stages]

    def slices(self, seconds: float) -> int:
        """Return the number of slices of a prompt that takes `seconds` on an idle network, over all stages."""
        count = len(self.stages)
        return count * self.iterations.slices_of(self.stages[0], seconds / count)

    def submit(self, prompt: PipelinePrompt) -> None:
        """Add a prompt now."""
        self._enter(prompt, 0)

    def _enter(self, prompt: PipelinePrompt, stage: int) -> None:
        if self.queueing and self._busy[stage]:
            self._waiting[stage].append(prompt)
        else:
            self._begin(prompt, stage)

    def _begin(self, prompt: PipelinePrompt, stage: int) -> None:
        self._busy[stage] = True
        count = len(self.stages)
        if stage == 0:
            prompt.begun(prompt.number, self.slices(prompt.seconds))
        slice_ended = None if prompt.progressed is None else partial(self._slice_ended, prompt, stage)
        ended = partial(self._ended, prompt, stage)
        self.iterations.start("prefill", self.stages[stage], prompt.tokens, prompt.seconds / count, ended, slice_ended)

    def _slice_ended(self, prompt: PipelinePrompt, stage: int, done: int) -> None:
        assert prompt.progressed is not None
        prompt.progressed(prompt.number, stage / len(self.stages) + done / self.slices(prompt.seconds))

    def _ended(self, prompt: PipelinePrompt, stage: int) -> None:
        self._busy[stage] = False
        if self._waiting[stage]:
            self._begin(self._waiting[stage].popleft(), stage)
        if stage + 1 == len(self.stages):
            prompt.ended(prompt.number)
            return
        if prompt.progressed is not None:
            prompt.progressed(prompt.number, (stage + 1) / len(self.stages))
        self._enter(prompt, stage + 1)
