"""Reads the prompt of one request, and makes the core's `Request`.

A prompt is hashed on the event loop, or in a thread if it is large. For models without a tokenizer here, an engine
tokenizes it first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from msgspec import structs

from kvroute.http.headers import session_of
from kvroute.serve.api.json_fields import RequestError
from kvroute.serve.api.prompt_queue import QueueFull
from kvroute.serve.api.requests import without_prompts
from kvroute.serve.proxy.engine_tokenizer import engine_token_ids
from kvroute.types import Request

if TYPE_CHECKING:
    import asyncio

    from kvroute.serve.api.prompt_reader import Prompt
    from kvroute.serve.proxy.request_state import RequestState


class PromptOwner(Protocol):
    """Receives the prompt."""

    def on_prompt(self, prompt: Prompt) -> None:
        """Handle the prompt."""

    def on_bad_request(self, error: RequestError) -> None:
        """Handle a client's error in its prompt, or one that `on_prompt` has raised."""

    def on_prompt_queue_full(self, full: QueueFull) -> None:
        """Handle a prompt that would wait too long for a thread."""

    def internal_error(self, error: Exception) -> None:
        """Handle a bug in the gateway."""


class PromptReading:
    """Reads the prompt of one request, once."""

    __slots__ = ("_model", "_owner", "_state", "_task")

    def __init__(self, state: RequestState, owner: PromptOwner, model: str) -> None:
        """Args: `model`: its name in the cluster file."""
        self._state, self._owner, self._model = state, owner, model
        self._task: asyncio.Task[None] | None = None
        """Runs while the prompt is read off the event loop."""

    def begin(self) -> None:
        """Read the prompt, or begin to."""
        runtime, completion = self._state.runtime, self._state.completion
        try:
            asks = runtime.reading.prompts.asks_engine(completion, self._model)
            prompt = None if asks else runtime.reading.prompts.blocks_now(completion, self._model)
            if prompt is None:
                self._task = runtime.spawn(self._read(ask=asks))
            else:
                self._owner.on_prompt(prompt)
        except RequestError as error:
            self._owner.on_bad_request(error)

    def cancel(self) -> None:
        """Stop, so that a prompt in the queue is released at once."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    async def _read(self, *, ask: bool) -> None:
        state, owner = self._state, self._owner
        try:
            prompt = await self._blocks(ask=ask)
            self._task = None
            if not state.over:
                state.completion = without_prompts(state.completion)
                owner.on_prompt(prompt)
        except RequestError as error:
            self._task = None
            owner.on_bad_request(error)
        except QueueFull as full:
            self._task = None
            owner.on_prompt_queue_full(full)
        except Exception as error:
            owner.internal_error(error)

    async def _blocks(self, *, ask: bool) -> Prompt:
        """Args: `ask`: let an engine tokenize the prompt first."""
        prompts, completion = self._state.runtime.reading.prompts, self._state.completion
        if ask:
            ids = await engine_token_ids(self._state, self._model)
            if ids is not None:
                completion = structs.replace(completion, text=None, token_ids=ids)
            prompt = prompts.blocks_now(completion, self._model)
            if prompt is not None:
                return prompt
        return await prompts.blocks(completion, self._model)


def core_request(state: RequestState, prompt: Prompt, model: str, now: float, *, both_on_arrival: bool) -> Request:
    """Return the request as the core decides on it.

    Args:
        state: the client's request.
        prompt: its prompt.
        model: name of its model in the core.
        now: time, gateway clock.
        both_on_arrival: whether the decode instance orders the prefill.
    """
    runtime, completion = state.runtime, state.completion
    max_tokens, reserve = completion.max_tokens, runtime.settings.reserve_output_tokens
    if max_tokens > reserve or (not max_tokens and completion.kind != "completions"):
        max_tokens = reserve  # a conversation without a limit may use the whole context
    one_leg = completion.one_leg or runtime.reading.unsplit.has(model, completion.kind, now)
    return Request(
        id=state.number,
        input_tokens=prompt.input_tokens,
        blocks=prompt.blocks,
        block_tokens=prompt.block_tokens,
        max_output_tokens=max_tokens,
        model=model,
        one_leg=one_leg and runtime.reading.models.one_instance_only(completion),
        copyable=prompt.ids is not None and not both_on_arrival and not completion.adapter,
        adapter=completion.adapter,
        session=session_of(state.exchange.headers, runtime.reading.session_header)
        if runtime.reading.session_header
        else 0,
    )
