"""Messages of KV events as vLLM and SGLang publish them: decodes and checks them, with bounds on size and number."""

from __future__ import annotations

from typing import Annotated, Any, Generic, TypeAlias, TypeVar

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
_Pairs: TypeAlias = Annotated[list[tuple[int, int]], Meta(max_length=_TOKENS_MAX)]
"""Each token id with the next one, as SGLang sends them with EAGLE's speculative decoding."""
E = TypeVar("E")


class _Fields(msgspec.Struct, gc=False):
    """Fields of an event in the order in which older engines send them; those that the gateway does not use are left
    out."""

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
    group_idx: Annotated[int, Meta(ge=0)] | None = None
    """Group of layers with a cache of its own; None: the engine has one group, or does not name it."""
    kv_cache_spec_kind: str | None = None
    """What the layers of the group keep."""


class BlockEvent(_Fields, gc=False):
    """One event: `BlockStored`, `BlockRemoved` or `AllBlocksCleared`."""

    cache_salt: str | None = None
    """SGLang's: the salt of the whole prompt, with each of its blocks."""

    def salt_and_keyed(self) -> tuple[str, int]:
        """Return the cache salt, and the index of the first block with any other extra key.

        The salt is not empty only if the first block starts a prompt and has no other extra key. The index equals the
        number of blocks if no block has another extra key.
        """
        salt, keyed = self._adapter_salt_and_keyed(self.lora_name) if self.lora_name else self._plain_salt_and_keyed()
        return (salt or self.cache_salt or "" if self.parent_block_hash is None else "", keyed)

    def _plain_salt_and_keyed(self) -> tuple[str, int]:
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
        for number, key in enumerate(keys):
            rest = key[1:] if key and key[0] == adapter else key or []
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


class KvEventBatch(msgspec.Struct, gc=False):
    """One message: the time at which the engine made it, in seconds since 1970, its events, and what it gives as its
    data-parallel rank."""

    ts: float
    events: list[BlockEvent]
    data_parallel_rank: object = None
    unreadable: int = 0
    """Number of further events that have another form."""
    why_unreadable: str = ""
    """Error message of the first of them."""

    @property
    def rank(self) -> int | None:
        """The rank in the whole engine; None: the message names none."""
        rank = self.data_parallel_rank
        return rank if isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < _RANKS_MAX else None


class _Message(msgspec.Struct, Generic[E], gc=False):
    ts: float
    events: Annotated[list[E], Meta(max_length=BATCH_EVENTS_MAX)]
    data_parallel_rank: object = None


class _MessageRow(_Message[E], Generic[E], array_like=True, gc=False):
    """The same as an array."""


class _Kind(msgspec.Struct, gc=False):
    type: str = ""


class _KindRow(_Kind, array_like=True, gc=False):
    """The same as an array."""


class _Metadata(msgspec.Struct, gc=False):
    """What SGLang 0.5.18 puts in the place of `lora_name`."""

    cache_salt: str | None = None
    lora_name: str | None = None


class _StoredRow(_Fields, array_like=True, gc=False):
    lora_name: str | _Metadata | None = None  # type: ignore[assignment]


class _PairedRow(_StoredRow, array_like=True, gc=False):
    token_ids: _Pairs = []  # type: ignore[assignment]


class _PairedEvent(BlockEvent, gc=False):
    token_ids: _Pairs = []  # type: ignore[assignment]


class _RemovedRow(msgspec.Struct, array_like=True, gc=False):
    type: str
    block_hashes: Annotated[list[EngineHash], Meta(max_length=BATCH_BLOCKS_MAX)]
    medium: str | None = None
    group_idx: Annotated[int, Meta(ge=0)] | None = None


class BatchError(ValueError):
    """The bytes are not a batch of KV events."""


_REMOVED_ROW = msgspec.msgpack.Decoder(_RemovedRow)
_ROWS = (msgspec.msgpack.Decoder(_StoredRow), msgspec.msgpack.Decoder(_PairedRow))
_MAPS = (msgspec.msgpack.Decoder(BlockEvent), msgspec.msgpack.Decoder(_PairedEvent))
_KIND, _KIND_ROW = msgspec.msgpack.Decoder(_Kind), msgspec.msgpack.Decoder(_KindRow)
_WHOLE = (msgspec.msgpack.Decoder(_MessageRow[BlockEvent]), msgspec.msgpack.Decoder(_Message[BlockEvent]))
_BY_EVENT = (msgspec.msgpack.Decoder(_MessageRow[Raw]), msgspec.msgpack.Decoder(_Message[Raw]))
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


def read_batch(payload: bytes) -> KvEventBatch:
    """Decode one message: `[ts, events, dp_rank]` or a map of these; each event is a map with `type` or an array. An
    event of another form is left out and counted.

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


def _decoded(payload: bytes) -> KvEventBatch:
    as_map = payload[:1] and payload[0] in _MAP_MARKS
    try:
        message = _WHOLE[bool(as_map)].decode(payload)
        return KvEventBatch(message.ts, message.events, message.data_parallel_rank)
    except (ValueError, RecursionError):  # invalid UTF-8 is a ValueError too
        pass
    try:
        by_event = _BY_EVENT[bool(as_map)].decode(payload)
    except (ValueError, RecursionError) as error:
        raise BatchError(f"a message is not a valid batch of KV events ({error})") from None
    batch = KvEventBatch(by_event.ts, [], by_event.data_parallel_rank)
    for raw in by_event.events:
        try:
            batch.events.append(_event_of(raw))
        except (ValueError, RecursionError) as error:
            batch.unreadable += 1
            batch.why_unreadable = batch.why_unreadable or str(error)
    return batch


def _event_of(raw: Raw) -> BlockEvent:
    """Decode one event. Raises ValueError or RecursionError for one of another form."""
    as_map = memoryview(raw)[0] in _MAP_MARKS
    kind = (_KIND if as_map else _KIND_ROW).decode(raw).type
    if kind == "BlockStored":
        return _stored(raw, _MAPS if as_map else _ROWS)
    if kind != "BlockRemoved":
        return BlockEvent(kind)
    removed = (_MAPS[0] if as_map else _REMOVED_ROW).decode(raw)
    return BlockEvent(kind, removed.block_hashes, medium=removed.medium, group_idx=removed.group_idx)


def _stored(raw: Raw, decoders: tuple[msgspec.msgpack.Decoder[Any], msgspec.msgpack.Decoder[Any]]) -> BlockEvent:
    """Args: `decoders`: the first reads token ids, the second pairs of them."""
    plain, paired = decoders
    try:
        found = plain.decode(raw)
    except msgspec.ValidationError as error:
        try:
            found = paired.decode(raw)
        except msgspec.ValidationError:
            raise error from None
        found.token_ids = [pair[0] for pair in found.token_ids]
    values = {name: getattr(found, name) for name in found.__struct_fields__}
    more = values["lora_name"]
    if isinstance(more, _Metadata):
        values |= {"lora_name": more.lora_name, "cache_salt": more.cache_salt}
    return BlockEvent(**values)
