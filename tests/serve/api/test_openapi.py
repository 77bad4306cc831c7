"""The gateway conforms to its own OpenAPI description, and no JSON makes it fail or leaves anything held."""

from __future__ import annotations

import asyncio
import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import uvloop
from aiohttp import web
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.serve.rig import CHAT, COMPLETIONS, MODEL, RunningGateway, rig
from tests.serve.stub_engines import Engine, ReceivedRequest, engines_of, stream, stub_rig

from kvroute import __version__
from kvroute.serve.api import openapi
from kvroute.serve.api.requests import ANSWERS_MAX, KINDS

if TYPE_CHECKING:
    from schemathesis import Case

STARTS_S = 120.0
DOCUMENT = openapi.document(__version__)
"""Equal to the gateway's /openapi.json, which a test compares."""


class ThreadedGateway:
    """A gateway in an event loop of its own thread, for clients that block."""

    def __init__(self, make: Callable[[], AbstractAsyncContextManager[RunningGateway]]) -> None:
        self._make = make
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._serve()), daemon=True)
        self._loop: asyncio.AbstractEventLoop
        self._end: asyncio.Event
        self.front: RunningGateway

    def __enter__(self) -> ThreadedGateway:
        self._thread.start()
        assert self._started.wait(STARTS_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        async with self._make() as self.front:
            self._started.set()
            await self._end.wait()

    def becomes_idle(self) -> bool:
        """See RunningGateway."""
        return asyncio.run_coroutine_threadsafe(self.front.becomes_idle(), self._loop).result()

    def post(self, path: str, body: bytes) -> tuple[int, str, bytes]:
        """Send a request; return status, content type and body of the response."""
        connection = http.client.HTTPConnection("127.0.0.1", self.front.gateway.port, timeout=STARTS_S)
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.headers["content-type"], response.read()
        finally:
            connection.close()


async def accept(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
    """Answer every request with success, so that every rejection comes from the gateway."""
    if request.method == "GET":
        card = {"id": MODEL, "object": "model", "created": 1, "owned_by": engine.name}
        return web.json_response({"object": "list", "data": [card]} if request.path == "/v1/models" else card)
    if request.path.encode() in KINDS and received.json.get("stream"):
        return await stream(request, ["a", "b"])
    return web.json_response({"object": "text_completion", "choices": [], "kv_transfer_params": {"a": 1}})


@pytest.fixture(scope="module")
def accepting_gateway() -> Iterator[ThreadedGateway]:
    """Run a gateway in front of engines that accept everything."""
    prefill, decode = engines_of("vllm")
    for engine in prefill + decode:
        engine.serve = accept
    with ThreadedGateway(lambda: stub_rig(prefill + decode)) as running:
        yield running


@pytest.fixture(scope="module")
def emulated_gateway() -> Iterator[ThreadedGateway]:
    """Run a gateway in front of emulated engines."""
    with ThreadedGateway(rig) as running:
        yield running


def test_the_gateway_serves_the_description(accepting_gateway: ThreadedGateway) -> None:
    """The other tests use this description instead of the page."""
    connection = http.client.HTTPConnection("127.0.0.1", accepting_gateway.front.gateway.port, timeout=STARTS_S)
    connection.request("GET", "/openapi.json")
    assert msgspec.json.decode(connection.getresponse().read()) == DOCUMENT
    connection.close()


@pytest.mark.slow  # Schemathesis generates the requests again in each run
def test_requests_and_responses_conform_to_the_description(accepting_gateway: ThreadedGateway) -> None:
    """Requests that the description allows are accepted, others rejected; statuses and bodies are those that it
    lists. Schemathesis is not loaded as a plug-in, which would make the requests in every process of a test run."""
    import schemathesis
    from schemathesis.core.result import Ok
    from schemathesis.generation.feedback import FeedbackSources
    from schemathesis.pytest._test_builder import build_operation_test

    @settings(
        max_examples=25 if settings.get_current_profile_name() == "full" else 4,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    def conforms(case: Case[Any]) -> None:
        if _too_many_choices(case.body) or _has_float(case.body) or _has_special_name(case):
            return
        response = case.call(base_url=accepting_gateway.front.url)
        case.validate_response(response)
        if response.status_code not in (404, 405):
            operation = DOCUMENT["paths"][case.path][case.method.lower()] if case.method != "HEAD" else None
            assert operation is None or str(response.status_code) in operation["responses"]
        assert accepting_gateway.becomes_idle(), accepting_gateway.front.held_resources()

    described = schemathesis.openapi.from_dict(DOCUMENT)
    found = list(described.get_all_operations())
    operations = [operation.ok() for operation in found if isinstance(operation, Ok)]
    assert len(operations) == len(found) == 27
    for operation in operations:
        build_operation_test(
            config=described.config,
            operation=operation,
            test_func=conforms,
            given_kwargs={},
            feedback=FeedbackSources(),
        )()


def _has_float(body: Any) -> bool:
    """Return whether a token ID is written like 2.0, which JSON Schema accepts as an integer and the description
    excludes in words."""
    prompt = body.get("prompt") if isinstance(body, dict) else None
    lists = prompt if isinstance(prompt, list) else []
    return any(isinstance(element, float) for part in [lists, *lists] if isinstance(part, list) for element in part)


def _has_special_name(case: Case[Any]) -> bool:
    """Return whether a form has a field whose name has characters that the description excludes in words."""
    names = case.body if case.media_type == "multipart/form-data" and isinstance(case.body, dict) else ()
    return any(char < " " or char in '"\\\x7f' for name in names for char in str(name))


def _too_many_choices(body: Any) -> bool:
    """Return whether `n` times the number of prompts exceeds its limit, which the description states in words only."""
    if not isinstance(body, dict) or not isinstance(body.get("n"), int):
        return False
    prompts = body.get("prompt")
    count = len(prompts) if isinstance(prompts, list) and not all(isinstance(prompt, int) for prompt in prompts) else 1
    return int(body["n"]) * count > ANSWERS_MAX


numbers = st.sampled_from([0, 1, 2, 3, -1, 0.5, 2.0, 1e300, 2**31 - 1, 2**31, 2**63, 10**30])
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELD_VALUES = {
    "prompt": st.text(max_size=20) | st.lists(st.text(max_size=5) | st.integers(0, 9), max_size=4),
    "messages": st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": st.text(max_size=9)}), max_size=2
    ),
    "model": st.sampled_from([MODEL, "", "other"]),
    "stream": st.booleans(),
    "stream_options": st.just({"include_usage": True}),
    "max_tokens": st.integers(0, 4),
    "max_completion_tokens": st.integers(0, 4),
    "n": st.integers(1, 3),
    "best_of": st.integers(0, 3),
    "use_beam_search": st.booleans(),
    "echo": st.booleans(),
    "logprobs": st.integers(0, 2),
    "prompt_logprobs": st.integers(0, 2),
    "cache_salt": st.text(max_size=3),
    "kv_transfer_params": st.just({"remote_host": "evil"}),
    "prompt_embeds": st.text(max_size=3),
    "tools": st.just([{"type": "function"}]),
}
FIELD_NAMES = sorted(FIELD_VALUES)


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Draw JSON: mostly nearly a request, sometimes anything, sometimes truncated."""
    if draw(st.integers(0, 9)) == 0:
        return msgspec.json.encode(draw(values))
    fields: dict[str, Any] = {
        name: draw(FIELD_VALUES[name]) for name in draw(st.sets(st.sampled_from(FIELD_NAMES), max_size=8))
    }
    for name in draw(st.sets(st.sampled_from(FIELD_NAMES), max_size=1)):
        fields[name] = draw(values)
    fields |= {"max_tokens": 2} if fields.get("max_tokens") is None else {}
    body = msgspec.json.encode(fields)
    return body[: draw(st.integers(0, len(body)))] if draw(st.integers(0, 9)) == 0 else body


@settings(max_examples=120, derandomize=True, deadline=None, database=None)
@given(path=st.sampled_from([COMPLETIONS, CHAT]), body=bodies())
@example(path=COMPLETIONS, body=b'{"prompt":["a","b"],"n":2,"max_tokens":2,"stream":true,"stream_options":{}}')
@example(path=COMPLETIONS, body=b'{"prompt":' + b"[" * 5000)
@example(path=CHAT, body=b'{"messages":[{"role":"user","content":"\\ud800"}],"max_tokens":1}')
@example(path=CHAT, body=b"\xff\xfe")
def test_any_json_gets_a_response_and_leaks_nothing(emulated_gateway: ThreadedGateway, path: str, body: bytes) -> None:
    """The response is a success or a client error in OpenAI's form, never a server error."""
    status, kind, content = emulated_gateway.post(path, body)
    assert status in (200, 400, 404, 413, 422, 501), (status, content)
    if kind.startswith("text/event-stream"):
        assert status == 200
        assert content.startswith(b"data: ")
        assert content.endswith(b"data: [DONE]\n\n")
        assert b'"error"' not in content
    else:
        read = msgspec.json.decode(content)
        assert read["choices"] if status == 200 else read["error"]["message"]
    assert emulated_gateway.becomes_idle(), emulated_gateway.front.held_resources()
