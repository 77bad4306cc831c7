"""Responses and streams of the Responses API and of Anthropic's Messages API, as vLLM sends them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from kvroute.emulator.response import ResponseHeader


def whole(heading: ResponseHeader, text: str, usage: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a complete response.

    Args:
        heading: its common fields.
        text: the output.
        usage: token counts in OpenAI's format.
        more: other fields.
    """
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    if heading.kind == "responses":
        counts: dict[str, Any] = {
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
            "total_tokens": usage["total_tokens"],
            "input_tokens_details": {"cached_tokens": cached},
        }
        output = [_item(heading, text)]
        return _response(heading, "incomplete") | {"output": output, "usage": counts} | more
    counts = {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }
    content = [{"type": "text", "text": text}]
    return _message(heading) | {"content": content, "stop_reason": "max_tokens", "usage": counts} | more


def _response(heading: ResponseHeader, status: str) -> dict[str, Any]:
    fields = {"id": heading.id, "object": "response", "created_at": heading.created, "model": heading.model}
    return {**fields, "status": status, "output": [], "usage": None}


def _item(heading: ResponseHeader, text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    item = {"id": f"msg-{heading.id}", "type": "message", "role": "assistant", "status": "completed"}
    return {**item, "content": [part]}


def _message(heading: ResponseHeader) -> dict[str, Any]:
    fields = {"id": heading.id, "type": "message", "role": "assistant", "model": heading.model}
    return {**fields, "content": [], "stop_reason": None, "stop_sequence": None}


@dataclass(slots=True)
class ConversationWriter:
    """One streamed response."""

    heading: ResponseHeader
    tokens: int
    source: Iterator[bytes]
    sent: int = 0
    _number: int = 0
    _words: list[bytes] = field(default_factory=list)

    def before(self) -> bytes:
        """Return the events that come before anything is computed."""
        if self.heading.kind != "responses":
            return b""
        started = {"response": _response(self.heading, "in_progress")}
        return self._event("response.created", started) + self._event("response.in_progress", started)

    def until(self, emitted: int) -> bytes:
        """Return the events of all tokens up to `emitted` that have not been sent."""
        opening = self._opening() if emitted and not self.sent else b""
        fresh = list(islice(self.source, emitted - self.sent))
        self.sent = emitted
        self._words += fresh
        return opening + b"".join([self._token(word.decode()) for word in fresh])

    def after(self, usage: dict[str, Any]) -> bytes:
        """Return the events after the last token. Args: `usage`: token counts in OpenAI's format."""
        text = b"".join(self._words).decode()
        document = whole(self.heading, text, usage)
        if self.heading.kind == "responses":
            place = self._place()
            return b"".join(
                [
                    self._event("response.output_text.done", place | {"text": text}),
                    self._event("response.content_part.done", place | {"part": document["output"][0]["content"][0]}),
                    self._event("response.output_item.done", {"output_index": 0, "item": document["output"][0]}),
                    self._event("response.completed", {"response": document}),
                ]
            )
        delta = {"stop_reason": document["stop_reason"], "stop_sequence": None}
        return b"".join(
            [
                self._event("content_block_stop", {"index": 0}),
                self._event("message_delta", {"delta": delta, "usage": document["usage"]}),
                self._event("message_stop", {}),
            ]
        )

    def _place(self) -> dict[str, Any]:
        return {"item_id": f"msg-{self.heading.id}", "output_index": 0, "content_index": 0}

    def _opening(self) -> bytes:
        if self.heading.kind == "responses":
            item = _item(self.heading, "")
            part = item["content"][0]
            added = {"output_index": 0, "item": item | {"status": "in_progress", "content": []}}
            first = self._event("response.output_item.added", added)
            return first + self._event("response.content_part.added", self._place() | {"part": part})
        message = _message(self.heading) | {"usage": {"input_tokens": 0, "output_tokens": 0}}
        block = {"index": 0, "content_block": {"type": "text", "text": ""}}
        return self._event("message_start", {"message": message}) + self._event("content_block_start", block)

    def _token(self, text: str) -> bytes:
        if self.heading.kind == "responses":
            return self._event("response.output_text.delta", self._place() | {"delta": text, "logprobs": []})
        return self._event("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": text}})

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        number = {"sequence_number": self._number} if self.heading.kind == "responses" else {}
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode({"type": name, **number, **fields}))
