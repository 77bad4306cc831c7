"""Gateways that share a Redis stream: foreign load in the view, the loss of a gateway, of Redis, and a reload."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from tests.serve.replication.redis_rig import RedisServer, in_sync, replicated, section, state
from tests.serve.rig import CLUSTER, MODEL, RunningGateway
from tests.serve.stub_engines import run
from tests.waiting import becomes_true

from kvroute.control import decisions_equal, replay
from kvroute.control.log import read_log
from kvroute.serve.assembly import Deployment
from kvroute.topology import parse
from kvroute.types import PeerReported


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """A running server."""
    running = RedisServer(tmp_path)
    running.start()
    yield running
    running.kill()


def slots(gateway: RunningGateway) -> int:
    """Requests that a gateway counts on all instances: its own and those of other gateways, but not those that engines
    report beyond them."""
    view = gateway.gateway.runtime.control.parts.view
    waiting = sum(int(pool.assigned.sum()) for pool in view.prefill.values())
    takers = view.decode.values()
    others = sum(int((pool.others_queued + pool.others_batch).sum()) for pool in takers)
    return waiting + sum(int((pool.queued + pool.batch).sum()) for pool in takers) - others


def test_each_gateway_counts_the_requests_of_the_other(server: RedisServer) -> None:
    """A request that runs through one gateway is booked at both while it runs, and at neither afterwards."""

    async def scenario() -> None:
        async with replicated(2, section(server.url)) as gateways:
            first, second = gateways
            assert await in_sync(gateways)
            asking = asyncio.ensure_future(first.ask(tokens=2_000))
            assert await becomes_true(lambda: slots(second) == 1)
            assert second.gateway.runtime.control.in_flight == 0
            assert (await asking).status == 200
            assert await becomes_true(lambda: slots(first) == slots(second) == 0)
            page = await second.metrics()
            assert 'kvroute_replication_state{state="in_sync"} 1' in page
            assert "kvroute_replication_gateways 1" in page
            assert 'kvroute_replication_entries_total{direction="read"}' in page

    run(scenario())


def test_prefixes_found_by_one_gateway_are_used_by_the_other(server: RedisServer) -> None:
    """Engines without KV events: what one gateway has sent there is known to the other, and to one that joins."""

    async def scenario() -> None:
        async with replicated(2, section(server.url) + "  prefix: approximate\n") as gateways:
            assert await in_sync(gateways)
            assert (await gateways[0].ask()).status == 200
            caches = gateways[1].gateway.runtime.control.caches
            cluster = gateways[1].gateway.runtime.cluster
            indices = range(len(cluster.instances))
            assert await becomes_true(lambda: any(list(caches.chains(index)) for index in indices))

    run(scenario())


def test_a_gateway_that_vanishes_leaves_no_booking(server: RedisServer) -> None:
    """The bookings of a gateway that stops without a word are released after its lease."""

    async def scenario() -> None:
        async with replicated(2, section(server.url)) as gateways:
            first, second = gateways
            assert await in_sync(gateways)
            asking = asyncio.ensure_future(first.ask(tokens=10_000))
            assert await becomes_true(lambda: slots(second) == 1)
            assert first.gateway.replication is not None
            await first.gateway.replication.close()
            assert await becomes_true(lambda: slots(second) == 0)
            assert "kvroute_replication_lost_total 1" in await second.metrics()
            asking.cancel()

    run(scenario())


def test_gateways_go_on_without_redis_and_are_in_sync_after_its_return(server: RedisServer) -> None:
    """Requests succeed while the server is away; metrics say so; afterwards the views are equal again."""

    async def scenario() -> None:
        async with replicated(2, section(server.url)) as gateways:
            assert await in_sync(gateways)
            server.kill()
            assert await becomes_true(
                lambda: [state(gateway) for gateway in gateways] == ["disconnected", "disconnected"]
            )
            assert [(await gateway.ask()).status for gateway in gateways] == [200, 200]
            page = await gateways[0].metrics()
            assert all(f'kvroute_replication_state{{state="{name}"}} 1' in page for name in ("disconnected", "alone"))
            server.start()
            assert await in_sync(gateways)
            asking = asyncio.ensure_future(gateways[0].ask(tokens=2_000))
            assert await becomes_true(lambda: slots(gateways[1]) == 1)
            assert (await asking).status == 200

    run(scenario())


def test_a_reload_keeps_the_bookings_of_others_and_the_log_replays(server: RedisServer, tmp_path: Path) -> None:
    """After a reload the new core knows the others' requests at once, from events in its own log."""

    async def scenario() -> None:
        log = tmp_path / "events.log"
        more = section(server.url) + f"  log: {{events: '{log}'}}\n"
        async with replicated(2, section(server.url)) as gateways:
            first = gateways[0]
            engines = first.gateway.runtime.engines.items()
            endpoints = {name: engine.instance.endpoint for name, engine in engines if engine.instance.endpoint}
            assert await in_sync(gateways)
            asking = asyncio.ensure_future(gateways[1].ask(tokens=3_000))
            assert await becomes_true(lambda: slots(first) == 1)
            assert await first.gateway.reload(lambda: Deployment.of(CLUSTER + more, "test.yaml", endpoints=endpoints))
            assert slots(first) == 1
            assert (await first.ask()).status == 200
            assert (await asking).status == 200
            assert await becomes_true(lambda: slots(first) == slots(gateways[1]) == 0)
        header, records = read_log(log)
        found = list(records)
        assert any(isinstance(record.event, PeerReported) for record in found)
        again = replay(header.spec.build(parse(header.cluster)), found)
        assert all(decisions_equal(record.decisions, decided) for record, decided in again)

    run(scenario())


def test_damaged_entries_are_counted_and_skipped(server: RedisServer) -> None:
    """An entry that another program wrote changes nothing."""

    async def scenario() -> None:
        from redis.asyncio import Redis

        async with replicated(2, section(server.url)) as gateways, Redis.from_url(server.url) as client:
            assert await in_sync(gateways)
            await client.xadd("kvroute:test:gateways", {b"r": b"\x81garbage"})
            await client.xadd("kvroute:test:gateways", {b"other": b"1"})
            assert await becomes_true(lambda: state(gateways[0]) == "in_sync")
            asking = asyncio.ensure_future(gateways[0].ask(tokens=2_000))
            assert await becomes_true(lambda: slots(gateways[1]) == 1)
            assert (await asking).status == 200
            assert "kvroute_replication_refused_total 2" in await gateways[1].metrics()

    run(scenario())


def test_a_wrong_password_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway serves alone and says why; with the right password it joins."""

    async def scenario() -> None:
        server = RedisServer(tmp_path, "--requirepass", "correct-password")
        server.start()
        try:
            more = section(server.url).replace("flush:", "password_env: TEST_REDIS_PASSWORD, flush:")
            monkeypatch.setenv("TEST_REDIS_PASSWORD", "wrong-password")
            async with replicated(1, more) as (gateway,):
                shared = gateway.gateway.replication
                assert shared is not None
                assert await becomes_true(lambda: "password" in shared.load.problem)
                assert (await gateway.ask()).status == 200
                monkeypatch.setenv("TEST_REDIS_PASSWORD", "correct-password")
                assert await in_sync([gateway])
                assert shared.load.problem == ""
        finally:
            server.kill()

    run(scenario())


def test_limits_hold_over_all_gateways(server: RedisServer) -> None:
    """A request at one gateway takes the room at the other; it is there again after its end."""
    limits = "  limits: {in_flight: 1, queue: 0}\n"

    async def scenario() -> None:
        async with replicated(2, section(server.url) + limits) as gateways:
            first, second = gateways
            admission = second.gateway._admission
            assert await in_sync(gateways)
            asking = asyncio.ensure_future(first.ask(tokens=2_000))
            assert await becomes_true(lambda: admission._peers.in_flight == 1)
            refused = await second.ask()
            assert refused.status == 503
            assert "the gateway is full" in refused.json["error"]["message"]
            assert (await asking).status == 200
            assert await becomes_true(lambda: admission._peers.in_flight == 0)
            assert (await second.ask()).status == 200

    run(scenario())


def test_a_key_is_limited_over_all_gateways_and_waiting_requests_get_the_room_of_others(server: RedisServer) -> None:
    """The second gateway lets its waiting request in when the first one's ends, and not before."""
    key = "kvr_" + "a" * 43
    hashed = "sha256:" + sha256(key.encode()).hexdigest()
    limits = f"  keys: {{known: {{alice: '{hashed}'}}}}\n  limits: {{in_flight: 1, queue: 4, per_key: 2}}\n"
    headers = {"authorization": f"Bearer {key}"}
    long, short = (
        {"model": MODEL, "prompt": "Hello", "max_tokens": tokens, "ignore_eos": True} for tokens in (2_000, 4)
    )

    async def scenario() -> None:
        async with replicated(2, section(server.url) + limits) as gateways:
            first, second = gateways
            assert await in_sync(gateways)
            peers = second.gateway._admission._peers
            asking = asyncio.ensure_future(first.post(long, headers=headers))
            assert await becomes_true(lambda: peers.held_by("alice") == 1)
            waiting = asyncio.ensure_future(second.post(short, headers=headers))
            assert await becomes_true(lambda: first.gateway._admission._peers.held_by("alice") == 1)
            assert second.gateway._admission.queued == 1
            refused = await first.post(short, headers=headers)
            assert refused.status == 429
            assert "this key has 2 requests" in refused.json["error"]["message"]
            assert [(await task).status for task in (asking, waiting)] == [200, 200]
            assert await becomes_true(lambda: peers.held_by("alice") == 0)

    run(scenario())


def test_each_gateway_has_its_own_limits_if_it_is_told_so(server: RedisServer) -> None:
    own = (
        section(server.url).replace("flush: 2 ms", "flush: 2 ms, limits: own") + "  limits: {in_flight: 1, queue: 0}\n"
    )

    async def scenario() -> None:
        async with replicated(2, own) as gateways:
            assert await in_sync(gateways)
            asking = asyncio.ensure_future(gateways[0].ask(tokens=2_000))
            assert await becomes_true(lambda: slots(gateways[1]) == 1)
            assert (await gateways[1].ask()).status == 200
            assert (await asking).status == 200

    run(scenario())


def test_the_requests_of_a_lost_gateway_do_not_count(server: RedisServer) -> None:
    """After its lease the others have the room again."""
    limits = "  limits: {in_flight: 1, queue: 0}\n"

    async def scenario() -> None:
        async with replicated(2, section(server.url, lease="1 s") + limits) as gateways:
            first, second = gateways
            assert await in_sync(gateways)
            asking = asyncio.ensure_future(first.ask(tokens=20_000))
            assert await becomes_true(lambda: second.gateway._admission._peers.in_flight == 1)
            replication = first.gateway.replication
            assert replication is not None
            await replication.close()
            assert await becomes_true(lambda: second.gateway._admission._peers.in_flight == 0)
            assert (await second.ask()).status == 200
            asking.cancel()

    run(scenario())
