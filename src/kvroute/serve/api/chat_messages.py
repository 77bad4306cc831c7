"""Conversations of chat completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Raw

from kvroute.serve.api.conversation import (
    NULL,
    Chat,
    ContentPart,
    Message,
    Span,
    TemplateTraits,
    decoded,
    function_tool,
    joined,
    media_of,
    variables,
)
from kvroute.serve.api.json_fields import Fields, count, flag, given, shown, wrong

_TEXT_PARTS = frozenset({"text", "refusal", "thinking", "input_text", "output_text"})
_SHAPE = "give objects with a string `role` and a `content` that is a string, a list of parts or null"


class _Message(msgspec.Struct, gc=False):
    role: str
    content: Raw = NULL


_MESSAGES = msgspec.json.Decoder(Annotated[list[_Message], msgspec.Meta(min_length=1)])
_PARTS = msgspec.json.Decoder(list[ContentPart | str])
_SEVERAL = frozenset({"best_of", "use_beam_search", "prompt_logprobs"})
"""Fields that `computes_several` reads; most requests have none."""


class ChatMessages:
    """See `Conversation`."""

    param: ClassVar[str] = "messages"
    template_fields: ClassVar[tuple[str, ...]] = (
        "messages",
        "tools",
        "documents",
        "reasoning_effort",
        "add_generation_prompt",
        "chat_template_kwargs",
    )

    def text(self, fields: Fields) -> tuple[bytes, tuple[Span, ...]]:
        """See `Conversation`."""
        json_value = fields.get("messages", NULL)
        if json_value == NULL:
            raise wrong("messages", "is missing", _SHAPE)
        try:
            media = [_media(message.content, index) for index, message in enumerate(_MESSAGES.decode(json_value))]
        except msgspec.MsgspecError as error:
            raise wrong("messages", str(error), _SHAPE) from None
        head = [fields[name] for name in ("chat_template", "documents", "tools") if name in fields]
        return joined(head, json_value, media)

    def needs_one_leg(self, fields: Fields) -> bool:
        """See `Conversation`."""
        return computes_several(fields)

    def chat(self, fields: Fields, template: TemplateTraits) -> Chat:
        """See `Conversation`."""
        messages: list[Message] = msgspec.json.decode(fields["messages"])
        tools: Any = decoded(fields, "tools")
        own = {name: decoded(fields, name) for name in ("documents", "add_generation_prompt")}
        return Chat(
            messages,
            variables(
                [_tool(tool) for tool in tools or ()],
                decoded(fields, "reasoning_effort"),
                decoded(fields, "chat_template_kwargs"),
                **{name: value for name, value in own.items() if value is not None},
            ),
        )


def computes_several(fields: Fields) -> bool:
    """Whether a completion has beams, several tries, or log-probabilities of the prompt."""
    if _SEVERAL.isdisjoint(fields):
        return False
    # All fields are parsed, so that an invalid one is rejected whatever the others contain.
    several, beams = (count(fields, "best_of", 0) or 1) > 1, flag(fields, "use_beam_search")
    return several or beams or given(fields, "prompt_logprobs")


def _tool(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, dict) else None
    return function_tool(function) if isinstance(function, dict) and "name" in function else tool


def _media(content: Raw, index: int) -> list[Raw]:
    """Return the parts of `content` that are not text. Raises RequestError unless it is a string, parts or null."""
    first = memoryview(content)[0]
    if first == 0x5B:  # [
        return media_of(content, _PARTS.decode(content), _TEXT_PARTS)
    if first not in b'"n':
        raise wrong("messages", f"`$[{index}].content` is {shown(bytes(content))}", _SHAPE)
    return []
