"""Changes in directories, as the kernel reports them (inotify(7)); without effect on systems that lack it."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable, Set
from pathlib import Path
from types import TracebackType

_CLOSE_WRITE, _MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x8, 0x40, 0x80, 0x100, 0x200
_MASK = _CLOSE_WRITE | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC
_READ_BYTES = 65_536


class DirectoryWatch:
    """Calls a function on the running loop when an entry of a followed directory has been written, replaced or
    removed. It is a context manager."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = -1
        self._watches: dict[Path, int] = {}

    def __enter__(self) -> DirectoryWatch:
        begin = getattr(self._libc, "inotify_init1", None)
        self._descriptor = -1 if begin is None else begin(_FLAGS)
        if self._descriptor >= 0:
            asyncio.get_running_loop().add_reader(self._descriptor, self._changed)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor >= 0:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def follow(self, directories: Set[Path]) -> None:
        """Follow these directories and no others. One that does not exist is not followed; call again later."""
        if self._descriptor < 0:
            return
        for directory in self._watches.keys() - directories:
            self._libc.inotify_rm_watch(self._descriptor, self._watches.pop(directory))
        for directory in directories:
            watch = self._libc.inotify_add_watch(self._descriptor, os.fsencode(directory), ctypes.c_uint32(_MASK))
            if watch >= 0:  # the same number again for a directory that is followed already
                self._watches[directory] = watch
            else:
                self._watches.pop(directory, None)

    def _changed(self) -> None:
        try:
            while os.read(self._descriptor, _READ_BYTES):
                pass
        except BlockingIOError:
            self._on_change()
