"""The queue of large prompts: lanes by size, ageing, and rejections."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.serve.api.prompt_queue import AGEING_BYTES_PER_S, LANE_LIMITS, PromptQueue, QueueFull

SMALL, MIDDLE, LARGE = 8_000, 500_000, 5_000_000
sizes = st.integers(1, 10_000_000)


@dataclass
class Readers:
    """A model of the threads: all prompts are read at one pace, and the next event is the next arrival or end."""

    pace: float = 1e6
    wait_max_s: float = math.inf
    began: dict[int, float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    most_bytes: int = 0

    def play(self, arrivals: list[tuple[float, int]]) -> None:
        """Simulate arrivals, given as (seconds, bytes) in order of time."""
        queue = PromptQueue(self.pace, self.wait_max_s)
        sizes = [nbytes for _, nbytes in arrivals]
        remaining = list(enumerate(arrivals))
        running: dict[int, float] = {}
        while remaining or running:
            end = min(((at, ticket) for ticket, at in running.items()), default=(math.inf, -1))
            if remaining and remaining[0][1][0] <= end[0]:
                ticket, (now, nbytes) = remaining.pop(0)
                try:
                    started = queue.enter(ticket, nbytes, now)
                except QueueFull:
                    self.refused.add(ticket)
                    continue
            else:
                now, ticket = end
                del running[ticket]
                self.ended[ticket] = now
                started = queue.leave(ticket, now)
            for task in started:
                self.began[task] = now
                running[task] = now + sizes[task] / self.pace
            self.most_bytes = max(self.most_bytes, sum(sizes[prompt] for prompt in running))
            assert len(running) == queue.running
            lanes = {queue.lane(prompt): sizes[prompt] for prompt in running}
            assert len(lanes) == len(running), "one at a time"
            assert all(nbytes <= LANE_LIMITS[lane] for lane, nbytes in lanes.items())
        assert queue.waiting == 0


@st.composite
def arrivals(draw: st.DrawFn) -> list[tuple[float, int]]:
    gaps = draw(st.lists(st.tuples(st.floats(0, 3), sizes), max_size=25))
    times, now = [], 0.0
    for gap, nbytes in gaps:
        now += gap
        times.append((now, nbytes))
    return times


@given(arrivals())
def test_every_prompt_is_read_once_in_a_lane_of_its_size(
    plan: list[tuple[float, int]],
) -> None:
    readers = Readers()
    readers.play(plan)
    assert sorted(readers.ended) == list(range(len(plan)))
    largest = max((nbytes for _, nbytes in plan), default=0)
    assert readers.most_bytes <= sum(min(limit, largest) for limit in LANE_LIMITS)


@given(arrivals(), sizes, st.floats(0, 60))
def test_a_prompt_waits_for_no_prompt_beyond_its_size_class(
    plan: list[tuple[float, int]], nbytes: int, at: float
) -> None:
    """While it waits, its lane is never idle and reads prompts of its class or smaller ones. Any number of prompts
    above the limit of its class has no effect."""
    queue = PromptQueue(1e6)
    limit = LANE_LIMITS[queue.size_class(nbytes)]
    all_arrivals = sorted([*plan, (at, nbytes)])
    place = all_arrivals.index((at, nbytes))
    readers = Readers()
    readers.play(all_arrivals)
    work_s = sum(other for _, other in plan if other <= limit) / readers.pace
    assert readers.began[place] - at <= work_s + 1e-6


@given(arrivals())
def test_a_prompt_is_overtaken_only_by_those_that_arrive_soon_after_it(plan: list[tuple[float, int]]) -> None:
    queue = PromptQueue(1e6)
    readers = Readers()
    readers.play(plan)
    for number, (arrived_s, nbytes) in enumerate(plan):
        for other, (later_s, size) in enumerate(plan):
            same = queue.size_class(size) == queue.size_class(nbytes)
            if same and later_s > arrived_s + nbytes / AGEING_BYTES_PER_S:
                assert readers.began[number] <= readers.began[other]


def test_a_small_prompt_starts_at_once_while_large_ones_are_read() -> None:
    queue = PromptQueue(1e6)
    assert [queue.enter(ticket, LARGE, 0.0) for ticket in range(4)] == [[0], [], [], []]
    assert queue.enter(4, MIDDLE, 0.0) == [4]
    assert queue.enter(5, SMALL, 0.0) == [5]
    assert queue.enter(6, SMALL, 0.0) == []
    assert queue.leave(5, 0.1) == [6]
    assert queue.leave(0, 5.0) == [1]


def test_the_shortest_waiting_prompt_is_next() -> None:
    queue = PromptQueue(1e6)
    assert queue.enter(0, LARGE, 0.0) == [0]
    for ticket, nbytes in ((1, 4_000_000), (2, 2_000_000), (3, 3_000_000)):
        assert queue.enter(ticket, nbytes, 0.0) == []
    assert queue.leave(2, 1.0) == [], "its client has disconnected"
    assert queue.leave(0, 5.0) == [3]
    assert queue.leave(3, 8.0) == [1]
    assert queue.waiting == 0


@given(st.lists(sizes, min_size=1, max_size=40), st.floats(0, 20))
def test_a_prompt_that_would_wait_too_long_is_rejected_with_retry_after(plan: list[int], wait_max_s: float) -> None:
    queue = PromptQueue(1e6, wait_max_s)
    waiting: dict[int, int] = {}
    for ticket, nbytes in enumerate(plan):
        expected = queue.wait_s(nbytes)
        assert expected == pytest.approx(
            sum(size for size in waiting.values() if queue.size_class(size) == queue.size_class(nbytes)) / 1e6
        )
        full: QueueFull | None = None
        try:
            started = queue.enter(ticket, nbytes, 0.0)
        except QueueFull as error:
            full = error
        if full is not None:
            assert expected > wait_max_s
            assert 1 <= full.retry_after_s <= 60
        elif not started:
            assert expected <= wait_max_s
            waiting[ticket] = nbytes
    assert queue.waiting == len(waiting)
    for ticket in waiting:
        queue.leave(ticket, 0.0)
    assert all(queue.wait_s(nbytes) == 0 for nbytes in plan)


def test_the_throughput_of_reading_is_measured() -> None:
    queue = PromptQueue(1e6)
    for ticket in range(50):
        queue.enter(ticket, LARGE, 10.0 * ticket)
        queue.leave(ticket, 10.0 * ticket + 1)
    queue.enter(50, LARGE, 1000.0)
    queue.enter(51, LARGE, 1000.0)
    assert queue.wait_s(LARGE) == pytest.approx(1.0, rel=0.01), "5 MB in a second"
