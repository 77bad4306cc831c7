"""The radix tree of PrefixIndex: a node is a run of blocks, and each of its holders holds the whole run.

It implements no order or capacity. It stores the values given per instance, and keeps them correct when runs split and
join.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvroute.types import IntArray

Blocks = tuple[int, ...]

FLAGS_FROM = 17
"""Number of holders from which a node also stores them as an array of flags; for fewer, a loop is as fast."""


class PrefixNode:
    """A run of blocks below `parent`; an instance that holds a node holds all nodes above it."""

    __slots__ = ("blocks", "children", "end", "flags", "held", "marks", "parent", "pins")

    def __init__(self, blocks: Blocks, parent: PrefixNode | None, end: int) -> None:
        self.blocks = blocks
        self.parent = parent
        self.end = end
        """Number of blocks from the root to the end of this run."""
        self.children: dict[int, PrefixNode] = {}
        """Child nodes by the first block of their run."""
        self.held: dict[int, int] = {}
        """Instance -> number of its last touch of this run."""
        self.pins: dict[int, int] = {}
        """Instance -> pins that end here or below."""
        self.marks: dict[int, int] = {}
        """Instance -> pins that end exactly here."""
        self.flags: npt.NDArray[np.bool_] | None = None
        """The keys of `held` as flags; may be shorter than the number of instances."""

    def hold(self, instance: int, touch: int) -> None:
        """Record that `instance` holds this run."""
        held = self.held
        held[instance] = touch
        flags = self.flags
        if flags is not None and instance < len(flags):
            flags[instance] = True
        elif len(held) >= FLAGS_FROM:
            self._flag()

    def release(self, instance: int) -> None:
        """Record that `instance` no longer holds this run; a run without holders is removed from the tree."""
        held = self.held
        del held[instance]
        if not held:
            assert self.parent is not None
            del self.parent.children[self.blocks[0]]
        elif self.flags is not None:
            self.flags[instance] = False
            if 2 * len(held) < FLAGS_FROM:
                self.flags = None

    def _flag(self) -> None:
        members = np.fromiter(self.held, np.int64, len(self.held))
        # Half as much again: instances arrive in ascending order, and a new array for each would take quadratic time.
        flags = np.zeros(int(members.max()) * 3 // 2 + 1, np.bool_)
        flags[members] = True
        self.flags = flags

    def write_depth(self, depths: IntArray, depth: int) -> None:
        """Set `depth` in `depths` (one per instance) for every holder of this run."""
        if self.flags is None:
            for instance in self.held:
                depths[instance] = depth
        else:
            flags = self.flags[: len(depths)]
            np.copyto(depths[: len(flags)], depth, where=flags)

    def chain(self) -> Blocks:
        """All blocks from the root to the end of this run."""
        runs, node = [self.blocks], self
        while node.parent is not None:
            node = node.parent
            runs.append(node.blocks)
        blocks: list[int] = []
        for run in reversed(runs):
            blocks += run
        return tuple(blocks)


def split(node: PrefixNode, length: int) -> PrefixNode:
    """Split a run after its first `length` blocks. `node` becomes the lower part; return the new upper part.

    Pins keep their ends, so they end in the lower part and also count for the upper one.
    """
    assert 0 < length < len(node.blocks)
    assert node.parent is not None
    upper = PrefixNode(node.blocks[:length], node.parent, node.end - len(node.blocks) + length)
    upper.held = node.held.copy()
    upper.pins = node.pins.copy()
    upper.flags = None if node.flags is None else node.flags.copy()
    node.parent.children[upper.blocks[0]] = upper
    node.parent, node.blocks = upper, node.blocks[length:]
    upper.children[node.blocks[0]] = node
    return upper


def shorten(node: PrefixNode, by: int) -> None:
    """Remove the last `by` blocks from a leaf's run, for all its holders."""
    assert 0 < by < len(node.blocks)
    assert not node.children
    node.blocks = node.blocks[:-by]
    node.end -= by


def join_upwards(node: PrefixNode) -> None:
    """Undo splits that no longer separate anything, from `node` to the root; `node` absorbs the runs above it.

    Only if there are few holders: comparing many would cost more than a longer path.
    """
    while (upper := node.parent) is not None and upper.parent is not None:
        few = len(upper.children) == 1 and len(upper.held) < FLAGS_FROM
        if few and not upper.marks and upper.held == node.held:
            upper.parent.children[upper.blocks[0]] = node
            node.parent, node.blocks = upper.parent, upper.blocks + node.blocks
        else:
            node = upper


def agreement(run: Blocks, blocks: Blocks, start: int) -> int:
    """Number of blocks at the front of `run` that equal `blocks[start:]`; compares every one of them, once or twice."""
    low, high = 0, min(len(run), len(blocks) - start)
    if run[:high] == blocks[start : start + high]:
        return high
    while low < high - 1:
        middle = (low + high) // 2
        if run[low:middle] == blocks[start + low : start + middle]:
            low = middle
        else:
            high = middle
    return low


def chained_agreement(run: Blocks, blocks: Blocks, start: int) -> int:
    """Like `agreement`, with O(log n) comparisons: equal chained hashes at one position mean equal blocks before it."""
    low, high = 0, min(len(run), len(blocks) - start)
    if high and run[high - 1] == blocks[start + high - 1]:
        return high
    while low < high - 1:
        middle = (low + high) // 2
        if run[middle - 1] == blocks[start + middle - 1]:
            low = middle
        else:
            high = middle
    return low
