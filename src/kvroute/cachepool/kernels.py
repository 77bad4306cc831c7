"""The compiled core of `Arena`: a stack of free blocks and a list of idle entries, oldest first; no keys, no checks.

An entry is one or more blocks that are allocated and freed together. It is identified by the number of its first block,
its head. Every step on a block takes constant time.
"""

from __future__ import annotations

from kvroute.compiled import compiled
from kvroute.types import IntArray

HOLDERS, EXTENT, MEMBER, STORED, OLDER, NEWER, STACK = range(7)
"""Rows of `table`, [7, blocks + 1].

For a head: its holders, the number of blocks of the entry, whether it stays without holders, and its neighbours in the
idle list. For any block: the next block of its entry (-1: none). STACK: the free blocks. The last column is the anchor
of the idle list: NEWER points to the oldest entry, OLDER to the newest.
"""
FREE, IDLE = range(2)
"""Entries of `counts`: free blocks, blocks of idle entries."""


@compiled
def _pop(table: IntArray, counts: IntArray) -> int:
    counts[FREE] -= 1
    return int(table[STACK, counts[FREE]])


@compiled
def _give(head: int, table: IntArray, counts: IntArray) -> None:
    """Free all blocks of an entry."""
    block = head
    while block >= 0:
        table[STACK, counts[FREE]] = block
        counts[FREE] += 1
        block = table[MEMBER, block]


@compiled
def _unlink(head: int, table: IntArray, counts: IntArray) -> None:
    older, newer = table[OLDER, head], table[NEWER, head]
    table[NEWER, older] = newer
    table[OLDER, newer] = older
    counts[IDLE] -= table[EXTENT, head]


@compiled
def _link_newest(head: int, table: IntArray, counts: IntArray) -> None:
    anchor = table.shape[1] - 1
    newest = table[OLDER, anchor]
    table[NEWER, newest] = head
    table[OLDER, head] = newest
    table[NEWER, head] = anchor
    table[OLDER, anchor] = head
    counts[IDLE] += table[EXTENT, head]


@compiled
def take(extents: IntArray, heads: IntArray, table: IntArray, counts: IntArray) -> None:
    """Allocate entries of `extents` blocks each (1 or more), held once; fill `heads`. Enough blocks must be free."""
    for entry in range(len(extents)):
        head = last = _pop(table, counts)
        for _ in range(extents[entry] - 1):
            block = _pop(table, counts)
            table[MEMBER, last] = block
            last = block
        table[MEMBER, last] = -1
        table[EXTENT, head] = extents[entry]
        table[HOLDERS, head] = 1
        table[STORED, head] = 0
        heads[entry] = head


@compiled
def hold(heads: IntArray, table: IntArray, counts: IntArray) -> None:
    """Add one holder to each entry; an idle entry leaves the idle list."""
    for entry in range(len(heads)):
        head = heads[entry]
        if table[HOLDERS, head] == 0:
            _unlink(head, table, counts)
        table[HOLDERS, head] += 1


@compiled
def release(heads: IntArray, table: IntArray, counts: IntArray) -> None:
    """Remove one holder from each, in this order. Entries without holders become the newest idle ones if stored, else
    free."""
    for entry in range(len(heads)):
        head = heads[entry]
        table[HOLDERS, head] -= 1
        if table[HOLDERS, head] == 0:
            if table[STORED, head] == 1:
                _link_newest(head, table, counts)
            else:
                _give(head, table, counts)


@compiled
def evict(free_blocks: int, gone: IntArray, table: IntArray, counts: IntArray) -> int:
    """Free idle entries, oldest first, until `free_blocks` are free. Fill `gone` with their heads; return how many."""
    anchor, count = table.shape[1] - 1, 0
    while counts[FREE] < free_blocks and table[NEWER, anchor] != anchor:
        head = table[NEWER, anchor]
        _unlink(head, table, counts)
        _give(head, table, counts)
        table[STORED, head] = 0
        gone[count] = head
        count += 1
    return count


@compiled
def idle_among(heads: IntArray, table: IntArray) -> int:
    """Number of blocks of those entries that are idle."""
    blocks = 0
    for entry in range(len(heads)):
        if table[HOLDERS, heads[entry]] == 0:
            blocks += table[EXTENT, heads[entry]]
    return blocks
