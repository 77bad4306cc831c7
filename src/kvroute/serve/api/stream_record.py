"""Records the tokens of a stream, so that another engine can continue it: a request with the prompt's and the output's
token ids. The client's stream stays one stream of its own format.

vLLM returns the ids in each event if the request has `return_token_ids`. The text is not enough: its tokens are not
always those that were generated.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from kvroute.serve.api.json_fields import Fields
from kvroute.serve.api.requests import Completion

COMPLETIONS_PATH = b"/v1/completions"
"""Path of the request that continues a stream of any kind."""

_PROMPT = frozenset(
    {"prompt", "messages", "add_generation_prompt", "chat_template", "chat_template_kwargs", "add_special_tokens"}
)
"""Fields that matter until the prompt has token ids."""
_LIMITS = frozenset({"max_tokens", "max_completion_tokens"})
_KEPT = frozenset(
    {
        "model",
        "stream",
        "stream_options",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "logit_bias",
        "allowed_token_ids",
        "ignore_eos",
        "stop_token_ids",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "cache_salt",
        "priority",
        "user",
    }
)
"""Fields whose effect on the next token depends only on all tokens before it."""
_CONTINUED_KINDS = ("completions", "chat")
_TRUE = Raw(b"true")
_DATA = b"data: "
_DONE = b"[DONE]"

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode


class UnexpectedEvent(Exception):
    """An event of a continuation that does not fit into the client's stream."""


class _Surprise(Exception):
    """An event that is not as expected; the stream is relayed as it is and cannot be continued."""


def may_continue(completion: Completion) -> bool:
    """Return whether another engine may continue the response to this request.

    It is False unless the next token depends only on the tokens before it and on fields that a continuation repeats.
    Guided decoding, tools, stop strings, seeds, log-probabilities and penalties on the output need more.
    """
    if completion.kind not in _CONTINUED_KINDS or not completion.stream:
        return False
    if completion.n > 1 or completion.prompts > 1 or completion.media:
        return False
    given = {name for name, value in completion.fields.items() if bytes(value) != b"null"}
    return given <= _KEPT | _PROMPT | _LIMITS | {"n"}


class StreamRecord:
    """The tokens of one streamed response, from one engine after another."""

    __slots__ = (
        "_chat",
        "_continued",
        "_created",
        "_fields",
        "_id",
        "_limit",
        "_prompt_ids",
        "_prompt_tokens",
        "_salt",
        "_shown",
        "_start",
        "_unshown",
        "_usable",
    )

    def __init__(self, completion: Completion) -> None:
        """`completion` is a request for which `may_continue` is True."""
        self._chat = completion.kind == "chat"
        self._fields: Fields = {name: value for name, value in completion.fields.items() if name in _KEPT}
        self._salt = completion.salt
        limited = any(bytes(completion.fields.get(name, b"null")) != b"null" for name in _LIMITS)
        self._limit = completion.max_tokens if limited or not self._chat else None
        """Most output tokens; None: as many as fit into the context."""
        self._prompt_ids: bytes = b""
        """JSON list."""
        self._prompt_tokens = 0
        self._shown: list[int] = []
        """Output tokens whose text the client has."""
        self._unshown: list[int] = []
        """Output tokens since then: their text is incomplete. A continuation computes them again."""
        self._continued = False
        """The events come from a continuation."""
        self._start = 0
        """Number of output tokens from earlier engines."""
        self._id, self._created = "", 0
        self._usable = True

    @property
    def tokens(self) -> int:
        """Number of output tokens so far."""
        return len(self._shown) + len(self._unshown)

    @property
    def continuable(self) -> bool:
        """Whether another engine can continue the stream now."""
        return self._usable and bool(self._prompt_ids) and (self._limit is None or len(self._shown) < self._limit)

    def with_ids(self, completion: Completion) -> Completion:
        """Return the request with a request for token ids in its response."""
        return msgspec.structs.replace(completion, fields=completion.fields | {"return_token_ids": _TRUE})

    def rest(self) -> Completion:
        """Return the request for the rest of the response. Later events come from its stream."""
        assert self.continuable
        self._continued, self._start = True, len(self._shown)
        self._unshown.clear()
        left = None if self._limit is None else self._limit - self._start
        shown = b",".join([b"%d" % token for token in self._shown])
        prompt = self._prompt_ids[:-1] + b"," + shown + b"]" if shown else self._prompt_ids
        fields = self._fields | {"prompt": Raw(prompt), "max_tokens": Raw(_encode(left))}
        model = msgspec.json.decode(self._fields["model"]) if "model" in self._fields else None
        return Completion(
            kind="completions",
            fields=fields,
            model=model or "",
            stream=True,
            max_tokens=left or 0,
            n=1,
            prompts=1,
            one_leg=False,
            salt=self._salt,
        )

    def relayed(self, data: bytes) -> bytes:
        """Record whole events of an engine; return them as the client gets them, without token ids.

        Raises:
            UnexpectedEvent: an event of a continuation has an unexpected format.
        """
        if not self._usable:
            return data
        events = data.replace(b"\r\n", b"\n").split(b"\n\n")
        return b"".join([self._event(event) for event in events if event])

    def _event(self, event: bytes) -> bytes:
        if not event.startswith(_DATA) or event.startswith(_DONE, len(_DATA)):
            return event + b"\n\n"  # a comment, or the end
        try:
            document = _decode(event[len(_DATA) :])
            visible = self._document(document)
        except (msgspec.MsgspecError, _Surprise, RecursionError, UnicodeDecodeError):
            self._usable = False
            if self._continued:
                raise UnexpectedEvent from None
            return event + b"\n\n"
        return _DATA + _encode(document) + b"\n\n" if visible else b""

    def _document(self, document: dict[str, Any]) -> bool:
        """Record one event and change it in place; return whether the client gets it."""
        choices = document.get("choices")
        if not isinstance(choices, list) or len(choices) > 1:
            raise _Surprise
        self._prompt(document, choices)
        if not self._id:
            self._id, self._created = document.get("id", ""), document.get("created", 0)
        elif self._continued:
            document |= {"id": self._id, "created": self._created}
        visible = not choices or self._choice(choices[0])
        if self._continued and self._chat:
            document["object"] = "chat.completion.chunk"
        if isinstance(document.get("usage"), dict):
            self._total(document["usage"])
        return visible

    def _prompt(self, document: dict[str, Any], choices: list[Any]) -> None:
        """Keep the ids of the prompt, which the first event has, and remove them."""
        for holder in (document, *choices):
            if not isinstance(holder, dict):
                raise _Surprise
            ids = holder.get("prompt_token_ids")
            if ids is None:
                continue
            holder["prompt_token_ids"] = None
            if not self._prompt_ids:
                self._prompt_ids, self._prompt_tokens = _encode(_ids(ids)), len(ids)

    def _choice(self, choice: dict[str, Any]) -> bool:
        """Record the tokens of a choice. Return False if the event would not exist without the request for ids."""
        ids = choice.get("token_ids")
        text = self._text(choice)
        if ids is not None:
            choice["token_ids"] = None
            self._unshown += _ids(ids)
        if text:
            if not ids:
                raise _Surprise  # the engine does not return ids
            self._shown += self._unshown
            self._unshown.clear()
        ended = choice.get("finish_reason") is not None
        if ended:
            self._shown += self._unshown
            self._unshown.clear()
            self._limit = len(self._shown)
        if self._continued and self._chat:
            choice["delta"] = {"content": choice.pop("text", "")}
        return not (self._chat and ids is not None and not text and not ended)

    def _text(self, choice: dict[str, Any]) -> str:
        """Return the text of a choice, which is all that a continuation can go on with."""
        if choice.get("logprobs") is not None:
            raise _Surprise
        if not self._chat or self._continued:
            text = choice.get("text")
        else:
            delta = choice.get("delta")
            if not isinstance(delta, dict):
                raise _Surprise
            if any(value for name, value in delta.items() if name not in ("role", "content")):
                raise _Surprise  # reasoning, or a call of a tool
            text = delta.get("content") or ""
        if not isinstance(text, str):
            raise _Surprise
        return text

    def _total(self, usage: dict[str, Any]) -> None:
        """Make the token counts of a continuation those of the whole response."""
        if not self._continued:
            return
        tokens = usage.get("completion_tokens")
        if not isinstance(tokens, int):
            raise _Surprise
        total = self._start + tokens
        usage |= {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": total,
            "total_tokens": self._prompt_tokens + total,
        }
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
            details["cached_tokens"] = min(details["cached_tokens"], self._prompt_tokens)


def _ids(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(type(token) is int and token >= 0 for token in value):
        raise _Surprise
    return value
