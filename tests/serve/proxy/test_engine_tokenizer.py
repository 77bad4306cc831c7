"""Prompts that an engine tokenizes: KV events match them, and a prompt without an answer is served all the same."""

from __future__ import annotations

import asyncio
import json
from itertools import count
from typing import Any

import aiohttp.web
import msgspec
import pytest
import uvloop
from tests.serve.rig import CHAT, COMPLETIONS, MODEL, Rig, rig

from kvroute.emulator.api.routes import answer
from kvroute.serve.api.requests import read_completion
from kvroute.serve.proxy.engine_tokenizer import tokenize_body

ASK = "  prompt: {without_tokenizer: engine}\n"
PROMPT = "Which tokens does this prompt have? " * 30


def body_of(path: str, prompt: str = PROMPT) -> dict[str, Any]:
    content = {"messages": [{"role": "user", "content": prompt}]} if path == CHAT else {"prompt": prompt}
    return {"model": MODEL, "max_tokens": 2} | content


async def outcomes(gate: Rig) -> dict[str, float]:
    """Return how many prompts engines were asked for, by outcome."""
    lines = [line for line in (await gate.metrics()).splitlines() if line.startswith("kvroute_engine_tokenize_total{")]
    return {line.split('"')[1]: float(line.rpartition(" ")[2]) for line in lines}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_kv_events_match_prompts_that_an_engine_has_tokenized(path: str) -> None:
    """Another router has sent the prompt to one instance, which the gateway learns from its KV events only."""

    async def main() -> None:
        async with rig(ASK) as gate:
            engine, control = gate.fleet.ready().instances["prefill1"], gate.gateway.runtime.control
            index, prompts = control.cluster.index("prefill1"), (f"{n} {PROMPT}" if n else PROMPT for n in count())
            while not control.prefix.used_blocks(index):  # a gateway that subscribes late asks again for what it missed
                async with gate.session.post(engine.url + path, json=body_of(path, next(prompts))) as first:
                    assert first.status == 200
            response = await gate.post(body_of(path), path)
            assert response.status == 200
            cached = response.json["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached >= len(PROMPT) // 4 - 32
            assert await outcomes(gate) == {"tokens": 1.0}
            assert await gate.becomes_idle()

    uvloop.run(main())


def test_token_ids_and_several_prompts_are_not_sent_to_an_engine_first() -> None:
    async def main() -> None:
        async with rig(ASK) as gate:
            for prompt in ([1, 2, 3], ["a", "b"], [[1], [2]]):
                assert (await gate.post({"model": MODEL, "prompt": prompt, "max_tokens": 1})).status == 200
            assert await outcomes(gate) == {}

    uvloop.run(main())


def test_a_prompt_is_served_if_no_engine_tokenizes_it(caplog: pytest.LogCaptureFixture) -> None:
    """Two instances are asked; then the prompt is cut as text. The client's wrong prompt is the engines' to reject."""

    async def main() -> None:
        async with rig(ASK) as gate:
            for server in gate.fleet.servers.values():
                server.answer = broken(server.answer)
            response = await gate.post(body_of(COMPLETIONS))
            assert response.status == 200
            assert await outcomes(gate) == {"failed": 1.0}
            assert sum(asked) == 2
            assert all(engine.availability.up for engine in gate.gateway.runtime.engines.values())
            assert await gate.becomes_idle()

    asked: list[int] = []

    def broken(answer: Any) -> Any:
        async def refuse(server: Any, request: aiohttp.web.BaseRequest) -> aiohttp.web.StreamResponse:
            if request.path == "/tokenize":
                asked.append(1)
                bodies = [(500, b"{}"), (200, b'{"count": 3}')]
                status, body = bodies[len(asked) % 2]
                return aiohttp.web.Response(status=status, body=body)
            return await answer(server, request)  # type: ignore[no-any-return]

        return refuse

    uvloop.run(main())
    assert [record.getMessage() for record in caplog.records].count("tokenize_failed") == 1


def test_a_client_that_leaves_ends_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and not after the time limit of the question."""
    monkeypatch.setattr("kvroute.serve.proxy.engine_tokenizer._WAIT_S", 3_600.0)

    async def main() -> None:
        async with rig(ASK) as gate:
            asked = asyncio.Event()

            async def hang(server: Any, request: aiohttp.web.BaseRequest) -> aiohttp.web.StreamResponse:
                if request.path != "/tokenize":
                    return await answer(server, request)
                asked.set()
                await asyncio.Event().wait()
                raise AssertionError

            for server in gate.fleet.servers.values():
                server.answer = hang
            sending = asyncio.create_task(gate.post(body_of(COMPLETIONS)))
            await asked.wait()
            assert gate.held_resources()["legs"] == 1
            sending.cancel()
            assert await gate.becomes_idle()

    uvloop.run(main())


@pytest.mark.parametrize(
    ("fields", "kwargs"),
    [
        ({}, None),
        ({"chat_template_kwargs": {"a": 1}}, {"a": 1}),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high", "enable_thinking": True}),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            {"reasoning_effort": "none", "enable_thinking": True},
        ),
        ({"reasoning_effort": "low", "chat_template_kwargs": 7}, 7),
    ],
    ids=str,
)
def test_a_chat_is_asked_for_with_all_that_determines_its_tokens(fields: dict[str, Any], kwargs: Any) -> None:
    sent = {"model": "m", "messages": [{"role": "user", "content": "a"}], "tools": [], "temperature": 0} | fields
    body = msgspec.json.decode(tokenize_body(read_completion(b"/v1/chat/completions", json.dumps(sent).encode())))
    expected = {"model": "m", "messages": sent["messages"], "tools": []}
    assert body == expected | ({} if kwargs is None else {"chat_template_kwargs": kwargs})


def test_a_completion_is_asked_for_with_its_special_tokens() -> None:
    sent = {"model": "m", "prompt": "a", "add_special_tokens": False, "temperature": 0}
    body = msgspec.json.decode(tokenize_body(read_completion(b"/v1/completions", json.dumps(sent).encode())))
    assert body == {"model": "m", "prompt": "a", "add_special_tokens": False}
