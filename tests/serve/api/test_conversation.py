"""Conversations of the Responses API and of Anthropic's Messages API become the chat messages that vLLM makes of them,
have blocks that grow with them, and never make the gateway fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.serve.api.chat_template import ChatTemplate
from kvroute.serve.api.conversation import NoChat, TemplateTraits
from kvroute.serve.api.json_fields import RequestError
from kvroute.serve.api.prompt import Prompts
from kvroute.serve.api.prompt_reader import MEDIA_TOKENS
from kvroute.serve.api.requests import CONVERSATIONS, Completion, Kind, read_completion

RESPONSES, MESSAGES = b"/v1/responses", b"/v1/messages"
ANYWHERE = TemplateTraits(system_first=False, disabled_effort="none")
"""A template that accepts system messages everywhere."""
FIRST = TemplateTraits(system_first=True, disabled_effort="low")
USER = {"role": "user", "content": "hi"}
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 4000}}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}


def read(path: bytes, **fields: Any) -> Completion:
    """Return the request with these fields."""
    return read_completion(path, json.dumps(fields).encode())


def chat(kind: Kind, traits: TemplateTraits = ANYWHERE, **fields: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return messages and variables of the template for these fields."""
    path = {"responses": RESPONSES, "messages": MESSAGES, "chat": b"/v1/chat/completions"}[kind]
    return CONVERSATIONS[kind].chat(read(path, **fields).fields, traits)


@pytest.mark.parametrize(
    ("given_input", "messages"),
    [
        ("hi", [USER]),
        ([USER], [USER]),
        ([{"type": "message", "id": "m", **USER}], [USER]),
        (
            [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}],
            [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}],
        ),
        (
            [USER, {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]}],
            [USER, {"role": "assistant", "content": "b"}],
        ),
        (
            [USER, {"type": "reasoning", "summary": [], "content": [{"text": "t"}]}, CALL, CALL | {"call_id": "c2"}],
            [
                USER,
                {
                    "role": "assistant",
                    "reasoning": "t",
                    "tool_calls": [
                        {"id": name, "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
                        for name in ("c1", "c2")
                    ],
                },
            ],
        ),
        (
            [USER, {"role": "assistant", "content": "b"}, CALL],
            [
                USER,
                {
                    "role": "assistant",
                    "content": "b",
                    "tool_calls": [
                        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
                    ],
                },
            ],
        ),
        (
            [USER, {"type": "function_call_output", "call_id": "c1", "output": "7"}],
            [USER, {"role": "tool", "content": "7", "tool_call_id": "c1"}],
        ),
        (
            [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
            [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
        ),
    ],
    ids=range(9),
)
def test_the_input_of_a_response_becomes_messages(given_input: Any, messages: list[dict[str, Any]]) -> None:
    assert chat("responses", input=given_input)[0] == messages
    system = {"role": "system", "content": "be brief"}
    assert chat("responses", input=given_input, instructions="be brief")[0] == [system, *messages]


@pytest.mark.parametrize(
    ("given_messages", "expected"),
    [
        ([USER], [USER]),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}]}], [{"role": "user", "content": "a"}]),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        ),
        (
            [
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "t", "signature": "s"},
                        {"type": "redacted_thinking", "data": "x"},
                        {"type": "text", "text": "a"},
                        {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
                    ],
                }
            ],
            [
                {
                    "role": "assistant",
                    "content": "a",
                    "reasoning": "t",
                    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
                }
            ],
        ),
        (
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "so?"},
                        {"type": "tool_result", "tool_use_id": "c1", "content": "7"},
                        {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "8"}] * 2},
                    ],
                }
            ],
            [
                {"role": "tool", "tool_call_id": "c1", "content": "7"},
                {"role": "tool", "tool_call_id": "c2", "content": "8\n8"},
                {"role": "user", "content": "so?"},
            ],
        ),
        (
            [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1"}]}],
            [{"role": "tool", "tool_call_id": "c1", "content": ""}],
        ),
    ],
    ids=range(6),
)
def test_anthropic_messages_become_chat_messages(
    given_messages: list[dict[str, Any]], expected: list[dict[str, Any]]
) -> None:
    assert chat("messages", messages=given_messages)[0] == expected


def test_a_system_prompt_comes_first_and_later_ones_where_the_template_accepts_them() -> None:
    """A line of Claude Code that changes with every request is no part of the prompt."""
    billing = {"type": "text", "text": "x-anthropic-billing-header: cch=1"}
    system = [billing, {"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]
    later = {"role": "system", "content": [{"type": "text", "text": "; now"}]}
    messages = [USER, later, USER]
    brief = {"role": "system", "content": "be brief"}
    assert chat("messages", system=system, messages=messages)[0] == [brief, USER, later | {"content": "; now"}, USER]
    assert chat("messages", FIRST, system=system, messages=messages)[0] == [
        {"role": "system", "content": "be brief; now"},
        USER,
        USER,
    ]
    assert chat("messages", system=[billing], messages=[USER])[0] == [USER]


FUNCTION = {"name": "f", "description": None, "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("kind", "tool"),
    [
        ("chat", {"function": {"parameters": {"type": "object"}, "name": "f"}, "type": "function"}),
        ("responses", {"type": "function", "parameters": {"type": "object"}, "name": "f"}),
        ("messages", {"input_schema": {}, "name": "f"}),
    ],
)
def test_tools_reach_the_template_as_vllm_writes_them(kind: Kind, tool: dict[str, Any]) -> None:
    """Their fields have one order, so that the text is equal whatever order the client uses."""
    prompt = {"input": "a"} if kind == "responses" else {"messages": [USER]}
    tools = chat(kind, tools=[tool], **prompt)[1]["tools"]
    assert json.dumps(tools) == json.dumps([{"type": "function", "function": FUNCTION}])
    assert chat(kind, **prompt)[1]["tools"] is None


@pytest.mark.parametrize(
    ("kind", "fields", "traits", "effort"),
    [
        ("responses", {"reasoning": {"effort": "high"}}, FIRST, "high"),
        ("messages", {"output_config": {"effort": "max"}}, FIRST, "max"),
        ("messages", {"thinking": {"type": "disabled"}}, FIRST, "low"),
        ("messages", {"thinking": {"type": "disabled"}, "output_config": {"effort": "max"}}, ANYWHERE, "none"),
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": 2000}}, FIRST, None),
    ],
    ids=str,
)
def test_reasoning_reaches_the_template(
    kind: Kind, fields: dict[str, Any], traits: TemplateTraits, effort: str | None
) -> None:
    prompt = {"input": "a"} if kind == "responses" else {"messages": [USER]}
    variables = chat(kind, traits, **prompt, **fields)[1]
    assert variables.get("reasoning_effort") == effort
    assert variables.get("enable_thinking") == (None if effort is None else effort != "none")
    own = chat(kind, traits, **prompt, **fields, chat_template_kwargs={"enable_thinking": 7})[1]
    assert own["enable_thinking"] == 7


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("responses", {"input": [{"type": "item_reference", "id": "a"}]}),
        ("responses", {"input": [{"type": "message", "role": "assistant", "content": "a", "status": "incomplete"}]}),
        ("responses", {"input": "a", "tools": [{"type": "custom", "name": "f"}]}),
        ("responses", {"input": [CALL | {"namespace": "n"}]}),
        ("messages", {"messages": [{"role": "user", "content": [PICTURE]}]}),
        ("messages", {"messages": [{"role": "system", "content": [{"type": "tool_removal"}]}]}),
        ("messages", {"messages": [{"role": "assistant", "content": [{"type": "tool_result"}]}]}),
    ],
    ids=range(7),
)
def test_what_has_no_counterpart_is_left_to_the_engine(kind: Kind, fields: dict[str, Any]) -> None:
    with pytest.raises(NoChat):
        chat(kind, **fields)


@pytest.fixture
def prompts(tmp_path: Path) -> Prompts:
    """Return a reader without a tokenizer."""
    return Prompts(block_tokens=4, bytes_per_token=2)


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_the_next_turn_contains_the_blocks_of_the_previous_one(path: bytes, prompts: Prompts) -> None:
    """Also if instructions or tools come after the messages in the body."""
    name = "input" if path == RESPONSES else "messages"
    head = {"instructions": "be brief"} if path == RESPONSES else {"system": "be brief"}
    turns = [{"role": "user", "content": f"turn {number} " * 5} for number in range(4)]
    earlier, later = (prompts.blocks_now(read(path, **{name: turns[:upto]}, **head)) for upto in (2, 4))
    assert earlier is not None
    assert later is not None
    assert len(earlier.blocks) > 10
    assert later.blocks[: len(earlier.blocks)] == earlier.blocks
    other = prompts.blocks_now(read(path, **{name: turns}))
    assert other is not None
    assert other.blocks[0] != later.blocks[0]
    prompts.close()


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (MESSAGES, {"messages": [{"role": "user", "content": [PICTURE]}]}),
        (
            MESSAGES,
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [PICTURE]}]}
                ]
            },
        ),
        (
            RESPONSES,
            {
                "input": [
                    {
                        "role": "user",
                        "content": [{"type": "input_image", "image_url": "data:image/png;base64," + "A" * 4000}],
                    }
                ]
            },
        ),
        (
            RESPONSES,
            {
                "input": [
                    {
                        "type": "function_call_output",
                        "call_id": "a",
                        "output": [{"type": "input_image", "image_url": "data:image/png;base64," + "A" * 4000}],
                    }
                ]
            },
        ),
    ],
    ids=range(4),
)
def test_a_picture_counts_as_a_picture(path: bytes, fields: dict[str, Any], prompts: Prompts) -> None:
    """Not as its bytes."""
    prompt = prompts.blocks_now(read(path, **fields))
    assert prompt is not None
    assert MEDIA_TOKENS < prompt.input_tokens < MEDIA_TOKENS + 100
    prompts.close()


PARTS = st.lists(
    st.dictionaries(
        st.sampled_from(["type", "text", "content", "thinking", "input", "name", "id"]),
        st.sampled_from(["text", "tool_use", "tool_result", "thinking", "input_text"]) | st.none() | st.integers(0, 1),
        max_size=4,
    )
    | st.text(max_size=2),
    max_size=3,
)
ITEMS = st.lists(
    st.dictionaries(
        st.sampled_from(["role", "type", "content", "output", "arguments", "call_id", "name", "summary", "status"]),
        st.sampled_from(["user", "assistant", "system", "message", "function_call", "reasoning"]) | PARTS | st.none(),
        max_size=5,
    ),
    max_size=3,
)


@given(conversation=ITEMS | st.text(max_size=3) | st.none(), head=PARTS | st.text(max_size=3) | st.none())
def test_any_conversation_is_read(conversation: Any, head: Any, template: ChatTemplate) -> None:
    """The engine rejects what is wrong with it."""
    for path, name, system in ((RESPONSES, "input", "instructions"), (MESSAGES, "messages", "system")):
        completion = read(path, **{name: conversation, system: head, "tools": head})
        text = template.render(completion.fields, CONVERSATIONS[completion.kind])
        assert text is None or isinstance(text, str)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    """Return a template that shows everything."""
    folder = tmp_path_factory.mktemp("template")
    (folder / "chat_template.jinja").write_text("{{ messages | tojson }}{{ tools | tojson }}{{ reasoning_effort }}")
    loaded = ChatTemplate.load(folder)
    assert loaded is not None
    return loaded


@pytest.mark.parametrize(
    ("source", "traits"),
    [
        ("{{ messages }}", (False, "low")),
        ("{% if enable_thinking %}think{% endif %}", (False, "none")),
        ("{% if reasoning_effort in ('none', 'max') %}{{ raise_exception('no') }}{% endif %}", (False, "low")),
        ("{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('a') }}", None),
        (
            "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}"
            "{% endif %}{% endfor %}",
            (True, "low"),
        ),
        ("{{ strftime_now('%Y') }}", (True, "low")),
    ],
    ids=range(6),
)
def test_traits_of_a_template_are_those_that_vllm_finds(
    source: str, traits: tuple[bool, str] | None, tmp_path: Path
) -> None:
    """vLLM looks for the place of system messages without the functions that it gives to templates later."""
    (tmp_path / "chat_template.jinja").write_text(source)
    if traits is None:
        with pytest.raises(Exception, match="chat template"):
            ChatTemplate.load(tmp_path)
        return
    loaded = ChatTemplate.load(tmp_path)
    assert loaded is not None
    assert loaded.traits == traits


@pytest.mark.parametrize(
    ("more", "expected"),
    [("", "system:a\n\nb;user:hi;"), ("{# 'developer' #}", "system:a;user:hi;developer:b;")],
    ids=["unknown", "known"],
)
def test_developers_are_part_of_the_system_prompt_unless_the_template_knows_them(
    more: str, expected: str, tmp_path: Path
) -> None:
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}" + more
    )
    loaded = ChatTemplate.load(tmp_path)
    assert loaded is not None
    fields = read(RESPONSES, instructions="a", input=[USER, {"role": "developer", "content": "b"}]).fields
    assert loaded.render(fields, CONVERSATIONS["responses"]) == expected


def test_limits_and_parameters_of_errors() -> None:
    assert read(RESPONSES, input="a", max_output_tokens=7).max_tokens == 7
    assert read(MESSAGES, messages=[USER], max_tokens=7).max_tokens == 7
    assert read(RESPONSES, input="a", n=0).n == 1, "the engine ignores it"
    for path, name in ((RESPONSES, "max_output_tokens"), (MESSAGES, "max_tokens")):
        with pytest.raises(RequestError) as caught:
            read(path, **{name: 0})
        assert caught.value.param == name
