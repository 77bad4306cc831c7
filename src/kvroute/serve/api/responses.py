"""OpenAI's response format: errors, model lists, and the token counts in engines' responses. It sends nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, NamedTuple, TypeAlias

import msgspec
from msgspec import Raw

TokenCount: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""Number of tokens that an engine reports; a number outside the range counts as not reported."""


class _Details(msgspec.Struct):
    cached_tokens: TokenCount | None = None


class TokenUsage(NamedTuple):
    """What an engine reports as the tokens of a request; None: it does not report it."""

    prompt_tokens: int | None
    output_tokens: int | None


class _Usage(msgspec.Struct):
    """Token counts of completions, of the Responses API and of Anthropic's Messages API."""

    prompt_tokens: TokenCount | None = None
    input_tokens: TokenCount | None = None
    completion_tokens: TokenCount | None = None
    output_tokens: TokenCount | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: TokenCount | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


class _Event(_Answer):
    """A whole response, or an event of a stream, which may contain a whole or a begun response."""

    response: _Answer | None = None
    message: _Answer | None = None


class _Ended(msgspec.Struct):
    status: str | None = None
    stop_reason: str | None = None


class _EngineError(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class _EngineAnswer(msgspec.Struct):
    """Error responses of engines, in several formats."""

    error: _EngineError | str | None = None
    message: str = ""
    detail: str | list[Raw] | dict[str, Raw] | None = None
    code: int | str | None = None


class _TransferParams(msgspec.Struct):
    remote_prefill_cached_tokens: TokenCount | None = None


class _Prefilled(_Answer):
    kv_transfer_params: _TransferParams | None = None


_EVENT, _PREFILLED = msgspec.json.Decoder(_Event), msgspec.json.Decoder(_Prefilled)
_ENDED = msgspec.json.Decoder(_Ended)
_ENGINE_ERROR = msgspec.json.Decoder(_EngineAnswer)
_ERROR_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_ERROR_TEXT_MAX = 300
"""Longest text of an engine's error that becomes part of the gateway's own, in characters."""
_encode = msgspec.json.Encoder().encode


def error_body(message: str, type: str, *, param: str | None = None, code: str | None = None) -> bytes:
    """Return OpenAI's error JSON: {"error": {"message", "type", "param", "code"}}. `code` is always a string; an error
    without one has its type there."""
    return _encode({"error": {"message": message, "type": type, "param": param, "code": code or type}})


def with_text_code(body: bytes) -> bytes:
    """Return an engine's error in OpenAI's format with a string as its `code`, as in the gateway's own errors: engines
    send the status as a number. Any other body stays as it is."""
    try:
        found = _ERROR_FIELDS.decode(body)
        error = _ERROR_FIELDS.decode(found["error"]) if "error" in found else found
        code = bytes(error.get("code", b""))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return body
    if not code.isdigit():
        return body
    error["code"] = Raw(_encode(code.decode()))
    return _encode({**found, "error": error} if error is not found else found)


def error_status(body: bytes) -> int:
    """Return the status that an engine's error has as its `code`; 0 if it has none."""
    try:
        found = _ENGINE_ERROR.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return 0
    code = found.error.code if isinstance(found.error, _EngineError) else found.code
    return code if type(code) is int and 400 <= code < 600 else 0


def error_text(body: bytes) -> str:
    """Return the message of an engine's error response as one line of at most _ERROR_TEXT_MAX characters; empty if it
    has none. Formats: OpenAI's, that of older engines (`message`), FastAPI's (`detail`), and plain text."""
    try:
        found = _ENGINE_ERROR.decode(body)
        error = found.error.message if isinstance(found.error, _EngineError) else found.error
        text = error or found.message or (found.detail if isinstance(found.detail, str) else "")
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        text = body[: 4 * _ERROR_TEXT_MAX].decode(errors="replace")
        if text.lstrip()[:1] in ("<", "{", "["):
            return ""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * _ERROR_TEXT_MAX]).split())
    return line if len(line) <= _ERROR_TEXT_MAX else line[: _ERROR_TEXT_MAX - 3] + "..."


def error_event(message: str, type: str, *, code: str | None = None) -> bytes:
    """Return the same as one server-sent event, for a stream that fails after it has begun."""
    return b"data: " + error_body(message, type, code=code) + b"\n\n"


def models_body(contexts: Mapping[str, int | None], created: int) -> bytes:
    """Return the response body of /v1/models.

    Args:
        contexts: tokens of the context of each model, by name; None: unknown.
        created: in seconds since 1970.
    """
    return _encode({"object": "list", "data": [_card(name, created, context) for name, context in contexts.items()]})


def model_body(model: str, created: int, context: int | None) -> bytes:
    """Return the response body of /v1/models/{id}. Args: see `models_body`."""
    return _encode(_card(model, created, context))


def no_model_body(model: str) -> bytes:
    """Return the response body, for status 404, if no instance serves the model."""
    what = f"the model {model[:200]!r} does not exist; GET /v1/models lists the models"
    return error_body(what, "invalid_request_error", param="model", code="model_not_found")


def _card(model: str, created: int, context: int | None) -> dict[str, str | int]:
    card: dict[str, str | int] = {"id": model, "object": "model", "created": created, "owned_by": "kvroute"}
    return card if context is None else card | {"max_model_len": context}


def sse_events(data: bytes) -> int:
    """Count the server-sent events that begin in `data`, without `[DONE]`: about one per generated token.

    No state is kept between pieces, so an event is missed if a piece ends inside the word `data:`.
    """
    events = data.count(b"\ndata:") + data.startswith(b"data:")
    return events - 1 if events and (b"data: [DONE]" in data or b"data:[DONE]" in data) else events


def usage_of(body: bytes) -> TokenUsage | None:
    """Return what the `usage` of a whole response or of an event of a stream reports; None if it has none."""
    try:
        event = _EVENT.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    for holder in (event, event.response, event.message):
        if holder is not None and (usage := holder.usage) is not None:
            prompt = usage.input_tokens if usage.prompt_tokens is None else usage.prompt_tokens
            output = usage.output_tokens if usage.completion_tokens is None else usage.completion_tokens
            return TokenUsage(prompt, output)
    return None


def ended_by_length(body: bytes) -> bool:
    """Whether the output in a whole response of the Responses API or of Anthropic's Messages API ended because of its
    maximum length."""
    try:
        ended = _ENDED.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return False
    return ended.status == "incomplete" or ended.stop_reason == "max_tokens"


def cached_tokens(body: bytes) -> int | None:
    """Return the number of prompt tokens that the prefill engine found in its cache, if its response reports it.

    vLLM reports it in the parameters for the decode engine, and in `usage` if it is started with
    `--enable-prompt-tokens-details`.
    """
    try:
        answer = _PREFILLED.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    params = answer.kv_transfer_params
    if params and params.remote_prefill_cached_tokens is not None:
        return params.remote_prefill_cached_tokens
    if answer.usage is None:
        return None
    details = answer.usage.prompt_tokens_details or answer.usage.input_tokens_details
    return details.cached_tokens if details else answer.usage.cache_read_input_tokens
