"""Response bodies of chats, completions and transcriptions, whole and streamed, as vLLM sends them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec

from kvroute.emulator.engine.engine_request import Details
from kvroute.emulator.generation.answer import GeneratedOutput
from kvroute.emulator.generation.logprobs import (
    TokenLogprob,
    chat_logprobs,
    completion_logprobs,
    output_logprobs,
    prompt_logprobs,
    vllm_prompt_logprobs,
)
from kvroute.emulator.generation.words import generated_tokens, token_bytes
from kvroute.emulator.request_body import Kind

_OBJECTS: dict[Kind, tuple[str, str]] = {
    "chat": ("chat.completion", "chat.completion.chunk"),
    "completions": ("text_completion", "text_completion"),
    "transcriptions": ("transcription", "transcription.chunk"),
}
"""Value of `object` in a whole response and in a chunk of a stream."""


@dataclass(frozen=True, slots=True)
class ResponseHeader:
    """Fields that all chunks of one response share."""

    kind: Kind
    id: str
    created: int
    model: str

    def document(self, choices: list[dict[str, Any]], *, stream: bool, **more: Any) -> dict[str, Any]:
        """Return a complete response, or one chunk of a stream."""
        name = _OBJECTS[self.kind][stream]
        return {"id": self.id, "object": name, "created": self.created, "model": self.model, "choices": choices, **more}

    def event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        """Return one chunk of a stream as a server-sent event."""
        return b"data: " + msgspec.json.encode(self.document(choices, stream=True, **more)) + b"\n\n"


def usage(input_tokens: int, output_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """Return token counts in OpenAI's format."""
    return {
        "prompt_tokens": input_tokens,
        "total_tokens": input_tokens + output_tokens,
        "completion_tokens": output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def choice(kind: Kind, index: int, answer: GeneratedOutput, details: Details) -> dict[str, Any]:
    """Return one complete choice of a response."""
    end: dict[str, Any] = {"finish_reason": finish_reason(answer), "stop_reason": answer.stop_reason}
    end["token_ids"] = list(answer.ids()) if details.token_ids else None
    if kind == "chat":
        logprobs = None
        if details.logprobs is not None:
            logprobs = chat_logprobs(list(_logprobs(answer, details.logprobs)), as_ids=details.as_ids)
        return {"index": index, "message": _message(answer, details), "logprobs": logprobs, **end}
    text = answer.text() if not details.prompt_only else ""
    if details.echo:
        text = prompt_text(answer) + text
    logprobs = _completion_logprobs(answer, details) if details.logprobs is not None else None
    found: dict[str, Any] = {"index": index, "text": text, "logprobs": logprobs, **end}
    found["prompt_logprobs"] = of_prompt(answer, details)
    found["prompt_token_ids"] = answer.prompt.tokens.tolist() if details.token_ids else None
    return found


def finish_reason(answer: GeneratedOutput) -> str:
    """Return why an answer ended. As in vLLM, the call of a tool that the request names ends with `stop`."""
    return "stop" if answer.reason == "tool_calls" and answer.call and answer.call.named else answer.reason


def prompt_text(answer: GeneratedOutput) -> str:
    """Return the text of the prompt."""
    return b"".join([token_bytes(token) for token in answer.prompt.tokens.tolist()]).decode("utf-8", "replace")


def of_prompt(answer: GeneratedOutput, details: Details) -> list[dict[str, Any] | None] | None:
    """Return the log-probabilities of the prompt; None: they are not wanted."""
    if details.prompt_logprobs is None:
        return None
    return vllm_prompt_logprobs(prompt_logprobs(answer.prompt.tokens.tolist(), details.prompt_logprobs))


def complete_call(answer: GeneratedOutput) -> bool:
    """Return whether a whole response has the call. As in vLLM, arguments that the limit cuts off are no call, unless
    the request names the tool."""
    return answer.call is not None and (answer.call.named or answer.reason != "length")


def _message(answer: GeneratedOutput, details: Details) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": details.last_message + answer.text()}
    message |= {"refusal": None, "annotations": None, "audio": None, "function_call": None}
    if answer.call is not None and complete_call(answer):
        function = {"name": answer.call.name, "arguments": answer.text()}
        message |= {"content": None, "tool_calls": [{"id": answer.call.id, "type": "function", "function": function}]}
    return message | {"reasoning": None}


def _logprobs(answer: GeneratedOutput, top: int, first: int = 0) -> Iterator[TokenLogprob]:
    return output_logprobs(answer.prompt.seed, answer.choice, list(islice(answer.ids(), first, None)), top, first)


def _completion_logprobs(answer: GeneratedOutput, details: Details) -> dict[str, Any]:
    top = details.logprobs or 0
    tokens: list[int] = []
    logprobs: list[TokenLogprob | None] = []
    if details.echo:
        tokens += answer.prompt.tokens.tolist()
        logprobs += prompt_logprobs(tokens, top)
    if not details.prompt_only:
        tokens += answer.ids()
        logprobs += _logprobs(answer, top)
    return completion_logprobs(tokens, logprobs, as_ids=details.as_ids)


@dataclass(slots=True)
class StreamWriter:
    """One streamed choice. Without details, the event frame is encoded once and filled in per token."""

    heading: ResponseHeader
    index: int
    answer: GeneratedOutput
    details: Details
    sent: int = 0
    _tokens: int = field(init=False)
    _source: Iterator[bytes] = field(init=False)
    _ids: Iterator[int] = field(init=False)
    _plain: bool = field(init=False)
    _offset: int = 0
    """Number of characters that a completion has so far."""
    _before: bytes = field(init=False)
    _after: bytes = field(init=False)
    _last: bytes = field(init=False)

    def __post_init__(self) -> None:
        answer = self.answer
        self._tokens = answer.tokens
        self._plain = self.details.plain and answer.script is None
        if not self._plain:
            self._source, self._ids = answer.texts(), answer.ids()
        else:
            self._source = generated_tokens(answer.prompt.seed, answer.choice, answer.prompt.generated)
            self._before, self._after = self._piece("\0", None).split(b"\\u0000")
            self._last = self._piece("\0", self.answer.reason).split(b"\\u0000")[1]

    def _piece(self, text: str, reason: str | None) -> bytes:
        content: dict[str, Any] = {"text": text} if self._completes else {"delta": {"content": text}}
        return self.heading.event([{"index": self.index, **content, "logprobs": None, "finish_reason": reason}])

    @property
    def _completes(self) -> bool:
        return self.heading.kind == "completions"

    def until(self, emitted: int) -> bytes:
        """Return the events of all tokens up to `emitted` that have not been sent."""
        opening = b""
        if self.heading.kind == "chat" and not self.sent and emitted:
            opening = self._opening()
        if not self._plain:
            return opening + self._detailed(emitted)
        fresh = [self._before + word + self._after for word in islice(self._source, emitted - self.sent)]
        self.sent = emitted
        if fresh and emitted == self._tokens:
            fresh[-1] = fresh[-1][: -len(self._after)] + self._last
        return opening + b"".join(fresh)

    def _opening(self) -> bytes:
        """Return the first events of a chat."""
        rest = {"logprobs": None, "finish_reason": None}
        ids = {"prompt_token_ids": self.answer.prompt.tokens.tolist()} if self.details.token_ids else {}
        opening = {"index": self.index, "delta": {"role": "assistant", "content": ""}, **rest}
        events = self.heading.event([opening], **ids)
        if text := self.details.last_message:
            events += self.heading.event([{"index": self.index, "delta": {"content": text}, **rest}])
        return events

    def _detailed(self, emitted: int) -> bytes:
        """Return events with calls, log-probabilities, ids or the echo."""
        events = []
        for number in range(self.sent, emitted):
            text, token = next(self._source).decode(), next(self._ids)
            piece = self._text_of(number, text, token) if self._completes else self._delta(number, text, token)
            piece["finish_reason"] = None
            if number + 1 == self.answer.tokens:
                piece |= {"finish_reason": finish_reason(self.answer), "stop_reason": self.answer.stop_reason}
            if self.details.token_ids:
                piece["token_ids"] = [token]
            events.append(self.heading.event([piece]))
        self.sent = emitted
        return b"".join(events)

    def _delta(self, number: int, text: str, token: int) -> dict[str, Any]:
        """Return one choice of a chat."""
        call, delta = self.answer.call, dict[str, Any]()
        if call is None:
            delta["content"] = text
        elif number == 0:
            begun = {"id": call.id, "type": "function", "index": 0, "function": {"name": call.name, "arguments": ""}}
            delta["tool_calls"] = [begun]
        else:
            delta["tool_calls"] = [{"index": 0, "function": {"arguments": text}}]
        logprobs = None
        if self.details.logprobs is not None:
            found = self._logprob(number, token)
            logprobs = chat_logprobs([found], as_ids=self.details.as_ids)
        return {"index": self.index, "delta": delta, "logprobs": logprobs}

    def _logprob(self, number: int, token: int) -> TokenLogprob:
        top, answer = self.details.logprobs or 0, self.answer
        return next(output_logprobs(answer.prompt.seed, answer.choice, [token], top, number))

    def _text_of(self, number: int, text: str, token: int) -> dict[str, Any]:
        """Return one choice of a completion."""
        details, tokens, logprobs = self.details, list[int](), list[TokenLogprob | None]()
        if details.echo and not number:
            text = prompt_text(self.answer) + ("" if details.prompt_only else text)
            tokens = self.answer.prompt.tokens.tolist()
            logprobs += prompt_logprobs(tokens, details.logprobs) if details.logprobs is not None else []
        found: dict[str, Any] = {"index": self.index, "text": text, "logprobs": None}
        if details.logprobs is not None:
            if not details.prompt_only:
                tokens = [*tokens, token]
                logprobs.append(self._logprob(number, token))
            found["logprobs"] = completion_logprobs(tokens, logprobs, offset=self._offset, as_ids=details.as_ids)
            self._offset += sum(map(len, found["logprobs"]["tokens"]))
        if details.token_ids:
            found["prompt_token_ids"] = None if number else self.answer.prompt.tokens.tolist()
        return found
