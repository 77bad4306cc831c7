"""Images, recordings and files in prompts without a tokenizer: each is one digest over its estimated tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.serve.api.prompt import Prompts
from kvroute.serve.api.prompt_reader import MEDIA_TOKENS, Prompt
from kvroute.serve.api.requests import Completion, read_completion

CHAT, MESSAGES, RESPONSES = b"/v1/chat/completions", b"/v1/messages", b"/v1/responses"
BLOCK_TOKENS, BYTES_PER_TOKEN = 16, 4
MEDIA_BLOCKS = MEDIA_TOKENS // BLOCK_TOKENS
SLACK_TOKENS = 100
"""More than the tokens of the JSON around the parts."""


@pytest.fixture(scope="module")
def prompts() -> Iterator[Prompts]:
    found = Prompts(block_tokens=BLOCK_TOKENS, bytes_per_token=BYTES_PER_TOKEN)
    yield found
    found.close()


def user(path: bytes) -> Callable[[list[Any]], dict[str, Any]]:
    """Return what makes the body of a request with some parts."""
    name = "input" if path == RESPONSES else "messages"
    return lambda parts: {"max_tokens": 4, name: [{"role": "user", "content": parts}]}


def tool(path: bytes) -> Callable[[list[Any]], dict[str, Any]]:
    """The same, for parts in the result of a tool."""
    if path == RESPONSES:
        return lambda parts: {"input": [{"type": "function_call_output", "call_id": "a", "output": parts}]}
    nested = "tool_result"
    return lambda parts: user(path)([{"type": nested, "tool_use_id": "a", "content": parts}])


FORMS: dict[str, tuple[bytes, Callable[[list[Any]], dict[str, Any]], Callable[[str], dict[str, Any]]]] = {
    "image": (
        CHAT,
        user(CHAT),
        lambda data: {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
    ),
    "image-by-url": (
        CHAT,
        user(CHAT),
        lambda data: {"type": "image_url", "image_url": {"url": f"https://a/{data[:40]}"}},
    ),
    "audio": (CHAT, user(CHAT), lambda data: {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}),
    "video": (
        CHAT,
        user(CHAT),
        lambda data: {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{data}"}},
    ),
    "file": (CHAT, user(CHAT), lambda data: {"type": "file", "file": {"filename": "a.pdf", "file_data": data}}),
    "file-by-id": (CHAT, user(CHAT), lambda data: {"type": "file", "file": {"file_id": data[:40]}}),
    "source": (
        MESSAGES,
        user(MESSAGES),
        lambda data: {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}},
    ),
    "source-by-url": (
        MESSAGES,
        user(MESSAGES),
        lambda data: {"type": "image", "source": {"type": "url", "url": f"https://a/{data[:40]}"}},
    ),
    "document": (
        MESSAGES,
        user(MESSAGES),
        lambda data: {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": data}},
    ),
    "source-of-a-tool": (MESSAGES, tool(MESSAGES), lambda data: {"type": "image", "source": {"data": data}}),
    "input-image": (
        RESPONSES,
        user(RESPONSES),
        lambda data: {"type": "input_image", "image_url": f"data:image/png;base64,{data}"},
    ),
    "input-file": (RESPONSES, user(RESPONSES), lambda data: {"type": "input_file", "file_data": data}),
    "image-of-a-tool": (RESPONSES, tool(RESPONSES), lambda data: {"type": "input_image", "image_url": data}),
}
TEXT = {CHAT: "text", MESSAGES: "text", RESPONSES: "input_text"}


def completion(form: str, before: str, data: str, after: str) -> Completion:
    """Return a request with a text, a part that is not text, and a text."""
    path, body, part = FORMS[form]
    kind = TEXT[path]
    parts = [{"type": kind, "text": before}, part(data), {"type": kind, "text": after}]
    return read_completion(path, json.dumps(body(parts)).encode())


def read(prompts: Prompts, asked: Completion) -> Prompt:
    found = prompts.blocks_now(asked)
    assert found is not None
    return found


def common(one: Prompt, other: Prompt) -> int:
    """Number of blocks at the beginning that are equal."""
    pairs = enumerate(zip(one.blocks, other.blocks, strict=False))
    return next((number for number, (a, b) in pairs if a != b), min(len(one.blocks), len(other.blocks)))


@pytest.mark.parametrize("form", FORMS)
def test_one_part_counts_as_its_estimated_tokens(form: str, prompts: Prompts) -> None:
    """Not as its bytes, neither in the length nor in the number of blocks, which the event log and the index keep."""
    for size in (60, 100_000):
        prompt = read(prompts, completion(form, "what is this?", "A" * size, "tell me"))
        assert MEDIA_TOKENS < prompt.input_tokens < MEDIA_TOKENS + SLACK_TOKENS
        assert MEDIA_BLOCKS <= len(prompt.blocks) <= MEDIA_BLOCKS + SLACK_TOKENS // BLOCK_TOKENS


@pytest.mark.parametrize("form", FORMS)
def test_a_part_and_another_text_share_only_the_part(form: str, prompts: Prompts) -> None:
    """One picture with two long texts: what follows the picture is not cached."""
    long = [" ".join(f"{word}{number}" for number in range(2_000)) for word in ("this", "that")]
    one, other = (read(prompts, completion(form, "see:", "A" * 90_000, text)) for text in long)
    assert common(one, other) * BLOCK_TOKENS < MEDIA_TOKENS + SLACK_TOKENS
    assert common(one, other) >= MEDIA_BLOCKS


@pytest.mark.parametrize("form", FORMS)
def test_another_part_differs_from_its_place_on(form: str, prompts: Prompts) -> None:
    """The text before it is still a common prefix."""
    before = "a long instruction " * 100
    one, other = (read(prompts, completion(form, before, data * 50, "x")) for data in ("A", "B"))
    shared = common(one, other) * BLOCK_TOKENS * BYTES_PER_TOKEN
    assert len(before) - BLOCK_TOKENS * BYTES_PER_TOKEN < shared < len(before) + SLACK_TOKENS * BYTES_PER_TOKEN
    again = read(prompts, completion(form, before, "A" * 50, "x"))
    assert again == one


CONTENTS = st.lists(
    st.one_of(
        st.text(max_size=60).map(lambda text: {"type": "text", "text": text}),
        st.text(alphabet="AB", min_size=1, max_size=200).map(
            lambda data: {"type": "image_url", "image_url": {"url": data}}
        ),
        st.text(max_size=20),
    ),
    min_size=1,
    max_size=4,
)
CONVERSATIONS = st.lists(
    st.tuples(CONTENTS | st.text(max_size=80), st.none() | CONTENTS).map(
        lambda pair: {"role": "user"} | ({"before": pair[1]} if pair[1] else {}) | {"content": pair[0]}
    ),
    min_size=1,
    max_size=4,
)


@given(messages=CONVERSATIONS, tools=st.none() | CONTENTS, indent=st.none() | st.integers(0, 2))
def test_each_part_that_is_no_text_is_found(messages: list[Any], tools: Any, indent: int | None) -> None:
    """In the order of the messages, also where other fields contain the same JSON."""
    fields = {"messages": messages} | ({"tools": tools} if tools else {})
    asked = read_completion(CHAT, json.dumps(fields, indent=indent).encode())
    assert asked.text is not None
    found = [json.loads(asked.text[begin:end]) for begin, end in asked.media]
    lists = [message["content"] for message in messages if isinstance(message["content"], list)]
    assert found == [part for parts in lists for part in parts if isinstance(part, dict) and part["type"] != "text"]
    ends = [0, *[end for _, end in asked.media]]
    assert all(end <= begin for end, (begin, _) in zip(ends, asked.media, strict=False))


@given(messages=CONVERSATIONS, more=CONVERSATIONS)
def test_a_conversation_with_pictures_that_grows_keeps_its_prefix(messages: list[Any], more: list[Any]) -> None:
    prompts = Prompts(block_tokens=BLOCK_TOKENS, bytes_per_token=BYTES_PER_TOKEN)
    first, second = (
        read(prompts, read_completion(CHAT, json.dumps({"messages": some}).encode()))
        for some in (messages, messages + more)
    )
    assert second.blocks[: len(first.blocks)] == first.blocks
    prompts.close()


def test_a_screenshot_and_a_made_image_are_no_text(prompts: Prompts) -> None:
    """Items of the Responses API that contain an image without a list of parts."""
    data = "A" * 100_000
    items = [
        {"type": "computer_call_output", "call_id": "a", "output": {"type": "computer_screenshot", "image_url": data}},
        {"type": "image_generation_call", "id": "a", "result": data},
    ]
    prompt = read(prompts, read_completion(RESPONSES, json.dumps({"input": items}).encode()))
    assert 2 * MEDIA_TOKENS < prompt.input_tokens < 2 * MEDIA_TOKENS + SLACK_TOKENS
