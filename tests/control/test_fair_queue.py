"""Weighted fair queueing: work conserving, strict bands, shares by weight within one request, no starvation."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from kvroute.control import FairQueue, QueuedRequest, RequestQueue, WaitingRequest

KEYS = ("alice", "bob", "carol")
weights = st.fixed_dictionaries({key: st.sampled_from([0.5, 1.0, 2.0, 7.0]) for key in KEYS})
works = st.floats(0.01, 5.0)


@given(
    weights, st.lists(st.tuples(st.sampled_from(KEYS), works), min_size=1, max_size=60), st.lists(st.integers(0, 59))
)
def test_keys_that_wait_share_the_work_by_their_weights(
    weight: dict[str, float], arrivals: list[tuple[str, float]], cancelled: list[int]
) -> None:
    """While two keys wait, their served work divided by weight differs by at most one request of each, also when
    requests leave the queue."""
    queue = FairQueue()
    for number, (key, work_s) in enumerate(arrivals):
        queue.push(WaitingRequest(number, key, 0, weight[key], work_s))
    gone = {number for number in cancelled if queue.remove(number)}
    left = {key: [i for i, (k, _) in enumerate(arrivals) if k == key and i not in gone] for key in KEYS}
    most = {key: max((arrivals[i][1] for i in left[key]), default=0.0) / weight[key] for key in KEYS}
    served = dict.fromkeys(KEYS, 0.0)
    while (request := queue.pop()) is not None:
        assert request.number == left[request.key].pop(0), "requests of one key stay in order"
        served[request.key] += request.work_s / request.weight
        waiting = [key for key in KEYS if left[key]]
        for task in waiting:
            for other in waiting:
                assert served[task] - served[other] <= most[task] + most[other] + 1e-6
    assert not any(left.values())


@given(st.lists(st.tuples(st.sampled_from(KEYS), st.integers(-2, 2), works, st.booleans()), max_size=80))
def test_it_is_work_conserving_and_bands_are_strict(
    steps: list[tuple[str, int, float, bool]],
) -> None:
    """`pop` returns a request whenever one waits, always of the highest band, and each exactly once."""
    queue, waiting = FairQueue(), dict[int, int]()
    for number, (key, band, work_s, pops) in enumerate(steps):
        queue.push(WaitingRequest(number, key, band, 1.0, work_s))
        waiting[number] = band
        if pops:
            request = queue.pop()
            assert request is not None
            assert request.band == max(waiting.values())
            assert waiting.pop(request.number) == request.band
        assert len(queue) == len(waiting)
        assert sum(queue.depths().values()) == len(waiting)


@given(st.integers(1, 40), works)
def test_a_key_that_comes_late_is_not_starved(flood: int, work_s: float) -> None:
    """However many requests of another key wait, one of those is served at most before the first of a new key."""
    queue = FairQueue()
    for number in range(flood):
        queue.push(WaitingRequest(number, "flood", 0, 1.0, work_s))
    queue.pop()
    queue.push(WaitingRequest(flood, "late", 0, 1.0, work_s))
    order = [request.key for request in iter(queue.pop, None)]
    assert "late" in order[:2]


def test_the_work_ahead_of_a_request_counts_each_key_by_its_weight() -> None:
    """A request of weight 2 waits for half the work that others of weight 1 get in its turn."""
    queue = FairQueue()
    for number in range(10):
        queue.push(WaitingRequest(number, "flood", 0, 1.0, 1.0))
    queue.push(WaitingRequest(10, "urgent", 1, 1.0, 3.0))
    assert queue.ahead_s(WaitingRequest(11, "heavy", 0, 2.0, 4.0)) == 3.0 + 2.0
    assert queue.ahead_s(WaitingRequest(11, "flood", 0, 1.0, 4.0)) == 3.0 + 10.0
    assert queue.ahead_s(WaitingRequest(11, "low", -1, 1.0, 4.0)) == 13.0


def _queued(number: int, *, expires_at: float = 100.0, deadline: float = math.inf, band: int = 0) -> QueuedRequest:
    return QueuedRequest(WaitingRequest(number, "a", band, 1.0, 1.0), expires_at, deadline)


def test_a_request_gives_up_when_its_deadline_cannot_be_met() -> None:
    """It leaves the queue when the shortest possible TTFT would end after the deadline, or when it has waited too
    long."""
    queue = RequestQueue()
    queue.push(_queued(1, expires_at=5.0))
    queue.defer(_queued(2, deadline=4.0), least_s=1.0)
    queue.defer(_queued(3, deadline=9.0, band=1), least_s=1.0)
    assert queue.next_end == 3.0
    assert [request.waiting.number for request in queue.expire(2.9)] == []
    assert [request.waiting.number for request in queue.expire(3.0)] == [2]
    assert [request.waiting.number for request in queue.expire(5.0)] == [1]
    assert (len(queue), queue.deferred, queue.pop()) == (1, 1, None)
    assert [request.waiting.number for request in queue.take_deferred()] == [3]
    assert (len(queue), queue.next_end) == (0, math.inf)


@given(st.lists(st.tuples(st.sampled_from(["push", "defer", "pop", "retry", "remove", "expire"]), st.integers(0, 20))))
def test_no_request_is_lost_or_returned_twice(steps: list[tuple[str, int]]) -> None:
    """Every request that was added is in the queue, or was returned or removed, exactly once."""
    queue, inside, now = RequestQueue(), set[int](), 0.0
    for number, (step, amount) in enumerate(steps):
        if step == "push":
            queue.push(_queued(number, expires_at=now + amount))
            inside.add(number)
        elif step == "defer":
            queue.defer(_queued(number, expires_at=now + 30, deadline=now + amount), least_s=0.5)
            inside.add(number)
        elif step == "pop":
            request = queue.pop()
            inside -= {request.waiting.number} if request is not None else set()
        elif step == "retry":
            for received_request in queue.take_deferred():
                inside.remove(received_request.waiting.number)
        elif step == "remove":
            assert queue.remove(amount) == (amount in inside)
            inside.discard(amount)
        else:
            now += amount / 4
            for received_request in queue.expire(now):
                inside.remove(received_request.waiting.number)
        assert len(queue) == len(inside)
        assert queue.deferred + len(queue.fair) == len(inside)
