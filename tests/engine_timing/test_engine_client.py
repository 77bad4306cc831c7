"""The calls to an engine, on a server that breaks connections off."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvroute.engine_timing.client import EngineApi
from kvroute.types import InputError


async def broken_off(request: web.BaseRequest) -> web.StreamResponse:
    """Close the connection instead of an answer."""
    assert request.transport is not None
    request.transport.close()
    return web.Response()


@pytest.mark.parametrize(
    "ask", [lambda engine: engine.batch_times_s([[1], [2]], 4), lambda engine: engine.first_tokens_s([[1], [2]])]
)
def test_several_requests_that_fail_raise_one_error(ask: Callable[[EngineApi], Awaitable[Any]]) -> None:
    async def main() -> None:
        runner = web.ServerRunner(web.Server(broken_off))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            async with aiohttp.ClientSession() as session:
                await ask(EngineApi(session, f"http://127.0.0.1:{runner.addresses[0][1]}"))
        finally:
            await runner.cleanup()

    with pytest.raises(InputError, match="does not answer"):
        asyncio.run(main())
