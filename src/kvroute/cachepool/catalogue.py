"""The stored entries of a pool by group and hash, and how much of a chain can be reused.

It owns no memory: heads are numbers of entries in `Arena`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from kvroute.cachepool.layout import Layout

Blocks = tuple[int, ...]
FULL = 0
"""The full-attention group; request-level groups follow in the layout's order."""


class Evicted(NamedTuple):
    """Evicted entries, each kind in the order of eviction."""

    blocks: tuple[int, ...]
    """Chained hashes of the full-attention blocks."""
    states: tuple[tuple[str, int], ...]
    """Names of request-level groups, with the chained hash of the block at whose end each state was stored."""


class Catalogue:
    """Stored entries by group and chained hash; the stored part of a chain is closed under prefixes."""

    __slots__ = ("_block", "_complete", "_full", "_group", "_groups", "_states", "names")

    def __init__(self, layout: Layout, capacity_blocks: int) -> None:
        self.names = ("full", *(state.name for state in layout.states))
        self._full = bool(layout.token_bytes)
        self._states = len(layout.states)
        self._groups: tuple[dict[int, int], ...] = tuple({} for _ in self.names)
        """Hash -> head."""
        self._block = [0] * capacity_blocks
        """Head -> hash, for stored entries."""
        self._group = bytearray(capacity_blocks)
        """Head -> group, for stored entries."""
        self._complete: dict[int, int] = {}
        """Hash -> depth in blocks, for positions where every request-level group has a state."""

    def __iter__(self) -> Iterator[int]:
        """All heads."""
        return chain.from_iterable(group.values() for group in self._groups)

    def depth(self, blocks: Blocks) -> int:
        """Blocks of the chain with stored full-attention entries; all blocks for a model without full attention."""
        stored, low, high = self._groups[FULL], 0, len(blocks)
        if not self._full or (high and blocks[-1] in stored):
            return high
        while low < high:
            middle = (low + high) // 2
            if blocks[middle] in stored:
                low = middle + 1
            else:
                high = middle
        return low

    def reusable(self, blocks: Blocks) -> int:
        """Number of blocks of the longest reusable prefix: stored, with a state of every request-level group.

        Checks every complete state or every block of the chain, whichever are fewer.
        """
        depth, complete = self.depth(blocks), self._complete
        if not self._states:
            return depth
        if len(complete) < depth:
            return max((at for block, at in complete.items() if at <= depth and blocks[at - 1] == block), default=0)
        last = next(filter(complete.__contains__, reversed(blocks[:depth])), None)
        return 0 if last is None else blocks.index(last) + 1

    def heads(self, blocks: Blocks) -> list[int]:
        """Full-attention entries of the chain up to the first block that is not stored; checks every block."""
        full, heads = self._groups[FULL], list[int]()
        for block in blocks:
            head = full.get(block)
            if head is None:
                break
            heads.append(head)
        return heads

    def state(self, group: int, block: int) -> int | None:
        """The entry of a request-level group (1 and up) with this hash, or None."""
        return self._groups[group].get(block)

    def put_chain(self, blocks: Blocks, heads: list[int]) -> list[int]:
        """Store full-attention entries under these hashes; return for each hash the head that is stored now."""
        put, block_of, group_of, standing = self._groups[FULL].setdefault, self._block, self._group, list[int]()
        for block, head in zip(blocks, heads, strict=True):
            stored_head = put(block, head)
            if stored_head == head:
                block_of[head] = block
                group_of[head] = FULL
            standing.append(stored_head)
        return standing

    def put_state(self, group: int, block: int, depth: int, head: int) -> int:
        """Store a state at the end of the `depth`-th block; return the head that is stored now, which may be an earlier
        one.

        The caller must store the states of all groups before the next match.
        """
        stored_head = self._groups[group].setdefault(block, head)
        if stored_head == head:
            self._block[head], self._group[head] = block, group
            self._complete[block] = depth
        return stored_head

    def drop(self, heads: list[int]) -> Evicted:
        """Remove these entries from the catalogue."""
        full, block_of, group_of = self._groups[FULL], self._block, self._group
        blocks: list[int] = []
        states: list[tuple[str, int]] = []
        for head in heads:
            block = block_of[head]
            if group_of[head] == FULL:
                del full[block]
                blocks.append(block)
            else:
                del self._groups[group_of[head]][block]
                self._complete.pop(block, None)
                states.append((self.names[group_of[head]], block))
        return Evicted(tuple(blocks), tuple(states))

    def clear(self) -> None:
        """Remove all entries."""
        for group in self._groups:
            group.clear()
        self._complete.clear()
