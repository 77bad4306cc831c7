"""One run: a trace through a cluster in virtual time, decided by the same `Control` that serves live traffic."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from kvroute import llm
from kvroute.control import ControlSpec, EventLog
from kvroute.prefix import Evicted, PrefixIndex
from kvroute.sim.instances import DecodeInstance, KvMemory, PrefillInstance
from kvroute.sim.link_load import busiest_links, link_load
from kvroute.sim.metrics import (
    FINISHED,
    IN_FLIGHT,
    REJECTED,
    Outcomes,
    Summary,
    Timeline,
    summarise,
)
from kvroute.sim.network import Fabric
from kvroute.sim.settings import SimSettings
from kvroute.sim.workload import Trace
from kvroute.timing import IterationTime, prefill_time
from kvroute.topology import Cluster
from kvroute.types import (
    TIER_COUNT,
    Admitted,
    Arrived,
    CongestionMeasured,
    Decision,
    Decode,
    Event,
    Finished,
    FloatArray,
    InputError,
    KvEvicted,
    KvStored,
    LinksMeasured,
    Prefill,
    PrefillFinished,
    Reject,
    Request,
    TransferFinished,
    TransferMeasured,
)

PREFILLED, LANDED, STEP, REFRESH, BURST = range(5)
FOREVER = float("inf")


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run: its summary, and all that it was made from."""

    summary: Summary
    outcomes: Outcomes
    timeline: Timeline
    link_bytes: FloatArray
    """Bytes that each link carried, in the cluster's order of links."""
    network_bytes: float
    """Bytes that crossed the network, from the sum over flows that the network itself kept."""
    end_s: float


def simulate(
    cluster: Cluster,
    trace: Trace,
    spec: ControlSpec,
    settings: SimSettings,
    *,
    seed: int = 0,
    log: EventLog | None = None,
) -> Run:
    """Play `trace` through `cluster`; the same arguments give the same run, bit for bit.

    Raises:
        InputError: a policy or parameter that does not exist, instances of role `both` or of several models, a trace
            whose prefix blocks differ in size.
    """
    return Simulation(cluster, trace, spec, settings, seed=seed, log=log).run()


def _block_tokens(trace: Trace) -> int:
    """Tokens of the trace's prefix blocks; where none has any, the size of what its requests are counted in."""
    sizes = sorted({request.block_tokens for request in trace.requests if request.blocks})
    if len(sizes) > 1:
        what = f"prefix blocks of {' and '.join(map(str, sizes))} tokens stand in one trace"
        raise InputError(what, where=trace.name, mend="give every request blocks of one size")
    return sizes[0] if sizes else max((request.block_tokens for request in trace.requests), default=16)


class Simulation:
    """The loop and the truth: queues, batches, memory and bytes. Control sees only the events it is told."""

    def __init__(
        self,
        cluster: Cluster,
        trace: Trace,
        spec: ControlSpec,
        settings: SimSettings,
        *,
        seed: int,
        log: EventLog | None = None,
    ) -> None:
        self._cluster, self._trace, self._settings = cluster, trace.requests, settings
        self._spec, self._seed, self._log = spec, seed, log
        self._control = spec.build(cluster)
        self._fabric = Fabric(cluster, settings.background, seed)
        self._index = {instance.name: index for index, instance in enumerate(cluster.instances)}
        self._prefill: dict[int, PrefillInstance] = {}
        self._decode: dict[int, DecodeInstance] = {}
        self._add_instances()
        self._block_tokens = _block_tokens(trace)
        self._memory = self._kv_memory()
        self._events: list[tuple[float, int, int, int, int]] = []
        self._sequence = 0
        self._next_flow_s = FOREVER
        self._now = 0.0
        self._total_blocks = [0] * len(trace.requests)
        self._pinned_hit = [0] * len(trace.requests)
        self._arrived = 0
        self._reject_reason: str | None = None
        self._decisions_s: list[float] = []
        self._samples: list[tuple[float, list[float]]] = []
        self._unmeasured: dict[tuple[int, int], list[int]] = {}
        """Requests whose KV has landed since the last refresh, by source and target."""
        self._outcomes = Outcomes.empty(len(trace.requests))
        self._outcomes.arrived_s[:] = [request.at_s for request in trace.requests]
        self._outcomes.input_tokens[:] = [request.input_tokens for request in trace.requests]
        self._outcomes.output_tokens[:] = [request.output_tokens for request in trace.requests]

    def _add_instances(self) -> None:
        models = sorted({instance.model for instance in self._cluster.instances})
        if len(models) > 1:
            mend = "simulate a cluster file for each model"
            what = f"the cluster serves {', '.join(models)}, and a trace does not say which one a request wants"
            raise InputError(what, where=self._cluster.name, mend=mend)
        for index, instance in enumerate(self._cluster.instances):
            spec = self._cluster.timing[instance.timing]
            if instance.role == "prefill":
                time_ = prefill_time(spec.prefill)
                self._prefill[index] = PrefillInstance(index, time_, self._settings.prefill_queueing)
            elif instance.role == "decode":
                self._decode[index] = DecodeInstance(index, IterationTime.of(spec.decode), instance.batch_max)
            else:
                raise InputError(
                    f"instance {instance.name} has role {instance.role!r}, which the simulator does not model",
                    mend="give it the role prefill or decode",
                )

    def _kv_memory(self) -> KvMemory:
        """Capacity in blocks of the trace's size."""
        tokens = self._block_tokens
        models = [llm.model(instance.model) for instance in self._cluster.instances]
        # A model of sliding windows alone keeps nothing per token in the long run: its first block is the measure.
        block_bytes = [model.kv_bytes_per_token * tokens or float(model.kv_bytes(tokens)) for model in models]
        capacity = [
            int(instance.kv_capacity_bytes // size)
            for instance, size in zip(self._cluster.instances, block_bytes, strict=True)
        ]
        self._block_bytes = block_bytes
        return KvMemory(PrefixIndex(len(capacity), capacity), capacity, [0] * len(capacity))

    def run(self) -> Run:
        """Run to the end."""
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        self._start()
        handlers: tuple[Callable[[int, int], None], ...] = (
            self._prefilled,
            self._landed,
            self._step,
            self._refresh,
            self._burst,
        )
        until_s = FOREVER if self._settings.until_s is None else self._settings.until_s
        events, trace = self._events, self._trace
        while True:
            arrival_s = trace[self._arrived].at_s if self._arrived < len(trace) else FOREVER
            event_s = events[0][0] if events else FOREVER
            now = min(self._next_flow_s, event_s, arrival_s)
            if now > until_s or (arrival_s == FOREVER and not self._control.in_flight):
                break
            if now == FOREVER:
                raise InputError("requests wait for a transfer that can never end", mend="give every link capacity")
            assert now >= self._now, "time went back"
            self._now = now
            if now == self._next_flow_s:
                self._flows_ended(now)
            elif now == event_s:
                _, _, kind, a, b = heappop(events)
                handlers[kind](a, b)
            else:
                self._arrive(self._arrived)
                self._arrived += 1
        return self._result(time.perf_counter() - wall_s, time.process_time() - cpu_s)

    def _start(self) -> None:
        if self._trace:
            self._refresh(0, 0)
        if self._trace and self._settings.background.burst_every_s:
            self._at(self._fabric.next_change_s(), BURST)

    def _tell(self, event: Event) -> tuple[Decision, ...]:
        decisions = self._control.handle(event)
        if self._log is not None:
            self._log.write(event, decisions)
        return decisions

    def _at(self, at: float, kind: int, a: int = 0, b: int = 0) -> None:
        heappush(self._events, (at, self._sequence, kind, a, b))
        self._sequence += 1

    def _arrive(self, request: int) -> None:
        traced, outcomes = self._trace[request], self._outcomes
        outcomes.state[request] = IN_FLIGHT
        arrived = Request(
            id=request,
            input_tokens=traced.input_tokens,
            blocks=traced.blocks,
            block_tokens=traced.block_tokens,
            max_output_tokens=traced.output_tokens,
        )
        (decision,) = self._tell(Arrived(self._now, arrived))
        if not isinstance(decision, Prefill):
            self._reject(request, decision)
            return
        source = self._index[decision.instance]
        instance = self._prefill[source]
        start, finish = instance.submit(self._now, traced.input_tokens, decision.cached_tokens)
        outcomes.source[request], outcomes.cached_tokens[request] = source, decision.cached_tokens
        outcomes.prefill_started_s[request] = start
        self._at(finish, PREFILLED, request)

    def _prefilled(self, request: int, _: int) -> None:
        traced, outcomes, now = self._trace[request], self._outcomes, self._now
        outcomes.prefill_finished_s[request] = now
        source = int(outcomes.source[request])
        if self._spec.prefill_cache and traced.blocks:
            self._store(source, traced.blocks, self._memory.index.store(source, traced.blocks))
        if not traced.output_tokens:  # a prompt that wants no tokens needs no decoder and has no first token
            self._finish(request, None)
            return
        started_s = time.perf_counter()
        (decision,) = self._tell(PrefillFinished(now, request))
        self._decisions_s.append(time.perf_counter() - started_s)
        if isinstance(decision, Reject):
            self._reject(request, decision)
            return
        assert isinstance(decision, Decode)
        self._dispatch(request, decision)

    def _reject(self, request: int, decision: Decision) -> None:
        assert isinstance(decision, Reject)
        self._outcomes.state[request] = REJECTED
        self._reject_reason = self._reject_reason or decision.reason

    def _dispatch(self, request: int, decision: Decode) -> None:
        traced, outcomes = self._trace[request], self._outcomes
        target = self._index[decision.target]
        outcomes.target[request], outcomes.tier[request] = target, decision.tier
        outcomes.hit_tokens[request], outcomes.kv_bytes[request] = decision.hit_tokens, decision.kv_bytes
        hit = -(-decision.hit_tokens // traced.block_tokens)
        blocks = self._cached(traced.blocks)
        total = max(int(np.ceil(decision.need_bytes / self._block_bytes[target])), len(blocks))
        self._total_blocks[request], self._pinned_hit[request] = total, hit
        self._evicted(self._memory.reserve(target, blocks, hit, total))
        self._advance(self._now)
        self._fabric.send(request, int(outcomes.source[request]), target, decision.kv_bytes)
        self._next_flow_s = self._fabric.next_finish_s()

    def _cached(self, blocks: tuple[int, ...]) -> tuple[int, ...]:
        return blocks if self._settings.decode_cache else ()

    def _flows_ended(self, now: float) -> None:
        self._advance(now)
        self._next_flow_s = self._fabric.next_finish_s()

    def _advance(self, to: float) -> None:
        for transfer in self._fabric.advance(to):
            self._at(to + transfer.latency_s, LANDED, transfer.request)

    def _landed(self, request: int, _: int) -> None:
        traced, outcomes, now = self._trace[request], self._outcomes, self._now
        outcomes.landed_s[request] = now
        target = int(outcomes.target[request])
        if self._settings.measures_transfers and outcomes.kv_bytes[request] > 0:
            self._unmeasured.setdefault((int(outcomes.source[request]), target), []).append(request)
        blocks = self._cached(traced.blocks)
        evicted = self._memory.land(target, blocks, self._pinned_hit[request])
        self._tell(TransferFinished(now, request, self._free_bytes(target)))
        if blocks:
            self._store(target, blocks, evicted)
        decode = self._decode[target]
        wake_s = decode.land(now, request, traced.input_tokens, traced.output_tokens)
        if wake_s is not None:
            self._at(wake_s, STEP, target, decode.version)

    def _step(self, target: int, version: int) -> None:
        decode = self._decode[target]
        if version != decode.version:
            return
        step, wake_s = decode.step(self._now)
        for request in step.finished:
            self._evicted(
                self._memory.release(target, self._cached(self._trace[request].blocks), self._total_blocks[request])
            )
            self._finish(request, self._free_bytes(target))
        outcomes = self._outcomes
        for request in step.admitted:
            outcomes.admitted_s[request] = self._now
            outcomes.first_token_s[request] = step.first_token_s
            outcomes.entry_iteration_s[request] = step.iteration_s
            self._tell(Admitted(self._now, request))
        if wake_s is not None:
            self._at(wake_s, STEP, target, decode.version)

    def _finish(self, request: int, free_kv_bytes: float | None) -> None:
        self._outcomes.state[request] = FINISHED
        self._outcomes.finished_s[request] = self._now
        self._tell(Finished(self._now, request, free_kv_bytes, self._trace[request].output_tokens))

    def _free_bytes(self, target: int) -> float:
        return self._memory.free_blocks(target) * self._block_bytes[target]

    def _store(self, instance: int, blocks: tuple[int, ...], evicted: list[Evicted]) -> None:
        """Tell of a chain that is now cached, as far as it fits, and of what had to go for it."""
        memory = self._memory
        if evicted or memory.index.used_blocks(instance) >= memory.capacity_blocks[instance]:
            # A full instance may have kept the front alone: a router that counts on the rest would be wrong.
            blocks = blocks[: memory.index.match_one(instance, blocks)]
        self._tell(KvStored(self._now, self._cluster.instances[instance].name, blocks, self._block_tokens))
        self._evicted(evicted)

    def _evicted(self, evicted: list[Evicted]) -> None:
        for instance, blocks, keep in evicted:
            self._tell(KvEvicted(self._now, self._cluster.instances[instance].name, blocks, keep))

    def _refresh(self, _: int, __: int) -> None:
        self._advance(self._now)
        self._next_flow_s = self._fabric.next_finish_s()
        separate = self._settings.separates_own_traffic
        if self._settings.telemetry == "tier":
            self._tell(CongestionMeasured(self._now, self._fabric.congestion(separate)))
        elif self._settings.telemetry == "link":
            self._tell(LinksMeasured(self._now, self._fabric.utilisation(separate)))
        self._tell_measured()
        self._samples.append((self._now, self._fabric.own_share().tolist()))
        self._at(self._next_refresh_s(), REFRESH)

    def _tell_measured(self) -> None:
        if not self._unmeasured:
            return
        names, outcomes = [instance.name for instance in self._cluster.instances], self._outcomes
        for (source, target), requests in sorted(self._unmeasured.items()):
            seconds = float((outcomes.landed_s - outcomes.prefill_finished_s)[requests].sum())
            kv_bytes = float(outcomes.kv_bytes[requests].sum())
            self._tell(
                TransferMeasured(self._now, names[source], names[target], kv_bytes, seconds, transfers=len(requests))
            )
        self._unmeasured.clear()

    def _next_refresh_s(self) -> float:
        """The next tick; with nothing in flight the last one before the next arrival, since nobody asks earlier."""
        period_s = self._settings.oracle_refresh_s
        ticks = 1.0
        if not self._control.in_flight and self._arrived < len(self._trace):
            ticks = max(1.0, (self._trace[self._arrived].at_s - self._now) // period_s)
        return self._now + ticks * period_s

    def _burst(self, _: int, __: int) -> None:
        self._advance(self._now)
        delay_s = self._fabric.toggle_burst()
        self._next_flow_s = self._fabric.next_finish_s()
        self._at(self._now + delay_s, BURST)

    def _result(self, wall_s: float, cpu_s: float) -> Run:
        self._advance(self._now)
        carried = self._fabric.network.link_bytes
        summary = summarise(
            self._outcomes,
            self._settings,
            policy=self._spec.decode,
            seed=self._seed,
            link_load=link_load(self._cluster, self._fabric.tier_links, carried, self._now),
            busiest_links=busiest_links(self._cluster, carried, self._now),
            reject_reason=self._reject_reason,
            decision_s=float(np.median(self._decisions_s)) if self._decisions_s else None,
            wall_s=wall_s,
            cpu_s=cpu_s,
        )
        at_s, shares = tuple(at for at, _ in self._samples), [share for _, share in self._samples]
        tiers = {str(tier): tuple(share[tier] for share in shares) for tier in range(TIER_COUNT)}
        timeline = Timeline(at_s=at_s, tier=tiers)
        return Run(summary, self._outcomes, timeline, carried, float(carried.sum()), self._now)
