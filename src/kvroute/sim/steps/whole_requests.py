"""Instances of role `both`, which compute prompts and decode in the same steps: a request from arrival to end."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

from kvroute import llm
from kvroute.sim.engine.scheduler import EngineRequest, EngineSpec
from kvroute.sim.engine.serving import ServingEngine
from kvroute.sim.run_parts import RunParts
from kvroute.sim.workload import Trace
from kvroute.timing.steps import timing_steps
from kvroute.types import InputError, Instance, TimingSpec

BLOCK_TOKENS = 16
"""Tokens of one of the engine's own blocks, as vLLM has them; those of a trace may be larger."""


class WholeRequests:
    """Runs the engines of instances of role `both` on the agenda."""

    def __init__(
        self,
        parts: RunParts,
        *,
        copy_queues: bool,
        answered: Callable[[int, int], None],
        ended: Callable[[int, int], None],
    ) -> None:
        """Start without requests.

        Args:
            parts: the run.
            copy_queues: see `RequestTimelines`.
            answered: called with a request, and 0, that has its first token.
            ended: called with a request and its instance after the last token; not for one without output tokens.

        Raises:
            InputError: an instance of role `both` beside something that is not modelled with it, or whose memory is
                smaller than the KV cache of a request.
        """
        self._trace, self._agenda, self._outcomes = parts.trace.requests, parts.agenda, parts.outcomes
        self._answered, self._ended = answered, ended
        self._engines: dict[int, ServingEngine] = {}
        for index, instance in enumerate(parts.cluster.instances):
            if instance.role == "both":
                _refuse(
                    instance,
                    {
                        "all-reduces on shared links": index in parts.groups.traffic,
                        f"{instance.pp} pipeline stages": instance.pp > 1,
                        "iterations in lock-step": parts.settings.lock_step,
                        "a queue of requests for cached prefixes": copy_queues,
                        "a store": parts.store is not None,
                    },
                )
                engine = self._engine(instance, parts.cluster.timing[instance.timing])
                _refuse_larger(instance, engine, parts.trace)
                self._engines[index] = engine

    def serves(self, index: int) -> bool:
        """Return whether an instance has role `both`."""
        return index in self._engines

    def submit(self, number: int, index: int) -> None:
        """Send a request to an instance."""
        traced = self._trace[number]
        keys: list[Hashable] = []
        for position in range(traced.input_tokens // BLOCK_TOKENS):
            last = ((position + 1) * BLOCK_TOKENS - 1) // traced.block_tokens
            if last >= len(traced.blocks):
                break
            keys.append((traced.blocks[last], position))
        output_tokens = max(traced.output_tokens, 1)
        request = EngineRequest(number, self._agenda.now, traced.input_tokens, output_tokens, tuple(keys))
        self._engines[index].submit(request)

    def _engine(self, instance: Instance, timing: TimingSpec) -> ServingEngine:
        scheduler, steps = timing.scheduler, timing_steps(timing)
        spec = EngineSpec(
            step_tokens=instance.chunk_tokens,
            requests_max=instance.batch_max,
            blocks=int(instance.kv_capacity_bytes // llm.model(instance.model).block_bytes(BLOCK_TOKENS)),
            block_tokens=BLOCK_TOKENS,
            asynchronous=scheduler.asynchronous,
            request_s=scheduler.request_s,
            streaming_request_s=scheduler.streaming_request_s,
        )
        return ServingEngine(
            self._agenda, spec, lambda works: steps(works[0]), answers=self._schedule_answer, ends=self._schedule_end
        )

    def _schedule_answer(self, request: EngineRequest) -> None:
        assert request.first_token_s is not None
        assert request.started_s is not None
        self._outcomes.prefill_started_s[request.number] = request.started_s
        self._outcomes.cached_tokens[request.number] = request.cached_tokens
        self._agenda.at(request.first_token_s, self._answered, request.number)

    def _schedule_end(self, request: EngineRequest) -> None:
        assert request.ended_s is not None
        number = request.number
        if self._trace[number].output_tokens:
            self._agenda.at(request.ended_s, self._ended, number, int(self._outcomes.target[number]))


def _refuse(instance: Instance, beside: Mapping[str, bool]) -> None:
    """Raise an InputError for the first feature that a run has and that is not modelled beside role `both`."""
    for feature, found in beside.items():
        if found:
            what = f"instance {instance.name} has role 'both', which the simulator does not model beside {feature}"
            raise InputError(what, hint="leave one of them out, or give the instance the role prefill or decode")


def _refuse_larger(instance: Instance, engine: ServingEngine, trace: Trace) -> None:
    """Raise an InputError for a request whose KV cache is larger than the memory of an instance; it would not start."""
    for number, traced in enumerate(trace.requests):
        request = EngineRequest(number, traced.at_s, traced.input_tokens, max(traced.output_tokens, 1))
        if not engine.ranks[0].fits(request):
            tokens = f"{traced.input_tokens:,} + {traced.output_tokens:,} tokens"
            what = f"request {number} of {tokens} is larger than the KV memory of instance {instance.name}"
            raise InputError(what, where=trace.name, hint="raise its `kv_capacity`, or leave the request out")
