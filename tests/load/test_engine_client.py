"""The calls to an engine, on a server that breaks connections off."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvroute.load.timing.client import EngineApi
from kvroute.types import InputError


async def broken_off(request: web.BaseRequest) -> web.StreamResponse:
    """Close the connection instead of an answer."""
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def asked(
    handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], ask: Callable[[EngineApi], Awaitable[Any]]
) -> Any:
    """Return what the client returns for a server."""
    runner = web.ServerRunner(web.Server(handler))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with aiohttp.ClientSession() as session:
            return await ask(EngineApi(session, f"http://127.0.0.1:{runner.addresses[0][1]}"))
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    "ask", [lambda engine: engine.batch_times_s([[1], [2]], 4), lambda engine: engine.first_tokens_s([[1], [2]])]
)
def test_several_requests_that_fail_raise_one_error(ask: Callable[[EngineApi], Awaitable[Any]]) -> None:
    with pytest.raises(InputError, match="does not answer"):
        asyncio.run(asked(broken_off, ask))


def test_a_connection_that_an_idle_engine_has_closed_is_replaced() -> None:
    """The request is sent once more, and its time runs from then on."""
    delay_s, calls = 0.3, list[float]()

    async def closed_once(request: web.BaseRequest) -> web.StreamResponse:
        calls.append(asyncio.get_running_loop().time())
        if len(calls) == 2:
            await asyncio.sleep(delay_s)
            return await broken_off(request)
        return web.json_response({"choices": []})

    async def twice(engine: EngineApi) -> float:
        await engine.first_token([1])
        began_s = asyncio.get_running_loop().time()
        found = await engine.first_token([1])
        return asyncio.get_running_loop().time() - began_s - found.seconds

    earlier_s = asyncio.run(asked(closed_once, twice))
    assert len(calls) == 3
    assert earlier_s > delay_s / 2


def test_a_request_is_sent_twice_at_most() -> None:
    calls = list[str]()

    async def never(request: web.BaseRequest) -> web.StreamResponse:
        calls.append(request.path)
        return await broken_off(request)

    with pytest.raises(InputError, match="does not answer"):
        asyncio.run(asked(never, lambda engine: engine.token_times_s([1], 4)))
    assert calls == ["/v1/completions"] * 2
