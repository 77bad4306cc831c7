"""Several cores in front of one cluster, and the stream that connects them, in simulated time and with simulated faults
of delivery."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from tests.control.live_rig import cluster_of, request

from kvroute.control import Control, ControlSpec, LogRecord, Replica
from kvroute.oracle import OracleSpec
from kvroute.types import (
    Admitted,
    Arrived,
    Decision,
    Decode,
    DecodeFailed,
    Event,
    Finished,
    KvStored,
    PeerReport,
    PeerReported,
    Prefill,
    PrefillFailed,
    PrefillFinished,
    TransferFinished,
    TransferMeasured,
)

LEASE_S = 4.0
SPEC = ControlSpec(oracle=OracleSpec(self_measured=True, in_flight_max=10_000))
CLUSTER = cluster_of(*("vp0", "vp1", "vp1b", "vd0", "vd1", "vd2", "vd3", "sp0", "sd2", "vb3"))
NAMES = tuple(instance.name for instance in CLUSTER.instances)
APPROXIMATE = frozenset(NAMES)
decode_report = msgspec.msgpack.Decoder(PeerReport).decode
encode_report = msgspec.msgpack.Encoder().encode


@dataclass
class Flight:
    """How far an own request is."""

    source: str = ""
    target: str = ""
    stage: str = "prefill"


@dataclass
class Member:
    """One gateway: a core, its side of the stream, and its position in the stream."""

    name: str
    control: Control
    replica: Replica
    position: int
    clock_s: float
    """Its clock minus the time of the test."""
    log: list[LogRecord] = field(default_factory=list)
    flights: dict[int, Flight] = field(default_factory=dict)
    alive: bool = True

    def handle(self, event: Event) -> tuple[Decision, ...]:
        """Give an event to the core and record it."""
        decisions = self.control.handle(event)
        self.log.append(LogRecord(event, decisions))
        return decisions

    def own(self, event: Event) -> tuple[Decision, ...]:
        """Process an event of own traffic."""
        decisions = self.handle(event)
        self.replica.handled(event)
        return decisions


class Gateways:
    """The gateways of one cluster and their stream. Entries are bytes, as in Redis."""

    def __init__(self, *names: str, spec: ControlSpec = SPEC) -> None:
        self.spec, self.now, self.up = spec, 1.0, True
        self.entries: list[bytes] = []
        self.members: list[Member] = []
        self._numbers = 0
        for name in names:
            self.join(name)

    @property
    def living(self) -> list[Member]:
        """The gateways that have not died."""
        return [member for member in self.members if member.alive]

    def join(self, name: str, position: int | None = None) -> Member:
        """Start a gateway that reads the stream from its end."""
        replica = Replica(name, lease_s=LEASE_S, approximate=APPROXIMATE)
        at = len(self.entries) if position is None else position
        member = Member(name, self.spec.build(CLUSTER), replica, at, clock_s=100.0 * len(self.members))
        self.members.append(member)
        if self.up:
            replica.connected(self.at(member))
        return member

    def at(self, member: Member) -> float:
        """The time by the clock of a gateway."""
        return self.now + member.clock_s

    # Traffic

    def arrive(self, member: Member, tokens: int = 1_000, **more: Any) -> int | None:
        """Let a request arrive; return its number, or None if it was rejected."""
        number = self._numbers = self._numbers + 1
        decisions = member.own(Arrived(self.at(member), request(number, tokens, 4, **more)))
        if not isinstance(decisions[-1], Prefill | Decode):
            return None
        member.flights[number] = Flight()
        self._decided(member, number, decisions)
        return number

    def _decided(self, member: Member, number: int, decisions: tuple[Decision, ...]) -> None:
        flight = member.flights[number]
        for decision in decisions:
            match decision:
                case Prefill(instance=instance):
                    flight.source, flight.target, flight.stage = instance, "", "prefill"
                case Decode(target=target):
                    flight.target = target
                    if flight.stage == "computed":
                        flight.stage = "transfer"
                case _:
                    del member.flights[number]
                    return

    def advance(self, member: Member, number: int, *, fails: bool = False) -> None:
        """Let the next step of a request happen, or let it fail."""
        flight, at = member.flights[number], self.at(member)
        if fails and flight.stage in ("prefill", "transfer"):
            failure = PrefillFailed(at, number) if flight.stage == "prefill" else DecodeFailed(at, number)
            flight.stage = "prefill" if flight.stage == "prefill" else "computed"
            self._decided(member, number, member.own(failure))
        elif flight.stage == "prefill":
            flight.stage = "computed"
            self._decided(member, number, member.own(PrefillFinished(at, number)))
            if number in member.flights and flight.stage == "computed":
                flight.stage = "transfer" if flight.source != flight.target else "queued"
        elif flight.stage == "transfer":
            flight.stage = "queued"
            member.own(TransferFinished(at, number))
        elif flight.stage == "queued":
            flight.stage = "running"
            member.own(Admitted(at, number))
        else:
            self.end(member, number)

    def end(self, member: Member, number: int) -> None:
        """Let a request end at once."""
        del member.flights[number]
        member.own(Finished(self.at(member), number, output_tokens=4))

    def store(self, member: Member, instance: str, blocks: tuple[int, ...]) -> None:
        """Let a gateway conclude from a response that an instance has these blocks."""
        event = KvStored(self.at(member), instance, blocks)
        member.own(event)
        member.replica.learned(event)

    def measure(self, member: Member, source: str, target: str, seconds: float) -> None:
        """Let a gateway measure a transfer."""
        event = TransferMeasured(self.at(member), source, target, 1e9, seconds)
        member.own(event)
        member.replica.learned(event)

    # The stream

    def write(self, member: Member) -> None:
        """Let a gateway write its next report, if there is one."""
        report = member.replica.take(self.at(member), (member.control,))
        if report is not None and self.up:
            self.entries.append(encode_report(report))

    def read(self, member: Member, *, lose: bool = False, repeat: int | None = None) -> bool:
        """Deliver the next entry, or lose it, or deliver an earlier one again; return whether there was one."""
        if not self.up:
            return False
        index = member.position if repeat is None else repeat
        if index >= len(self.entries):
            return False
        member.position += repeat is None
        if not lose:
            at = self.at(member)
            event = member.replica.received(at, decode_report(self.entries[index]))
            if event is not None:
                member.handle(event)
                member.replica.applied(at, member.control, event.report.gateway)
        return True

    def cut(self) -> None:
        """Stop the stream's server."""
        self.up = False
        for member in self.living:
            member.replica.disconnected()

    def restore(self) -> None:
        """Start the stream's server again, with what was in the stream."""
        self.up = True
        for member in self.living:
            member.replica.connected(self.at(member))

    def refresh(self, member: Member) -> None:
        """Let a gateway notice which others are gone."""
        for event in member.replica.refresh(self.at(member)):
            member.handle(event)

    def settle(self, seconds: float = 3 * LEASE_S) -> None:
        """Let time pass without traffic and with prompt delivery."""
        for _ in range(int(seconds / 0.5)):
            self.now += 0.5
            for member in self.living:
                self.refresh(member)
            self.exchange()

    def exchange(self) -> None:
        """Let all gateways write and read, without time passing."""
        for member in self.living:
            self.write(member)
        for member in self.living:
            while self.read(member):
                pass


def counts(control: Control, at: float) -> dict[str, Any]:
    """What a core counts: requests, memory and transfers of every pool, and cached prefixes."""
    view, ids = control.parts.view, np.arange(len(NAMES))
    found: dict[str, Any] = {}
    for name, pool in view.prefill.items():
        found[f"prefill {name}"] = pool.assigned.tolist()
    for key, takers in view.decode.items():
        found[f"decode {key}"] = (takers.queued.tolist(), takers.batch.tolist(), takers.free_kv_bytes.tolist())
    found["transfers"] = [control.oracle.costs(source, ids, at).in_flight.tolist() for source in ids.tolist()]
    found["tracked"] = [len(tracker.table.left_bytes(at)) for tracker in view.states.trackers]
    found["prefixes"] = [sorted(control.caches.chains(index)) for index in ids.tolist()]
    return found


def least(control: Control) -> float:
    """The smallest of all counts of a core."""
    pools = control.parts.view
    numbers = [pool.assigned.min() for pool in pools.prefill.values()]
    numbers += [min(takers.queued.min(), takers.batch.min()) for takers in pools.decode.values()]
    return float(min(numbers))


def expected(gateways: Gateways) -> dict[str, Any]:
    """Counts of a fresh core that has only the bookings of the living gateways."""
    single = gateways.spec.build(CLUSTER)
    for member in gateways.living:
        bookings = tuple(member.control.booked(number) for number in member.control.requests)
        single.handle(PeerReported(0.0, PeerReport(member.name, 1, 0.0, bookings, whole=True)))
    return counts(single, 0.0)
