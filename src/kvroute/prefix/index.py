"""Which instance holds which prefix, how deep: one radix tree for all instances, LRU with capacity and pins for each.

It holds block hashes only and decides nothing: what is stored, pinned or evicted by an engine, it is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvroute.prefix.recency import Recency
from kvroute.prefix.tree import Blocks, Node, agreement, chained_agreement, join_upwards, split
from kvroute.types import InputError, IntArray


class Evicted(NamedTuple):
    """`instance` has lost the blocks of this chain from position `keep` on: what KvEvicted carries."""

    instance: int
    blocks: Blocks
    keep: int


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
    when `set_capacity` goes below what is pinned. Every method raises InputError for an instance not in the index.
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
        self._instances = [Recency(_limit(capacity, "capacity_blocks")) for capacity in capacity_blocks]
        self._root = Node((), None, 0)
        self._touch = 0

    def __len__(self) -> int:
        """Number of instances."""
        return len(self._instances)

    def add_instance(self, capacity_blocks: int | None = None) -> int:
        """A new, empty instance; its number. Without a capacity it gets the one given for all, if there is one."""
        capacity = self._uniform_capacity if capacity_blocks is None else _limit(capacity_blocks, "capacity_blocks")
        self._instances.append(Recency(capacity))
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
                _write(depths, node, pos)
            end = child.end
            if end > length or blocks[end - 1] != child.blocks[-1]:
                _write(depths, child, pos + chained_agreement(child.blocks, blocks, pos))
                return depths
            node, pos = child, end
        if pos:
            _write(depths, node, pos)
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
        touch = self._next_touch()
        node = self._touch_held(instance, own, blocks, touch)
        wanted = len(blocks) - node.end
        evicted = self._trim(instance, own, own.excess(wanted))
        node = self._extend(instance, own, node, blocks[: node.end + own.room(wanted)], touch)
        self._end_touch(own, node, touch)
        if pin:
            self.pin(instance, blocks, node.end)
        return evicted

    def touch(self, instance: int, blocks: Blocks) -> int:
        """What `instance` holds of this chain goes last from now on; how many blocks that is."""
        own = self._of(instance)
        touch = self._next_touch()
        node = self._touch_held(instance, own, blocks, touch)
        self._end_touch(own, node, touch)
        return node.end

    def pin(self, instance: int, blocks: Blocks, depth: int) -> int:
        """Keep the first `depth` blocks of this chain, or as many as `instance` holds, until `unpin`; how many."""
        own = self._of(instance)
        path = self._held_path(instance, blocks, _checked(depth, "depth"))
        if not path:
            return 0
        last = path[-1]
        last.marks[instance] = last.marks.get(instance, 0) + 1
        for node in path:
            before = node.pins.get(instance, 0)
            node.pins[instance] = before + 1
            own.pinned_blocks += 0 if before else len(node.blocks)
        return last.end

    def unpin(self, instance: int, blocks: Blocks, depth: int) -> bool:
        """Give back one pin of this chain: the one that ends at `depth` or, if none does, the deepest one above.

        A pin ends above the depth it was asked for where the instance held less, or an engine has evicted the
        rest since; it is gone with the last of its blocks. False: there was no such pin, and nothing has changed.
        """
        own = self._of(instance)
        path = self._held_path(instance, blocks, _checked(depth, "depth"), cut=False)
        while path and instance not in path[-1].marks:
            path.pop()
        if not path:
            return False
        _count_down(path[-1].marks, instance)
        for node in path:
            _count_down(node.pins, instance)
            if instance not in node.pins:
                own.pinned_blocks -= len(node.blocks)
                own.unpark(node.held[instance])
        return True

    def make_room(self, instance: int, blocks_needed: int) -> list[Evicted]:
        """Evict until `blocks_needed` more blocks fit, as far as pins allow; what went, in that order."""
        own = self._of(instance)
        return self._trim(instance, own, own.excess(_checked(blocks_needed, "blocks_needed")))

    def set_capacity(self, instance: int, blocks: int | None) -> list[Evicted]:
        """A new limit, None for none; evicts down to it as far as pins allow; what went, in that order."""
        own = self._of(instance)
        own.capacity_blocks = _limit(blocks, "blocks")
        return self._trim(instance, own, own.excess(0))

    def evict(self, instance: int, blocks: Blocks, keep: int) -> None:
        """An engine has dropped this chain from position `keep` on, and with it all that hangs below on `instance`.

        Pins of what is gone end at `keep` from now on. Nothing happens where the instance holds no more than that.
        """
        own = self._of(instance)
        _checked(keep, "keep")
        if keep >= len(blocks):
            return
        path = self._held_path(instance, blocks, keep)
        above = path[-1] if path else self._root
        top = above.children.get(blocks[keep]) if above.end == keep else None
        if top is None or instance not in top.held:
            return
        pins = top.pins.get(instance, 0)
        doomed = [top]
        for node in doomed:
            doomed += [child for child in node.children.values() if instance in child.held]
        for node in reversed(doomed):
            _drop(instance, own, node)
        if path:
            if pins:
                above.marks[instance] = above.marks.get(instance, 0) + pins
            touch = above.held[instance]
            if touch not in own.ends:
                own.start(touch, above)

    def clear(self, instance: int) -> None:
        """`instance` holds nothing any more, and no pins; its capacity stays."""
        own = self._of(instance)
        # Oldest first is leaves first.
        for touch, end in sorted(own.ends.items()):
            node: Node | None = end
            while node is not None and node.held.get(instance) == touch:
                above = node.parent
                _drop(instance, own, node)
                node = above

    def _of(self, instance: int) -> Recency:
        if not 0 <= instance < len(self._instances):
            raise InputError(
                f"no instance {instance} among {len(self._instances)}", where="instance", mend="add_instance first"
            )
        return self._instances[instance]

    def _next_touch(self) -> int:
        self._touch += 1
        return self._touch

    def _touch_held(self, instance: int, own: Recency, blocks: Blocks, touch: int) -> Node:
        """Put `touch` on what `instance` holds of the chain; its last node, where the two part or the chain ends."""
        node, pos, length, ends = self._root, 0, len(blocks), own.ends
        whole = True
        while whole and pos < length:
            child = node.children.get(blocks[pos])
            if child is None or instance not in child.held:
                break
            agreed = agreement(child.blocks, blocks, pos)
            whole = agreed == len(child.blocks)
            node = child if whole else split(child, agreed)
            before = node.held[instance]
            if ends.get(before) is node:
                own.finish(before)
            node.held[instance] = touch
            pos = node.end
        return node

    def _extend(self, instance: int, own: Recency, node: Node, blocks: Blocks, touch: int) -> Node:
        """Let `instance` hold the chain below `node`, which is on it; the last node of the chain."""
        pos, length = node.end, len(blocks)
        own.used_blocks += length - pos
        while pos < length:
            child = node.children.get(blocks[pos])
            if child is None:
                child = node.children[blocks[pos]] = Node(blocks[pos:], node, length)
            else:
                agreed = agreement(child.blocks, blocks, pos)
                if agreed < len(child.blocks):
                    child = split(child, agreed)
            child.hold(instance, touch)
            node, pos = child, child.end
        return node

    def _end_touch(self, own: Recency, node: Node, touch: int) -> None:
        if node is not self._root:
            own.start(touch, node)
            join_upwards(node)

    def _held_path(self, instance: int, blocks: Blocks, depth: int, cut: bool = True) -> list[Node]:
        """The nodes that `instance` holds of the chain's first `depth` blocks; a longer run is cut or left out."""
        path: list[Node] = []
        node, pos, blocks = self._root, 0, blocks[:depth]
        while pos < len(blocks):
            child = node.children.get(blocks[pos])
            if child is None or instance not in child.held:
                break
            agreed = agreement(child.blocks, blocks, pos)
            if agreed < len(child.blocks):
                if cut:
                    path.append(split(child, agreed))
                break
            path.append(child)
            node, pos = child, child.end
        return path

    def _trim(self, instance: int, own: Recency, excess: int) -> list[Evicted]:
        """Evict `excess` blocks, or all that may go; a touch under way is safe, since it is in no order yet."""
        evicted: list[Evicted] = []
        while excess > 0 and (touch := own.oldest()) is not None:
            node = own.ends[touch]
            chain = node.chain()
            while excess > 0 and node.held.get(instance) == touch and instance not in node.pins:
                if len(node.blocks) > excess:
                    split(node, len(node.blocks) - excess)
                excess -= len(node.blocks)
                above = node.parent
                assert above is not None
                _drop(instance, own, node)
                node = above
            if node.end < len(chain):
                evicted.append(Evicted(instance, chain, node.end))
            if node.held.get(instance) == touch:
                own.ends[touch] = node
                if instance in node.pins:
                    own.park(touch)
        return evicted


def _drop(instance: int, own: Recency, node: Node) -> None:
    """`instance` no longer holds this node; it must hold nothing below it."""
    touch = node.held[instance]
    if own.ends.get(touch) is node:
        own.finish(touch)
    own.used_blocks -= len(node.blocks)
    if instance in node.pins:
        own.pinned_blocks -= len(node.blocks)
        del node.pins[instance]
        node.marks.pop(instance, None)
    node.release(instance)


def _write(depths: IntArray, node: Node, depth: int) -> None:
    """Set `depth` for every holder of `node`."""
    if node.flags is None:
        for instance in node.held:
            depths[instance] = depth
    else:
        flags = node.flags[: len(depths)]
        np.copyto(depths[: len(flags)], depth, where=flags)


def _count_down(counts: dict[int, int], key: int) -> None:
    if counts[key] > 1:
        counts[key] -= 1
    else:
        del counts[key]


def _checked(count: int, where: str) -> int:
    if count < 0:
        raise InputError(f"{count} is negative", where=where, mend="give 0 or more")
    return count


def _limit(capacity_blocks: int | None, where: str) -> int | None:
    return None if capacity_blocks is None else _checked(capacity_blocks, where)
