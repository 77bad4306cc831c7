"""Lifecycle of every request: prefill, KV transfer, decode, and a restart after a failed transfer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

from kvroute import llm
from kvroute.sim.agenda import Agenda
from kvroute.sim.arrivals import Arrivals
from kvroute.sim.chunked_prompts import WaitingPrompt
from kvroute.sim.copies import Copies
from kvroute.sim.delivery import Delivery
from kvroute.sim.fleet import Fleet
from kvroute.sim.groups.chunked_prefill import chunked_prefills
from kvroute.sim.groups.iterations import Iterations
from kvroute.sim.groups.lock_step import DecodeRanks, PrefillRanks, RankQueue, lock_step_groups
from kvroute.sim.groups.pipelines import PrefillPipeline, Prompt, PromptQueue
from kvroute.sim.groups.streams import Streams
from kvroute.sim.groups.tensor_groups import TensorGroups
from kvroute.sim.instances import Step
from kvroute.sim.metrics import FINISHED, IN_FLIGHT, REJECTED, Outcomes
from kvroute.sim.network.transfers import Kind
from kvroute.sim.placement import Placement
from kvroute.sim.router import Router
from kvroute.sim.settings import SimSettings
from kvroute.sim.store import Store, continued_blocks
from kvroute.sim.telemetry import Telemetry
from kvroute.sim.workload import Trace, TracedRequest
from kvroute.topology import Cluster
from kvroute.types import (
    Admitted,
    Arrived,
    Decision,
    Decode,
    DecodeFailed,
    Finished,
    Prefill,
    PrefillFinished,
    ReadKv,
    Reject,
    Request,
    TransferFinished,
)


class RequestTimelines:
    """Runs each step at its time on the agenda; the engine and network models give the cost of a step."""

    def __init__(
        self,
        cluster: Cluster,
        trace: Trace,
        settings: SimSettings,
        *,
        agenda: Agenda,
        router: Router,
        fleet: Fleet,
        delivery: Delivery,
        copies: Copies,
        telemetry: Telemetry,
        outcomes: Outcomes,
        arrivals: Arrivals,
        groups: TensorGroups,
        prefill_cache: bool,
        copy_queues: bool = False,
        store: Store | None = None,
    ) -> None:
        """Args that are not parts of the run:

        prefill_cache: prefill instances keep the KV of their prompts.
        copy_queues: a request for a cached prefix takes a place in the prefill queue of the instance that has it, as
            a prompt does.
        store: None without one.
        """
        self._cluster, self._trace, self._settings = cluster, trace.requests, settings
        self._agenda, self._router, self._fleet = agenda, router, fleet
        self._delivery, self._copies = delivery, copies
        self._telemetry, self._outcomes = telemetry, outcomes
        self._arrivals, self._prefill_cache, self._copy_queues = arrivals, prefill_cache, copy_queues
        self._booked: set[int] = set()
        """Requests whose target is already known while they are in prefill."""
        self._staying: set[int] = set()
        """Requests in prefill whose prefill instance will go on to decode them."""
        self._paused_s: dict[int, float] = {}
        """Time for which the next iteration of an instance waits, because it computes prompts first; only where
        all-reduces share links."""
        self._produced_bytes_per_s: dict[int, float] = {}
        """Production rate of requests whose KV will be sent while it is computed, until their first layer is
        computed."""
        self._awaiting_copy: dict[int, Prefill] = {}
        self._store = store
        self._continued = continued_blocks(trace) if store is not None else ()
        self._computed: set[int] = set()
        """Requests whose prompt is computed, but for blocks of the store that are still being fetched."""
        self._steps: dict[Kind, Callable[[int, int], None]] = {
            "kv": self._landed,
            "copy": self._copied,
            "ahead": copies.landed_ahead,
            "storage": self._store_landed,
        }
        """What follows a transfer, by its kind."""
        self._shared = groups.traffic
        slice_s = settings.all_reduce_slice_s
        self.iterations = Iterations(agenda, delivery, self.advance, slice_s, groups.carried_bytes)
        self._streams = Streams(agenda, delivery, self.advance, self.watch_stalls)
        self._schedulers = [cluster.timing[instance.timing].scheduler for instance in cluster.instances]
        self._prompts: dict[int, PromptQueue] = {}
        """By instance, for those whose prompts have no known end when they are submitted."""
        if settings.prefill_queueing:
            self._prompts.update(chunked_prefills(cluster, agenda, groups.traffic))
        for index, traffic in groups.traffic.items():
            self._prompts[index] = PrefillPipeline(traffic.stages, self.iterations, settings.prefill_queueing)
        self._ranks: dict[int, DecodeRanks] = {}
        """Decode instances that step together with others, by index."""
        if settings.lock_step:
            self._lock_steps()
        self.placement: Placement | None = None
        """When requests are placed; None: as they arrive."""
        self.reject_reason: str | None = None
        """Reason for the first rejection of the run."""
        self.decisions_s: list[float] = []
        """Wall time of every decode decision, in seconds."""

    def _lock_steps(self) -> None:
        """Let the data-parallel ranks of each engine step together. Prefill without queueing is a pure delay."""
        layerwise = self._settings.transfer == "layerwise"
        for members in lock_step_groups(self._cluster, all_reducing=self._shared, layerwise=layerwise):
            decodes = self._fleet.decode
            ranks = DecodeRanks(members, decodes, self._agenda, self._boundary, self._record_first_tokens)
            prefills = PrefillRanks.of(self._agenda, self._settings.lock_step_tokens, len(members))
            for rank, index in enumerate(members):
                self._ranks[index] = ranks
                if self._settings.prefill_queueing:
                    self._prompts[index] = RankQueue(prefills, rank)

    def arrive(self, request: int) -> None:
        """Process the arrival of a request now."""
        traced = self._trace[request]
        self._outcomes.state[request], self._outcomes.arrived_s[request] = IN_FLIGHT, self._agenda.now
        arrived = Request(
            id=request,
            input_tokens=traced.input_tokens,
            blocks=traced.blocks,
            block_tokens=traced.block_tokens,
            max_output_tokens=traced.output_tokens,
        )
        if self.placement is not None:
            self.placement.arrive(arrived)
        else:
            self.place(arrived, None)

    def place(self, request: Request, ttft_max_s: float | None) -> None:
        """Let the router decide on a request that has arrived. Args: `ttft_max_s`: see `Arrived`."""
        arrived = Arrived(self._agenda.now, request, ttft_max_s=ttft_max_s)
        if self.placement is not None:
            self.placement.placed_s[request.id] = self._agenda.now
        self._begin(request.id, self._router.handle(arrived))

    def advance(self) -> None:
        """Move bytes up to now. The caller then updates the next finish time or changes the flows."""
        now = self._agenda.now
        for transfer in self._delivery.fabric.advance(now):
            self._agenda.at(now + transfer.latency_s, self._steps[transfer.kind], transfer.request)
        if self._delivery.fabric.reduced:
            self.iterations.reduced()

    def watch_stalls(self) -> None:
        """Schedule the stall timeout of the transfers that have no usable path from now on."""
        if self._settings.stall_s is not None:
            for transfer in self._delivery.fabric.stalled(self._agenda.now):
                self._agenda.at(self._agenda.now + self._settings.stall_s, self._stalled, transfer.request)

    def _begin(self, request: int, decisions: tuple[Decision, ...]) -> None:
        """Apply the decisions for a new or restarted request: its prefill and, in some cases, its target."""
        prefill, *others = decisions
        if isinstance(prefill, Decode):
            self._serve_alone(request, prefill)
            return
        if not isinstance(prefill, Prefill):
            self._reject(request, prefill)
            return
        source = self._cluster.index(prefill.instance)
        self._outcomes.source[request], self._outcomes.cached_tokens[request] = source, prefill.cached_tokens
        self._fleet.take(source)
        for decision in others:
            if isinstance(decision, ReadKv):
                self._read(request, decision)
                return
            assert isinstance(decision, Decode)
            self._router.evicted(self._delivery.book(request, decision))
            self._booked.add(request)
            if decision.source == decision.target:
                self._staying.add(request)
                self._fleet.decoding(source)
        if not prefill.copy_from:
            self._submit(request)
            return
        traced, holder = self._trace[request], self._cluster.index(prefill.copy_from)
        blocks = traced.blocks[: prefill.cached_tokens // traced.block_tokens]
        begun = self._copies.hold(request, prefill.copy_id, holder, source, blocks)
        self._awaiting_copy[request] = prefill
        if begun == "refused":
            self._go_without(request)
        if begun == "held" and self._copy_queues:
            self._hold_out(request, holder, prefill.cached_tokens)
        elif begun == "held":
            self._held_out(request, 0)

    def _serve_alone(self, request: int, decision: Decode) -> None:
        """Let a decode instance compute the prompt itself."""
        traced, outcomes, now = self._trace[request], self._outcomes, self._agenda.now
        self._router.evicted(self._delivery.book(request, decision))
        target = int(outcomes.target[request])
        outcomes.source[request], outcomes.cached_tokens[request] = target, decision.hit_tokens
        prompt = WaitingPrompt(request, traced.input_tokens, traced.output_tokens, decision.hit_tokens)
        self._plan_step(target, self._fleet.decode[target].prompt_arrived(now, prompt))

    def _plan_step(self, target: int, wake_s: float | None) -> None:
        """Schedule the next step of a decode instance if it has changed. Where all-reduces share links, the end of each
        iteration is the next step."""
        decode = self._fleet.decode[target]
        if wake_s is not None and (not decode.running or target not in self._shared):
            self._agenda.at(wake_s, self._step, target, decode.version)

    def _prompts_stepped(self, target: int, step: Step) -> None:
        """Record the prompts that a decode instance begins and completes; their first token is there at once."""
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

    def _read(self, request: int, decision: ReadKv) -> None:
        """Begin to read the cached prefix from the store."""
        assert self._store is not None, "only a cluster with a store has reads"
        traced = self._trace[request]
        if decision.decode_instance:
            target = self._cluster.index(decision.decode_instance)
            model = llm.model(self._cluster.instances[target].model)
            need_bytes = float(model.kv_bytes(traced.input_tokens + traced.output_tokens))
            self._router.evicted(self._delivery.plan(request, target, need_bytes))
        self.advance()
        self._store.begin(request, decision)
        self.watch_stalls()

    def _store_landed(self, number: int, _: int) -> None:
        """Complete a transfer from or to the store; a request may go on."""
        assert self._store is not None
        self.advance()
        found = self._store.landed(number)
        if found is not None:
            request, is_read = found
            if is_read:
                self._store.fetch(request, int(self._outcomes.source[request]))
                self._submit(request)
            elif request in self._computed:
                self._computed.remove(request)
                self._prefilled(request, 0)
        self.watch_stalls()

    def _hold_out(self, request: int, holder: int, tokens: int) -> None:
        """Add a request for a cached prefix to the queue of the prefill instance that has it."""
        prefill = self._fleet.prefill[holder]
        if holder in self._prompts:
            seconds = prefill.time.seconds(tokens, tokens)
            prompt = Prompt(request, 0, seconds, lambda _, __: None, lambda number: self._held_out(number, 0))
            self._prompts[holder].submit(prompt)
            return
        _, held_s = prefill.submit(self._agenda.now, tokens, tokens)
        self._agenda.at(held_s, self._held_out, request)

    def _held_out(self, request: int, _: int) -> None:
        """Start the transfer of a prefix from its source."""
        prefill = self._awaiting_copy[request]
        ends = self._cluster.index(prefill.copy_from), self._cluster.index(prefill.instance)
        self.advance()
        self._delivery.copy(request, *ends, prefill.copy_bytes)
        self.watch_stalls()

    def _copied(self, request: int, _: int) -> None:
        """Complete a prefix copy: the prefix is cached, and the rest of the prompt can be computed."""
        for each in self._copies.landed(request):
            del self._awaiting_copy[each]
            self._submit(each)

    def _go_without(self, request: int) -> None:
        """Compute the tokens that would have been copied."""
        self._outcomes.cached_tokens[request] -= self._awaiting_copy.pop(request).copy_tokens
        self._submit(request)

    def _submit(self, request: int) -> None:
        """Add the request to the queue of its prefill instance."""
        traced, outcomes, source = self._trace[request], self._outcomes, int(self._outcomes.source[request])
        cached_tokens = int(outcomes.cached_tokens[request])
        if source in self._prompts:
            self._submit_prompt(request, source, cached_tokens)
            return
        start, finish = self._fleet.prefill[source].submit(self._agenda.now, traced.input_tokens, cached_tokens)
        outcomes.prefill_started_s[request] = start
        if source in self._fleet.decode:
            self._agenda.at(start, self._computing, request)
        if self._streams_kv(request):
            self._plan_stream(request, start, finish, self._fleet.layers[source])
        self._agenda.at(finish, self._prefilled, request)

    def _computing(self, request: int, _: int) -> None:
        """Begin a prompt on a prefill instance that also decodes: its batch waits until the prompt is complete."""
        source = int(self._outcomes.source[request])
        cached_tokens = int(self._outcomes.cached_tokens[request])
        prefill, decode = self._fleet.prefill[source], self._fleet.decode[source]
        seconds = prefill.time.seconds(self._trace[request].input_tokens, cached_tokens) / prefill.stages
        if source in self._shared:
            self._paused_s[source] = self._paused_s.get(source, 0.0) + seconds
            return
        wake_s = decode.pause(self._agenda.now, seconds)
        if wake_s is not None:
            self._agenda.at(wake_s, self._step, source, decode.version)

    def _submit_prompt(self, request: int, source: int, cached_tokens: int) -> None:
        """Add the request to the queue of a prefill instance whose prompts have no known end."""
        input_tokens, queue = self._trace[request].input_tokens, self._prompts[source]
        seconds = self._fleet.prefill[source].time.seconds(input_tokens, cached_tokens)
        tokens, streams = max(input_tokens - cached_tokens, 0), self._streams_kv(request)

        def begun(number: int, slices: int) -> None:
            self._outcomes.prefill_started_s[number] = self._agenda.now
            if source in self._fleet.decode:
                self._computing(number, 0)
            if streams:
                kv_bytes = float(self._outcomes.kv_bytes[number])
                self._streams.plan(number, kv_bytes, seconds, self._fleet.layers[source], slices)

        def ended(number: int) -> None:
            self._streams.end(number)
            self._prefilled(number, 0)

        progressed = self._streams.progressed if streams else None
        queue.submit(Prompt(request, tokens, seconds, begun, ended, progressed, min(cached_tokens, input_tokens)))

    def _streams_kv(self, request: int) -> bool:
        """Return True if the request's KV cache is sent while it is computed."""
        layerwise = self._settings.transfer == "layerwise" and request not in self._staying
        return layerwise and request in self._booked and self._trace[request].output_tokens > 0

    def _plan_stream(self, request: int, start: float, finish: float, layers: int) -> None:
        """Schedule the streamed transfer from the end of the first layer on, if there are several layers and bytes to
        send."""
        kv_bytes = float(self._outcomes.kv_bytes[request])
        if layers > 1 and finish > start and kv_bytes > 0:
            self._produced_bytes_per_s[request] = kv_bytes / (finish - start)
            self._agenda.at(start + (finish - start) / layers, self._stream, request)

    def _stream(self, request: int, _: int) -> None:
        """Start to stream: the first layer's KV is complete, and the others follow at an even rate."""
        self.advance()
        self._delivery.send(request, produced_bytes_per_s=self._produced_bytes_per_s.pop(request))
        self.watch_stalls()

    def _prefilled(self, request: int, _: int) -> None:
        kept_tokens = 0
        if self._store is not None:
            if self._store.is_fetching(request):
                self._computed.add(request)
                return
            self.advance()
            kept_tokens = self._store.prefilled(request)
        traced, outcomes, now = self._trace[request], self._outcomes, self._agenda.now
        outcomes.prefill_finished_s[request] = now
        source = int(outcomes.source[request])
        if self._prefill_cache and traced.blocks and request not in self._staying:
            self._cache_prompt(source, traced)
            if self._store is not None:
                full = traced.input_tokens // traced.block_tokens
                self._store.write_back(source, traced.blocks[:full])
        if not traced.output_tokens:  # without output tokens there is no decode leg and no first token
            self._end_unanswered(request, source)
            return
        started_s = time.perf_counter()
        decisions = self._router.handle(PrefillFinished(now, request, kept_tokens))
        if self.placement is not None:
            self.placement.pump()
        if request in self._staying:
            self._stay(request, source)
            return
        if request in self._booked:
            self._booked.remove(request)
            self._hand_over(request)
            return
        self.decisions_s.append(time.perf_counter() - started_s)
        (decision,) = decisions
        if isinstance(decision, Reject):
            self._reject(request, decision)
            self._router.give_back(source)
            return
        assert isinstance(decision, Decode)
        self._router.evicted(self._delivery.book(request, decision))
        self._hand_over(request)

    def _stay(self, request: int, source: int) -> None:
        """Go on to decode on the prefill instance. The end of the prompt has given the first token."""
        self._booked.remove(request)
        self._staying.remove(request)
        traced, now = self._trace[request], self._agenda.now
        self._outcomes.landed_s[request] = now
        evicted = self._delivery.transfer_done(request)
        if self._delivery.cached(request):
            self._router.stored(source, self._delivery.cached(request), evicted)
        self._router.give_back(source)
        self._outcomes.first_token_s[request] = now
        if traced.output_tokens == 1:
            self._outcomes.admitted_s[request] = now
            self._router.handle(Admitted(now, request))
            self._end_answered(request, source)
            return
        decode = self._fleet.decode[source]
        wake_s = decode.transfer_done(now, request, traced.input_tokens + 1, traced.output_tokens - 1)
        self._plan_step(source, wake_s)

    def _cache_prompt(self, source: int, traced: TracedRequest) -> None:
        """Cache the blocks of a prompt.

        A hybrid model also keeps its state at the last full block, from which a longer prompt with the same beginning
        continues: the partial block belongs to this request's chain only.
        """
        full = traced.input_tokens // traced.block_tokens
        if self._fleet.keeps_states[source] and 0 < full < len(traced.blocks):
            whole = traced.blocks[:full]
            self._router.stored(source, whole, self._fleet.memory.store(source, whole))
        self._router.stored(source, traced.blocks, self._fleet.memory.store(source, traced.blocks))

    def _release_read(self, request: int) -> None:
        """Free what is left in buffers of a read from the store."""
        if self._store is not None:
            self._store.release(request)

    def _end_unanswered(self, request: int, source: int) -> None:
        self._release_read(request)
        self._delivery.end_plan(request)
        if request in self._booked:
            self._booked.remove(request)
            self._staying.discard(request)
            target = int(self._outcomes.target[request])
            self._router.evicted(self._delivery.give_up(request))
            self._router.give_back(target)
        self._finish(request, None)
        self._router.give_back(source)

    def _end_answered(self, request: int, target: int) -> None:
        """End a request that has its last token."""
        if self._store is not None and self._continued[request]:
            self.advance()
            self._store.write_back(target, self._continued[request])
        self._router.evicted(self._delivery.release(request))
        self._finish(request, self._fleet.free_bytes(target))
        self._router.give_back(target)

    def _hand_over(self, request: int) -> None:
        """Request the complete KV cache now, or remove the rate limit of a transfer that already streams."""
        if request in self._delivery.streaming:
            self.advance()
            self._delivery.complete(request)
            self._stalled(request, 0)
            return
        request_s = self._schedulers[int(self._outcomes.target[request])].decode_request_s
        if request_s:
            self._agenda.at(self._agenda.now + request_s, self._pull, request)
        else:
            self._pull(request, 0)

    def _pull(self, request: int, _: int) -> None:
        """Start the transfer of a complete KV cache, or let the decode instance start it between two steps."""
        target = int(self._outcomes.target[request])
        if self._schedulers[target].transfers == "at-once" or not self._outcomes.kv_bytes[request]:
            self._send(request)
            return
        decode = self._fleet.decode[target]
        self._plan_step(target, decode.pull(self._agenda.now, request))

    def _send(self, request: int) -> None:
        self.advance()
        self._delivery.send(request)
        self.watch_stalls()

    def _landed(self, request: int, _: int) -> None:
        traced, outcomes, now = self._trace[request], self._outcomes, self._agenda.now
        outcomes.landed_s[request] = now
        target = int(outcomes.target[request])
        self._telemetry.landed(request, self._delivery.transfers.pop(request).sent_s)
        evicted = self._delivery.transfer_done(request)
        self._release_read(request)
        self._router.handle(TransferFinished(now, request, self._fleet.free_bytes(target)))
        blocks = self._delivery.cached(request)
        if blocks:
            self._router.stored(target, blocks, evicted)
        self._router.give_back(int(outcomes.source[request]))
        decode = self._fleet.decode[target]
        wake_s = decode.transfer_done(now, request, traced.input_tokens, traced.output_tokens)
        if target in self._ranks:
            self._ranks[target].wake()
        else:
            self._plan_step(target, wake_s)

    def _stalled(self, request: int, _: int) -> None:
        """Fail a transfer that has had no usable path for `stall_s`: its request starts again.

        A request that waits for a failed copy computes its prompt without it. A transfer that still streams is checked
        again when its prefill has ended.
        """
        transfer, stall_s = self._delivery.transfers.get(request), self._settings.stall_s
        if stall_s is None or transfer is None or transfer.stalled_s is None or request in self._delivery.streaming:
            return
        if transfer.stalled_s + stall_s > self._agenda.now:
            return
        self.advance()
        if transfer.is_copy:
            for each in self._copies.fail(request):
                if transfer.kind == "copy":
                    self._go_without(each)
            return
        source, target = int(self._outcomes.source[request]), int(self._outcomes.target[request])
        self._router.evicted(self._delivery.give_up(request))
        self._release_read(request)
        decisions = self._router.handle(DecodeFailed(self._agenda.now, request, kv_lost=True))
        self._router.give_back(source)
        self._router.give_back(target)
        self._begin(request, decisions)

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
            self.iterations.start("decode", traffic, step.tokens, seconds, ended)
            return
        self._record_first_tokens(step.admitted, step.first_token_s, step.iteration_s)
        self._agenda.at(wake_s, self._step, target, decode.version)

    def _boundary(self, target: int) -> tuple[Step, float | None]:
        """Process an iteration boundary of a decode instance now: requests leave and join. Return the changes and the
        time of its next boundary with a change, if it iterates on its own; None: it is idle."""
        now, outcomes = self._agenda.now, self._outcomes
        step, wake_s = self._fleet.decode[target].step(now)
        if step.began or step.computed:
            self._prompts_stepped(target, step)
        for request in step.finished:
            self._end_answered(request, target)
        for request in step.admitted:
            if math.isnan(outcomes.first_token_s[request]) or math.isnan(outcomes.admitted_s[request]):
                outcomes.admitted_s[request] = now
            self._router.handle(Admitted(now, request))
        for request in step.pulls:
            self._send(request)
        return step, wake_s

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

    def _finish(self, request: int, free_kv_bytes: float | None) -> None:
        now = self._agenda.now
        self._outcomes.state[request] = FINISHED
        self._outcomes.finished_s[request] = now
        placed_s = self.placement.placed_s.pop(request, math.nan) if self.placement is not None else math.nan
        first_s = float(self._outcomes.first_token_s[request]) - placed_s
        tokens, ttft_s = self._trace[request].output_tokens, first_s if math.isfinite(first_s) else None
        self._router.handle(Finished(now, request, free_kv_bytes, tokens, ttft_s))
        if self.placement is not None:
            self.placement.ended(request, tokens)
        self._arrivals.ended(now, request)

    def _reject(self, request: int, decision: Decision) -> None:
        assert isinstance(decision, Reject)
        self._release_read(request)
        self.refuse(request, decision.reason)

    def refuse(self, request: int, reason: str) -> None:
        """End a request that is not served."""
        self._outcomes.state[request] = REJECTED
        self.reject_reason = self.reject_reason or reason
        if self.placement is not None:
            self.placement.placed_s.pop(request, None)
            self.placement.ended(request, None)
        self._arrivals.ended(self._agenda.now, request)
