"""Requests of the Responses API and of Anthropic's Messages API through two instances, and what else clients may ask
for: several choices, log-probabilities, formats, tools, pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from aiohttp import web
from tests.serve.rig import CHAT, COMPLETIONS, MODEL, GatewayResponse
from tests.serve.stub_engines import (
    Engine,
    ReceivedRequest,
    Serve,
    engines_of,
    failing,
    run,
    sent_to_decode,
    start_stream,
    stub_rig,
    tokens,
)

from kvroute.serve.api.requests import KINDS
from kvroute.serve.api.responses import usage_of
from kvroute.serve.api.streams import STREAMS

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
LIMITS = {RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}
PATHS = pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
STREAMED = pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
TEXT = "What is a KV cache? " * 20
PICTURE = "data:image/png;base64,iVBORw0KGgo="
PREAMBLES = {RESPONSES: ("response.created", "response.in_progress"), MESSAGES: ("message_start",)}
DELTAS = {RESPONSES: "response.output_text.delta", MESSAGES: "content_block_delta"}
ENDS = {RESPONSES: ("response.completed",), MESSAGES: ("message_delta", "message_stop")}


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    """Return a request for three tokens."""
    conversation = {"input": TEXT} if path == RESPONSES else {"messages": [{"role": "user", "content": TEXT}]}
    return {"model": MODEL, LIMITS[path]: 3} | conversation | fields


def document(path: str, text: str, count: int, ended: str = "") -> dict[str, Any]:
    """Return a whole response as vLLM sends it. Args: `ended`: status or stop reason; empty: that of the length."""
    usage = {"input_tokens": 9, "output_tokens": count}
    if path == RESPONSES:
        part = {"type": "output_text", "text": text, "annotations": []}
        message = {"type": "message", "role": "assistant", "content": [part]}
        return {"object": "response", "status": ended or "incomplete", "output": [message], "usage": usage}
    content = [{"type": "text", "text": text}]
    return {"type": "message", "content": content, "stop_reason": ended or "max_tokens", "usage": usage}


def event(name: str, **more: Any) -> bytes:
    """Return one server-sent event."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode({"type": name, **more}))


def events(names: Sequence[str], **more: Any) -> bytes:
    """Return several server-sent events."""
    return b"".join(event(name, **more) for name in names)


async def converse(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
    """Answer like vLLM."""
    body, path = received.json, request.path
    count = body[LIMITS[path]]
    if body.get("stream"):
        response = await start_stream(request)
        await response.write(events(PREAMBLES[path]))
        await response.write(events([DELTAS[path]] * count, delta=engine.name))
        await response.write(events(ENDS[path]))
        await response.write_eof()
        return response
    prefill = (body.get("kv_transfer_params") or {}).get("do_remote_decode")
    answer = document(path, engine.name, count) | ({"kv_transfer_params": engine.params} if prefill else {})
    return web.json_response(body=msgspec.json.encode(answer))


def without_params(ended: str = "") -> Serve:
    """Return a handler of a prefill engine that ignores the transfer parameters."""

    async def serve(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
        return web.json_response(document(request.path, "a", 1, ended))

    return serve


def talking(prefill: Serve = converse, decode: Serve = converse) -> tuple[list[Engine], list[Engine]]:
    """Return two prefill and two decode engines that answer like this."""
    prefills, decodes = engines_of("vllm")
    for engines, serve in ((prefills, prefill), (decodes, decode)):
        for engine in engines:
            engine.serve = serve
    return prefills, decodes


def received_by(engines: Sequence[Engine]) -> list[ReceivedRequest]:
    """Return the requests that the engines received."""
    return [request for engine in engines for request in engine.received]


def names_in(response: GatewayResponse) -> list[str]:
    """Return the names of the events of a stream."""
    return [line[7:].decode() for line in response.body.split(b"\n") if line.startswith(b"event: ")]


@PATHS
@STREAMED
def test_two_instances_serve_a_request(path: str, streams: bool) -> None:
    """The prefill leg asks for one token that is not streamed; the decode leg is the client's request with the transfer
    parameters, and the client gets its response unchanged."""
    more = {
        "tools": [{"name": "f", "x": [1.0]}],
        "metadata": {"user_id": "a"},
        "temperature": 0.5,
        "my_field": {"a": 1},
    }

    async def main() -> None:
        prefill, decode = talking()
        async with stub_rig(prefill + decode) as front:
            tools = [{"type": "function"} | tool for tool in more["tools"]]  # type: ignore[attr-defined]
            sent = body_of(path, stream=streams, kv_transfer_params={"remote_host": "evil"}, **more | {"tools": tools})
            response = await front.post(sent, path, headers={"anthropic-version": "2023-06-01"})
            assert response.status == 200
            [first], [second] = received_by(prefill), received_by(decode)
            for leg in (first, second):
                assert (leg.path, leg.headers["anthropic-version"]) == (path, "2023-06-01")
            assert first.json["kv_transfer_params"]["do_remote_decode"] is True
            assert second.json == sent | {"kv_transfer_params": {"do_remote_prefill": True}}
            own = {LIMITS[path]: 1, "stream": False}
            own |= {"ignore_eos": True, "store": False} if path == RESPONSES else {}
            assert first.json == sent | own | {"kv_transfer_params": first.json["kv_transfer_params"]}
            server = next(engine.name for engine in decode if engine.received)
            if streams:
                assert names_in(response) == [*PREAMBLES[path], *[DELTAS[path]] * 3, *ENDS[path]]
                assert response.body.count(f'"delta":"{server}"'.encode()) == 3
            else:
                assert response.json == document(path, server, 3)
            page = await front.metrics()
            assert f'kvroute_requests_total{{endpoint="{path[4:]}",code="200"}} 1' in page
            assert await front.becomes_idle(), front.held_resources()

    run(main())


@PATHS
@STREAMED
def test_without_transfer_parameters_one_instance_serves_the_request(path: str, streams: bool) -> None:
    """The decode instance computes the prompt; later requests of this kind need no prefill leg, others do."""

    async def main() -> None:
        prefill, decode = talking(without_params())
        async with stub_rig(prefill + decode) as front:
            assert (await front.post(body_of(path, stream=streams), path)).status == 200
            assert len(received_by(prefill)) == 1
            [second] = received_by(decode)
            assert second.json == body_of(path, stream=streams)
            assert await front.becomes_idle(), front.held_resources()
            assert (await front.post(body_of(path, stream=streams), path)).status == 200
            assert sum(len(engine.received) for engine in prefill + decode) == 3
            for engine in prefill + decode:
                engine.serve, engine.received[:] = tokens, []
            assert (await front.ask()).status == 200
            assert [len(received_by(side)) for side in (prefill, decode)] == [1, 1]
            assert await front.becomes_idle(), front.held_resources()

    run(main())


@PATHS
def test_a_stop_token_in_the_prefill_leg_says_nothing_about_later_requests(path: str) -> None:
    """Some connectors transfer nothing after a stop token."""
    ended = {RESPONSES: "completed", MESSAGES: "end_turn"}[path]

    async def main() -> None:
        prefill, decode = talking(without_params(ended))
        async with stub_rig(prefill + decode) as front:
            for count in (1, 2):
                assert (await front.post(body_of(path), path)).status == 200
                assert [len(received_by(side)) for side in (prefill, decode)] == [count, count]
            assert await front.becomes_idle(), front.held_resources()

    run(main())


@PATHS
def test_a_decode_engine_that_fails_without_transfer_parameters_is_replaced(path: str) -> None:
    async def main() -> None:
        prefill, decode = talking(without_params("other"))
        decode[0].serve = decode[1].serve = failing(500, times=1, then=converse)
        async with stub_rig(prefill + decode) as front:
            assert (await front.post(body_of(path), path)).status == 200
            assert all("kv_transfer_params" not in request.json for request in received_by(decode))
            assert len(received_by(decode)) == 2
            assert await front.becomes_idle(), front.held_resources()

    run(main())


@PATHS
def test_an_invalid_prefill_response_is_a_failure(path: str) -> None:
    """Another instance prefills."""

    async def main() -> None:
        async def invalid(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
            if len(received_by(prefill)) == 1:
                return web.Response(body=b"no JSON", content_type="application/json")
            return await converse(engine, request, received)

        prefill, decode = talking(invalid)
        async with stub_rig(prefill + decode) as front:
            assert (await front.post(body_of(path), path)).status == 200
            assert [len(engine.received) for engine in prefill] == [1, 1]
            [second] = received_by(decode)
            assert "kv_transfer_params" in second.json

    run(main())


@pytest.mark.parametrize(
    "fields",
    [
        {"previous_response_id": "resp_1"},
        {"background": True},
        {"prompt": {"id": "p"}},
        {"tools": [{"type": "web_search_preview"}]},
        {"tools": [{"type": "function", "name": "f"}, {"type": "mcp", "server_label": "a"}]},
    ],
    ids=str,
)
def test_a_request_of_one_engine_is_not_split(fields: dict[str, Any]) -> None:
    """Its prompt is known to one engine, or the engine computes several prompts."""

    async def main() -> None:
        prefill, decode = talking()
        async with stub_rig(prefill + decode) as front:
            assert (await front.post(body_of(RESPONSES, **fields), RESPONSES)).status == 200
            assert not received_by(prefill)
            [only] = received_by(decode)
            assert only.json == body_of(RESPONSES, **fields)

    run(main())


@pytest.mark.parametrize("fields", [{"stream": 1}, {"background": "yes"}, {"cache_salt": ""}], ids=str)
def test_fields_that_routing_needs_are_checked(fields: dict[str, Any]) -> None:
    async def main() -> None:
        prefill, decode = talking()
        async with stub_rig(prefill + decode) as front:
            response = await front.post(body_of(RESPONSES, **fields), RESPONSES)
            assert (response.status, response.json["error"]["param"]) == (400, next(iter(fields)))
            assert not received_by(prefill + decode)

    run(main())


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        ({"type": "tool", "name": "f"}, {"type": "any"}),
        (
            {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
            {"type": "any", "disable_parallel_tool_use": True},
        ),
        ({"type": "any"}, {"type": "any"}),
        ({"type": "auto"}, {"type": "auto"}),
        ({"type": "none"}, {"type": "none"}),
        (7, 7),
    ],
    ids=str,
)
def test_a_named_tool_is_not_required_of_the_one_token_of_a_prefill(choice: Any, sent: Any) -> None:
    """vLLM parses the output of a named tool as JSON and rejects the request if that fails."""

    async def main() -> None:
        prefill, decode = talking()
        async with stub_rig(prefill + decode) as front:
            assert (await front.post(body_of(MESSAGES, tool_choice=choice), MESSAGES)).status == 200
            [first], [second] = received_by(prefill), received_by(decode)
            assert (first.json["tool_choice"], second.json["tool_choice"]) == (sent, choice)

    run(main())


@PATHS
@pytest.mark.parametrize("fault", ["breaks", "error"])
def test_a_stream_that_fails_before_its_first_token_is_retried(path: str, fault: str) -> None:
    """An engine of vLLM begins the stream of a response before it computes anything; the client gets one stream."""

    async def main() -> None:
        async def fails_first(
            engine: Engine, request: web.BaseRequest, received: ReceivedRequest
        ) -> web.StreamResponse:
            if len(received_by(decode)) > 1:
                return await converse(engine, request, received)
            response = await start_stream(request)
            await response.write(events(PREAMBLES[path]))
            if fault == "error":
                await response.write(event("error", error={"type": "x", "message": "no"}))
                await response.write_eof()
            else:
                assert request.transport is not None
                request.transport.abort()
            return response

        prefill, decode = talking(decode=fails_first)
        async with stub_rig(prefill + decode) as front:
            response = await front.post(body_of(path, stream=True), path)
            assert response.status == 200
            assert names_in(response) == [*PREAMBLES[path], *[DELTAS[path]] * 3, *ENDS[path]]
            assert [len(engine.received) for engine in decode] == [1, 1]
            assert await front.becomes_idle(), front.held_resources()

    run(main())


@PATHS
def test_a_stream_that_breaks_off_ends_with_an_error_event_of_its_api(path: str) -> None:
    """The SDKs of OpenAI and Anthropic raise an exception for it."""

    async def breaks(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
        response = await start_stream(request)
        await response.write(events([*PREAMBLES[path], DELTAS[path]]) + b"event: torn")
        assert request.transport is not None
        request.transport.abort()
        return response

    async def main() -> None:
        prefill, decode = talking(decode=breaks)
        async with stub_rig(prefill + decode) as front:
            response = await front.post(body_of(path, stream=True), path)
            server = next(engine.name for engine in decode if engine.received)
            sent = [*PREAMBLES[path], DELTAS[path]]
            assert names_in(response) == [*sent, "error"]
            last = json.loads(response.body.rpartition(b"data: ")[2])
            assert server in last["error"]["message"]
            if path == RESPONSES:
                assert (last["type"], last["code"], last["sequence_number"]) == ("error", "upstream_error", len(sent))
                assert last["message"] == last["error"]["message"]
            else:
                assert last == {"type": "error", "error": {"type": "api_error", "message": last["error"]["message"]}}
            assert await front.becomes_idle(), front.held_resources()

    run(main())


@PATHS
def test_engines_of_sglang_get_the_whole_request(path: str) -> None:
    """Their protocol has no transfer parameters in these requests."""

    async def main() -> None:
        engines = [Engine("both0", "both", "sglang", serve=converse), Engine("both1", "both", "sglang", serve=converse)]
        async with stub_rig(engines) as front:
            assert (await front.post(body_of(path, rid="a"), path)).status == 200
            [only] = received_by(engines)
            assert only.json == body_of(path)
            page = await front.metrics()
            assert f'kvroute_requests_total{{endpoint="{path[4:]}",code="200"}} 1' in page

    run(main())


@PATHS
def test_output_tokens_are_counted(path: str) -> None:
    """A stream's tokens are its events with a token; otherwise the engine's own count is used."""
    usage = usage_of(msgspec.json.encode(document(path, "a", 5)))
    assert usage is not None
    assert usage.output_tokens == 5
    form = STREAMS[KINDS[path.encode()]]
    stream = events([*PREAMBLES[path], *[DELTAS[path]] * 5, *ENDS[path]], delta="a.delta\n content_block_delta\n")
    assert form.tokens(stream) == 5
    assert form.tokens(stream.replace(b"\n", b"\r\n")) == 5
    assert form.token_lines(b"%x\r\n%b\r\n" % (len(stream), stream)) == 5


# Chat completions and completions


ONE_INSTANCE: list[dict[str, Any]] = [
    {"n": 2},
    {"prompt_logprobs": 1},
    {"best_of": 2},
    {"use_beam_search": True, "n": 2},
]
AS_THEY_ARE: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}},
    {"structured_outputs": {"regex": "a+"}},
    {"guided_json": {"type": "object"}},
    {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
    {
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
    },
    {"logprobs": True, "top_logprobs": 2},
    {"logit_bias": {"7": -100}, "stop": ["a"], "seed": 3},
]


def chat_body(**fields: Any) -> dict[str, Any]:
    """Return a chat request for three tokens, with a picture."""
    parts = [{"type": "text", "text": TEXT}, {"type": "image_url", "image_url": {"url": PICTURE}}]
    return {"model": MODEL, "max_tokens": 3, "messages": [{"role": "user", "content": parts}]} | fields


@pytest.mark.parametrize("fields", AS_THEY_ARE, ids=str)
@STREAMED
def test_both_legs_have_the_fields_of_the_client(fields: dict[str, Any], streams: bool) -> None:
    """Both engines must compute the same prompt, with the same picture; only the decode leg's output counts."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        async with stub_rig(prefill + decode) as front:
            sent = chat_body(stream=streams, **fields)
            assert (await front.post(sent, CHAT)).status == 200
            [first], [second] = received_by(prefill), received_by(decode)
            assert second.json == sent_to_decode(sent) | {"kv_transfer_params": {"do_remote_prefill": True}}
            own = {"stream": False, "max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 1}
            assert first.json == sent | own | {"kv_transfer_params": first.json["kv_transfer_params"]}

    run(main())


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("fields", ONE_INSTANCE, ids=str)
def test_what_one_sequence_cannot_carry_is_served_by_one_instance(path: str, fields: dict[str, Any]) -> None:
    """Several choices need several KV caches, and log-probabilities of the prompt are known where it is computed. The
    response is that of the engine."""
    answer = {"choices": [{"index": 0}, {"index": 1}], "prompt_logprobs": [None, {"7": {"logprob": -1.0}}]}

    async def serve(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
        return web.json_response(answer)

    async def main() -> None:
        prefill, decode = talking(serve, serve)
        async with stub_rig(prefill + decode) as front:
            sent = chat_body(**fields) if path == CHAT else {"model": MODEL, "prompt": TEXT, **fields}
            response = await front.post(sent, path)
            assert (response.status, response.json) == (200, answer)
            [only] = received_by(prefill + decode)
            assert only.json == sent

    run(main())


@pytest.mark.parametrize(
    ("path", "conversation"),
    [
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": PICTURE}]}]}),
        (
            MESSAGES,
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image", "source": {"type": "base64", "data": "iVBORw0KGgo="}}],
                    }
                ]
            },
        ),
    ],
    ids=["responses", "messages"],
)
def test_pictures_reach_both_engines(path: str, conversation: dict[str, Any]) -> None:
    async def main() -> None:
        prefill, decode = talking()
        async with stub_rig(prefill + decode) as front:
            assert (await front.post(body_of(path) | conversation, path)).status == 200
            name = next(iter(conversation))
            [first], [second] = received_by(prefill), received_by(decode)
            assert first.json[name] == second.json[name] == conversation[name]

    run(main())
