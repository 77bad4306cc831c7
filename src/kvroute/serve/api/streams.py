"""Streams of engines by kind of request: which events carry tokens, which precede them, what they report as their
number of tokens, and how an error is written."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec
from msgspec import Raw

from kvroute.serve.api.anthropic.errors import anthropic_error
from kvroute.serve.api.json_fields import Fields
from kvroute.serve.api.requests import Completion, Kind
from kvroute.serve.api.responses import TokenUsage, error_event, sse_events, usage_of

_encode = msgspec.json.Encoder().encode
DONE_CHUNK = (b"\ndata: [DONE]\n\n\r\n", b"\ndata:[DONE]\n\n\r\n")
"""Ends of a chunk of `completions` or `chat` whose last event is not a token."""
USAGE_MARK = b'_tokens"'
"""Part of every event that reports numbers of tokens. The text of an output does not contain it: quotes are escaped."""
_BOUNDARY = re.compile(rb"\r?\n\r?\n")
_NULL, _TRUE = Raw(b"null"), Raw(b"true")
_FIELDS = msgspec.json.Decoder(Fields)

Role: TypeAlias = Literal["preamble", "error", "token"]
"""What an event of a stream is before its first token."""


class _Document(msgspec.Struct):
    """The data of an event, as far as its role depends on it."""

    error: Raw = _NULL
    object: Raw = _NULL
    type: Raw = _NULL
    choices: Raw = _NULL


_DOCUMENT = msgspec.json.Decoder(_Document)
_INVALID = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)


def read_event(block: bytes) -> tuple[bytes, bytes]:
    """Return name and data of one server-sent event (HTML standard, section 9.2.6); both are empty for a comment."""
    name, lines = b"", []
    for line in block.splitlines():
        field, _, value = line.partition(b":")
        if field == b"data":
            lines.append(value.removeprefix(b" "))
        elif field == b"event":
            name = value.removeprefix(b" ")
    return name, b"\n".join(lines)


def _blocks(data: bytes, start: int = 0) -> Iterator[tuple[int, int]]:
    """Yield where each event, or what is between two empty lines, begins and ends."""
    while start < len(data):
        found = _BOUNDARY.search(data, start)
        end = found.end() if found is not None else len(data)
        yield start, end
        start = end


def with_usage(completion: Completion) -> tuple[Completion, bool]:
    """Return a request with a request for the number of tokens at the end of its stream, and whether the client has not
    asked for it, so that it must be removed. Responses and messages report it anyway."""
    if not completion.stream or completion.kind not in ("completions", "chat"):
        return completion, False
    given = bytes(completion.fields.get("stream_options", _NULL))
    try:
        options = {} if given == b"null" else _FIELDS.decode(given)
    except _INVALID:
        return completion, False  # the engine rejects it
    if bytes(options.get("include_usage", _NULL)) == b"true":
        return completion, False
    asked = Raw(_encode({**options, "include_usage": _TRUE})) if options else _INCLUDE_USAGE
    fields = {**completion.fields, "stream_options": asked}
    return msgspec.structs.replace(completion, fields=fields), True


_INCLUDE_USAGE = Raw(b'{"include_usage":true}')


def event_data(events: bytes) -> bytes:
    """Return the data of the first of these events."""
    lines = _BOUNDARY.split(events, maxsplit=1)[0].splitlines()
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:"))


def _openai_error(message: str, type: str, number: int) -> bytes:
    return error_event(message, type)


def _responses_error(message: str, type: str, number: int) -> bytes:
    """Return the event of the Responses API; `error` is what OpenAI's SDK looks for."""
    error = {"type": type, "code": type, "message": message, "param": None}
    event = error | {"type": "error", "sequence_number": number, "error": error}
    return b"event: error\ndata: %b\n\n" % _encode(event)


def _anthropic_error(message: str, type: str, number: int) -> bytes:
    kind = "overloaded_error" if type == "service_unavailable" else "api_error"
    return b"event: error\ndata: %b\n\n" % anthropic_error(kind, message)


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """The server-sent events of one kind of request."""

    errors: tuple[bytes, ...]
    """Types of the event of an engine's stream that has failed before its first token."""
    error: Callable[[str, str, int], bytes]
    """Returns the event that ends a failed stream, from a message, the type of the error and the number of events
    before."""
    ends: tuple[bytes, ...]
    """First lines of the event that ends a complete stream."""
    preamble: tuple[bytes, ...] = ()
    """Types of the events that an engine may send before the first token."""
    token_line: bytes = b""
    """End of the first line of each event with a token, without its line end; empty: each event has one."""

    def first(self, data: bytes, start: int = 0) -> tuple[int, Role]:
        """Return where the first event from `start` on begins that is no preamble, and what it is. If all of the whole
        events `data` are preamble, return their end.

        Comments, events without data, `[DONE]` and events of `completions` and `chat` without choices have no token.
        """
        for at, end in _blocks(data, start):
            role = self._role(*read_event(data[at:end]))
            if role != "preamble":
                return at, role
        return len(data), "preamble"

    def _role(self, name: bytes, data: bytes) -> Role:
        if name in self.errors:
            return "error"
        if data in (b"", b"[DONE]"):
            return "preamble"
        try:
            document = _DOCUMENT.decode(data)
        except _INVALID:
            return "preamble" if name in self.preamble else "token"
        kind = bytes(document.type).strip(b'"') if document.type != _NULL else name
        if bytes(document.error) != b"null" or bytes(document.object) == b'"error"' or kind in self.errors:
            return "error"
        without = b"".join(bytes(document.choices).split()) == b"[]"
        return "preamble" if without or kind in self.preamble else "token"

    def tokens(self, data: bytes) -> int:
        """Count the events with a token that begin in `data`."""
        return self.token_lines(data) if self.token_line else sse_events(data)

    def token_lines(self, data: bytes) -> int:
        """Count the lines that end with the token line, which is not empty."""
        return data.count(self.token_line + b"\n") + data.count(self.token_line + b"\r\n")

    def ended(self, data: bytes) -> bool:
        """Whether the event that ends a complete stream begins in `data`."""
        return data.startswith(self.ends) or any(b"\n" + line in data for line in self.ends)


def reported(data: bytes, *, hidden: bool) -> tuple[TokenUsage | None, bytes]:
    """Return what the last `usage` in whole events reports, and the events as the client gets them.

    Args:
        data: whole events.
        hidden: whether the client gets no usage: events that have nothing else are removed.
    """
    last, kept = None, []
    for at, end in _blocks(data):
        block = data[at:end]
        if USAGE_MARK in block:
            name, text = read_event(block)
            usage = usage_of(text)
            last = usage if usage is not None and usage.output_tokens is not None else last
            if hidden and usage is not None:
                block = _without_usage(name, text, block)
        kept.append(block)
    return last, b"".join(kept) if hidden else data


def _without_usage(name: bytes, text: bytes, block: bytes) -> bytes:
    """Return an event without its usage; nothing if it has nothing else."""
    fields = _FIELDS.decode(text)
    if fields.pop("usage", None) is None:
        return block
    if b"".join(bytes(fields.get("choices", _NULL)).split()) in (b"[]", b"null"):
        return b""
    return (b"event: %b\n" % name if name else b"") + b"data: %b\n\n" % _encode(fields)


_DONE_LINES = (b"data: [DONE]", b"data:[DONE]")
_OPENAI = StreamFormat((b"error",), _openai_error, _DONE_LINES)
STREAMS: Mapping[Kind, StreamFormat] = {
    "completions": _OPENAI,
    "chat": _OPENAI,
    "responses": StreamFormat(
        (b"error", b"response.failed"),
        _responses_error,
        (b"event: response.completed", b"event: response.incomplete", b"event: response.failed"),
        (b"response.created", b"response.queued", b"response.in_progress"),
        b".delta",
    ),
    "messages": StreamFormat(
        (b"error",),
        _anthropic_error,
        (b"event: message_stop",),
        (b"message_start", b"ping"),
        b"content_block_delta",
    ),
}
