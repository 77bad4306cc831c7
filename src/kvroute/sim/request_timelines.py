"""Lifecycle of every request: prefill, KV transfer, decode, and a restart after a failed transfer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from kvroute.sim.arrivals import Arrivals
from kvroute.sim.groups.iterations import Iterations
from kvroute.sim.groups.lock_step import lock_step_groups
from kvroute.sim.metrics import FINISHED, IN_FLIGHT, REJECTED
from kvroute.sim.network.transfers import Kind
from kvroute.sim.placement import PlacementTurns
from kvroute.sim.run_parts import RunParts
from kvroute.sim.steps.awaited_prefixes import AwaitedPrefixes
from kvroute.sim.steps.decode_steps import DecodeSteps
from kvroute.sim.steps.prefills import Prefills
from kvroute.sim.steps.whole_requests import WholeRequests
from kvroute.sim.store import continued_blocks
from kvroute.sim.telemetry import Telemetry
from kvroute.sim.workload import TracedRequest
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
        parts: RunParts,
        telemetry: Telemetry,
        arrivals: Arrivals,
        *,
        prefill_cache: bool,
        copy_queues: bool = False,
    ) -> None:
        """Start without requests.

        Args:
            parts: the run.
            telemetry: gets the times of transfers.
            arrivals: gets the ends of requests.
            prefill_cache: prefill instances keep the KV of their prompts.
            copy_queues: a request for a cached prefix takes a place in the prefill queue of the instance that has it,
                as a prompt does.
        """
        cluster, settings = parts.cluster, parts.settings
        self._cluster, self._trace, self._settings = cluster, parts.trace.requests, settings
        self._agenda, self._router, self._fleet = parts.agenda, parts.router, parts.fleet
        self._delivery, self._copies, self._outcomes = parts.delivery, parts.copies, parts.outcomes
        self._telemetry, self._arrivals, self._prefill_cache = telemetry, arrivals, prefill_cache
        self._booked: set[int] = set()
        """Requests whose target is already known while they are in prefill."""
        self._kept: set[int] = set()
        """Requests in prefill whose prefill instance will go on to decode them."""
        self._store = parts.store
        self._continued = continued_blocks(parts.trace) if parts.store is not None else ()
        self.iterations = Iterations(
            parts.agenda, parts.delivery, self.advance, settings.all_reduce_slice_s, parts.groups.carried_bytes
        )
        self._decodes = DecodeSteps(parts, self.iterations, answered=self._end_answered, pulled=self._send)
        self._whole = WholeRequests(parts, copy_queues=copy_queues, answered=self._prefilled, ended=self._end_answered)
        self._prefills = Prefills(
            parts,
            self.iterations,
            self._decodes,
            advance=self.advance,
            watch_stalls=self.watch_stalls,
            ended=self._prefilled,
        )
        self._prefixes = AwaitedPrefixes(
            parts,
            self._prefills,
            copy_queues=copy_queues,
            advance=self.advance,
            watch_stalls=self.watch_stalls,
            arrived=self._submit,
            computed=self._prefilled,
        )
        self._steps: dict[Kind, Callable[[int, int], None]] = {
            "kv": self._landed,
            "copy": self._prefixes.copied,
            "ahead": parts.copies.landed_ahead,
            "storage": self._prefixes.store_landed,
        }
        """What follows a transfer, by its kind."""
        self._schedulers = [cluster.timing[instance.timing].scheduler for instance in cluster.instances]
        if settings.lock_step:
            layerwise = settings.transfer == "layerwise"
            for members in lock_step_groups(cluster, all_reducing=parts.groups.traffic, layerwise=layerwise):
                self._decodes.lock_step(members)
                self._prefills.lock_step(members)
        self.placement: PlacementTurns | None = None
        """When requests are placed; None: as they arrive."""
        self.reject_reason: str | None = None
        """Reason for the first rejection of the run."""
        self.decisions_s: list[float] = []
        """Wall time of every decode decision, in seconds."""

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
            self._serve_aggregated(request, prefill)
            return
        if not isinstance(prefill, Prefill):
            self._reject(request, prefill)
            return
        source = self._cluster.index(prefill.instance)
        self._outcomes.source[request], self._outcomes.cached_tokens[request] = source, prefill.cached_tokens
        self._fleet.take(source)
        for decision in others:
            if isinstance(decision, ReadKv):
                self._prefixes.read(request, decision)
                return
            assert isinstance(decision, Decode)
            self._router.evicted(self._delivery.book(request, decision))
            self._booked.add(request)
            if decision.source == decision.target:
                self._kept.add(request)
                if not self._whole.serves(source):
                    self._prefills.keep(source)
        if prefill.copy_from:
            self._prefixes.copy(request, prefill)
        else:
            self._submit(request)

    def _serve_aggregated(self, request: int, decision: Decode) -> None:
        """Let a decode instance compute the prompt itself."""
        outcomes = self._outcomes
        self._router.evicted(self._delivery.book(request, decision))
        target = int(outcomes.target[request])
        outcomes.source[request], outcomes.cached_tokens[request] = target, decision.hit_tokens
        self._decodes.add_prompt(target, request, decision.hit_tokens)

    def _submit(self, request: int) -> None:
        """Add the request to the queue of its prefill instance, or of the one that serves it from prompt to end."""
        source = int(self._outcomes.source[request])
        if self._whole.serves(source):
            self._whole.submit(request, source)
            return
        self._prefills.submit(request, streams=self._streams_kv(request), kept=request in self._kept)

    def _streams_kv(self, request: int) -> bool:
        """Return True if the request's KV cache is sent while it is computed."""
        layerwise = self._settings.transfer == "layerwise" and request not in self._kept
        return layerwise and request in self._booked and self._trace[request].output_tokens > 0

    def _prefilled(self, request: int, _: int) -> None:
        kept_tokens = self._prefixes.prefilled(request)
        if kept_tokens is None:
            return
        traced, outcomes, now = self._trace[request], self._outcomes, self._agenda.now
        outcomes.prefill_finished_s[request] = now
        source = int(outcomes.source[request])
        if self._prefill_cache and traced.blocks and request not in self._kept:
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
            self.placement.place_ready()
        if request in self._kept:
            self._decode_locally(request, source)
            return
        if request in self._booked:
            self._booked.remove(request)
            self._hand_over(request)
            return
        self.decisions_s.append(time.perf_counter() - started_s)
        (decision,) = decisions
        if isinstance(decision, Reject):
            self._reject(request, decision)
            self._router.release(source)
            return
        assert isinstance(decision, Decode)
        self._router.evicted(self._delivery.book(request, decision))
        self._hand_over(request)

    def _decode_locally(self, request: int, source: int) -> None:
        """Go on to decode on the prefill instance. The end of the prompt has given the first token."""
        self._booked.remove(request)
        self._kept.remove(request)
        traced, now = self._trace[request], self._agenda.now
        self._outcomes.landed_s[request] = now
        evicted = self._delivery.transfer_done(request)
        if self._delivery.cached(request):
            self._router.stored(source, self._delivery.cached(request), evicted)
        self._router.release(source)
        self._outcomes.first_token_s[request] = now
        if self._whole.serves(source) or source in self._fleet.mixing:
            self._outcomes.admitted_s[request] = now
            self._router.handle(Admitted(now, request))
            return
        if traced.output_tokens == 1:
            self._outcomes.admitted_s[request] = now
            self._router.handle(Admitted(now, request))
            self._end_answered(request, source)
            return
        self._decodes.add_prefilled(source, request)

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
            self._kept.discard(request)
            target = int(self._outcomes.target[request])
            self._router.evicted(self._delivery.give_up(request))
            self._router.release(target)
        self._finish(request, None)
        self._router.release(source)

    def _end_answered(self, request: int, target: int) -> None:
        """End a request that has its last token."""
        if self._store is not None and self._continued[request]:
            self.advance()
            self._store.write_back(target, self._continued[request])
        self._router.evicted(self._delivery.release(request))
        self._finish(request, self._fleet.free_bytes(target))
        self._router.release(target)

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
        self._decodes.pull(target, request)

    def _send(self, request: int) -> None:
        self.advance()
        self._delivery.send(request)
        self.watch_stalls()

    def _landed(self, request: int, _: int) -> None:
        outcomes, now = self._outcomes, self._agenda.now
        outcomes.landed_s[request] = now
        target = int(outcomes.target[request])
        self._telemetry.landed(request, self._delivery.transfers.pop(request).sent_s)
        evicted = self._delivery.transfer_done(request)
        self._release_read(request)
        self._router.handle(TransferFinished(now, request, self._fleet.free_bytes(target)))
        blocks = self._delivery.cached(request)
        if blocks:
            self._router.stored(target, blocks, evicted)
        self._router.release(int(outcomes.source[request]))
        self._decodes.add_landed(target, request)

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
            for ended in self._copies.fail(request):
                if transfer.kind == "copy":
                    self._prefixes.go_without(ended)
            return
        source, target = int(self._outcomes.source[request]), int(self._outcomes.target[request])
        self._router.evicted(self._delivery.give_up(request))
        self._release_read(request)
        decisions = self._router.handle(DecodeFailed(self._agenda.now, request, kv_lost=True))
        self._router.release(source)
        self._router.release(target)
        self._begin(request, decisions)

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
