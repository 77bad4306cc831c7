"""Prompts that an instance computes in chunks beside the steps of its batch (chunked prefill)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from kvroute.timing import PrefillTime


class WaitingPrompt(NamedTuple):
    """A request whose prompt an instance computes itself, before the prompt begins."""

    request: int
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    joins: bool = True
    """Whether the instance decodes it after the prompt; False: another instance does."""


@dataclass(slots=True)
class _Prompt:
    waiting: WaitingPrompt
    tokens: int
    left_tokens: int
    token_s: float
    """Time of one token: the prompt's own time without the base of a step, spread evenly over the tokens that are
    computed."""
    begun: bool = False


@dataclass(slots=True)
class ChunkedPrompts:
    """Prompts in progress, first come, first served. Each of them has a slot of the batch.

    An iteration computes at most `chunk_tokens` tokens: one of each request in the batch, and the rest of prompts. It
    lasts as long as the batch alone, and the chunks' shares of their prompts' times. Only an iteration without a batch
    in which a prompt begins also takes the base of a prefill. A prompt takes at least one token per iteration, so that
    a full batch does not stop it.
    """

    time: PrefillTime
    chunk_tokens: int
    base_s: float
    """See `step_base_s`."""
    whole_alone: bool = False
    """Whether an iteration without a batch computes one prompt as a whole, as a prefill instance does."""
    begins: list[int] = field(default_factory=list)
    """Requests whose prompts begin with the iteration in progress."""
    planned_tokens: int = 0
    """Prompt tokens of the iteration in progress."""
    _running: deque[_Prompt] = field(default_factory=deque)

    def __len__(self) -> int:
        """Number of prompts in progress."""
        return len(self._running)

    def start(self, prompt: WaitingPrompt) -> None:
        """Give a slot to a prompt. Its last token is computed in all cases, cached or not."""
        tokens = max(prompt.input_tokens - prompt.cached_tokens, 1)
        seconds = self.time.seconds(prompt.input_tokens, prompt.cached_tokens)
        self._running.append(_Prompt(prompt, tokens, tokens, (seconds - self.base_s) / tokens))

    def plan(self, batch: int) -> float:
        """Choose the chunks of the next iteration; return the seconds that they add to it. Args: `batch`: requests that
        decode in it."""
        whole = self.whole_alone and not batch
        room = self._running[0].left_tokens if whole else max(self.chunk_tokens - batch, 1)
        self.planned_tokens, seconds = 0, 0.0
        for prompt in self._running:
            tokens = min(prompt.left_tokens, room - self.planned_tokens)
            if not tokens:
                break
            self.planned_tokens += tokens
            seconds += tokens * prompt.token_s
            if not prompt.begun:
                prompt.begun = True
                self.begins.append(prompt.waiting.request)
        return seconds + (self.base_s if self.begins and not batch else 0.0)

    def advance(self) -> list[WaitingPrompt]:
        """End the planned iteration; return the prompts that are complete, in order."""
        complete: list[WaitingPrompt] = []
        self.begins = []
        while self.planned_tokens:
            prompt = self._running[0]
            tokens = min(prompt.left_tokens, self.planned_tokens)
            prompt.left_tokens -= tokens
            self.planned_tokens -= tokens
            if not prompt.left_tokens:
                complete.append(self._running.popleft().waiting)
        return complete

    @property
    def partly(self) -> tuple[int, float] | None:
        """The request whose prompt is partly computed, and the share that is; None: there is none between two
        iterations."""
        prompt = self._running[0] if self._running else None
        if prompt is None or prompt.left_tokens == prompt.tokens:
            return None
        return prompt.waiting.request, 1.0 - prompt.left_tokens / prompt.tokens
