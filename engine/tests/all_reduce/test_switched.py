"""Sums through a switch that dies: either all ranks have the same bits, or all reduce the tensor in another way."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client

import numpy as np
import pytest

from kvroute_engine.all_reduce.channel import new_key
from kvroute_engine.all_reduce.counters import AllReduceCounters
from kvroute_engine.all_reduce.peers import Operations, RankPeers, SwitchOperation
from kvroute_engine.all_reduce.switched import SwitchedSums
from kvroute_engine.switch import AggregationClient
from kvroute_engine.switch.udp import UdpSwitch

ROUNDS = 60


@contextmanager
def serving(switch: UdpSwitch) -> Iterator[threading.Event]:
    """A switch in a thread, until the event is set."""
    stopped = threading.Event()
    thread = threading.Thread(target=switch.serve, args=(stopped.is_set,))
    thread.start()
    try:
        yield stopped
    finally:
        stopped.set()
        thread.join()
        switch.close()


@contextmanager
def group(ranks: int, address: tuple[str, int], slots: int = 8) -> Iterator[list[SwitchedSums]]:
    """The ranks of a group, connected to each other."""
    key, operations = new_key(), [Operations() for _ in range(ranks)]
    peers = [RankPeers(operation, "127.0.0.1", key) for operation in operations]
    for rank, peer in enumerate(peers):
        peer.connect([other.address for number, other in enumerate(peers) if number != rank])
    clients = [AggregationClient(address, 1, rank, ranks, slots, timeout_s=60.0) for rank in range(ranks)]
    members = [SwitchedSums(*parts, 0.3) for parts in zip(clients, operations, peers, strict=True)]
    try:
        yield members
    finally:
        for member in members:
            member.close()


def tensor(number: int, rank: int) -> np.ndarray:
    """Return a rank's tensor of a round, of a size that depends on the round."""
    return np.random.default_rng([number, rank]).normal(size=1 + 700 * (number % 5)).astype(np.float32)


@pytest.mark.parametrize("seed", range(6))
def test_all_ranks_agree_when_the_switch_dies(seed: int) -> None:
    """It dies at any time; ranks pause at random, so some have begun the next operation when others wait."""
    drawn = random.Random(seed)
    ranks, die_at = drawn.choice([2, 3]), drawn.randrange(1, ROUNDS - 10)
    switch = UdpSwitch("127.0.0.1", 0, 64)
    with serving(switch) as stopped, group(ranks, switch.address) as members:

        def rank_of(rank: int) -> list[np.ndarray | None]:
            own, found = random.Random(100 * seed + rank), []
            for number in range(ROUNDS):
                if own.random() < 0.05:
                    time.sleep(own.random() * 0.02)
                if rank == 0 and number == die_at:
                    threading.Timer(own.random() * 0.003, stopped.set).start()
                found.append(members[rank].all_reduce(tensor(number, rank)))
            return found

        with ThreadPoolExecutor(ranks) as pool:
            results = list(pool.map(rank_of, range(ranks)))
    for number, sums in enumerate(zip(*results, strict=True)):
        assert len({summed is None for summed in sums}) == 1, f"ranks disagree about operation {number}"
        if sums[0] is not None:
            assert len({summed.tobytes() for summed in sums if summed is not None}) == 1
            exact = np.sum([tensor(number, rank).astype(np.float64) for rank in range(ranks)], axis=0)
            assert np.allclose(sums[0], exact, rtol=1e-5, atol=1e-6)
    without = [number for number, (first, *_) in enumerate(zip(*results, strict=True)) if first is None]
    assert without == list(range(without[0], ROUNDS)), "after the first failure the switch is never used again"
    assert all(member.failure for member in members)


def test_a_rank_that_is_late_does_not_end_the_group() -> None:
    """The others ask whether it has begun, and wait on although the switch is silent for longer than the timeout."""
    switch = UdpSwitch("127.0.0.1", 0, 64)
    late = threading.Event()
    with serving(switch), group(2, switch.address) as members, ThreadPoolExecutor(2) as pool:
        first = pool.submit(members[0].all_reduce, np.ones(5, np.float32))
        assert not late.wait(1.0), "three timeouts"
        assert not first.done()
        second = pool.submit(members[1].all_reduce, np.ones(5, np.float32))
        for task in (first, second):
            total = task.result(60)
            assert total is not None
            assert total.tolist() == [2.0] * 5
    assert [member.failure for member in members] == [None, None]


def test_a_switch_without_enough_slots_is_given_up_at_once() -> None:
    switch = UdpSwitch("127.0.0.1", 0, 4)
    with serving(switch), group(2, switch.address) as members, ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda member: member.all_reduce(np.ones(5, np.float32)), members))
    assert results == [None, None]
    assert "too few slots are free" in {member.failure for member in members}


def test_an_operation_ends_once() -> None:
    """Complete stays complete, abandoned stays abandoned, for this operation and all later ones."""
    operations, result = Operations(), np.ones(1)
    assert operations.complete(operations.begin(), result)
    assert operations.abandon(SwitchOperation(0, 0)) is result
    assert operations.abandon(SwitchOperation(0, 0)) is result, "a third rank asks, too"
    assert not operations.complete(operations.begin(), result), "the rank that asked takes no part in the next one"
    other = Operations()
    assert other.abandon(SwitchOperation(0, 3)) is None
    assert other.abandon(SwitchOperation(0, 5)) is None
    assert [other.abandoned(SwitchOperation(0, number)) for number in (2, 3, 5)] == [False, True, True]


def test_operations_of_generations_are_apart() -> None:
    """A question may come before its generation begins, or after: the last result of the one before is kept."""
    operations, result = Operations(), np.ones(1)
    first = operations.begin()
    assert operations.complete(first, result)
    early = SwitchOperation(2, 0)
    assert operations.abandon(early) is None
    assert not operations.has_begun(early)
    assert operations.begin(2) == early
    assert operations.has_begun(early)
    assert operations.abandoned(early), "the rank that asked takes no part in it"
    assert not operations.complete(early, result)
    assert operations.abandon(first) is result
    third = operations.begin(3)
    assert operations.has_begun(first)
    assert operations.complete(third, result), "the next generation can use the switch"


def test_a_group_returns_to_the_switch() -> None:
    """With a higher generation, also while one of the ranks is late; lower ones stay on the ring."""
    switch = UdpSwitch("127.0.0.1", 0, 64)
    port, ones = switch.address[1], np.ones(300, np.float32)
    with group(2, switch.address) as members, ThreadPoolExecutor(2) as pool:

        def both(generation: int) -> list[list[float] | None]:
            found = list(pool.map(lambda member: member.all_reduce(ones, generation), members))
            return [None if total is None else sorted(set(total.tolist())) for total in found]

        with serving(switch):
            assert both(0) == [[2.0], [2.0]]
        assert both(0) == [None, None]
        assert both(1) == [None, None], "the switch is away"
        with serving(UdpSwitch("127.0.0.1", port, 64)):
            assert both(1) == [None, None], "the generation has ended"
            assert both(2) == [[2.0], [2.0]]
            assert both(2) == [[2.0], [2.0]]
            assert both(4) == [[2.0], [2.0]], "without a failure before"
        assert [member.failure for member in members] == [None, None]


def test_questions_need_the_key_of_the_group() -> None:
    operations = Operations()
    peers = RankPeers(operations, "127.0.0.1", new_key())
    with pytest.raises((AuthenticationError, EOFError, OSError)):
        Client(peers.address, "AF_INET", authkey=b"another")
    asking = RankPeers(Operations(), "127.0.0.1", b"another")
    asking.connect([peers.address])
    assert asking.all_have_begun(SwitchOperation(0, 0)), "a rank that does not answer is not waited for"
    peers.close()


def test_counters_in_the_text_format() -> None:
    counters = AllReduceCounters(3)
    counters.add("ring", 10)
    counters.add("ina", 4)
    counters.add("ina", 4)
    counters.fell_back("ina", "ring", "the switch is gone")
    counters.fell_back("ina", "ring", "the switch is gone")
    lines = counters.text().splitlines()
    assert 'kvroute_all_reduces_total{rank="3",scheme="ina"} 2' in lines
    assert 'kvroute_all_reduce_bytes_total{rank="3",scheme="ring"} 10' in lines
    assert 'kvroute_all_reduce_fallbacks_total{rank="3",scheme="ina"} 1' in lines
