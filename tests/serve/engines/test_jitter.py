"""Jitter: the drawn numbers lengthen the open time of a breaker and the interval of health checks a little."""

from __future__ import annotations

import asyncio
import random
import time

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from kvroute.http.client.poller import PollSpec
from kvroute.http.client.pool import UpstreamPool
from kvroute.serve.engines.breaker import Breaker
from kvroute.serve.engines.health import HealthChecks


@given(st.floats(0, 1), st.integers(0, 2**32), st.integers(1, 6))
def test_the_open_time_of_a_breaker_lies_between_its_base_and_base_plus_jitter(
    jitter: float, seed: int, probes: int
) -> None:
    """The bounds hold for each doubling of the open time too; the same seed gives the same times."""

    def times() -> list[float]:
        breaker = Breaker(failures=1, open_s=4.0, open_max_s=20.0, jitter=jitter, draw=random.Random(seed).random)
        now, durations_s = 0.0, []
        breaker.failed(breaker.started(now), now)
        for _ in range(probes):
            until = breaker.refuses_until(now)
            assert until is not None
            durations_s.append(until - now)
            now = until
            breaker.failed(breaker.started(now), now)
        return durations_s

    durations_s = times()
    for number, seconds in enumerate(durations_s):
        plain_s = min(4.0 * 2**number, 20.0)
        assert plain_s - 1e-9 <= seconds <= plain_s * (1 + jitter) + 1e-9
    assert times() == pytest.approx(durations_s, abs=0)


def test_the_health_check_interval_is_extended_by_the_drawn_jitter() -> None:
    """The first round ends after the interval, each later one after twice the interval."""

    async def scenario() -> None:
        interval_s, requests = 0.05, 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal requests
            try:
                while await reader.readuntil(b"\r\n\r\n"):
                    requests += 1
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        pool = UpstreamPool(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        checks = HealthChecks(
            ["a"],
            {"a": pool}.get,
            lambda *_: None,
            time.monotonic,
            PollSpec(path="/health", interval_s=interval_s, timeout_s=30.0, jitter=1.0, draw=lambda: 1.0),
        )
        started_s = time.monotonic()
        checks.start()
        while requests < 6:
            await asyncio.sleep(0.001)
        assert time.monotonic() - started_s >= interval_s * (1 + 4 * 2) - 0.01
        checks.close()
        pool.close()
        server.close()

    async def bounded() -> None:
        async with asyncio.timeout(120):
            await scenario()

    uvloop.run(bounded())
