"""What a client learns of the errors of engines: their status and text if the request is at fault, else the reason."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from aiohttp import web
from hypothesis import example, given
from hypothesis import strategies as st
from tests.serve.rig import CHAT, COMPLETIONS
from tests.serve.stub_engines import (
    Engine,
    ReceivedRequest,
    completion,
    engines_of,
    run,
    start_stream,
    stub_rig,
)

from kvroute.serve.api.responses import error_status, error_text, with_text_code

WHY = "tool_choice: the model's output is no JSON"
VLLM = {"error": {"message": WHY, "type": "BadRequestError", "param": None, "code": 400}}
BODIES: dict[str, Any] = {
    "vllm": VLLM,
    "flat": {"object": "error", "message": WHY, "type": "BadRequestError", "param": None, "code": 400},
    "fastapi": {"detail": WHY},
    "text error": {"error": WHY},
}


def saying(status: int, body: bytes, kind: str = "application/json") -> Any:
    """Return a handler that responds with an error."""

    async def serve(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
        return web.Response(status=status, body=body, headers={"Content-Type": kind})

    return serve


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("form", BODIES)
@pytest.mark.parametrize(("leg", "status"), [("prefill", 400), ("decode", 422), ("prefill", 500), ("decode", 503)])
def test_the_client_learns_what_an_engine_says(leg: str, status: int, form: str, streams: bool) -> None:
    """A 4xx is passed on at once, with its text; a 5xx is retried, and its text is in the gateway's message."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        failing = prefill if leg == "prefill" else decode
        for engine in failing:
            engine.serve = saying(status, msgspec.json.encode(BODIES[form]))
        async with stub_rig(prefill + decode, "  retries: {attempts: 2}\n") as front:
            body = completion(stream=streams, messages=[{"role": "user", "content": "hi"}])
            response = await front.post(body, CHAT)
            sent = sum(len(engine.received) for engine in failing)
            if status < 500:
                assert (response.status, sent) == (status, 1)
                assert WHY in response.body.decode()
            else:
                assert (response.status, sent) == (502 if status == 500 else 503, 2)
                assert response.json["error"]["message"].endswith(f"returned status {status}: {WHY}")
            error = response.json.get("error", response.json)
            if form in ("vllm", "flat") or status >= 500:
                assert type(error["code"]) is str
            assert await front.becomes_idle(), front.held_resources()

    run(main())


@pytest.mark.parametrize("status", [422, 500])
def test_requests_to_one_engine_have_the_same_errors(status: int) -> None:
    async def main() -> None:
        prefill, decode = engines_of("vllm")
        for engine in prefill + decode:
            engine.serve = saying(status, msgspec.json.encode(VLLM))
        async with stub_rig(prefill + decode, "  retries: {attempts: 2}\n") as front:
            response = await front.post({"input": "a"}, "/v1/embeddings")
            error = response.json["error"]
            if status == 422:
                assert (response.status, error) == (422, VLLM["error"] | {"code": "400"})
            else:
                assert response.status == 502
                assert error["message"].endswith(f"returned status 500: {WHY}")
            assert sum(len(engine.received) for engine in prefill + decode) == (1 if status == 422 else 2)

    run(main())


def test_a_long_error_of_one_engine_is_relayed_as_it_comes() -> None:
    async def main() -> None:
        prefill, decode = engines_of("vllm")
        text = b"why " * 50_000
        for engine in prefill + decode:
            engine.serve = saying(422, text, "text/plain")
        async with stub_rig(prefill + decode) as front:
            response = await front.post({"input": "a"}, "/v1/embeddings")
            assert (response.status, response.body) == (422, text)

    run(main())


@pytest.mark.parametrize(("code", "status", "sent"), [(400, 400, 1), (500, 502, 2), (None, 502, 2)])
def test_a_stream_that_is_an_error_has_its_status_and_text(code: int | None, status: int, sent: int) -> None:
    """vLLM responds with 200 before it checks some requests, and gives the status in the first event."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")

        async def serve(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
            response = await start_stream(request)
            await response.write(
                b"data: %b\n\ndata: [DONE]\n\n" % msgspec.json.encode({"error": {"message": WHY, "code": code}})
            )
            await response.write_eof()
            return response

        for engine in decode:
            engine.serve = serve
        async with stub_rig(prefill + decode, "  retries: {attempts: 2}\n") as front:
            response = await front.post(completion(stream=True), COMPLETIONS)
            assert response.status == status
            assert response.headers["content-type"] == "application/json"
            assert WHY in response.json["error"]["message"]
            assert type(response.json["error"].get("code", "")) is str
            assert sum(len(engine.received) for engine in decode) == sent
            assert await front.becomes_idle(), front.held_resources()

    run(main())


def test_the_text_of_an_engine_is_one_bounded_line() -> None:
    assert error_text(b'{"error":{"message":"a\\nb\\u0007c \\u001b[31md"}}') == "a b c [31md"
    assert error_text(b"Internal Server Error") == "Internal Server Error"
    assert error_text(b"<html>no</html>") == error_text(b"{") == error_text(b"{}") == error_text(b"") == ""
    assert error_text(b'{"detail":[{"msg":"x"}]}') == ""
    assert len(error_text(b"x" * 10_000)) == 300
    assert error_text(b"x" * 10_000).endswith("...")


@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner) | st.dictionaries(st.sampled_from(["error", "message", "code", "detail", "x"]), inner)
        ),
    ).map(msgspec.json.encode)
)
@example(b'{"error":' + b"[" * 100_000)
@example(b'{"error":{"code":400}}')
@example(b'{"code":400}')
def test_any_body_of_an_error_is_handled(body: bytes) -> None:
    """A numeric `code` becomes a string, and nothing else changes."""
    text = error_text(body)
    assert len(text) <= 300
    assert text.isprintable()
    assert 0 <= error_status(body) < 600
    changed = with_text_code(body)
    assert with_text_code(changed) == changed
    if changed != body:
        before, after = msgspec.json.decode(body), msgspec.json.decode(changed)
        for document in (before, after):
            document.get("error", document)["code"] = "same"
        assert before == after
