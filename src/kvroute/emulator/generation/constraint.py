"""What an answer must be: JSON under a schema, text of a pattern, one of several texts, or a call of a tool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvroute.emulator.errors import ApiError
from kvroute.emulator.generation.json_values import json_text
from kvroute.emulator.generation.patterns import matching_text
from kvroute.emulator.generation.words import Draws
from kvroute.emulator.request_body import Body, Kind

ANY_OBJECT = {"type": "object"}
_FREE_FORMATS = ("text", "structural_tag")
"""Formats that free text satisfies: the tags of a structural tag begin with a text that these answers do not have."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    schema: Any
    """JSON schema of its arguments."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """One of the fields is set, `tool` beside the others."""

    schema: Any = None
    pattern: str | None = None
    choices: tuple[str, ...] = ()
    tool: Tool | None = None
    named: bool = False
    """Whether the request names the tool."""

    def text(self, draws: Draws) -> str:
        """Return the text of an answer, or the arguments of the call.

        Raises:
            ApiError: none was found.
        """
        if self.tool is not None:
            return json_text(self.tool.schema, draws)
        if self.pattern is not None:
            return matching_text(self.pattern, draws)
        if self.choices:
            return self.choices[draws.below(len(self.choices))]
        return json_text(self.schema, draws)


def read_constraint(kind: Kind, body: Body) -> Constraint | None:
    """Return the constraint of a request; None: free text.

    Raises:
        ApiError: a field has no valid value.
    """
    if not body.may_constrain:
        return None
    tool, named = _called_tool(kind, body) if body.tools and kind != "completions" else (None, False)
    if tool is not None:
        return Constraint(tool=tool, named=named)
    if not body.tools and kind == "chat" and body.tool_choice not in (None, "none", "auto"):
        raise ApiError("When using `tool_choice`, `tools` must be set.", param="tool_choice")
    for constraint in (_response_format(kind, body), _structured(body)):
        if constraint is not None:
            return constraint
    return None


def _response_format(kind: Kind, body: Body) -> Constraint | None:
    """Read `response_format` of chats and completions, `text.format` of responses, `output_config` of messages."""
    match kind:
        case "responses":
            given = _member(body.text, "format", "text")
        case "messages":
            given = _member(body.output_config, "format", "output_config")
        case _:
            given = body.response_format
    if given is None:
        return None
    form = _member(given, "type", "response_format")
    if form in _FREE_FORMATS:
        return None
    if form == "json_object":
        return Constraint(schema=ANY_OBJECT)
    if form != "json_schema":
        what = f"response_format has the type {form!r}; give text, json_object, json_schema or structural_tag"
        raise ApiError(what, param="response_format")
    inner = given if kind in ("responses", "messages") else _member(given, "json_schema", "response_format")
    schema = _member(inner, "schema", "response_format")
    if schema is None:
        raise ApiError("response_format has no schema; give json_schema.schema", param="response_format")
    return Constraint(schema=schema)


def _structured(body: Body) -> Constraint | None:
    """Read `structured_outputs`, and the `guided_` fields of earlier versions of vLLM."""
    given = {name: value for name, value in (body.structured_outputs or {}).items() if value not in (None, False)}
    given |= {name: value for name, value in body.guided() if value is not None}
    found = [name for name in ("json", "regex", "choice", "grammar", "json_object", "structural_tag") if name in given]
    if len(found) > 1:
        what = f"structured_outputs has {' and '.join(found)}; give one of them"
        raise ApiError(what, param="structured_outputs")
    match found:
        case ["json"]:
            return Constraint(schema=_parsed(given["json"]))
        case ["json_object"]:
            return Constraint(schema=ANY_OBJECT)
        case ["regex"] if isinstance(given["regex"], str):
            return Constraint(pattern=given["regex"])
        case ["choice"] if given["choice"] and all(isinstance(choice, str) for choice in given["choice"]):
            return Constraint(choices=tuple(given["choice"]))
        case ["grammar"]:
            what = "emulated engines have no grammars; give structured_outputs.regex or .json"
            raise ApiError(what, param="structured_outputs")
        case ["regex" | "choice" as name]:
            raise ApiError(f"structured_outputs.{name} has no valid value", param="structured_outputs")
    return None


def _parsed(schema: Any) -> Any:
    """Return a schema that may be given as text."""
    try:
        return msgspec.json.decode(schema) if isinstance(schema, str) else schema
    except msgspec.DecodeError as error:
        raise ApiError(f"structured_outputs.json is not JSON: {error}", param="structured_outputs") from None


def _member(value: Any, name: str, param: str) -> Any:
    """Return a member of an object; None: there is none, or no object."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ApiError(f"{param} is not an object; give one", param=param)
    return value.get(name)


def _called_tool(kind: Kind, body: Body) -> tuple[Tool | None, bool]:
    """Return the tool that the answer calls, and whether the request names it.

    With `auto`, a turn of the user is answered with a call, and the result of a tool with text. The tool is the first
    one that the conversation has not called; if it has called all, `required` calls the last one.
    """
    tools = list(_tools(body))
    mode, name = _tool_choice(body.tool_choice)
    if name:
        named = [tool for tool in tools if tool.name == name]
        if not named:
            what = f"The tool specified in `tool_choice` does not match any of the specified `tools`: {name!r}"
            raise ApiError(what, param="tool_choice")
        return named[0], True
    if mode == "none" or not tools:
        return None, False
    called, after_result = _history(kind, body)
    fresh = [tool for tool in tools if tool.name not in called]
    if mode == "auto" and (after_result or not fresh):
        return None, False
    return (fresh or tools[-1:])[0], False


def _tools(body: Body) -> Iterator[Tool]:
    """Yield the functions among the tools, in the formats of all APIs."""
    try:
        tools = msgspec.json.decode(body.tools, type=list[dict[str, Any]] | None)
    except msgspec.DecodeError as error:
        raise ApiError(f"tools cannot be read: {error}; give a list of objects", param="tools") from None
    for tool in tools or ():
        function = tool.get("function", tool)
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            schema = function.get("parameters", function.get("input_schema"))
            yield Tool(function["name"], {"type": "object", "properties": {}} if schema is None else schema)


def _tool_choice(given: Any) -> tuple[str, str]:
    """Return the mode, and the name of the tool if the choice names one."""
    if isinstance(given, dict):
        function = given.get("function", given)
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str):
            return "required", name
        given = given.get("mode", given.get("type"))
    mode = {None: "auto", "any": "required", "allowed_tools": "auto"}.get(given, given)
    if mode not in ("none", "auto", "required"):
        what = f'Invalid value for `tool_choice`: {given!r}! Only named tools, "none", "auto" or "required"'
        raise ApiError(f"{what} are supported.", param="tool_choice")
    return mode, ""


def _history(kind: Kind, body: Body) -> tuple[set[str], bool]:
    """Return the names of the tools that the conversation has called, and whether its last turn is a tool's result."""
    raw = body.input if kind == "responses" else body.messages
    turns = msgspec.json.decode(raw)
    if not isinstance(turns, list):
        return set(), False
    parts = [part for turn in turns if isinstance(turn, dict) for part in _parts(turn)]
    names = (part.get("name") or _function_name(part) for part in parts if _calls(part))
    last = list(_parts(turns[-1])) if turns and isinstance(turns[-1], dict) else []
    after = any(part.get("role") == "tool" or part.get("type") in _RESULTS for part in last)
    return {name for name in names if isinstance(name, str)}, after


_CALLS = ("function", "function_call", "tool_use")
_RESULTS = ("function_call_output", "tool_result")


def _parts(turn: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a turn, the calls of a chat's message, and the blocks of a message."""
    yield turn
    for name in ("tool_calls", "content"):
        inner: Sequence[Any] = turn[name] if isinstance(turn.get(name), list) else ()
        yield from (part for part in inner if isinstance(part, dict))


def _calls(part: Mapping[str, Any]) -> bool:
    return part.get("type") in _CALLS


def _function_name(part: Mapping[str, Any]) -> Any:
    function = part.get("function")
    return function.get("name") if isinstance(function, dict) else None
