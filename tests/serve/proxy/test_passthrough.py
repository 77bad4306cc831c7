"""Endpoints that one engine serves alone: which engine, what it receives, and the gateway's own errors.

Engines of SGLang stand for those that serve requests of the Responses and the Messages API alone.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import ClientPayloadError, FormData, web
from tests.serve.rig import MODEL, GatewayResponse, RunningGateway
from tests.serve.stub_engines import (
    Engine,
    Gate,
    ReceivedRequest,
    engines_of,
    failing,
    run,
    start_stream,
    stub_rig,
)

from kvroute.serve.api.api_keys import hash_text

OTHER = "llama-3-8b"
GENERATING = ("/v1/responses", "/v1/messages")
OTHERS = (
    "/v1/messages/count_tokens",
    "/v1/rerank",
    "/rerank",
    "/v2/rerank",
    "/v1/score",
    "/score",
    "/pooling",
    "/classify",
)
EVENTS = [b'event: message_start\ndata: {"type":"message_start"}\n\n', b"event: message_stop\ndata: {}\n\n"]


async def echo(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
    """Return the body."""
    return web.Response(body=received.body, headers={"X-Of-Engine": engine.name})


async def send(front: RunningGateway, method: str, path: str, data: Any = None, **headers: str) -> GatewayResponse:
    """Send a request; header names have `_` for `-`."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with front.session.request(method, front.url + path, data=data, headers=named) as response:
        lowercase = {name.lower(): value for name, value in response.headers.items()}
        return GatewayResponse(response.status, lowercase, await response.read())


@pytest.mark.parametrize("path", [*GENERATING, *OTHERS])
def test_one_engine_receives_the_request_unchanged(path: str) -> None:
    """An instance that decodes serves what generates tokens, a prefill instance the rest, and metrics name the
    endpoint."""
    body = b'{"model":"x",  "input": 1.0, "n":2}'

    async def main() -> None:
        prefill, decode = engines_of("sglang" if path in GENERATING else "vllm")
        for engine in prefill + decode:
            engine.serve = echo
        async with stub_rig(prefill + decode) as front:
            sent = {"anthropic_version": "2023-06-01", "anthropic_beta": "a"}
            response = await send(front, "POST", f"{path}?beta=true", body, **sent)
            assert response.status == 200
            assert response.json == json.loads(body) if path in GENERATING else response.body == body
            chosen = decode if path in GENERATING else prefill
            received = [request for engine in chosen for request in engine.received]
            assert [(request.method, request.path) for request in received] == [("POST", f"{path}?beta=true")]
            assert received[0].headers["anthropic-version"] == "2023-06-01"
            assert received[0].headers["anthropic-beta"] == "a"
            name = path.rpartition("/")[2]
            assert f'kvroute_requests_total{{endpoint="{name}",code="200"}} 1' in await front.metrics()
            assert await front.becomes_idle(), front.held_resources()

    run(main())


@pytest.mark.parametrize("path", GENERATING)
def test_no_client_directs_an_engine_to_another(path: str) -> None:
    async def main() -> None:
        prefill, decode = engines_of("sglang")
        for engine in prefill + decode:
            engine.serve = echo
        async with stub_rig(prefill + decode) as front:
            body = {"model": "x", "kv_transfer_params": {"remote_host": "evil"}, "rid": "1"}
            assert (await front.post(body, path)).json == {"model": "x"}
            refused = await front.post({"vllm_xargs": {"kv_transfer_params": "evil"}}, path)
            assert refused.status == 400

    run(main())


def test_a_stream_is_relayed_as_it_comes_and_counts_as_a_request_in_flight() -> None:
    """The next request goes to the instance without a stream."""

    async def main() -> None:
        gate = Gate()

        async def serve(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
            if not received.json.get("stream"):
                return await echo(engine, request, received)
            response = await start_stream(request)
            await response.write(EVENTS[0])
            await gate.wait()
            await response.write(EVENTS[1])
            await response.write_eof()
            return response

        prefill, decode = engines_of("sglang")
        for engine in prefill + decode:
            engine.serve = serve
        async with stub_rig(prefill + decode) as front:
            body = {"model": "x", "stream": True}
            async with front.session.post(f"{front.url}/v1/messages", json=body) as response:
                assert response.content_type == "text/event-stream"
                assert await response.content.readexactly(len(EVENTS[0])) == EVENTS[0]
                loads = {name: engine.in_flight for name, engine in front.gateway.runtime.engines.items()}
                busy = next(engine for engine in decode if engine.received)
                assert loads == {name: int(name == busy.name) for name in loads}
                for _ in range(4):
                    other = await front.post({"model": "x"}, "/v1/messages")
                    assert other.headers["x-of-engine"] not in (busy.name, "prefill0", "prefill1")
                gate.open.set()
                assert await response.content.read() == EVENTS[1]
            assert await front.becomes_idle(), front.held_resources()

    run(main())


def test_a_form_is_forwarded_to_an_instance_of_its_model() -> None:
    """The body of an audio request keeps its bytes; with several models its form names one."""

    async def main() -> None:
        engines = [Engine("decode0", "decode", model=MODEL), Engine("decode1", "decode", model=OTHER)]
        engines += [Engine("prefill0", "prefill", model=MODEL), Engine("prefill1", "prefill", model=OTHER)]
        for engine in engines:
            engine.serve = echo
        async with stub_rig(engines) as front:
            for _ in range(3):
                form = FormData()
                form.add_field("file", b"\x00RIFF\r\n--x", filename="a.wav", content_type="audio/wav")
                form.add_field("model", OTHER)
                response = await send(front, "POST", "/v1/audio/transcriptions", form)
                assert (response.status, response.headers["x-of-engine"]) == (200, "decode1")
                assert b"\x00RIFF\r\n--x" in response.body
            received = engines[1].received[0]
            assert received.headers["content-type"].startswith("multipart/form-data; boundary=")
            form = FormData()
            form.add_field("model", "unknown")
            form.add_field("file", b"", filename="a.wav")
            assert (await send(front, "POST", "/v1/audio/translations", form)).status == 404
            assert await front.becomes_idle(), front.held_resources()

    run(main())


def test_stored_responses_are_read_cancelled_and_deleted() -> None:
    """Methods and empty bodies are those of the client."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        for engine in prefill + decode:
            engine.serve = echo
        async with stub_rig(prefill + decode) as front:
            for method, path in (("GET", "resp_1?stream=true"), ("POST", "resp_1/cancel"), ("DELETE", "resp_1")):
                assert (await send(front, method, f"/v1/responses/{path}")).status == 200
            received = [(request.method, request.path) for engine in decode for request in engine.received]
            assert sorted(received) == [
                ("DELETE", "/v1/responses/resp_1"),
                ("GET", "/v1/responses/resp_1?stream=true"),
                ("POST", "/v1/responses/resp_1/cancel"),
            ]
            assert (await send(front, "PUT", "/v1/responses/resp_1")).status == 405
            assert (await send(front, "GET", "/v1/responses/..%2f..%2fsleep")).status == 404

    run(main())


def test_listed_paths_are_passed_through_and_others_get_404() -> None:
    """A wildcard does not cover `/sleep`, which would stop an engine; bodies may have any type."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        for engine in prefill + decode:
            engine.serve = echo
        async with stub_rig(prefill + decode, "  passthrough: [/inference/*, /v2/embed, '/*']\n") as front:
            for path, kind, body in (
                ("/v2/embed", "application/json", b'{"kv_transfer_params":1}'),
                ("/inference/v1/generate", "application/octet-stream", b"\x00\xff"),
                ("/anything", "text/plain", b"a"),
            ):
                response = await send(front, "POST", path, body, content_type=kind)
                assert (response.status, response.body) == (200, b"{}" if path == "/v2/embed" else body)
            for path in ("/sleep", "/v1/load_lora_adapter", "/%73leep", "/inference/v1/abort_requests", "//sleep"):
                assert (await send(front, "POST", path, b"{}")).status == 404
            assert not [
                request for engine in prefill + decode for request in engine.received if "sleep" in request.path
            ]
            page = await front.metrics()
            for name in ("/v2/embed", "/inference/*", "/*"):
                assert f'kvroute_requests_total{{endpoint="{name}",code="200"}} 1' in page
        async with stub_rig(prefill + decode, "  passthrough: [/sleep]\n") as front:
            assert (await send(front, "POST", "/sleep", b"{}")).status == 200
            assert (await send(front, "POST", "/anything", b"{}")).status == 404

    run(main())


def test_errors_under_messages_have_the_format_of_anthropic() -> None:
    """Those of the gateway (key, body, method, no instance), and those of engines in OpenAI's format."""
    section = f"  keys: {{known: {{alice: '{hash_text('kvr_alice')}'}}}}\n"
    section += "  health: {path: /nowhere, interval: 20 ms, failures: 1}\n"

    def kind_of(response: GatewayResponse) -> str:
        body = response.json
        assert set(body) == {"type", "error"}
        assert body["type"] == "error"
        assert set(body["error"]) == {"type", "message"}
        return str(body["error"]["type"])

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        for engine in prefill + decode:
            engine.serve = failing(422)
        async with stub_rig(prefill + decode, section.partition("  health")[0]) as front:
            key = {"x_api_key": "kvr_alice"}
            for headers in ({}, {"x_api_key": "wrong"}):
                refused = await send(front, "POST", "/v1/messages", b"{}", **headers)
                assert (refused.status, kind_of(refused)) == (401, "authentication_error")
            waiting = await send(front, "POST", "/v1/messages/count_tokens", b"{" * 100_000, expect="100-continue")
            assert (waiting.status, kind_of(waiting)) == (401, "authentication_error")
            refused = await send(front, "POST", "/v1/messages", b"[]", **key)
            assert (refused.status, kind_of(refused)) == (400, "invalid_request_error")
            assert (await send(front, "GET", "/v1/messages", **key)).json["type"] == "error"
            engines = await send(front, "POST", "/v1/messages", b"{}", **key)
            assert (engines.status, kind_of(engines)) == (422, "invalid_request_error")
            assert not any("x-api-key" in request.headers for engine in prefill + decode for request in engine.received)
            openai = await send(front, "POST", "/v1/responses", b"[]", **key)
            assert set(openai.json["error"]) == {"message", "type", "param", "code"}
        for engine in prefill + decode:
            engine.serve = failing(500)
        async with stub_rig(prefill + decode, section) as front:
            for engine in prefill + decode:
                assert await front.becomes(engine.name, False)
            none = await send(front, "POST", "/v1/messages", b"{}", **key)
            assert (none.status, kind_of(none)) == (503, "overloaded_error")
            assert int(none.headers["retry-after"]) >= 1

    run(main())


def test_a_request_is_retried_until_its_response_begins() -> None:
    """Before the first byte on another instance; afterwards the connection is closed."""

    async def main() -> None:
        async def breaks(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
            response = await start_stream(request)
            await response.write(EVENTS[0])
            assert request.transport is not None
            request.transport.abort()
            return response

        prefill, decode = engines_of("sglang")
        decode[0].serve, decode[1].serve = failing(500), echo
        async with stub_rig(prefill + decode) as front:
            for _ in range(4):
                assert (await front.post({"input": "a"}, "/v1/responses")).headers["x-of-engine"] == decode[1].name
            for engine in decode:
                engine.serve = breaks
            with pytest.raises(ClientPayloadError):
                await front.post({"input": "a", "stream": True}, "/v1/responses")
            assert await front.becomes_idle(), front.held_resources()

    run(main())
