"""Live: three gateways behind a TCP balancer, 16 emulated engines and Redis; a gateway and Redis are killed."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop
from bench.gateway.program import free_ports
from bench.gateway.replication import Engines, Served, body, engines, gateways, gauge, in_sync, redis
from tests.live.services import extent, required

from kvroute.control import decisions_equal, replay
from kvroute.control.log import read_log
from kvroute.topology import parse
from kvroute.types import PeerReported

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]
REQUESTS, RATE_PER_S = extent(10_000, short=2_400), 40.0
KILL_AT, CUT_AT, RELOAD_AT = REQUESTS // 4, REQUESTS * 9 // 20, REQUESTS * 4 // 5
"""Number of the request before which a gateway is killed, Redis is killed, and all gateways reload."""
CUT_S = 6.0
LIMIT_S = 240.0
"""Time limit for a condition."""


@dataclass
class Balancer:
    """Passes each TCP connection to the next gateway that accepts it."""

    backends: Sequence[tuple[str, int]]
    turn: int = 0
    of: dict[int, int] = field(default_factory=dict)
    """Gateway of each connection, by its local port."""

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        for _ in self.backends:
            self.turn = number = (self.turn + 1) % len(self.backends)
            with contextlib.suppress(OSError):
                there = await asyncio.open_connection(*self.backends[number])
                break
        else:
            writer.close()
            return
        self.of[writer.get_extra_info("peername")[1]] = number
        await asyncio.gather(copied(reader, there[1]), copied(there[0], writer))


async def copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy one direction of a connection to its end."""
    try:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


@contextlib.asynccontextmanager
async def balanced(found: Sequence[Served]) -> AsyncIterator[tuple[Balancer, str]]:
    """Run a balancer in front of the gateways; yield it and its URL."""
    addresses = [gateway.url.removeprefix("http://").rsplit(":", 1) for gateway in found]
    balancer = Balancer([(host, int(port)) for host, port in addresses])
    server = await asyncio.start_server(balancer.connect, "127.0.0.1", 0)
    async with server:
        yield balancer, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@dataclass
class Sent:
    """What the client has received."""

    answered: dict[int, int] = field(default_factory=dict)
    """Number of complete answers of each request."""
    failed: dict[int, int] = field(default_factory=dict)
    """Gateway of each request without an answer; -1 if unknown."""
    problems: list[str] = field(default_factory=list)


async def ask(url: str, balancer: Balancer, number: int, sent: Sent) -> None:
    """Send one request over a connection of its own and read the whole stream."""
    port = -1
    try:
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session,
            session.post(f"{url}/v1/completions", json=body(number)) as response,
        ):
            if response.connection is not None and response.connection.transport is not None:
                port = response.connection.transport.get_extra_info("sockname")[1]
            text = await response.read()
            if response.status == 200 and text.rstrip().endswith(b"data: [DONE]") and b'"error"' not in text:
                sent.answered[number] = sent.answered.get(number, 0) + 1
                return
            sent.problems.append(f"{number}: {response.status} {text[-200:]!r}")
    except aiohttp.ClientError as error:
        sent.problems.append(f"{number}: {error!r}")
    sent.failed[number] = balancer.of.get(port, -1)


async def until(condition: Any, what: str) -> None:
    """Wait until the awaitable condition holds."""
    limit = asyncio.get_running_loop().time() + LIMIT_S
    while not await condition():
        assert asyncio.get_running_loop().time() < limit, what
        await asyncio.sleep(0.1)


async def engine_requests(session: aiohttp.ClientSession, running: Engines) -> float:
    """Requests that the engines themselves count as running or waiting."""
    total = 0.0
    for endpoint in running.endpoints.values():
        async with session.get(f"{endpoint['url']}/metrics") as response:
            for line in (await response.text()).splitlines():
                if line.startswith(("vllm:num_requests_running", "vllm:num_requests_waiting")):
                    total += float(line.rpartition(" ")[2])
    return total


def test_no_request_is_lost_and_no_booking_stays(tmp_path: Path) -> None:
    """Thousands of requests, `kill -9` of a gateway, of Redis, and SIGHUP of all: see the module."""
    required("redis-server", "redis-server")
    uvloop.run(scenario(tmp_path))


async def scenario(folder: Path) -> None:
    """Run the load with its faults, then compare the counts."""
    (port,) = free_ports(1)
    section = {
        "replication": {"redis": f"redis://127.0.0.1:{port}", "lease": "2 s", "flush": "5 ms"},
        "log": {"events": "events.log", "total_size": "10 GB"},
        "policy": "foresight-joint",
    }
    with engines(folder) as running, ExitStack() as servers:
        server = servers.enter_context(redis(folder, port))
        async with AsyncExitStack() as stack:
            found = await stack.enter_async_context(gateways(running, 3, section))
            balancer, url = await stack.enter_async_context(balanced(found))
            session = await stack.enter_async_context(aiohttp.ClientSession())
            await until(lambda: in_sync(session, found), "the gateways are not in sync at the start")
            sent, tasks = Sent(), list[asyncio.Task[None]]()
            started = asyncio.get_running_loop().time()
            dead, living = found[0], found[1:]
            for number in range(REQUESTS):
                await asyncio.sleep(max(started + number / RATE_PER_S - asyncio.get_running_loop().time(), 0.0))
                if number == KILL_AT:
                    dead.program.send_signal(signal.SIGKILL)
                if number == CUT_AT:
                    server.send_signal(signal.SIGKILL)
                if number == CUT_AT + int(CUT_S * RATE_PER_S):
                    server.end()
                    server = servers.enter_context(redis(folder, port))
                if number == RELOAD_AT:
                    for gateway in living:
                        gateway.program.send_signal(signal.SIGHUP)
                tasks.append(asyncio.create_task(ask(url, balancer, number, sent)))
            await asyncio.gather(*tasks)
            lost = {number: gateway for number, gateway in sent.failed.items() if gateway not in (0, -1)}
            assert not lost, (lost, sent.problems[:5])
            # Connections that broke before any response belong to the gateway that was killed, around that time.
            assert all(KILL_AT - 5 * RATE_PER_S <= number <= KILL_AT + RATE_PER_S for number in sent.failed), (
                sent.problems
            )
            assert set(sent.answered.values()) == {1}
            assert len(sent.answered) + len(sent.failed) == REQUESTS
            assert len(sent.failed) < 5 * RATE_PER_S
            await until(lambda: in_sync(session, living), "the gateways are not in sync at the end")

            async def idle() -> bool:
                names = (
                    "kvroute_replication_bookings",
                    "kvroute_requests_in_flight",
                    "kvroute_prefill_pending_seconds",
                )
                ours = [await gauge(session, gateway, name) for gateway in living for name in names]
                return sum(ours) == 0 == await engine_requests(session, running)

            await until(idle, "a booking has stayed")
            for gateway in living:
                assert await gauge(session, gateway, "kvroute_replication_lost_total") >= 1
                assert await gauge(session, gateway, "kvroute_replication_refused_total") == 0
                assert await gauge(session, gateway, "kvroute_reloads_total") == 1
        check_logs(folder)


def check_logs(folder: Path) -> None:
    """Each log, before and after the reload, has events of others and replays bit for bit."""
    logs = sorted(folder.glob("*/events.log*"))
    assert len(logs) >= 5, logs
    for log in logs:
        header, records = read_log(log)
        found = list(records)
        assert any(isinstance(record.event, PeerReported) for record in found)
        again = replay(header.spec.build(parse(header.cluster)), found)
        assert all(decisions_equal(record.decisions, decided) for record, decided in again), log
