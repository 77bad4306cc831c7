"""OpenAI requests: parses the fields of a request that routing needs.

All other fields keep their bytes, and the engine validates them. Fields that engines use to find each other are
removed here, so that no client can direct an engine to an address.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import Raw

from kvroute.gateway.openai_api.json_fields import (
    Fields,
    RequestError,
    count,
    flag,
    given,
    read_and_strip_fields,
    read_fields,
    shown,
    string,
    token_ids,
    utf8,
    wrong,
)

Kind: TypeAlias = Literal["chat", "completions"]

ANSWERS_MAX = 16_384
"""Maximum number of choices in one request: vLLM's bound for `n`, applied to `n` times prompts."""
IDS_MAX = 2**22
"""Maximum number of token ids in one request."""

_KINDS: dict[bytes, Kind] = {b"/v1/completions": "completions", b"/v1/chat/completions": "chat"}
_DEFAULT_TOKENS: dict[Kind, int] = {"completions": 16, "chat": 0}
_TEXT_PARTS = frozenset({"text", "refusal", "thinking", "input_text", "output_text"})
_PROMPT_SHAPE = "give a string, token ids, or a non-empty list of either"
_MESSAGE_SHAPE = "give objects with a string `role` and a `content` that is a string, a list of parts or null"


class _Message(msgspec.Struct, gc=False):
    role: str
    content: Raw = Raw(b"null")


class _Part(msgspec.Struct, gc=False):
    type: str | None = None


_encode = msgspec.json.Encoder().encode
_NULL = Raw(b"null")
_TEXTS = msgspec.json.Decoder(list[str])
_LISTS = msgspec.json.Decoder(list[Raw])
_MESSAGES = msgspec.json.Decoder(Annotated[list[_Message], msgspec.Meta(min_length=1)])
_PARTS = msgspec.json.Decoder(list[_Part | str])
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
    media: bool = False
    """Whether some part of a message is not text."""


class PassthroughBody(NamedTuple):
    """One request that any engine serves alone."""

    model: str
    """Empty: the client names no model."""
    body: bytes
    """Body that is sent to the engine."""
    fields: Fields
    """Fields of the body."""


def read_completion(path: bytes, body: bytes) -> Completion:
    """Parse the body of /v1/completions or /v1/chat/completions.

    `null` counts as absent. Faults that do not affect routing pass, even if vLLM would reject them.

    Raises:
        RequestError: 400, if the body is not a JSON object, or a field that routing needs has the wrong type or range.
    """
    kind = _KINDS[path]
    fields = read_fields(body)
    stream = flag(fields, "stream")
    n = count(fields, "n", 1) or 1
    max_tokens = _max_tokens(fields, kind)
    salt = string(fields, "cache_salt")
    if salt == "":
        raise wrong("cache_salt", "is empty", "leave it out or give a string")
    texts, media = _messages(fields) if kind == "chat" else (_prompts(fields), False)
    prompts = max(1, len(texts))
    if n * prompts > ANSWERS_MAX:
        raise _too_many_answers("n", f"{n} completions of each of {prompts} prompts")
    first = texts[0] if texts else None
    return Completion(
        kind=kind,
        fields=fields,
        model=string(fields, "model") or "",
        stream=stream,
        max_tokens=max_tokens,
        n=n,
        prompts=prompts,
        one_leg=_needs_one_leg(fields, kind) or n > 1 or prompts > 1 or not texts,
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


def read_passthrough(path: bytes, body: bytes) -> PassthroughBody:
    """Parse the body of a request that is passed through; its bytes are kept unless it has one of `ENGINE_FIELDS`.

    Raises:
        RequestError: 400, the body is not a JSON object, its `model` is not a string, or it has too many values.
    """
    fields, stripped = read_and_strip_fields(body)
    return PassthroughBody(string(fields, "model") or "", _encode(fields) if stripped else body, fields)


def passthrough_with_salt(passthrough: PassthroughBody, salt: Callable[[str], str]) -> PassthroughBody:
    """Return the same request with the `cache_salt` that `salt` derives from the client's. The body, which may be
    long, is not parsed again."""
    own = bytes(passthrough.fields.get("cache_salt", b"null"))
    fields = {**passthrough.fields, "cache_salt": Raw(_encode(salt("" if own == b"null" else own.decode())))}
    return PassthroughBody(passthrough.model, _encode(fields), fields)


def _too_many_answers(param: str, what: str) -> RequestError:
    return wrong(param, f"requests {what}", f"request at most {ANSWERS_MAX} in total")


def _max_tokens(fields: Fields, kind: Kind) -> int:
    # With `echo`, engines accept 0 tokens: they compute the prompt and return it.
    least = 0 if kind == "completions" and flag(fields, "echo") else 1
    bound = count(fields, "max_tokens", least)
    later = count(fields, "max_completion_tokens", least) if kind == "chat" else None
    found = later if later is not None else bound
    return found if found is not None else _DEFAULT_TOKENS[kind]


def _prompts(fields: Fields) -> list[bytes | list[int]]:
    """Return the prompts as UTF-8 or token ids; an empty list if they are embeddings."""
    raw = fields.get("prompt")
    if raw is None or (word := bytes(raw)) == b"null":
        if bytes(fields.get("prompt_embeds", b"null")) != b"null":
            return []
        raise wrong("prompt", "is missing", _PROMPT_SHAPE)
    try:
        found = _read_prompts(word)
    except msgspec.MsgspecError as error:
        raise wrong("prompt", str(error), _PROMPT_SHAPE) from None
    if not found:
        raise wrong("prompt", "is empty", _PROMPT_SHAPE)
    return found


def _read_prompts(word: bytes) -> list[bytes | list[int]]:
    if word[:1] == b'"':
        return [utf8(word)]
    if word[:1] != b"[":
        raise wrong("prompt", f"{shown(word)} is not a valid prompt", _PROMPT_SHAPE)
    first = _FIRST.match(word)
    if first and first[1] == b'"':
        return [text.encode() for text in _TEXTS.decode(word)]
    if word.count(b",") >= IDS_MAX:
        raise wrong("prompt", "contains too many token ids", f"give at most {IDS_MAX} in total")
    if first and first[1] == b"[":
        # Checked before decoding: a decoded list takes many times the memory of its text.
        if (lists := word.count(b"[") - 1) > ANSWERS_MAX:
            raise _too_many_answers("prompt", f"a completion of each of {lists} prompts")
        return [_ids(bytes(each), f"$[{index}]") for index, each in enumerate(_LISTS.decode(word))]
    ids = token_ids(word)
    return [ids] if ids else []


def _ids(word: bytes, place: str) -> list[int]:
    try:
        return token_ids(word)
    except msgspec.ValidationError as error:
        text = str(error)
        raise msgspec.ValidationError(
            text.replace("$", place, 1) if "$" in text else f"{text} - at `{place}`"
        ) from None


def _messages(fields: Fields) -> tuple[list[bytes | list[int]], bool]:
    """Return the conversation as one prompt, and whether some part of it is not text."""
    word = fields.get("messages", _NULL)
    if word == _NULL:
        raise wrong("messages", "is missing", _MESSAGE_SHAPE)
    media = False
    try:
        for index, message in enumerate(_MESSAGES.decode(word)):
            media |= _has_media(message.content, index)
    except msgspec.MsgspecError as error:
        raise wrong("messages", str(error), _MESSAGE_SHAPE) from None
    head = [fields[name] for name in ("chat_template", "documents", "tools") if name in fields]
    # This is the only copy that is made of the messages: they may be long.
    inner = memoryview(word)[:-1]
    while inner[-1] in b" \t\r\n":
        inner = inner[:-1]
    return [b"".join([*head, inner])], media


def _has_media(content: Raw, index: int) -> bool:
    """Whether `content` has a part that is not text. Raises RequestError unless it is a string, parts or null."""
    first = memoryview(content)[0]
    if first == 0x5B:  # [
        return any(not (isinstance(part, str) or part.type in _TEXT_PARTS) for part in _PARTS.decode(content))
    if first not in b'"n':
        raise wrong("messages", f"`$[{index}].content` is {shown(bytes(content))}", _MESSAGE_SHAPE)
    return False


def _needs_one_leg(fields: Fields, kind: Kind) -> bool:
    """Whether the request has beams, several tries, or log-probabilities of the prompt."""
    # All fields are parsed, so that an invalid one is rejected whatever the others contain.
    several, beams = (count(fields, "best_of", 0) or 1) > 1, flag(fields, "use_beam_search")
    echo = kind == "completions" and flag(fields, "echo")
    return several or beams or given(fields, "prompt_logprobs") or (echo and given(fields, "logprobs"))
