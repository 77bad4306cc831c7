"""A conversation as a chat template reads it, and the interface of the request formats that contain one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import msgspec
from msgspec import Raw

from kvroute.gateway.openai_api.json_fields import Fields

Message: TypeAlias = dict[str, Any]
NULL = Raw(b"null")


class NoChat(Exception):
    """A request has no counterpart among chat completions: only the engine knows its prompt."""


class Chat(NamedTuple):
    """What a chat template renders."""

    messages: list[Message]
    """In the format of chat completions."""
    variables: dict[str, Any]
    """The other variables of the template."""


class TemplateTraits(NamedTuple):
    """Properties of a chat template on which vLLM's conversion of other formats depends."""

    system_first: bool = True
    """The template accepts a system message only at the beginning."""
    disabled_effort: str = "low"
    """The `reasoning_effort` for which the model thinks least."""


class Conversation(Protocol):
    """One request format that contains a conversation."""

    param: ClassVar[str]
    """Name of the field that contains the messages."""
    template_fields: ClassVar[tuple[str, ...]]
    """The fields that the chat template reads."""

    def text(self, fields: Fields) -> tuple[bytes, bool]:
        """Return the conversation as received JSON without the closing bracket, so that a conversation that grows keeps
        its prefix; and whether some part of it is not text.

        Raises:
            RequestError: 400, the format requires a conversation, and it is missing or has the wrong shape.
        """

    def needs_one_leg(self, fields: Fields) -> bool:
        """Whether one instance must compute prompt and output. Raises RequestError for a field of a wrong type."""

    def chat(self, fields: Fields, template: TemplateTraits) -> Chat:
        """Return the chat completion that has the same prompt.

        Raises:
            NoChat: there is none; any other exception means the same, because a client's fields may have any shape.
        """


class _Part(msgspec.Struct, gc=False):
    type: str | None = None
    content: Raw = NULL


_PARTS = msgspec.json.Decoder(list[_Part | str])


def media_in(content: Raw, texts: frozenset[str], *, nested: bool = True) -> bool:
    """Whether content has a part that is not text; False for content that is no list of parts.

    Args:
        content: of a message.
        texts: the types of parts that are text.
        nested: whether parts may contain parts.
    """
    if bytes(memoryview(content)[:1]) != b"[":
        return False
    try:
        parts = _PARTS.decode(content)
    except msgspec.MsgspecError:
        return False
    found = [part for part in parts if not isinstance(part, str)]
    if any(part.type not in texts for part in found):
        return True
    return nested and any(media_in(part.content, texts, nested=False) for part in found)


def unclosed(raw: Raw) -> memoryview:
    """Return a JSON list or string without its last character and the blanks before that; null becomes empty."""
    if raw == NULL:
        return memoryview(b"")
    inner = memoryview(raw)[:-1]
    while inner and inner[-1] in b" \t\r\n":
        inner = inner[:-1]
    return inner


def function_tool(function: Mapping[str, Any], parameters: str = "parameters") -> Message:
    """Return a function as chat templates get it from vLLM: its fields in this order, absent ones as null.

    Args:
        function: a client's definition of a function.
        parameters: name of the field with the JSON schema of its arguments.
    """
    found = {"name": function["name"], "description": function.get("description")}
    found["parameters"] = function.get(parameters)
    found |= {name: function[name] for name in ("strict", "defer_loading") if function.get(name) is not None}
    return {"type": "function", "function": found}


def variables(
    tools: list[Message] | None, effort: str | None, template_kwargs: dict[str, Any] | None, **more: Any
) -> dict[str, Any]:
    """Return a template's variables: the defaults of transformers and vLLM, overridden by the client's.

    Args:
        tools: as `function_tool` returns them.
        effort: `reasoning_effort`; None: not given.
        template_kwargs: the client's `chat_template_kwargs`.
        more: other variables.
    """
    found: dict[str, Any] = {"tools": tools or None, "documents": None, "add_generation_prompt": True}
    if effort is not None:
        found |= {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return found | more | (template_kwargs or {})


def decoded(fields: Fields, name: str) -> Any:
    """Return the value of a field; None if it is absent."""
    return msgspec.json.decode(fields[name]) if name in fields else None
