"""Events about the KV caches that instances hold."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

MemoryTier: TypeAlias = Literal["gpu", "cpu", "disk", "store"]
"""Where an instance's KV is: in the memory of its GPUs, in that of its host, on storage of its own, or in the store.
All instances of one model share what is in the store, whichever instance wrote it."""


class KvStored(msgspec.Struct, frozen=True, tag="kv_stored", omit_defaults=True):
    """`instance` now holds the KV of this chain of blocks, from the first one, in one tier of memory."""

    at: float
    instance: str
    blocks: tuple[int, ...]
    block_tokens: int = 16
    tier: MemoryTier = "gpu"


class KvEvicted(msgspec.Struct, frozen=True, tag="kv_evicted", omit_defaults=True):
    """`instance` has evicted the blocks of this chain from position `keep` on from one tier of memory."""

    at: float
    instance: str
    blocks: tuple[int, ...]
    keep: int = 0
    tier: MemoryTier = "gpu"


class KvCleared(msgspec.Struct, frozen=True, tag="kv_cleared"):
    """`instance` holds no KV any more: it has restarted or reported an empty cache. The store keeps its blocks."""

    at: float
    instance: str
