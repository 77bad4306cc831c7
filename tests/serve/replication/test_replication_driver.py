"""The driver of replication: whatever the server answers and whatever others write, it goes on; it ends and connects
again also if a cancellation is lost, as in Python before 3.12."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest
from tests.control.replica_rig import CLUSTER, SPEC
from tests.serve.replication.faulty_redis import bulk, faulty_redis, listed
from tests.waiting import until

from kvroute.control import Control
from kvroute.serve.config.replication import ReplicationSection
from kvroute.serve.observe.metrics.metrics import Metrics
from kvroute.serve.observe.view import GatewayStatus
from kvroute.serve.replication.driver import Replication
from kvroute.serve.replication.stream import ENTRY_MAX_BYTES, RedisStream, StreamError
from kvroute.types import Event, PeerBooking, PeerReport


class Cores:
    """One core."""

    def __init__(self) -> None:
        self.control = SPEC.build(CLUSTER)

    def cores(self) -> Sequence[Control]:
        return [self.control]

    def notify(self, event: Event) -> None:
        self.control.handle(event)

    def approximate(self) -> frozenset[str]:
        return frozenset()


LIMIT_S = 60.0
"""Time limit of an operation that takes some milliseconds."""


class LosesCancellation:
    """A stream in which a read returns a result at the instant of its first cancellation, in place of it."""

    def __init__(self, *, writes: bool) -> None:
        self.closed, self._writes, self._lost = False, writes, False

    async def open(self) -> str:
        return "0"

    async def append(self, entry: bytes) -> None:
        if not self._writes:
            raise StreamError("no writes")

    async def read(self, after: str) -> list[tuple[str, bytes]]:
        try:
            await asyncio.sleep(0.02)
        except asyncio.CancelledError:
            if self._lost:
                raise
            self._lost = True
        return []

    async def close(self) -> None:
        self.closed = True


def replication(streams: list[LosesCancellation], *, writes: bool) -> Replication:
    """Return a driver that has not started; it adds each of its connections to `streams`."""

    def connect() -> LosesCancellation:
        streams.append(LosesCancellation(writes=writes))
        return streams[-1]

    metrics = Metrics(GatewayStatus, {}, version="1", policy="netkv")
    now = asyncio.get_running_loop().time
    return Replication(connect, Cores(), metrics, now, lease_s=1.0, flush_s=0.001)


def test_it_ends_although_a_read_loses_the_cancellation() -> None:
    async def scenario() -> None:
        streams: list[LosesCancellation] = []
        driver = replication(streams, writes=True)
        driver.start(16)
        await until(lambda: bool(streams))
        await asyncio.sleep(0)
        await driver.close()
        assert streams[-1].closed

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))


def test_it_connects_again_although_a_read_loses_the_cancellation() -> None:
    """A write has failed, and the task that reads does not notice that it was cancelled."""

    async def scenario() -> None:
        streams: list[LosesCancellation] = []
        driver = replication(streams, writes=False)
        driver.start(16)
        await until(lambda: len(streams) >= 3)
        assert streams[0].closed
        assert streams[1].closed
        await driver.close()

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))


ANSWERS = {
    "a deleted item": listed(listed(bulk(b"k"), listed(listed(bulk(b"9-0"), b"*-1\r\n")))),
    "an item without an id": listed(listed(bulk(b"k"), listed(listed(bulk(b"r"))))),
    "an id that is a list": listed(listed(bulk(b"k"), listed(listed(listed(), listed())))),
    "a number": b":7\r\n",
    "a text": b"+hello\r\n",
    "a stream without items": listed(listed(bulk(b"k"))),
    "items that are a text": listed(listed(bulk(b"k"), bulk(b"text"))),
    "fields that are a text": listed(listed(bulk(b"k"), listed(listed(bulk(b"9-0"), bulk(b"text"))))),
    "an odd number of fields": listed(listed(bulk(b"k"), listed(listed(bulk(b"9-0"), listed(bulk(b"r")))))),
    "a field that is a list": listed(listed(bulk(b"k"), listed(listed(bulk(b"9-0"), listed(bulk(b"r"), listed()))))),
    "an error": b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n",
    "no protocol": b"\x00\xffgarbage\r\n",
    "an id beyond ASCII": listed(listed(bulk(b"k"), listed(listed(b"$1\r\n\xff\r\n", listed(bulk(b"r"), bulk(b"v")))))),
}

SKIPPED = ("a deleted item", "an odd number of fields", "a field that is a list")
"""Answers that are items of a stream, without an entry."""


@pytest.mark.parametrize("command", [b"XREAD", b"XREVRANGE"])
@pytest.mark.parametrize("what", ANSWERS)
def test_an_answer_of_another_form_does_not_end_replication(
    what: str, command: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """The driver says once that replication is lost, connects again with growing pauses, and is in sync afterwards."""
    caplog.set_level("INFO", logger="kvroute")

    async def scenario() -> None:
        async with faulty_redis() as server:
            section = ReplicationSection(redis=f"redis://127.0.0.1:{server.port}/0")
            metrics, now = Metrics(GatewayStatus, {}, version="1", policy="netkv"), asyncio.get_running_loop().time
            driver = Replication(lambda: RedisStream(section, "c"), Cores(), metrics, now, lease_s=0.4, flush_s=0.001)
            server.entries.append(b"of another program")
            server.answers[command] = ANSWERS[what]
            driver.start(16)
            await until(lambda: server.faults >= 2)
            server.answers.clear()

            def in_sync() -> bool:
                driver.refresh()
                return driver.load.state == "in_sync" and not driver.load.problem

            await until(in_sync)
            await driver.close()

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
    lost = caplog.messages.count("replication_lost")
    assert lost == caplog.messages.count("replication_restored")
    assert lost == (command == b"XREVRANGE" or what not in SKIPPED)


class Entries:
    """A stream with some entries, after which nothing comes."""

    def __init__(self, *entries: bytes) -> None:
        self.left, self.reads = list(entries), 0

    async def open(self) -> str:
        return "0"

    async def append(self, entry: bytes) -> None:
        pass

    async def read(self, after: str) -> list[tuple[str, bytes]]:
        self.reads += 1
        if self.left:
            return [(str(int(after) + 1), self.left.pop(0))]
        await asyncio.sleep(0.001)
        return []

    async def close(self) -> None:
        pass


def test_entries_that_cannot_be_applied_are_refused_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    """Those of others that follow count, on the same connection."""
    encode = msgspec.msgpack.encode
    huge = PeerBooking(1, "vp0", 1e308, "vd0", 1e308)
    good = PeerBooking(2, "vp0", 1.0, "vd0", 1.0)

    async def scenario() -> None:
        stream = Entries(
            b"",
            b"\x91" * 100_000,
            b"\xda" * (ENTRY_MAX_BYTES + 1),
            encode(PeerReport("other", 1, 1.0, (huge,), whole=True)),
            encode(PeerReport("other", 2, 1.0, (good,), whole=True)),
        )
        metrics, now = Metrics(GatewayStatus, {}, version="1", policy="netkv"), asyncio.get_running_loop().time
        cores, connections = Cores(), list[Entries]()

        def connect() -> Entries:
            connections.append(stream)
            return stream

        driver = Replication(connect, cores, metrics, now, lease_s=30.0, flush_s=0.001)
        driver.start(16)
        await until(lambda: driver.load.bookings == 1)
        assert cores.control.peers.all["other"].bookings == (good,)
        assert len(connections) == 1
        await driver.close()

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
    assert caplog.messages.count("replication_entry_refused") == 4


def test_an_error_of_a_core_does_not_end_replication() -> None:
    """A bug costs one entry."""

    class Faulty(Cores):
        def notify(self, event: Event) -> None:
            if not self.control.peers.all:
                self.control.handle(event)
                raise RuntimeError("a bug")
            self.control.handle(event)

    encode = msgspec.msgpack.encode

    async def scenario() -> None:
        stream = Entries(*[encode(PeerReport(name, 1, 1.0, whole=True)) for name in ("first", "second")])
        metrics, now = Metrics(GatewayStatus, {}, version="1", policy="netkv"), asyncio.get_running_loop().time
        cores = Faulty()
        driver = Replication(lambda: stream, cores, metrics, now, lease_s=30.0, flush_s=0.001)
        driver.start(16)
        await until(lambda: set(cores.control.peers.all) == {"first", "second"})
        await until(lambda: not driver.load.problem)
        await driver.close()

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
