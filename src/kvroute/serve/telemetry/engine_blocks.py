"""The KV blocks of one engine: translates its block events into events with the hashes of `prefix`.

It handles neither sockets nor sequence numbers. An engine's own hashes only identify its blocks here. The gateway's
hashes are computed from the token ids, so that they are comparable between engines with different hash functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from kvroute.http.slices import Meter, Slices, whole
from kvroute.prefix import block_hashes, prompt_seed
from kvroute.serve.telemetry.kv_batch import BlockEvent, EngineHash
from kvroute.types import Event, InputError, KvCleared, KvEvicted, KvStored, MemoryTier

_TIERS: dict[str | None, MemoryTier] = {
    None: "gpu",
    "GPU": "gpu",
    "CPU": "cpu",
    "cpu": "cpu",
    "CPU_PINNED": "cpu",
    "STORAGE": "disk",
    "DISK": "disk",
    "EXTERNAL": "disk",
    "STORE": "store",
}
"""Tier of memory by medium. Blocks in `gpu` can serve a request without a load; vLLM on a CPU reports it too. An engine
that reports no medium has only this one. STORAGE is that of vLLM's offloading to disks and object stores, DISK and
EXTERNAL those of SGLang's, which an engine reads by itself; STORE that of kvroute's connector; "cpu" LMCache's."""
_WHOLE_PREFIX, _NOT_NAMED, _WINDOW, _STATE = range(4)
_LAYERS = {
    None: _NOT_NAMED,
    "full_attention": _WHOLE_PREFIX,
    "mla_attention": _WHOLE_PREFIX,
    "sink_full_attention": _WHOLE_PREFIX,
    "sliding_window": _WINDOW,
    "sliding_window_mla": _WINDOW,
    "chunked_local_attention": _WINDOW,
}
"""Order in which groups of layers are preferred for the index, by what they keep; _STATE for all other kinds. A hybrid
model's prefix can be reused as far as the layers that keep all of it have it; the engine frees what others keep of it
earlier."""
_BLOCKS_MAX = 1 << 20
"""Largest number of blocks stored for one engine; a guard against a faulty engine, as no engine has so many."""
DEPTH_MAX = 1 << 16
"""Largest depth of a chain, in the gateway's blocks; deeper blocks are not used for routing. The cost of reporting a
chain grows with its depth."""
SLICE_UNITS = 4096
"""Work in one slice, in units of about a microsecond; other tasks run between two slices."""
_STORE_UNITS, _REMOVE_UNITS, _CHECK_UNITS = 6, 2, 1
"""Work to store, remove or visit one block, in units."""
_EVENT_UNITS = 16
"""Work of the receivers of one reported event, in units."""
_CHAIN_BLOCKS_PER_UNIT = 4
_BLOCKS_AT_ONCE = 256
"""Number of blocks of one event that are stored between two checks of the meter."""


class _Block(msgspec.Struct, gc=False):
    """One block of the engine. It stores its parent's name and no reference, so there are no reference cycles."""

    parent: EngineHash | None
    ours: tuple[int, ...]
    """The gateway's hashes of its tokens; empty: not used for routing (an unnamed adapter, or media inputs)."""
    held: int = 0
    """Number of copies in the engine. A block without copies stays stored while it has children."""
    children: int = 0
    """Number of stored blocks whose parent it is."""
    depth: int = 0
    """Number of the gateway's blocks from the root to the end of this block."""
    adapter: str = ""
    """LoRA adapter that computed it; empty: the base model."""


@dataclass(slots=True)
class BlockCounts:
    """Counts of reported blocks, for metrics."""

    stored: int = 0
    removed: int = 0
    cleared: int = 0
    orphans: int = 0
    """Blocks stored below an unknown parent: ignored until the engine stores that parent again."""
    foreign: int = 0
    """Blocks ignored because of media inputs, medium, group, or an adapter without a name."""
    unusable: int = 0
    """Blocks ignored because of their size: not a multiple of the gateway's block, or not the reported token count."""


class EngineBlocks:
    """The blocks of one engine by its own hashes, and the changes since the last report.

    Each tier of memory has blocks of its own: a block is reported in a tier if that tier holds all its ancestors.
    """

    def __init__(self, instance: str, block_tokens: int) -> None:
        """Args: the `instance` name; `block_tokens` of the gateway's blocks; an engine's block must be a multiple."""
        self.instance = instance
        self.counts = BlockCounts()
        self._block_tokens = block_tokens
        self._gpu = _TierBlocks(instance, block_tokens, "gpu", self.counts)
        self._others: dict[MemoryTier, _TierBlocks] = {}
        """Tiers other than GPU memory that were ever reported."""

    def __len__(self) -> int:
        """Number of stored blocks, in the engine's block size."""
        return len(self._gpu) + sum(len(tier) for tier in self._others.values())

    def apply(self, event: BlockEvent) -> None:
        """Apply one event; unknown kinds are ignored."""
        whole(self.applied(event, Meter(SLICE_UNITS)))

    def applied(self, event: BlockEvent, meter: Meter) -> Slices[None]:
        """Do the work of `apply` in slices. Between slices, only `clear` may be called; it cancels the rest."""
        if meter.spend(1):
            yield
        name = _TIERS.get(event.medium)
        if event.type == "AllBlocksCleared":
            self.clear()
        elif name is None:
            self.counts.foreign += len(event.block_hashes)
        elif name == "gpu":
            yield from self._gpu.applied(event, meter)
        else:
            tier = self._others.get(name)
            if tier is None:
                tier = self._others[name] = _TierBlocks(self.instance, self._block_tokens, name, self.counts)
            yield from tier.applied(event, meter)

    def clear(self) -> None:
        """Drop all blocks but those in the store, because the engine has cleared its cache or its state is unknown.
        What is in the store stays there, although this engine's later blocks may lack their ancestors here."""
        self.counts.cleared += 1
        changed = [self._gpu.clear(), *(tier.clear() for name, tier in self._others.items() if name != "store")]
        # KvCleared drops these tiers of the receiver.
        if any(changed):
            self._gpu.cleared = True

    def changes(self, at: float) -> list[Event]:
        """Return the events from the last reported state to the present one; blocks of one chain share one event."""
        return [event for event in self.event_slices(lambda: at, Meter(SLICE_UNITS)) if event is not None]

    def event_slices(self, now: Callable[[], float], meter: Meter) -> Iterator[Event | None]:
        """Yield the events of `changes` in slices, and None where other tasks may run. Before its end, only `clear` may
        be called."""
        yield from self._gpu.event_slices(now, meter)
        for tier in self._others.values():
            yield from tier.event_slices(now, meter)


class _TierBlocks:
    """The blocks of one engine in one tier of memory."""

    def __init__(self, instance: str, block_tokens: int, tier: MemoryTier, counts: BlockCounts) -> None:
        self.instance = instance
        self.counts = counts
        self._tier = tier
        self._block_tokens = block_tokens
        self._blocks: dict[EngineHash, _Block] = {}
        self._gone: dict[EngineHash, None] = {}
        """Blocks that the engine had at the last `changes` and has no longer."""
        self._new: dict[EngineHash, None] = {}
        """Blocks that the engine has now and had not at the last `changes`. Both are dicts to keep the order."""
        self.cleared = False
        """The receiver is to drop what it knows before the changes."""
        self._telling = False
        """Part of the changes has been reported."""
        self._group: tuple[int, int] | None = None
        """The group of layers whose blocks are indexed: its place in the order of `_LAYERS`, and its number."""

    def __len__(self) -> int:
        """Number of stored blocks, in the engine's block size."""
        return len(self._blocks)

    def applied(self, event: BlockEvent, meter: Meter) -> Slices[None]:
        """Apply one event in slices."""
        if event.type == "BlockStored":
            yield from self._follow(event, meter)
            if self._follows(event):
                yield from self._store(event, meter)
            else:
                self.counts.foreign += len(event.block_hashes)
        elif event.type == "BlockRemoved" and self._follows(event):
            for name in event.block_hashes:
                self._remove(name)
                if meter.spend(_REMOVE_UNITS):
                    yield

    def _follows(self, event: BlockEvent) -> bool:
        """Whether an event is about the group that is indexed."""
        return self._group is None or event.group_idx is None or event.group_idx == self._group[1]

    def _follow(self, event: BlockEvent, meter: Meter) -> Slices[None]:
        """Index the group of this event if it is preferred to the present one, whose blocks are removed."""
        group = (_LAYERS.get(event.kv_cache_spec_kind, _STATE), event.group_idx or 0)
        if self._group is not None and group >= self._group:
            return
        if self._group is not None and group[1] != self._group[1]:
            for name in list(self._blocks):
                if (block := self._blocks.get(name)) is not None and block.held:
                    block.held = 1
                    self._remove(name)
                if meter.spend(_REMOVE_UNITS):
                    yield
        self._group = group

    def clear(self) -> bool:
        """Drop all blocks, and the choice of the group; return whether any of them may have been reported."""
        self._group = None
        changed = self._telling or len(self._blocks) > len(self._new) or bool(self._gone)
        self._telling = False
        self._blocks.clear()
        self._gone.clear()
        self._new.clear()
        return changed

    def event_slices(self, now: Callable[[], float], meter: Meter) -> Iterator[Event | None]:
        """Yield the changes in slices. See `EngineBlocks.event_slices`."""
        self._telling = True
        if self.cleared:
            self.cleared = False
            yield KvCleared(now(), self.instance)
        if self._gone:
            yield from self._evictions(now, meter)
        if self._new:
            yield from self._stores(now, meter)
        self._gone.clear()
        self._new.clear()
        self._telling = False

    def _store(self, event: BlockEvent, meter: Meter) -> Slices[None]:
        names, size = event.block_hashes, event.block_size
        if size < 1 or size % self._block_tokens or len(event.token_ids) != size * len(names):
            if self._group is not None and self._group[0] == _STATE:
                self.counts.foreign += len(names)
            else:
                self.counts.unusable += len(names)
            return
        parent = event.parent_block_hash
        above = None if parent is None else self._blocks.get(parent)
        if (parent is not None and above is None) or len(self._blocks) + len(names) > _BLOCKS_MAX:
            self.counts.orphans += len(names)
            return
        self.counts.stored += len(names)
        per_block = size // self._block_tokens
        depth = above.depth if above is not None else 0
        salt, keyed = event.salt_and_keyed()
        adapter = event.lora_name or ""
        routable = min(self._routable(event, above, keyed), (DEPTH_MAX - depth) // per_block)
        seed = above.ours[-1] if above is not None and above.ours else prompt_seed(salt, adapter)
        for start in range(0, len(names), _BLOCKS_AT_ONCE):
            some = names[start : start + _BLOCKS_AT_ONCE]
            known = max(min(len(some), routable - start), 0)
            try:
                ours = block_hashes(event.token_ids[start * size : (start + known) * size], self._block_tokens, seed)
            except InputError:  # token ids beyond 64 bits
                ours, known, routable = (), 0, 0
            seed = ours[-1] if ours else 0
            self.counts.foreign += len(some) - known
            for number, name in enumerate(some):
                part = ours[number * per_block : (number + 1) * per_block] if number < known else ()
                depth += len(part)
                self._hold(name, parent, part, depth, adapter)
                parent = name
            if meter.spend(_STORE_UNITS * len(some)):
                yield

    def _routable(self, event: BlockEvent, above: _Block | None, keyed: int) -> int:
        """Return how many of the first blocks a prompt can match that the gateway hashes: of the base model, or of an
        adapter that the engine names, with or without a cache salt.

        Args: `keyed`: index of the first block with other extra keys.
        """
        unnamed = event.lora_id is not None and not event.lora_name
        if unnamed or (above is not None and (not above.ours or above.adapter != (event.lora_name or ""))):
            return 0
        return keyed

    def _hold(
        self, name: EngineHash, parent: EngineHash | None, ours: tuple[int, ...], depth: int, adapter: str
    ) -> None:
        block = self._blocks.get(name)
        if block is None:
            block = self._blocks[name] = _Block(parent, ours, depth=depth, adapter=adapter)
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
        """Drop this block and then its ancestors, as far as they have neither copies nor children."""
        while name is not None and name not in self._gone:
            block = self._blocks[name]
            if block.held or block.children:
                return
            del self._blocks[name]
            name = block.parent
            if name is not None:
                self._blocks[name].children -= 1

    def _evictions(self, now: Callable[[], float], meter: Meter) -> Iterator[Event | None]:
        for name in self._gone:
            block = self._blocks[name]
            # An eviction makes the block's descendants unreachable. Only the uppermost block, whose ancestors are all
            # held, is reported.
            chain, walked = self._chain(name)
            if chain is not None:
                yield KvEvicted(now(), self.instance, chain, len(chain) - len(block.ours), self._tier)
            if meter.spend(_told_units(chain, walked)):
                yield None
        gone = list(self._gone)
        self._gone.clear()
        for name in gone:
            if name in self._blocks:
                self._forget(name)
            if meter.spend(_CHECK_UNITS):
                yield None

    def _stores(self, now: Callable[[], float], meter: Meter) -> Iterator[Event | None]:
        fresh_children: Counter[EngineHash | None] = Counter()
        for name in self._new:
            fresh_children[self._blocks[name].parent] += 1
            if meter.spend(_CHECK_UNITS):
                yield None
        tips: dict[EngineHash, None] = {}
        revived: set[EngineHash] = set()
        for name in self._new:
            if name not in fresh_children:
                tips[name] = None
            if self._blocks[name].children > fresh_children[name]:
                revived.add(name)
            if meter.spend(_CHECK_UNITS):
                yield None
        if revived:
            yield from self._extend_tips(tips, revived, meter)
        for name in tips:
            chain, walked = self._chain(name)
            if chain is not None:
                yield KvStored(now(), self.instance, chain, self._block_tokens, self._tier)
            if meter.spend(_told_units(chain, walked)):
                yield None

    def _extend_tips(self, tips: dict[EngineHash, None], revived: set[EngineHash], meter: Meter) -> Slices[None]:
        """Add the blocks that a stored parent makes reachable again. This is rare, so all blocks are scanned."""
        within_reach: set[EngineHash | None] = set(revived)
        for name, block in self._blocks.items():  # parents come before their children
            if block.parent in within_reach and block.held and block.ours:
                within_reach.add(name)
                if block.parent is not None:
                    tips.pop(block.parent, None)
                tips[name] = None
            if meter.spend(_CHECK_UNITS):
                yield

    def _chain(self, name: EngineHash) -> tuple[tuple[int, ...] | None, int]:
        """Return the gateway's hashes from the root to the end of this block (None if the engine has no copy of an
        ancestor) and the number of blocks visited."""
        blocks = self._blocks
        block = blocks[name]
        parts = [block.ours]
        while block.parent is not None:
            block = blocks[block.parent]
            if not block.held:
                return None, len(parts)
            parts.append(block.ours)
        parts.reverse()
        return tuple([block_hash for part in parts for block_hash in part]), len(parts)


def _told_units(chain: tuple[int, ...] | None, walked: int) -> int:
    return _CHECK_UNITS + walked // _CHAIN_BLOCKS_PER_UNIT + (_EVENT_UNITS + len(chain) // 16 if chain else 0)
