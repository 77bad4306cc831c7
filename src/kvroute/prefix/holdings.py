"""The blocks that one instance holds, its capacity and its order of eviction.

A touch covers a chain from the root, so the blocks with the same last touch form a single run towards a leaf (the
preferred paths of a link-cut tree). Only the lower end of each run is stored here, the oldest touch first.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import NamedTuple

from kvroute.prefix.tree import Blocks, PrefixNode, agreement, join_upwards, shorten, split


class Evicted(NamedTuple):
    """The blocks that `instance` has lost: this chain from position `keep` on, as in KvEvicted."""

    instance: int
    blocks: Blocks
    keep: int


class Holdings:
    """One instance's part of the tree; it never changes what other instances hold."""

    __slots__ = ("_ends", "_heap", "_parked", "capacity_blocks", "instance", "pinned_blocks", "used_blocks")

    def __init__(self, instance: int, capacity_blocks: int | None) -> None:
        self.instance = instance
        self.capacity_blocks = capacity_blocks
        self.used_blocks = 0
        self.pinned_blocks = 0
        self._ends: dict[int, PrefixNode] = {}
        """Touch -> lowest node with this last touch."""
        self._heap: list[int] = []
        """Every touch that may have something to evict; it may contain outdated ones."""
        self._parked: set[int] = set()
        """Touches whose lower end is pinned; an eviction skips them."""

    def room(self, wanted: int) -> int:
        """How many of `wanted` blocks fit now."""
        return wanted if self.capacity_blocks is None else min(wanted, max(0, self.capacity_blocks - self.used_blocks))

    def path(self, root: PrefixNode, blocks: Blocks, cut: bool) -> list[PrefixNode]:
        """The nodes held of this chain. A node that matches only in part is split there (`cut`) or left out."""
        instance = self.instance
        path: list[PrefixNode] = []
        node, pos, length = root, 0, len(blocks)
        while pos < length:
            child = node.children.get(blocks[pos])
            if child is None or instance not in child.held:
                break
            if child.blocks != blocks[pos : child.end]:
                if cut:
                    path.append(split(child, agreement(child.blocks, blocks, pos)))
                break
            path.append(child)
            node, pos = child, child.end
        return path

    def touch(self, root: PrefixNode, blocks: Blocks, touch: int) -> PrefixNode:
        """Set the last touch of the held part of this chain; return its last node. Call `finish_touch` afterwards."""
        instance, ends = self.instance, self._ends
        node = root
        for node in self.path(root, blocks, cut=True):
            before = node.held[instance]
            if ends.get(before) is node:
                self._forget(before)
            node.held[instance] = touch
        return node

    def extend(self, node: PrefixNode, blocks: Blocks, more: int, touch: int) -> PrefixNode:
        """Hold `more` blocks of this chain below `node`, the last node held of it; return the new last node."""
        pos, limit = node.end, node.end + more
        self.used_blocks += more
        while pos < limit:
            child = node.children.get(blocks[pos])
            if child is None:
                child = node.children[blocks[pos]] = PrefixNode(blocks[pos:limit], node, limit)
            else:
                agreed = min(agreement(child.blocks, blocks, pos), limit - pos)
                if agreed < len(child.blocks):
                    child = split(child, agreed)
            child.hold(self.instance, touch)
            node, pos = child, child.end
        return node

    def finish_touch(self, touch: int, end: PrefixNode) -> None:
        """End the touch at this node. Before this call nothing of it can be evicted; afterwards it is evicted last."""
        if end.parent is not None:
            self._end(touch, end)
            join_upwards(end)

    def pin(self, path: list[PrefixNode]) -> None:
        """Add one pin to these nodes, a path from the root; the pin ends at the last one."""
        instance = self.instance
        path[-1].marks[instance] = path[-1].marks.get(instance, 0) + 1
        for node in path:
            before = node.pins.get(instance, 0)
            node.pins[instance] = before + 1
            self.pinned_blocks += 0 if before else len(node.blocks)

    def unpin(self, path: list[PrefixNode]) -> None:
        """Remove one pin from these nodes, a path from the root; a pin must end at the last one."""
        instance = self.instance
        _count_down(path[-1].marks, instance)
        for node in path:
            _count_down(node.pins, instance)
            if instance not in node.pins:
                self.pinned_blocks -= len(node.blocks)
                touch = node.held[instance]
                if touch in self._parked:
                    self._parked.discard(touch)
                    self._push(touch)

    def make_room(self, needed: int) -> list[Evicted]:
        """Evict until `needed` more blocks fit, or until nothing more may be evicted."""
        if self.capacity_blocks is None:
            return []
        evicted: list[Evicted] = []
        excess = self.used_blocks + needed - self.capacity_blocks
        while excess > 0 and (touch := self._oldest()) is not None:
            node = self._ends[touch]
            chain = node.chain()
            keep = self._trim(node, touch, excess)
            if keep < len(chain):
                evicted.append(Evicted(self.instance, chain, keep))
                excess -= len(chain) - keep
        return evicted

    def _trim(self, node: PrefixNode, touch: int, excess: int) -> int:
        """Evict up to `excess` blocks of one touch from its lower end; return the depth at which its chain ends now."""
        instance = self.instance
        while excess > 0 and node.held.get(instance) == touch and instance not in node.pins:
            if len(node.blocks) > excess:
                if len(node.held) == 1:
                    shorten(node, excess)
                    self.used_blocks -= excess
                    break
                split(node, len(node.blocks) - excess)
            excess -= len(node.blocks)
            above = node.parent
            assert above is not None
            self._drop(node)
            node = above
        if node.held.get(instance) == touch:
            self._ends[touch] = node
            if instance in node.pins:
                self._parked.add(touch)
        return node.end

    def drop_below(self, above: PrefixNode, top: PrefixNode) -> None:
        """Drop `top`, a child of `above`, and everything below it, pinned or not; its pins now end at `above`."""
        instance = self.instance
        pins = top.pins.get(instance, 0)
        doomed = [top]
        for node in doomed:  # the list grows during the loop: parents before children
            doomed += [child for child in node.children.values() if instance in child.held]
        for node in reversed(doomed):
            self._drop(node)
        if above.parent is None:
            return
        if pins:
            above.marks[instance] = above.marks.get(instance, 0) + pins
        touch = above.held[instance]
        if touch not in self._ends:
            self._end(touch, above)

    def chains(self) -> Iterator[Blocks]:
        """Every run of one touch, as a chain from the root; the oldest touch first."""
        for _, end in sorted(self._ends.items()):
            yield end.chain()

    def drop_all(self) -> None:
        """Drop everything, pinned or not."""
        for touch, end in sorted(self._ends.items()):  # oldest first, which is leaves first
            node: PrefixNode | None = end
            while node is not None and node.held.get(self.instance) == touch:
                above = node.parent
                self._drop(node)
                node = above

    def _drop(self, node: PrefixNode) -> None:
        """Stop holding this node; no node below it may be held."""
        instance = self.instance
        touch = node.held[instance]
        if self._ends.get(touch) is node:
            self._forget(touch)
        self.used_blocks -= len(node.blocks)
        if instance in node.pins:
            self.pinned_blocks -= len(node.blocks)
            del node.pins[instance]
            node.marks.pop(instance, None)
        node.release(instance)

    def _oldest(self) -> int | None:
        """The least recent touch that may still have blocks to evict, or None."""
        heap = self._heap
        while heap and (heap[0] not in self._ends or heap[0] in self._parked):
            heappop(heap)
        return heap[0] if heap else None

    def _end(self, touch: int, end: PrefixNode) -> None:
        self._ends[touch] = end
        self._push(touch)

    def _forget(self, touch: int) -> None:
        del self._ends[touch]
        self._parked.discard(touch)

    def _push(self, touch: int) -> None:
        heap = self._heap
        # Outdated touches stay in the heap; without this rebuild it would grow with every touch.
        if len(heap) > 2 * len(self._ends) + 64:
            heap[:] = sorted(self._ends)
        else:
            heappush(heap, touch)


def _count_down(counts: dict[int, int], key: int) -> None:
    if counts[key] > 1:
        counts[key] -= 1
    else:
        del counts[key]
