"""What one engine says of its KV blocks, told again in the hashes of `prefix`; it knows neither sockets nor sequence.

An engine's own hashes only name its blocks here. Ours are computed from the token ids, so that blocks of all engines,
whatever they hash with, stand for the same prompts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from kvroute.prefix import block_hashes
from kvroute.types import Event, InputError, KvCleared, KvEvicted, KvStored

EngineHash: TypeAlias = int | bytes
_MEDIUM = "GPU"
"""Of blocks that serve a request at once; vLLM on a CPU says so too. An engine that names none has no other."""
_BLOCKS_MAX = 1 << 20
"""Blocks kept of one engine; no engine has so many, but a broken one may say so."""


class BlockEvent(msgspec.Struct, gc=False):
    """One event: vLLM's `BlockStored`, `BlockRemoved` or `AllBlocksCleared`; what is not read here is left out."""

    type: str
    block_hashes: list[EngineHash] = []
    parent_block_hash: EngineHash | None = None
    token_ids: list[int] = []
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None


class Batch(msgspec.Struct, array_like=True, gc=False):
    """One message: when the engine made it, seconds since 1970, and what had happened."""

    ts: float
    events: list[BlockEvent]


class _BatchMap(msgspec.Struct, gc=False):
    ts: float
    events: list[BlockEvent]


class _BatchOfArrays(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[list[Any]]


class BatchError(ValueError):
    """The bytes are no batch of KV events."""


_FIELDS = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id"),
        *("medium", "lora_name", "extra_keys", "group_idx"),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
}
"""Order of the fields where events are arrays, as older engines and SGLang send them."""
_DECODERS = (
    msgspec.msgpack.Decoder(Batch),
    msgspec.msgpack.Decoder(_BatchOfArrays),
    msgspec.msgpack.Decoder(_BatchMap),
)


def read_batch(payload: bytes) -> Batch:
    """One message: `[ts, events, dp_rank]` or a map of these, and each event a map with `type` or an array.

    Raises:
        BatchError: it is none of these.
    """
    for decoder in _DECODERS:
        try:
            batch = decoder.decode(payload)
            if isinstance(batch, _BatchOfArrays):
                return Batch(batch.ts, [_event_of(row) for row in batch.events])
            return batch if isinstance(batch, Batch) else Batch(batch.ts, batch.events)
        except msgspec.MsgspecError:
            continue
    raise BatchError("not a batch of KV events")


def _event_of(row: list[Any]) -> BlockEvent:
    name = str(row[0]) if row else ""
    return msgspec.convert({"type": name} | dict(zip(_FIELDS.get(name, ()), row[1:], strict=False)), BlockEvent)


class _Block(msgspec.Struct, gc=False):
    """One block of the engine. Blocks name their parents, never hold them: no cycles, so no work for the collector."""

    parent: EngineHash | None
    ours: tuple[int, ...]
    """Our hashes of its tokens; empty: not a block that we route by (another adapter, salt or medium)."""
    held: int = 0
    """Copies in the engine. A block without one stays known while others hang below it."""
    children: int = 0
    """Known blocks whose parent it is."""


@dataclass(slots=True)
class BlockCounts:
    """What was seen, for metrics."""

    stored: int = 0
    removed: int = 0
    cleared: int = 0
    orphans: int = 0
    """Stored below a parent that is not known: left out until the engine stores that parent again."""
    foreign: int = 0
    """Left out because of their adapter, salt, medium or group."""
    unusable: int = 0
    """Left out because of their size: not a multiple of ours, or not as many tokens as said."""


class EngineBlocks:
    """The blocks of one engine by its own hashes, and what has changed since it was last asked."""

    def __init__(self, instance: str, block_tokens: int) -> None:
        """Args: the instance's name; tokens of our blocks, of which an engine's must be a multiple."""
        self.instance = instance
        self.counts = BlockCounts()
        self._block_tokens = block_tokens
        self._blocks: dict[EngineHash, _Block] = {}
        self._gone: dict[EngineHash, None] = {}
        """Held at the last `changes`, and no longer."""
        self._new: dict[EngineHash, None] = {}
        """The other way round; both in the order of the events, hence dicts."""
        self._cleared = False

    def __len__(self) -> int:
        """Blocks known, in the engine's size."""
        return len(self._blocks)

    def apply(self, event: BlockEvent) -> None:
        """Take note of one event; unknown kinds are passed by."""
        if event.group_idx or event.medium not in (None, _MEDIUM):
            self.counts.foreign += len(event.block_hashes)
        elif event.type == "BlockStored":
            self._store(event)
        elif event.type == "BlockRemoved":
            for name in event.block_hashes:
                self._remove(name)
        elif event.type == "AllBlocksCleared":
            self.clear()

    def clear(self) -> None:
        """Nothing is held any more, or nothing is known any more."""
        self.counts.cleared += 1
        self._cleared = self._cleared or len(self._blocks) > len(self._new) or bool(self._gone)
        self._blocks.clear()
        self._gone.clear()
        self._new.clear()

    def changes(self, at: float) -> list[Event]:
        """The events that turn what was told last into what is held now: chains that grew together become one."""
        events: list[Event] = [KvCleared(at, self.instance)] if self._cleared else []
        if self._gone:
            events += self._evictions(at)
        if self._new:
            events += self._stores(at)
        self._cleared = False
        self._gone.clear()
        self._new.clear()
        return events

    def _store(self, event: BlockEvent) -> None:
        names, size = event.block_hashes, event.block_size
        if size < 1 or size % self._block_tokens or len(event.token_ids) != size * len(names):
            self.counts.unusable += len(names)
            return
        parent = event.parent_block_hash
        above = None if parent is None else self._blocks.get(parent)
        if (parent is not None and above is None) or len(self._blocks) + len(names) > _BLOCKS_MAX:
            self.counts.orphans += len(names)
            return
        self.counts.stored += len(names)
        routable = self._routable(event, above)
        seed = above.ours[-1] if above is not None and above.ours else 0
        try:
            ours = block_hashes(event.token_ids[: routable * size], self._block_tokens, seed)
        except InputError:  # token ids beyond 64 bits
            routable, ours = 0, ()
        per_block = size // self._block_tokens
        self.counts.foreign += len(names) - routable
        for number, name in enumerate(names):
            part = ours[number * per_block : (number + 1) * per_block] if number < routable else ()
            self._hold(name, parent, part)
            parent = name

    def _routable(self, event: BlockEvent, above: _Block | None) -> int:
        """How many blocks from the first one on are the plain model's own."""
        if event.lora_id is not None or event.lora_name is not None or (above is not None and not above.ours):
            return 0
        keys = event.extra_keys or ()
        return next((number for number, key in enumerate(keys) if key), len(event.block_hashes))

    def _hold(self, name: EngineHash, parent: EngineHash | None, ours: tuple[int, ...]) -> None:
        block = self._blocks.get(name)
        if block is None:
            block = self._blocks[name] = _Block(parent, ours)
            if parent is not None:
                self._blocks[parent].children += 1
        block.held += 1
        if block.held == 1 and block.ours:
            if name in self._gone:
                del self._gone[name]
            else:
                self._new[name] = None

    def _remove(self, name: EngineHash) -> None:
        block = self._blocks.get(name)
        if block is None or not block.held:
            return
        self.counts.removed += 1
        block.held -= 1
        if block.held:
            return
        if name in self._new:
            del self._new[name]
            self._forget(name)
        elif block.ours:
            self._gone[name] = None
        else:
            self._forget(name)

    def _forget(self, name: EngineHash | None) -> None:
        """Drop blocks that nobody holds and nothing hangs below, from this one upwards."""
        while name is not None and name not in self._gone:
            block = self._blocks[name]
            if block.held or block.children:
                return
            del self._blocks[name]
            name = block.parent
            if name is not None:
                self._blocks[name].children -= 1

    def _evictions(self, at: float) -> list[Event]:
        events: list[Event] = []
        for name in self._gone:
            block = self._blocks[name]
            # With a block goes all that hangs below: only the uppermost need be told, and it alone has a chain left.
            if (chain := self._chain(name)) is not None:
                events.append(KvEvicted(at, self.instance, chain, len(chain) - len(block.ours)))
        gone = list(self._gone)
        self._gone.clear()
        for name in gone:
            if name in self._blocks:
                self._forget(name)
        return events

    def _stores(self, at: float) -> list[Event]:
        tips: dict[EngineHash | None, None] = dict.fromkeys(self._new)
        fresh_children = Counter(self._blocks[name].parent for name in self._new)
        for parent in fresh_children:
            tips.pop(parent, None)
        revived = {name for name in self._new if self._blocks[name].children > fresh_children[name]}
        if revived:
            self._extend_tips(tips, revived)
        return [
            KvStored(at, self.instance, chain, self._block_tokens)
            for name in tips
            if name is not None and (chain := self._chain(name)) is not None
        ]

    def _extend_tips(self, tips: dict[EngineHash | None, None], revived: set[EngineHash]) -> None:
        """Blocks that were held below a gap are within reach again: rare, so all blocks are looked through."""
        within_reach: set[EngineHash | None] = set(revived)
        for name, block in self._blocks.items():  # parents come before their children
            if block.parent in within_reach and block.held and block.ours:
                within_reach.add(name)
                tips.pop(block.parent, None)
                tips[name] = None

    def _chain(self, name: EngineHash) -> tuple[int, ...] | None:
        """Our hashes from the root to the end of this block; None where one above it is not held."""
        blocks = self._blocks
        block = blocks[name]
        parts = [block.ours]
        while block.parent is not None:
            block = blocks[block.parent]
            if not block.held:
                return None
            parts.append(block.ours)
        parts.reverse()
        return tuple([each for part in parts for each in part])
