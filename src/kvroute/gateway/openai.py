"""The OpenAI side: reads what a client asks for and writes errors and model lists.

It decodes only what routing needs; every other field keeps its bytes, and judging it is left to the engine. Fields by
which engines are told of each other are taken out here, so that no client can point an engine at an address.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Raw

Fields: TypeAlias = dict[str, Raw]
"""Top level of a JSON body, values untouched."""
Kind: TypeAlias = Literal["chat", "completions"]

INVALID = "invalid_request_error"
ANSWERS_MAX = 16_384
"""Answers in one request: vLLM's own bound for `n`, here for `n` times prompts."""
TOKENS_MAX = 2**31 - 1
ENGINE_FIELDS = frozenset(
    {
        "kv_transfer_params",
        "ec_transfer_params",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "bootstrap_pair_key",
        "decode_tp_size",
        "disagg_prefill_dp_rank",
    }
)
"""Said between gateway and engines only; a client's are dropped."""

_KINDS: dict[bytes, Kind] = {b"/v1/completions": "completions", b"/v1/chat/completions": "chat"}
_DEFAULT_TOKENS: dict[Kind, int] = {"completions": 16, "chat": 0}
_TEXT_PARTS = frozenset({"text", "refusal", "thinking", "input_text", "output_text"})
_PROMPT_SHAPE = "give a string, token ids, or a non-empty list of either"
_MESSAGE_SHAPE = "give objects with a string `role` and a `content` that is a string, a list of parts or null"


class _Message(msgspec.Struct):
    role: str
    content: Raw = Raw(b"null")


class _Part(msgspec.Struct):
    type: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_BODY = msgspec.json.Decoder(Fields)
_TEXT = msgspec.json.Decoder(str)
_NUMBER = msgspec.json.Decoder(int | float)
_IDS = msgspec.json.Decoder(list[_TokenId])
_TEXTS = msgspec.json.Decoder(list[str])
_ID_LISTS = msgspec.json.Decoder(list[list[_TokenId]])
_MESSAGES = msgspec.json.Decoder(Annotated[list[_Message], msgspec.Meta(min_length=1)])
_PARTS = msgspec.json.Decoder(list[_Part | str])
_FIRST = re.compile(rb"\[\s*(.)", re.DOTALL)
"""The first byte of a list's first element, which tells the kinds of prompt apart."""
_ANSWER = msgspec.json.Decoder(_Answer)
_encode = msgspec.json.Encoder().encode


class RequestError(Exception):
    """A client's fault: `message` says what is wrong, where and how to mend it; `body()` is the answer to send."""

    def __init__(
        self, message: str, *, status: int = 400, type: str = INVALID, param: str | None = None, code: str | None = None
    ) -> None:
        self.message, self.status, self.type, self.param, self.code = message, status, type, param, code
        super().__init__(message)

    def body(self) -> bytes:
        """OpenAI's error JSON."""
        return error_body(self.message, self.type, param=self.param, code=self.code)


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One request for text, read as far as routing needs."""

    kind: Kind
    fields: Fields
    """The body without `ENGINE_FIELDS`."""
    model: str
    """Empty: the client names none."""
    stream: bool
    max_tokens: int
    """Bound of one answer; 0: the client sets none."""
    n: int
    """Answers per prompt."""
    prompts: int
    one_leg: bool
    """Its KV cannot be handed over as one sequence (several prompts, answers or beams), or its answer needs what only
    the instance that computed the prompt knows (log-probabilities of the prompt)."""
    text: bytes | None = None
    """UTF-8 of the (first) prompt; chat: tools and messages as the JSON that came, without the closing bracket, so that
    a conversation that grows keeps its prefix."""
    token_ids: list[int] | None = None
    """Token ids of the (first) prompt, if it came as such."""
    further: tuple[bytes | list[int], ...] = ()
    """The other prompts."""
    salt: str = ""
    """`cache_salt`: engines keep the caches of different salts apart."""
    media: bool = False
    """Some part of a message is not text."""


def read_completion(path: bytes, body: bytes) -> Completion:
    """Read the body of /v1/completions or /v1/chat/completions.

    `null` counts as absent. What vLLM would refuse for reasons that do not touch routing passes.

    Raises:
        RequestError: 400, if the body is no JSON object or a field that routing needs has the wrong type or range.
    """
    kind = _KINDS[path]
    fields = _read_fields(body)
    stream = _flag(fields, "stream")
    n = _count(fields, "n", 1) or 1
    max_tokens = _max_tokens(fields, kind)
    salt = _string(fields, "cache_salt")
    if salt == "":
        raise _wrong("cache_salt", "is empty", "leave it out or give a string")
    texts, media = _messages(fields) if kind == "chat" else (_prompts(fields), False)
    prompts = max(1, len(texts))
    if n * prompts > ANSWERS_MAX:
        raise _wrong("n", f"asks for {n} answers to each of {prompts} prompts", f"ask for at most {ANSWERS_MAX} in all")
    first = texts[0] if texts else None
    return Completion(
        kind=kind,
        fields=fields,
        model=_string(fields, "model") or "",
        stream=stream,
        max_tokens=max_tokens,
        n=n,
        prompts=prompts,
        one_leg=n > 1 or prompts > 1 or not texts or _looks_back(fields, kind),
        text=first if isinstance(first, bytes) else None,
        token_ids=first if isinstance(first, list) else None,
        further=tuple(texts[1:]),
        salt=salt or "",
        media=media,
    )


def error_body(message: str, type: str, *, param: str | None = None, code: str | None = None) -> bytes:
    """OpenAI's error JSON: {"error": {"message", "type", "param", "code"}}."""
    return _encode({"error": {"message": message, "type": type, "param": param, "code": code}})


def error_event(message: str, type: str, *, code: str | None = None) -> bytes:
    """The same as one server-sent event: how a stream that has begun says that it cannot go on."""
    return b"data: " + error_body(message, type, code=code) + b"\n\n"


def models_body(models: Sequence[str], created: int) -> bytes:
    """The answer of /v1/models; `created` in seconds since 1970."""
    data = [{"id": model, "object": "model", "created": created, "owned_by": "kvroute"} for model in models]
    return _encode({"object": "list", "data": data})


def sse_events(data: bytes) -> int:
    """Server-sent events that begin in `data`, `[DONE]` not counted: about one per generated token.

    Nothing is kept between pieces, so a piece cut inside the word `data:` loses one.
    """
    events = data.count(b"\ndata:") + data.startswith(b"data:")
    return events - 1 if events and b"data: [DONE]" in data else events


def usage_tokens(body: bytes) -> int | None:
    """Generated tokens by a whole answer's own word (`usage.completion_tokens`), if it says so."""
    try:
        usage = _ANSWER.decode(body).usage
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    return usage.completion_tokens if usage else None


def _read_fields(body: bytes) -> Fields:
    try:
        if not body.isascii():
            body.decode()
        fields = _BODY.decode(body)
    except msgspec.ValidationError:
        raise RequestError("the body is no JSON object; send one with the request's fields") from None
    except msgspec.DecodeError as error:
        where = "" if "(byte" in str(error) else f" (byte {len(body)})"
        raise RequestError(
            f"the body is no valid JSON: {error}{where}; send one JSON object", code="invalid_json"
        ) from None
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the body is no UTF-8 (byte {error.start}); send JSON in UTF-8", code="invalid_json"
        ) from None
    except RecursionError:
        raise RequestError("the body is nested too deep; send flatter JSON", code="invalid_json") from None
    for name in ENGINE_FIELDS & fields.keys():
        del fields[name]
    if "vllm_xargs" in fields:
        _check_extra(fields["vllm_xargs"])
    return fields


def _check_extra(raw: Raw) -> None:
    """vLLM merges these arguments with the ones that the gateway sends under names of `ENGINE_FIELDS`."""
    try:
        taken = ENGINE_FIELDS & (msgspec.json.decode(raw, type=Fields | None) or {}).keys()
    except msgspec.ValidationError:
        raise _wrong("vllm_xargs", "is no object", "give an object or leave it out") from None
    if taken:
        raise _wrong("vllm_xargs", f"holds {min(taken)}, which is for the gateway", "leave that out")


def _wrong(param: str, what: str, mend: str) -> RequestError:
    return RequestError(f"{param}: {what}; {mend}", param=param, code="invalid_value")


def _flag(fields: Fields, name: str) -> bool:
    if (raw := fields.get(name)) is None:
        return False
    word = bytes(raw)
    if word not in (b"true", b"false", b"null"):
        raise _wrong(name, f"{_shown(word)} is no boolean", "give true or false")
    return word == b"true"


def _count(fields: Fields, name: str, least: int) -> int | None:
    """An integer from `least` to TOKENS_MAX; 2.0 is one, as in JSON Schema."""
    if (raw := fields.get(name)) is None or (word := bytes(raw)) == b"null":
        return None
    try:
        number = _NUMBER.decode(word)
    except msgspec.MsgspecError:
        number = -1
    if not least <= number <= TOKENS_MAX or number != int(number):
        raise _wrong(name, f"{_shown(word)} is no integer from {least} to {TOKENS_MAX}", "give one or leave it out")
    return int(number)


def _string(fields: Fields, name: str) -> str | None:
    if (raw := fields.get(name)) is None or (word := bytes(raw)) == b"null":
        return None
    if word[:1] != b'"':
        raise _wrong(name, f"{_shown(word)} is no string", "give a string")
    return _text(word).decode()


def _text(word: bytes) -> bytes:
    """UTF-8 of a JSON string: without escapes, what stands between the quotes."""
    return word[1:-1] if b"\\" not in word else _TEXT.decode(word).encode()


def _shown(word: bytes) -> str:
    return word[:40].decode(errors="replace") + ("..." if len(word) > 40 else "")


def _max_tokens(fields: Fields, kind: Kind) -> int:
    least = 1 if kind == "chat" else 0
    bound = _count(fields, "max_tokens", least)
    later = _count(fields, "max_completion_tokens", least) if kind == "chat" else None
    found = later if later is not None else bound
    return found if found is not None else _DEFAULT_TOKENS[kind]


def _prompts(fields: Fields) -> list[bytes | list[int]]:
    """The prompts as UTF-8 or token ids; none, if they are embeddings."""
    raw = fields.get("prompt")
    if raw is None or (word := bytes(raw)) == b"null":
        if bytes(fields.get("prompt_embeds", b"null")) != b"null":
            return []
        raise _wrong("prompt", "is missing", _PROMPT_SHAPE)
    try:
        found = _read_prompts(word)
    except msgspec.MsgspecError as error:
        raise _wrong("prompt", str(error), _PROMPT_SHAPE) from None
    if not found:
        raise _wrong("prompt", "is empty", _PROMPT_SHAPE)
    return found


def _read_prompts(word: bytes) -> list[bytes | list[int]]:
    if word[:1] == b'"':
        return [_text(word)]
    first = _FIRST.match(word)
    if first and first[1] == b'"':
        return [text.encode() for text in _TEXTS.decode(word)]
    if first and first[1] == b"[":
        return list(_ID_LISTS.decode(word))
    ids = _IDS.decode(word)
    return [ids] if ids else []


def _messages(fields: Fields) -> tuple[list[bytes | list[int]], bool]:
    """The conversation as one prompt, and whether some part of it is not text."""
    word = bytes(fields.get("messages", b"null"))
    if word == b"null":
        raise _wrong("messages", "is missing", _MESSAGE_SHAPE)
    media = False
    try:
        for index, message in enumerate(_MESSAGES.decode(word)):
            media |= _has_media(message.content, index)
    except msgspec.MsgspecError as error:
        raise _wrong("messages", str(error), _MESSAGE_SHAPE) from None
    head = [bytes(fields[name]) for name in ("chat_template", "documents", "tools") if name in fields]
    return [b"".join([*head, word[:-1].rstrip()])], media


def _has_media(content: Raw, index: int) -> bool:
    """Raises RequestError unless `content` is a string, parts or null."""
    first = memoryview(content)[0]
    if first == 0x5B:  # [
        return any(not (isinstance(part, str) or part.type in _TEXT_PARTS) for part in _PARTS.decode(content))
    if first not in b'"n':
        raise _wrong("messages", f"`$[{index}].content` is {_shown(bytes(content))}", _MESSAGE_SHAPE)
    return False


def _looks_back(fields: Fields, kind: Kind) -> bool:
    """Beams, several tries, or log-probabilities of the prompt."""
    tries = _count(fields, "best_of", 0) or 1
    if tries > 1 or _flag(fields, "use_beam_search") or _given(fields, "prompt_logprobs"):
        return True
    return kind == "completions" and _flag(fields, "echo") and _given(fields, "logprobs")


def _given(fields: Fields, name: str) -> bool:
    return name in fields and bytes(fields[name]) != b"null"
