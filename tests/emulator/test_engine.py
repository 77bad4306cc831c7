"""The engine and the fabric in virtual time against simple models, for any order, delay of timers, or cancellation."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.emulator.virtual_engine import BLOCK_TOKENS, DECODE, VirtualClock, engine_on, prompt_of, timed

from kvroute import topology
from kvroute.emulator.engine.counters import DurationHistogram
from kvroute.emulator.engine.engine import Engine
from kvroute.emulator.engine.sequence import EngineSequence
from kvroute.emulator.kv.fabric import EmulatedFabric
from kvroute.emulator.kv.kv_events import BlockRemoved, BlockStored, changes
from kvroute.emulator.prompt import EmulatedPrompt
from kvroute.flows import FlowNetwork
from kvroute.prefix import Evicted, block_hashes
from kvroute.sim.network import transfers as sim_network
from kvroute.sim.network.capacity import LinkCapacities
from kvroute.sim.settings import Background
from kvroute.timing import IterationTime

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL, PODS = (topology.load(EXAMPLES / name) for name in ("small.yaml", "fat-tree-64gpu.yaml"))


def whole(engine: Engine, job: EngineSequence) -> None:
    """Run a request through the stages of a single instance."""

    def on_change() -> None:
        if job.stage == "prefilled":
            engine.reserve(job)
        elif job.stage == "reserved":
            engine.transfer_done(job)

    job.on_change = on_change
    engine.prefill(job)


@dataclass(frozen=True)
class Arrival:
    """A request whose KV arrives; it may be cancelled after a while, and it may stream its tokens."""

    at: float
    input_tokens: int
    output_tokens: int
    streaming: bool


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        at=st.integers(0, 300).map(lambda ms: ms / 1000),
        input_tokens=st.integers(1, 200),
        output_tokens=st.integers(1, 12),
        streaming=st.booleans(),
    ),
    min_size=1,
    max_size=10,
)
LATENESS = st.lists(st.sampled_from([-0.0004, 0.0, 0.0, 0.001, 0.003]), min_size=1, max_size=5)


def stepped(arrivals: list[Arrival], time: IterationTime, batch_max: int) -> dict[int, list[float]]:
    """Compute a simple batch model, iteration by iteration; return the time of every token by request."""
    waiting = deque(sorted(range(len(arrivals)), key=lambda number: (arrivals[number].at, number)))
    tokens: dict[int, list[float]] = {number: [] for number in waiting}
    running: list[int] = []
    now = 0.0
    while waiting or running:
        if not running:
            now = max(now, arrivals[waiting[0]].at)
        while waiting and len(running) < batch_max and arrivals[waiting[0]].at <= now + 1e-9:
            running.append(waiting.popleft())
        now += time.seconds(len(running), sum(arrivals[n].input_tokens + len(tokens[n]) for n in running))
        for number in running:
            tokens[number].append(now)
        running = [number for number in running if len(tokens[number]) < arrivals[number].output_tokens]
    return tokens


def run_arrivals(arrivals: list[Arrival], clock: VirtualClock) -> dict[int, list[float]]:
    """Run the engine; return the times of the tokens by request, all of them if streamed, else the last one."""
    engine = engine_on(clock)
    tokens: dict[int, list[float]] = {number: [] for number in range(len(arrivals))}
    for number, arrival in enumerate(arrivals):

        def start(number: int = number, arrival: Arrival = arrival) -> None:
            prompt = prompt_of(number, *range(arrival.input_tokens - 1))
            job = engine.arrive(prompt, arrival.output_tokens, streaming=arrival.streaming)

            def on_change() -> None:
                if job.stage == "reserved":
                    engine.transfer_done(job)
                while len(tokens[number]) < job.emitted:
                    tokens[number].append(clock.now())

            job.on_change = on_change
            engine.reserve(job)

        clock.call(arrival.at, start)
    clock.run()
    assert (engine.running, engine.waiting, engine.kv_used_share) == (0, 0, 0.0)
    return tokens


@given(ARRIVALS)
@settings(deadline=None, max_examples=60)
def test_token_times_equal_the_reference_batch_model(arrivals: list[Arrival]) -> None:
    """With an exact clock, every streamed token and the end of every response come at the model's time."""
    expected = stepped(arrivals, IterationTime.of(DECODE), 4)
    for number, times in run_arrivals(arrivals, VirtualClock()).items():
        wanted = expected[number] if arrivals[number].streaming else expected[number][-1:] * len(times)
        assert times == pytest.approx(wanted, abs=1e-7)
        assert len(times) == arrivals[number].output_tokens


@given(st.integers(1, 50), LATENESS)
@settings(deadline=None, max_examples=60)
def test_timer_delays_do_not_accumulate(output_tokens: int, errors_s: list[float]) -> None:
    """Timers that are up to 3 ms late delay each token by up to 3 ms, the last one like the first."""
    arrivals = [Arrival(0.0, 10, output_tokens, True)]
    expected = stepped(arrivals, IterationTime.of(DECODE), 4)[0]
    (times,) = run_arrivals(arrivals, VirtualClock(errors_s)).values()
    for measured, wanted in zip(times, expected, strict=True):
        assert -0.0004 - 1e-9 <= measured - wanted <= 0.003 + 1e-9


@given(ARRIVALS, st.lists(st.integers(0, 400), max_size=10), LATENESS)
@settings(deadline=None, max_examples=60)
def test_a_cancelled_request_frees_all_its_resources(
    arrivals: list[Arrival], leaving_ms: list[int], errors_s: list[float]
) -> None:
    """At every stage, slots, memory and queues are released, and the other requests complete."""
    clock = VirtualClock(errors_s)
    engine = engine_on(clock, capacity_blocks=140)
    jobs: dict[int, EngineSequence] = {}
    for number, arrival in enumerate(arrivals):

        def start(number: int = number, arrival: Arrival = arrival) -> None:
            prompt = prompt_of(number % 2, *range(arrival.input_tokens - 1))
            job = jobs[number] = engine.arrive(prompt, arrival.output_tokens, streaming=arrival.streaming)
            whole(engine, job)
            if number < len(leaving_ms):
                clock.call(clock.now() + leaving_ms[number] / 1000, lambda: engine.leave(job))

        clock.call(arrival.at, start)
    clock.run()
    assert (engine.running, engine.waiting, engine.kv_used_share) == (0, 0, 0.0)
    assert {job.stage for job in jobs.values()} <= {"answered", "gone"}
    assert all(job.stage == "answered" for number, job in jobs.items() if number >= len(leaving_ms))
    assert engine.counters.finished == sum(job.stage == "answered" for job in jobs.values())


PROMPTS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 60), st.integers(0, 60)), min_size=1, max_size=12)


@given(PROMPTS, st.integers(20, 40))
@example([(0, 60, 0), (1, 60, 1), (2, 60, 1), (3, 60, 1)], 20)
@example([(0, 60, 0), (1, 60, 90), (2, 40, 10), (3, 60, 40)], 30)
@settings(deadline=None, max_examples=60)
def test_cache_events_describe_the_cache(requests: list[tuple[int, int, int]], capacity_blocks: int) -> None:
    """A listener that receives only the events can predict the cached prefix of every next prompt."""
    clock, known = VirtualClock(), set[int]()

    def on_kv(prompt: EmulatedPrompt | None, before: int, now: int, evicted: list[Evicted]) -> None:
        for event in changes(prompt, before, now, evicted, BLOCK_TOKENS):
            match event:
                case BlockRemoved(block_hashes=hashes):
                    assert known.issuperset(hashes)
                    known.difference_update(hashes)
                case BlockStored(block_hashes=hashes, parent_block_hash=parent, token_ids=tokens):
                    assert not known.intersection(hashes)
                    assert parent is None or parent in known
                    assert block_hashes(tokens, BLOCK_TOKENS, seed=parent or 0) == tuple(hashes)
                    known.update(hashes)

    engine = engine_on(clock, capacity_blocks)
    engine.on_kv = on_kv
    jobs: list[EngineSequence] = []

    def arrive_prompt(prompt: EmulatedPrompt) -> None:
        depth = next((depth for depth, block in enumerate(prompt.blocks) if block not in known), len(prompt.blocks))
        jobs.append(engine.arrive(prompt, 3))
        whole(engine, jobs[-1])
        assert jobs[-1].cached_tokens == min(depth * BLOCK_TOKENS, len(prompt.tokens) - 1)

    at_s = 0.0
    for family, tokens, gap_ms in requests:
        at_s += gap_ms / 1000
        clock.call(at_s, partial(arrive_prompt, prompt_of(family, *range(tokens - 1))))
    clock.run()
    assert [job.stage for job in jobs] == ["answered"] * len(requests)


IMPORTS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 60), st.integers(0, 40), st.booleans()), min_size=1, max_size=8
)


@given(PROMPTS, IMPORTS, st.integers(20, 40))
@example([(0, 60, 0)], [(0, 60, 0, True), (0, 60, 0, True)], 20)
@example([(0, 60, 30)], [(0, 32, 0, True)], 30)
@settings(deadline=None, max_examples=60)
def test_an_imported_prefix_is_cached_once_complete(
    requests: list[tuple[int, int, int]], imports: list[tuple[int, int, int, bool]], capacity_blocks: int
) -> None:
    """Otherwise nothing of it is cached, among any other requests: events report it, memory is reserved for it and
    released, and never more than the capacity is used."""
    clock, known = VirtualClock(), set[int]()

    def on_kv(prompt: EmulatedPrompt | None, before: int, now: int, evicted: list[Evicted]) -> None:
        for event in changes(prompt, before, now, evicted, BLOCK_TOKENS):
            match event:
                case BlockRemoved(block_hashes=hashes):
                    assert known.issuperset(hashes)
                    known.difference_update(hashes)
                case BlockStored(block_hashes=hashes):
                    assert not known.intersection(hashes)
                    known.update(hashes)
        assert len(known) <= capacity_blocks

    engine = engine_on(clock, capacity_blocks)
    engine.on_kv = on_kv
    jobs: list[EngineSequence] = []

    def arrive_prompt(prompt: EmulatedPrompt) -> None:
        jobs.append(engine.arrive(prompt, 3))
        whole(engine, jobs[-1])

    def import_prefix(prompt: EmulatedPrompt, ms: int, completes: bool) -> None:
        before = len(known.intersection(prompt.blocks))
        prefix_import = engine.import_prefix(prompt, len(prompt.tokens))
        assert prefix_import.lacking in (0, len(prompt.blocks) - before)
        assert (engine.waiting > 0) >= (prefix_import.lacking > 0)

        def end() -> None:
            (prefix_import.transfer_done if completes else prefix_import.give_up)()
            if completes and prefix_import.lacking:
                raise AssertionError("a completed import lacks nothing")
            (prefix_import.give_up if completes else prefix_import.transfer_done)()  # too late for any effect

        clock.call(clock.now() + ms / 1000, end)

    at_s = 0.0
    for family, tokens, gap_ms in requests:
        at_s += gap_ms / 1000
        clock.call(at_s, partial(arrive_prompt, prompt_of(family, *range(tokens - 1))))
    for number, (family, tokens, ms, completes) in enumerate(imports):
        clock.call(number * 0.02, partial(import_prefix, prompt_of(family, *range(tokens - 1)), ms, completes))
    clock.run()
    assert [job.stage for job in jobs] == ["answered"] * len(requests)
    assert (engine.running, engine.waiting, engine.kv_used_share) == (0, 0, 0.0)


@pytest.mark.parametrize(("tokens", "computed"), [(8, 20), (10, 20), (28, 1), (400, 1)])
def test_a_prefill_continues_from_an_imported_prefix(tokens: int, computed: int) -> None:
    """Only whole blocks of the 28 tokens are imported; the last token is always computed."""
    clock = VirtualClock()
    engine = engine_on(clock)
    prompt = prompt_of(*range(28))
    prefix_import = engine.import_prefix(prompt, tokens)
    assert prefix_import.lacking == min(tokens, 28) // BLOCK_TOKENS
    prefix_import.transfer_done()
    job = engine.arrive(prompt, 1)
    engine.prefill(job)
    clock.run()
    assert (job.stage, job.input_tokens - job.cached_tokens) == ("prefilled", computed)
    assert clock.now() == pytest.approx(0.02 + computed * 1e-3)


def test_a_prefix_without_room_is_not_imported() -> None:
    """A request has reserved 9 of 10 blocks: there is room for one more block but not for two."""
    engine = engine_on(VirtualClock(), capacity_blocks=10)
    engine.reserve(engine.arrive(prompt_of(*range(30)), 6))
    assert [engine.import_prefix(prompt_of(9, *range(tokens - 1)), tokens).lacking for tokens in (8, 4)] == [0, 1]


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 300)), min_size=1, max_size=10), LATENESS)
@example([(0, 1), (22, 1)], [0.003, 0.0])
@settings(deadline=None, max_examples=60)
def test_prompts_are_computed_sequentially(prompts: list[tuple[int, int]], errors_s: list[float]) -> None:
    """Lindley's recursion holds for every clock error: start = max(arrival, end of the previous one)."""
    clock = VirtualClock(errors_s)
    engine, ends = engine_on(clock), list[float]()

    def arrive_prompt(number: int, tokens: int) -> None:
        job = engine.arrive(prompt_of(number, *range(tokens - 1)), 1)
        job.on_change = lambda: ends.append(clock.now()) if job.stage == "prefilled" else None
        engine.prefill(job)

    expected, free_s = [], 0.0
    for number, (ms, tokens) in enumerate(sorted(prompts)):
        clock.call(ms / 1000, lambda number=number, tokens=tokens: arrive_prompt(number, tokens))  # type: ignore[misc]
        free_s = max(free_s, ms / 1000) + 0.02 + tokens * 1e-3
        expected.append(free_s)
    clock.run()
    for measured, wanted in zip(ends, expected, strict=True):
        assert -0.0004 - 1e-9 <= measured - wanted <= 0.003 + 1e-9


def test_a_request_waits_for_memory_in_use() -> None:
    """9 of 10 blocks are in use: the second request starts when the first one has ended, and completes too."""
    clock = VirtualClock()
    engine = engine_on(clock, capacity_blocks=10)
    first, second = (engine.arrive(prompt_of(number, *range(29)), 6) for number in range(2))
    for job in (first, second):
        job.on_change = lambda job=job: engine.transfer_done(job) if job.stage == "reserved" else None  # type: ignore[misc]
        engine.reserve(job)
    assert (first.stage, second.stage, engine.waiting) == ("decoding", "reserving", 2)
    clock.run()
    assert (first.stage, second.stage) == ("answered", "answered")
    assert not engine.fits(30, 11)


def test_held_kv_is_released_after_a_fetch_or_expiry() -> None:
    """The KV is pinned until then; expired KV is counted."""
    clock = VirtualClock()
    engine = engine_on(clock)
    for key in ("a", "b"):
        job = engine.arrive(prompt_of(*range(12)), 1)
        job.on_change = lambda job=job, key=key: job.stage == "prefilled" and engine.hold(job, key)  # type: ignore[assignment,misc]
        clock.call(0.0, lambda job=job: engine.prefill(job))  # type: ignore[misc]
    clock.call(1.0, lambda: engine.release("a"))
    clock.call(2.0, lambda: shares.append(engine.kv_used_share))
    shares: list[float] = []
    clock.run()
    assert shares == pytest.approx([3 / 10_000])
    assert (engine.held, engine.counters.kv_expired, engine.kv_used_share) == ({}, 1, 0.0)
    assert clock.now() == pytest.approx(480.064 - 0.012 + 0.001, abs=0.05)


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_a_slow_engine_multiplies_all_times(factor: float) -> None:
    """10 tokens take 11 ms each (and a little for the context); all after the current one have the new speed."""
    clock, times = VirtualClock(), list[float]()
    engine = engine_on(clock)
    job = engine.arrive(prompt_of(1), 10, streaming=True)
    engine.reserve(timed(clock, job, times, {"reserved": engine.transfer_done}))
    clock.call(0.0501, lambda: engine.slow(factor))
    clock.run()
    assert np.diff(times[:4]) == pytest.approx(0.011, abs=2e-5)
    assert np.diff(times[5:]) == pytest.approx(factor * 0.011, abs=1e-4)


@dataclass
class Bucket:
    """Receives the bytes of a transfer and records the time of the last ones."""

    clock: VirtualClock
    wire_bytes: int = 0
    slices: int = 0
    ended_s: float = -1.0

    def carry(self, wire_bytes: int, last: bool) -> None:
        assert wire_bytes >= 0
        assert self.ended_s < 0
        self.wire_bytes += wire_bytes
        self.slices += 1
        if last:
            self.ended_s = self.clock.now()


SENDS = st.lists(
    st.tuples(
        st.integers(0, 40),
        st.sampled_from(["prefill0", "prefill1"]),
        st.sampled_from(["decode0", "decode1"]),
        st.integers(0, 2_000_000_000),
    ),
    min_size=1,
    max_size=8,
)


@given(SENDS, LATENESS)
@settings(deadline=None, max_examples=30)
def test_transfers_end_at_the_flow_networks_times(
    sends: list[tuple[int, str, str, int]], errors_s: list[float]
) -> None:
    """All scaled bytes arrive; each transfer ends at the time of the fluid model plus the latency, within the clock
    error."""
    clock, bare = VirtualClock(errors_s), FlowNetwork(SMALL.capacity_bytes_per_s)
    fabric = EmulatedFabric(SMALL, clock, kv_scale=1e-3)
    buckets, ends = [Bucket(clock) for _ in sends], dict[int, float]()
    for number, (ms, source, target, kv_bytes) in sorted(enumerate(sends), key=lambda send: send[1][0]):
        pair = SMALL.index(source), SMALL.index(target)
        clock.call(ms / 1000, partial(fabric.send, *pair, kv_bytes, buckets[number]))
        _drain(bare, ends, ms / 1000)
        for shard in range(4):
            path = [group[0] for group in SMALL.hops(*pair, shard)]
            bare.start(4 * number + shard, path, kv_bytes / 4)
    _drain(bare, ends, 1e6)
    clock.run()
    for number, bucket in enumerate(buckets):
        assert bucket.wire_bytes == round(sends[number][3] * 1e-3)
        assert -0.002 <= bucket.ended_s - ends[number] - SMALL.tier_latency_s[1] <= 0.01
    assert fabric.in_flight == 0


def _drain(bare: FlowNetwork, ends: dict[int, float], to: float) -> None:
    while (finish := bare.next_finish()) is not None and finish[0] <= to:
        for flow in bare.advance(finish[0]):
            ends[flow // 4] = finish[0]
    bare.advance(to)


@given(st.lists(st.integers(0, 500), min_size=1, max_size=8, unique=True), st.integers(0, 9))
@settings(deadline=None, max_examples=20)
def test_traced_requests_draw_the_simulators_paths(requests: list[int], seed: int) -> None:
    """Across pods, where uplinks are drawn at random, transfers that start together end at the simulator's times."""
    clock = VirtualClock()
    fabric = EmulatedFabric(PODS, clock, kv_scale=1e-3, seed=seed)
    simulated = sim_network.Fabric(PODS, LinkCapacities(PODS, Background(), seed), seed)
    pair = PODS.index("prefill0"), PODS.index("decode11")
    buckets = {request: Bucket(clock) for request in requests}
    for request, bucket in buckets.items():
        clock.call(0.0, partial(fabric.send, *pair, 1e9, bucket, request))
        simulated.send(request, *pair, 1e9)
    clock.run()
    while (finish_s := simulated.next_finish_s()) < float("inf"):
        for transfer in simulated.advance(finish_s):
            assert buckets[transfer.request].ended_s == pytest.approx(finish_s + transfer.latency_s, abs=1e-3)


def test_a_cancelled_transfer_frees_the_links() -> None:
    """5 GB over 4 x 12.5 GB/s take 100 ms alone; a concurrent transfer that is cancelled at 20 ms adds 10 ms."""
    clock = VirtualClock()
    fabric = EmulatedFabric(SMALL, clock, kv_scale=1e-3)
    source, target = SMALL.index("prefill0"), SMALL.index("decode0")
    bucket, rival = Bucket(clock), Bucket(clock)
    fabric.send(source, target, 5e9, bucket)
    other = fabric.send(source, target, 5e9, rival)
    clock.call(0.02, lambda: fabric.cancel(other))
    clock.run()
    assert bucket.ended_s == pytest.approx(0.110, abs=1e-4)
    assert bucket.slices > 20
    assert 0 < rival.wire_bytes < 0.6e6
    assert rival.ended_s < 0


def test_background_traffic_takes_its_share() -> None:
    """With half of every NIC in use a transfer takes twice as long."""
    ends = []
    for share in (0.0, 0.5):
        clock = VirtualClock()
        fabric = EmulatedFabric(SMALL, clock, kv_scale=1e-3, background=(0.0, share, 0.0, 0.0, 0.0))
        bucket = Bucket(clock)
        fabric.send(SMALL.index("prefill0"), SMALL.index("decode1"), 1e9, bucket)
        clock.run()
        ends.append(bucket.ended_s)
    assert ends == pytest.approx([0.020, 0.040], abs=1e-4)


def test_a_histogram_counts_by_upper_bound() -> None:
    """A value equal to a bound counts in its bucket, a value above all bounds only in +Inf."""
    histogram = DurationHistogram((0.1, 1.0))
    histogram.add(0.1)
    histogram.add(0.5, 2)
    histogram.add(7.0)
    assert histogram.lines("t", 'a="b"')[1:] == [
        't_bucket{a="b",le="0.1"} 1.0',
        't_bucket{a="b",le="1.0"} 3.0',
        't_bucket{a="b",le="+Inf"} 4.0',
        't_count{a="b"} 4.0',
        't_sum{a="b"} 8.1',
    ]
