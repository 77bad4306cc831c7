"""Streams of engines by kind of request: which events carry tokens, which precede them, and how an error is written."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from kvroute.gateway.openai_api.anthropic_errors import anthropic_error
from kvroute.gateway.openai_api.requests import Kind
from kvroute.gateway.openai_api.responses import error_event, sse_events

_encode = msgspec.json.Encoder().encode
DONE_CHUNK = b"\ndata: [DONE]\n\n\r\n"
"""End of a chunk of `completions` or `chat` whose last event is not a token."""
_BOUNDARY = re.compile(rb"\r?\n\r?\n")


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

    error_starts: tuple[bytes, ...]
    """First bytes of the event of an engine's stream that has failed before its first token."""
    error: Callable[[str, str, int], bytes]
    """Returns the event that ends a failed stream, from a message, the type of the error and the number of events
    before."""
    preamble: tuple[bytes, ...] = ()
    """First bytes of the events that an engine may send before the first token."""
    token_line: bytes = b""
    """End of the first line of each event with a token; empty: each event has one."""

    def first(self, data: bytes) -> int:
        """Return where the first event that is no preamble begins; the length of the whole events `data` if none is."""
        at = 0
        while data.startswith(self.preamble, at):
            end = _BOUNDARY.search(data, at)
            if end is None:
                return len(data)
            at = end.end()
        return at

    def tokens(self, data: bytes) -> int:
        """Count the events with a token that begin in `data`."""
        return data.count(self.token_line) if self.token_line else sse_events(data)

    def tokens_in_chunk(self, chunk: bytes) -> int:
        """Return the same for a chunk of whole events with its framing, in a format with `token_line`."""
        return chunk.count(self.token_line)


_OPENAI = StreamFormat((b'data: {"error"', b'data: {"object":"error"'), _openai_error)
STREAMS: Mapping[Kind, StreamFormat] = {
    "completions": _OPENAI,
    "chat": _OPENAI,
    "responses": StreamFormat(
        (b"event: error", b"event: response.failed", *_OPENAI.error_starts),
        _responses_error,
        (b"event: response.created", b"event: response.queued", b"event: response.in_progress", b":"),
        b".delta\n",
    ),
    "messages": StreamFormat(
        (b"event: error", *_OPENAI.error_starts),
        _anthropic_error,
        (b"event: message_start", b"event: ping", b":"),
        b"content_block_delta\n",
    ),
}
