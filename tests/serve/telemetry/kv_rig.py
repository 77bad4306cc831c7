"""Test rig for KV events: a model of the KV cache of an engine, and its events in the wire format of vLLM."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st

from kvroute.prefix import PrefixIndex, block_hashes
from kvroute.serve.telemetry.engine_blocks import EngineBlocks
from kvroute.serve.telemetry.kv_batch import read_batch
from kvroute.types import Event, KvCleared, KvEvicted, KvStored

BLOCK_TOKENS = 2
Tokens = tuple[int, ...]


def feed(index: PrefixIndex, events: list[Event]) -> None:
    for event in events:
        match event:
            case KvStored(blocks=blocks, block_tokens=tokens):
                assert tokens == BLOCK_TOKENS
                index.store(0, blocks)
            case KvEvicted(blocks=blocks, keep=keep):
                index.evict(0, blocks, keep)
            case KvCleared():
                index.clear(0)


def stored(
    hashes: list[Any], parent: int | bytes | None, tokens: Tokens | list[int], size: int, **more: Any
) -> dict[str, Any]:
    """Return an event in the form of vLLM 0.32."""
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * len(hashes),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    } | more


def removed(hashes: list[Any], **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": 0} | more


def batch(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1763.5, list(events), 0])


class Engine:
    """A simple model of an engine's cache: the number of copies of each block, by the tokens of its whole prefix."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.held: dict[Tokens, int] = {}
        self.seen: dict[Tokens, None] = {}

    def name(self, prefix: Tokens) -> int:
        return hash(prefix) & (2**64 - 1)

    def store(self, which: int, blocks: list[int], root: bool) -> dict[str, Any]:
        """Store blocks below a held one, because a request holds the blocks that it extends."""
        prefix = () if root or not self.held else list(self.held)[which % len(self.held)]
        parent = self.name(prefix) if prefix else None
        names, tokens = [], []
        for block in blocks:
            prefix = (*prefix, *([block] * self.size))
            tokens += [block] * self.size
            names.append(self.name(prefix))
            self.held[prefix] = self.held.get(prefix, 0) + 1
            self.seen[prefix] = None
        return stored(names, parent, tokens, self.size)

    def remove(self, which: int, count: int) -> dict[str, Any]:
        names = []
        for number in range(min(count, len(self.held))):
            prefix = list(self.held)[(which + number) % len(self.held)]
            names.append(self.name(prefix))
            self.held[prefix] -= 1
            if not self.held[prefix]:
                del self.held[prefix]
        return removed(names)

    def clear(self) -> dict[str, Any]:
        self.held.clear()
        return {"type": "AllBlocksCleared"}

    def within_reach(self) -> set[Tokens]:
        """Return the prefixes, in blocks of the gateway's size, whose blocks are all held from the root on."""
        reach = set()
        for prefix in self.held:
            if all(prefix[:end] in self.held for end in range(self.size, len(prefix) + 1, self.size)):
                reach |= {prefix[:end] for end in range(BLOCK_TOKENS, len(prefix) + 1, BLOCK_TOKENS)}
        return reach

    def indexed(self, index: PrefixIndex) -> set[Tokens]:
        """Return the prefixes in the index among all that were ever stored; check that it has no others."""
        depths = {prefix: index.match_one(0, block_hashes(prefix, BLOCK_TOKENS)) for prefix in self.seen}
        indexed = {prefix[: n * BLOCK_TOKENS] for prefix, depth in depths.items() for n in range(1, depth + 1)}
        assert index.used_blocks(0) == len(indexed)
        return indexed


INDEXES = st.integers(0, 10**6)
BLOCKS = st.lists(st.integers(0, 1), min_size=1, max_size=3)


def changes(blocks: EngineBlocks, *events: Any) -> list[Event]:
    for event in read_batch(batch(*events)).events:
        blocks.apply(event)
    return blocks.changes(7.0)
