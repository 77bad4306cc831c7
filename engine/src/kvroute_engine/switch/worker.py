"""A worker of an aggregation job as a sans-I/O state machine: epochs, a window of chunks, retransmission."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvroute_engine.switch.wire import (
    CHUNK_VALUES,
    ControlPacket,
    Data,
    PacketError,
    PacketKind,
    Reason,
    Reduction,
    Values,
    decode,
    encode,
)

_SAMPLE_MAX_S = 0.2
"""Largest round trip that counts: a result also waits for workers that have not begun the operation."""
_RETRY_MAX_S = 1.0
"""Longest time between two transmissions of a packet."""
_BACKOFF_MAX = 6
"""Most doublings of the time to wait that packets have in common."""
_OVERTAKEN = 3
"""Results of packets that were sent later after which a packet counts as lost (fast retransmit, RFC 5681)."""
State: TypeAlias = Literal["joining", "running", "refused", "restarted"]
"""`refused`: the job gets no slots. `restarted`: another worker has restarted and knows nothing of this session."""


@dataclass(slots=True)
class _Transmission:
    """A packet without an answer."""

    first_s: float
    """When it was sent for the first time."""
    last_s: float
    times: int = 1
    overtaken: int = 0
    """Results of packets that were sent after its last transmission."""


@dataclass(slots=True)
class _Operation:
    """One reduction of chunks."""

    reduction: Reduction
    values: Values
    """[chunks, CHUNK_VALUES]: this worker's values."""
    result: Values
    done: npt.NDArray[np.bool_]
    first_chunk: int = 0
    """Number of its first chunk in the epoch."""
    sent: int = 0
    """Chunks below this number were sent at least once."""
    missing: int = 0

    @classmethod
    def of(cls, reduction: Reduction, values: Values) -> _Operation:
        count = len(values)
        return cls(reduction, values, np.zeros_like(values), np.zeros(count, np.bool_), missing=count)

    def again(self, first_chunk: int) -> None:
        """Begin anew in another epoch; values and results of all workers are the same."""
        self.first_chunk, self.sent, self.missing = first_chunk, 0, len(self.values)
        self.done[:] = False


class Worker:
    """One of `workers` workers of a job. The caller sends and receives the packets, and owns the clock.

    Operations are reductions of [n, CHUNK_VALUES] integers, in the same order and of the same sizes on all workers.
    `begin` starts one; `outgoing` has the packets to send; `result` has the result when `busy` is False.
    """

    def __init__(self, job: int, number: int, workers: int, slots: int, incarnation: int, retry_s: float) -> None:
        """`incarnation`: a number that increases each time this worker starts, such as the time in nanoseconds;
        `retry_s`: least time after which a packet without an answer is sent again; three round trips if that is more,
        and twice the last time after a packet was sent again. After results of three packets that were sent later
        it is sent again at once."""
        self.state: State = "joining"
        self.reason = Reason.NONE
        self._job, self._number, self._workers, self._slots = job, number, workers, slots
        self._incarnation, self._retry_s = incarnation, retry_s
        self._epoch = self._session = self._operations = 0
        self._next_chunk = 0
        self._join_at_s = 0.0
        self._unanswered: dict[int, _Transmission] = {}
        """Chunks of the current operation that were sent and have no result yet."""
        self._round_trip_s = 0.0
        """Smoothed time from the transmission of a chunk to its result (RFC 6298, without its variance). A chunk that
        was sent again does not count, as it is not known which transmission was answered."""
        self._backoff = 0
        """Doublings of the time to wait, since a packet's time was over; 0 after the result of a chunk that was sent
        once. Without it, the round trip would never be measured where all chunks are sent again too early."""
        self._current: _Operation | None = None
        self._previous: _Operation | None = None
        """Kept, because another worker may need it again after the switch has restarted."""
        self._replayed: _Operation | None = None
        """An operation that is complete here, but not on another worker."""
        self._complete = True
        self.sent_again = 0
        """Packets that were sent again."""

    @property
    def busy(self) -> bool:
        """Whether an operation is under way."""
        return self._current is not None and not self._complete

    def begin(self, reduction: Reduction, values: Values) -> None:
        """Start an operation; values: [n, CHUNK_VALUES], n > 0."""
        assert not self.busy, "operations follow one another"
        assert values.shape[1:] == (CHUNK_VALUES,), "chunks have a fixed size"
        if self._current is not None:
            self._previous = self._current
        self._current = _Operation.of(reduction, values)
        self._current.first_chunk = self._next_chunk
        self._next_chunk += len(values)
        self._complete = False

    def result(self) -> Values:
        """Return the result of the operation, [n, CHUNK_VALUES]."""
        assert self._current is not None
        assert not self.busy, "the operation is under way"
        return self._current.result.copy()  # a repeated operation writes the array again

    def next_s(self) -> float:
        """Return the time of the next retransmission; infinite if nothing is under way."""
        if self.state == "joining":
            return self._join_at_s
        return min(map(self._due_s, self._unanswered.values()), default=float("inf"))

    def _due_s(self, sent: _Transmission) -> float:
        """Return the time at which a packet without an answer is sent again."""
        if sent.overtaken >= _OVERTAKEN:
            return sent.last_s
        wait_s = max(self._retry_s, 3.0 * self._round_trip_s)
        doublings = max(self._backoff, sent.times - 1)
        return sent.last_s + (min(wait_s * 2.0**doublings, max(wait_s, _RETRY_MAX_S)) if doublings else wait_s)

    def outgoing(self, now_s: float) -> Iterator[bytes]:
        """Return the packets to send now: new ones, and those whose answer is overdue."""
        if self.state == "joining":
            if now_s >= self._join_at_s:
                self._join_at_s = now_s + self._retry_s
                yield encode(self._control(PacketKind.JOIN))
            return
        operation = self._replayed or self._current
        if self.state != "running" or operation is None or not operation.missing:
            return
        timeouts = 0
        for chunk, sent in self._unanswered.items():
            if self._due_s(sent) <= now_s:
                if sent.overtaken < _OVERTAKEN:
                    timeouts = max(timeouts, sent.times)
                self.sent_again += 1
                sent.last_s, sent.times, sent.overtaken = now_s, sent.times + 1, 0
                yield self._packet(operation, chunk)
        self._backoff = max(self._backoff, min(timeouts, _BACKOFF_MAX))
        while operation.sent < len(operation.values):
            chunk = operation.sent
            if chunk >= self._slots and not operation.done[chunk - self._slots]:
                break
            operation.sent += 1
            self._unanswered[chunk] = _Transmission(now_s, now_s)
            yield self._packet(operation, chunk)

    def _packet(self, operation: _Operation, chunk: int) -> bytes:
        number = operation.first_chunk + chunk
        return encode(
            Data(
                PacketKind.DATA,
                self._job,
                self._epoch,
                self._number,
                self._workers,
                number % self._slots,
                number // self._slots % 2,
                operation.reduction,
                number,
                operation.values[chunk],
            )
        )

    def receive(self, content: bytes, now_s: float) -> None:
        """Take a packet; others than of this job and epoch are ignored."""
        try:
            packet = decode(content)
        except PacketError:
            return
        if packet.job != self._job:
            return
        if isinstance(packet, Data):
            self._receive_result(packet, now_s)
        elif packet.kind == PacketKind.STALE and packet.epoch == self._epoch and self.state == "running":
            self.state, self._join_at_s = "joining", 0.0
        elif self.state == "joining" and packet.incarnation == self._incarnation:
            if packet.kind == PacketKind.REFUSED:
                self.state, self.reason = "refused", packet.reason
            elif packet.kind == PacketKind.JOINED and packet.epoch > self._epoch:
                self._joined(packet)

    def _receive_result(self, packet: Data, now_s: float) -> None:
        operation = self._replayed or self._current
        if (
            packet.kind != PacketKind.RESULT
            or packet.epoch != self._epoch
            or operation is None
            or self.state != "running"
        ):
            return
        chunk = packet.chunk - operation.first_chunk
        if not 0 <= chunk < len(operation.values) or operation.done[chunk]:
            return
        operation.done[chunk] = True
        operation.result[chunk] = packet.values
        operation.missing -= 1
        self._answered(chunk, now_s)
        if operation.missing:
            return
        if operation is self._replayed:
            self._replayed = None
        else:
            self._operations += 1
            self._complete = True

    def _answered(self, chunk: int, now_s: float) -> None:
        """Measure the round trip, and count the result for each packet that was sent before this chunk's."""
        sent = self._unanswered.get(chunk)
        if sent is None:
            return
        for earlier, waiting in self._unanswered.items():  # in the order of the first transmissions
            if earlier == chunk:
                break
            waiting.overtaken += waiting.last_s <= sent.last_s
        del self._unanswered[chunk]
        if sent.times > 1:
            return
        self._backoff = 0
        sample_s = min(now_s - sent.first_s, _SAMPLE_MAX_S)
        self._round_trip_s += (sample_s - self._round_trip_s) * (0.125 if self._round_trip_s else 1.0)

    def _joined(self, packet: ControlPacket) -> None:
        self._epoch = packet.epoch
        if self._operations and packet.session != self._session:
            self.state = "restarted"
            return  # without complete operations, any session will do: the switch may have taken an old JOIN
        if not 0 <= self._operations - packet.operations <= 1:
            self._join_at_s = 0.0  # the switch has taken an old JOIN of some worker
            return
        self.state, self._session = "running", packet.session
        self._unanswered.clear()
        self._next_chunk, self._replayed = 0, None
        if packet.operations < self._operations:
            self._replayed = self._current if self._complete else self._previous
            assert self._replayed is not None, "an operation is complete"
            self._replayed.again(0)
            self._next_chunk = len(self._replayed.values)
        if self._current is not None and not self._complete:
            self._current.again(self._next_chunk)
            self._next_chunk += len(self._current.values)

    def leave(self) -> bytes:
        """Return the packet with which the worker frees its slots."""
        return encode(self._control(PacketKind.LEAVE))

    def _control(self, kind: PacketKind) -> ControlPacket:
        return ControlPacket(
            kind,
            self._job,
            self._epoch,
            self._number,
            self._workers,
            self._slots,
            session=self._session,
            operations=self._operations,
            incarnation=self._incarnation,
        )
