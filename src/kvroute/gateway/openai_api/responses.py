"""OpenAI's response format: errors, model lists, and the token counts in engines' responses. It sends nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec

TokenCount: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""Number of tokens that an engine reports; a number outside the range counts as not reported."""


class _Details(msgspec.Struct):
    cached_tokens: TokenCount | None = None


class _Usage(msgspec.Struct):
    """Token counts of completions, of the Responses API and of Anthropic's Messages API."""

    completion_tokens: TokenCount | None = None
    output_tokens: TokenCount | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: TokenCount | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


class _Ended(msgspec.Struct):
    status: str | None = None
    stop_reason: str | None = None


class _TransferParams(msgspec.Struct):
    remote_prefill_cached_tokens: TokenCount | None = None


class _Prefilled(_Answer):
    kv_transfer_params: _TransferParams | None = None


_ANSWER, _PREFILLED = msgspec.json.Decoder(_Answer), msgspec.json.Decoder(_Prefilled)
_ENDED = msgspec.json.Decoder(_Ended)
_encode = msgspec.json.Encoder().encode


def error_body(message: str, type: str, *, param: str | None = None, code: str | None = None) -> bytes:
    """Return OpenAI's error JSON: {"error": {"message", "type", "param", "code"}}."""
    return _encode({"error": {"message": message, "type": type, "param": param, "code": code}})


def error_event(message: str, type: str, *, code: str | None = None) -> bytes:
    """Return the same as one server-sent event, for a stream that fails after it has begun."""
    return b"data: " + error_body(message, type, code=code) + b"\n\n"


def models_body(models: Sequence[str], created: int) -> bytes:
    """Return the response body of /v1/models; `created` is in seconds since 1970."""
    return _encode({"object": "list", "data": [_card(model, created) for model in models]})


def model_body(model: str, created: int) -> bytes:
    """Return the response body of /v1/models/{id}; `created` is in seconds since 1970."""
    return _encode(_card(model, created))


def no_model_body(model: str) -> bytes:
    """Return the response body, for status 404, if no instance serves the model."""
    what = f"the model {model[:200]!r} does not exist; GET /v1/models lists the models"
    return error_body(what, "invalid_request_error", param="model", code="model_not_found")


def _card(model: str, created: int) -> dict[str, str | int]:
    return {"id": model, "object": "model", "created": created, "owned_by": "kvroute"}


def sse_events(data: bytes) -> int:
    """Count the server-sent events that begin in `data`, without `[DONE]`: about one per generated token.

    No state is kept between pieces, so an event is missed if a piece ends inside the word `data:`.
    """
    events = data.count(b"\ndata:") + data.startswith(b"data:")
    return events - 1 if events and b"data: [DONE]" in data else events


def usage_tokens(body: bytes) -> int | None:
    """Return the number of generated tokens that a whole response reports in its `usage`, or None."""
    try:
        usage = _ANSWER.decode(body).usage
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    if usage is None:
        return None
    return usage.output_tokens if usage.completion_tokens is None else usage.completion_tokens


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
