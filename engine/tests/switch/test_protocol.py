"""Worker and switch over a network that loses, repeats and reorders packets: every result exact, nobody hangs."""

from __future__ import annotations

import contextlib
import heapq
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvroute_engine.switch.aggregator import Aggregator
from kvroute_engine.switch.wire import (
    CHUNK_VALUES,
    CONTROL_BYTES,
    DATA_BYTES,
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
from kvroute_engine.switch.worker import Worker


def values_of(seed: int, worker: int, operation: int, chunks: int) -> Values:
    draw = np.random.default_rng([seed, worker, operation])
    return draw.integers(-1_000, 1_000, (chunks, CHUNK_VALUES)).astype(np.int32)


@dataclass
class Net:
    """Workers of one job, a switch, and packets under way."""

    seed: int
    workers: int
    slots: int
    loss: float = 0.0
    chunks: int = 5
    now_s: float = 0.0
    incarnations: int = 0
    sessions: int = 0
    flights: list[tuple[int, bytes]] = field(default_factory=list)
    """(target, packet): a worker's number, or -1 for the switch; with the sender in the top bits."""
    senders: list[int] = field(default_factory=list)
    done: dict[int, int] = field(default_factory=dict)
    """Complete operations of each worker in this session."""

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.boot_switch()
        self.machines = {number: self.fresh(number) for number in range(self.workers)}

    def boot_switch(self) -> None:
        self.sessions += 1_000
        self.switch = Aggregator(64, self.sessions)

    def fresh(self, number: int) -> Worker:
        self.incarnations += 1
        self.done[number] = 0
        machine = Worker(7, number, self.workers, self.slots, self.incarnations, 0.01)
        machine.begin(Reduction.SUM, values_of(self.seed, number, 0, self.chunks))
        return machine

    def restart_worker(self, number: int) -> None:
        self.machines[number] = self.fresh(number)

    def send(self, sender: int, target: int, packet: bytes) -> None:
        for _ in range(self.draw.choice((1, 1, 1, 2))):
            if self.draw.random() >= self.loss:
                self.flights.append((target, packet))
                self.senders.append(sender)

    def step(self) -> None:
        """Let a worker send, or deliver any packet."""
        self.now_s += 1e-4 if self.flights else 5e-3  # without packets under way, all wait for their timers
        if self.draw.random() < 0.3 or not self.flights:
            number = self.draw.randrange(self.workers)
            machine = self.machines[number]
            for packet in machine.outgoing(self.now_s):
                self.send(number, -1, packet)
            return
        place = self.draw.randrange(len(self.flights))
        (target, packet), sender = self.flights.pop(place), self.senders.pop(place)
        if target < 0:
            for address, answer in self.switch.receive(packet, sender, self.now_s):
                assert isinstance(address, int)
                self.send(-1, address, answer)
        else:
            self.machines[target].receive(packet, self.now_s)
            self.after(target)

    def after(self, number: int) -> None:
        """Check a result and begin the next operation; a worker that lost its session starts again."""
        machine = self.machines[number]
        if machine.state == "restarted":
            self.restart_worker(number)
        elif not machine.busy:
            operation = self.done[number]
            expected = sum(values_of(self.seed, index, operation, self.chunks) for index in range(self.workers))
            assert (machine.result() == expected).all(), "a wrong sum"
            self.done[number] += 1
            machine.begin(Reduction.SUM, values_of(self.seed, number, operation + 1, self.chunks))

    def run(self, operations: int, most: int = 400_000) -> None:
        """Step until every worker has completed this many operations."""
        for _ in range(most):
            if min(self.done.values()) >= operations:
                return
            self.step()
        raise AssertionError(f"hangs after {self.done}: {[machine.state for machine in self.machines.values()]}")


@settings(deadline=None, max_examples=25)
@example(seed=0, workers=4, slots=1, loss=0.3, chunks=3)
@given(
    seed=st.integers(0, 2**32),
    workers=st.integers(1, 4),
    slots=st.integers(1, 4),
    loss=st.sampled_from([0.0, 0.05, 0.3]),
    chunks=st.integers(1, 9),
)
def test_every_sum_is_exact(seed: int, workers: int, slots: int, loss: float, chunks: int) -> None:
    Net(seed, workers, slots, loss, chunks).run(6)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32), workers=st.integers(2, 4), loss=st.sampled_from([0.0, 0.1]), data=st.data())
def test_restarts_neither_hang_nor_falsify(seed: int, workers: int, loss: float, data: st.DataObject) -> None:
    """The switch and workers restart at random times, with their old packets still under way."""
    net = Net(seed, workers, 2, loss)
    for _ in range(3):
        for _ in range(data.draw(st.integers(0, 400))):
            net.step()
        if data.draw(st.booleans()):
            net.boot_switch()
        else:
            net.restart_worker(data.draw(st.integers(0, workers - 1)))
    net.run(max(net.done.values()) + 3)


def test_a_restarted_switch_continues_the_session() -> None:
    """No worker loses its operations: the counts of complete operations only grow."""
    net = Net(3, 3, 2, loss=0.05)
    net.run(4)
    before = dict(net.done)
    for _ in range(5):
        net.boot_switch()
        net.run(min(before.values()) + 2)
        assert all(net.done[number] >= before[number] for number in before)
        before = dict(net.done)


@pytest.mark.parametrize("loss", [0.01, *(pytest.param(loss, marks=pytest.mark.slow) for loss in (0.0, 0.05))])
def test_ten_thousand_aggregations(loss: float) -> None:
    """2,500 operations of four chunks on three workers, with repeated and reordered packets."""
    net = Net(5, 3, 4, loss, chunks=4)
    net.run(2_500, most=3_000_000)
    assert net.switch.results >= 10_000


def test_without_retransmission_a_lost_packet_would_hang() -> None:
    """The test above can fail: a worker that never sends again stops at the first lost packet."""
    net = Net(5, 3, 4, 0.05, chunks=4)
    for machine in net.machines.values():
        machine._retry_s = 1e9
    with pytest.raises(AssertionError, match="hangs"):
        net.run(50, most=50_000)


def test_jobs_share_the_slots_and_the_last_one_is_refused() -> None:
    """Of 10 slots two jobs take 4 each; a third is refused until one has left."""
    switch = Aggregator(10, 1)

    def join(job: int, slots: int = 4, workers: int = 1) -> ControlPacket:
        worker = Worker(job, 0, workers, slots, 1, 0.01)
        ((_, answer),) = switch.receive(next(iter(worker.outgoing(0.0))), "address", 0.0)
        found = decode(answer)
        assert isinstance(found, ControlPacket)
        return found

    assert [join(job).kind for job in (1, 2)] == [PacketKind.JOINED, PacketKind.JOINED]
    refused = join(3)
    assert (refused.kind, refused.reason) == (PacketKind.REFUSED, Reason.SLOTS)
    assert join(1, slots=2).reason == Reason.SHAPE
    switch.receive(Worker(1, 0, 1, 4, 1, 0.01).leave(), "address", 0.0)
    assert switch.free_slots == 6
    assert join(3).kind == PacketKind.JOINED
    switch.expire(1_000.0)
    assert switch.free_slots == 10


def test_a_refused_worker_says_why() -> None:
    switch, worker = Aggregator(1, 1), Worker(1, 0, 2, 4, 1, 0.01)
    for _, answer in switch.receive(next(iter(worker.outgoing(0.0))), 0, 0.0):
        worker.receive(answer, 0.0)
    assert (worker.state, worker.reason) == ("refused", Reason.SLOTS)


packets = st.one_of(
    st.builds(
        Data,
        kind=st.sampled_from([PacketKind.DATA, PacketKind.RESULT]),
        job=st.integers(0, 2**32 - 1),
        epoch=st.integers(1, 2**32 - 1),
        worker=st.integers(0, 3),
        workers=st.integers(4, 64),
        slot=st.integers(0, 2**16 - 1),
        version=st.integers(0, 1),
        reduction=st.sampled_from(Reduction),
        chunk=st.integers(0, 2**64 - 1),
        values=st.just(np.arange(CHUNK_VALUES, dtype=np.int32)),
    ),
    st.builds(
        ControlPacket,
        kind=st.sampled_from([PacketKind.JOIN, PacketKind.JOINED, PacketKind.STALE, PacketKind.LEAVE]),
        job=st.integers(0, 2**32 - 1),
        epoch=st.integers(0, 2**31),
        worker=st.integers(0, 3),
        workers=st.integers(4, 64),
        slots=st.integers(1, 2**16 - 1),
        session=st.integers(0, 2**64 - 1),
        operations=st.integers(0, 2**64 - 1),
        incarnation=st.integers(0, 2**64 - 1),
    ),
)


@given(packets)
def test_packets_survive_the_wire(packet: Data | ControlPacket) -> None:
    content = encode(packet)
    assert len(content) == (DATA_BYTES if isinstance(packet, Data) else CONTROL_BYTES)
    assert encode(decode(content)) == content


sizes = st.sampled_from([0, 1, CONTROL_BYTES, DATA_BYTES, DATA_BYTES + 1])


@given(sizes.flatmap(lambda size: st.binary(min_size=size, max_size=size)))
def test_other_bytes_are_refused_or_ignored(content: bytes) -> None:
    """No bytes make the machines fail."""
    with contextlib.suppress(PacketError):
        decode(content)
    Aggregator(4, 1).receive(content, 0, 0.0)
    Worker(0, 0, 1, 1, 1, 0.01).receive(content, 0.0)


@pytest.mark.parametrize(("epoch", "malformed"), [(2**31, 0), (2**31 + 1, 1), (2**32 - 1, 1)])
def test_a_join_with_an_impossible_epoch_is_malformed(epoch: int, malformed: int) -> None:
    """Its successor would not fit into the field."""
    switch = Aggregator(4, 1)
    switch.receive(encode(ControlPacket(PacketKind.JOIN, 1, epoch, 0, 1, slots=1)), 0, 0.0)
    assert switch.malformed == malformed


def exchange(switch: Aggregator, machines: dict[int, Worker], now_s: float, deaf: frozenset[int] = frozenset()) -> None:
    """Deliver packets in order, for 20 rounds; results for `deaf` workers are lost."""
    for _ in range(20):
        now_s += 1.0
        for number, machine in machines.items():
            for packet in list(machine.outgoing(now_s)):
                for target, answer in switch.receive(packet, number, now_s):
                    assert isinstance(target, int)
                    if not (target in deaf and decode(answer).kind == PacketKind.RESULT):
                        machines[target].receive(answer, now_s)


def test_a_repeated_operation_leaves_the_result_that_was_returned() -> None:
    """Worker 0 changes its result in place; then the switch restarts, and worker 1 still needs the operation."""
    machines = {number: Worker(7, number, 2, 2, 1, 0.01) for number in (0, 1)}
    ones = np.ones((1, CHUNK_VALUES), np.int32)
    for machine in machines.values():
        machine.begin(Reduction.SUM, ones)
    exchange(Aggregator(8, 1), machines, 0.0, deaf=frozenset([1]))
    assert [machine.busy for machine in machines.values()] == [False, True]
    result = machines[0].result()
    result += 100
    machines[0].begin(Reduction.SUM, ones)
    exchange(Aggregator(8, 1_000), machines, 100.0)
    assert (machines[1].result() == 2).all()
    assert (result == 102).all()


def wires(packets_per_s: float, chunks: int, slots: int, limit_s: float) -> tuple[list[Worker], float]:
    """Two workers whose wires to the switch and back send one packet after the other, without loss.

    Returns the workers and the time of the operation; fails after `limit_s`.
    """
    switch = Aggregator(slots, 1)
    machines = [Worker(7, number, 2, slots, 1, 0.01) for number in range(2)]
    for number, machine in enumerate(machines):
        machine.begin(Reduction.SUM, values_of(1, number, 0, chunks))
    free_s = {(number, way): 0.0 for number in range(2) for way in ("up", "down")}
    flights: list[tuple[float, int, int, str, bytes]] = []
    sent = 0

    def send(at_s: float, number: int, way: str, packet: bytes) -> None:
        nonlocal sent
        sent += 1
        free_s[number, way] = max(free_s[number, way], at_s) + 1.0 / packets_per_s
        heapq.heappush(flights, (free_s[number, way], sent, number, way, packet))

    now_s = 0.0
    while any(machine.busy for machine in machines):
        assert now_s < limit_s, f"after {sent} packets {machines[0].sent_again} were sent again"
        for number, machine in enumerate(machines):
            for packet in machine.outgoing(now_s):
                send(now_s, number, "up", packet)
        now_s = min([*(machine.next_s() for machine in machines), *(flight[0] for flight in flights[:1])])
        while flights and flights[0][0] <= now_s:
            _, _, number, way, packet = heapq.heappop(flights)
            if way == "down":
                machines[number].receive(packet, now_s)
                continue
            for target, answer in switch.receive(packet, number, now_s):
                assert isinstance(target, int)
                send(now_s, target, "down", answer)
    return machines, now_s


def test_packets_that_wait_in_a_queue_are_not_sent_again() -> None:
    """A whole window waits 53 ms, five times the least time of a retransmission."""
    machines, seconds = wires(2_400.0, chunks=4_000, slots=128, limit_s=20.0)
    assert seconds < 1.02 * 4_000 / 2_400
    assert all(machine.sent_again <= 40 for machine in machines)


def test_retransmissions_do_not_fill_the_queue() -> None:
    """The first result comes later than three times the least time of a retransmission; the packets that are sent
    again must not delay the results further and further."""
    machines, seconds = wires(200.0, chunks=600, slots=128, limit_s=30.0)
    assert seconds < 2.0 * 600 / 200
    assert all(machine.sent_again < 600 for machine in machines)


def test_a_packet_is_sent_again_once_after_three_later_results() -> None:
    """The results of packets that were sent before the second transmission say nothing about it."""
    switch, machine = Aggregator(16, 1), Worker(7, 0, 1, 16, 1, 0.01)
    machine.begin(Reduction.SUM, values_of(1, 0, 0, 16))
    for packet in machine.outgoing(0.0):
        for _, answer in switch.receive(packet, "address", 0.0):
            machine.receive(answer, 0.0)
    lost, *others = machine.outgoing(0.0)
    again = []
    for count, packet in enumerate(others, start=1):
        ((_, answer),) = switch.receive(packet, "address", 1e-3)
        machine.receive(answer, 1e-3)
        again += [(count, sent) for sent in machine.outgoing(1e-3)]
    assert again == [(3, lost)]
    assert machine.sent_again == 1


def test_lost_packets_do_not_lengthen_the_time_to_wait() -> None:
    """The waits for lost packets are no round trips: 500 operations take about as long as the losses explain."""
    seconds = []
    for loss in (0.0, 0.05):
        net = Net(5, 3, 4, loss, chunks=4)
        net.run(500, most=1_000_000)
        seconds.append(net.now_s)
    assert seconds[1] < 3.0 * seconds[0]


def test_an_old_join_begins_another_session_without_an_error() -> None:
    """The switch takes a repeated JOIN of worker 1 with the first one of a worker 0 that has restarted. Worker 1 has
    no complete operation, so it goes on in the new session."""
    switch = Aggregator(8, 1)
    values = [values_of(1, number, 0, 1) for number in range(2)]
    first = [Worker(7, number, 2, 4, 1, 0.01) for number in range(2)]
    join = [next(machine.outgoing(0.0)) for machine in first]
    repeated = next(first[1].outgoing(0.02))

    def deliver(machines: list[Worker], sender: int, packet: bytes) -> None:
        for target, answer in switch.receive(packet, sender, 0.0):
            assert isinstance(target, int)
            machines[target].receive(answer, 0.0)

    for number in range(2):
        deliver(first, number, join[number])
    machines = [Worker(7, 0, 2, 4, 2, 0.01), first[1]]
    deliver(machines, 0, next(machines[0].outgoing(0.0)))
    deliver(machines, 1, repeated)
    for number, machine in enumerate(machines):
        machine.begin(Reduction.SUM, values[number])
    for turn in range(1, 10):
        for number, machine in enumerate(machines):
            for packet in machine.outgoing(float(turn)):
                deliver(machines, number, packet)
    assert [machine.state for machine in machines] == ["running", "running"]
    assert all(np.array_equal(machine.result(), values[0] + values[1]) for machine in machines)
