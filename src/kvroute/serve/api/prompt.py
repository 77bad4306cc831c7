"""The prompts of all models: small ones are read on the event loop, large ones in threads, in the order of a queue."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path

from kvroute.serve.api.prompt_bounds import MEMORY_BYTES
from kvroute.serve.api.prompt_queue import LANE_LIMITS, PromptQueue
from kvroute.serve.api.prompt_reader import Prompt, PromptReader
from kvroute.serve.api.requests import Completion

TOKENIZER_BYTES_PER_S, TEXT_BYTES_PER_S = 1e6, 50e6
"""Assumed throughput of a thread until it is measured."""


class Prompts:
    """Tokenizes prompts: small ones inline, large ones in threads, by lanes. `close` ends the threads."""

    def __init__(
        self,
        tokenizer: Path | None = None,
        *,
        tokenizers: Mapping[str, Path] | None = None,
        ask_engines: bool = False,
        block_tokens: int = 16,
        bytes_per_token: int = 4,
        inline_bytes: int | None = None,
        context_tokens: int | None = None,
        memory_bytes: float = MEMORY_BYTES,
        wait_max_s: float = math.inf,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Args:
            tokenizer: a `tokenizer.json` or its folder; None: blocks of text.
            tokenizers: the same for some models, by their names in the cluster file.
            ask_engines: engines tokenize the prompts of models without a tokenizer here (see `asks_engine`).
            block_tokens: tokens of one block, as in the engines' cache.
            bytes_per_token: assumed bytes per token without a tokenizer.
            inline_bytes: longest prompt that is tokenized inline; None: what takes about a millisecond.
            context_tokens: context length of the models without a tokenizer of their own; None: that in the
                tokenizer's folder, if any.
            memory_bytes: memory for all prompts that are tokenized at the same time.
            wait_max_s: large prompts that would wait longer are rejected.
            clock: for chat templates that contain the date.

        Raises:
            InputError: the tokenizer or its chat template cannot be read.
        """
        reader = partial(
            PromptReader,
            block_tokens=block_tokens,
            bytes_per_token=bytes_per_token,
            inline_bytes=inline_bytes,
            memory_bytes=memory_bytes,
            clock=clock,
        )
        self._rest = reader(tokenizer, context_tokens=context_tokens)
        """Reader of the prompts of models that have none of their own."""
        self._readers = {model: reader(path) for model, path in (tokenizers or {}).items()}
        self._ask_engines = ask_engines
        exact = any(part.exact for part in (self._rest, *self._readers.values()))
        pace = TOKENIZER_BYTES_PER_S if exact else TEXT_BYTES_PER_S
        self._queue = PromptQueue(pace, wait_max_s)
        self._turns: dict[int, asyncio.Future[None]] = {}
        """Futures of the waiting prompts, by ticket; each is set when its prompt may start."""
        self._tickets = 0
        # Each lane has its own thread, so that the memory the allocator keeps for a thread stays as small as its
        # prompts.
        self._threads = [ThreadPoolExecutor(1, f"prompt-{lane}") for lane in range(len(LANE_LIMITS))]

    def change(self, wait_max_s: float) -> None:
        """Reject large prompts that would wait longer than this from now on."""
        self._queue.wait_max_s = wait_max_s

    def exact(self, model: str = "") -> bool:
        """Whether the hashes of a model's prompts equal those of engines' KV events."""
        return self._reader(model).exact or self._ask_engines

    def asks_engine(self, completion: Completion, model: str) -> bool:
        """Whether an engine is to tokenize this prompt: a single text, or a chat of text, of a model without a
        tokenizer."""
        if not self._ask_engines or self._reader(model).exact:
            return False
        plain = completion.text is not None and not completion.further and not completion.media
        return plain and completion.kind in ("completions", "chat")

    def _reader(self, model: str) -> PromptReader:
        return self._readers.get(model, self._rest)

    def blocks_now(self, completion: Completion, model: str = "") -> Prompt | None:
        """Return the prompt, or None if it is large and needs `blocks`. Raises RequestError as `blocks` does.

        Args: `model`: its name in the cluster file.
        """
        reader = self._reader(model)
        if reader.work_bytes(completion) <= reader.inline_bytes(completion):
            return reader.read(completion)
        reader.check(completion)
        return None

    async def blocks(self, completion: Completion, model: str = "") -> Prompt:
        """Return a prompt of any size, computed off the event loop; cancellation removes it from the queue. Args: as
        for `blocks_now`.

        Raises:
            RequestError: 400, the prompt does not fit into the model's context or is too large to be tokenized.
            QueueFull: it would wait too long.
        """
        loop, reader = asyncio.get_running_loop(), self._reader(model)
        self._tickets += 1
        ticket, turn = self._tickets, loop.create_future()
        self._turns[ticket] = turn
        try:
            self._begin(self._queue.enter(ticket, reader.work_bytes(completion), loop.time()))
            await turn
        except BaseException:
            self._turns.pop(ticket, None)
            self._begin(self._queue.leave(ticket, loop.time()))
            raise
        reading = self._threads[self._queue.lane(ticket)].submit(reader.read, completion)

        def done(_: object) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._left, ticket)

        # Not a callback of the asyncio future, which is done when it is cancelled, while the thread continues.
        reading.add_done_callback(done)
        return await asyncio.wrap_future(reading)

    def _begin(self, tickets: list[int]) -> None:
        for ticket in tickets:
            turn = self._turns.pop(ticket)
            if not turn.done():
                turn.set_result(None)

    def _left(self, ticket: int) -> None:
        self._begin(self._queue.leave(ticket, asyncio.get_running_loop().time()))

    def close(self) -> None:
        """End each thread after its current prompt. This does not wait: a large prompt takes seconds, and the event
        loop has other requests."""
        for thread in self._threads:
            thread.shutdown(wait=False)
