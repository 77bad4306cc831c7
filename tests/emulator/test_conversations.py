"""Responses and messages through the gateway and emulated engines: the KV is transferred, and the output is that of one
engine."""

from __future__ import annotations

from typing import Any

import pytest
from tests.serve.rig import MODEL, GatewayResponse, Rig, rig
from tests.serve.stub_engines import run
from tests.waiting import until

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
PATHS = pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
TEXT = "What is a KV cache? " * 20


def body_of(path: str, text: str = TEXT, **fields: Any) -> dict[str, Any]:
    """Return a request for five tokens."""
    turns = [{"role": "user", "content": text}]
    conversation: dict[str, Any] = {"input": turns} if path == RESPONSES else {"messages": turns}
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    return {"model": MODEL, limit: 5, **conversation, **fields}


def text_of(path: str, document: dict[str, Any]) -> str:
    """Return the output of a whole response."""
    content = document["output"][0]["content"] if path == RESPONSES else document["content"]
    return str(content[0]["text"])


def events_of(response: GatewayResponse) -> list[dict[str, Any]]:
    """Return the events of a stream; the name of each equals its type."""
    events: list[dict[str, Any]] = []
    for lines in response.body.decode().split("\n\n")[:-1]:
        name, data = lines.split("\n")
        events.append(GatewayResponse(200, {}, data.removeprefix("data: ").encode()).json)
        assert name == f"event: {events[-1]['type']}"
    return events


def pulled(front: Rig) -> int:
    """Return how many KV caches the engines have pulled."""
    counters = [server.engine.counters for server in front.fleet.servers.values()]
    return sum(moved.transfers for counter in counters for moved in (*counter.pulled.values(), *counter.early.values()))


@pytest.mark.parametrize("path", [RESPONSES, pytest.param(MESSAGES, marks=pytest.mark.slow)])
def test_the_output_of_two_engines_is_that_of_one(path: str) -> None:
    """Whole or as a stream, whose events say the same; the second request finds its prompt cached."""

    async def main() -> None:
        async with rig() as front:
            url = front.fleet.ready().instances["decode0"].url + path
            async with front.session.post(url, json=body_of(path)) as direct:
                right = text_of(path, await direct.json())
            assert len(right.split()) == 5
            response = await front.post(body_of(path), path)
            assert response.status == 200
            assert text_of(path, response.json) == right
            assert pulled(front) == 1
            usage = response.json["usage"]
            assert usage["output_tokens"] == 5
            events = events_of(await front.post(body_of(path, stream=True), path))
            deltas = [event["delta"] for event in events if event["type"].endswith("delta") and "usage" not in event]
            words = deltas if path == RESPONSES else [delta["text"] for delta in deltas]
            assert "".join(words) == right
            if path == RESPONSES:
                assert [event["sequence_number"] for event in events] == list(range(len(events)))
                assert text_of(path, events[-1]["response"]) == right
                assert events[-1]["response"]["usage"]["input_tokens_details"]["cached_tokens"] > 0
            else:
                assert [events[0]["type"], events[-1]["type"]] == ["message_start", "message_stop"]
                assert events[-2]["usage"]["cache_read_input_tokens"] > 0
            assert pulled(front) == 2
            await until(lambda: not any(front.counted_loads(front.fleet)))

    run(main())


def test_tokens_are_counted_as_in_the_prompt() -> None:
    async def main() -> None:
        async with rig() as front:
            body = body_of(MESSAGES, system="be brief", tools=[{"name": "f", "input_schema": {}}])
            usage = (await front.post(body, MESSAGES)).json["usage"]
            counted = await front.post(body, "/v1/messages/count_tokens")
            assert counted.json == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
            tokenized = await front.post({"messages": body["messages"]}, "/tokenize")
            assert 0 < tokenized.json["count"] < counted.json["input_tokens"]

    run(main())


@PATHS
def test_a_stream_that_fails_names_the_error(path: str) -> None:
    """Also after some tokens: the stream of the gateway ends with the event of the API."""

    async def main() -> None:
        async with rig() as front:
            for name in ("decode0", "decode1"):
                await front.command(name, status="reset", after_tokens=2, share=1.0, leg="decode")
            events = events_of(await front.post(body_of(path, stream=True), path))
            assert events[-1]["type"] == "error"
            assert "decode" in events[-1]["error"]["message"]
            assert (await front.post(body_of(path) | {"model": "other"}, path)).status in (400, 404)

    run(main())
