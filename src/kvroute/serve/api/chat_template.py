"""A model's chat template: renders messages to the prompt that the engine computes, as transformers and vLLM do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvroute.serve.api.conversation import Chat, Conversation, Message, TemplateTraits, variables
from kvroute.serve.api.json_fields import Fields
from kvroute.topology.reading.assembly import read_text
from kvroute.types import InputError

_CONFIG, _FILE = "tokenizer_config.json", "chat_template.jinja"
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
"""Values of `reasoning_effort` that mean to think."""
_BILLING = "x-anthropic-billing-header"
"""Beginning of a line of Claude Code in system prompts that vLLM drops: it changes with every request."""
_TEXT_PARTS = frozenset({"text", "refusal", "thinking", "input_text", "output_text"})
_DEVELOPER = re.compile("[\"']developer[\"']")
_WALKS_CONTENT = re.compile(r"for\s+\w+\s+in\s+\w+(\.content|\[['\"]content['\"]\])|for\s+\w+\s+in\s+content\b")


class _Named(msgspec.Struct):
    name: str
    template: str


class _Generation(Extension):
    """`{% generation %}`: marks the assistant's text for training; here only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A compiled template with its special tokens."""

    template: jinja2.Template
    special_tokens: dict[str, str]
    walks_content: bool
    """Whether the template iterates over content parts itself; otherwise they are joined before rendering."""
    traits: TemplateTraits
    knows_developers: bool
    """Whether the template has the role `developer`; otherwise such messages become part of the system prompt."""

    @classmethod
    def load(cls, folder: Path, clock: Callable[[], datetime] = datetime.now) -> ChatTemplate | None:
        """Return the template in a tokenizer's folder, or None; `clock` is for templates that use the date.

        Raises:
            InputError: a file cannot be read, or the template cannot be parsed.
        """
        config = _read_config(folder / _CONFIG)
        own = folder / _FILE
        source = read_text(own) if own.is_file() else _default_template(config, folder / _CONFIG)
        if source is None:
            return None
        try:
            template = _environment(clock).from_string(source)
        except jinja2.TemplateSyntaxError as error:
            where = f"{folder}: chat template, line {error.lineno}"
            raise InputError(str(error.message), where=where, hint="fix or remove the template") from error
        tokens = {name: _token(value) for name, value in config.items() if name.endswith("_token") and _token(value)}
        loaded = cls(
            template, tokens, bool(_WALKS_CONTENT.search(source)), TemplateTraits(), bool(_DEVELOPER.search(source))
        )
        return replace(loaded, traits=TemplateTraits(_system_first(source), loaded._disabled_effort()))

    def render(self, fields: Fields, conversation: Conversation) -> str | None:
        """Return the prompt of a request in the format of `conversation`; None if it cannot be rendered."""
        try:
            return self._render(conversation.chat(fields, self.traits))
        except Exception:
            # A client's messages may break the operator's template in any way. The engine reports the error, not the
            # gateway.
            return None

    def _render(self, chat: Chat) -> str:
        messages = chat.messages
        if not self.knows_developers and any(message["role"] == "developer" for message in messages):
            messages = _with_one_system_prompt(messages)
        messages = [_shaped(message, self.walks_content) for message in messages]
        return self.template.render({**self.special_tokens, **chat.variables, "messages": messages})

    def _disabled_effort(self) -> str:
        """Return vLLM's `reasoning_effort` for disabled thinking: "low" if the template ignores or rejects "none"."""

        def probe(effort: str) -> str | None:
            try:
                return self._render(Chat([{"role": "user", "content": "Hi"}], variables(None, effort, None)))
            except Exception:
                return None

        none = probe("none")
        return "low" if none is None or any(probe(effort) == none for effort in _EFFORTS) else "none"


def _system_first(source: str) -> bool:
    """Whether a template rejects a system message in the middle, as vLLM finds out: with the plain environment."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    messages = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
    try:
        environment.from_string(source).render(messages=messages, add_generation_prompt=False)
    except Exception:
        return True
    return False


def _with_one_system_prompt(messages: list[Message]) -> list[Message]:
    """Return messages without developers: what they and the system say becomes the first message, as in vLLM."""
    said: list[str] = []
    for message in messages:
        if message["role"] in ("system", "developer"):
            parts = _parts(message.get("content"), "system")
            said.append("\n".join([part["text"] for part in parts if isinstance(part.get("text"), str)]))
    others = [message for message in messages if message["role"] not in ("system", "developer")]
    return [{"role": "system", "content": "\n\n".join(filter(None, said))}, *others]


def _environment(clock: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: clock().strftime(form)
    return environment


def _to_json(value: object, indent: int | None = None, **layout: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **layout)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(read_text(path), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise InputError(str(error), where=str(path), hint="use the file that belongs to the tokenizer") from error


def _default_template(config: dict[str, Any], path: Path) -> str | None:
    """Return the default template of a config, which has one template or several named ones; None if it has none."""
    try:
        value = msgspec.convert(config.get("chat_template"), str | list[_Named] | None)
    except msgspec.ValidationError as error:
        hint = 'give one template as a string, or a list of {"name": ..., "template": ...}'
        raise InputError(str(error), where=f"{path}: chat_template", hint=hint) from error
    if isinstance(value, list):
        return next((entry.template for entry in reversed(value) if entry.name == "default"), None)
    return value


def _token(value: object) -> str:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _shaped(message: Message, walks_content: bool) -> Message:
    """Return a message in the form that vLLM passes to templates.

    Content parts are joined unless the template iterates over them; arguments of tool calls are objects.
    """
    message, role = dict(message), message["role"]
    parts = _parts(message.get("content"), role)
    if role == "tool" or not walks_content:
        message["content"] = "\n".join([part["text"] for part in parts if isinstance(part.get("text"), str)])
    else:
        message["content"] = parts
    if role == "assistant":
        if message.get("tool_calls"):
            message["tool_calls"] = [_called(call) for call in message["tool_calls"]]
        else:
            message.pop("tool_calls", None)
        if message.get("reasoning") is not None:
            message["reasoning_content"] = message["reasoning"]
    return message


def _parts(content: Any, role: str) -> list[Message]:
    """Return content as a list of parts."""
    given = [content] if isinstance(content, str) else content or []
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in given]
    parts = [part | {"type": "text"} if part.get("type") in _TEXT_PARTS else part for part in parts]
    if role != "system":
        return parts
    kept = [(part, _without_billing(part.get("text"))) for part in parts]
    return [part if text is None else part | {"text": text} for part, text in kept if text != ""]


def _without_billing(text: Any) -> str | None:
    """Return a text without Claude Code's first line; None: it has none."""
    return text.partition("\n")[2] if isinstance(text, str) and text.startswith(_BILLING) else None


def _called(call: Message) -> Message:
    function = dict(call["function"])
    if not isinstance(arguments := function.get("arguments"), dict):
        try:
            arguments = msgspec.json.decode(arguments) if arguments else {}
        except msgspec.DecodeError:
            arguments = {}
        function["arguments"] = arguments if isinstance(arguments, dict) else {}
    return call | {"function": function}
