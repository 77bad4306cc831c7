"""Records of streams against engines written plainly: wherever streams break off, the client gets the whole text."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.serve.api.requests import Completion, read_completion
from kvroute.serve.api.stream_record import StreamRecord, UnexpectedEvent, may_continue

PROMPT_IDS = [7, 8, 9]
PATHS = {"completions": b"/v1/completions", "chat": b"/v1/chat/completions"}
Words = list[tuple[list[int], str]]
"""Token ids and text of each event. The text of some tokens comes with a later one."""


def request(kind: str, **more: Any) -> Completion:
    """A request as the gateway reads it."""
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if kind == "chat" else {"prompt": "hi"}
    return read_completion(PATHS[kind], msgspec.json.encode(prompt | {"stream": True, "temperature": 0} | more))


def sse(document: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


def engine_stream(kind: str, name: str, words: Words, done: int, prompt_tokens: int) -> list[bytes]:
    """The events of vLLM, with token ids and token counts, for the words from `done` on."""
    head = {"id": name, "created": len(name), "object": f"{kind}-object", "model": "m"}
    events, first = list[bytes](), True
    if kind == "chat":
        opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        events.append(sse({**head, "choices": [opening], "prompt_token_ids": PROMPT_IDS}))
    for place, (ids, text) in enumerate(words[done:], done):
        ended = "length" if place + 1 == len(words) else None
        choice: dict[str, Any] = {"index": 0, "finish_reason": ended, "logprobs": None, "token_ids": ids}
        choice |= {"delta": {"content": text} if text else {}} if kind == "chat" else {"text": text}
        if kind != "chat":
            choice["prompt_token_ids"] = PROMPT_IDS if first else None
        first = False
        events.append(sse({**head, "choices": [choice]}))
    tokens = sum(len(ids) for ids, _ in words[done:])
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}
    events += [sse({**head, "choices": [], "usage": usage}), b"data: [DONE]\n\n"]
    return events


def read(stream: bytes) -> list[dict[str, Any]]:
    """The documents of a client's stream."""
    assert stream.endswith(b"data: [DONE]\n\n")
    return [msgspec.json.decode(chunk[6:]) for chunk in stream.split(b"\n\n")[:-2]]


def text_of(documents: list[dict[str, Any]]) -> str:
    pieces = [choice for document in documents for choice in document["choices"]]
    return "".join([piece.get("text") or piece.get("delta", {}).get("content") or "" for piece in pieces])


@given(
    kind=st.sampled_from(sorted(PATHS)),
    words=st.lists(
        st.tuples(st.lists(st.integers(0, 99), min_size=1, max_size=3), st.sampled_from(["", "a", "bc", "é"])),
        min_size=1,
        max_size=8,
    ),
    cuts=st.lists(st.integers(1, 8), max_size=3),
    limited=st.booleans(),
)
def test_wherever_streams_break_off_the_client_gets_the_whole_response(
    kind: str, words: Words, cuts: list[int], limited: bool
) -> None:
    """`cuts` are the numbers of events after which engines break off. The continuation's prompt ends with the tokens
    whose text the client has."""
    total = sum(len(ids) for ids, _ in words)
    limit = {"max_tokens": total} if limited or kind == "completions" else {}
    record, stream, done = StreamRecord(request(kind, **limit)), b"", 0
    events = engine_stream(kind, "engine0", words, 0, len(PROMPT_IDS))
    for number, cut in enumerate(cuts):
        stream += b"".join([record.relayed(event) for event in events[:cut]])
        got = [event for event in events[:cut] if b"token_ids" in event]
        if not record.continuable:
            assert not got or b'"length"' in got[-1]
            events = events[cut:]
            break
        openings = 1 if kind == "chat" and not number else 0
        here = range(done, done + cut - openings)
        done = max([place + 1 for place in here if words[place][1]], default=done)
        shown = [token for ids, _ in words[:done] for token in ids]
        rest = record.rest()
        assert msgspec.json.decode(rest.fields["prompt"]) == PROMPT_IDS + shown
        assert msgspec.json.decode(rest.fields["max_tokens"]) == (total - len(shown) if limit else None)
        assert msgspec.json.decode(rest.fields["temperature"]) == 0
        assert (rest.kind, rest.stream, "messages" in rest.fields) == ("completions", True, False)
        events = engine_stream("completions", f"engine{number + 1}", words, done, len(PROMPT_IDS) + len(shown))
    stream += b"".join([record.relayed(event) for event in events])
    documents = read(stream)
    assert text_of(documents) == "".join([text for _, text in words])
    assert {(document["id"], document["object"], document["created"]) for document in documents} <= {
        ("engine0", f"{kind}-object", 7),
        ("engine0", "chat.completion.chunk", 7),
    }
    assert [choice["finish_reason"] for document in documents for choice in document["choices"]][-1] == "length"
    assert documents[-1]["usage"] == {
        "prompt_tokens": len(PROMPT_IDS),
        "completion_tokens": total,
        "total_tokens": len(PROMPT_IDS) + total,
    }
    assert record.tokens == total
    for holder in [*documents, *[choice for document in documents for choice in document["choices"]]]:
        assert holder.get("token_ids") is None
        assert holder.get("prompt_token_ids") is None


@pytest.mark.parametrize(
    "odd",
    [
        {"choices": [{"delta": {"content": "x"}}]},
        {"choices": [{"delta": {"reasoning": "x"}, "token_ids": [1]}]},
        {"choices": [{"delta": {"tool_calls": [{}]}, "token_ids": [1]}]},
        {"choices": [{"delta": {"content": "x"}, "token_ids": [1], "logprobs": {}}]},
        {"choices": [{"delta": {"content": "x"}, "token_ids": ["1"]}]},
        {"choices": [{}, {}]},
        {"choices": ["x"]},
        {"error": {"message": "out of memory"}},
    ],
    ids=["no ids", "reasoning", "tool", "log-probabilities", "text as ids", "two choices", "text", "error"],
)
def test_an_unexpected_event_is_relayed_and_its_stream_is_not_continued(odd: dict[str, Any]) -> None:
    """A later event cannot make the stream one that may be continued."""
    record = StreamRecord(request("chat"))
    first, second, *_ = engine_stream("chat", "engine0", [([1], "a"), ([2], "b")], 0, 3)
    assert record.relayed(first)
    assert record.continuable
    event = sse(odd)
    assert record.relayed(event) == event
    assert record.relayed(second) == second
    assert not record.continuable


def test_an_unexpected_event_of_a_continuation_is_an_error() -> None:
    """Its format is not that of the client's stream."""
    record = StreamRecord(request("chat"))
    first, second, *_ = engine_stream("chat", "engine0", [([1], "a"), ([2], "b")], 0, 3)
    record.relayed(first + second)
    record.rest()
    with pytest.raises(UnexpectedEvent):
        record.relayed(sse({"choices": [{"index": 0, "text": "x", "finish_reason": None}]}))


@pytest.mark.parametrize(
    "more",
    [{"n": 2}, {"stream": False}, {"tools": []}, {"tool_choice": "none"}, {"presence_penalty": 1}, {"min_tokens": 3}],
    ids=lambda more: next(iter(more)),
)
def test_requests_that_are_not_continued(more: dict[str, Any]) -> None:
    """Several answers, no stream, or a field that a continuation does not repeat."""
    assert may_continue(request("chat", top_p=0.5, user="me"))
    assert not may_continue(request("chat", **more))
