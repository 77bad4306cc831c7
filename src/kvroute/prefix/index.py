"""Which instance holds which prefix, how deep: one radix tree for all instances, LRU with capacity and pins for each.

It holds block hashes only and decides nothing: what is stored, pinned or evicted by an engine, it is told.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvroute.prefix.holdings import Evicted, Holdings
from kvroute.prefix.tree import Blocks, Node, chained_agreement
from kvroute.types import InputError, IntArray


class PrefixIndex:
    """Longest common block prefix of a request against every instance at once.

    Instances are 0..n-1. A chain is a tuple of chained hashes from the prompt's first block on; what an instance
    holds is closed under prefixes. `match` and `match_one` trust the chaining (an equal hash at one place means an
    equal prefix) and look at O(log) blocks of each run; all others compare every block, so a malformed chain, whose
    hash stands under two parents, is kept as a chain of its own, and only its matches may come out too deep. A hash
    may repeat within a chain: its place tells it apart.

    Order of eviction: least recently touched block first; within one touch, the deepest first. Every touch counts
    for a chain from its root, so a block is never older than those below it. Pins cover a chain from its root too
    and nest; a pinned block is never evicted but by `evict` and `clear`, which report what an engine has done.

    `capacity_blocks` is one limit for all instances, one for each, or None for none; an instance exceeds it only
    where `set_capacity` has gone below what is pinned, and until the next `store` or `make_room` without those pins.
    Every method raises InputError for an instance not in the index and for a negative number.
    """

    def __init__(self, instances: int, capacity_blocks: int | Sequence[int | None] | None = None) -> None:
        if instances < 0:
            raise InputError(f"{instances} instances", where="instances", mend="give 0 or more")
        self._uniform_capacity: int | None = None
        if capacity_blocks is None or isinstance(capacity_blocks, int):
            self._uniform_capacity = _limit(capacity_blocks, "capacity_blocks")
            capacity_blocks = [capacity_blocks] * instances
        if len(capacity_blocks) != instances:
            raise InputError(
                f"{len(capacity_blocks)} capacities for {instances} instances",
                where="capacity_blocks",
                mend="give one each",
            )
        self._instances = [Holdings(i, _limit(limit, "capacity_blocks")) for i, limit in enumerate(capacity_blocks)]
        self._root = Node((), None, 0)
        self._touch = 0

    def __len__(self) -> int:
        """Number of instances."""
        return len(self._instances)

    def add_instance(self, capacity_blocks: int | None = None) -> int:
        """A new, empty instance; its number. Without a capacity it gets the one given for all, if there is one."""
        capacity = self._uniform_capacity if capacity_blocks is None else _limit(capacity_blocks, "capacity_blocks")
        self._instances.append(Holdings(len(self._instances), capacity))
        return len(self._instances) - 1

    def used_blocks(self, instance: int) -> int:
        """Blocks that `instance` holds; a block shared by several chains counts once."""
        return self._of(instance).used_blocks

    def pinned_blocks(self, instance: int) -> int:
        """Blocks of `instance` under at least one pin."""
        return self._of(instance).pinned_blocks

    def capacity_blocks(self, instance: int) -> int | None:
        """The limit of `instance`; None where there is none."""
        return self._of(instance).capacity_blocks

    def match(self, blocks: Blocks) -> IntArray:
        """Depth in blocks to which each instance holds this chain, length n; leaves recency as it is."""
        depths = np.zeros(len(self._instances), np.int64)
        node, pos, length = self._root, 0, len(blocks)
        child: Node | None = None
        while pos < length and (child := node.children.get(blocks[pos])) is not None:
            # Holders of a child hold its parent, so as many holders means the same ones, and they end deeper.
            if pos and len(child.held) != len(node.held):
                node.write_depth(depths, pos)
            end = child.end
            if end > length or blocks[end - 1] != child.blocks[-1]:
                child.write_depth(depths, pos + chained_agreement(child.blocks, blocks, pos))
                return depths
            node, pos = child, end
        if pos:
            node.write_depth(depths, pos)
        return depths

    def match_one(self, instance: int, blocks: Blocks) -> int:
        """Depth in blocks to which `instance` holds this chain: one entry of `match`."""
        self._of(instance)
        node, pos, length = self._root, 0, len(blocks)
        while pos < length:
            child = node.children.get(blocks[pos])
            if child is None or instance not in child.held:
                break
            end = child.end
            if end > length or blocks[end - 1] != child.blocks[-1]:
                return pos + chained_agreement(child.blocks, blocks, pos)
            node, pos = child, end
        return pos

    def store(self, instance: int, blocks: Blocks, pin: bool = False) -> list[Evicted]:
        """`instance` now holds this chain, touched as a whole, and pinned once if asked.

        What is over capacity goes in the order of eviction, in that order in the result, but nothing of this chain.
        If the chain does not fit even so, its front is stored and pinned as far as it does (`match_one` tells).
        """
        own = self._of(instance)
        self._touch += 1
        node = own.touch(self._root, blocks, self._touch)
        wanted = len(blocks) - node.end
        evicted = own.make_room(wanted)
        node = own.extend(node, blocks, own.room(wanted), self._touch)
        own.finish_touch(self._touch, node)
        if pin:
            self.pin(instance, blocks, node.end)
        return evicted

    def chains(self, instance: int) -> Iterator[Blocks]:
        """What `instance` holds, as chains that make another index hold it too when they are stored there in turn:
        in the order of their last touch, so that the order of eviction is the same. Nothing may change meanwhile."""
        return self._of(instance).chains()

    def dismantle(self) -> Iterator[int]:
        """Free the index piece by piece, for callers that cannot wait for all of it: one run of blocks at each step,
        whose length it yields. Nothing may be asked of the index from the first step on.

        A run holds its parent and is held by it: without this, only the cyclic collector would free them.
        """
        self._instances.clear()
        doomed, self._root = [self._root], Node((), None, 0)
        while doomed:
            node = doomed.pop()
            doomed += node.children.values()
            node.children.clear()
            node.parent = None
            yield len(node.blocks)

    def touch(self, instance: int, blocks: Blocks) -> int:
        """What `instance` holds of this chain goes last from now on; how many blocks that is."""
        own = self._of(instance)
        self._touch += 1
        node = own.touch(self._root, blocks, self._touch)
        own.finish_touch(self._touch, node)
        return node.end

    def pin(self, instance: int, blocks: Blocks, depth: int) -> int:
        """Keep the first `depth` blocks of this chain, or as many as `instance` holds, until `unpin`; how many."""
        own = self._of(instance)
        path = own.path(self._root, blocks[: _checked(depth, "depth")], cut=True)
        if path:
            own.pin(path)
        return path[-1].end if path else 0

    def unpin(self, instance: int, blocks: Blocks, depth: int) -> bool:
        """Give back one pin of this chain: the one that ends at `depth` or, if none does, the deepest one above.

        A pin ends above the depth it was asked for where the instance held less, or an engine has evicted the
        rest since; it is gone with the last of its blocks. False: there was no such pin, and nothing has changed.
        """
        own = self._of(instance)
        path = own.path(self._root, blocks[: _checked(depth, "depth")], cut=False)
        while path and instance not in path[-1].marks:
            path.pop()
        if path:
            own.unpin(path)
        return bool(path)

    def make_room(self, instance: int, blocks_needed: int) -> list[Evicted]:
        """Evict until `blocks_needed` more blocks fit, as far as pins allow; what went, in that order."""
        return self._of(instance).make_room(_checked(blocks_needed, "blocks_needed"))

    def set_capacity(self, instance: int, blocks: int | None) -> list[Evicted]:
        """A new limit, None for none; evicts down to it as far as pins allow; what went, in that order."""
        own = self._of(instance)
        own.capacity_blocks = _limit(blocks, "blocks")
        return own.make_room(0)

    def evict(self, instance: int, blocks: Blocks, keep: int) -> None:
        """An engine has dropped this chain from position `keep` on, and with it all that hangs below on `instance`.

        Pins of what is gone end at `keep` from now on. Nothing happens where the instance holds no more than that.
        """
        own = self._of(instance)
        path = own.path(self._root, blocks[: _checked(keep, "keep")], cut=True)
        above = path[-1] if path else self._root
        top = above.children.get(blocks[keep]) if above.end == keep < len(blocks) else None
        if top is not None and instance in top.held:
            own.drop_below(above, top)

    def clear(self, instance: int) -> None:
        """`instance` holds nothing any more, and no pins; its capacity stays."""
        self._of(instance).drop_all()

    def _of(self, instance: int) -> Holdings:
        if not 0 <= instance < len(self._instances):
            raise InputError(
                f"no instance {instance} among {len(self._instances)}", where="instance", mend="add_instance first"
            )
        return self._instances[instance]


def _checked(count: int, where: str) -> int:
    if count < 0:
        raise InputError(f"{count} is negative", where=where, mend="give 0 or more")
    return count


def _limit(capacity_blocks: int | None, where: str) -> int | None:
    return None if capacity_blocks is None else _checked(capacity_blocks, where)
