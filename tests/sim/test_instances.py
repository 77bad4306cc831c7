"""Instances in virtual time: the decode instance that skips iterations equals one that steps through all of them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.prefix import PrefixIndex
from kvroute.sim.instances import DecodeInstance, KvMemory, PrefillInstance
from kvroute.timing import IterationTime, prefill_time
from kvroute.types import DecodeSpec, LinearPrefill


@dataclass(frozen=True)
class Arrival:
    """A request whose KV arrives at a decode instance."""

    at: float
    input_tokens: int
    output_tokens: int


def stepped(arrivals: list[Arrival], time: IterationTime, batch_max: int) -> dict[int, tuple[float, float]]:
    """Compute a simple model, iteration by iteration; return (first token, finish) by request."""
    waiting = deque(sorted(range(len(arrivals)), key=lambda number: (arrivals[number].at, number)))
    left: dict[int, int] = {}
    first: dict[int, float] = {}
    ends: dict[int, tuple[float, float]] = {}
    now = 0.0
    while waiting or left:
        if not left and waiting:
            now = max(now, arrivals[waiting[0]].at)
        while waiting and len(left) < batch_max and arrivals[waiting[0]].at <= now + 1e-9:
            number = waiting.popleft()
            left[number] = arrivals[number].output_tokens
        context = sum(
            arrivals[number].input_tokens + arrivals[number].output_tokens - rest for number, rest in left.items()
        )
        now += time.seconds(len(left), context)
        for number in list(left):
            first.setdefault(number, now)
            left[number] -= 1
            if not left[number]:
                del left[number]
                ends[number] = (first[number], now)
    return ends


def skipped(arrivals: list[Arrival], time: IterationTime, batch_max: int) -> tuple[dict[int, tuple[float, float]], int]:
    """Run the same on `DecodeInstance`; return also the number of steps."""
    instance = DecodeInstance(0, time, batch_max)
    events: list[tuple[float, int, int]] = [(arrival.at, -1, number) for number, arrival in enumerate(arrivals)]
    events.sort()
    first: dict[int, float] = {}
    ends: dict[int, tuple[float, float]] = {}
    steps = 0
    while events:
        at, version, number = heappop(events)
        if version < 0:
            arrival = arrivals[number]
            wake_s = instance.transfer_done(at, number, arrival.input_tokens, arrival.output_tokens)
        elif version != instance.version:
            continue
        else:
            step, wake_s = instance.step(at)
            steps += 1
            ends |= {request: (first[request], at) for request in step.finished}
            first |= dict.fromkeys(step.admitted, step.first_token_s)
        if wake_s is not None:
            heappush(events, (wake_s, instance.version, 0))
    return ends, steps


arrivals = st.lists(
    st.builds(
        Arrival,
        at=st.integers(0, 3_000).map(
            lambda step: step * 0.001_000_173_7
        ),  # never on a boundary, where rounding decides
        input_tokens=st.integers(1, 50_000),
        output_tokens=st.integers(1, 60),
    ),
    min_size=1,
    max_size=25,
)
times = st.builds(
    lambda a, b, k: IterationTime.of(DecodeSpec(base_s=a, per_request_s=b, per_context_token_s=k)),
    st.sampled_from([0.0125, 0.03]),
    st.sampled_from([0.0, 1e-4, 1e-3]),
    st.sampled_from([0.0, 2e-8]),
)


@settings(deadline=None)
@given(arrivals, times, st.sampled_from([1, 2, 4, 64]))
def test_skipping_iterations_equals_stepping_through_them(
    landed: list[Arrival], time: IterationTime, batch_max: int
) -> None:
    """First tokens and finishes equal those of the model that steps through every iteration."""
    expected = stepped(landed, time, batch_max)
    ends, _ = skipped(landed, time, batch_max)
    assert ends.keys() == expected.keys()
    for number, pair in expected.items():
        assert ends[number] == pytest.approx(pair, rel=1e-9, abs=1e-7)


def transfer_s(number: int, pull_s: float) -> float:
    """Return the transfer time of a request. All differ: if one ended exactly with an iteration, rounding would decide
    whether the engine sees it then or one iteration later."""
    return pull_s + number * 0.000_013_008_28


def pulled_stepwise(arrivals: list[Arrival], time: IterationTime, batch_max: int, pull_s: float) -> dict[int, float]:
    """Compute a simple model, iteration by iteration, of an engine that starts transfers between steps; return the
    first token by request."""
    asking = deque(sorted(range(len(arrivals)), key=lambda number: (arrivals[number].at, number)))
    pulls: list[tuple[float, int]] = []
    ready: deque[int] = deque()
    left: dict[int, int] = {}
    first: dict[int, float] = {}
    now = 0.0
    while asking or pulls or ready or left:
        ready.extend(number for end, number in sorted(pulls, key=lambda pull: pull[0]) if end <= now)
        pulls = [entry for entry in pulls if entry[0] > now]
        while ready and len(left) < batch_max:
            number = ready.popleft()
            left[number] = arrivals[number].output_tokens
        planned = []
        while asking and arrivals[asking[0]].at <= now:
            planned.append(asking.popleft())
        if not left:  # a step without a model: the transfers start at once
            pulls += [(now + transfer_s(number, pull_s), number) for number in planned]
            now = min([end for end, _ in pulls] + [arrivals[number].at for number in list(asking)[:1]])
            continue
        context = sum(
            arrivals[number].input_tokens + arrivals[number].output_tokens - rest for number, rest in left.items()
        )
        now += time.seconds(len(left), context)
        for number in list(left):
            first.setdefault(number, now)
            left[number] -= 1
            if not left[number]:
                del left[number]
        pulls += [(now + transfer_s(number, pull_s), number) for number in planned]
    return first


def pulled_in_spans(arrivals: list[Arrival], time: IterationTime, batch_max: int, pull_s: float) -> dict[int, float]:
    """Run the same on `DecodeInstance`."""
    instance = DecodeInstance(0, time, batch_max)
    events: list[tuple[float, int, str, int]] = []
    for number, arrival in enumerate(arrivals):
        heappush(events, (arrival.at, number, "pull", number))
    sequence = len(arrivals)
    first: dict[int, float] = {}
    while events:
        at, _, kind, number = heappop(events)
        wake_s: float | None
        started: tuple[int, ...] = ()
        if kind == "pull":
            wake_s = instance.pull(at, number)
        elif kind == "pulled":
            arrival = arrivals[number]
            wake_s = instance.transfer_done(at, number, arrival.input_tokens, arrival.output_tokens)
        elif number != instance.version:
            continue
        else:
            step, wake_s = instance.step(at)
            first |= dict.fromkeys(step.admitted, step.first_token_s)
            started = step.pulls
        for request in started:
            sequence += 1
            heappush(events, (at + transfer_s(request, pull_s), sequence, "pulled", request))
        if wake_s is not None:
            sequence += 1
            heappush(events, (wake_s, sequence, "step", instance.version))
    return first


@settings(deadline=None)
@given(arrivals, times, st.sampled_from([1, 2, 4, 64]), st.sampled_from([0.001_037, 0.050_003_1]))
def test_transfers_that_start_between_steps(
    asked: list[Arrival], time: IterationTime, batch_max: int, pull_s: float
) -> None:
    """First tokens equal those of the model that steps through every iteration."""
    expected = pulled_stepwise(asked, time, batch_max, pull_s)
    found = pulled_in_spans(asked, time, batch_max, pull_s)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-7)


def test_a_transfer_waits_for_the_next_planned_step() -> None:
    """Iterations of 10 ms of another request end at 12, 22, 32 ms and so on. A request of 27 ms is planned at 32 ms,
    its transfer of 2 ms starts at 42 ms, the end is seen at 52 ms, and the first token comes at 62 ms."""
    time = IterationTime.of(DecodeSpec(base_s=0.01, per_request_s=0.0))
    found = pulled_in_spans([Arrival(0.0, 10, 100), Arrival(0.027, 10, 5)], time, 4, 0.002)
    assert found[0] == pytest.approx(0.012)
    assert found[1] == pytest.approx(0.062)


def test_a_long_output_takes_two_steps() -> None:
    """The steps are joining and leaving: ten thousand iterations in between are skipped."""
    time = IterationTime.of(DecodeSpec(base_s=0.0125, per_request_s=1e-4, per_context_token_s=1e-8))
    _, steps = skipped([Arrival(0.0, 100, 10_000)], time, 64)
    assert steps == 2


def test_prefill_is_first_in_first_out_or_concurrent() -> None:
    """Three prompts of 1,000 tokens arrive at once: they run one after the other, or all at the same time."""
    time = prefill_time(LinearPrefill(per_token_s=1e-4, base_s=0.02))
    fifo, delay = (PrefillInstance(0, time, queueing) for queueing in (True, False))
    assert [fifo.submit(1.0, 1_000, 0)[1] for _ in range(3)] == pytest.approx([1.12, 1.24, 1.36])
    assert [delay.submit(1.0, 1_000, 0)[1] for _ in range(3)] == pytest.approx([1.12] * 3)
    assert fifo.submit(5.0, 1_000, 500) == pytest.approx((5.0, 5.07))


def test_prompts_overlap_in_a_pipeline() -> None:
    """In four stages the first prompt takes its whole time, and each of the next ends one stage later."""
    time = prefill_time(LinearPrefill(per_token_s=1e-4))
    pipeline = PrefillInstance(0, time, True, stages=4)
    found = [pipeline.submit(1.0, 1_000, 0) for _ in range(3)]
    assert found == [pytest.approx((1.0 + 0.025 * number, 1.1 + 0.025 * number)) for number in range(3)]


@given(
    st.lists(st.tuples(st.floats(0, 2), st.integers(1, 5_000)), min_size=1, max_size=20),
    st.integers(1, 5),
)
def test_a_pipeline_is_a_permutation_flow_shop(prompts: list[tuple[float, int]], stages: int) -> None:
    """Every prompt starts in a stage when it has left the one before and the prompt before it has left this one."""
    time = prefill_time(LinearPrefill(per_token_s=1e-4, base_s=0.01))
    pipeline = PrefillInstance(0, time, True, stages)
    ends = [[0.0] * stages]
    at = 0.0
    for gap_s, tokens in prompts:
        at += gap_s
        row, end = list[float](), at
        for stage in range(stages):
            end = max(end, ends[-1][stage]) + time.seconds(tokens) / stages
            row.append(end)
        start, finish = pipeline.submit(at, tokens, 0)
        assert (start, finish) == (max(at, ends[-1][0]), row[-1])
        ends.append(row)


operations = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 8), st.integers(0, 12), st.integers(0, 5)), min_size=1, max_size=40
)


@given(operations)
def test_memory_is_never_overcommitted_and_all_is_released(requests: list[tuple[int, int, int, int]]) -> None:
    """Requests that fit are booked, transferred and finished, or cancelled before the transfer ends; the memory used
    stays within 32 blocks, and no reservation remains."""
    index = PrefixIndex(1, [32])
    memory = KvMemory(index, [32], [0])
    dispatched: list[tuple[tuple[int, ...], int, int]] = []
    landed: list[tuple[tuple[int, ...], int]] = []

    def transfer_done() -> None:
        blocks, hit, total = dispatched.pop(0)
        memory.transfer_done(0, blocks, hit)
        landed.append((blocks, total))

    for number, (group, shared, length, answer) in enumerate(requests):
        blocks = tuple(group * 100 + k if k < shared else 1_000 * (number + 1) + k for k in range(length))
        total = len(blocks) + answer
        if total <= memory.free_blocks(0):
            hit = min(index.match_one(0, blocks), len(blocks))
            memory.reserve(0, blocks, hit, total)
            dispatched.append((blocks, hit, total))
        if answer == 3 and dispatched:
            memory.give_up(0, *dispatched.pop())
        if len(dispatched) > 2:
            transfer_done()
        if len(landed) > 2:
            memory.release(0, *landed.pop(0))
        assert index.used_blocks(0) + memory.reserved_blocks[0] <= 32
        assert memory.free_blocks(0) >= 0
    while dispatched:
        transfer_done()
    while landed:
        memory.release(0, *landed.pop(0))
    assert memory.reserved_blocks == [0]
    assert index.pinned_blocks(0) == 0
