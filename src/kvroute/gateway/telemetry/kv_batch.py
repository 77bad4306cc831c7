"""Messages of KV events as vLLM and SGLang publish them: decodes and checks them, with bounds on size and number."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta, Raw

BATCH_BYTES_MAX = 4 << 20
BATCH_BLOCKS_MAX = 1 << 15
"""Maximum number of blocks in all events of a batch: a prompt of half a million tokens in blocks of 16."""
BATCH_EVENTS_MAX = 1 << 13
_RANKS_MAX = 1 << 16
_TOKENS_MAX = 1 << 20
_NIL = Raw(b"\xc0")
_EMPTY = b"\xc0\x90"
"""The encodings of nil and of an empty array in msgpack, each one byte."""
_SHORT_ARRAY = range(0x90, 0xA0)
_LONG_ARRAYS = {0xDC: 3, 0xDD: 5}
"""First byte of longer msgpack arrays, and the length of their header in bytes."""
_ARRAY_OF_ONE = 0x91
_SHORT_TEXT = range(0xA0, 0xC0)
_LONG_TEXTS = {0xD9: 1, 0xDA: 2}
"""First byte of longer msgpack strings, and the number of bytes of their length field."""

EngineHash: TypeAlias = int | bytes


class BlockEvent(msgspec.Struct, gc=False):
    """One event: vLLM's `BlockStored`, `BlockRemoved` or `AllBlocksCleared`; fields that the gateway does not use are
    left out."""

    type: str
    block_hashes: Annotated[list[EngineHash], Meta(max_length=BATCH_BLOCKS_MAX)] = []
    parent_block_hash: EngineHash | None = None
    token_ids: Annotated[list[int], Meta(max_length=_TOKENS_MAX)] = []
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Raw = _NIL
    """Extra keys, undecoded: they may hold any type, and only a cache salt is used."""
    group_idx: int | None = None

    def salt_and_keyed(self) -> tuple[str, int]:
        """Return the cache salt, and the index of the first block with any other extra key.

        The salt is not empty only if the first block starts a prompt and has no other extra key. The index equals the
        number of blocks if no block has another extra key.
        """
        if self.lora_name:
            return self._adapter_salt_and_keyed(self.lora_name)
        keys = self._keys()
        salt, length = _salt(keys) if self.parent_block_hash is None else ("", 0)
        rest = keys[length:]
        if not rest.strip(_EMPTY):
            return salt, len(self.block_hashes)
        return salt, bool(salt) + len(rest) - len(rest.lstrip(_EMPTY))

    def _adapter_salt_and_keyed(self, adapter: str) -> tuple[str, int]:
        """Like `salt_and_keyed` for blocks of an adapter, whose keys begin with its name."""
        try:
            keys = _KEYS.decode(self.extra_keys) or []
        except (ValueError, RecursionError):
            return "", 0
        salt = ""
        for number, each in enumerate(keys):
            rest = each[1:] if each and each[0] == adapter else each or []
            if number == 0 and self.parent_block_hash is None and len(rest) == 1 and isinstance(rest[0], str):
                salt = rest[0]
            elif rest:
                return salt, number
        return salt, len(self.block_hashes)

    def _keys(self) -> bytes:
        """Return the encoded extra keys of the blocks, concatenated."""
        raw = bytes(self.extra_keys)
        mark = raw[0] if raw else 0xC0
        if mark in _SHORT_ARRAY:
            return raw[1:]
        return raw[_LONG_ARRAYS[mark] :] if mark in _LONG_ARRAYS else b""


_KEYS = msgspec.msgpack.Decoder(list[list[Any] | None] | None)
"""Decodes the extra keys of blocks of an adapter."""


class Batch(msgspec.Struct, array_like=True, gc=False):
    """One message: the time at which the engine made it, in seconds since 1970, its events, and what it gives as its
    data-parallel rank."""

    ts: float
    events: Annotated[list[BlockEvent], Meta(max_length=BATCH_EVENTS_MAX)]
    data_parallel_rank: object = None

    @property
    def rank(self) -> int | None:
        """The rank in the whole engine; None: the message names none."""
        rank = self.data_parallel_rank
        return rank if isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < _RANKS_MAX else None


class _BatchMap(msgspec.Struct, gc=False):
    ts: float
    events: Annotated[list[BlockEvent], Meta(max_length=BATCH_EVENTS_MAX)]
    data_parallel_rank: object = None


class _BatchOfArrays(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: Annotated[list[Raw], Meta(max_length=BATCH_EVENTS_MAX)]
    data_parallel_rank: object = None


class _Row(msgspec.Struct, array_like=True, gc=False):
    type: str = ""


class _StoredRow(BlockEvent, array_like=True, gc=False):
    """Fields in the order in which older engines and SGLang send them."""


class _RemovedRow(msgspec.Struct, array_like=True, gc=False):
    type: str
    block_hashes: Annotated[list[EngineHash], Meta(max_length=BATCH_BLOCKS_MAX)]
    medium: str | None = None
    group_idx: int | None = None


class BatchError(ValueError):
    """The bytes are not a batch of KV events."""


_ROW = msgspec.msgpack.Decoder(_Row)
_STORED_ROW, _REMOVED_ROW = msgspec.msgpack.Decoder(_StoredRow), msgspec.msgpack.Decoder(_RemovedRow)
_OF_ARRAY = (msgspec.msgpack.Decoder(Batch), msgspec.msgpack.Decoder(_BatchOfArrays))
_OF_MAP = (msgspec.msgpack.Decoder(_BatchMap),)
_MAP_MARKS = frozenset([*range(0x80, 0x90), 0xDE, 0xDF])
"""First bytes of a msgpack map."""


def _salt(keys: bytes) -> tuple[str, int]:
    """Return the text and the length in bytes of a one-element string array at the start of `keys`; "" and 0 for
    anything else."""
    mark = keys[1] if len(keys) > 1 and keys[0] == _ARRAY_OF_ONE else 0
    if mark in _SHORT_TEXT:
        start, length = 2, mark - _SHORT_TEXT.start
    elif mark in _LONG_TEXTS:
        start = 2 + _LONG_TEXTS[mark]
        length = int.from_bytes(keys[2:start], "big")
    else:
        return "", 0
    return (keys[start : start + length].decode(errors="replace"), start + length) if length else ("", 0)


def read_batch(payload: bytes) -> Batch:
    """Decode one message: `[ts, events, dp_rank]` or a map of these; each event is a map with `type` or an array.

    Raises:
        BatchError: the message has no such form, or is too large.
    """
    if len(payload) > BATCH_BYTES_MAX:
        raise BatchError(f"a batch of {len(payload)} bytes is larger than {BATCH_BYTES_MAX} bytes")
    batch = _decoded(payload)
    blocks = sum(len(event.block_hashes) for event in batch.events)
    if blocks > BATCH_BLOCKS_MAX:
        raise BatchError(f"a batch of {blocks} blocks is larger than {BATCH_BLOCKS_MAX} blocks")
    return batch


def _decoded(payload: bytes) -> Batch:
    why = ""
    decoders = _OF_MAP if payload[:1] and payload[0] in _MAP_MARKS else _OF_ARRAY
    for decoder in decoders:
        try:
            batch = decoder.decode(payload)
            if isinstance(batch, _BatchOfArrays):
                return Batch(batch.ts, [_event_of(row) for row in batch.events], batch.data_parallel_rank)
            return batch if isinstance(batch, Batch) else Batch(batch.ts, batch.events, batch.data_parallel_rank)
        except (ValueError, RecursionError) as error:  # invalid UTF-8 is a ValueError too
            why = why or str(error)
    raise BatchError(f"a message is not a valid batch of KV events ({why})")


def _event_of(row: Raw) -> BlockEvent:
    kind = _ROW.decode(row).type
    if kind == "BlockStored":
        stored = _STORED_ROW.decode(row)
        return BlockEvent(*[getattr(stored, name) for name in BlockEvent.__struct_fields__])
    if kind == "BlockRemoved":
        removed = _REMOVED_ROW.decode(row)
        return BlockEvent(kind, removed.block_hashes, medium=removed.medium, group_idx=removed.group_idx)
    return BlockEvent(kind)
