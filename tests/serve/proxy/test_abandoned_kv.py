"""Clients that leave while a KV cache is on its way: no prefill engine keeps it until it expires."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.serve.rig import RunningGateway
from tests.serve.stub_engines import (
    Engine,
    Gate,
    ReceivedRequest,
    completion,
    engines_of,
    event,
    failing,
    run,
    start_stream,
    stub_rig,
    tokens,
)
from tests.waiting import becomes_true

from kvroute.types import KvProtocol

PROTOCOLS: list[KvProtocol] = ["vllm", "mooncake"]
RARE_CHECKS = "  health: {interval: 1 h}\n  scrape: {interval: 1 h}\n"


@asynccontextmanager
async def client_that_leaves(front: RunningGateway, at: Gate, **fields: Any) -> AsyncIterator[None]:
    """Send a request, and close its connection once an engine waits at the gate; the gateway knows it in the body."""
    request = asyncio.create_task(front.post(completion(**fields)))
    await at.entered.wait()
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    assert await becomes_true(lambda: left(front) == 1)
    yield
    assert await front.becomes_idle(), front.held_resources()


def reset(response: aiohttp.ClientResponse) -> None:
    """Let the connection end with a reset, so that the gateway cannot take it for a half-closed one."""
    assert response.connection is not None
    assert response.connection.transport is not None
    own = response.connection.transport.get_extra_info("socket")
    own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def left(front: RunningGateway) -> float:
    """Return the number of clients that have left."""
    return counted(front, "kvroute_client_disconnects_total")


def counted(front: RunningGateway, sample: str) -> float:
    """Return a sample of the gateway's metrics; 0.0 if there is none."""
    lines = "".join(front.gateway.metrics.page()[1]).splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{sample} ")), 0.0)


def outcomes(front: RunningGateway) -> tuple[float, float]:
    """Return how many KV caches were fetched, and how many were lost, after their clients had left."""
    fetched, lost = (f'kvroute_abandoned_kv_total{{outcome="{word}"}}' for word in ("fetched", "lost"))
    return counted(front, fetched), counted(front, lost)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_kv_of_a_prefill_in_progress_is_fetched(protocol: KvProtocol, streams: bool) -> None:
    """A decode engine gets a request for one token, without a stream, and the prefill engine can release its blocks."""

    async def main() -> None:
        gate = Gate()
        prefill, decode = engines_of(protocol)
        for engine in prefill:
            engine.serve = gate.before(tokens)
        async with stub_rig(prefill + decode, RARE_CHECKS) as front:
            async with client_that_leaves(front, gate, stream=streams, max_tokens=500):
                assert not gate.cancelled
                assert front.held_resources()["core"] == 1
                gate.open.set()
            ((body,),) = [[request.json for request in engine.received] for engine in decode if engine.received]
            assert (body["max_tokens"], body["stream"]) == (1, False)
            assert body["kv_transfer_params"]["do_remote_prefill"] is True
            assert outcomes(front) == (1, 0)
            assert counted(front, 'kvroute_requests_total{endpoint="completions",code="499"}') == 1
            assert counted(front, "kvroute_rejects_total") == 0

    run(main())


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_a_decode_goes_on_until_its_transfer_is_over(streams: bool) -> None:
    """The first token of a stream shows it; of other responses it is predicted. Then the decode is aborted."""

    async def main() -> None:
        gate, endless = Gate(), Gate()

        async def decodes(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
            gate.entered.set()
            if not streams:
                await endless.wait()
                return await tokens(engine, request, received)
            await gate.open.wait()
            response = await start_stream(request)
            await response.write(event("a"))
            await endless.wait()
            return response

        prefill, decode = engines_of("vllm")
        for engine in decode:
            engine.serve = decodes
        async with stub_rig(prefill + decode, RARE_CHECKS) as front:
            async with client_that_leaves(front, gate, stream=streams, max_tokens=500):
                assert not endless.cancelled
                assert front.held_resources()["calls"] == 1
                gate.open.set()
            await endless.left.wait()
            assert endless.cancelled
            assert outcomes(front) == (1, 0)
            assert counted(front, "kvroute_ttft_seconds_count") == 0

    run(main())


def test_a_decode_after_its_first_token_is_aborted_at_once() -> None:
    """Its engine has the KV cache already."""

    async def main() -> None:
        gate = Gate()

        async def decodes(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
            response = await start_stream(request)
            await response.write(event("a"))
            await gate.wait()
            return response

        prefill, decode = engines_of("vllm")
        for engine in decode:
            engine.serve = decodes
        async with stub_rig(prefill + decode, RARE_CHECKS) as front:
            async with front.session.post(f"{front.url}/v1/completions", json=completion(stream=True)) as response:
                await response.content.readline()
                reset(response)
            await gate.left.wait()
            assert gate.cancelled
            assert await front.becomes_idle(), front.held_resources()
            assert outcomes(front) == (0, 0)

    run(main())


def test_a_prefill_far_from_its_end_is_aborted_at_once() -> None:
    """An engine releases the blocks of a prompt that it has not finished."""

    async def main() -> None:
        gate = Gate()
        prefill, decode = engines_of("vllm")
        for engine in prefill:
            engine.serve = gate.before(tokens)
        async with stub_rig(prefill + decode, RARE_CHECKS) as front:
            pool = front.gateway.runtime.control.parts.view.prefill["llama-3-70b"]
            for position in range(2):
                pool.book(position, front.gateway.now(), 60.0)
            async with client_that_leaves(front, gate):
                await gate.left.wait()
                assert gate.cancelled
                for position in range(2):
                    pool.release(position, front.gateway.now(), 60.0)
            assert not any(engine.received for engine in decode)
            assert outcomes(front) == (0, 0)

    run(main())


def test_the_time_limit() -> None:
    """A prefill that takes longer than predicted is aborted; with a limit of 0 s every one is, at once."""

    async def main() -> None:
        for limit, expected in (("500 ms", (0, 1)), ("0 s", (0, 0))):
            gate = Gate()
            prefill, decode = engines_of("vllm")
            for engine in prefill:
                engine.serve = gate.before(tokens)
            async with stub_rig(prefill + decode, f"{RARE_CHECKS}  timeouts: {{abandoned: {limit}}}\n") as front:
                async with client_that_leaves(front, gate):
                    await gate.left.wait()
                    assert gate.cancelled
                assert outcomes(front) == expected

    run(main())


def test_legs_that_start_together_are_aborted_together() -> None:
    """SGLang's engines end the transfer of a request that either of them aborts."""

    async def main() -> None:
        gate = Gate()
        prefill, decode = engines_of("sglang")
        for engine in prefill + decode:
            engine.serve = gate.before(tokens)
        async with stub_rig(prefill + decode, RARE_CHECKS) as front:
            async with client_that_leaves(front, gate):
                await gate.left.wait()
                assert gate.cancelled
            assert outcomes(front) == (0, 0)

    run(main())


def test_nothing_is_retried_for_a_client_that_has_left() -> None:
    """If the prefill or the decode fails then, the request ends."""

    async def main() -> None:
        for failed in ("prefill", "decode"):
            gate = Gate()
            prefill, decode = engines_of("vllm")
            for engine in prefill:
                engine.serve = gate.before(failing(500) if failed == "prefill" else tokens)
            for engine in decode:
                engine.serve = failing(500)
            async with stub_rig(prefill + decode, RARE_CHECKS) as front:
                async with client_that_leaves(front, gate):
                    gate.open.set()
                assert sum(len(engine.received) for engine in prefill) == 1
                assert sum(len(engine.received) for engine in decode) == (failed == "decode")
                assert outcomes(front) == (0, 1)

    run(main())
