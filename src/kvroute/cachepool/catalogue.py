"""What a pool has stored: which entry stands under which hash, by group, and how much of a chain that makes reusable.

It owns no memory: heads are numbers that `Arena` gives meaning.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from kvroute.cachepool.layout import Layout

Blocks = tuple[int, ...]
FULL = 0
"""The full-attention group; request-level groups follow, in the layout's order."""


class Evicted(NamedTuple):
    """Entries that have lost their places, each kind in that order."""

    blocks: tuple[int, ...]
    """Chained hashes of full-attention blocks."""
    states: tuple[tuple[str, int], ...]
    """Names of request-level groups, and the chained hash of the block at whose end each state stood."""


class Catalogue:
    """Stored entries by group and chained hash; what is stored of a chain is closed under prefixes."""

    __slots__ = ("_block", "_complete", "_full", "_group", "_groups", "_states", "names")

    def __init__(self, layout: Layout, capacity_blocks: int) -> None:
        self.names = ("full", *(state.name for state in layout.states))
        self._full = bool(layout.token_bytes)
        self._states = len(layout.states)
        self._groups: tuple[dict[int, int], ...] = tuple({} for _ in self.names)
        """Hash -> head."""
        self._block = [0] * capacity_blocks
        """Head -> hash, of stored entries."""
        self._group = bytearray(capacity_blocks)
        """Head -> group, of stored entries."""
        self._complete: dict[int, int] = {}
        """Hash -> depth in blocks, where every request-level group has a state."""

    def __iter__(self) -> Iterator[int]:
        """All heads."""
        return chain.from_iterable(group.values() for group in self._groups)

    def depth(self, blocks: Blocks) -> int:
        """Blocks of the chain whose full-attention entries are stored; all for a model without full attention."""
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
        """Blocks of the longest prefix that can be reused: stored, with a state of every request-level group.

        Looks at every complete state or at every block of the chain, whichever are fewer.
        """
        depth, complete = self.depth(blocks), self._complete
        if not self._states:
            return depth
        if len(complete) < depth:
            return max((at for block, at in complete.items() if at <= depth and blocks[at - 1] == block), default=0)
        last = next(filter(complete.__contains__, reversed(blocks[:depth])), None)
        return 0 if last is None else blocks.index(last) + 1

    def heads(self, blocks: Blocks) -> list[int]:
        """Full-attention entries of the chain up to the first block that is not stored; looks at every one."""
        full, heads = self._groups[FULL], list[int]()
        for block in blocks:
            head = full.get(block)
            if head is None:
                break
            heads.append(head)
        return heads

    def state(self, group: int, block: int) -> int | None:
        """The entry of a request-level group, 1 and up, under this hash."""
        return self._groups[group].get(block)

    def put_chain(self, blocks: Blocks, heads: list[int]) -> list[int]:
        """Store full-attention entries under these hashes; for each hash the head that stands there now."""
        put, block_of, group_of, standing = self._groups[FULL].setdefault, self._block, self._group, list[int]()
        for block, head in zip(blocks, heads, strict=True):
            stands = put(block, head)
            if stands == head:
                block_of[head] = block
                group_of[head] = FULL
            standing.append(stands)
        return standing

    def put_state(self, group: int, block: int, depth: int, head: int) -> int:
        """Store a state at the end of the `depth`-th block; the head that stands there now, an earlier one if any.

        The caller stores the states of all groups before it asks for a match again.
        """
        stands = self._groups[group].setdefault(block, head)
        if stands == head:
            self._block[head], self._group[head] = block, group
            self._complete[block] = depth
        return stands

    def drop(self, heads: list[int]) -> Evicted:
        """These entries are stored no longer."""
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
        """Nothing is stored."""
        for group in self._groups:
            group.clear()
        self._complete.clear()
