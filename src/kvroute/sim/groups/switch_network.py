"""Workers and a switch of in-network aggregation in virtual time: the state machines of `switch` over links that lose
packets."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random

import numpy as np

from kvroute_engine.switch.aggregator import Aggregator
from kvroute_engine.switch.wire import CHUNK_VALUES, DATA_BYTES, Reduction, Values
from kvroute_engine.switch.worker import Worker

_SWITCH = -1
_JOB = 1


@dataclass(frozen=True, slots=True)
class SwitchLinks:
    """Equal links between each worker and the switch, both ways, and the time of the switch."""

    bytes_per_s: float
    latency_s: float
    """One way, without the time of the bytes."""
    loss: float = 0.0
    """Share of the data packets and of the results that are lost, independently; other packets arrive."""
    packet_bytes: float = DATA_BYTES
    """Bytes of a data packet on a link, headers included."""
    switch_s: float = 0.0
    """Time of a packet in the switch."""


@dataclass(frozen=True, slots=True)
class SwitchRun:
    """A finished operation."""

    seconds: float
    """From the first packet with data to the last result."""
    packets: int
    """Data packets that the switch has received."""
    sent_again: int
    results: tuple[Values, ...]
    """Result by worker, [chunks, CHUNK_VALUES]."""


class SwitchNetwork:
    """One job of workers, one packet after the other on each link; the caller gives the values."""

    def __init__(self, links: SwitchLinks, workers: int, slots: int, retry_s: float, seed: int = 0) -> None:
        """`retry_s`: least time after which a worker sends a packet again."""
        self._links, self._draw = links, Random(seed)
        self._switch = Aggregator(slots, 1)
        self._workers = [Worker(_JOB, number, workers, slots, 1, retry_s) for number in range(workers)]
        self._free_s = {(number, up): 0.0 for number in range(workers) for up in (True, False)}
        self._timer_s = [float("inf")] * workers
        self._agenda: list[tuple[float, int, int, bytes]] = []
        """(time, sequence number, receiver, packet); an empty packet is a worker's timer."""
        self._count = 0
        self._began_s = float("inf")

    def run(self, values: list[Values]) -> SwitchRun:
        """Sum the values of all workers, [chunks, CHUNK_VALUES] each."""
        for number, (worker, own) in enumerate(zip(self._workers, values, strict=True)):
            worker.begin(Reduction.SUM, own)
            self._transmit(number, 0.0)
        now, busy = 0.0, len(self._workers)
        while busy:
            now, _, receiver, packet = heappop(self._agenda)
            if receiver == _SWITCH:
                for target, answer in self._switch.receive(packet[1:], packet[0], now):
                    assert isinstance(target, int)
                    self._send(target, answer, now + self._links.switch_s, up=False)
                continue
            worker = self._workers[receiver]
            if packet:
                before = worker.busy
                worker.receive(packet, now)
                busy -= before and not worker.busy
            else:
                self._timer_s[receiver] = float("inf")
            self._transmit(receiver, now)
        results = tuple(worker.result() for worker in self._workers)
        again = sum(worker.sent_again for worker in self._workers)
        return SwitchRun(now - self._began_s, self._switch.packets - len(self._workers), again, results)

    def _transmit(self, number: int, now: float) -> None:
        """Send what a worker has to send, and wake it for its next retransmission."""
        worker, sent = self._workers[number], False
        for packet in worker.outgoing(now):
            if len(packet) == DATA_BYTES:
                self._began_s = min(self._began_s, now)
            self._send(number, packet, now, up=True)
            sent = True
        if (sent or worker.busy) and self._timer_s[number] == float("inf"):
            due_s = worker.next_s()
            if due_s < float("inf"):
                self._timer_s[number] = due_s
                self._enter(due_s, number, b"")

    def _send(self, number: int, packet: bytes, at: float, *, up: bool) -> None:
        """Put a packet on the link of a worker; a lost packet occupies it, too."""
        links, data = self._links, len(packet) == DATA_BYTES
        end_s = max(at, self._free_s[number, up]) + (links.packet_bytes / links.bytes_per_s if data else 0.0)
        self._free_s[number, up] = end_s
        if data and links.loss and self._draw.random() < links.loss:
            return
        arrives_s = end_s + links.latency_s
        if up:
            self._enter(arrives_s, _SWITCH, bytes([number]) + packet)
        else:
            self._enter(arrives_s, number, packet)

    def _enter(self, at: float, receiver: int, packet: bytes) -> None:
        self._count += 1
        heappush(self._agenda, (at, self._count, receiver, packet))


def random_values(workers: int, chunks: int, seed: int) -> list[Values]:
    """Return small integers for each worker, [chunks, CHUNK_VALUES]."""
    draw = np.random.default_rng(seed)
    return [draw.integers(-1000, 1000, (chunks, CHUNK_VALUES), dtype=np.int32) for _ in range(workers)]
