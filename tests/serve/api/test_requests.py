"""Reading requests: no field is lost, only JSON is accepted, and the published schema is correct."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvroute.serve.api.json_fields import (
    ENGINE_FIELDS,
    PIECE_BYTES,
    VALUES_MAX,
    RequestError,
    check_utf8,
    values_in,
)
from kvroute.serve.api.openapi import document
from kvroute.serve.api.passthrough_body import read_passthrough
from kvroute.serve.api.requests import ANSWERS_MAX, IDS_MAX, read_completion
from kvroute.serve.api.responses import (
    cached_tokens,
    error_body,
    error_event,
    models_body,
    sse_events,
    usage_of,
)

COMPLETIONS, CHAT = b"/v1/completions", b"/v1/chat/completions"
PATHS = st.sampled_from([COMPLETIONS, CHAT])
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
DESCRIPTION = document("0")

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@given(
    before=st.integers(PIECE_BYTES - 4, PIECE_BYTES + 1),
    middle=st.binary(max_size=6) | st.text(max_size=3).map(str.encode),
    after=st.sampled_from([0, PIECE_BYTES - 5, PIECE_BYTES]),
)
def test_utf8_checked_in_pieces_gives_the_same_result_as_at_once(before: int, middle: bytes, after: int) -> None:
    """Characters may be split between two pieces; the error gives the same byte."""
    body = b"a" * before + middle + b"a" * after

    def utf8_error(check: Callable[[bytes], object]) -> tuple[int, str] | None:
        try:
            check(body)
        except UnicodeDecodeError as error:
            return error.start, error.reason
        return None

    assert utf8_error(check_utf8) == utf8_error(bytes.decode)


@st.composite
def raw_values(draw: st.DrawFn) -> bytes:
    """Draw a JSON value as a client may write it: with or without escapes, compact or indented."""
    value = draw(values)
    text = json.dumps(value, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 2])))
    return text.encode()


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": MESSAGES} | fields).encode()


def completions(**fields: Any) -> bytes:
    return json.dumps({"prompt": "hi"} | fields).encode()


def refusal(path: bytes, body: bytes) -> RequestError:
    with pytest.raises(RequestError) as refused:
        read_completion(path, body)
    return refused.value


@given(st.dictionaries(st.text().map("x-".__add__), raw_values(), max_size=6))
def test_unknown_fields_keep_their_bytes(unknown: dict[str, bytes]) -> None:
    members = [b'"prompt":"hi"', *(json.dumps(name).encode() + b" : " + raw for name, raw in unknown.items())]
    fields = read_completion(COMPLETIONS, b"{" + b",".join(members) + b"}").fields
    assert {name: bytes(raw) for name, raw in fields.items() if name != "prompt"} == unknown


@given(
    PATHS,
    st.binary()
    | raw_values()
    | st.builds(lambda raw: b'{"prompt":' + raw + b',"messages":' + raw + b"}", raw_values()),
)
def test_any_bytes_are_parsed_or_rejected_in_openai_form(path: bytes, body: bytes) -> None:
    refused = None
    try:
        read_completion(path, body)
    except RequestError as error:
        refused = error
    if refused is not None:
        fields = json.loads(refused.body())["error"]
        assert refused.status == 400
        assert set(fields) == {"message", "type", "param", "code"}
        assert fields["type"] == "invalid_request_error"
        assert fields["message"] == refused.message


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    """Draw valid and invalid values of the fields that routing reads."""
    count = st.none() | st.sampled_from([-1, 0, 1, 2, 7, 1.0, 1.5, 2**31 - 1, 2**31, "1", True, [], 10**30])
    flag = st.none() | st.booleans() | st.sampled_from([0, 1, "true", {}])
    text = st.none() | st.text(max_size=3) | st.sampled_from([1, ["a"], {}])
    ids = st.lists(st.sampled_from([0, 5, 2.0, -1, 2**63 - 1, 2**63, "a", 1.5, None, [1]]), max_size=2)
    parts = st.lists(st.sampled_from(["a", {"type": "text"}, {"type": None}, {"type": 1}, {}, 1, None]), max_size=2)
    content = st.none() | st.text(max_size=2) | parts | st.sampled_from([1, {}, True])
    message = st.fixed_dictionaries({}, optional={"role": text, "content": content, "name": values})
    fields = {
        "model": text,
        "stream": flag,
        "max_tokens": count,
        "n": st.none() | st.sampled_from([-1, 0, 1, 3, 2.0, ANSWERS_MAX + 1, "2"]),
        "best_of": count,
        "use_beam_search": flag,
        "cache_salt": text,
        "vllm_xargs": st.none() | st.sampled_from([{}, {"a": 1}, {"kv_transfer_params": 1}, 1, [], "a"]),
        "echo": flag,
        "max_completion_tokens": count,
        "prompt": st.text(max_size=3) | ids | st.lists(ids, max_size=2) | st.lists(text, max_size=2) | values,
        "messages": st.lists(message, max_size=2) | values,
        "temperature": values,
    }
    named = draw(st.sets(st.sampled_from(sorted(set(fields) - {"prompt", "messages"})), max_size=3))
    return {name: draw(fields[name]) for name in [*named, draw(st.sampled_from(["prompt", "messages"]))]}


SCHEMAS = {
    path: jsonschema_rs.validator_for(
        DESCRIPTION["components"]["schemas"][name] | {"components": DESCRIPTION["components"]}
    )
    for path, name in ((COMPLETIONS, "CompletionRequest"), (CHAT, "ChatRequest"))
}


@given(PATHS, bodies())
@example(COMPLETIONS, {"echo": 0, "best_of": 2, "prompt": ""})
@example(COMPLETIONS, {"best_of": -1, "prompt": ["a", "a"]})
@example(COMPLETIONS, {"prompt": [0.0]})
@example(COMPLETIONS, {"prompt": [[1, 2.0], [3e2]]})
@example(COMPLETIONS, {"prompt": [0.5]})
@example(COMPLETIONS, {"prompt": [-1.0]})
@example(COMPLETIONS, {"prompt": [1e30]})
def test_the_published_schema_accepts_what_the_gateway_accepts(path: bytes, body: dict[str, Any]) -> None:
    try:
        read_completion(path, json.dumps(body).encode())
        read = True
    except RequestError:
        read = False
    assert read == SCHEMAS[path].is_valid(body)


def test_the_description_is_valid_openapi() -> None:
    import schemathesis
    from schemathesis.core.result import Ok

    described = schemathesis.openapi.from_dict(DESCRIPTION)
    described.validate()
    operations = [operation for operation in described.get_all_operations() if isinstance(operation, Ok)]
    assert len(operations) == len(list(described.get_all_operations())) == 27


def test_fields_that_routing_needs_are_parsed() -> None:
    read = read_completion(
        CHAT,
        b'{"model":"llama","messages":[{"role":"user","content":"\\u00e4"}],"stream":true,"max_tokens":7,"n":2,'
        b'"max_completion_tokens":5,"cache_salt":"s","temperature":0.50}',
    )
    assert (read.kind, read.model, read.stream, read.max_tokens, read.n, read.salt) == (
        "chat",
        "llama",
        True,
        5,
        2,
        "s",
    )
    assert (read.prompts, read.one_leg, read.token_ids, read.media) == (1, True, None, ())
    assert bytes(read.fields["temperature"]) == b"0.50"


def test_null_counts_as_absent() -> None:
    names = ("model", "stream", "max_tokens", "n", "best_of", "cache_salt", "prompt_logprobs", "echo", "vllm_xargs")
    read = read_completion(COMPLETIONS, completions(**dict.fromkeys(names)))
    plain = read_completion(COMPLETIONS, completions())
    assert (read.model, read.stream, read.max_tokens, read.n, read.salt) == ("", False, 16, 1, "")
    assert not read.one_leg
    assert (plain.model, plain.stream, plain.max_tokens, plain.n, plain.salt) == ("", False, 16, 1, "")
    assert refusal(CHAT, b'{"messages":null}').param == "messages"
    assert refusal(COMPLETIONS, b'{"prompt":null}').param == "prompt"


@pytest.mark.parametrize(
    ("prompt", "text", "ids", "further"),
    [
        ("a\n\u00e4", "a\n\u00e4".encode(), None, ()),
        ("", b"", None, ()),
        ([1, 2], None, [1, 2], ()),
        (["a", "b\n"], b"a", None, (b"b\n",)),
        ([[1], [2, 3]], None, [1], ([2, 3],)),
    ],
    ids=["text", "empty", "ids", "texts", "id-lists"],
)
def test_every_form_of_a_prompt_is_parsed(
    prompt: object, text: bytes | None, ids: list[int] | None, further: object
) -> None:
    for indent in (None, 70):
        read = read_completion(COMPLETIONS, json.dumps({"prompt": prompt}, indent=indent).encode())
        assert (read.text, read.token_ids, read.further) == (text, ids, further)
        assert read.one_leg == bool(further)


@given(st.text())
def test_the_text_of_a_prompt_is_its_utf8(prompt: str) -> None:
    for ascii_only in (True, False):
        body = json.dumps({"prompt": prompt}, ensure_ascii=ascii_only).encode()
        assert read_completion(COMPLETIONS, body).text == prompt.encode()


@given(st.lists(st.text(), min_size=1, max_size=5), st.sampled_from([None, 2]))
def test_a_longer_conversation_keeps_its_prefix(turns: list[str], indent: int | None) -> None:
    def text(upto: int) -> bytes:
        messages = [{"role": "user", "content": turn} for turn in turns[:upto]]
        read = read_completion(CHAT, json.dumps({"tools": [], "messages": messages}, indent=indent).encode())
        assert read.text is not None
        return read.text

    texts = [text(upto) for upto in range(1, len(turns) + 1)]
    assert all(longer.startswith(shorter) for shorter, longer in pairwise(texts))


def test_different_tools_give_a_different_prefix() -> None:
    one, other = (read_completion(CHAT, chat(tools=[{"name": name}])).text for name in "ab")
    assert one is not None
    assert other is not None
    assert one[:20] != other[:20]


@pytest.mark.parametrize(
    ("fields", "one_leg"),
    [
        ({}, False),
        ({"n": 2}, True),
        ({"best_of": 2}, True),
        ({"best_of": 1, "n": 1}, False),
        ({"prompt": ["a", "b"]}, True),
        ({"prompt": ["a"]}, False),
        ({"use_beam_search": True}, True),
        ({"prompt_logprobs": 0}, True),
        ({"echo": True}, False),
        ({"logprobs": 2}, False),
        ({"echo": True, "logprobs": 0}, True),
        ({"prompt": None, "prompt_embeds": "AAAA"}, True),
    ],
    ids=str,
)
def test_which_requests_are_not_split(fields: dict[str, Any], one_leg: bool) -> None:
    assert read_completion(COMPLETIONS, completions(**fields)).one_leg == one_leg


@pytest.mark.parametrize(
    ("path", "body", "param", "text"),
    [
        (CHAT, b'{"messages":[{"role":"user"}],}', None, "byte 30"),
        (CHAT, b"", None, "the body is empty; send one JSON object"),
        (CHAT, b"[]", None, "object"),
        (CHAT, b'{"a":' + b"[" * 100_000, None, "deep"),
        (CHAT, b'{"model":"\xff"}', None, "byte 10"),
        (CHAT, chat(messages=[]), "messages", "length >= 1"),
        (CHAT, chat(messages=[{"content": "a"}]), "messages", "role"),
        (CHAT, chat(messages=[*MESSAGES, {"role": "user", "content": 7}]), "messages", "$[1].content"),
        (CHAT, chat(max_tokens=0), "max_tokens", "from 1"),
        (CHAT, chat(max_tokens=1.5), "max_tokens", "1.5"),
        (CHAT, chat(stream="yes"), "stream", '"yes"'),
        (CHAT, chat(model=7), "model", "7"),
        (CHAT, chat(cache_salt=""), "cache_salt", "empty"),
        (CHAT, chat(vllm_xargs={"kv_transfer_params": "x"}), "vllm_xargs", "kv_transfer_params"),
        (COMPLETIONS, b"{}", "prompt", "missing"),
        (COMPLETIONS, completions(prompt=[]), "prompt", "empty"),
        (COMPLETIONS, completions(prompt=[1, "a"]), "prompt", "$[1]"),
        (COMPLETIONS, completions(prompt=[True]), "prompt", "bool"),
        (COMPLETIONS, completions(n=ANSWERS_MAX, prompt=["a", "b"]), "n", "2 prompts"),
        (COMPLETIONS, completions(prompt=17), "prompt", "17 is not a valid prompt; give a string"),
        (COMPLETIONS, completions(max_tokens=0), "max_tokens", "0 is not an integer from 1 to"),
        (COMPLETIONS, completions(max_tokens=0, echo=False), "max_tokens", "from 1"),
    ],
    ids=range(22),
)
def test_an_error_gives_the_field_and_the_cause(path: bytes, body: bytes, param: str | None, text: str) -> None:
    refused = refusal(path, body)
    assert refused.param == param
    assert text in refused.message
    assert refused.code is not None
    assert ";" in refused.message  # the message contains the fix


def test_fields_between_engines_are_not_accepted_from_clients() -> None:
    read = read_completion(COMPLETIONS, completions(**dict.fromkeys(ENGINE_FIELDS, "x"), temperature=1))
    assert set(read.fields) == {"prompt", "temperature"}


def test_tools_and_images_are_accepted() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    body = chat(
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "what is this?"}, picture]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
            {"role": "tool", "tool_call_id": "1", "content": ""},
        ],
        tools=[{"type": "function"}],
    )
    assert read_completion(CHAT, body).media
    assert not read_completion(CHAT, chat(messages=[{"role": "user", "content": ["a", {"type": "text"}]}])).media


@given(st.lists(st.text(), max_size=6), st.booleans(), st.data())
def test_events_of_a_stream_are_counted(texts: list[str], done: bool, data: st.DataObject) -> None:
    """The count does not depend on how events are grouped into pieces or on their content."""
    events = [f"data: {json.dumps({'text': text + 'data: '})}\n\n".encode() for text in texts]
    events += [b"data: [DONE]\n\n"] if done else []
    cuts = sorted(data.draw(st.sets(st.integers(0, len(events)))))
    pieces = [b"".join(events[a:b]) for a, b in zip([0, *cuts], [*cuts, len(events)], strict=True)]
    assert sum(sse_events(piece) for piece in pieces) == len(texts)


def test_usage_of_a_non_streaming_response() -> None:
    assert usage_of(b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":42}}') == (3, 42)
    assert usage_of(b'{"usage":null}') is None
    assert usage_of(b'{"usage":{"prompt_tokens":3}}') == (3, None)
    details = b'"usage":{"prompt_tokens_details":{"cached_tokens":5}}'
    assert cached_tokens(b"{%b}" % details) == 5
    assert cached_tokens(b'{%b,"kv_transfer_params":{"remote_prefill_cached_tokens":7}}' % details) == 7
    assert [cached_tokens(body) for body in (b'{"usage":{}}', b'{"kv_transfer_params":null}', b"", b"[1]")] == [
        None
    ] * 4
    assert usage_of(b"\xff{") is None
    assert usage_of(b'{"a":' + b"[" * 100_000) is None


def test_errors_and_models_have_the_form_of_openai() -> None:
    assert json.loads(error_body("why", "server_error", param="n")) == {
        "error": {"message": "why", "type": "server_error", "param": "n", "code": "server_error"}
    }
    event = error_event("line\nbreak", "server_error")
    assert event.startswith(b"data: {")
    assert event.endswith(b"}\n\n")
    assert event.count(b"\n") == 2
    assert json.loads(models_body({"a": None, "b": None}, 7))["data"][1] == {
        "id": "b",
        "object": "model",
        "created": 7,
        "owned_by": "kvroute",
    }


few = st.integers(-5, 5) | st.floats(0, 1) | st.none()
texts = st.text('a",\\{[é', max_size=6)
trees = st.recursive(
    few | texts,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=20,
)


def strings_of(value: Any) -> int:
    """Return the number of strings in a tree, keys included."""
    match value:
        case str():
            return 1
        case list():
            return sum(map(strings_of, value))
        case dict():
            return len(value) + sum(map(strings_of, value.values()))
        case _:
            return 0


@given(trees, st.booleans())
def test_values_are_counted_correctly_for_any_strings(tree: Any, ascii_only: bool) -> None:
    """The count is at least the number of strings and at most that plus the values between them; a run of numbers
    counts as one."""
    text = json.dumps([tree, [1, 2, 3] * 100], ensure_ascii=ascii_only).encode()
    strings = strings_of(tree)
    assert strings <= values_in(text, 10**9) <= 2 * strings + text.count(b"]") + text.count(b"}") + 60


@pytest.mark.parametrize("before_end", range(14))
def test_values_are_counted_correctly_for_any_piece_boundaries(before_end: int) -> None:
    """The piece may end in a string, in an escape, or between two values."""
    string = b"a" * (PIECE_BYTES - before_end) + b'\\"\\\\\\"\\n'
    assert 1000 <= values_in(b'["' + string + b'",' + b"[]," * 1000 + b"[]]", 10**9) <= 1010
    assert 1000 <= values_in(b"[" + b"[]," * 1000 + b'"' + string + b'"]', 10**9) <= 1010


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, b'{"prompt":[' + b"[]," * VALUES_MAX + b"[]]}"),
        (COMPLETIONS, b'{"prompt":[' + b'"",' * VALUES_MAX + b'""]}'),
        (COMPLETIONS, b'{"prompt":"a","x":[' + b"{}," * VALUES_MAX + b"{}]}"),
        (COMPLETIONS, b"{" + b'"a":1,' * VALUES_MAX + b'"prompt":"a"}'),
        (CHAT, b'{"messages":[' + b'{"rol\\u0065":""},' * VALUES_MAX + b'{"role":""}]}'),
        (CHAT, b'{"messages":[{"role":"","content":[' + b'"",' * VALUES_MAX + b'""]}]}'),
        (CHAT, b'{"messages":[{"role":""}],"vllm_xargs":{' + b'"a":1,' * VALUES_MAX + b'"a":1}}'),
    ],
    ids=["lists", "texts", "elsewhere", "fields", "messages", "parts", "extra"],
)
def test_a_body_of_too_many_values_is_rejected_before_it_is_parsed(path: bytes, body: bytes) -> None:
    assert str(VALUES_MAX) in refusal(path, body).message
    with pytest.raises(RequestError, match=str(VALUES_MAX)):
        read_passthrough(path, body)


def test_too_many_prompts_or_token_ids_are_rejected_before_they_are_parsed() -> None:
    def peak_bytes(body: bytes, text: str) -> int:
        tracemalloc.start()
        try:
            assert text in refusal(COMPLETIONS, body).message
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak_bytes(b'{"prompt":[' + b"[1]," * 200_000 + b"[1]]}", "each of 200001 prompts") < 10_000_000
    assert peak_bytes(b'{"prompt":[' + b"1," * IDS_MAX + b"1]}", str(IDS_MAX)) < 3 * IDS_MAX
    most = b'{"prompt":[' + b"[1]," * (ANSWERS_MAX - 1) + b"[1]]}"
    assert read_completion(COMPLETIONS, most).prompts == ANSWERS_MAX
    assert str(ANSWERS_MAX) in refusal(COMPLETIONS, most.replace(b"[", b"[[1],", 1)).message


@pytest.mark.parametrize("separator", [",", ", ", ",\n"])
def test_long_lists_of_token_ids_are_parsed_like_short_ones(separator: str) -> None:
    """Long lists are read in pieces; an error reports its position in the whole list."""
    ids = [index * 7919 % 128_000 for index in range(60_000)]

    def body(ids: list[Any]) -> bytes:
        return json.dumps({"prompt": ids}, separators=(separator, ":")).encode()

    assert len(body(ids)) > 2 * PIECE_BYTES
    read = read_completion(COMPLETIONS, body(ids))
    assert read.token_ids == ids
    both = read_completion(COMPLETIONS, body([ids, ids[:9]]))
    assert (both.token_ids, both.further) == (ids, (ids[:9],))
    for at in (0, 59_000):
        wrong = [*ids[:at], -1, *ids[at:]]
        assert f"`$[{at}]`" in refusal(COMPLETIONS, body(wrong)).message
        assert f"`$[1][{at}]`" in refusal(COMPLETIONS, body([ids, wrong])).message
    assert refusal(COMPLETIONS, body([*ids, [1, 2], "a,b"])).param == "prompt"
    assert "`$[1]`" in refusal(COMPLETIONS, body([ids, 5])).message


def test_only_the_model_is_parsed_from_other_requests() -> None:
    assert read_passthrough(b"/v1/embeddings", b'{"model":"m","input":[[1,2]]}').model == "m"
    assert read_passthrough(b"/tokenize", b"{}").model == ""
    for body in (b"[]", b'{"model":1}', b"{", b'{"model":"\xff"}', b'{"a":' + b"[" * 100_000):
        with pytest.raises(RequestError):
            read_passthrough(b"/tokenize", body)


@given(
    st.dictionaries(st.sampled_from([*sorted(ENGINE_FIELDS), "model", "input", "x"]), st.text(max_size=5), max_size=6),
    st.booleans(),
)
def test_engine_fields_are_removed_from_other_requests_and_nothing_else_changes(
    sent: dict[str, str], escaped: bool
) -> None:
    """A body without such fields is passed on byte for byte; a name written with an escape is the same name."""
    body = json.dumps(sent, separators=(" ,", ": ")).encode()
    if escaped:
        body = body.replace(b'"kv_', b'"k\\u0076_').replace(b'"rid', b'"r\\u0069d')
    forwarded = read_passthrough(b"/tokenize", body).body
    assert json.loads(forwarded) == {name: value for name, value in sent.items() if name not in ENGINE_FIELDS}
    assert forwarded == body or not ENGINE_FIELDS.isdisjoint(sent)
