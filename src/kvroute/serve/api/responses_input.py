"""Conversations of the Responses API: `input` and `instructions`, converted to chat messages as vLLM does."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from msgspec import Raw

from kvroute.serve.api.conversation import (
    NULL,
    Chat,
    Message,
    NoChat,
    Span,
    TemplateTraits,
    decoded,
    function_tool,
    joined,
    media_in,
    variables,
)
from kvroute.serve.api.json_fields import Fields, flag, given

_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"})
_OF_ONE_ENGINE = ("previous_response_id", "previous_input_messages", "prompt", "conversation")
"""Fields whose content only one engine has, or that name something that the gateway does not know."""
_OWN_TOOLS = frozenset({"function", "custom", "namespace"})
"""Types of tools that the client runs. For others the engine computes several prompts after each other."""
_UNFINISHED = ("in_progress", "incomplete")


class _Item(msgspec.Struct, gc=False):
    content: Raw = NULL
    output: Raw = NULL
    result: Raw = NULL
    """The image that an earlier call of the engine's tool has made."""


class _Tool(msgspec.Struct, gc=False):
    type: str = ""


_ITEMS = msgspec.json.Decoder(list[_Item])
_TOOLS = msgspec.json.Decoder(list[_Tool] | None)


class ResponsesInput:
    """See `Conversation`."""

    param: ClassVar[str] = "input"
    template_fields: ClassVar[tuple[str, ...]] = ("instructions", "input", "tools", "reasoning", "chat_template_kwargs")

    def text(self, fields: Fields) -> tuple[bytes, tuple[Span, ...]]:
        """See `Conversation`. The engine rejects an input of a wrong shape."""
        json_value = fields.get("input", NULL)
        try:
            items = _ITEMS.decode(json_value)
        except msgspec.MsgspecError:
            items = []
        head = [fields[name] for name in ("tools", "instructions") if name in fields]
        return joined(head, json_value, [_media(item) for item in items])

    def needs_one_leg(self, fields: Fields) -> bool:
        """See `Conversation`."""
        # All fields are parsed, so that an invalid one is rejected whatever the others contain.
        background, named = flag(fields, "background"), any(given(fields, name) for name in _OF_ONE_ENGINE)
        try:
            tools = _TOOLS.decode(fields.get("tools", NULL)) or []
        except msgspec.MsgspecError:
            tools = []
        return background or named or any(tool.type not in _OWN_TOOLS for tool in tools)

    def chat(self, fields: Fields, template: TemplateTraits) -> Chat:
        """See `Conversation`."""
        tools: list[Message] = decoded(fields, "tools") or []
        messages = _messages(decoded(fields, "instructions"), decoded(fields, "input"))
        if any(tool["type"] != "function" for tool in tools):
            raise NoChat
        effort = (decoded(fields, "reasoning") or {}).get("effort")
        kwargs = decoded(fields, "chat_template_kwargs")
        return Chat(messages, variables([function_tool(tool) for tool in tools], effort, kwargs))


def _media(item: _Item) -> list[Raw]:
    """Return the parts of an item that are not text. An output that is an object is a screenshot."""
    found = media_in(item.content, _TEXT_PARTS) + media_in(item.output, _TEXT_PARTS)
    found += [item.output] if memoryview(item.output)[0] == 0x7B else []  # {
    return found + ([item.result] if memoryview(item.result)[0] == 0x22 else [])  # "


def _messages(instructions: str | None, given_input: Any) -> list[Message]:
    messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(given_input, str):
        return [*messages, {"role": "user", "content": given_input}]
    if given_input and given_input[-1].get("status") in _UNFINISHED:
        raise NoChat  # the engine continues this message
    for item in given_input:
        _append(messages, item)
    return messages


def _append(messages: list[Message], item: Message) -> None:
    """Append an item to the messages. What the assistant said, thought and called becomes one message."""
    kind, role = item.get("type"), item.get("role")
    if kind == "function_call" and not item.get("namespace"):
        call = {"name": item["name"], "arguments": item["arguments"]}
        _of_assistant(messages, "tool_calls", [{"id": item["call_id"], "type": "function", "function": call}])
    elif kind == "function_call_output":
        messages.append({"role": "tool", "content": item["output"], "tool_call_id": item["call_id"]})
    elif kind == "reasoning" and not item.get("encrypted_content"):
        thoughts = item.get("content") or item["summary"]
        _of_assistant(messages, "reasoning", thoughts[0]["text"] if thoughts else "")
    elif kind not in (None, "message") or role is None:
        raise NoChat
    elif role == "assistant":
        content = item["content"]
        _of_assistant(messages, "content", content if isinstance(content, str) else content[0]["text"])
    else:
        messages.append({"role": role, "content": item["content"]})


def _of_assistant(messages: list[Message], name: str, value: Any) -> None:
    """Add a field to the assistant's message at the end, or begin one."""
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if last is not None and last.get(name) is None:
        last[name] = value
    elif last is not None and name == "tool_calls":
        last[name] += value
    else:
        messages.append({"role": "assistant", name: value})
