"""A slow engine that visits every request in every step: the reference for `kvroute.sim.engine`.

It follows vLLM: requests that have started in their order, then those that wait; blocks in a list of
free ones, each with the key of its content.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvroute.sim.engine.scheduler import EngineSpec
from kvroute.timing.steps import StepWork


@dataclass(eq=False)
class SlowRequest:
    """A request as the reference keeps it."""

    number: int
    arrived_s: float
    prompt: list[object]
    """Content of each token of the prompt."""
    output_tokens: int
    computed: int = 0
    sampled: int = 0
    """Tokens of the output that steps up to the last planned one generate."""
    blocks: list[int] = field(default_factory=list)
    first_token_s: float | None = None
    ended_s: float | None = None
    preemptions: int = 0

    def content(self, tokens: int) -> tuple[object, ...]:
        """Return the first tokens; those of the output are its own."""
        own = [(self.number, "own", position) for position in range(len(self.prompt), tokens)]
        return tuple((self.prompt + own)[:tokens])


class SlowEngine:
    """One rank; a block is free or has users, and its key is all content up to its end."""

    def __init__(self, spec: EngineSpec, steps: Callable[[StepWork], float]) -> None:
        self.spec, self.steps = spec, steps
        self.free = list(range(spec.blocks))
        self.key: dict[int, tuple[object, ...] | None] = dict.fromkeys(range(spec.blocks))
        self.users = dict.fromkeys(range(spec.blocks), 0)
        self.waiting: list[SlowRequest] = []
        self.running: list[SlowRequest] = []

    def take(self) -> int:
        block = self.free.pop(0)
        self.key[block], self.users[block] = None, 1
        return block

    def release(self, request: SlowRequest) -> None:
        for block in reversed(request.blocks):
            self.users[block] -= 1
            if not self.users[block]:
                self.free.append(block)
        request.blocks = []

    def name(self, request: SlowRequest) -> None:
        """Give its full blocks the keys of their content."""
        size = self.spec.block_tokens
        for position in range(request.computed // size if self.spec.prefix_cache else 0):
            key = request.content((position + 1) * size)
            if self.key[request.blocks[position]] is None and key not in self.key.values():
                self.key[request.blocks[position]] = key

    def cached(self, request: SlowRequest, known: int) -> list[int]:
        size, found = self.spec.block_tokens, []
        by_key = {key: block for block, key in self.key.items() if key is not None}
        for position in range((known - 1) // size):
            block = by_key.get(request.content((position + 1) * size))
            if block is None:
                break
            found.append(block)
        return found

    def plan(self) -> tuple[StepWork, list[SlowRequest], list[SlowRequest]] | None:
        """Return the next step with the requests that sample their first token after a start, and all that sample."""
        size, budget, preempted = self.spec.block_tokens, self.spec.step_tokens, False
        parts: list[tuple[SlowRequest, int, int]] = []
        for request in list(self.running):
            known = len(request.prompt) + request.sampled
            tokens = min(known - request.computed, budget)
            if request not in self.running or not tokens or request.sampled == request.output_tokens:
                continue
            while len(self.free) < -(-(request.computed + tokens) // size) - len(request.blocks):
                victim = [other for other in self.running if other.sampled < other.output_tokens][-1]
                self.running.remove(victim)
                self.name(victim)
                self.release(victim)
                victim.computed, victim.preemptions, preempted = 0, victim.preemptions + 1, True
                self.waiting.insert(0, victim)
                if victim is request:
                    break
            if request in self.running:
                parts.append(self.compute(request, tokens))
                budget -= tokens
        while self.waiting and budget and len(self.running) < self.spec.requests_max and not preempted:
            request = self.waiting[0]
            known = len(request.prompt) + request.sampled
            found = self.cached(request, known) if self.spec.prefix_cache else []
            tokens = min(known - len(found) * size, budget)
            needed = -(-known // size) if self.spec.reserve_prompt else -(-(len(found) * size + tokens) // size)
            if len([block for block in self.free if block not in found]) < needed - len(found):
                break
            for block in found:
                if not self.users[block]:
                    self.free.remove(block)
                self.users[block] += 1
            request.blocks, request.computed = found, len(found) * size
            self.running.append(self.waiting.pop(0))
            parts.append(self.compute(request, tokens))
            budget -= tokens
        if not parts:
            return None
        sampling = [request for request, _, _ in parts if request.computed == len(request.prompt) + request.sampled]
        # A request whose prompt ends is one of the prompts, even if that is one token.
        decodes = [
            part for part in parts if part[0].sampled and part[1] + 1 == part[0].computed and part[0] in self.old
        ]
        prompts = [part for part in parts if part not in decodes]
        work = StepWork(
            tuple((computed, tokens) for _, computed, tokens in prompts),
            len(decodes),
            sum(computed + 1 for _, computed, _ in decodes),
        )
        self.old = [request for request in self.running if request in sampling or request in self.old]
        first = [request for request, _, _ in prompts if request in sampling]
        for request in sampling:
            request.sampled += 1
        return work, first, sampling

    old: Sequence[SlowRequest] = ()
    """Requests whose prompt was complete before the step."""

    def compute(self, request: SlowRequest, tokens: int) -> tuple[SlowRequest, int, int]:
        computed = request.computed
        request.computed += tokens
        while len(request.blocks) * self.spec.block_tokens < request.computed:
            request.blocks.append(self.take())
        self.name(request)
        return request, computed, tokens

    def run(self, requests: Sequence[SlowRequest]) -> list[StepWork]:
        """Serve all requests; return the steps."""
        todo, now, gpu_s = sorted(requests, key=lambda request: request.arrived_s), 0.0, 0.0
        under_way: list[tuple[float, StepWork, list[SlowRequest], list[SlowRequest]]] = []
        history, half_s = [], self.spec.request_s / 2
        while todo or under_way or self.waiting or self.running:
            while todo and todo[0].arrived_s + half_s <= now:
                self.waiting.append(todo.pop(0))
            planned = self.plan()
            if planned is not None:
                work, first, sampling = planned
                gpu_s = max(now, gpu_s) + self.steps(work)
                under_way.append((gpu_s, work, first, [r for r in sampling if r.sampled == r.output_tokens]))
                history.append(work)
                if self.spec.asynchronous and len(under_way) < 2:
                    continue
            if not under_way:
                now = todo[0].arrived_s + half_s
                continue
            now, work, first, ended = under_way.pop(0)
            sent_s = now + (half_s + self.spec.streaming_request_s * work.decoding)
            for request in first:
                request.first_token_s = sent_s if request.first_token_s is None else request.first_token_s
            for request in ended:
                request.ended_s = sent_s
                self.running.remove(request)
                self.release(request)
        return history
