"""Response bodies: output tokens that depend only on the prompt, and their JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any

import msgspec

from kvroute.emulator.engine_request import Kind
from kvroute.emulator.prompt import OUTPUT_ID

_MASK = (1 << 64) - 1
_MULTIPLIER, _INCREMENT = 6364136223846793005, 1442695040888963407
"""Constants of the linear congruential generator in Knuth's MMIX."""
WORDS = tuple(
    f" {first}{vowel}{last}".encode() for first in "bdfgklmnprstvwzh" for vowel in "aeio" for last in "bdfgklmnprstvwzh"
)
"""Vocabulary of the output: 1,024 words that need no escaping in JSON."""


def generated_tokens(seed: int, choice: int, generated: int = 0) -> Iterator[bytes]:
    """Yield the tokens of answer `choice` to a prompt with this seed, without end. `generated` is the number of output
    tokens at the end of the prompt: the tokens are then the rest of the answer to the prompt without them."""
    return map(WORDS.__getitem__, _words(seed, choice, generated))


def generated_ids(seed: int, choice: int, generated: int = 0) -> Iterator[int]:
    """Yield the ids of these tokens."""
    return map(OUTPUT_ID.__add__, _words(seed, choice, generated))


def _words(seed: int, choice: int, generated: int) -> Iterator[int]:
    """Yield places in WORDS."""
    state = (seed + choice * _MULTIPLIER) & _MASK
    for place in count():
        state = (state * _MULTIPLIER + _INCREMENT) & _MASK
        if place >= generated:
            yield state >> 54


@dataclass(frozen=True, slots=True)
class ResponseHeader:
    """Fields that all chunks of one response share."""

    kind: Kind
    id: str
    created: int
    model: str

    def document(self, choices: list[dict[str, Any]], *, stream: bool, **more: Any) -> dict[str, Any]:
        """Return a complete response, or one chunk of a stream."""
        name = {"chat": "chat.completion", "completions": "text_completion"}[self.kind]
        if stream and self.kind == "chat":
            name += ".chunk"
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


def choice(kind: Kind, index: int, text: bytes) -> dict[str, Any]:
    """Return one complete choice of a response."""
    end = {"logprobs": None, "finish_reason": "length", "stop_reason": None}
    if kind == "chat":
        return {"index": index, "message": {"role": "assistant", "content": text.decode()}, **end}
    return {"index": index, "text": text.decode(), **end}


@dataclass(slots=True)
class StreamWriter:
    """One streamed choice. The event frame is encoded once and filled in per token."""

    heading: ResponseHeader
    index: int
    tokens: int
    source: Iterator[bytes]
    ids: Iterator[int] | None = None
    """Ids of the tokens; None: the events have none."""
    prompt_ids: list[int] | None = None
    """Ids of the prompt, for the first event."""
    sent: int = 0
    _before: bytes = field(init=False)
    _after: bytes = field(init=False)
    _last: bytes = field(init=False)

    def __post_init__(self) -> None:
        self._before, self._after = self._piece("\0", None).split(b"\\u0000")
        self._last = self._piece("\0", "length").split(b"\\u0000")[1]

    def _piece(self, text: str, reason: str | None) -> bytes:
        chat = self.heading.kind == "chat"
        content: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
        return self.heading.event([{"index": self.index, **content, "logprobs": None, "finish_reason": reason}])

    def until(self, emitted: int) -> bytes:
        """Return the events of all tokens up to `emitted` that have not been sent."""
        if self.ids is not None:
            return self._with_ids(emitted, self.ids)
        opening = b""
        if self.heading.kind == "chat" and not self.sent and emitted:
            role = {"role": "assistant", "content": ""}
            opening = self.heading.event(
                [{"index": self.index, "delta": role, "logprobs": None, "finish_reason": None}]
            )
        fresh = [self._before + word + self._after for word in islice(self.source, emitted - self.sent)]
        self.sent = emitted
        if fresh and emitted == self.tokens:
            fresh[-1] = fresh[-1][: -len(self._after)] + self._last
        return opening + b"".join(fresh)

    def _with_ids(self, emitted: int, ids: Iterator[int]) -> bytes:
        """Return the same with token ids, as vLLM does for `return_token_ids`."""
        chat, events = self.heading.kind == "chat", list[bytes]()
        rest = {"logprobs": None, "finish_reason": None}
        if chat and not self.sent and emitted:
            opening = {"index": self.index, "delta": {"role": "assistant", "content": ""}, **rest}
            events.append(self.heading.event([opening], prompt_token_ids=self.prompt_ids))
        for number in range(self.sent, emitted):
            text = next(self.source).decode()
            piece: dict[str, Any] = {"index": self.index, **({"delta": {"content": text}} if chat else {"text": text})}
            piece |= rest | {"token_ids": [next(ids)]}
            if number + 1 == self.tokens:
                piece["finish_reason"] = "length"
            if not chat:
                piece["prompt_token_ids"] = None if number else self.prompt_ids
            events.append(self.heading.event([piece]))
        self.sent = emitted
        return b"".join(events)
