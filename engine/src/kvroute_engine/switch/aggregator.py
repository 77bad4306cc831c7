"""The switch as a sans-I/O state machine: jobs of workers, slots in two versions, and their sums.

A slot has two versions. A worker sends chunk c to slot c mod s, version (c / s) mod 2, after it has the result of chunk
c - s. So when data of a new chunk reach a version, every worker has the result of the version's last chunk, and the
version can be used again without asking (SwitchML, algorithm 3).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from kvroute_engine.switch.wire import (
    CHUNK_VALUES,
    SLOTS_MAX,
    ControlPacket,
    Data,
    PacketError,
    PacketKind,
    Reason,
    Reduction,
    Values,
    as_result,
    decode,
    encode,
)

IDLE_S = 60.0
"""A job without packets for this time loses its slots."""


class AggregationOffload(Protocol):
    """Something that aggregates the data of running jobs instead of this state machine, such as the kernel."""

    def begin(self, job: int, epoch: int, slots: int, addresses: Sequence[Hashable]) -> bool:
        """Take the data of a job's new epoch; addresses by worker number. False: the state machine keeps them."""
        ...

    def end(self, job: int) -> None:
        """Give the job back, if it was taken."""
        ...

    def activity(self, job: int) -> tuple[int, int]:
        """Return the data packets of a job that was taken, in this epoch, and the bitmap of their workers."""
        ...


@dataclass(slots=True)
class _Slot:
    """One version of a slot."""

    chunk: int = -1
    seen: int = 0
    """Bitmap of the workers whose values are in it."""
    values: Values = field(default_factory=lambda: np.zeros(CHUNK_VALUES, np.int32))


@dataclass(slots=True)
class _Job:
    workers: int
    slots: int
    epoch: int
    heard_s: float
    session: int = 0
    running: bool = False
    first_operation: int = 0
    joined: dict[int, ControlPacket] = field(default_factory=dict)
    """Last JOIN of each worker."""
    addresses: dict[int, Hashable] = field(default_factory=dict)
    versions: list[tuple[_Slot, _Slot]] = field(default_factory=list)
    left: set[int] = field(default_factory=set)
    heard: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Incarnation of each worker, and the last epoch from which it has sent data: older JOINs of it are late."""
    offloaded: bool = False
    offloaded_packets: int = 0


class Aggregator:
    """A switch with `slots` slots, which jobs share. The caller receives and sends the packets, and owns the clock.

    Addresses are whatever the caller uses to send to a worker.
    """

    def __init__(
        self, slots: int, first_session: int, *, idle_s: float = IDLE_S, offload: AggregationOffload | None = None
    ) -> None:
        """`first_session`: number of the first session, above those of all earlier switches of these workers, such as
        the time in nanoseconds; so that workers notice that a switch has restarted."""
        self._free = min(slots, SLOTS_MAX)
        self._idle_s, self._offload = idle_s, offload
        self._sessions = first_session
        self._epochs = 0
        self._jobs: dict[int, _Job] = {}
        self.packets = 0
        """Packets received."""
        self.results = 0
        """Chunks completed."""
        self.malformed = 0
        """Packets that could not be decoded."""

    @property
    def free_slots(self) -> int:
        """Slots that no job has."""
        return self._free

    def receive(self, content: bytes, source: Hashable, now_s: float) -> list[tuple[Hashable, bytes]]:
        """Take a packet; return the packets to send, with their addresses."""
        self.packets += 1
        try:
            packet = decode(content)
        except PacketError:
            self.malformed += 1
            return []
        job = self._jobs.get(packet.job)
        if job is not None:
            job.heard_s = now_s
        if isinstance(packet, Data):
            return list(self._data(packet, content, job, source)) if packet.kind == PacketKind.DATA else []
        if packet.kind == PacketKind.JOIN:
            return list(self._join(packet, job, source, now_s))
        if packet.kind == PacketKind.LEAVE and job is not None:
            self._leave(packet, job)
        return []

    def expire(self, now_s: float) -> None:
        """Free the slots of jobs without packets for a long time."""
        for number, job in self._jobs.items():
            self._hear(number, job, now_s)
        for number in [number for number, job in self._jobs.items() if now_s - job.heard_s > self._idle_s]:
            self._end(number)

    def _hear(self, number: int, job: _Job, now_s: float) -> None:
        """Take over what an offload has received."""
        if not job.offloaded or self._offload is None:
            return
        packets, heard = self._offload.activity(number)
        if packets > job.offloaded_packets:
            job.heard_s, job.offloaded_packets = now_s, packets
        for worker in range(job.workers):
            if heard >> worker & 1:
                job.heard[worker] = job.heard[worker][0], job.epoch

    def _join(
        self, packet: ControlPacket, job: _Job | None, source: Hashable, now_s: float
    ) -> Iterator[tuple[Hashable, bytes]]:
        if job is None:
            if packet.slots > self._free:
                yield source, encode(replace(packet, kind=PacketKind.REFUSED, reason=Reason.SLOTS))
                return
            self._free -= packet.slots
            job = self._jobs[packet.job] = _Job(packet.workers, packet.slots, 0, now_s)
        if (packet.workers, packet.slots) != (job.workers, job.slots):
            yield source, encode(replace(packet, kind=PacketKind.REFUSED, reason=Reason.SHAPE))
            return
        self._hear(packet.job, job, now_s)
        known = job.joined.get(packet.worker)
        if (packet.incarnation, packet.epoch) < job.heard.get(packet.worker, (0, 0)):
            return  # a late packet
        if packet.incarnation > job.heard.get(packet.worker, (-1, 0))[0]:
            job.heard[packet.worker] = packet.incarnation, 0
        if job.running and known is not None:
            same = packet.incarnation == known.incarnation
            if same and packet.epoch < job.epoch:  # `heard` shows that it has sent no data in this epoch
                job.addresses[packet.worker] = source
                yield source, self._joined(job, packet)  # the answer was lost
                return
            job.running = False
            self._take_back(packet.job, job)
            job.joined.clear()
        job.joined[packet.worker] = packet
        job.addresses[packet.worker] = source
        job.left.discard(packet.worker)
        if len(job.joined) == job.workers:
            self._begin(packet.job, job)
            for joined in job.joined.values():
                yield job.addresses[joined.worker], self._joined(job, joined)

    def _begin(self, number: int, job: _Job) -> None:
        """Begin an epoch: go on with the session if all workers have the same one, else begin a new one. New workers
        may enter a session without complete operations, so that workers that restart one by one find each other."""
        self._epochs = max([self._epochs, *(joined.epoch for joined in job.joined.values())]) + 1
        job.epoch, job.running = self._epochs, True
        sessions = {joined.session for joined in job.joined.values()}
        operations = [joined.operations for joined in job.joined.values()]
        old = sessions - {0}
        if len(old) == 1 and (0 not in sessions or not any(operations)):
            job.session, job.first_operation = old.pop(), min(operations)
        else:
            self._sessions += 1
            job.session, job.first_operation = self._sessions, 0
        addresses = [job.addresses[worker] for worker in range(job.workers)]
        job.offloaded = self._offload is not None and self._offload.begin(number, job.epoch, job.slots, addresses)
        job.offloaded_packets = 0
        job.versions = [] if job.offloaded else [(_Slot(), _Slot()) for _ in range(job.slots)]

    def _take_back(self, number: int, job: _Job) -> None:
        if job.offloaded and self._offload is not None:
            self._offload.end(number)
        job.offloaded = False

    def _joined(self, job: _Job, packet: ControlPacket) -> bytes:
        answer = replace(
            packet, kind=PacketKind.JOINED, epoch=job.epoch, session=job.session, operations=job.first_operation
        )
        return encode(answer)

    def _data(
        self, packet: Data, content: bytes, job: _Job | None, source: Hashable
    ) -> Iterator[tuple[Hashable, bytes]]:
        if job is None or not job.running or packet.epoch != job.epoch:
            if job is None or packet.epoch < max(job.epoch, 1) or not job.running:
                stale = ControlPacket(PacketKind.STALE, packet.job, packet.epoch, packet.worker, packet.workers)
                yield source, encode(stale)
            return
        if packet.slot >= job.slots or packet.workers != job.workers or job.offloaded:
            self.malformed += 1
            return
        job.heard[packet.worker] = job.heard[packet.worker][0], job.epoch
        slot = job.versions[packet.slot][packet.version]
        bit, whole = 1 << packet.worker, (1 << job.workers) - 1
        if packet.chunk < slot.chunk:
            return  # late: this worker has the result
        if packet.chunk > slot.chunk:
            slot.chunk, slot.seen = packet.chunk, bit
            slot.values[:] = packet.values
        elif slot.seen & bit:
            if slot.seen == whole:
                yield source, as_result(content, slot.values)
            return
        else:
            slot.seen |= bit
            combine = np.add if packet.reduction == Reduction.SUM else np.maximum
            combine(slot.values, packet.values, out=slot.values)
        if slot.seen == whole:
            self.results += 1
            result = as_result(content, slot.values)
            for address in job.addresses.values():
                yield address, result

    def _leave(self, packet: ControlPacket, job: _Job) -> None:
        known = job.joined.get(packet.worker)
        if known is None or packet.incarnation != known.incarnation:
            return
        job.left.add(packet.worker)
        if len(job.left) == job.workers:
            self._end(packet.job)

    def _end(self, number: int) -> None:
        job = self._jobs.pop(number)
        self._take_back(number, job)
        self._free += job.slots
