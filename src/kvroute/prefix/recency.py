"""What one instance holds, in the order in which it would go: whole touches, oldest first.

A touch covers a chain from the root, so the blocks whose last touch is the same one form a single run towards a
leaf (the preferred paths of a link-cut tree). Only the lower end of each run is kept here.
"""

from __future__ import annotations

from heapq import heappop, heappush

from kvroute.prefix.tree import Node


class Recency:
    """Capacity and order of eviction of one instance; it never looks at another one."""

    __slots__ = ("_heap", "_parked", "capacity_blocks", "ends", "pinned_blocks", "used_blocks")

    def __init__(self, capacity_blocks: int | None) -> None:
        self.capacity_blocks = capacity_blocks
        self.used_blocks = 0
        self.pinned_blocks = 0
        self.ends: dict[int, Node] = {}
        """Touch -> lowest node whose last touch it is."""
        self._heap: list[int] = []
        self._parked: set[int] = set()

    def excess(self, needed: int) -> int:
        """Blocks that must go before `needed` more fit; negative where there is room to spare."""
        return -1 if self.capacity_blocks is None else self.used_blocks + needed - self.capacity_blocks

    def room(self, wanted: int) -> int:
        """Blocks of `wanted` that fit now."""
        return wanted if self.capacity_blocks is None else min(wanted, max(0, self.capacity_blocks - self.used_blocks))

    def start(self, touch: int, end: Node) -> None:
        """A touch has ended at `end`: its blocks go last from now on."""
        self.ends[touch] = end
        self._push(touch)

    def finish(self, touch: int) -> None:
        """No block has `touch` as its last one any more."""
        del self.ends[touch]
        self._parked.discard(touch)

    def oldest(self) -> int | None:
        """The least recent touch that may still have something to evict."""
        heap = self._heap
        while heap and (heap[0] not in self.ends or heap[0] in self._parked):
            heappop(heap)
        return heap[0] if heap else None

    def park(self, touch: int) -> None:
        """The lower end of `touch` is pinned: nothing of it can go until `unpark`."""
        self._parked.add(touch)

    def unpark(self, touch: int) -> None:
        """The lower end of `touch` may be free again."""
        if touch in self._parked:
            self._parked.discard(touch)
            self._push(touch)

    def _push(self, touch: int) -> None:
        heap = self._heap
        # Touches that ended otherwise stay in the heap; without this it would grow with every touch.
        if len(heap) > 2 * len(self.ends) + 64:
            heap[:] = sorted(self.ends.keys() - self._parked - {touch})
        heappush(heap, touch)
