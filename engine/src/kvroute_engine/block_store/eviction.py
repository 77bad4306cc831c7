"""The published extents of a store on files: time of use, bytes in use, and eviction of the least recently used."""

from __future__ import annotations

import errno
import heapq
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvroute_engine.block_store.extent import MAX_KEY_BYTES, ExtentCodec

COUNTER_BYTES = 8
_SUBFOLDER = re.compile(r"[0-9a-f]{2}")
_EXTENT = re.compile(rf"(?:[0-9a-f]{{2}}){{1,{MAX_KEY_BYTES}}}")


def open_regular(path: str | Path, flags: int = os.O_RDONLY) -> int | None:
    """Open a regular file; None if there is none of this name. It follows no link and waits for no other process, as
    opening a FIFO does."""
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.EISDIR):
            return None
        raise
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return None


def private_mode(folder: Path) -> int:
    """Return the permission bits of new files: those of the owner, and the group's if the folder is writable for it.

    KV caches contain prompts, so that other users get no access, whatever the folder and the umask allow.
    """
    return 0o660 if folder.stat().st_mode & stat.S_IWGRP else 0o600


def make_private(path: Path, store: Path, *, folder: bool = False) -> None:
    """Create an empty file or a folder of a store, unless it exists, with the permissions of `private_mode`."""
    mode = private_mode(store)
    with suppress(FileExistsError):
        if folder:
            path.mkdir(mode=0o700)
            path.chmod(mode | mode >> 2 & 0o110)  # who may write a folder may also enter it
        else:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            os.fchmod(fd, mode)
            os.close(fd)


@dataclass(frozen=True, slots=True)
class UsedBlock:
    """A published block, its parent and its time of use in nanoseconds since 1970."""

    key: bytes
    parent: bytes
    used_ns: int


class ExtentFolder:
    """Extents by key, in subfolders by the key's last byte. The caller holds the store's lock for all changes.

    A file's modification time is its block's time of use, so that it survives a restart and all processes share it.
    Files with other names, links and special files are not the store's: they are neither counted nor removed.
    """

    def __init__(self, folder: Path, codec: ExtentCodec) -> None:
        self._root, self._counter, self._codec = folder / "blocks", folder / "used_bytes", codec
        self._parents: dict[bytes, bytes] = {}
        """Parents of the blocks that this process has written, or seen in a scan."""

    def prepare(self) -> None:
        """Create the counter of a new store."""
        if not self._counter.exists():
            make_private(self._counter, self._root.parent)

    def path(self, key: bytes) -> Path:
        """Return the file of a block."""
        name = key.hex()
        return self._root / name[-2:] / name

    def has(self, key: bytes) -> bool:
        """Return whether a block is stored with its full size."""
        try:
            return self._is_extent(os.lstat(self.path(key)))
        except FileNotFoundError:
            return False

    def touch(self, key: bytes, now_s: float, interval_s: float) -> bool:
        """Set the time of use unless it is recent; return whether the block is stored. It needs no lock."""
        path = self.path(key)
        try:
            status = os.lstat(path)
            if not self._is_extent(status):
                return False
            if now_s - status.st_mtime_ns / 1e9 > interval_s:
                os.utime(path, ns=(status.st_atime_ns, int(now_s * 1e9)), follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def publish(self, temporary: Path, key: bytes, parent: bytes, now_s: float, *, fsync: bool) -> None:
        """Give a complete extent its final name. The counter changes first: after a crash it is too high, not too
        low."""
        self._parents[key] = parent
        path = self.path(key)
        if not path.parent.exists():
            make_private(self._root, self._root.parent, folder=True)
            make_private(path.parent, self._root.parent, folder=True)
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

    def _scan(self) -> Iterator[UsedBlock]:
        """Yield every stored block; remove files that are not whole extents of this format."""
        for entry in self._files():
            key, status = bytes.fromhex(entry.name), entry.stat(follow_symlinks=False)
            parent = self._parents.get(key)
            if parent is None:
                parent = self._parent(entry.path, key)
            if parent is None or status.st_size != self._codec.extent_bytes:
                os.unlink(entry.path)
                continue
            yield UsedBlock(key, parent, status.st_mtime_ns)

    def _parent(self, path: str, key: bytes) -> bytes | None:
        fd = open_regular(path)
        if fd is None:
            return None
        try:
            header = self._codec.parsed(os.pread(fd, self._codec.header_bytes, 0))
        finally:
            os.close(fd)
        return header.parent if header is not None and header.key == key else None

    def _files(self) -> Iterator[os.DirEntry[str]]:
        """Yield the regular files with the name of a key, in the subfolder of that key."""
        if not self._root.exists():
            return
        with os.scandir(self._root) as entries:
            folders = [entry for entry in entries if _SUBFOLDER.fullmatch(entry.name)]
        for folder in sorted(folders, key=lambda entry: entry.name):
            if not folder.is_dir(follow_symlinks=False):
                continue
            with os.scandir(folder.path) as files:
                for entry in files:
                    named = _EXTENT.fullmatch(entry.name) and entry.name.endswith(folder.name)
                    if named and entry.is_file(follow_symlinks=False):
                        yield entry

    def _is_extent(self, status: os.stat_result) -> bool:
        return stat.S_ISREG(status.st_mode) and status.st_size == self._codec.extent_bytes

    def _count(self, used_bytes: int) -> None:
        """Overwrite the counter in place, which needs no space on a full disk after the first time."""
        fd = os.open(self._counter, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(fd, used_bytes.to_bytes(COUNTER_BYTES, "little"), 0)
        finally:
            os.close(fd)
