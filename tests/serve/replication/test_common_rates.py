"""Rates of a key over two gateways that share a Redis stream, and without the stream."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.serve.replication.redis_rig import RedisServer, in_sync, replicated, section, state
from tests.serve.rig import MODEL, RunningGateway
from tests.serve.stub_engines import run
from tests.waiting import becomes_true

from kvroute.serve.api.api_keys import hash_text

RATES = f"""\
  keys: {{known: {{alice: "{hash_text("kvr_alice")}"}}}}
  classes: {{default: {{requests_per_minute: 6, tokens_per_minute: 1000000}}}}
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """A running server."""
    running = RedisServer(tmp_path)
    running.start()
    yield running
    running.kill()


async def status(gateway: RunningGateway) -> int:
    """Send a request of alice."""
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 1}
    return (await gateway.post(body, headers={"Authorization": "Bearer kvr_alice"})).status


def left(gateway: RunningGateway, bucket: int = 0) -> int:
    """Requests (or tokens, for bucket 1) that a gateway would still serve."""
    return gateway.gateway.runtime.tenancy.limiter.states("alice", gateway.gateway.now())[bucket].remaining


def test_two_gateways_keep_to_one_rate(server: RedisServer) -> None:
    """What one gateway has served counts at the other, also for a key that has never been used there."""

    async def scenario() -> None:
        async with replicated(2, section(server.url) + RATES) as gateways:
            assert await in_sync(gateways)
            first, second = gateways
            assert [await status(first) for _ in range(5)] == [200] * 5
            assert await becomes_true(lambda: left(second) <= 2)
            start = first.gateway.now()
            served = [await status(gateway) for _ in range(3) for gateway in gateways]
            refilled = (first.gateway.now() - start) / 10
            assert served.count(200) <= 3 + refilled, "what is left of a bucket of 6, and one in the delay of a report"

    run(scenario())


def test_without_redis_each_gateway_keeps_to_the_rate_by_itself(server: RedisServer) -> None:
    """No request waits for the server. Each gateway has the whole rate; with the server back, it is one rate again."""

    async def scenario() -> None:
        async with replicated(2, section(server.url, lease="1 s") + RATES) as gateways:
            assert await in_sync(gateways)
            server.kill()
            assert await becomes_true(lambda: all(state(gateway) == "disconnected" for gateway in gateways))
            served = await asyncio.gather(*(status(gateway) for gateway in gateways for _ in range(7)))
            assert served.count(200) >= 12
            server.start()
            assert await in_sync(gateways)
            gateways[0].gateway.runtime.tenancy.limiter.settle("alice", 0, 400_000, gateways[0].gateway.now())
            assert await becomes_true(lambda: left(gateways[1], 1) <= 700_000)

    run(scenario())
