"""Instances of a run that decode: their steps, the prompts that they compute, and the first tokens of requests."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from kvroute.sim.chunked_prompts import WaitingPrompt
from kvroute.sim.groups.iterations import Iterations
from kvroute.sim.groups.lock_step import DecodeRanks
from kvroute.sim.groups.pipelines import PipelinePrompt
from kvroute.sim.instances import DecodeStep
from kvroute.sim.run_parts import RunParts
from kvroute.types import Admitted


class DecodeSteps:
    """Runs the iterations of decode instances on the agenda."""

    def __init__(
        self,
        parts: RunParts,
        iterations: Iterations,
        *,
        answered: Callable[[int, int], None],
        pulled: Callable[[int], None],
    ) -> None:
        """Start without requests.

        Args:
            parts: the run.
            iterations: those whose all-reduces share links.
            answered: called with a request and its instance after the last token.
            pulled: called with a request whose KV cache its instance requests between two steps.
        """
        self._trace, self._agenda, self._router = parts.trace.requests, parts.agenda, parts.router
        self._fleet, self._delivery, self._outcomes = parts.fleet, parts.delivery, parts.outcomes
        self._shared, self._iterations = parts.groups.traffic, iterations
        self._answered, self._pulled = answered, pulled
        self._queued: dict[int, PipelinePrompt] = {}
        """Prompts on prefill instances that also decode, by request."""
        self._ranks: dict[int, DecodeRanks] = {}
        """Instances that step together with others, by index."""
        self._paused_s: dict[int, float] = {}
        """Time for which the next iteration of an instance waits, because it computes prompts first; only where
        all-reduces share links."""

    def lock_step(self, members: tuple[int, ...]) -> None:
        """Let these instances step together."""
        ranks = DecodeRanks(members, self._fleet.decode, self._agenda, self._boundary, self._record_first_tokens)
        self._ranks.update(dict.fromkeys(members, ranks))

    def add_prompt(self, target: int, request: int, cached_tokens: int) -> None:
        """Let an instance compute the prompt of a request that it serves aggregated."""
        traced = self._trace[request]
        prompt = WaitingPrompt(request, traced.input_tokens, traced.output_tokens, cached_tokens)
        self._plan_step(target, self._fleet.decode[target].prompt_arrived(self._agenda.now, prompt))

    def add_queued(self, source: int, prompt: PipelinePrompt, *, output_tokens: int) -> None:
        """Let a prefill instance that also decodes compute a prompt.

        Args:
            source: the instance.
            prompt: the prompt, or a request for a cached prefix.
            output_tokens: of a request that the instance will go on to decode; 0: it will not.
        """
        self._queued[prompt.number] = prompt
        input_tokens = prompt.cached_tokens + prompt.tokens
        waiting = WaitingPrompt(prompt.number, input_tokens, output_tokens, prompt.cached_tokens, output_tokens > 0)
        self._plan_step(source, self._fleet.decode[source].prompt_arrived(self._agenda.now, waiting))

    def add_prefilled(self, target: int, request: int) -> None:
        """Let an instance go on with a request whose prompt it has computed; that gave the first token."""
        traced, decode = self._trace[request], self._fleet.decode[target]
        now, context_tokens, output_tokens = self._agenda.now, traced.input_tokens + 1, traced.output_tokens - 1
        self._plan_step(target, decode.transfer_done(now, request, context_tokens, output_tokens))

    def add_landed(self, target: int, request: int) -> None:
        """Let an instance decode a request whose KV cache has arrived."""
        traced, decode = self._trace[request], self._fleet.decode[target]
        wake_s = decode.transfer_done(self._agenda.now, request, traced.input_tokens, traced.output_tokens)
        if target in self._ranks:
            self._ranks[target].wake()
        else:
            self._plan_step(target, wake_s)

    def pull(self, target: int, request: int) -> None:
        """Let an instance request a complete KV cache between two steps."""
        self._plan_step(target, self._fleet.decode[target].pull(self._agenda.now, request))

    def pause(self, target: int, seconds: float) -> None:
        """Let the batch of an instance wait, because it computes a prompt first."""
        if target in self._shared:
            self._paused_s[target] = self._paused_s.get(target, 0.0) + seconds
            return
        decode = self._fleet.decode[target]
        wake_s = decode.pause(self._agenda.now, seconds)
        if wake_s is not None:
            self._agenda.at(wake_s, self._step, target, decode.version)

    def _plan_step(self, target: int, wake_s: float | None) -> None:
        """Schedule the next step of an instance if it has changed. Where all-reduces share links, the end of each
        iteration is the next step."""
        decode = self._fleet.decode[target]
        if wake_s is not None and (not decode.running or target not in self._shared):
            self._agenda.at(wake_s, self._step, target, decode.version)

    def _step(self, target: int, version: int) -> None:
        decode, now = self._fleet.decode[target], self._agenda.now
        if version != decode.version:
            return
        step, wake_s = self._boundary(target)
        if wake_s is None:
            return
        if target in self._shared:
            ended = partial(self._iterated, target, step.admitted, now)
            traffic = self._shared[target].together
            seconds = step.iteration_s + self._paused_s.pop(target, 0.0)
            self._iterations.start("decode", traffic, step.tokens, seconds, ended)
            return
        self._record_first_tokens(step.admitted, step.first_token_s, step.iteration_s)
        if decode.version == step.version:  # else a request that came meanwhile has changed the plan
            self._agenda.at(wake_s, self._step, target, decode.version)

    def _boundary(self, target: int) -> tuple[DecodeStep, float | None]:
        """Process an iteration boundary of an instance now: requests leave and join. Return the changes and the time
        of its next boundary with a change, if it iterates on its own; None: it is idle."""
        now, outcomes = self._agenda.now, self._outcomes
        step, wake_s = self._fleet.decode[target].step(now)
        if target in self._fleet.mixing:
            self._queued_stepped(target, step)
        elif step.began or step.computed:
            self._prompts_stepped(target, step)
        for request in step.finished:
            self._answered(request, target)
        for request in step.admitted:
            if math.isnan(outcomes.first_token_s[request]) or math.isnan(outcomes.admitted_s[request]):
                outcomes.admitted_s[request] = now
            self._router.handle(Admitted(now, request))
        for request in step.pulls:
            self._pulled(request)
        return step, wake_s

    def _prompts_stepped(self, target: int, step: DecodeStep) -> None:
        """Record the prompts that an instance begins and completes; their first token is there at once."""
        now, outcomes = self._agenda.now, self._outcomes
        for request in step.computed:
            outcomes.prefill_finished_s[request] = outcomes.landed_s[request] = outcomes.admitted_s[request] = now
            evicted = self._delivery.transfer_done(request)
            self._router.handle(Admitted(now, request))
            if self._delivery.cached(request):
                self._router.stored(target, self._delivery.cached(request), evicted)
            if self._trace[request].output_tokens:
                self._record_first_tokens((request,), now, step.iteration_s or math.nan)
        for request in step.began:
            outcomes.prefill_started_s[request] = now

    def _queued_stepped(self, source: int, step: DecodeStep) -> None:
        """Report the prompts that a prefill instance completes, continues and begins."""
        decode = self._fleet.decode[source]
        assert decode.prompts is not None, "every instance can compute prompts"
        partly, begins, batch = decode.prompts.partly, decode.prompts.begins, decode.batch
        for request in step.computed:
            self._queued.pop(request).ended(request)
            if self._outcomes.target[request] == source:
                self._outcomes.entry_iteration_s[request] = step.iteration_s or math.nan
        if partly is not None:
            progressed = self._queued[partly[0]].progressed
            if progressed is not None:
                progressed(*partly)
        for request in begins:
            prompt = self._queued[request]
            prompt.begun(request, max(-(-prompt.tokens // decode.prompts.chunk_tokens), 1) if batch else 1)

    def _iterated(self, target: int, admitted: tuple[int, ...], began_s: float) -> None:
        """End an iteration whose all-reduces share links; the next one begins."""
        decode, now = self._fleet.decode[target], self._agenda.now
        self._record_first_tokens(admitted, now, now - began_s)
        decode.planned_steps = 1
        self._step(target, decode.version)

    def _record_first_tokens(self, admitted: tuple[int, ...], at: float, iteration_s: float) -> None:
        for request in admitted:
            if math.isnan(self._outcomes.first_token_s[request]):  # the end of a prompt may have given it
                self._outcomes.first_token_s[request] = at
            self._outcomes.entry_iteration_s[request] = iteration_s
