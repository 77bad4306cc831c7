"""The connector's use of a store, as planned in vLLM's scheduler: loads of staged blocks and write-back. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvroute_engine.connector.storage.loads import (
    KeptBlocks,
    LoadPart,
    StagedLoad,
    StorageLoads,
    staged_params,
)
from kvroute_engine.connector.storage.write_back import StoredChain, WriteBack, Writes


class StorePrompt(NamedTuple):
    """A new request as the store sees it."""

    tokens: Sequence[int]
    """Tokens of the prompt."""
    live_tokens: Sequence[int]
    """All tokens of the request; the list grows while it is decoded."""
    salt: str = ""
    storable: bool = True
    """False if KV depends on more than tokens: on an adapter, or on media."""


@dataclass(slots=True)
class StorageStep:
    """Work for the workers in one step."""

    number: int = 0
    """Number of the last step with `writes`."""
    loads: list[StagedLoad] = field(default_factory=list)
    unused: list[LoadPart] = field(default_factory=list)
    """Reads that are only released."""
    writes: list[Writes] = field(default_factory=list)


class StoragePlan:
    """vLLM calls, in this order: arrived, matched (any number of times), allocated, computed (in every step), finished;
    and `take` in every step."""

    def __init__(self, block_tokens: int, ranks: int = 1) -> None:
        self._loads, self._write_back = StorageLoads(block_tokens), WriteBack(block_tokens, ranks)
        self._block_tokens, self._ranks = block_tokens, ranks
        self._settled_by: dict[int, int] = {}
        """Number of the last step whose writes are all over, by rank."""
        self._step = StorageStep()
        self._last_written = 0
        self._settled = True

    def arrived(self, request_id: str, params: Mapping[str, Any] | None, prompt: StorePrompt) -> None:
        """Store the staged blocks of a request, and begin to write its blocks."""
        staged = staged_params(params)
        if staged is not None:
            unused = self._loads.arrived(request_id, staged, prompt.tokens if prompt.storable else (), prompt.salt)
            if unused is not None:
                self._plan(unused)
        if not prompt.storable or not prompt.tokens:
            return
        pulled = bool(params and params.get("do_remote_prefill"))
        written_tokens = len(prompt.tokens) if pulled else 0
        self._write_back.arrived(request_id, prompt.live_tokens, salt=prompt.salt, written_tokens=written_tokens)

    def matched(self, request_id: str, prompt_tokens: int, computed_tokens: int) -> int:
        """Return the number of tokens to load beyond `computed_tokens`."""
        return self._loads.matched(request_id, prompt_tokens, computed_tokens)

    def allocated(self, request_id: str, blocks: Sequence[int], loaded_tokens: int) -> None:
        """Plan the load of `loaded_tokens` tokens into the request's blocks."""
        load = self._loads.allocated(request_id, blocks, loaded_tokens)
        if load is not None:
            self._plan(load)
            self._write_back.loaded(request_id, load.end_tokens(self._block_tokens))

    def is_due(self, request_id: str, computed_tokens: int) -> bool:
        """Return whether blocks of a request are full for the first time when a step begins."""
        return self._write_back.is_due(request_id, computed_tokens)

    def computed(self, request_id: str, computed_tokens: int, blocks: Sequence[int]) -> None:
        """Plan to write the blocks that are full for the first time."""
        self._write(self._write_back.computed(request_id, computed_tokens, blocks))

    def finished(self, request_id: str, computed_tokens: int, blocks: Sequence[int], *, kept: bool) -> bool:
        """Handle the end of a request. Return whether vLLM must keep its blocks until the workers have copied them.

        Args:
            request_id: the request.
            computed_tokens: tokens whose KV is in the cache.
            blocks: the request's local blocks.
            kept: vLLM keeps the blocks for another reason, and another component reports when they may be freed.
        """
        unused = self._loads.given_up(request_id)
        if unused is not None:
            self._plan(unused)
        writes = self._write_back.finished(request_id, computed_tokens, blocks, kept=kept)
        self._write(writes)
        return writes is not None

    def take_kept(self, request_id: str) -> KeptBlocks | None:
        """Return the staged blocks of a finished prompt that its decode instance loads, too; once. Call it before
        `finished`."""
        return self._loads.take_kept(request_id)

    def stored(self, rank: int, keys: Iterable[bytes], settled_number: int | None) -> None:
        """Record the blocks that one worker has written. Args: `settled_number`: number of the last step whose writes
        are all over; None: some are not."""
        self._write_back.stored(keys)
        if settled_number is None:
            return
        self._settled_by[rank] = settled_number
        numbers = self._settled_by.values()
        if len(numbers) == self._ranks and min(numbers) == self._last_written and not self._step.writes:
            self._write_back.forget_unconfirmed()
            self._settled = True

    @property
    def pending(self) -> bool:
        """Whether the workers have something to report soon, so that vLLM must go on with steps."""
        return not self._settled

    def take_events(self) -> list[StoredChain]:
        """Return the blocks that are in the store, for KV events."""
        return self._write_back.take_events()

    def take(self) -> StorageStep:
        """Return the work collected since the last call."""
        step, self._step = self._step, StorageStep()
        if step.writes:
            self._last_written += 1
        step.number = self._last_written
        return step

    def _plan(self, load: StagedLoad) -> None:
        parts = tuple(part for part in load.parts if part.blocks)
        self._step.unused.extend(part for part in load.parts if not part.blocks)
        if parts:
            self._step.loads.append(StagedLoad(load.request_id, parts, load.end))

    def _write(self, writes: Writes | None) -> None:
        if writes is not None:
            self._settled = False
            self._step.writes.append(writes)
