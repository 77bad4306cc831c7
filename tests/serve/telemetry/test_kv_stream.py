"""The stream of KV events: lost batches, replays, restarts and large batches, as a state machine and over ZeroMQ."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
import zmq
import zmq.asyncio
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.serve.telemetry.kv_rig import (
    BLOCK_TOKENS,
    BLOCKS,
    INDEXES,
    Engine,
    batch,
    changes,
    feed,
    removed,
    stored,
)
from tests.waiting import HANGS_S

from kvroute.prefix import PrefixIndex, block_hashes
from kvroute.serve.telemetry.engine_blocks import DEPTH_MAX, SLICE_UNITS, EngineBlocks
from kvroute.serve.telemetry.kv_batch import BATCH_BLOCKS_MAX, BATCH_BYTES_MAX, BATCH_EVENTS_MAX
from kvroute.serve.telemetry.kv_events import KvEvents
from kvroute.serve.telemetry.kv_stream import KvStream
from kvroute.types import Endpoint, Event, InputError, KvCleared, KvEvicted, KvStored


class StreamMachine(RuleBasedStateMachine):
    """Batches reach the stream, or are lost, repeated or repeated in part; engines restart."""

    @initialize(
        per_block=st.sampled_from([1, 2]),
        replays=st.booleans(),
        buffer=st.integers(1, 6),
        slice_units=st.sampled_from([1, 5, SLICE_UNITS]),
    )
    def start(self, per_block: int, replays: bool, buffer: int, slice_units: int) -> None:
        self.engine = Engine(per_block * BLOCK_TOKENS)
        self.buffer_most = buffer
        self.index = PrefixIndex(1)
        self.stream = KvStream("p0", BLOCK_TOKENS, replays=replays, slice_units=slice_units)
        self.sequence = 0
        self.in_flight: list[tuple[int, bytes]] = []
        self.buffer: list[tuple[int, bytes]] = []
        self.replay: list[tuple[int, bytes]] = []
        self.replay_round = 0

    @rule(which=INDEXES, blocks=BLOCKS, root=st.booleans())
    def store(self, which: int, blocks: list[int], root: bool) -> None:
        self.publish(self.engine.store(which, blocks, root))

    @rule(which=INDEXES, count=st.integers(1, 3), more=BLOCKS)
    def remove_and_store(self, which: int, count: int, more: list[int]) -> None:
        self.publish(self.engine.remove(which, count), self.engine.store(which, more, False))

    @rule()
    def clear(self) -> None:
        self.publish(self.engine.clear())

    def publish(self, *events: dict[str, Any]) -> None:
        message = (self.sequence, batch(*events))
        self.sequence += 1
        self.in_flight.append(message)
        self.buffer = [*self.buffer, message][-self.buffer_most :]

    def handle(self, events: list[Event]) -> None:
        """Act as the driver: emit the events and request the replay that the stream requests."""
        feed(self.index, events)
        if self.stream.wanted is None:
            self.replay = []
        elif self.stream.rounds != self.replay_round:
            self.replay_round = self.stream.rounds
            self.replay = [message for message in self.buffer if message[0] >= self.stream.wanted]

    @precondition(lambda self: self.in_flight and not self.stream.pending)
    @rule()
    def deliver(self) -> None:
        self.handle(self.stream.received(0.0, *self.in_flight.pop(0)))

    @precondition(lambda self: self.stream.pending)
    @rule()
    def advance(self) -> None:
        self.handle(self.stream.more(0.0))

    @precondition(lambda self: self.in_flight)
    @rule()
    def lose(self) -> None:
        self.in_flight.pop(0)

    @precondition(lambda self: self.replay and not self.stream.pending)
    @rule()
    def deliver_replay(self) -> None:
        self.handle(self.stream.replayed(0.0, *self.replay.pop(0)))

    @precondition(lambda self: self.replay)
    @rule(number=INDEXES)
    def lose_part_of_replay(self, number: int) -> None:
        self.replay.pop(number % len(self.replay))

    @precondition(lambda self: self.stream.wanted is not None and not self.stream.pending)
    @rule()
    def end_replay(self) -> None:
        self.handle(self.stream.replay_ended(0.0))

    @rule(announced=st.booleans())
    def restart(self, announced: bool) -> None:
        """Start a new process; an external notice announces it, or its first batch shows it."""
        self.engine.clear()
        self.sequence, self.in_flight, self.buffer = 0, [], []
        if announced:
            self.stream.restart()
            self.handle(self.stream.more(0.0))
        else:
            self.publish(self.engine.store(0, [1], True))
            while self.stream.pending:
                self.advance()
            self.deliver()

    def settle(self) -> None:
        """Deliver everything that is in flight."""
        while self.in_flight or self.stream.wanted is not None or self.stream.pending:
            while self.replay and not self.stream.pending:
                self.deliver_replay()
            if self.stream.pending:
                self.advance()
            elif self.stream.wanted is not None:
                self.end_replay()
            elif self.in_flight:
                self.deliver()

    @precondition(lambda self: self.sequence)
    @rule()
    def compare(self) -> None:
        """A batch without content reveals whether earlier ones are missing. Lost blocks may be missing in the index,
        but it never holds blocks that the engine does not hold. If nothing was lost, nothing is missing."""
        self.publish({"type": "SomethingNew", "fields": 1})
        self.settle()
        indexed, reach = self.engine.indexed(self.index), self.engine.within_reach()
        assert indexed <= reach
        if not self.stream.counts.lost:
            assert indexed == reach
            assert self.stream.blocks.counts.orphans == 0


TestStream = StreamMachine.TestCase
TestStream.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def all_of(stream: KvStream, sequence: int, payload: bytes) -> list[Event]:
    """Return all events of a batch, slice by slice."""
    events = stream.received(1.0, sequence, payload)
    while stream.pending:
        events += stream.more(1.0)
    return events


def long_chain(count: int, size: int = BLOCK_TOKENS) -> dict[str, Any]:
    return stored(list(range(1, count + 1)), None, [7] * (count * size), size)


def test_a_large_batch_is_applied_in_slices() -> None:
    """No slice applies more blocks than its limit, and all slices together report the same as a single one."""
    count = 20_000
    stream = KvStream("p0", BLOCK_TOKENS, replays=False)
    events, known, most = stream.received(1.0, 0, batch(long_chain(count))), 0, 0
    while stream.pending:
        most, known = max(most, len(stream.blocks) - known), len(stream.blocks)
        events += stream.more(1.0)
    assert events == [KvStored(1.0, "p0", block_hashes([7] * (count * BLOCK_TOKENS), BLOCK_TOKENS), BLOCK_TOKENS)]
    assert 0 < most < 2000
    evicted = all_of(stream, 1, batch(removed(list(range(1, count + 1)))))
    assert [type(event) for event in evicted] == [KvEvicted]
    assert len(stream.blocks) == 0


def test_a_clear_during_a_large_batch_removes_all_of_it() -> None:
    """The engine is cleared while the batch is applied or while its events are reported."""
    events = [stored([n], None, [n, n], 2) for n in range(1, 3000)]
    for slices in (0, 1, 2, 5, 10):
        stream, index = KvStream("p0", BLOCK_TOKENS, replays=False), PrefixIndex(1)
        feed(index, stream.received(1.0, 0, batch(*events)))
        for _ in range(slices):
            feed(index, stream.more(1.0))
        stream.restart()
        feed(index, all_of(stream, 0, batch(stored([1], None, [1, 2], 2))))
        assert index.used_blocks(0) == 1


@pytest.mark.parametrize(
    "payload",
    [
        batch(long_chain(BATCH_BLOCKS_MAX // 2), long_chain(BATCH_BLOCKS_MAX // 2 + 1)),
        batch(*[{"type": "SomethingNew"}] * (BATCH_EVENTS_MAX + 1)),
        batch(stored([1], None, [1, 2], 2, extra_keys=["x" * BATCH_BYTES_MAX])),
        b"\x92\x00\x91" + b"\x91" * 100_000 + b"\x00",
    ],
    ids=["blocks", "events", "bytes", "depth"],
)
def test_a_batch_beyond_its_limits_is_rejected_and_clears_the_engine(payload: bytes) -> None:
    """The batch may have contained a removal, so all blocks of the engine are dropped. Later batches are accepted
    again."""
    stream = KvStream("p0", BLOCK_TOKENS, replays=False)
    assert len(all_of(stream, 0, batch(stored([1], None, [1, 2], 2)))) == 1
    assert all_of(stream, 1, payload) == [KvCleared(1.0, "p0")]
    assert stream.counts.broken == 1
    assert stream.why_broken
    assert len(all_of(stream, 2, batch(stored([1], None, [1, 2], 2)))) == 1


def test_batches_waiting_for_a_replay_take_bounded_memory() -> None:
    """At the bound the replay counts as lost, and the stream continues with the newest batch."""
    stream = KvStream("p0", BLOCK_TOKENS, replays=True)
    assert len(all_of(stream, 0, batch(stored([1], None, [1, 2], 2)))) == 1
    padded = batch(stored([2], None, [1, 2], 2, extra_keys=["x" * (BATCH_BYTES_MAX // 2)]))
    events: list[Event] = []
    held = 0
    while not events:
        held += 1
        assert held * len(padded) <= 65 << 20
        assert stream.counts.lost == 0
        events = all_of(stream, 1 + held, padded)
    assert events == [KvCleared(1.0, "p0")]
    assert stream.wanted is None
    assert len(all_of(stream, 2 + held, batch(stored([1], None, [1, 2], 2)))) == 1
    assert (stream.counts.gaps, stream.counts.lost, stream.why_broken) == (1, 1, "")


def test_chains_are_indexed_up_to_a_maximum_depth() -> None:
    """The cost of reporting a block grows with its depth, however small the batch is."""
    size = 4096
    blocks = EngineBlocks("p0", BLOCK_TOKENS)
    engine_blocks = DEPTH_MAX * BLOCK_TOKENS // size
    (stored_event,) = changes(blocks, long_chain(engine_blocks + 3, size))
    assert isinstance(stored_event, KvStored)
    assert len(stored_event.blocks) == DEPTH_MAX
    assert blocks.counts.foreign == 3
    assert changes(blocks, stored([10**6], engine_blocks, [1] * size, size)) == []


class Publisher:
    """The sockets of vLLM's publisher: PUB for live batches, ROUTER for replays."""

    def __init__(self, context: zmq.asyncio.Context, *, replies: bool = True) -> None:
        self.live = context.socket(zmq.XPUB)
        self.replay = context.socket(zmq.ROUTER)
        self.events_url = f"tcp://127.0.0.1:{self.live.bind_to_random_port('tcp://127.0.0.1')}"
        self.replay_url = f"tcp://127.0.0.1:{self.replay.bind_to_random_port('tcp://127.0.0.1')}"
        self.sent: list[bytes] = []
        self.replies = replies

    async def subscribed(self) -> None:
        assert await self.live.recv() == b"\x01"

    def record(self, *events: dict[str, Any]) -> tuple[bytes, bytes, bytes]:
        """Put a batch into the replay buffer only: its live message is lost."""
        self.sent.append(batch(*events))
        return b"kv@tiny", (len(self.sent) - 1).to_bytes(8, "big"), self.sent[-1]

    async def publish(self, *events: dict[str, Any]) -> None:
        await self.live.send_multipart(self.record(*events))

    async def serve_replay(self) -> int:
        """Answer one replay request; return the sequence number that it requests."""
        client, empty, first = await self.replay.recv_multipart()
        assert empty == b""
        start = int.from_bytes(first, "big")
        if self.replies:
            for number, payload in enumerate(self.sent[start:], start):
                await self.replay.send_multipart([client, b"", b"kv@tiny", number.to_bytes(8, "big"), payload])
            await self.replay.send_multipart([client, b"", b"kv@tiny", b"\xff" * 8, b""])
        return start

    def close(self) -> None:
        self.live.close(linger=0)
        self.replay.close(linger=0)


class Listener:
    """Collects the emitted events and waits for more."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.batches: Counter[str] = Counter()
        self.gaps: Counter[str] = Counter()
        self._more = asyncio.Event()

    def emit(self, event: Event) -> None:
        self.events.append(event)
        self._more.set()

    def count(self, instance: str, batches: int, gaps: int) -> None:
        self.batches[instance] += batches
        self.gaps[instance] += gaps

    async def until(self, count: int) -> list[Event]:
        while len(self.events) < count:
            self._more.clear()
            await self._more.wait()
        return self.events


@asynccontextmanager
async def connected(
    *, replays: bool = True, replies: bool = True, replay_s: float = 30.0
) -> AsyncIterator[tuple[Publisher, KvEvents, Listener]]:
    context = zmq.asyncio.Context()
    publisher = Publisher(context, replies=replies)
    endpoint = Endpoint(
        url="http://127.0.0.1:1",
        kv_events=publisher.events_url,
        kv_replay=publisher.replay_url if replays else "",
    )
    listener = Listener()
    silent = Endpoint(url="http://127.0.0.1:2")
    source = KvEvents(
        {"p0": endpoint, "d0": silent},
        BLOCK_TOKENS,
        listener.emit,
        lambda: 5.0,
        replay_s=replay_s,
        count=listener.count,
    )
    try:
        source.start()
        await publisher.subscribed()
        yield publisher, source, listener
    finally:
        source.close()
        publisher.close()
        context.term()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(HANGS_S):
            await scenario()

    uvloop.run(bounded())


FIRST = stored([1], None, [1, 2], 2)
SECOND = stored([2], 1, [3, 4], 2)
THIRD = stored([3], 2, [5, 6], 2)


def chain(length: int) -> KvStored:
    return KvStored(5.0, "p0", block_hashes(list(range(1, 2 * length + 1)), BLOCK_TOKENS), BLOCK_TOKENS)


def test_live_batches_arrive_and_lost_ones_are_requested() -> None:
    """The second batch is lost; the third one reveals the gap and waits for the replay."""

    async def scenario() -> None:
        async with connected() as (publisher, source, listener):
            await publisher.publish(FIRST)
            assert await listener.until(1) == [chain(1)]
            publisher.record(SECOND)
            await publisher.publish(THIRD)
            assert await publisher.serve_replay() == 1
            await listener.until(3)
            assert listener.events == [chain(1), chain(2), chain(3)]
            stream, blocks = source.counts()["p0"]
            assert (stream.gaps, stream.lost, blocks.orphans) == (1, 0, 0)
            await publisher.publish(removed([2, 3]))
            assert (await listener.until(4))[3] == KvEvicted(5.0, "p0", chain(2).blocks, 1)
        assert (listener.batches, listener.gaps) == ({"p0": 4}, {"p0": 1})

    run(scenario)


def test_other_tasks_run_while_a_large_batch_is_applied() -> None:
    """The next batch of the engine waits and is applied in order."""

    async def scenario() -> None:
        async with connected(replays=False) as (publisher, source, listener):
            batches: set[int] = set()
            await publisher.publish(*[stored([n], None, [n, n], 2) for n in range(1, 5001)])
            await publisher.publish(removed(list(range(2, 5001))))
            while len(listener.events) < 5000 + 4999:
                batches.add(source.counts()["p0"][1].stored)
                await asyncio.sleep(0)
            assert len(batches) >= 5000 * 6 // SLICE_UNITS
            kinds = [type(event) for event in listener.events]
            assert kinds == [KvStored] * 5000 + [KvEvicted] * 4999

    run(scenario)


def test_a_gateway_that_starts_later_gets_the_blocks_by_a_replay() -> None:
    async def scenario() -> None:
        async with connected() as (publisher, _, listener):
            publisher.record(FIRST)
            await publisher.publish(SECOND)
            assert await publisher.serve_replay() == 0
            assert (await listener.until(2))[-1] == chain(2)

    run(scenario)


@pytest.mark.parametrize("replays", [True, False], ids=["silent-replay", "no-replay"])
def test_batches_lost_for_good_clear_the_engine(replays: bool) -> None:
    """If there is no replay in time, or no replay socket, the view restarts with the received batch."""

    async def scenario() -> None:
        async with connected(replays=replays, replies=False, replay_s=0.05) as (publisher, source, listener):
            await publisher.publish(FIRST)
            await listener.until(1)
            publisher.record(SECOND)
            await publisher.publish(stored([9], None, [1, 2], 2))
            assert (await listener.until(3))[1:] == [KvCleared(5.0, "p0"), chain(1)]
            assert source.counts()["p0"][0].lost == 1

    run(scenario)


def test_a_new_engine_process_starts_with_an_empty_view() -> None:
    """The sequence numbers reveal a new process, or the scraper reports a changed start time."""

    async def scenario() -> None:
        async with connected() as (publisher, source, listener):
            await publisher.publish(FIRST)
            await publisher.publish(SECOND)
            await listener.until(2)
            publisher.sent.clear()
            await publisher.publish(FIRST)
            assert (await listener.until(4))[2:] == [KvCleared(5.0, "p0"), chain(1)]
            assert source.restarted("p0", 1763.0)
            assert not source.restarted("d0", 1763.0)
            assert len(listener.events) == 4
            assert source.restarted("p0", 1764.0)
            assert listener.events[4:] == [KvCleared(5.0, "p0")]

    run(scenario)


def test_an_invalid_endpoint_is_reported() -> None:
    async def scenario() -> None:
        endpoint = Endpoint(url="http://127.0.0.1:1", kv_events="tcp://*:5557")
        source = KvEvents({"p0": endpoint}, BLOCK_TOKENS, lambda event: None, lambda: 0.0)
        with pytest.raises(InputError, match=r"instance p0: cannot connect to 'tcp://\*:5557'"):
            source.start()

    run(scenario)
