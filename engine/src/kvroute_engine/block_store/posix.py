"""The block store on files: one file per full block, published by rename, shared by several processes."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvroute_engine.block_keys import NO_PARENT
from kvroute_engine.block_store.eviction import ExtentFolder, make_private, open_regular, private_mode
from kvroute_engine.block_store.extent import ExtentCodec
from kvroute_engine.block_store.format import BlockFormat
from kvroute_engine.block_store.interface import StoreError

PIECE_BYTES = 1024 * 1024
"""Bytes that are read and then checked at once."""
_FORMAT = "format.json"
_TEMPORARY = re.compile(r"[0-9a-f]+\.[0-9a-f]{16}|" + re.escape(_FORMAT))


@dataclass(frozen=True, slots=True, kw_only=True)
class PosixStoreSpec:
    """Capacity and behaviour of a store on files.

    Without `fsync`, a crash of a process loses nothing, and after a power cut checksums detect damaged blocks. Without
    `verify`, reads do not compare checksums. A block's time of use is written at most once per `touch_interval_s`.
    """

    capacity_bytes: int
    fsync: bool = False
    verify: bool = True
    touch_interval_s: float = 60.0
    read_threads: int = 4


class PosixStore:
    """Full blocks as files in one folder. Threads and processes may share the folder; a store object is thread-safe.

    The lock file orders publishing and eviction. Blocks are written and read without the lock: an open file stays
    readable after its eviction.
    """

    def __init__(
        self, folder: Path, form: BlockFormat, settings: PosixStoreSpec, clock: Callable[[], float] = time.time
    ) -> None:
        """Open the store, or create it; remove what dead writers left.

        Raises:
            StoreError: the folder cannot be written, has blocks of another format, or is too small for one block.
        """
        self._folder, self._settings, self._clock = folder, settings, clock
        self._codec = ExtentCodec(form)
        self._extents = ExtentFolder(folder, self._codec)
        self._writing = folder / "writing"
        self._pool = ThreadPoolExecutor(settings.read_threads, "block-read")
        if settings.capacity_bytes < self._codec.extent_bytes:
            raise StoreError(
                f"a capacity of {settings.capacity_bytes} bytes is less than one block ({self._codec.extent_bytes})",
                where=str(folder),
                hint="increase the capacity",
            )
        try:
            self._open(form)
        except OSError as error:
            hint = "choose a folder in which this user may create files"
            raise StoreError(f"the store cannot be written ({error.strerror})", where=str(folder), hint=hint) from error

    def close(self) -> None:
        """End the reading threads."""
        self._pool.shutdown()

    def match(self, keys: Sequence[bytes]) -> int:
        """Return how many leading keys are stored, and mark these blocks as used. See `BlockStore`."""
        now = self._clock()
        for count, key in enumerate(keys):
            if not self._extents.touch(key, now, self._settings.touch_interval_s):
                return count
        return len(keys)

    def read(self, keys: Sequence[bytes], layers: range, into: memoryview) -> int:
        """Read layers of blocks into a buffer; return the number of leading blocks read. See `BlockStore`."""
        parts = self._codec.slices(keys, layers, into)
        map_parts = self._pool.map if len(keys) > 1 else map
        done = list(map_parts(lambda key, part: self._read(key, layers, part), keys, parts))
        return done.index(False) if False in done else len(keys)

    def write(self, key: bytes, parent: bytes, block: memoryview) -> bool:
        """Store a full block; return whether it is stored afterwards. See `BlockStore`."""
        header = self._codec.header(key, parent, block)
        with self._errors():
            with self._lock():
                if self._extents.has(key):
                    return True
                if not self._has_parent(parent):
                    return False
                path, fd = self._started(key)
            try:
                self._fill(fd, header, block.cast("B"))
                with self._lock():
                    return self._published(path, key, parent)
            finally:
                os.close(fd)
                path.unlink(missing_ok=True)

    def _open(self, form: BlockFormat) -> None:
        if not self._folder.exists():
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        make_private(self._writing, self._folder, folder=True)
        make_private(self._folder / "lock", self._folder)
        with self._lock():
            self._extents.prepare()
            described = self._folder / _FORMAT
            if described.exists():
                form.require_same(described.read_bytes(), str(self._folder))
            else:
                temporary = self._writing / _FORMAT
                temporary.unlink(missing_ok=True)
                make_private(temporary, self._folder)
                temporary.write_bytes(form.description)
                temporary.rename(described)
            self._remove_leftovers()

    def _read(self, key: bytes, layers: range, part: memoryview) -> bool:
        """Read one block; remove it if it is damaged."""
        offset, nbytes = self._codec.layers_at(layers)
        fd = open_regular(self._extents.path(key))
        if fd is None:
            return False
        try:
            if not self._settings.verify:
                return os.preadv(fd, [part], offset) == nbytes
            if self._read_checked(fd, key, layers, part):
                return True
            self._discard(key, fd)
            return False
        finally:
            os.close(fd)

    def _read_checked(self, fd: int, key: bytes, layers: range, part: memoryview) -> bool:
        """Read the header, then layers in pieces; each is checked while it is in the processor's cache."""
        header = self._codec.parsed(os.pread(fd, self._codec.header_bytes, 0))
        if header is None or header.key != key:
            return False
        size = self._codec.form.layer_bytes
        step = max(1, PIECE_BYTES // size)
        for first in range(layers.start, layers.stop, step):
            piece = range(first, min(first + step, layers.stop))
            offset, nbytes = self._codec.layers_at(piece)
            data = part[(first - layers.start) * size :][:nbytes]
            if os.preadv(fd, [data], offset) != nbytes or not self._codec.are_intact(header, piece, data):
                return False
        return True

    def _discard(self, key: bytes, fd: int) -> None:
        """Remove a damaged block unless it has been replaced since it was opened."""
        with suppress(OSError), self._lock():
            path = self._extents.path(key)
            if os.path.samestat(os.fstat(fd), path.stat()):
                path.unlink()

    def _started(self, key: bytes) -> tuple[Path, int]:
        """Create a temporary file and lock it; the lock shows other processes that its writer lives."""
        path = self._writing / f"{key.hex()}.{secrets.token_hex(8)}"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.fchmod(fd, private_mode(self._folder))
        fcntl.flock(fd, fcntl.LOCK_EX)
        return path, fd

    def _fill(self, fd: int, header: bytes, block: memoryview) -> None:
        """Write the whole extent; a full disk raises OSError."""
        rest = [memoryview(header), block]
        while rest:
            written = os.writev(fd, rest)
            while rest and written >= rest[0].nbytes:
                written -= rest.pop(0).nbytes
            if rest:
                rest[0] = rest[0][written:]
        if self._settings.fsync:
            os.fsync(fd)

    def _published(self, path: Path, key: bytes, parent: bytes) -> bool:
        """Make room and rename the file to its final name."""
        if self._extents.has(key):
            return True
        if not self._has_parent(parent) or not self._has_room(parent):
            return False
        self._extents.publish(path, key, parent, self._clock(), fsync=self._settings.fsync)
        return True

    def _has_room(self, parent: bytes) -> bool:
        """Evict until one more block fits. A batch of a 64th of the capacity makes scans of the folder rare."""
        capacity_bytes, extent_bytes = self._settings.capacity_bytes, self._codec.extent_bytes
        if self._extents.used_bytes() + extent_bytes <= capacity_bytes:
            return True
        self._remove_leftovers()
        limit_bytes = capacity_bytes - max(extent_bytes, capacity_bytes // 64)
        return self._extents.evict(limit_bytes, keep=parent) + extent_bytes <= capacity_bytes

    def _has_parent(self, parent: bytes) -> bool:
        return parent == NO_PARENT or self._extents.has(parent)

    def _remove_leftovers(self) -> None:
        """Remove temporary files without a living writer; the caller holds the lock."""
        for path in self._writing.iterdir():
            fd = open_regular(path, os.O_WRONLY) if _TEMPORARY.fullmatch(path.name) else None
            if fd is None:  # its writer has just ended, or it is no file of the store
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
            except BlockingIOError:
                continue
            finally:
                os.close(fd)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Exclude other threads and processes; each call opens the file, because a lock belongs to an open file."""
        fd = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            hint = "free space, or set a smaller capacity"
            what = f"a block cannot be stored ({error.strerror}); stored blocks are unaffected"
            raise StoreError(what, where=str(self._folder), hint=hint) from error
