"""A model's chat template: renders messages to the prompt that the engine computes, as transformers and vLLM do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvroute.gateway.openai_api.json_fields import Fields
from kvroute.topology.assembly import read_text
from kvroute.types import InputError

Message: TypeAlias = dict[str, Any]

_CONFIG, _FILE = "tokenizer_config.json", "chat_template.jinja"
_CONTEXT = ("tools", "documents", "reasoning_effort", "add_generation_prompt")
TEMPLATE_FIELDS = ("messages", *_CONTEXT, "chat_template_kwargs")
"""The fields of a chat request that the template reads."""
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
        return cls(template, tokens, bool(_WALKS_CONTENT.search(source)))

    def render(self, fields: Fields) -> str | None:
        """Return the prompt of a chat request; None if it cannot be rendered."""
        try:
            messages = [_shaped(message, self.walks_content) for message in msgspec.json.decode(fields["messages"])]
            return self.template.render({**self.special_tokens, **_context(fields), "messages": messages})
        except Exception:
            # A client's messages may break the operator's template in any way. The engine reports the error, not the
            # gateway.
            return None


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
        return next((each.template for each in reversed(value) if each.name == "default"), None)
    return value


def _token(value: object) -> str:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _context(fields: Fields) -> dict[str, Any]:
    """Return the template's variables: the defaults of transformers, overridden by the client's fields."""
    context: dict[str, Any] = {"tools": None, "documents": None, "add_generation_prompt": True}
    given = {name: msgspec.json.decode(fields[name]) for name in _CONTEXT if name in fields}
    context |= {name: value for name, value in given.items() if value is not None}
    if "chat_template_kwargs" in fields:
        context |= msgspec.json.decode(fields["chat_template_kwargs"]) or {}
    return context


def _shaped(message: Message, walks_content: bool) -> Message:
    """Return a message in the form that vLLM passes to templates.

    Content parts are joined unless the template iterates over them; arguments of tool calls are objects.
    """
    message = dict(message)
    if isinstance(message.get("content"), list) and not walks_content:
        message["content"] = _joined(message["content"])
    if message["role"] == "assistant" and isinstance(message.get("tool_calls"), list):
        message["tool_calls"] = [_called(call) for call in message["tool_calls"]]
    return message


def _called(call: Message) -> Message:
    function = dict(call["function"])
    if isinstance(arguments := function.get("arguments"), str):
        function["arguments"] = msgspec.json.decode(arguments) if arguments else {}
    return call | {"function": function}


def _joined(content: object) -> str:
    if isinstance(content, list):
        texts = [part if isinstance(part, str) else part.get("text") for part in content]
        return "\n".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""
