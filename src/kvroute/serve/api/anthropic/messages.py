"""Conversations of Anthropic's Messages API, converted to chat messages as vLLM does."""

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
from kvroute.serve.api.json_fields import Fields

_TEXT_PARTS = frozenset({"text", "thinking", "redacted_thinking", "tool_use", "tool_result", "tool_reference"})
_BILLING = "x-anthropic-billing-header"
"""Beginning of a system text of Claude Code that vLLM drops: it changes with every request."""


class _Message(msgspec.Struct, gc=False):
    content: Raw = NULL


_MESSAGES = msgspec.json.Decoder(list[_Message])


class AnthropicMessages:
    """See `Conversation`."""

    param: ClassVar[str] = "messages"
    template_fields: ClassVar[tuple[str, ...]] = (
        "system",
        "messages",
        "tools",
        "thinking",
        "output_config",
        "chat_template_kwargs",
    )

    def text(self, fields: Fields) -> tuple[bytes, tuple[Span, ...]]:
        """See `Conversation`. The engine rejects messages of a wrong shape."""
        json_value = fields.get("messages", NULL)
        try:
            messages = _MESSAGES.decode(json_value)
        except msgspec.MsgspecError:
            messages = []
        media = [media_in(message.content, _TEXT_PARTS) for message in messages]
        return joined([fields[name] for name in ("tools", "system") if name in fields], json_value, media)

    def needs_one_leg(self, fields: Fields) -> bool:
        """See `Conversation`."""
        return False

    def chat(self, fields: Fields, template: TemplateTraits) -> Chat:
        """See `Conversation`."""
        messages: list[Message] = decoded(fields, "messages")
        system = _system_texts(decoded(fields, "system"), whole=True)
        if template.system_first:
            system += [_system_text(message) for message in messages if message["role"] == "system"]
        converted = [{"role": "system", "content": "".join(system)}] if any(system) else []
        for message in messages:
            if message["role"] != "system":
                converted += _converted(message)
            elif not template.system_first and (text := _system_text(message)):
                converted.append({"role": "system", "content": text})
        kwargs = decoded(fields, "chat_template_kwargs")
        return Chat(converted, variables(_tools(decoded(fields, "tools")), _effort(fields, template), kwargs))


def _effort(fields: Fields, template: TemplateTraits) -> str | None:
    if (decoded(fields, "thinking") or {}).get("type") == "disabled":
        return template.disabled_effort
    effort: str | None = (decoded(fields, "output_config") or {}).get("effort")
    return effort


def _tools(tools: list[Message] | None) -> list[Message]:
    schemas = [{**tool, "input_schema": {**tool["input_schema"]}} for tool in tools or ()]
    for tool in schemas:
        tool["input_schema"].setdefault("type", "object")
    return [function_tool(tool, "input_schema") for tool in schemas]


def _system_texts(content: Any, *, whole: bool = False) -> list[str]:
    """Return the texts of a system prompt. Args: `whole`: keep a string whatever it begins with."""
    if isinstance(content, str):
        return [content] if whole or not content.startswith(_BILLING) else []
    blocks = content or ()
    if any(block["type"] in ("tool_addition", "tool_removal") for block in blocks):
        raise NoChat
    texts = [block["text"] for block in blocks if block["type"] == "text" and block["text"]]
    return [text for text in texts if not text.startswith(_BILLING)]


def _system_text(message: Message) -> str:
    return "".join(_system_texts(message["content"]))


def _converted(message: Message) -> list[Message]:
    """Return the chat messages of one message: results of tools come before what the user says."""
    role, content = message["role"], message["content"]
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    results = [_result(block, role) for block in content if block["type"] == "tool_result"]
    parts = [{"type": "text", "text": block["text"]} for block in content if block["type"] == "text" and block["text"]]
    thoughts = [block["thinking"] for block in content if block["type"] == "thinking"]
    calls = [_call(block) for block in content if block["type"] == "tool_use"]
    if any(block["type"] not in _TEXT_PARTS for block in content):
        raise NoChat
    own: Message = {"role": role}
    if parts:
        own["content"] = parts[0]["text"] if len(parts) == 1 else parts
    if thoughts:
        own["reasoning"] = "".join(thoughts)
    if calls:
        own["tool_calls"] = calls
    return results if role == "user" and not parts else [*results, own]


def _call(block: Message) -> Message:
    function = {"name": block["name"], "arguments": block.get("input") or {}}
    return {"id": block["id"], "type": "function", "function": function}


def _result(block: Message, role: str) -> Message:
    content = block.get("content") or ""
    if role != "user":
        raise NoChat
    if not isinstance(content, str):
        if any(part["type"] != "text" for part in content):
            raise NoChat
        content = "\n".join(part.get("text", "") for part in content)
    return {"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": content}
