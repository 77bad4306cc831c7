"""The router's view of what each instance has cached, and of how much of it a request can reuse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from kvroute.control.state.kernels import cached_tokens
from kvroute.llm import Model
from kvroute.prefix import PrefixIndex, StateIndex
from kvroute.prefix.tree import Blocks
from kvroute.slots import Slots
from kvroute.types import Instance, IntArray, MemoryTier, Request

_INT64 = np.dtype(np.int64)
"""numpy takes a dtype in half the time of its scalar type."""


class PrefixCaches:
    """Cached block prefixes by instance and, for hybrid models, the positions where cached prompts end. A hybrid model
    can resume a prefill only at such a position."""

    def __init__(self, instances: Sequence[Instance], models: Mapping[str, Model], block_tokens: int) -> None:
        """Args: `block_tokens`: above 0, it bounds the view of an instance by its KV memory, in blocks of this size."""
        self._models, self._block_tokens = models, block_tokens
        self._slots = Slots(len(instances))
        self.prefix = PrefixIndex(len(instances), [self._capacity(instance) for instance in instances])
        """By slot of the instance, which is its index in the cluster until the cluster has changed."""
        self._states = StateIndex(len(instances)) if self._hybrid() else None
        self._model_names = [instance.model for instance in instances]
        self._lower: dict[MemoryTier, PrefixIndex] = {}
        """Prefixes in CPU memory and on disks, by tier and instance; a tier that was never reported is missing."""
        self._store: dict[str, PrefixIndex] = {}
        """Prefixes in the store by model; each index has one holder."""
        self._matched: tuple[Blocks, IntArray] | None = None
        """The last chain that was matched, and its depth by slot, until `prefix` changes. A decision asks several times
        for the same chain."""

    @property
    def tiered(self) -> bool:
        """Whether a prefix was ever reported in another tier than GPU memory."""
        return bool(self._lower or self._store)

    def _hybrid(self) -> bool:
        return any(model.request_state_bytes for model in self._models.values())

    def change(self, instances: Sequence[Instance], models: Mapping[str, Model], before: IntArray) -> None:
        """Follow a change of the cluster: instances that stay keep their prefixes. Args: `before` as in
        `Slots.change`."""
        self._models = models
        self._matched = None
        left, taken = self._slots.change(before)
        for slot in left:
            self._clear(slot)
        for index, slot in zip(np.flatnonzero(before < 0).tolist(), taken, strict=True):
            capacity = self._capacity(instances[index])
            if slot < len(self.prefix):
                self.prefix.set_capacity(slot, capacity)
                continue
            self.prefix.add_instance(capacity)
            if self._states is not None:
                self._states.add_instance()
            for held in self._lower.values():
                held.add_instance()
        if self._states is None and self._hybrid():
            self._states = StateIndex(len(self.prefix))
        self._model_names = [instance.model for instance in instances]

    def _capacity(self, instance: Instance) -> int | None:
        if not self._block_tokens:
            return None
        block_bytes = float(self._models[instance.model].kv_bytes(self._block_tokens))
        return int(instance.kv_capacity_bytes // block_bytes) if block_bytes else None

    def stored(self, index: int, blocks: tuple[int, ...], tier: MemoryTier = "gpu") -> None:
        """Record that an instance has this chain of blocks in a tier of memory."""
        if tier != "gpu":
            held, holder = self._tier(index, tier)
            held.store(holder, blocks)
            return
        self._matched = None
        slot = self._slots.slot(index)
        self.prefix.store(slot, blocks)
        if self._states is not None:
            self._states.store(slot, blocks)

    def evicted(self, index: int, blocks: tuple[int, ...], keep: int, tier: MemoryTier = "gpu") -> None:
        """Record that an instance has dropped the chain from position `keep` on from a tier of memory."""
        if tier != "gpu":
            held, holder = self._tier(index, tier)
            held.evict(holder, blocks, keep)
            return
        self._matched = None
        slot = self._slots.slot(index)
        self.prefix.evict(slot, blocks, keep)
        if self._states is not None:
            self._states.evict(slot, blocks, keep)

    def _tier(self, index: int, tier: MemoryTier) -> tuple[PrefixIndex, int]:
        """Return the index of a tier other than GPU memory, and the number of the holder in it."""
        if tier != "store":
            held = self._lower.setdefault(tier, PrefixIndex(len(self.prefix)))
            return held, self._slots.slot(index)
        return self._store.setdefault(self._model_names[index], PrefixIndex(1)), 0

    def tier_tokens(self, tier: MemoryTier, request: Request, model: str, ids: IntArray, most: int) -> IntArray:
        """Longest prefix in the CPU memory (`cpu`) or on the disks (`disk`) of each of `ids`, at most `most` tokens. A
        hybrid model cannot resume from it, because its states are not reported."""
        held = self._lower.get(tier)
        if held is None or self._models[model].request_state_bytes:
            return np.zeros(len(ids), dtype=np.int64)
        return np.minimum(held.match(request.blocks)[self._slots.slots(ids)] * request.block_tokens, most)

    def stored_tokens(self, request: Request, model: str) -> int:
        """Longest prefix in the store, in tokens. A hybrid model cannot resume from it."""
        held = self._store.get(model)
        if held is None or self._models[model].request_state_bytes:
            return 0
        return held.match_one(0, request.blocks) * request.block_tokens

    def chains(self, index: int) -> Iterator[tuple[MemoryTier, Blocks]]:
        """What an instance holds in GPU and CPU memory and on its disks, each as chains in the order of their last
        touch."""
        slot = self._slots.slot(index)
        for blocks in self.prefix.chains(slot):
            yield "gpu", blocks
        for tier, held in self._lower.items():
            for blocks in held.chains(slot):
                yield tier, blocks

    def stored_chains(self, model: str) -> Iterator[Blocks]:
        """What the store holds for a model, as chains."""
        if model in self._store:
            yield from self._store[model].chains(0)

    def cleared(self, index: int) -> None:
        """Record that an instance has dropped all blocks in its GPU and CPU memory and on its disks."""
        self._clear(self._slots.slot(index))

    def _clear(self, slot: int) -> None:
        for held in self._lower.values():
            held.clear(slot)
        self._matched = None
        self.prefix.clear(slot)
        if self._states is not None:
            self._states.clear(slot)

    def reusable_blocks(self, blocks: tuple[int, ...], model: str, most: int) -> IntArray:
        """Number of blocks of this chain, at most `most`, that a prefill can reuse on each instance. For a hybrid model
        it is the longest cached prefix that ends where a cached prompt ended."""
        depths: IntArray = np.minimum(self._match(blocks), most)
        if self._states is not None and self._models[model].request_state_bytes:
            depths = self._states.match(blocks, depths)
        return depths if self._slots.of is None else depths.take(self._slots.of)

    def reusable_tokens(self, request: Request, model: str, ids: IntArray, most: int) -> IntArray:
        """Like `hit_tokens`, but for a hybrid model only up to a position where a cached prompt ended."""
        if self._states is None or not self._models[model].request_state_bytes:
            return self.hit_tokens(request, ids, most)
        depths = self.reusable_blocks(request.blocks, model, most // request.block_tokens)
        found: IntArray = depths.take(ids) * request.block_tokens
        return found

    def hit_tokens(self, request: Request, ids: IntArray, most: int) -> IntArray:
        """Longest cached prefix on each of `ids`, at most `most` tokens."""
        if not request.blocks:
            return np.zeros(len(ids), dtype=np.int64)
        hit_tokens: IntArray = np.empty(len(ids), _INT64)
        slots = self._slots.slots(ids)
        cached_tokens(self._match(request.blocks), slots, request.block_tokens, most, hit_tokens)
        return hit_tokens

    def _match(self, blocks: Blocks) -> IntArray:
        """Depth in blocks by slot. The array must not be changed."""
        if self._matched is None or self._matched[0] is not blocks:
            self._matched = blocks, self.prefix.match(blocks)
        return self._matched[1]
