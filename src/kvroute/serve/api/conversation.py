"""A conversation as a chat template reads it, and the interface of the request formats that contain one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import msgspec
from msgspec import Raw

from kvroute.serve.api.json_fields import Fields

Message: TypeAlias = dict[str, Any]
NULL = Raw(b"null")
Span: TypeAlias = tuple[int, int]
"""Begin and end of a part in a text, in bytes."""


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

    def text(self, fields: Fields) -> tuple[bytes, tuple[Span, ...]]:
        """Return the conversation as received JSON without the closing bracket, so that a conversation that grows keeps
        its prefix; and where those parts of it are that are not text.

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


class ContentPart(msgspec.Struct, gc=False):
    """A part of a message's content."""

    type: str | None = None
    content: Raw = NULL
    """Parts in this one."""


_PARTS = msgspec.json.Decoder(list[ContentPart | str])
_RAWS = msgspec.json.Decoder(list[Raw])
_BETWEEN = b"[, \t\r\n"
"""What separates messages."""
_PROBE_BYTES = 128
"""Length of the beginning of a part that is searched; what follows it is compared."""


def media_in(content: Raw, texts: frozenset[str], *, nested: bool = True) -> list[Raw]:
    """Return the parts of content that are not text, in their order; none if it is no list of parts.

    Args:
        content: of a message.
        texts: the types of parts that are text.
        nested: whether parts may contain parts.
    """
    if bytes(memoryview(content)[:1]) != b"[":
        return []
    try:
        return media_of(content, _PARTS.decode(content), texts, nested=nested)
    except msgspec.MsgspecError:
        return []


def media_of(
    content: Raw, parts: Sequence[ContentPart | str], texts: frozenset[str], *, nested: bool = False
) -> list[Raw]:
    """Return the same of content whose parts are decoded."""
    media: list[Raw] = []
    raws: list[Raw] = []
    for number, part in enumerate(parts):
        if isinstance(part, str):
            continue
        if part.type not in texts:
            raws = raws or _RAWS.decode(content)
            media.append(raws[number])
        elif nested:
            media += media_in(part.content, texts, nested=False)
    return media


def joined(head: Sequence[Raw], messages: Raw, media: Sequence[Sequence[Raw]]) -> tuple[bytes, tuple[Span, ...]]:
    """Return a conversation as `Conversation.text` does.

    Args:
        head: the fields before the messages.
        messages: the messages.
        media: the parts of each message that are not text, in their order.
    """
    # This is the only copy that is made of the messages: they may be long.
    text = b"".join([*head, unclosed(messages)])
    if not any(media):
        return text, ()
    at, spans = sum(map(len, head)), list[Span]()
    for message, parts in zip(_RAWS.decode(messages), media, strict=True):
        while text[at] in _BETWEEN:
            at += 1
        end, within = at + len(message), at
        for part in map(bytes, parts):
            probe = part[:_PROBE_BYTES]
            while not text.startswith(part, within := text.index(probe, within, end)):
                within += 1
            spans.append((within, within := within + len(part)))
        at = end
    return text, tuple(spans)


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
