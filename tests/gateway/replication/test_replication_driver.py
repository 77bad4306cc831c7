"""The driver of replication: it ends and connects again also if a cancellation is lost, as in Python before 3.12."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tests.control.replica_rig import CLUSTER, SPEC
from tests.waiting import until

from kvroute.control import Control
from kvroute.gateway.observe.metrics import Metrics
from kvroute.gateway.observe.view import GatewayStatus
from kvroute.gateway.replication.driver import Replication
from kvroute.gateway.replication.stream import StreamError
from kvroute.types import Event


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
