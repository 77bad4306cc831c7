"""Responses and streams of the Responses API and of Anthropic's Messages API, as vLLM sends them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec

from kvroute.emulator.api.response import ResponseHeader, complete_call
from kvroute.emulator.engine.engine_request import Details
from kvroute.emulator.generation.answer import GeneratedOutput
from kvroute.emulator.generation.logprobs import chat_logprobs, output_logprobs

_GIVEN: dict[str, Any] = {
    "instructions": None,
    "metadata": None,
    "parallel_tool_calls": True,
    "temperature": 1.0,
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "background": False,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "previous_response_id": None,
    "prompt": None,
    "reasoning": None,
    "service_tier": "auto",
    "text": None,
    "top_logprobs": None,
    "truncation": "disabled",
    "user": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Fields of a request that the response repeats, with their defaults."""
_UNKNOWN = {"kv_transfer_params": None, "ec_transfer_params": None, "input_messages": None, "output_messages": None}


def whole(
    heading: ResponseHeader, answer: GeneratedOutput, details: Details, usage: dict[str, Any], **more: Any
) -> dict[str, Any]:
    """Return a complete response.

    Args:
        heading: its common fields.
        answer: the output.
        details: what the request asks for beside the text.
        usage: token counts in OpenAI's format.
        more: other fields.
    """
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    if heading.kind == "responses":
        inner: dict[str, Any] = {"input_tokens_per_turn": [], "cached_tokens_per_turn": []}
        outer: dict[str, Any] = {"output_tokens_per_turn": [], "tool_output_tokens_per_turn": []}
        counts: dict[str, Any] = {
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
            "total_tokens": usage["total_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0, **inner},
            "output_tokens_details": {"reasoning_tokens": 0, "tool_output_tokens": 0, **outer},
        }
        status = "incomplete" if answer.reason == "length" else "completed"
        output = [_item(heading, answer, details, complete=complete_call(answer))]
        return _response(heading, details, status) | {"output": output, "usage": counts} | more
    counts = {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }
    content = [_block(answer, complete=complete_call(answer))]
    end = {"stop_reason": _stop_reason(answer), "stop_sequence": _stop_sequence(answer)}
    return _message(heading) | {"content": content, **end, "usage": counts} | more


def _response(heading: ResponseHeader, details: Details, status: str) -> dict[str, Any]:
    given = {name: details.given.get(name) for name in _GIVEN}
    repeated = {name: _GIVEN[name] if value is None else value for name, value in given.items()}
    if repeated["max_output_tokens"] is None:
        repeated["max_output_tokens"] = details.output_tokens_max
    fields = {"id": heading.id, "object": "response", "created_at": heading.created, "model": heading.model}
    incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
    end: dict[str, Any] = {"status": status, "output": [], "usage": None, "incomplete_details": incomplete}
    return {**fields, **repeated, **_UNKNOWN, **end}


def _item(heading: ResponseHeader, answer: GeneratedOutput, details: Details, *, complete: bool) -> dict[str, Any]:
    """Return the item of the output. `complete`: whether a call is one, as opposed to text."""
    if answer.call is not None and complete:
        call = {"type": "function_call", "call_id": answer.call.id, "name": answer.call.name}
        return {"id": f"fc_{heading.id}", **call, "arguments": answer.text(), "status": "completed"}
    part: dict[str, Any] = {"type": "output_text", "text": answer.text(), "annotations": [], "logprobs": None}
    if details.logprobs is not None:
        part["logprobs"] = _logprobs(answer, details, 0, answer.tokens)
    item = {"id": f"msg_{heading.id}", "type": "message", "role": "assistant", "status": "completed"}
    return {**item, "content": [part]}


def _logprobs(answer: GeneratedOutput, details: Details, first: int, last: int) -> list[dict[str, Any]]:
    """Return the log-probabilities of the output tokens from `first` to before `last`."""
    ids = list(islice(answer.ids(), first, last))
    found = output_logprobs(answer.prompt.seed, answer.choice, ids, details.logprobs or 0, first)
    content: list[dict[str, Any]] = chat_logprobs(list(found))["content"]
    return content


def _message(heading: ResponseHeader) -> dict[str, Any]:
    fields = {"id": heading.id, "type": "message", "role": "assistant", "model": heading.model}
    return {**fields, "content": [], "stop_reason": None, "stop_sequence": None}


def _block(answer: GeneratedOutput, *, complete: bool) -> dict[str, Any]:
    """Return the content of a message."""
    if answer.call is None or not complete:
        return {"type": "text", "text": answer.text()}
    try:
        arguments = msgspec.json.decode(answer.text())
    except msgspec.DecodeError:  # the limit has cut them off
        return {"type": "text", "text": answer.text()}
    return {"type": "tool_use", "id": answer.call.id, "name": answer.call.name, "input": arguments}


def _stop_reason(answer: GeneratedOutput) -> str:
    if isinstance(answer.stop_reason, str):
        return "stop_sequence"
    return {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[answer.reason]


def _stop_sequence(answer: GeneratedOutput) -> str | None:
    return answer.stop_reason if isinstance(answer.stop_reason, str) else None


@dataclass(slots=True)
class ConversationWriter:
    """One streamed response."""

    heading: ResponseHeader
    answer: GeneratedOutput
    details: Details
    sent: int = 0
    _number: int = 0
    _source: Iterator[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self._source = self.answer.texts()

    def before(self) -> bytes:
        """Return the events that come before anything is computed."""
        if self.heading.kind != "responses":
            return b""
        started = {"response": _response(self.heading, self.details, "in_progress")}
        return self._event("response.created", started) + self._event("response.in_progress", started)

    def until(self, emitted: int) -> bytes:
        """Return the events of all tokens up to `emitted` that have not been sent."""
        opening = self._opening() if emitted and not self.sent else b""
        fresh = list(islice(self._source, emitted - self.sent))
        events = [self._token(number, word.decode()) for number, word in enumerate(fresh, self.sent)]
        self.sent = emitted
        return opening + b"".join(events)

    def after(self, usage: dict[str, Any]) -> bytes:
        """Return the events after the last token. Args: `usage`: token counts in OpenAI's format."""
        document = whole(self.heading, self.answer, self.details, usage)
        if self.heading.kind == "responses":
            item = _item(self.heading, self.answer, self.details, complete=True)
            document["output"] = [item]
            events = [self._done(item), self._event("response.output_item.done", {"output_index": 0, "item": item})]
            return b"".join([*events, self._event("response.completed", {"response": document})])
        delta = {"stop_reason": document["stop_reason"], "stop_sequence": document["stop_sequence"]}
        return b"".join(
            [
                self._event("content_block_stop", {"index": 0}),
                self._event("message_delta", {"delta": delta, "usage": document["usage"]}),
                self._event("message_stop", {}),
            ]
        )

    def _done(self, item: Mapping[str, Any]) -> bytes:
        """Return the events at the end of the only item."""
        if item["type"] == "function_call":
            place = {"item_id": item["id"], "output_index": 0}
            done = {"name": item["name"], "arguments": item["arguments"]}
            return self._event("response.function_call_arguments.done", place | done)
        part = item["content"][0]
        text = {"text": part["text"], "logprobs": part["logprobs"] or []}
        ended = self._event("response.output_text.done", self._place() | text)
        return ended + self._event("response.content_part.done", self._place() | {"part": part})

    def _place(self) -> dict[str, Any]:
        return {"item_id": f"msg_{self.heading.id}", "output_index": 0, "content_index": 0}

    def _opening(self) -> bytes:
        call = self.answer.call
        if self.heading.kind == "responses":
            item = _item(self.heading, self.answer, self.details, complete=True) | {"status": "in_progress"}
            if call is not None:
                return self._event("response.output_item.added", {"output_index": 0, "item": item | {"arguments": ""}})
            part = item["content"][0] | {"text": "", "logprobs": []}
            first = self._event("response.output_item.added", {"output_index": 0, "item": item | {"content": []}})
            return first + self._event("response.content_part.added", self._place() | {"part": part})
        message = _message(self.heading) | {"usage": {"input_tokens": 0, "output_tokens": 0}}
        block: dict[str, Any] = {"type": "text", "text": ""}
        if call is not None:
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        started = self._event("message_start", {"message": message})
        return started + self._event("content_block_start", {"index": 0, "content_block": block})

    def _token(self, number: int, text: str) -> bytes:
        call = self.answer.call
        if call is not None and not number:
            return b""  # its name, which the opening has
        if self.heading.kind == "messages":
            kind, name = ("text_delta", "text") if call is None else ("input_json_delta", "partial_json")
            return self._event("content_block_delta", {"index": 0, "delta": {"type": kind, name: text}})
        if call is not None:
            place = {"item_id": f"fc_{self.heading.id}", "output_index": 0}
            return self._event("response.function_call_arguments.delta", place | {"delta": text})
        found: list[dict[str, Any]] = []
        if self.details.logprobs is not None:
            found = _logprobs(self.answer, self.details, number, number + 1)
        return self._event("response.output_text.delta", self._place() | {"delta": text, "logprobs": found})

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        number = {"sequence_number": self._number} if self.heading.kind == "responses" else {}
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode({"type": name, **number, **fields}))
