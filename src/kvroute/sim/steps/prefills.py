"""Prefill instances of a run: the queues of their prompts, and the KV caches that are sent while a prompt runs."""

from __future__ import annotations

from collections.abc import Callable

from kvroute.sim.groups.chunked_prefill import chunked_prefills
from kvroute.sim.groups.iterations import Iterations
from kvroute.sim.groups.lock_step import PrefillRanks, RankQueue
from kvroute.sim.groups.pipelines import PipelinePrompt, PrefillPipeline, PrefillQueue
from kvroute.sim.groups.streams import Streams
from kvroute.sim.run_parts import RunParts
from kvroute.sim.steps.decode_steps import DecodeSteps


class Prefills:
    """Adds prompts to the queues of prefill instances, and reports their ends."""

    def __init__(
        self,
        parts: RunParts,
        iterations: Iterations,
        decodes: DecodeSteps,
        *,
        advance: Callable[[], None],
        watch_stalls: Callable[[], None],
        ended: Callable[[int, int], None],
    ) -> None:
        """Start without prompts.

        Args:
            parts: the run.
            iterations: those whose all-reduces share links.
            decodes: the decode instances.
            advance, watch_stalls: called before and after a transfer starts.
            ended: called with a request, and 0, when its prompt is computed.
        """
        settings, agenda, groups = parts.settings, parts.agenda, parts.groups
        self._trace, self._settings, self._agenda, self._fleet = parts.trace.requests, settings, agenda, parts.fleet
        self._delivery, self._outcomes, self._decodes = parts.delivery, parts.outcomes, decodes
        self._advance, self._watch_stalls, self._ended = advance, watch_stalls, ended
        self._streams = Streams(agenda, parts.delivery, advance, watch_stalls)
        self._produced_bytes_per_s: dict[int, float] = {}
        """Production rate of requests whose KV will be sent while it is computed, until their first layer is
        computed."""
        self._queues: dict[int, PrefillQueue] = {}
        """By instance, for those whose prompts have no known end when they are submitted."""
        if settings.prefill_queueing:
            self._queues.update(chunked_prefills(parts.cluster, agenda, groups.traffic))
        for index, traffic in groups.traffic.items():
            self._queues[index] = PrefillPipeline(traffic.stages, iterations, settings.prefill_queueing)

    def lock_step(self, members: tuple[int, ...]) -> None:
        """Let these instances run their prompts together. Prefill without queueing is a pure delay."""
        prefills = PrefillRanks.of(self._agenda, self._settings.lock_step_tokens, len(members))
        for rank, index in enumerate(members):
            if self._settings.prefill_queueing:
                self._queues[index] = RankQueue(prefills, rank)

    def hold(self, request: int, holder: int, tokens: int, held: Callable[[int, int], None]) -> None:
        """Add a request for a cached prefix to the queue of the instance that has it. Args: `held`: called with the
        request, and 0, at its end."""
        prefill = self._fleet.prefill[holder]
        if holder in self._queues or holder in self._fleet.mixing:
            seconds = prefill.time.seconds(tokens, tokens)
            prompt = PipelinePrompt(request, 0, seconds, lambda _, __: None, lambda number: held(number, 0))
            if holder in self._queues:
                self._queues[holder].submit(prompt)
            else:
                self._decodes.add_queued(holder, prompt, output_tokens=0)
            return
        _, held_s = prefill.submit(self._agenda.now, tokens, tokens)
        self._agenda.at(held_s, held, request)

    def keep(self, source: int) -> None:
        """Let an instance also decode requests. Where its prompts have one queue and one stage, it computes them beside
        the steps of its batch (chunked prefill); else its batch waits for each prompt."""
        self._fleet.decoding(source)
        if self._mixes(source):
            self._fleet.mix(source)

    def _mixes(self, source: int) -> bool:
        prefill = self._fleet.prefill[source]
        return source not in self._queues and prefill.queueing and prefill.stages == 1

    def submit(self, request: int, *, streams: bool, kept: bool) -> None:
        """Add a request to the queue of its instance.

        Args:
            request: number of the request.
            streams: its KV cache is sent while it is computed.
            kept: its instance will go on to decode it.
        """
        traced, outcomes, source = self._trace[request], self._outcomes, int(self._outcomes.source[request])
        cached_tokens = int(outcomes.cached_tokens[request])
        if source in self._queues or source in self._fleet.mixing:
            self._submit_prompt(request, source, cached_tokens, streams=streams, kept=kept)
            return
        start, finish = self._fleet.prefill[source].submit(self._agenda.now, traced.input_tokens, cached_tokens)
        outcomes.prefill_started_s[request] = start
        if source in self._fleet.decode and not self._mixes(source):
            self._agenda.at(start, self._computing, request)
        if streams:
            self._plan_stream(request, start, finish, self._fleet.layers[source])
        self._agenda.at(finish, self._ended, request)

    def _submit_prompt(self, request: int, source: int, cached_tokens: int, *, streams: bool, kept: bool) -> None:
        """Add the request to the queue of an instance whose prompts have no known end."""
        input_tokens = self._trace[request].input_tokens
        seconds = self._fleet.prefill[source].time.seconds(input_tokens, cached_tokens)
        tokens = max(input_tokens - cached_tokens, 0)

        def begun(number: int, slices: int) -> None:
            self._outcomes.prefill_started_s[number] = self._agenda.now
            if source in self._fleet.decode and source not in self._fleet.mixing:
                self._computing(number, 0)
            if streams:
                kv_bytes = float(self._outcomes.kv_bytes[number])
                self._streams.plan(number, kv_bytes, seconds, self._fleet.layers[source], slices)

        def ended(number: int) -> None:
            self._streams.end(number)
            self._ended(number, 0)

        progressed = self._streams.progressed if streams else None
        prompt = PipelinePrompt(request, tokens, seconds, begun, ended, progressed, min(cached_tokens, input_tokens))
        if source in self._queues:
            self._queues[source].submit(prompt)
        else:
            self._decodes.add_queued(source, prompt, output_tokens=self._trace[request].output_tokens if kept else 0)

    def _computing(self, request: int, _: int) -> None:
        """Begin a prompt on an instance whose batch waits until the prompt is complete."""
        source = int(self._outcomes.source[request])
        prefill = self._fleet.prefill[source]
        tokens, cached_tokens = self._trace[request].input_tokens, int(self._outcomes.cached_tokens[request])
        self._decodes.pause(source, prefill.time.seconds(tokens, cached_tokens) / prefill.stages)

    def _plan_stream(self, request: int, start: float, finish: float, layers: int) -> None:
        """Schedule the streamed transfer from the end of the first layer on, if there are several layers and bytes to
        send."""
        kv_bytes = float(self._outcomes.kv_bytes[request])
        if layers > 1 and finish > start and kv_bytes > 0:
            self._produced_bytes_per_s[request] = kv_bytes / (finish - start)
            self._agenda.at(start + (finish - start) / layers, self._stream, request)

    def _stream(self, request: int, _: int) -> None:
        """Start to stream: the first layer's KV is complete, and the others follow at an even rate."""
        self._advance()
        self._delivery.send(request, produced_bytes_per_s=self._produced_bytes_per_s.pop(request))
        self._watch_stalls()
