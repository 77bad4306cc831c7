"""Index of the prefixes that each instance holds: one radix tree for all, with LRU order, capacity and pins for each.

It holds only block hashes and makes no decisions: the caller reports what an engine stores, pins or evicts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvroute.prefix.holdings import Evicted, Holdings
from kvroute.prefix.tree import Blocks, PrefixNode, chained_agreement
from kvroute.types import InputError, IntArray


class PrefixIndex:
    """Longest common block prefix of a request against every instance at once.

    Instances are 0..n-1. A chain is a tuple of chained hashes that starts with the prompt's first block; what an
    instance holds is closed under prefixes. `match` and `match_one` rely on the chaining (an equal hash at the same
    position means an equal prefix) and compare O(log) blocks of each run. All other methods compare every block, so a
    malformed chain, with one hash under two parents, is stored as a chain of its own; only its matches may be too deep.
    A hash may repeat within a chain: its position distinguishes it.

    Order of eviction: least recently touched block first; within one touch, the deepest first. Every touch covers a
    chain from its root, so a block is never older than those below it. Pins also cover a chain from its root, and they
    nest. A pinned block is evicted only by `evict` and `clear`, which report what an engine has done.

    `capacity_blocks` is one limit for all instances, a list with one for each, or None for no limit. An instance
    exceeds it only if `set_capacity` went below its pinned blocks, and only until the next `store` or `make_room`
    without those pins. Every method raises InputError for an instance not in the index and for a negative number.
    """

    def __init__(self, instances: int, capacity_blocks: int | Sequence[int | None] | None = None) -> None:
        if instances < 0:
            raise InputError(f"{instances} instances", where="instances", hint="give 0 or more")
        self._uniform_capacity: int | None = None
        if capacity_blocks is None or isinstance(capacity_blocks, int):
            self._uniform_capacity = _limit(capacity_blocks, "capacity_blocks")
            capacity_blocks = [capacity_blocks] * instances
        if len(capacity_blocks) != instances:
            raise InputError(
                f"{len(capacity_blocks)} capacities for {instances} instances",
                where="capacity_blocks",
                hint="give one per instance",
            )
        self._instances = [Holdings(i, _limit(limit, "capacity_blocks")) for i, limit in enumerate(capacity_blocks)]
        self._root = PrefixNode((), None, 0)
        self._touch = 0

    def __len__(self) -> int:
        """Number of instances."""
        return len(self._instances)

    def add_instance(self, capacity_blocks: int | None = None) -> int:
        """Add an empty instance and return its number. Its default capacity is the one given for all, if any."""
        capacity = self._uniform_capacity if capacity_blocks is None else _limit(capacity_blocks, "capacity_blocks")
        self._instances.append(Holdings(len(self._instances), capacity))
        return len(self._instances) - 1

    def used_blocks(self, instance: int) -> int:
        """Number of blocks that `instance` holds; a block shared by several chains counts once."""
        return self._of(instance).used_blocks

    def pinned_blocks(self, instance: int) -> int:
        """Number of blocks of `instance` with at least one pin."""
        return self._of(instance).pinned_blocks

    def capacity_blocks(self, instance: int) -> int | None:
        """The limit of `instance`; None if there is none."""
        return self._of(instance).capacity_blocks

    def match(self, blocks: Blocks) -> IntArray:
        """Depth in blocks to which each instance holds this chain, length n; does not change the order of eviction."""
        depths = np.zeros(len(self._instances), np.int64)
        node, pos, length = self._root, 0, len(blocks)
        child: PrefixNode | None = None
        while pos < length and (child := node.children.get(blocks[pos])) is not None:
            # Holders of a child hold its parent, so an equal count means the same holders, which end deeper.
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
        """Record that `instance` holds this chain. The whole chain is touched and, with `pin`, pinned once.

        Blocks over capacity are evicted in the order of eviction and returned in that order; blocks of this chain are
        not evicted. If the chain still does not fit, as much of its front as fits is stored and pinned (see
        `match_one`).
        """
        own = self._of(instance)
        self._touch += 1
        node = own.touch(self._root, blocks, self._touch)
        wanted = len(blocks) - node.end
        evicted = own.make_room(wanted)
        if wanted:
            node = own.extend(node, blocks, own.room(wanted), self._touch)
        own.finish_touch(self._touch, node)
        if pin:
            self.pin(instance, blocks, node.end)
        return evicted

    def chains(self, instance: int) -> Iterator[Blocks]:
        """What `instance` holds, as chains in the order of their last touch. Storing them in this order in another
        index gives it the same content and order of eviction. The index must not change meanwhile."""
        return self._of(instance).chains()

    def dismantle(self) -> Iterator[int]:
        """Free the index piece by piece, for callers that cannot wait for all of it.

        Each step frees one run of blocks and yields its length. The index must not be used after the first step. A run
        and its parent refer to each other, so without this only the cyclic garbage collector would free them.
        """
        self._instances.clear()
        doomed, self._root = [self._root], PrefixNode((), None, 0)
        while doomed:
            node = doomed.pop()
            doomed += node.children.values()
            node.children.clear()
            node.parent = None
            yield len(node.blocks)

    def touch(self, instance: int, blocks: Blocks) -> int:
        """Make what `instance` holds of this chain the last in the order of eviction; return its number of blocks."""
        own = self._of(instance)
        self._touch += 1
        node = own.touch(self._root, blocks, self._touch)
        own.finish_touch(self._touch, node)
        return node.end

    def pin(self, instance: int, blocks: Blocks, depth: int) -> int:
        """Pin the first `depth` blocks of this chain, or as many as `instance` holds; return their number."""
        own = self._of(instance)
        path = own.path(self._root, blocks[: _checked(depth, "depth")], cut=True)
        if path:
            own.pin(path)
        return path[-1].end if path else 0

    def unpin(self, instance: int, blocks: Blocks, depth: int) -> bool:
        """Remove one pin of this chain: the one that ends at `depth` or, if there is none, the deepest one above.

        A pin ends above the requested depth if the instance held less, or if an engine has evicted the rest since; it
        ends with the last of its blocks. Return False, without a change, if there was no such pin.
        """
        own = self._of(instance)
        path = own.path(self._root, blocks[: _checked(depth, "depth")], cut=False)
        while path and instance not in path[-1].marks:
            path.pop()
        if path:
            own.unpin(path)
        return bool(path)

    def make_room(self, instance: int, blocks_needed: int) -> list[Evicted]:
        """Evict until `blocks_needed` more blocks fit, as far as pins allow; return what was evicted, in order."""
        return self._of(instance).make_room(_checked(blocks_needed, "blocks_needed"))

    def set_capacity(self, instance: int, blocks: int | None) -> list[Evicted]:
        """Set a new limit, None for no limit. Evict down to it as far as pins allow; return the evicted chains."""
        own = self._of(instance)
        own.capacity_blocks = _limit(blocks, "blocks")
        return own.make_room(0)

    def evict(self, instance: int, blocks: Blocks, keep: int) -> None:
        """Record that an engine has dropped this chain from position `keep` on, and everything below it on `instance`.

        Pins of dropped blocks now end at `keep`. Does nothing if the instance does not hold the chain beyond `keep`.
        """
        own = self._of(instance)
        path = own.path(self._root, blocks[: _checked(keep, "keep")], cut=True)
        above = path[-1] if path else self._root
        top = above.children.get(blocks[keep]) if above.end == keep < len(blocks) else None
        if top is not None and instance in top.held:
            own.drop_below(above, top)

    def clear(self, instance: int) -> None:
        """Record that `instance` holds nothing any more and has no pins; its capacity does not change."""
        self._of(instance).drop_all()

    def _of(self, instance: int) -> Holdings:
        if not 0 <= instance < len(self._instances):
            raise InputError(
                f"there is no instance {instance} among {len(self._instances)}",
                where="instance",
                hint="add_instance first",
            )
        return self._instances[instance]


def _checked(count: int, where: str) -> int:
    if count < 0:
        raise InputError(f"{count} is negative", where=where, hint="give 0 or more")
    return count


def _limit(capacity_blocks: int | None, where: str) -> int | None:
    return None if capacity_blocks is None else _checked(capacity_blocks, where)
