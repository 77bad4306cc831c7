"""Prefill in steps of a limited number of tokens, which prompts share: vLLM's chunked prefill, event by event."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from kvroute.sim.agenda import Agenda
from kvroute.sim.groups.pipelines import PipelinePrompt
from kvroute.timing import PrefillTime, prefill_time, tokens_of_step_s
from kvroute.topology import Cluster
from kvroute.types import InputError


@dataclass(slots=True, eq=False)
class _Waiting:
    """A prompt in the queue, perhaps partly computed."""

    prompt: PipelinePrompt
    computed: int = 0
    """Tokens computed so far, cached ones not included."""
    begun: bool = False

    @property
    def left(self) -> int:
        """Tokens to compute."""
        return self.prompt.tokens - self.computed


@dataclass(slots=True)
class ChunkedPrefill:
    """Prompts in the order of arrival. Each step takes tokens of the first ones, up to a limit: short prompts share a
    step, and a long prompt takes several.

    A step takes `step_s` and the time of its tokens by `tokens_of_step_s`. A prompt alone that fits into one step takes
    the time of that model: its base consists of `step_s` and a rest, which passes before the prompt can be scheduled.
    A step is planned when the one before has ended.
    """

    agenda: Agenda
    time: PrefillTime
    step_tokens: int
    step_s: float
    prompts_max: int
    """Most prompts of a step (vLLM's `max_num_seqs`)."""
    _queue: deque[_Waiting] = field(default_factory=deque)
    _arriving: deque[PipelinePrompt] = field(default_factory=deque)
    """Prompts in the time before they can be scheduled; it is equal for all of them."""
    _parts: list[tuple[_Waiting, int]] = field(default_factory=list)
    """Prompts of the step in progress, each with its tokens; empty: idle."""

    @property
    def request_s(self) -> float:
        """Time from the submission of a prompt until it can be scheduled."""
        return max(self.time.seconds(0) - self.step_s, 0.0)

    def slices(self, tokens: int) -> int:
        """Return the number of steps of a prompt alone."""
        return max(-(-tokens // self.step_tokens), 1)

    def submit(self, prompt: PipelinePrompt) -> None:
        """Add a prompt now."""
        self._arriving.append(prompt)
        self.agenda.at(self.agenda.now + self.request_s, self._arrived)

    def _arrived(self, _: int, __: int) -> None:
        self._queue.append(_Waiting(self._arriving.popleft()))
        if not self._parts:
            self._plan()

    def _plan(self) -> None:
        """Begin a step now."""
        left, sizes = self.step_tokens, []
        for waiting in self._queue:
            if not left or len(self._parts) == self.prompts_max:
                break
            tokens = min(waiting.left, left)
            sizes.append((waiting.prompt.cached_tokens + waiting.computed, tokens))
            left -= tokens
            self._parts.append((waiting, tokens))
        self.agenda.at(self.agenda.now + self.step_s + tokens_of_step_s(self.time, sizes), self._ended)
        for waiting, _ in self._parts:
            if not waiting.begun:
                waiting.begun = True
                waiting.prompt.begun(waiting.prompt.number, self.slices(waiting.prompt.tokens))

    def _ended(self, _: int, __: int) -> None:
        parts, self._parts = self._parts, []
        for waiting, tokens in parts:
            waiting.computed += tokens
            if not waiting.left:
                assert self._queue[0] is waiting, "prompts end in their order"
                self._queue.popleft()
        if self._queue:
            self._plan()
        for waiting, _tokens in parts:
            prompt = waiting.prompt
            if not waiting.left:
                prompt.ended(prompt.number)
            elif prompt.progressed is not None:
                prompt.progressed(prompt.number, waiting.computed / prompt.tokens)


def chunked_prefills(cluster: Cluster, agenda: Agenda, shared: Collection[int]) -> dict[int, ChunkedPrefill]:
    """Return one for each instance whose timing has `scheduler.step_tokens`.

    Args:
        cluster: the cluster.
        agenda: for the steps.
        shared: instances whose all-reduces share links.

    Raises:
        InputError: such an instance has several pipeline stages, or its all-reduces share links.
    """
    found = {}
    for index, instance in enumerate(cluster.instances):
        spec = cluster.timing[instance.timing]
        if spec.scheduler.step_tokens is None:
            continue
        if instance.pp > 1 or index in shared:
            what = "several pipeline stages" if instance.pp > 1 else "all-reduces on shared links"
            raise InputError(
                f"{instance.name} has {what} and a scheduler with `step_tokens`, which are not simulated together",
                where=cluster.name,
                hint=f"remove `step_tokens` from timing {instance.timing!r}",
            )
        found[index] = ChunkedPrefill(
            agenda,
            prefill_time(spec.prefill),
            spec.scheduler.step_tokens,
            spec.scheduler.step_s,
            instance.batch_max,
        )
    return found
