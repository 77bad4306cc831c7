"""A real block store behind an emulated node: a folder, Redis or S3, reached over the machine's own network."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TypeVar

from kvroute.emulator.kv.storage import EmulatedBufferRead
from kvroute_engine.block_keys import NO_PARENT
from kvroute_engine.block_store import BlockFormat, BlockStore, StoreError
from kvroute_engine.block_store.location import StoreLocation

log = logging.getLogger(__name__)
T = TypeVar("T")
_READ_BYTES = 16 << 20
"""Maximum size of one read from the store, in real bytes."""


class RealStore:
    """The store as one node sees it (`Medium`). Reads and writes take the time that they take; blocks are zeros.

    The methods for the event loop run those of the store in threads: one for reads, so that they are carried out in
    order, and one for writes.
    """

    def __init__(
        self, location: StoreLocation, block_tokens: int, block_bytes: Callable[[str], float], scale: float
    ) -> None:
        """Args: `block_bytes`: modelled size of a block of a model; `scale`: real bytes per modelled byte.

        Raises:
            StoreError: the location cannot be used.
        """
        location.check()
        self._location, self._block_tokens, self._block_bytes, self._scale = location, block_tokens, block_bytes, scale
        self._stores: dict[str, BlockStore] = {}
        self._read_thread, self._write_thread = (ThreadPoolExecutor(1, name) for name in ("block-read", "block-write"))
        self._failed = False

    async def match(self, model: str, keys: Sequence[bytes]) -> int:
        """See `Medium`."""
        return await self._in(self._write_thread, 0, lambda: self._store(model).match(keys))

    async def read(self, read: EmulatedBufferRead, model: str, keys: Sequence[bytes]) -> int:
        """See `Medium`."""
        if not keys:
            return 0
        asked_s = time.monotonic()
        return await self._in(self._read_thread, 0, lambda: self._read(read, model, keys, asked_s))

    async def write(self, model: str, keys: Sequence[bytes], stored: int, block_bytes: float) -> bool:
        """See `Medium`."""
        return await self._in(self._write_thread, False, lambda: self._write(model, keys, stored))

    def close(self) -> None:
        """See `Medium`."""
        for thread in (self._read_thread, self._write_thread):
            thread.shutdown(cancel_futures=True)

    def _read(self, read: EmulatedBufferRead, model: str, keys: Sequence[bytes], asked_s: float) -> int:
        began_s = time.monotonic()
        read.waited_s += began_s - asked_s
        nbytes, found = self._nbytes(model), 0
        step = max(1, _READ_BYTES // nbytes)
        memory = memoryview(bytearray(min(step, len(keys)) * nbytes))
        for first in range(0, len(keys), step):
            some = keys[first : first + step]
            count = self._store(model).read(some, range(1), memory[: len(some) * nbytes])
            found += count
            if count < len(some):
                break
        read.in_service_s = time.monotonic() - began_s
        return found

    def _write(self, model: str, keys: Sequence[bytes], stored: int) -> bool:
        store, block = self._store(model), memoryview(bytes(self._nbytes(model)))
        chain = list(pairwise([NO_PARENT, *keys]))
        return all(store.write(key, parent, block) for parent, key in chain[stored:])

    def _store(self, model: str) -> BlockStore:
        """Return the store of a model. Called in both threads; opening it twice does no harm."""
        if model not in self._stores:
            form = BlockFormat(model, 1, self._block_tokens, self._nbytes(model))
            self._stores[model] = self._location.open(form, "".join(c if c.isalnum() else "-" for c in model))
        return self._stores[model]

    def _nbytes(self, model: str) -> int:
        """Return the real size of a block."""
        return max(1, round(self._block_bytes(model) * self._scale))

    async def _in(self, thread: ThreadPoolExecutor, failed: T, call: Callable[[], T]) -> T:
        """Return the result of a call in a thread, or `failed` if the store fails."""
        try:
            result = await asyncio.get_running_loop().run_in_executor(thread, call)
        except StoreError as error:
            if not self._failed:
                log.warning("the store fails; further failures are not logged until it works again: %s", error)
            self._failed = True
            return failed
        self._failed = False
        return result
