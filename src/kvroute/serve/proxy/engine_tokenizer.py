"""Token ids of a prompt as an engine computes them, for models without a tokenizer here (vLLM's `POST /tokenize`)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
from msgspec import Raw

from kvroute.http.client.call import Failure
from kvroute.http.headers import Headers
from kvroute.serve.api.conversation import decoded
from kvroute.serve.api.requests import IDS_MAX, Completion
from kvroute.serve.observe.logs import log_event
from kvroute.serve.proxy.legs.passthrough import answerers

if TYPE_CHECKING:
    from kvroute.serve.engines.client import EngineClient
    from kvroute.serve.proxy.request_state import RequestState

PATH = b"/tokenize"
ATTEMPTS = 2
"""Instances that are asked before the prompt is read without its tokens."""
_WAIT_S = 10.0
"""Longest time for an answer; a prompt of a million tokens takes about a second."""
_ANSWER_BYTES_MAX = 64 << 20
_PLAIN = ("model", "prompt", "add_special_tokens")
_CHAT = (
    *("model", "messages", "add_special_tokens", "add_generation_prompt", "continue_final_message"),
    *("chat_template", "chat_template_kwargs", "tools"),
)
"""Fields of a request that determine its tokens."""


class _Answer(msgspec.Struct):
    tokens: list[int]


_DECODE = msgspec.json.Decoder(_Answer).decode
_ENCODE = msgspec.json.Encoder().encode


async def engine_token_ids(state: RequestState, model: str) -> list[int] | None:
    """Return the token ids of a request's prompt; None if no engine tells them, which the log and a metric show.

    Args: `model`: its name in the cluster file.
    """
    runtime, body = state.runtime, tokenize_body(state.completion)
    why, engines = "no instance is up", answerers(runtime.engines.values(), model, state.number)
    for _ in range(ATTEMPTS):
        engine = next(engines, None)
        if engine is None:
            break
        found = await _asked(engine, state, body)
        if isinstance(found, list):
            runtime.metrics.engine_tokenized("tokens")
            return found
        why = f"{engine.name}: {found}"
    runtime.metrics.engine_tokenized("failed")
    log_event("warning", "tokenize_failed", request_id=state.request_id.decode("latin-1"), reason=why)
    return None


def tokenize_body(completion: Completion) -> bytes:
    """Return the request to an engine for the tokens of a completion or a chat."""
    fields = completion.fields
    names = _PLAIN if completion.kind == "completions" else _CHAT
    found = {name: fields[name] for name in names if name in fields}
    effort = decoded(fields, "reasoning_effort") if completion.kind == "chat" else None
    if effort is not None:
        # vLLM adds these to the variables of a chat, and `/tokenize` knows no such field.
        own = decoded(fields, "chat_template_kwargs") or {}
        variables = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        found["chat_template_kwargs"] = (
            Raw(_ENCODE(variables | own)) if isinstance(own, dict) else fields["chat_template_kwargs"]
        )
    return _ENCODE(found)


async def _asked(engine: EngineClient, state: RequestState, body: bytes) -> list[int] | str:
    """Return the tokens, or why there are none."""
    answer = _TokenizeResponse()
    engine.started(state.runtime.now(), counted=False)
    call = engine.send(answer, PATH, state.head, body, first_byte_s=_WAIT_S)
    try:
        return await answer.done
    finally:
        call.abort()
        engine.leg_closed()


class _TokenizeResponse:
    """Receives the response; `done` has the tokens, or the reason why there are none."""

    def __init__(self) -> None:
        self.done: asyncio.Future[list[int] | str] = asyncio.get_running_loop().create_future()
        self._status, self._size = 0, 0
        self._parts: list[bytes] = []

    def on_head(self, status: int, headers: Headers) -> None:
        """See `ResponseHandler`."""
        self._status = status

    def on_body(self, data: bytes) -> None:
        """See `ResponseHandler`."""
        self._size += len(data)
        if self._size > _ANSWER_BYTES_MAX:
            self._end(f"its answer has more than {_ANSWER_BYTES_MAX} bytes")
        else:
            self._parts.append(data)

    def on_end(self) -> None:
        """See `ResponseHandler`."""
        if self._status != 200:
            self._end(f"HTTP status {self._status}")
            return
        try:
            tokens = _DECODE(b"".join(self._parts)).tokens
        except msgspec.MsgspecError as error:
            self._end(f"its answer has no tokens ({error})")
            return
        self._end(tokens if len(tokens) <= IDS_MAX else f"its answer has more than {IDS_MAX} tokens")

    def on_failure(self, failure: Failure) -> None:
        """See `ResponseHandler`."""
        self._end(failure.text)

    def _end(self, result: list[int] | str) -> None:
        if not self.done.done():
            self.done.set_result(result)
