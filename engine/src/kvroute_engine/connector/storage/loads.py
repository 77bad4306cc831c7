"""Staged blocks of a prompt: which of them its prefill loads from buffer servers. The scheduler's half; no I/O."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from kvroute_engine.block_keys import block_keys

log = logging.getLogger(__name__)


class StagedPart(msgspec.Struct, frozen=True):
    """Consecutive blocks in one buffer server."""

    id: Annotated[str, msgspec.Meta(min_length=1)]
    """Name of the read there."""
    blocks: Annotated[int, msgspec.Meta(ge=1)]
    data: Annotated[str, msgspec.Meta(pattern=r"^.+:\d{1,5}\Z")]
    """`host:port` where the blocks are fetched."""
    keep: bool = False
    """True: the blocks stay in the buffer for the decode instance, which releases them."""


class KeptBlocks(msgspec.Struct, frozen=True):
    """The field `kept` of the `kv_transfer_params` that a prefill instance returns: consecutive blocks of the prompt in
    the buffer server of the decode instance's node."""

    first_block: Annotated[int, msgspec.Meta(ge=0)]
    blocks: Annotated[int, msgspec.Meta(ge=1)]
    id: Annotated[str, msgspec.Meta(min_length=1)]
    """Name of the read there."""
    data: Annotated[str, msgspec.Meta(pattern=r"^.+:\d{1,5}\Z")]
    """`host:port` where the blocks are fetched."""
    key: str
    """Key of the last block, hexadecimal."""


class StagedBlocks(msgspec.Struct, frozen=True):
    """The field `storage` of a request's `kv_transfer_params`: blocks in the order of the prompt, without gaps."""

    first_block: Annotated[int, msgspec.Meta(ge=0)]
    key: str
    """Key of the last block, hexadecimal."""
    parts: Annotated[tuple[StagedPart, ...], msgspec.Meta(min_length=1)]

    @property
    def end(self) -> int:
        """Position after the last block."""
        return self.first_block + sum(part.blocks for part in self.parts)


@dataclass(frozen=True, slots=True)
class LoadPart:
    """Blocks to fetch from one buffer server."""

    data: str
    """`host:port` of the buffer server."""
    read_id: str
    first: int
    """Position of the first block in the read."""
    blocks: tuple[int, ...]
    """Local blocks; none: the read is only released."""
    key: str
    """Key of the read's last block, which the buffer server compares."""
    keep: bool = False
    """True: the read is not released."""


@dataclass(frozen=True, slots=True)
class StagedLoad:
    """The staged blocks of one request, to be loaded before and while the model computes the rest."""

    request_id: str
    parts: tuple[LoadPart, ...]
    end: int
    """Position in the prompt after the last loaded block; 0: none is loaded."""

    def end_tokens(self, block_tokens: int) -> int:
        """Return the same in tokens."""
        return self.end * block_tokens


@dataclass(slots=True)
class _Staged:
    blocks: StagedBlocks
    keys: list[str]
    """Keys of the last block of each part."""
    computed_tokens: int = 0
    """Tokens in the cache before the load, at the last call of `matched`."""


class StorageLoads:
    """Staged blocks by request. vLLM calls, in this order: arrived, matched (any number of times), allocated or
    given_up."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._staged: dict[str, _Staged] = {}
        self._kept: dict[str, KeptBlocks] = {}

    def arrived(self, request_id: str, params: Any, prompt: Sequence[int], salt: str = "") -> StagedLoad | None:
        """Store the staged blocks of a request, if they are those of its prompt. Otherwise the request computes them;
        the returned reads are to be released."""
        try:
            staged = msgspec.convert(params, StagedBlocks)
        except msgspec.ValidationError as error:
            log.warning("request %s computes its prompt: its staged blocks are not usable, %s", request_id, error)
            return None
        keys = block_keys(prompt[: staged.end * self._block_tokens], self._block_tokens, salt)
        if len(keys) < staged.end or keys[-1].hex() != staged.key:
            log.warning(
                "request %s computes its prompt: its staged blocks belong to other tokens or have another size",
                request_id,
            )
            return self._given_up(request_id, _Staged(staged, [""] * len(staged.parts)))
        ends, at = [], staged.first_block
        for part in staged.parts:
            at += part.blocks
            ends.append(keys[at - 1].hex())
            if part.keep:
                self._kept[request_id] = KeptBlocks(at - part.blocks, part.blocks, part.id, part.data, ends[-1])
        self._staged[request_id] = _Staged(staged, ends)
        return None

    def matched(self, request_id: str, prompt_tokens: int, computed_tokens: int) -> int:
        """Return the number of staged tokens beyond `computed_tokens`. At least one token is left to compute."""
        staged = self._staged.get(request_id)
        if staged is not None:
            staged.computed_tokens = computed_tokens
        if staged is None or computed_tokens < staged.blocks.first_block * self._block_tokens:
            return 0
        return max(min(staged.blocks.end * self._block_tokens, prompt_tokens - 1) - computed_tokens, 0)

    def allocated(self, request_id: str, blocks: Sequence[int], loaded_tokens: int) -> StagedLoad | None:
        """Return what to load into the request's blocks, as the last call of `matched` said; None without staged
        blocks."""
        staged = self._staged.pop(request_id, None)
        if staged is None:
            return None
        size = self._block_tokens
        first = staged.computed_tokens // size
        end = -(-(staged.computed_tokens + loaded_tokens) // size) if loaded_tokens else first
        return self._load(request_id, staged, blocks, first, end)

    def given_up(self, request_id: str) -> StagedLoad | None:
        """Return the reads to release for a request that ends before it was allocated; None without staged blocks."""
        staged = self._staged.pop(request_id, None)
        self._kept.pop(request_id, None)
        return None if staged is None else self._given_up(request_id, staged)

    def take_kept(self, request_id: str) -> KeptBlocks | None:
        """Return the staged blocks of a finished prompt that its decode instance loads, too; once."""
        return self._kept.pop(request_id, None)

    def _given_up(self, request_id: str, staged: _Staged) -> StagedLoad:
        parts = (LoadPart(part.data, part.id, 0, (), "") for part in staged.blocks.parts)
        return StagedLoad(request_id, tuple(parts), 0)

    def _load(self, request_id: str, staged: _Staged, blocks: Sequence[int], first: int, end: int) -> StagedLoad:
        """Return the load of the positions `first` to `end` of the prompt."""
        parts, at = [], staged.blocks.first_block
        for part, key in zip(staged.blocks.parts, staged.keys, strict=True):
            start, stop = max(at, first), min(at + part.blocks, end)
            mine = tuple(blocks[start:stop]) if start < stop else ()
            if mine or not part.keep:
                parts.append(LoadPart(part.data, part.id, start - at if mine else 0, mine, key, part.keep))
            at += part.blocks
        return StagedLoad(request_id, tuple(parts), end if first < end else 0)


def staged_params(params: Mapping[str, Any] | None) -> Any:
    """Return the field `storage` of a request's transfer parameters; None if there is none."""
    return params.get("storage") if params else None
