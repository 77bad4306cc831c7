"""A sidecar of a decode instance that orders the prefill from the instance in `x-prefiller-host-port`, with vLLM's
protocol, as llm-d's routing sidecar does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import msgspec
from aiohttp import web

HEADER = "x-prefiller-host-port"
_PULL = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass(slots=True)
class Sidecar:
    """In front of one engine. Requests without the header go to it unchanged."""

    engine: str
    """URL of the decode engine."""
    port: int = 0
    prefillers: list[str] = field(default_factory=list)
    """The instances that have prefilled, in order; empty text: none was named."""

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Order the prefill, if one is named, and relay the engine's response."""
        body = await request.read()
        prefiller = request.headers.get(HEADER, "")
        async with aiohttp.ClientSession() as session:
            if request.method == "POST" and request.path.endswith("completions"):
                self.prefillers.append(prefiller)
                if prefiller:
                    body = await self._prefilled(session, f"http://{prefiller}{request.path}", body)
            async with session.request(
                request.method, self.engine + request.path, data=body, headers={"content-type": "application/json"}
            ) as found:
                response = web.StreamResponse(status=found.status, headers={"content-type": found.content_type})
                await response.prepare(request)
                async for chunk in found.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response

    async def _prefilled(self, session: aiohttp.ClientSession, url: str, body: bytes) -> bytes:
        fields = msgspec.json.decode(body)
        prefill = fields | {"stream": False, "max_tokens": 1, "min_tokens": 1, "kv_transfer_params": _PULL}
        async with session.post(url, json=prefill) as response:
            found = msgspec.json.decode(await response.read())
        return msgspec.json.encode(fields | {"kv_transfer_params": found["kv_transfer_params"]})


@asynccontextmanager
async def sidecar(engine: str) -> AsyncIterator[Sidecar]:
    """Run a sidecar in front of an engine."""
    made = Sidecar(engine)
    runner = web.ServerRunner(web.Server(made.handle, handler_cancellation=True), shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        made.port = int(runner.addresses[0][1])
        yield made
    finally:
        await runner.cleanup()
