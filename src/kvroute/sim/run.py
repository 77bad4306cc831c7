"""One simulation run: plays a trace on a cluster in virtual time with the same `Control` that the gateway uses."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from kvroute.control import Control, ControlSpec
from kvroute.control.log import EventLog
from kvroute.sim.agenda import FOREVER, Agenda
from kvroute.sim.arrivals import Arrivals
from kvroute.sim.copies import SimulatedCopies
from kvroute.sim.delivery import Delivery
from kvroute.sim.fleet import Fleet
from kvroute.sim.gateways import GatewayCores, refuse_features
from kvroute.sim.groups.tensor_groups import TensorGroups
from kvroute.sim.metrics import Outcomes, Summary, Timeline, summarise
from kvroute.sim.network.capacity import LinkCapacities
from kvroute.sim.network.link_load import busiest_links, link_load
from kvroute.sim.network.transfers import Fabric
from kvroute.sim.placement import PlacementTurns, SimulatedTenancy
from kvroute.sim.request_timelines import RequestTimelines
from kvroute.sim.router import Core, Router
from kvroute.sim.run_parts import RunParts
from kvroute.sim.scaling import FleetScaling
from kvroute.sim.settings import SimSpec
from kvroute.sim.store import SimulatedStore
from kvroute.sim.telemetry import Telemetry
from kvroute.sim.workload import Trace
from kvroute.topology import Cluster
from kvroute.types import CopyPrefix, FloatArray, InputError, ReviewDue


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run: its summary and the data behind it."""

    summary: Summary
    outcomes: Outcomes
    timeline: Timeline
    link_bytes: FloatArray
    """Bytes carried by each link, in the cluster's order of links."""
    network_bytes: float
    """Bytes carried by the network, from the flow network's own totals; failed transfers, copies and all-reduces
    included."""
    end_s: float
    gpu_hours: float = 0.0
    """GPU time of instances that start and stop, up to the last arrival; 0 if all serve all the time."""
    instances: tuple[tuple[float, int, int], ...] = ()
    """Time and number of prefill and decode instances that serve, after each change of them."""


def simulate(
    cluster: Cluster,
    trace: Trace,
    spec: ControlSpec,
    settings: SimSpec,
    *,
    seed: int = 0,
    log: EventLog | None = None,
    tenancy: SimulatedTenancy | None = None,
) -> Run:
    """Run `trace` on `cluster`. The same arguments give the same run, bit for bit. Args: `tenancy`: turns and deadlines
    of requests; None: they are placed as they arrive.

    Raises:
        InputError: a policy or parameter that does not exist, instances of several models, an instance of role `both`
            beside something that is not modelled with it, a trace whose prefix blocks differ in size, a change of a
            link that does not exist, or a cut that never ends.
        InputErrors: an `all_reduce` of the cluster file that does not fit its instance.
    """
    return Simulation(cluster, trace, spec, settings, seed=seed, log=log, tenancy=tenancy).run()


def _block_tokens(trace: Trace) -> int:
    """Tokens per prefix block of the trace; without prefix blocks, the largest block size that a request states."""
    sizes = sorted({request.block_tokens for request in trace.requests if request.blocks})
    if len(sizes) > 1:
        what = f"the trace has prefix blocks of {' and '.join(map(str, sizes))} tokens"
        raise InputError(what, where=trace.name, hint="use one block size for all requests")
    return sizes[0] if sizes else max((request.block_tokens for request in trace.requests), default=16)


def _outcomes(trace: Trace) -> Outcomes:
    """Rows of requests that have not arrived; in a closed loop their arrival times are still unknown."""
    rows = Outcomes.empty(len(trace.requests))
    rows.arrived_s[:] = [request.at_s for request in trace.requests]
    rows.input_tokens[:] = [request.input_tokens for request in trace.requests]
    rows.output_tokens[:] = [request.output_tokens for request in trace.requests]
    return rows


def _fabric(cluster: Cluster, settings: SimSpec, seed: int) -> Fabric:
    changes, fluctuations = settings.changes, settings.fluctuations
    capacity = LinkCapacities(cluster, settings.background, seed, changes=changes, fluctuations=fluctuations)
    cut = capacity.cut_for_good()
    if len(cut) and settings.until_s is None:
        what = f"link {cluster.links[int(cut[0])].name!r} is cut permanently, so transfers over it never end"
        raise InputError(what, where="changes", hint="restore the link later, or set until_s")
    return Fabric(cluster, capacity, seed, settings.wan, settings.all_reduce_weight)


class Simulation:
    """Event loop and ground truth: queues, batches, memory and bytes. Control sees only the events that it receives."""

    def __init__(
        self,
        cluster: Cluster,
        trace: Trace,
        spec: ControlSpec,
        settings: SimSpec,
        *,
        seed: int,
        log: EventLog | None = None,
        tenancy: SimulatedTenancy | None = None,
    ) -> None:
        self._cluster, self._trace, self._settings = cluster, trace.requests, settings
        self._spec, self._seed = spec, seed
        self._agenda, self._arrivals, self._outcomes = Agenda(), Arrivals(trace), _outcomes(trace)
        if settings.gateways > 1:
            refuse_features(spec, cluster)
        if settings.lock_step and spec.serves_aggregated:
            what = f"{spec.decode} lets one instance serve a request, which is not modelled in lock-step"
            raise InputError(what, where="lock_step", hint="set its parameter `aggregated` to 0")
        self._groups = TensorGroups.of(cluster)
        self._fabric = _fabric(cluster, settings, seed)
        self._fleet = Fleet(cluster, block_tokens=_block_tokens(trace), prefill_queueing=settings.prefill_queueing)
        core = self._core()
        self._router = Router(core, cluster, self._fleet, self._agenda, log, role_switch_s=settings.role_switch_s)
        self._delivery = Delivery(
            cluster, self._fabric, self._fleet, self._outcomes, self._trace, decode_cache=settings.decode_cache
        )
        self._scaling: FleetScaling | None = None
        if settings.scaling is not None:
            self._scaling = FleetScaling(cluster, self._fleet, self._router, self._agenda, settings.scaling)
        self._copies = SimulatedCopies(cluster, self._fleet, self._delivery, self._router, self._agenda)
        self._store: SimulatedStore | None = None
        if cluster.file.storage is not None:
            self._store = SimulatedStore(
                cluster,
                self._fabric,
                self._delivery,
                self._router,
                self._agenda,
                block_tokens=self._fleet.block_tokens,
                block_bytes=self._fleet.block_bytes,
            )
        reduced_bytes = self._groups.carried_bytes if self._groups.traffic else None
        self._telemetry = Telemetry(
            self._fabric, settings, self._outcomes, self._router.threshold_tokens, reduced_bytes
        )
        self._timelines = RequestTimelines(
            RunParts(
                cluster=cluster,
                trace=trace,
                settings=settings,
                agenda=self._agenda,
                router=self._router,
                fleet=self._fleet,
                delivery=self._delivery,
                copies=self._copies,
                outcomes=self._outcomes,
                groups=self._groups,
                store=self._store,
            ),
            self._telemetry,
            self._arrivals,
            prefill_cache=spec.prefill_cache,
            copy_queues=spec.offload is not None and spec.offload.copy_queues,
        )
        if tenancy is not None:
            if not isinstance(core, Control):
                what = "tenants are simulated for one gateway"
                raise InputError(what, where="gateways", hint="set gateways to 1")
            place, refuse = self._timelines.place, self._timelines.refuse
            self._timelines.placement = PlacementTurns(tenancy, core, self._agenda, place, refuse)

    def _core(self) -> Core:
        """The core of one gateway, or those of several."""
        cores = [self._spec.build(self._cluster) for _ in range(self._settings.gateways)]
        if len(cores) == 1:
            return cores[0]
        return GatewayCores(
            cores,
            self._fleet,
            self._cluster,
            self._agenda,
            sync_s=self._settings.sync_s,
            requests=len(self._trace),
            seed=self._seed,
        )

    def run(self) -> Run:
        """Run until the last request has ended or `until_s` is reached."""
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        if self._trace:
            self._start()
        until_s = FOREVER if self._settings.until_s is None else self._settings.until_s
        agenda, arrivals, delivery, router = self._agenda, self._arrivals, self._delivery, self._router
        due = agenda.due
        while True:
            arrival_s = arrivals.next_s
            due_s = due[0][0] if due else FOREVER
            now = min(delivery.next_s, due_s, arrival_s)
            if now > until_s or (arrival_s == FOREVER and not router.in_flight and not self._waiting):
                break
            assert now < FOREVER, "requests wait without a future event"
            assert now >= agenda.now, "time went back"
            agenda.now = now
            if now == delivery.next_s:
                self._timelines.advance()
                delivery.look_ahead()
            elif now == due_s:
                agenda.act()
            else:
                self._timelines.arrive(arrivals.take())
        return self._result(time.perf_counter() - wall_s, time.process_time() - cpu_s)

    @property
    def _waiting(self) -> int:
        placement = self._timelines.placement
        return placement.waiting if placement is not None else 0

    def _start(self) -> None:
        capacity = self._fabric.capacity
        while capacity.next_s <= 0.0:
            self._fabric.change()
        self._refresh(0, 0)
        if capacity.next_s < FOREVER:
            self._agenda.at(capacity.next_s, self._capacity_changed)
        if self._settings.review_s is not None:
            self._agenda.at(self._settings.review_s, self._review)
        if self._scaling is not None:
            self._scaling.begin()

    def _refresh(self, _: int, __: int) -> None:
        self._timelines.advance()
        self._delivery.look_ahead()
        for event in self._telemetry.refresh(self._agenda.now):
            self._router.handle(event)
        self._agenda.at(self._next_refresh_s(), self._refresh)

    def _next_refresh_s(self) -> float:
        """Time of the next refresh. With no request in flight, it is the last refresh before the next arrival: no
        decision needs an earlier one."""
        period_s = self._settings.oracle_refresh_s
        ticks = 1.0
        if not self._router.in_flight and self._arrivals.next_s < FOREVER:
            ticks = max(1.0, (self._arrivals.next_s - self._agenda.now) // period_s)
        return self._agenda.now + ticks * period_s

    def _capacity_changed(self, _: int, __: int) -> None:
        self._timelines.advance()
        self._fabric.change()
        self._delivery.look_ahead()
        self._timelines.watch_stalls()
        next_s = self._fabric.capacity.next_s
        if next_s < FOREVER:
            self._agenda.at(next_s, self._capacity_changed)

    def _review(self, _: int, __: int) -> None:
        assert self._settings.review_s is not None
        for order in self._router.handle(ReviewDue(self._agenda.now)):
            assert isinstance(order, CopyPrefix)
            self._timelines.advance()
            self._copies.start(order)
            self._timelines.watch_stalls()
        self._agenda.at(self._agenda.now + self._settings.review_s, self._review)

    def _result(self, wall_s: float, cpu_s: float) -> Run:
        self._timelines.advance()
        self._copies.stop()
        end_s, decisions_s = self._agenda.now, self._timelines.decisions_s
        carried = self._groups.with_unshared(self._fabric.network.link_bytes)
        timeline = self._telemetry.timeline()
        summary = summarise(
            self._outcomes,
            self._settings,
            policy=self._spec.decode,
            seed=self._seed,
            link_load=link_load(self._cluster, self._fabric.tier_links, carried, end_s),
            busiest_links=busiest_links(self._cluster, carried, end_s),
            reject_reason=self._timelines.reject_reason,
            failed=self._fabric.failed,
            copied=self._fabric.copied,
            copied_ahead=self._fabric.copied_ahead,
            store=self._store.totals() if self._store is not None else None,
            all_reduces=self._timelines.iterations.costs() if self._groups.traffic else {},
            role_switches=self._fleet.role_switches,
            thresholds=timeline.threshold_tokens,
            decision_s=float(np.median(decisions_s)) if decisions_s else None,
            wall_s=wall_s,
            cpu_s=cpu_s,
        )
        run = Run(summary, self._outcomes, timeline, carried, float(carried.sum()), end_s)
        if self._scaling is None:
            return run
        last_s = float(np.nanmax(self._outcomes.arrived_s, initial=0.0))
        return replace(run, gpu_hours=self._scaling.gpu_hours(last_s), instances=tuple(self._scaling.counts))
