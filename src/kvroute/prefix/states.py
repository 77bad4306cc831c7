"""Index of the request-level states of hybrid models; a state is usable only at its exact length."""

from __future__ import annotations

import numpy as np

from kvroute.prefix.tree import Blocks
from kvroute.types import IntArray


class StateIndex:
    """The ends of cached prompts by instance (PrfaaS 3.2), with the same chains and calls as `PrefixIndex`.

    A linear-attention layer keeps one state for a whole prefix. A prompt that shares only a part of that prefix could
    reuse its full-attention blocks but not the state, so it can reuse nothing of it.
    """

    def __init__(self, instances: int) -> None:
        self._holders: dict[int, set[int]] = {}
        self._ends: list[set[int]] = [set() for _ in range(instances)]

    def add_instance(self) -> None:
        """Add an instance without states; its number is that of `PrefixIndex.add_instance`."""
        self._ends.append(set())

    def store(self, instance: int, blocks: Blocks) -> None:
        """Record that `instance` has the state at the end of this chain."""
        if blocks:
            self._holders.setdefault(blocks[-1], set()).add(instance)
            self._ends[instance].add(blocks[-1])

    def evict(self, instance: int, blocks: Blocks, keep: int) -> None:
        """Record that `instance` has dropped the chain from position `keep` on, and the states there."""
        for block in self._ends[instance].intersection(blocks[keep:]):
            self._drop(instance, block)

    def clear(self, instance: int) -> None:
        """Record that `instance` holds no state any more."""
        for block in list(self._ends[instance]):
            self._drop(instance, block)

    def match(self, blocks: Blocks, depths: IntArray) -> IntArray:
        """For each instance, the deepest end of a stored chain in these blocks, in blocks and at most `depths`, [n]. It
        takes O(blocks)."""
        found = np.zeros(len(depths), dtype=np.int64)
        for depth in range(int(depths.max(initial=0)), 0, -1):
            for instance in self._holders.get(blocks[depth - 1], ()):
                if not found[instance] and depth <= depths[instance]:
                    found[instance] = depth
        return found

    def _drop(self, instance: int, block: int) -> None:
        self._ends[instance].discard(block)
        holders = self._holders[block]
        holders.discard(instance)
        if not holders:
            del self._holders[block]
