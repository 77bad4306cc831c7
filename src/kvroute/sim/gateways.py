"""Several gateways in front of one cluster: each has a core of its own, and they exchange reports with a delay.

They use the code of live gateways (`control.Replica`). Every gateway receives the events of engines and the telemetry
at once. A request belongs to the gateway that a seeded draw gives it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from kvroute.control import Control, ControlSpec, Replica
from kvroute.sim.agenda import Agenda
from kvroute.sim.fleet import Fleet
from kvroute.topology import Cluster
from kvroute.types import (
    Admitted,
    Arrived,
    CongestionMeasured,
    Decision,
    DecodeFailed,
    Event,
    Finished,
    InputError,
    InstanceMeasured,
    LinksMeasured,
    Prefill,
    PrefillFailed,
    PrefillFinished,
    TransferFinished,
)


def refuse_features(spec: ControlSpec, cluster: Cluster) -> None:
    """Raises InputError for a feature whose state gateways do not share in the simulation."""
    features = {
        "offload": spec.offload is not None,
        "copies": spec.copies is not None,
        "prefix_pool": spec.prefix_pool,
        "storage": cluster.file.storage is not None,
    }
    for name, used in features.items():
        if used:
            raise InputError(f"several gateways are not simulated with `{name}`", hint="leave it out, or one gateway")


def _request(event: Event) -> int | None:
    """The request whose step an event reports; None if it reports something else."""
    match event:
        case Arrived(request=request):
            return request.id
        case PrefillFinished() | PrefillFailed() | DecodeFailed() | TransferFinished() | Admitted() | Finished():
            return event.request_id
        case _:
            return None


class GatewayCores:
    """The cores of all gateways as one: the `Router` passes each event here."""

    def __init__(
        self,
        cores: Sequence[Control],
        fleet: Fleet,
        cluster: Cluster,
        agenda: Agenda,
        *,
        sync_s: float | None,
        requests: int,
        seed: int,
    ) -> None:
        """
        Args:
            cores: one for each gateway, fresh.
            fleet: the engines, whose load is reported with each telemetry.
            cluster: of the run.
            agenda: of the run.
            sync_s: time from a step of a request until the other gateways know it; None: they never do.
            requests: number of requests of the trace.
            seed: of the draw of each request's gateway.
        """
        self._cores, self._fleet, self._cluster, self._agenda, self._sync_s = cores, fleet, cluster, agenda, sync_s
        self._of: list[int] = np.random.default_rng([seed, 0x6A7E]).integers(len(cores), size=requests).tolist()
        # Nothing is lost in a simulation, so no lease ever expires and no report repeats what is known.
        self._replicas = [Replica(f"gateway{number:04}", lease_s=math.inf) for number in range(len(cores))]
        self._scheduled = [False] * len(cores)
        self._prefilling: Counter[str] = Counter()
        """Requests in prefill, by instance."""
        self._prefill_at: dict[int, str] = {}
        if sync_s is not None:
            self._connect()

    @property
    def in_flight(self) -> int:
        """Number of requests that have arrived and not left, over all gateways."""
        return sum(core.in_flight for core in self._cores)

    @property
    def offloading(self) -> None:
        """Several gateways do not offload."""
        return None

    def handle(self, event: Event) -> tuple[Decision, ...]:
        """Process an event: a step of a request at its gateway, any other one at all of them."""
        number = _request(event)
        if number is None:
            for core in self._cores:
                core.handle(event)
            if isinstance(event, CongestionMeasured | LinksMeasured):
                self._measure(event.at)
            return ()
        gateway = self._of[number]
        decisions = self._cores[gateway].handle(event)
        self._follow(number, event, decisions)
        self._replicas[gateway].handled(event)
        if self._sync_s == 0.0:
            self._exchange(gateway)
        elif self._sync_s is not None and not self._scheduled[gateway]:
            self._scheduled[gateway] = True
            self._agenda.at(self._agenda.now + self._sync_s, self._due, gateway)
        return decisions

    def _follow(self, number: int, event: Event, decisions: tuple[Decision, ...]) -> None:
        """Count the requests in prefill on each instance, as its engine does."""
        if not isinstance(event, TransferFinished | Admitted) and number in self._prefill_at:
            self._prefilling[self._prefill_at.pop(number)] -= 1
        for decision in decisions:
            if isinstance(decision, Prefill):
                self._prefill_at[number] = decision.instance
                self._prefilling[decision.instance] += 1

    def _measure(self, at: float) -> None:
        """Report the engines' own load to all gateways."""
        for event in self._engine_loads(at):
            for core in self._cores:
                core.handle(event)

    def _engine_loads(self, at: float) -> Iterator[InstanceMeasured]:
        for index, instance in enumerate(self._cluster.instances):
            decode, memory, count = self._fleet.decode.get(index), self._fleet.memory, self._prefilling[instance.name]
            if decode is None:
                yield InstanceMeasured(at, instance.name, min(count, 1), max(count - 1, 0))
                continue
            capacity = memory.capacity_blocks[index]
            used = (capacity - memory.free_blocks(index)) / capacity if capacity else 0.0
            # The prompts of a prefill instance that mixes them with its batch are those counted here.
            mixing = index in self._fleet.mixing
            running, waiting = (decode.batch, 0) if mixing else (decode.running, decode.waiting)
            running, waiting = running + min(count, 1), waiting + max(count - 1, 0)
            yield InstanceMeasured(at, instance.name, running, waiting, min(used, 1.0))

    def _connect(self) -> None:
        """Let every gateway know of all others before the first request."""
        for replica in self._replicas:
            replica.connected(0.0)
        for _ in range(2):
            for gateway in range(len(self._replicas)):
                self._exchange(gateway)

    def _due(self, gateway: int, _: int) -> None:
        self._scheduled[gateway] = False
        self._exchange(gateway)

    def _exchange(self, gateway: int) -> None:
        """Deliver the next report of a gateway to all others."""
        now, core = self._agenda.now, self._cores[gateway]
        report = self._replicas[gateway].take(now, (core,))
        if report is None:
            return
        for number, (other, replica) in enumerate(zip(self._cores, self._replicas, strict=True)):
            event = replica.received(now, report)
            if number != gateway and event is not None:
                other.handle(event)
                replica.applied(now, other, report.gateway)
