"""KV blocks of an engine. Free blocks stay a prefix cache until they are taken, the longest free first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence


class KvBlocks:
    """Blocks by number. A block in use has one user or more; a free one keeps its content and its key.

    Like vLLM's block pool: blocks that were never used are taken first, then the one that has been free the longest. A
    key names the content of a block and of everything before it.
    """

    def __init__(self, count: int) -> None:
        """Start with `count` blocks, all of them free and empty."""
        self._unused = count
        self._freed: OrderedDict[int, None] = OrderedDict()
        """Free blocks that have been used, the longest free first."""
        self._users: list[int] = []
        """Number of users of each block that has been used."""
        self._keys: list[Hashable] = []
        """Key of each of them; None: no other request can use its content."""
        self._cached: dict[Hashable, int] = {}

    @property
    def free(self) -> int:
        """Number of blocks without a user."""
        return self._unused + len(self._freed)

    @property
    def used(self) -> int:
        """Number of blocks with a user."""
        return len(self._users) - len(self._freed)

    def find(self, keys: Iterable[Hashable]) -> list[int]:
        """Return the blocks with these keys, up to the first key that none has."""
        found = []
        for key in keys:
            block = self._cached.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def free_among(self, blocks: Iterable[int]) -> int:
        """Return how many of these blocks have no user."""
        return sum(not self._users[block] for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Add a user to each of these blocks."""
        for block in blocks:
            if not self._users[block]:
                del self._freed[block]
            self._users[block] += 1

    def take(self, count: int) -> list[int] | None:
        """Return `count` blocks without content for one user; None: there are not so many."""
        if count > self.free:
            return None
        taken = []
        for _ in range(count):
            if self._unused:
                self._unused -= 1
                taken.append(len(self._users))
                self._users.append(1)
                self._keys.append(None)
                continue
            block, _ = self._freed.popitem(last=False)
            if self._keys[block] is not None:
                del self._cached[self._keys[block]]
                self._keys[block] = None
            self._users[block] = 1
            taken.append(block)
        return taken

    def name(self, block: int, key: Hashable) -> None:
        """Let others find the content of a block. The first block with a key keeps it."""
        if self._keys[block] is None and key not in self._cached:
            self._keys[block] = key
            self._cached[key] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Remove a user of each block. The last one is the first to be taken."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block]:
                self._freed[block] = None
