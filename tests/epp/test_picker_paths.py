"""Which requests reach an engine through the picker: those that the gateway itself would forward, and no others."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.epp.envoy_rig import Answer, PickerRig, alone, completion_body, picker, picking
from tests.serve.rig import COMPLETIONS, RunningGateway
from tests.serve.stub_engines import deployment, listening, run, serving

from kvroute.epp.server import PickerSpec
from kvroute.serve.api.api_keys import hash_text
from kvroute.serve.api.passthrough_paths import PassthroughPaths

TRANSFER = {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "192.0.2.1", "remote_port": 80}}
UNLISTED = [
    "/",
    "*",
    "/sleep",
    "/wake_up",
    "/reset_prefix_cache",
    "/v1/load_lora_adapter",
    "/collective_rpc",
    "/emulator/restart",
    "/v1/%63ompletions",
    "/v1/completions/",
    "/v1/completions;x=y",
    "/v1/completions#x",
    "/v1/completions%3fx",
    "/V1/completions",
    "//v1/completions",
    "/v1//completions",
    "/v1/./completions",
    "/x/../v1/completions",
    "/v1/completions/../../sleep",
    "/v1/audio/../../sleep",
    "/v1/audio/%2e%2e/%2e%2e/sleep",
    "/v1/responses/%2e%2e/%2e%2e/sleep",
    "/v1/responses/..%2f..%2fsleep",
    "/v1/audio/..%5c..%5csleep",
    "/v1/unknown",
    "http://llm/v1/completions",
    "/sleep?/v1/completions",
    "/sleep?x=/v1/../v1/completions",
    "/inference/sleep",
    "/inference/a/%73leep",
    "/inference/SLEEP",
    "/inference//generate",
    "/inference/../sleep",
    "/inference/reset%5Fprefix_cache",
]
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "QUERY"]


def error_of(answer: Answer) -> dict[str, object]:
    """Return the error of an immediate response in OpenAI's form."""
    found = msgspec.json.decode(answer.body, type=dict[str, dict[str, object]])["error"]
    assert set(found) == {"message", "type", "param", "code"}
    assert answer.headers["content-type"] == "application/json"
    return found


@pytest.mark.parametrize("path", UNLISTED)
def test_a_path_that_is_not_listed_reaches_no_engine(path: str) -> None:
    """Whatever its method, and whether it is like a path that is listed or not."""

    async def main() -> None:
        async with picker(alone(1), "  passthrough: [/inference/*]\n") as rig:
            for method, body in (("POST", completion_body(**TRANSFER)), ("GET", None), ("DELETE", None)):
                answer = await rig.stream().ask(body, path=path, method=method)
                assert (answer.status, answer.destination) == (404, ""), method
                assert error_of(answer)["code"] == "not_found"
            assert await rig.becomes_idle()

    run(main())


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/embeddings", "/tokenize", "/v1/messages", "/v1/models"])
def test_a_method_that_is_not_listed_reaches_no_engine(path: str) -> None:
    """It is status 405 with the methods that the path has."""

    async def main() -> None:
        allowed = {"GET", "HEAD"} if path == "/v1/models" else {"POST"}
        async with picker(alone(1)) as rig:
            for method in METHODS:
                if method in allowed:
                    continue
                answer = await rig.stream().ask(completion_body(**TRANSFER), path=path, method=method)
                assert (answer.status, answer.destination) == (405, ""), method
                assert set(answer.headers["allow"].split(", ")) == allowed

    run(main())


def test_pages_of_the_gateway_are_answered_by_the_picker() -> None:
    """An engine has pages of the same names; its metrics are none of a client's concern."""

    async def main() -> None:
        async with picker(alone(1)) as rig:
            assert [(await rig.stream().ask(None, path=path)).status for path in ("/health", "/openapi.json")] == [
                200
            ] * 2
            assert (await rig.stream().ask(None, path="/ready")).status in (200, 503)
            assert (await rig.stream().ask(None, path="/metrics")).status == 404
            assert (await rig.stream().ask(b"{}", path="/health")).status == 405
        engines = alone(1)
        async with listening(engines), picking(deployment(engines, listen="{port: 0, metrics: true}")) as rig:
            page = await rig.stream().ask(None, path="/metrics")
            assert (page.status, b"kvroute_ready" in page.body) == (200, True)

    run(main())


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/embeddings", "/v1/audio/x", "/inference/generate", "/v2/embed"])
def test_fields_between_engines_are_removed(path: str) -> None:
    """From every request that reaches an engine."""

    async def main() -> None:
        async with picker(alone(1), "  passthrough: [/inference/*, /v2/embed]\n") as rig:
            answer = await rig.stream().ask(completion_body(**TRANSFER, bootstrap_host="192.0.2.1"), path=path)
            assert answer.destination
            assert msgspec.json.decode(answer.body) == msgspec.json.decode(completion_body())

    run(main())


def test_with_salts_the_body_of_a_listed_path_is_salted_and_one_without_json_unchanged() -> None:
    """The body of a request that is refused reaches no engine."""

    async def main() -> None:
        section = f"  keys: {{known: {{a: '{hash_text('one')}'}}}}\n  cache_salt: per-key\n"
        async with picker(alone(1), section) as rig:
            key = [("authorization", "Bearer one")]
            sound = await rig.stream().ask(b"RIFF\0", path="/v1/audio/x", headers=[*key, ("content-type", "audio/wav")])
            assert sound.body == b"RIFF\0"
            salted = await rig.stream().ask(completion_body(cache_salt="other"), headers=key)
            assert re.fullmatch("[0-9a-f]{64}", msgspec.json.decode(salted.body)["cache_salt"])
            assert (await rig.stream().ask(completion_body(), path="/sleep", headers=key)).status == 404

    run(main())


def test_a_get_has_no_body_for_the_engine() -> None:
    """As in the gateway, which sends none."""

    async def main() -> None:
        async with picker(alone(1)) as rig:
            answer = await rig.stream().ask(completion_body(), path="/v1/responses/x", method="GET")
            assert (bool(answer.destination), answer.body) == (True, b"")

    run(main())


WORDS = (
    "v1 V1 completions chat responses audio models sleep %73leep inference x . .. %2e%2e a;b a%2fb a%5cb %20 cancel *"
)
SEGMENTS = st.sampled_from(["", *WORDS.split()])
PATHS = st.lists(SEGMENTS, min_size=1, max_size=4).map(lambda parts: "/" + "/".join(parts))


async def same_answers(
    rig: PickerRig, front: RunningGateway, received: Callable[[], int], path: str, method: str
) -> None:
    """Check that the picker names an endpoint if and only if the gateway asks an engine, and that both refuse a
    request with the same response."""
    before = received()
    reader, writer = await asyncio.open_connection("127.0.0.1", front.gateway.port)
    body = completion_body() if method == "POST" else b""
    head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    response = await reader.read()
    writer.close()
    answer = await rig.stream().ask(body or None, path=path, method=method)
    assert bool(answer.destination) == (received() > before)
    if answer.status:
        assert int(response.split(b" ")[1]) == answer.status
        assert response.partition(b"\r\n\r\n")[2] == answer.body


def test_gateway_and_picker_decide_alike() -> None:
    """By one list of paths and methods."""

    async def main() -> None:
        engines, section = alone(1), "  passthrough: [/inference/*, /x]\n  limits: {in_flight: 10000}\n"
        async with listening(engines):
            made = deployment(engines, section)
            async with picking(made) as rig, serving(made) as front:
                paths = [path for path in UNLISTED if path[0] == "/" and "#" not in path]
                for path in [
                    *paths,
                    COMPLETIONS,
                    "/x",
                    "/inference/generate",
                    "/v1/models/a/b",
                    "/v1/models",
                    "/tokenize",
                ]:
                    for method in ("GET", "POST", "DELETE"):
                        await same_answers(rig, front, lambda: len(engines[0].received), path, method)

    run(main())


@given(PATHS)
def test_only_listed_paths_are_found(path: str) -> None:
    """A path that is found is plain after it is decoded once, and names nothing with which engines are controlled."""
    found = PassthroughPaths(["/inference/*", "/x"]).find(path.encode())
    if found is not None:
        assert not re.search(r"%2e|%2f|%5c|;|\*|//|/\.\.?(/|$)", path)
        assert "/inference/" not in path or "leep" not in path


def test_the_conformance_tests_may_use_any_path() -> None:
    """But not the pages of the gateway, and engines' own fields are removed there, too."""

    async def main() -> None:
        async with picker(alone(1), settings=PickerSpec(conformance=True)) as rig:
            answer = await rig.stream().ask(completion_body(**TRANSFER), path="/primary-gateway-test")
            assert msgspec.json.decode(answer.body) == msgspec.json.decode(completion_body())
            assert (await rig.stream().ask(None, path="/metrics")).status == 404

    run(main())
