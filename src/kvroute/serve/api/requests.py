"""Requests for tokens: parses the fields of a request that routing needs.

All other fields keep their bytes, and the engine validates them. Fields that engines use to find each other are
removed here, so that no client can direct an engine to an address.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec
from msgspec import Raw

from kvroute.serve.api.anthropic.messages import AnthropicMessages
from kvroute.serve.api.chat_messages import ChatMessages, computes_several
from kvroute.serve.api.conversation import Conversation, Span
from kvroute.serve.api.json_fields import (
    Fields,
    RequestError,
    count,
    flag,
    given,
    read_fields,
    shown,
    string,
    token_ids,
    utf8,
    wrong,
)
from kvroute.serve.api.responses_input import ResponsesInput

Kind: TypeAlias = Literal["chat", "completions", "responses", "messages"]
CONVERSATIONS: Mapping[Kind, Conversation] = {
    "chat": ChatMessages(),
    "responses": ResponsesInput(),
    "messages": AnthropicMessages(),
}
"""The formats that contain a conversation. Completions have plain prompts."""

ANSWERS_MAX = 16_384
"""Maximum number of choices in one request: vLLM's bound for `n`, applied to `n` times prompts."""
IDS_MAX = 2**22
"""Maximum number of token ids in one request."""

KINDS: Mapping[bytes, Kind] = {
    b"/v1/completions": "completions",
    b"/v1/chat/completions": "chat",
    b"/v1/responses": "responses",
    b"/v1/messages": "messages",
}
"""Kind of the requests to each path."""
LATER_SPLIT: frozenset[Kind] = frozenset({"responses", "messages"})
"""Kinds in which not every version of an engine accepts transfer parameters."""
_DEFAULT_TOKENS: Mapping[Kind, int] = {"completions": 16}
_LIMITS: Mapping[Kind, tuple[str, ...]] = {
    "completions": ("max_tokens",),
    "chat": ("max_completion_tokens", "max_tokens"),
    "responses": ("max_output_tokens",),
    "messages": ("max_tokens",),
}
"""Fields that limit the output; the first one that is given counts."""
_PROMPT_SHAPE = "give a string, token ids, or a non-empty list of either"

_encode = msgspec.json.Encoder().encode
_TEXTS = msgspec.json.Decoder(list[str])
_LISTS = msgspec.json.Decoder(list[Raw])
_FIRST = re.compile(rb"\[\s*(.)", re.DOTALL)
"""Matches the first byte of a list's first element, which distinguishes the kinds of prompt."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One completion request, parsed as far as routing needs."""

    kind: Kind
    fields: Fields
    """The body without `ENGINE_FIELDS`."""
    model: str
    """Empty: the client names no model."""
    stream: bool
    max_tokens: int
    """Maximum tokens of one choice; 0: the client sets no maximum."""
    n: int
    """Choices per prompt."""
    prompts: int
    one_leg: bool
    """Whether one instance must do both phases: the KV cache cannot be transferred as one sequence (several prompts,
    choices or beams), or the response needs data of the instance that computed the prompt (its log-probabilities)."""
    text: bytes | None = None
    """UTF-8 of the (first) prompt. Chat: tools and messages as received JSON without the closing bracket, so that a
    conversation that grows keeps its prefix."""
    token_ids: list[int] | None = None
    """Token ids of the (first) prompt, if it was sent as such."""
    further: tuple[bytes | list[int], ...] = ()
    """The other prompts."""
    salt: str = ""
    """`cache_salt`: engines keep the caches of different salts apart."""
    adapter: str = ""
    """LoRA adapter that `model` names; empty: none. Its blocks differ from those of the base model."""
    media: tuple[Span, ...] = ()
    """Where the parts of messages are in `text` that are not text: images, recordings, files, and links to such."""


def read_completion(path: bytes, body: bytes) -> Completion:
    """Parse the body of a request to a path of `KINDS`.

    `null` counts as absent. Faults that do not affect routing pass, even if vLLM would reject them.

    Raises:
        RequestError: 400, if the body is not a JSON object, or a field that routing needs has the wrong type or range.
    """
    kind = KINDS[path]
    conversation = CONVERSATIONS.get(kind)
    fields = read_fields(body)
    stream = flag(fields, "stream")
    n = (count(fields, "n", 1) or 1) if kind in ("completions", "chat") else 1
    max_tokens = _max_tokens(fields, kind)
    salt = string(fields, "cache_salt")
    if salt == "":
        raise wrong("cache_salt", "is empty", "leave it out or give a string")
    texts, media = _prompts(fields, conversation)
    prompts = max(1, len(texts))
    if n * prompts > ANSWERS_MAX:
        raise _too_many_answers("n", f"{n} completions of each of {prompts} prompts")
    first = texts[0] if texts else None
    one_leg = conversation.needs_one_leg(fields) if conversation is not None else _needs_one_leg(fields)
    return Completion(
        kind=kind,
        fields=fields,
        model=string(fields, "model") or "",
        stream=stream,
        max_tokens=max_tokens,
        n=n,
        prompts=prompts,
        one_leg=one_leg or n > 1 or prompts > 1 or not texts,
        text=first if isinstance(first, bytes) else None,
        token_ids=first if isinstance(first, list) else None,
        further=tuple(texts[1:]),
        salt=salt or "",
        media=media,
    )


def with_salt(completion: Completion, salt: str) -> Completion:
    """Return the same request with another `cache_salt`."""
    fields = {**completion.fields, "cache_salt": Raw(_encode(salt))}
    return msgspec.structs.replace(completion, fields=fields, salt=salt)


def without_body(completion: Completion) -> Completion:
    """Return the same request without the body, when nothing of it needs to be sent any more."""
    return msgspec.structs.replace(completion, fields={}, text=None, token_ids=None, further=())


def without_prompts(completion: Completion) -> Completion:
    """Return the same request without its copies of the prompts, which remain in `fields`."""
    return msgspec.structs.replace(completion, text=None, token_ids=None, further=())


def _too_many_answers(param: str, what: str) -> RequestError:
    return wrong(param, f"requests {what}", f"request at most {ANSWERS_MAX} in total")


def _max_tokens(fields: Fields, kind: Kind) -> int:
    # With `echo`, engines accept 0 tokens: they compute the prompt and return it.
    least = 0 if kind == "completions" and flag(fields, "echo") else 1
    names = [name for name in _LIMITS[kind] if name in fields]
    found = [limit for name in names if (limit := count(fields, name, least)) is not None]
    return found[0] if found else _DEFAULT_TOKENS.get(kind, 0)


def _prompts(fields: Fields, conversation: Conversation | None) -> tuple[list[bytes | list[int]], tuple[Span, ...]]:
    """Return the prompts, and where some part of them is not text."""
    if conversation is None:
        return _plain_prompts(fields), ()
    text, media = conversation.text(fields)
    return [text], media


def _plain_prompts(fields: Fields) -> list[bytes | list[int]]:
    """Return the prompts as UTF-8 or token ids; an empty list if they are embeddings."""
    raw = fields.get("prompt")
    if raw is None or (json_value := bytes(raw)) == b"null":
        if bytes(fields.get("prompt_embeds", b"null")) != b"null":
            return []
        raise wrong("prompt", "is missing", _PROMPT_SHAPE)
    try:
        found = _read_prompts(json_value)
    except msgspec.MsgspecError as error:
        raise wrong("prompt", str(error), _PROMPT_SHAPE) from None
    if not found:
        raise wrong("prompt", "is empty", _PROMPT_SHAPE)
    return found


def _read_prompts(json_value: bytes) -> list[bytes | list[int]]:
    if json_value[:1] == b'"':
        return [utf8(json_value)]
    if json_value[:1] != b"[":
        raise wrong("prompt", f"{shown(json_value)} is not a valid prompt", _PROMPT_SHAPE)
    first = _FIRST.match(json_value)
    if first and first[1] == b'"':
        return [text.encode() for text in _TEXTS.decode(json_value)]
    if json_value.count(b",") >= IDS_MAX:
        raise wrong("prompt", "contains too many token ids", f"give at most {IDS_MAX} in total")
    if first and first[1] == b"[":
        # Checked before decoding: a decoded list takes many times the memory of its text.
        if (lists := json_value.count(b"[") - 1) > ANSWERS_MAX:
            raise _too_many_answers("prompt", f"a completion of each of {lists} prompts")
        return [_ids(bytes(item), f"$[{index}]") for index, item in enumerate(_LISTS.decode(json_value))]
    ids = token_ids(json_value)
    return [ids] if ids else []


def _ids(json_value: bytes, place: str) -> list[int]:
    try:
        return token_ids(json_value)
    except msgspec.ValidationError as error:
        text = str(error)
        raise msgspec.ValidationError(
            text.replace("$", place, 1) if "$" in text else f"{text} - at `{place}`"
        ) from None


def _needs_one_leg(fields: Fields) -> bool:
    """Whether a completion of plain prompts must be computed by one instance."""
    several, echo = computes_several(fields), flag(fields, "echo")
    return several or (echo and given(fields, "logprobs"))
