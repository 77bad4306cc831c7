"""Messages of KV events as vLLM and SGLang publish them: bytes to checked events, bounded in size and number."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Raw

BATCH_BYTES_MAX = 4 << 20
BATCH_BLOCKS_MAX = 1 << 15
"""Blocks of all events of a batch: a prompt of half a million tokens in blocks of 16."""
BATCH_EVENTS_MAX = 1 << 13
_TOKENS_MAX = 1 << 20
_NIL = Raw(b"\xc0")
_EMPTY = b"\xc0\x90"
"""msgpack's nil and empty array, each one byte."""
_SHORT_ARRAY = range(0x90, 0xA0)
_LONG_ARRAYS = {0xDC: 3, 0xDD: 5}
"""First byte of longer msgpack arrays, and length of their heads."""
_ARRAY_OF_ONE = 0x91
_SHORT_TEXT = range(0xA0, 0xC0)
_LONG_TEXTS = {0xD9: 1, 0xDA: 2}
"""First byte of longer msgpack texts, and bytes of their length."""

EngineHash: TypeAlias = int | bytes


class BlockEvent(msgspec.Struct, gc=False):
    """One event: vLLM's `BlockStored`, `BlockRemoved` or `AllBlocksCleared`; what is not read here is left out."""

    type: str
    block_hashes: Annotated[list[EngineHash], Meta(max_length=BATCH_BLOCKS_MAX)] = []
    parent_block_hash: EngineHash | None = None
    token_ids: Annotated[list[int], Meta(max_length=_TOKENS_MAX)] = []
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Raw = _NIL
    """As they came: anything may be in there, and of it only a cache salt matters."""
    group_idx: int | None = None

    def salt_and_keyed(self) -> tuple[str, int]:
        """The cache salt, where the first block is a prompt's first and has no extra key but that; and the number of
        the first block that other extra keys belong to, as many as there are blocks where there is none."""
        keys = self._keys()
        salt, length = _salt(keys) if self.parent_block_hash is None else ("", 0)
        rest = keys[length:]
        if not rest.strip(_EMPTY):
            return salt, len(self.block_hashes)
        return salt, bool(salt) + len(rest) - len(rest.lstrip(_EMPTY))

    def _keys(self) -> bytes:
        """Extra keys of the blocks, one after the other."""
        raw = bytes(self.extra_keys)
        mark = raw[0] if raw else 0xC0
        if mark in _SHORT_ARRAY:
            return raw[1:]
        return raw[_LONG_ARRAYS[mark] :] if mark in _LONG_ARRAYS else b""


class Batch(msgspec.Struct, array_like=True, gc=False):
    """One message: when the engine made it, seconds since 1970, and what had happened."""

    ts: float
    events: Annotated[list[BlockEvent], Meta(max_length=BATCH_EVENTS_MAX)]


class _BatchMap(msgspec.Struct, gc=False):
    ts: float
    events: Annotated[list[BlockEvent], Meta(max_length=BATCH_EVENTS_MAX)]


class _BatchOfArrays(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: Annotated[list[Raw], Meta(max_length=BATCH_EVENTS_MAX)]


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
    """The bytes are no batch of KV events."""


_ROW = msgspec.msgpack.Decoder(_Row)
_STORED_ROW, _REMOVED_ROW = msgspec.msgpack.Decoder(_StoredRow), msgspec.msgpack.Decoder(_RemovedRow)
_OF_ARRAY = (msgspec.msgpack.Decoder(Batch), msgspec.msgpack.Decoder(_BatchOfArrays))
_OF_MAP = (msgspec.msgpack.Decoder(_BatchMap),)
_MAP_MARKS = frozenset([*range(0x80, 0x90), 0xDE, 0xDF])
"""First bytes of a map."""


def _salt(keys: bytes) -> tuple[str, int]:
    """The text of an array of one text at the beginning of `keys`, and its length in bytes; "" and 0: it is another."""
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
    """One message: `[ts, events, dp_rank]` or a map of these, and each event a map with `type` or an array.

    Raises:
        BatchError: it is none of these, or too large.
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
                return Batch(batch.ts, [_event_of(row) for row in batch.events])
            return batch if isinstance(batch, Batch) else Batch(batch.ts, batch.events)
        except (ValueError, RecursionError) as error:  # text that is not UTF-8 is a ValueError too
            why = why or str(error)
    raise BatchError(f"a message is not a batch of KV events within its bounds ({why})")


def _event_of(row: Raw) -> BlockEvent:
    kind = _ROW.decode(row).type
    if kind == "BlockStored":
        stored = _STORED_ROW.decode(row)
        return BlockEvent(*[getattr(stored, name) for name in BlockEvent.__struct_fields__])
    if kind == "BlockRemoved":
        removed = _REMOVED_ROW.decode(row)
        return BlockEvent(kind, removed.block_hashes, medium=removed.medium, group_idx=removed.group_idx)
    return BlockEvent(kind)
