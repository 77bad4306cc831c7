"""Live: a decode server that dies while it streams; another one continues the response with the same text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from tests.live.vllm.gateway_rig import Gateway, all_up, prompt, requests_on, serving, wait_until_idle

if TYPE_CHECKING:
    from tests.live.vllm.conftest import Pair

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]
COUNT = 2_000
KILL_AFTER = 25
"""Events that the client has read when the server is killed."""
MESSAGES: list[Any] = [{"role": "user", "content": "network aware control plane? " * 20}]


@pytest.fixture(scope="module")
def process(cluster: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """One gateway that continues streams, for all tests of the module."""
    folder = tmp_path_factory.mktemp("gateway")
    more: dict[str, Any] = {"retries": {"continue_streams": True}, "log": {"events": str(folder / "events.log")}}
    with serving(cluster, folder, **more) as gateway:
        yield gateway


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_a_greedy_response_is_the_same_over_a_killed_decode_server(pair: Pair, process: Gateway, kind: str) -> None:
    """The server is killed with most of the response still to come. The whole text is that of one server, and so are
    the token counts."""
    all_up(process, pair)
    ask: dict[str, Any] = {"model": "tiny", "max_tokens": COUNT, "temperature": 0}
    extra = {"ignore_eos": True}
    if kind == "chat":
        ask["messages"], path = MESSAGES, "/v1/chat/completions"
        expected = pair.alone.post(path, ask | extra)
        text = expected["choices"][0]["message"]["content"]
    else:
        ask["prompt"], path = prompt(300, seed=9_000), "/v1/completions"
        expected = pair.alone.post(path, ask | extra)
        text = expected["choices"][0]["text"]
    continued = process.metric("kvroute_continued_streams_total")
    events: list[Any] = []
    with process.client() as client:
        create: Any = client.chat.completions.create if kind == "chat" else client.completions.create
        with create(**ask, stream=True, stream_options={"include_usage": True}, extra_body=extra) as stream:
            for event in stream:
                events.append(event)
                if len(events) == KILL_AFTER:
                    (victim,) = (engine for engine in (pair.decode, pair.other) if requests_on(process, engine) == 1)
                    victim.kill()
    assert process.metric("kvroute_continued_streams_total") == continued + 1
    pieces = [choice for event in events for choice in event.choices]
    got = "".join([(piece.delta.content if kind == "chat" else piece.text) or "" for piece in pieces])
    assert got == text
    assert pieces[-1].finish_reason == "length"
    assert events[-1].usage.completion_tokens == COUNT
    assert events[-1].usage.prompt_tokens == expected["usage"]["prompt_tokens"]
    assert len({event.id for event in events}) == 1
    wait_until_idle(process)
