"""The public port without completions: pages, HEAD, Expect, rejections in OpenAI's form, and requests that are passed
through."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from aiohttp import web
from tests.serve.rig import (
    CHAT,
    CLUSTER,
    COMPLETIONS,
    MODEL,
    GatewayResponse,
    RunningGateway,
    rig,
)
from tests.serve.stub_engines import (
    Engine,
    Gate,
    ReceivedRequest,
    completion,
    engines_of,
    failing,
    run,
    stub_rig,
    tokens,
)

from kvroute.http.server.server import HttpServer
from kvroute.serve.api.api_keys import Keys, hash_text
from kvroute.serve.api.json_fields import PIECE_BYTES
from kvroute.serve.proxy.admission.admission import AdmissionController, AdmissionLimits
from kvroute.serve.proxy.admission.queue import AdmissionQueue
from kvroute.serve.proxy.endpoints import Endpoints
from kvroute.serve.proxy.own_pages import OwnPages

PAGES = ("/v1/models", "/health", "/ready", "/metrics", "/openapi.json")
POSTED = (COMPLETIONS, CHAT, "/v1/embeddings", "/tokenize", "/detokenize")
LISTEN = "  listen: {port: 0}\n"
OWN_TYPE = "service_unavailable"


async def send_request(
    front: RunningGateway, method: str, path: str, data: bytes | None = None, **headers: str
) -> GatewayResponse:
    """Send a request of any method to any path."""
    async with front.session.request(method, front.url + path, data=data, headers=headers) as response:
        lowercase = {name.lower(): value for name, value in response.headers.items()}
        return GatewayResponse(response.status, lowercase, await response.read())


def error_of(response: GatewayResponse) -> Any:
    """Return the error, which must have OpenAI's form."""
    assert response.headers["content-type"] == "application/json"
    error = response.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"]
    return error


def test_head_responses_equal_get_responses_without_the_body() -> None:
    """Every page supports HEAD, also the one that engines answer, although engines do not support HEAD."""

    async def main() -> None:
        async with rig() as gate:
            for path in PAGES:
                whole, head = await gate.get(path), await send_request(gate, "HEAD", path)
                assert whole.status == head.status == 200
                assert whole.body
                assert not head.body
                assert head.headers["content-type"] == whole.headers["content-type"]
                if path != "/metrics":
                    assert head.headers["content-length"] == str(len(whole.body))
            assert await gate.becomes_idle(), gate.held_resources()

    run(main())


@pytest.mark.parametrize("method", ["HEAD", "GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "POST"])
def test_other_methods_are_rejected_with_the_allowed_ones(method: str) -> None:
    """405 with Allow on known paths, 404 on others."""

    async def main() -> None:
        async with rig() as gate:
            reads = method in ("HEAD", "GET")
            for path in (*PAGES, "/v1/models/x?y=1") if not reads else POSTED:
                if method == "POST" and path in POSTED:
                    continue
                response = await send_request(gate, method, path)
                assert response.status == 405
                assert response.headers["allow"] == ("POST" if reads else "GET, HEAD")
                if method != "HEAD":
                    assert error_of(response)["code"] == "method_not_allowed"
            for path in ("/", "/v1", "/v1/completions/", "/v1/nothing%00", "/%F0%9F", "/v1/model?y=1"):
                response = await send_request(gate, method, path)
                assert response.status == 404
                if method != "HEAD":
                    assert error_of(response)["code"] == "not_found"

    run(main())


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_a_client_that_waits_for_100_continue_receives_it(streams: bool) -> None:
    """The Expect header is not sent to engines."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        async with stub_rig(prefill + decode) as front:
            body = msgspec.json.encode(completion(stream=streams))
            reader, writer = await asyncio.open_connection("127.0.0.1", front.gateway.port)
            head = b"POST %b HTTP/1.1\r\nHost: g\r\nConnection: close\r\n" % COMPLETIONS.encode()
            writer.write(head + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body))
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(body)
            response = await reader.read()
            assert response.startswith(b"HTTP/1.1 200 OK\r\n")
            assert response.count(b"decode") >= 3
            writer.close()
            await writer.wait_closed()
            received = [*prefill[0].received, *prefill[1].received, *decode[0].received, *decode[1].received]
            assert len(received) == 2
            assert not any("expect" in request.headers for request in received)

    run(main())


@pytest.mark.parametrize("path", ["/v1/embeddings", "/tokenize", "/detokenize"])
def test_passthrough_requests_and_responses_are_unchanged(path: str) -> None:
    """Body, query and headers are unchanged, and so are the engine's status, headers and body; engines take turns."""
    body = b'{"model":"%b",  "input":["a"], "x":1.0}' % MODEL.encode()

    async def serve(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
        return web.Response(body=received.body[::-1], status=203, headers={"X-Of-Engine": engine.name})

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        for engine in prefill + decode:
            engine.serve = serve
        async with stub_rig(prefill + decode, "  forward_headers: [X-Tenant]\n") as front:
            for _ in range(8):
                sent = {"Authorization": "Bearer a", "X-Request-Id": "my-1", "X-Tenant": "b"}
                response = await send_request(front, "POST", f"{path}?a=%20b", body, **sent)
                assert (response.status, response.body) == (203, body[::-1])
                assert response.headers["x-request-id"] == "my-1"
                assert response.headers["x-of-engine"].startswith(("prefill", "decode"))
            # Prefill engines become idle sooner, so decode engines are used only if those fail.
            assert [len(engine.received) for engine in prefill + decode] == [4, 4, 0, 0]
            for engine in prefill:
                assert all((received.path, received.body) == (f"{path}?a=%20b", body) for received in engine.received)
                assert all(
                    received.headers[name.lower()] == sent[name] for received in engine.received for name in sent
                )
            assert await front.becomes_idle(), front.held_resources()

    run(main())


def test_passthrough_requests_are_retried_and_fail_if_all_engines_fail() -> None:
    """If all fail, the response has a gateway error status and the request's ID. A client error does not count against
    an engine."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        engines = prefill + decode
        for engine in engines[:2]:
            engine.serve = failing(500)
        async with stub_rig(engines, "  breaker: {failures: 1000}\n") as front:
            for _ in range(4):
                assert (await front.post({"input": "a"}, "/v1/embeddings")).status == 200
            for engine in engines:
                engine.serve = failing(500)
            response = await front.post({"input": "a"}, "/v1/embeddings", headers={"X-Request-Id": "my-2"})
            assert response.status == 502
            assert response.headers["x-request-id"] == "my-2"
            assert "returned status 500" in error_of(response)["message"]
            for engine in engines:
                engine.serve = failing(422)
            assert (await front.post({"input": "a"}, "/v1/embeddings")).status == 422
            assert (await front.post([1], "/v1/embeddings")).status == 400
            assert await front.becomes_idle(), front.held_resources()

    run(main())


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/embeddings", "/v1/models", "/ready"])
def test_without_any_instance_the_response_is_503_with_retry_after(path: str) -> None:
    """Every endpoint that needs an instance gives this response."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        async with stub_rig(prefill + decode, "  health: {path: /nowhere, interval: 20 ms, failures: 1}\n") as front:
            for engine in prefill + decode:
                engine.serve = failing(500)
                assert await front.becomes(engine.name, False)
            reads = path in ("/v1/models", "/ready")
            response = await (front.get(path) if reads else front.post(completion(), path))
            assert response.status == 503
            assert int(response.headers["retry-after"]) >= 1
            assert "up" in error_of(response)["message"]
            assert not any(front.held_resources()[name] for name in ("core", "requests", "legs"))

    run(main())


def test_a_full_gateway_gives_503_a_key_at_its_limit_429_both_with_retry_after() -> None:
    """Each key has its own limit, the default or its own number; a rejected request leaves nothing behind."""
    keys = {name: f"kvr_{name}" for name in ("alice", "bob", "carol")}
    known = ", ".join(f"{name}: '{hash_text(key)}'" for name, key in keys.items())
    section = f"  keys: {{known: {{{known}}}, concurrency: {{bob: 1}}}}\n"
    section += "  limits: {in_flight: 4, queue: 0, per_key: 2}\n"

    async def main() -> None:
        gate = Gate()
        prefill, decode = engines_of("vllm")
        for engine in prefill:
            engine.serve = gate.before(tokens)
        async with stub_rig(prefill + decode, section) as front:

            async def send(name: str) -> GatewayResponse:
                return await front.post(completion(), headers={"Authorization": f"Bearer {keys[name]}"})

            tasks = []
            for name, most in (("alice", 2), ("bob", 1)):
                tasks += [asyncio.create_task(send(name)) for _ in range(most)]
                while front.held_resources()["legs"] < len(tasks):
                    await asyncio.sleep(0)
                refused = await send(name)
                assert refused.status == 429
                assert error_of(refused)["type"] == "rate_limit_error"
                assert int(refused.headers["retry-after"]) >= 1
            tasks.append(asyncio.create_task(send("carol")))
            while front.held_resources()["legs"] < 4:
                await asyncio.sleep(0)
            full = await send("carol")
            assert full.status == 503
            assert error_of(full)["type"] == OWN_TYPE
            assert int(full.headers["retry-after"]) >= 1
            gate.open.set()
            assert [(await task).status for task in tasks] == [200] * 4
            assert (await send("bob")).status == 200
            assert await front.becomes_idle(), front.held_resources()

    run(main())


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_if_all_engines_are_full_the_response_is_503_with_retry_after(leg: str, status: int) -> None:
    """A 429 of the gateway itself is for keys only."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        for engine in prefill if leg == "prefill" else decode:
            engine.serve = failing(status)
        async with stub_rig(prefill + decode) as front:
            response = await front.post(completion())
            assert response.status == 503
            assert int(response.headers["retry-after"]) >= 1
            assert f"{leg} instance" in error_of(response)["message"]
            assert await front.becomes_idle(), front.held_resources()

    run(main())


def test_a_model_is_found_by_its_name() -> None:
    """Names may contain a slash or a space; an unknown name is not found."""

    async def main() -> None:
        async with rig(f"  models: {{org/some model: {MODEL}, small: {MODEL}}}\n") as gate:
            listed = (await gate.get("/v1/models")).json["data"]
            assert [card["id"] for card in listed] == ["org/some model", "small"]
            for path, card in zip(("org%2Fsome%20model", "small"), listed, strict=True):
                response = await gate.get(f"/v1/models/{path}")
                assert (response.status, response.json) == (200, card)
            assert (await gate.get("/v1/models/org/some%20model")).status == 200
            error = error_of(missing := await gate.get("/v1/models/other"))
            assert missing.status == 404
            assert (error["code"], error["param"]) == ("model_not_found", "model")
            assert "'other'" in error["message"]

    run(main())


def test_without_configured_models_engines_answer_model_queries() -> None:
    async def serve(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
        return web.json_response({"id": received.path})

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        for engine in prefill + decode:
            engine.serve = serve
        async with stub_rig(prefill + decode) as front:
            assert (await front.get("/v1/models/a%2Fb")).json == {"id": "/v1/models/a%2Fb"}
            assert await front.becomes_idle(), front.held_resources()

    run(main())


@pytest.mark.parametrize("given", ["", "x" * 300, "x" * 200, "mine"], ids=["empty", "300", "200", "short"])
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/embeddings"])
def test_engines_and_the_client_receive_the_same_request_id(path: str, given: str) -> None:
    """The ID is the client's own unless that is empty or very long."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        async with stub_rig(prefill + decode) as front:
            response = await front.post(completion(), path, headers={"X-Request-Id": given})
            assert response.status == 200
            request_ids = {
                received.headers.get("x-request-id") for engine in prefill + decode for received in engine.received
            }
            assert request_ids == {response.headers["x-request-id"]}
            assert (request_ids == {given}) == (0 < len(given) <= 200)

    run(main())


def test_metrics_can_be_served_on_the_admin_port_only() -> None:
    async def main() -> None:
        async with rig("  listen: {port: 0, metrics: false}\n", CLUSTER.replace(LISTEN, "")) as gate:
            assert (await gate.get("/metrics")).status == 404
            async with gate.session.get(f"{gate.admin}/metrics") as response:
                assert response.status == 200

    run(main())


def test_a_metrics_page_is_generated_in_pieces_and_other_requests_run_in_between() -> None:
    async def main() -> None:
        async with rig() as gate:
            gateway, called = gate.gateway, asyncio.Event()

            def page(accept: str) -> tuple[str, Iterator[str]]:
                def pieces() -> Iterator[str]:
                    asyncio.get_running_loop().call_soon(called.set)
                    yield "some "
                    assert called.is_set()
                    yield accept

                return "text/plain", pieces()

            admission = AdmissionController(AdmissionLimits(in_flight=1, queue=0, queue_wait_s=1.0, per_key=1))
            admission_queue = AdmissionQueue(admission, gateway.metrics, gateway.state, gateway.now)
            endpoints = Endpoints(
                gateway.runtime,
                admission_queue,
                Keys({}),
                own_pages=OwnPages(gateway.ready, b"{}", page),
                started_unix_s=0,
            )
            server = HttpServer(endpoints)
            port = await server.listen("127.0.0.1", 0)
            async with gate.session.get(f"http://127.0.0.1:{port}/metrics", headers={"Accept": "more"}) as response:
                assert await response.read() == b"some more"
            await server.drain(0)

    run(main())


def reading_threads() -> set[threading.Thread]:
    """Return the threads that read bodies; each one is started by its first body."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("read")}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize"])
def test_large_bodies_are_parsed_in_a_thread(path: str) -> None:
    """Small bodies are read on the event loop; responses and rejections are the same."""

    def body(size: int) -> dict[str, Any]:
        text = "a" * size
        return {"max_tokens": 2} | (
            {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
        )

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        async with stub_rig(prefill + decode) as front:
            before = reading_threads()
            assert (await front.post(body(1000), path)).status == 200
            assert reading_threads() <= before
            assert (await front.post(body(PIECE_BYTES), path)).status == 200
            assert reading_threads() - before
            error_of(refused := await front.post(body(PIECE_BYTES) | {"model": 1}, path))
            assert refused.status == 400
            assert await front.becomes_idle(), front.held_resources()

    run(main())


async def _send(port: int, body: bytes) -> asyncio.StreamWriter:
    """Send a completion request to its last byte."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.transport.set_write_buffer_limits(0)
    writer.write(b"POST %b HTTP/1.1\r\nHost: g\r\n" % COMPLETIONS.encode())
    writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
    await writer.drain()
    return writer


def test_a_client_that_disconnects_before_its_body_is_parsed_leaks_nothing() -> None:
    """Large bodies are read one after the other: the earlier ones take long enough for the client to leave
    meanwhile."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        async with stub_rig(prefill + decode) as front:
            body = msgspec.json.encode(completion(prompt=[1_000_000] * 2**21))
            others = [await _send(front.gateway.port, body) for _ in range(3)]
            last = await _send(front.gateway.port, body)
            last.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            last.transport.abort()
            page = ""
            while 'endpoint="completions",code="499"} 1' not in page:
                page = (await front.get("/metrics")).body.decode()
            for other in others:
                other.close()
            assert await front.becomes_idle(), front.held_resources()
            assert sum(len(engine.received) for engine in prefill) <= 3

    run(main())
