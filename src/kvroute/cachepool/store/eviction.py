"""The published extents of a store on files: time of use, bytes in use, and eviction of the least recently used."""

from __future__ import annotations

import heapq
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvroute.cachepool.store.extent import ExtentCodec

COUNTER_BYTES = 8


@dataclass(frozen=True, slots=True)
class Used:
    """A published block, its parent and its time of use in nanoseconds since 1970."""

    key: bytes
    parent: bytes
    used_ns: int


class ExtentFolder:
    """Extents by key, in subfolders by the key's last byte. The caller holds the store's lock for all changes.

    A file's modification time is its block's time of use, so that it survives a restart and all processes share it.
    """

    def __init__(self, folder: Path, codec: ExtentCodec) -> None:
        self._root, self._counter, self._codec = folder / "blocks", folder / "used_bytes", codec
        self._parents: dict[bytes, bytes] = {}
        """Parents of the blocks that this process has written, or seen in a scan."""

    def path(self, key: bytes) -> Path:
        """Return the file of a block."""
        name = key.hex()
        return self._root / name[-2:] / name

    def has(self, key: bytes) -> bool:
        """Return whether a block is stored with its full size."""
        try:
            return os.stat(self.path(key)).st_size == self._codec.extent_bytes
        except FileNotFoundError:
            return False

    def touch(self, key: bytes, now_s: float, interval_s: float) -> bool:
        """Set the time of use unless it is recent; return whether the block is stored. It needs no lock."""
        path = self.path(key)
        try:
            status = os.stat(path)
            if now_s - status.st_mtime_ns / 1e9 > interval_s:
                os.utime(path, ns=(status.st_atime_ns, int(now_s * 1e9)))
        except FileNotFoundError:
            return False
        return status.st_size == self._codec.extent_bytes

    def publish(self, temporary: Path, key: bytes, parent: bytes, now_s: float, *, fsync: bool) -> None:
        """Give a complete extent its final name. The counter changes first: after a crash it is too high, not too
        low."""
        self._parents[key] = parent
        path = self.path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        os.utime(temporary, ns=(int(now_s * 1e9), int(now_s * 1e9)))
        self._count(self.used_bytes() + self._codec.extent_bytes)
        os.rename(temporary, path)
        if fsync:
            for folder in (path.parent, self._root):
                fd = os.open(folder, os.O_RDONLY)
                os.fsync(fd)
                os.close(fd)

    def used_bytes(self) -> int:
        """Return an upper bound of the bytes of all published extents."""
        counted = self._counter.read_bytes() if self._counter.exists() else b""
        if len(counted) == COUNTER_BYTES:
            return int.from_bytes(counted, "little")
        return self._codec.extent_bytes * sum(1 for _ in self._files())

    def evict(self, limit_bytes: int, keep: bytes) -> int:
        """Remove blocks without stored children, least recently used first, until the rest fits into the limit.

        Equal times are ordered by key. Returns the bytes that remain; they are more than the limit if only `keep` and
        its ancestors are left.
        """
        blocks = {block.key: block for block in self._scan()}
        self._parents = {key: block.parent for key, block in blocks.items()}
        children = Counter(self._parents.values())
        leaves = [(block.used_ns, key) for key, block in blocks.items() if not children[key] and key != keep]
        heapq.heapify(leaves)
        used_bytes = len(blocks) * self._codec.extent_bytes
        while leaves and used_bytes > limit_bytes:
            _, key = heapq.heappop(leaves)
            self.path(key).unlink(missing_ok=True)
            used_bytes -= self._codec.extent_bytes
            parent = blocks[key].parent
            children[parent] -= 1
            if not children[parent] and parent in blocks and parent != keep:
                heapq.heappush(leaves, (blocks[parent].used_ns, parent))
        self._count(used_bytes)
        return used_bytes

    def _scan(self) -> Iterator[Used]:
        """Yield every stored block; remove files that are not whole extents of this format."""
        for entry in self._files():
            key, status = bytes.fromhex(entry.name), entry.stat()
            parent = self._parents.get(key)
            if parent is None:
                parent = self._parent(entry.path, key)
            if parent is None or status.st_size != self._codec.extent_bytes:
                os.unlink(entry.path)
                continue
            yield Used(key, parent, status.st_mtime_ns)

    def _parent(self, path: str, key: bytes) -> bytes | None:
        fd = os.open(path, os.O_RDONLY)
        try:
            header = self._codec.parsed(os.pread(fd, self._codec.header_bytes, 0))
        finally:
            os.close(fd)
        return header.parent if header is not None and header.key == key else None

    def _files(self) -> Iterator[os.DirEntry[str]]:
        if not self._root.exists():
            return
        with os.scandir(self._root) as folders:
            for folder in sorted(folders, key=lambda entry: entry.name):
                with os.scandir(folder.path) as files:
                    yield from files

    def _count(self, used_bytes: int) -> None:
        """Overwrite the counter in place, which needs no space on a full disk after the first time."""
        fd = os.open(self._counter, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.pwrite(fd, used_bytes.to_bytes(COUNTER_BYTES, "little"), 0)
        finally:
            os.close(fd)
