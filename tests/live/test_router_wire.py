"""Live: engines receive the same legs from kvroute as from sglang-router and vllm-router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from bench.measurement import Failed
from bench.peers.routers import sglang_router, vllm_router
from tests.live.services import free_port, missing
from tests.serve.rig import COMPLETIONS, MODEL
from tests.serve.stub_engines import (
    Engine,
    ReceivedRequest,
    completion,
    deployment,
    listening,
    run,
    serving,
    tokens,
)

from kvroute.types import KvProtocol

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]
CHAT = "/v1/chat/completions"
DEFAULTS: dict[str, Any] = {
    "continue_final_message": False,
    "echo": False,
    "ignore_eos": False,
    "include_reasoning": True,
    "logprobs": False,
    "no_stop_trim": False,
    "return_hidden_states": False,
    "separate_reasoning": True,
    "skip_special_tokens": True,
    "stream": False,
    "stream_reasoning": True,
}
"""Fields that the routers add, with the engines' own defaults. kvroute adds none of them."""


def chat(**fields: Any) -> dict[str, Any]:
    """Return the body of a chat request."""
    return {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]} | fields


SHARED: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": (COMPLETIONS, completion()),
    "stream": (COMPLETIONS, completion(stream=True, stream_options={"include_usage": True})),
    "unknown field": (COMPLETIONS, completion(unknown={"a": [1]}, ignore_eos=True, min_tokens=2)),
    "chat": (CHAT, chat(max_tokens=3)),
    "chat stream": (CHAT, chat(max_tokens=3, stream=True)),
    "newer limit": (CHAT, chat(max_completion_tokens=3, temperature=0.5)),
}
"""Requests that both routers and kvroute send on in the same way."""
SGLANG = SHARED | {
    "two prompts": (COMPLETIONS, completion(prompt=["a b c", "d e f"])),
    "two chats": (CHAT, chat(max_tokens=3, n=2)),
}
VLLM = SHARED | {"token ids": (COMPLETIONS, completion(prompt=[1, 2, 3, 4]))}


async def answer(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
    """Answer completions; the routers' questions about the model are not answered and not recorded."""
    if request.method != "POST":
        engine.received.remove(received)
        return web.Response(status=404)
    return await tokens(engine, request, received)


@asynccontextmanager
async def router(command: Sequence[str], url: str) -> AsyncIterator[aiohttp.ClientSession]:
    """Run a router until the end of the context; it answers completions already."""
    process = await asyncio.create_subprocess_exec(*command)
    try:
        async with aiohttp.ClientSession() as session:
            while True:
                assert process.returncode is None, "the router has ended"
                try:
                    async with session.post(url + COMPLETIONS, json=completion()) as response:
                        if response.status == 200:
                            break
                except aiohttp.ClientError:
                    pass  # it does not listen yet
                await asyncio.sleep(0.1)
            yield session
    finally:
        process.terminate()
        await process.wait()


def meaning(received: ReceivedRequest, sent: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a leg without what may differ: defaults, numbers of rooms, which of two equal fields limits
    the output, and the usage for which the gateway asks although the client has not `sent` that."""
    body: dict[str, Any] = received.json
    if "stream_options" not in sent:
        assert body.pop("stream_options", None) in (None, {"include_usage": True})
    for name, value in DEFAULTS.items():
        if body.get(name) == value:
            del body[name]
    if "bootstrap_room" in body:
        rooms = body["bootstrap_room"]
        several = rooms if isinstance(rooms, list) else [rooms]
        assert len(set(several)) == len(several)
        assert all(0 <= room < 2**63 for room in several)
        body["bootstrap_room"] = len(rooms) if isinstance(rooms, list) else None
    limits = {body.pop(name) for name in ("max_tokens", "max_completion_tokens") if name in body}
    return body | {"limits": limits}


async def legs(
    session: aiohttp.ClientSession, url: str, engines: Sequence[Engine], path: str, body: dict[str, Any]
) -> list[tuple[str, str, dict[str, Any]]]:
    """Send a request; return path, method and meaning of the leg at each engine."""
    for engine in engines:
        engine.received.clear()
    async with session.post(url + path, json=body) as response:
        await response.read()
        assert response.status == 200
    while not all(engine.received for engine in engines):
        await asyncio.sleep(0.01)
    [first], [second] = (engine.received for engine in engines)
    return [(leg.path, leg.method, meaning(leg, body)) for leg in (first, second)]


async def compare(
    protocol: KvProtocol, command: Callable[[int, Engine, Engine], list[str]], requests: dict[str, Any]
) -> None:
    """Send each request through the router and through kvroute, and compare what the engines receive."""
    engines = [
        Engine("prefill0", "prefill", protocol, serve=answer),
        Engine("decode0", "decode", protocol, serve=answer),
    ]
    async with listening(engines):
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        try:
            started = command(port, *engines)
        except Failed as error:
            missing(str(error))
        async with router(started, url) as session, serving(deployment(engines)) as front:
            for name, (path, body) in requests.items():
                expected = await legs(session, url, engines, path, body)
                assert await legs(session, front.url, engines, path, body) == expected, name


def test_sglang_engines_receive_what_the_sglang_gateway_sends() -> None:
    """Both legs have the same body: the client's fields, and one room for each sequence."""

    def command(port: int, prefill: Engine, decode: Engine) -> list[str]:
        return sglang_router(port, free_port(), [prefill.port], [decode.port], bootstrap_port=prefill.port)

    run(compare("sglang", command, SGLANG))


def test_vllm_engines_receive_what_vllm_router_sends() -> None:
    """The prefill leg has one token and no stream; the decode leg has the transfer parameters of its response."""

    def command(port: int, prefill: Engine, decode: Engine) -> list[str]:
        return vllm_router(port, free_port(), [prefill.port], [decode.port])

    run(compare("vllm", command, VLLM))
