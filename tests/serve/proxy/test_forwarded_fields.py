"""The parts of a client's request that reach an engine: path, headers and fields come from lists of allowed ones."""

from __future__ import annotations

import asyncio
import re
from typing import Any
from urllib.parse import quote, unquote

import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from tests.serve.rig import CHAT, COMPLETIONS, MODEL
from tests.serve.stub_engines import (
    Engine,
    ReceivedRequest,
    completion,
    engines_of,
    run,
    stub_rig,
)

from kvroute.serve.api.json_fields import ENGINE_FIELDS
from kvroute.serve.api.passthrough_paths import is_plain
from kvroute.serve.config.preflight import settings_of
from kvroute.types import InputErrors

ALLOWED = {
    "Accept": "application/json",
    "Authorization": "Bearer sk-client",
    "User-Agent": "OpenAI/Python 2.0",
    "OpenAI-Organization": "org-1",
    "OpenAI-Project": "project-1",
    "Idempotency-Key": "once",
    "Traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "Tracestate": "a=1",
    "Baggage": "b=2",
    "B3": "0",
}
OPERATOR_HEADERS = {
    "X-Data-Parallel-Rank": "1",
    "X-Smg-Routed-Dp-Rank": "1",
    "X-Forwarded-For": "10.0.0.1",
    "Forwarded": "for=10.0.0.1",
    "Cookie": "session=1",
    "X-Stainless-Lang": "python",
    "X-Tenant": "a",
}
ALWAYS_FORWARDED = {"host", "content-length", "content-type", "x-request-id"}
POSTED = (COMPLETIONS, CHAT, "/v1/embeddings", "/tokenize", "/detokenize")


async def raw(port: int, data: bytes) -> bytes:
    """Send the bytes and return everything that the gateway sends before it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


def body_for(path: str, **more: Any) -> dict[str, Any]:
    messages = {"messages": [{"role": "user", "content": "a"}]}
    return {"model": MODEL, "max_tokens": 2} | (messages if path == CHAT else {"prompt": "a", "input": "a"}) | more


@pytest.mark.parametrize("path", POSTED)
def test_only_allowed_headers_reach_engines(path: str) -> None:
    """The client's Connection header and the kind of leg have no effect."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        async with stub_rig(prefill + decode) as front:
            assert (await front.post(body_for(path), path, headers=ALLOWED | OPERATOR_HEADERS)).status == 200
            received = [request for engine in prefill + decode for request in engine.received]
            assert received
            for request in received:
                assert set(request.headers) == ALWAYS_FORWARDED | {name.lower() for name in ALLOWED}
                assert all(request.headers[name.lower()] == value for name, value in ALLOWED.items())

    run(main())


def test_the_setting_allows_more_headers() -> None:
    async def main() -> None:
        prefill, decode = engines_of("vllm")
        async with stub_rig(prefill + decode, "  forward_headers: [X-Tenant, x-data-parallel-rank]\n") as front:
            assert (await front.post(completion(), headers=OPERATOR_HEADERS)).status == 200
            for request in (request for engine in prefill + decode for request in engine.received):
                assert (request.headers["x-tenant"], request.headers["x-data-parallel-rank"]) == ("a", "1")
                assert "cookie" not in request.headers

    run(main())


@pytest.mark.parametrize("name", ["Connection", "content-length", "Host", "X-Request-Id", "Accept-Encoding"])
def test_headers_set_by_the_gateway_cannot_be_allowed(name: str) -> None:
    with pytest.raises(InputErrors, match=f"sets {name} itself"):
        settings_of(f"gateway:\n  forward_headers: [{name}]\n", "test.yaml")


@pytest.mark.parametrize("path", POSTED)
def test_engine_fields_from_clients_are_removed(path: str) -> None:
    """Every endpoint with a body removes these fields; other fields keep their values."""
    engine_fields = {name: {"remote_host": "10.6.6.6", "remote_port": 1} for name in ENGINE_FIELDS}
    assert {"kv_transfer_params", "data_parallel_rank", "routed_dp_rank", "rid", "bootstrap_host"} <= ENGINE_FIELDS

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        async with stub_rig(prefill + decode) as front:
            assert (await front.post(body_for(path, priority=1, **engine_fields), path)).status == 200
            received = [request for engine in prefill + decode for request in engine.received]
            assert received
            for request in received:
                assert b"10.6.6.6" not in request.body
                assert request.json["priority"] == 1

    run(main())


TRAVERSALS = (
    "../../metrics",
    "..%2F..%2Fmetrics",
    "%2e%2e/%2e%2e/metrics",
    "a/../../../sleep",
    "a/./b",
    "a//b",
    "..%5c..%5cmetrics",
    "%252e%252e%252fmetrics",
    "..;/metrics",
    "a%00",
    "a%0d%0aX:%20b",
    "a%3fb",
    "%ff",
    "",
    "/",
)


@pytest.mark.parametrize("rest", TRAVERSALS)
def test_model_paths_with_dot_segments_reach_no_other_path(rest: str) -> None:
    """The engines name the models themselves; the client receives an error that there is no such model."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        async with stub_rig(prefill + decode) as front:
            response = await raw(
                front.gateway.port,
                b"GET /v1/models/%b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % rest.encode(),
            )
            assert response.startswith(b"HTTP/1.1 404 ")
            assert b"model_not_found" in response
            assert not any(engine.received for engine in prefill + decode)

    run(main())


@given(st.text(max_size=40))
def test_an_accepted_model_name_has_no_dot_segment(name: str) -> None:
    """For any text and escaping, an accepted name has no dot segment and nothing left to decode."""
    for text in (name, quote(name, safe=""), quote(name), quote(quote(name))):
        if not text.isascii():
            assert not is_plain(text.encode())
        elif is_plain(text.encode()):
            decoded = unquote(text)
            assert unquote(decoded) == decoded
            assert not re.search(r"[%;?#\\\x00-\x1f]|(^|/)\.*(/|$)", decoded)


@pytest.mark.parametrize("name", ["llama-3-70b", "org/name", "org%2Fname", "a%20b", "qwen2.5:7b@q4_K+x~1"])
def test_usual_model_names_are_forwarded(name: str) -> None:
    assert is_plain(name.encode())


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_the_body_of_a_get_request_is_not_forwarded(method: str) -> None:
    """The body is not sent, because an engine would parse it as another request."""
    hidden = b"POST /v1/completions HTTP/1.1\r\nHost: engine\r\nContent-Length: 2\r\n\r\n{}"

    async def echo(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
        return web.json_response({})

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        for engine in prefill + decode:
            engine.serve = echo
        async with stub_rig(prefill + decode) as front:
            head = b"%b /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
            response = await raw(front.gateway.port, head % (method.encode(), len(hidden)) + hidden)
            assert response.startswith(b"HTTP/1.1 200 ")
            assert (await front.post({"input": "a"}, "/v1/embeddings")).status == 200
            received: list[ReceivedRequest] = [request for engine in prefill + decode for request in engine.received]
            assert sorted(request.path for request in received) == ["/v1/embeddings", "/v1/models"]

    run(main())


def test_the_query_of_a_passthrough_path_stays_a_query() -> None:
    async def main() -> None:
        prefill, decode = engines_of("vllm")
        async with stub_rig(prefill + decode) as front:
            data = msgspec.json.encode({"input": "a"})
            head = b"POST /v1/embeddings?a=../../metrics HTTP/1.1\r\nHost: g\r\nConnection: close\r\n"
            await raw(front.gateway.port, head + b"Content-Length: %d\r\n\r\n" % len(data) + data)
            [received] = [request for engine in prefill + decode for request in engine.received]
            assert received.path.startswith("/v1/embeddings?")

    run(main())
