"""The admission queue: every waiting request is answered, whatever happens to engines, other clients and the
gateway."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import uvloop
from tests.serve.rig import CLUSTER, COMPLETIONS, MODEL, Rig, rig
from tests.waiting import HANGS_S

from kvroute.http.server.server import HttpServer
from kvroute.serve.observe.admin.state import DashboardState
from kvroute.serve.observe.metrics.metrics import Metrics
from kvroute.serve.observe.view import GatewayStatus
from kvroute.serve.proxy.admission.admission import AdmissionController, AdmissionLimits
from kvroute.serve.proxy.admission.queue import AdmissionQueue
from kvroute.topology import parse

HELD = "  limits: {in_flight: 1, queue: 512}\n  health: {interval: 1 h, panic: 0}\n"


async def _clients(gate: Rig, count: int) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open connections: the first request is served for a long time, the others wait."""
    fields = {"model": MODEL, "prompt": "hi", "max_tokens": 5_000, "ignore_eos": True, "stream": True}
    body = msgspec.json.encode(fields)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    gate.slow(100)
    pairs = []
    for number in range(count):
        pairs.append(await asyncio.open_connection("127.0.0.1", gate.gateway.port))
        pairs[-1][1].write(head + body)
        while _in_and_waiting(gate) <= number:
            await asyncio.sleep(0)
    return pairs


def _in_and_waiting(gate: Rig) -> int:
    load = gate.gateway.state.tick(gate.gateway.now()).load
    return load.in_flight + load.queued


async def _status(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Return the status of the response; empty if there is none."""
    try:
        return (await reader.readline()).split(b" ")[1:2][0]
    except (IndexError, ConnectionError):
        return b""
    finally:
        writer.close()


def test_every_queued_request_is_rejected_if_none_can_be_served() -> None:
    """A rejected request passes its place to the next one, for any length of the queue, without recursion."""

    async def run() -> None:
        async with rig(HELD) as gate:
            (_, first), *waiting = await _clients(gate, 301)
            for name in ("decode0", "decode1"):
                gate.gateway.runtime.engines[name].availability.set_healthy(False, gate.gateway.now())
            first.close()
            async with asyncio.timeout(HANGS_S):
                statuses = [await _status(*pair) for pair in waiting]
            assert statuses == [b"503"] * 300
            assert await gate.becomes_idle(), gate.held_resources()
            for name in ("decode0", "decode1"):
                gate.gateway.runtime.engines[name].availability.set_healthy(True, gate.gateway.now())
            assert (await gate.ask("hi")).status == 200

    uvloop.run(run())


def test_a_client_that_leaves_the_queue_releases_its_place() -> None:
    """The requests behind it are served in time."""

    async def run() -> None:
        async with rig(HELD) as gate:
            (_, first), (_, second), third = await _clients(gate, 3)
            second.close()
            while _in_and_waiting(gate) > 2:
                await asyncio.sleep(0)
            first.close()
            async with asyncio.timeout(HANGS_S):
                assert await _status(*third) == b"200"
            assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(run())


def test_queued_requests_are_rejected_when_the_gateway_closes(caplog: pytest.LogCaptureFixture) -> None:
    """No request is admitted while others are aborted; nothing remains held, and nothing is logged as an error."""

    async def run() -> None:
        async with rig(HELD) as gate:
            clients = await _clients(gate, 6)
            await gate.gateway.close()
            async with asyncio.timeout(HANGS_S):
                statuses = [await _status(*pair) for pair in clients]
            assert statuses[0] in (b"200", b"503")  # depends on its progress
            assert statuses[1:] == [b"503"] * 5
            assert not any(gate.held_resources().values())

    uvloop.run(run())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_an_internal_error_fails_one_request_and_releases_its_place(caplog: pytest.LogCaptureFixture) -> None:
    """If the start of a request raises, queued or not, the next request is admitted."""

    async def run() -> None:
        load = GatewayStatus(in_flight=0, queued=0, connections=0, ready=True, draining=False)
        metrics = Metrics(lambda: load, {}, version="1", policy="netkv")
        state = DashboardState(parse(CLUSTER), lambda: load, policy="netkv", version="1")
        admission = AdmissionController(AdmissionLimits(in_flight=1))
        admission_queue = AdmissionQueue(admission, metrics, state, lambda: 1.0)
        started: list[int] = []

        def start(ticket: int) -> None:
            started.append(ticket)
            if len(started) in (2, 3):
                raise ZeroDivisionError("on purpose")

        server = HttpServer(lambda exchange: admission_queue.submit(exchange, "other", None, start))
        port = await server.listen("127.0.0.1", 0)
        clients = []
        for number in range(4):
            clients.append(await asyncio.open_connection("127.0.0.1", port))
            clients[-1][1].write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            while admission.in_flight + admission.queued <= number:
                await asyncio.sleep(0)
        admission_queue.release(started[0])
        assert [await _status(*client) for client in clients[1:3]] == [b"500", b"500"]
        assert (admission.in_flight, admission.queued, len(started)) == (1, 0, 4)
        clients[0][1].close()
        clients[3][1].close()
        await server.drain(10.0)

    uvloop.run(run())
    assert [record.message for record in caplog.records] == ["request_failed"] * 2
