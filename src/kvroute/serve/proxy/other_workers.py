"""Requests that the other workers of this machine have admitted: counts in a file that all workers map into memory.

A row for each worker has its requests in flight, its waiting requests, and a count for each API key. A worker reads the
rows of the others and writes its own under one lock, so that all workers together keep to the limits.
"""

from __future__ import annotations

import fcntl
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

_KEYS = 1 << 16
"""Number of API keys for which there is room, a power of two."""
_IN_FLIGHT, _QUEUED, _FIRST_KEY = 0, 1, 2
_COLUMNS = _FIRST_KEY + _KEYS


class OtherWorkers:
    """A `PeerCounts`: one worker's access to the counts of all."""

    shared = True

    def __init__(self, path: Path, worker: int, workers: int) -> None:
        """
        Args:
            path: a file that `create` has made for as many workers.
            worker: own number, from 1.
            workers: number of workers.
        """
        self._file = path.open("r+b")
        self._memory = mmap.mmap(self._file.fileno(), 0)
        self._counts = memoryview(self._memory).cast("q")
        """The row of the names of keys, then a row for each worker."""
        self._own = worker * _COLUMNS
        self._others = [row * _COLUMNS for row in range(1, 1 + workers) if row != worker]
        self._columns: dict[str, int | None] = {}

    @staticmethod
    def create(path: Path, workers: int) -> None:
        """Create the file; pages of it take memory once they are used."""
        with path.open("xb") as file:
            file.truncate(8 * (1 + workers) * _COLUMNS)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep the other workers from admitting requests. The lock of a worker that dies is released."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    @property
    def in_flight(self) -> int:
        """Number of requests that the others have admitted and that are not over."""
        return self._sum(_IN_FLIGHT)

    @property
    def queued(self) -> int:
        """Number of requests that wait at the others."""
        return self._sum(_QUEUED)

    def held_by(self, key: str) -> int:
        """Return the number of requests of a key at the others, in flight and waiting. Call it while `locked`."""
        column = self._column(key)
        return 0 if column is None else self._sum(column)

    def write(self, in_flight: int, queued: int) -> None:
        """Set the own counts."""
        self._counts[self._own + _IN_FLIGHT], self._counts[self._own + _QUEUED] = in_flight, queued

    def write_key(self, key: str, held: int) -> None:
        """Set the own count of a key for which `held_by` was called."""
        column = self._columns.get(key)
        if column is not None:
            self._counts[self._own + column] = held

    def forget(self) -> None:
        """Set all own counts to 0: the worker has ended."""
        self._counts[self._own : self._own + _COLUMNS] = memoryview(bytes(8 * _COLUMNS)).cast("q")

    def close(self) -> None:
        """Unmap the file."""
        self._counts.release()
        self._memory.close()
        self._file.close()

    def _sum(self, column: int) -> int:
        counts = self._counts
        return sum([counts[row + column] for row in self._others])

    def _column(self, key: str) -> int | None:
        """Return the column of a key, which every worker finds at the same place; None if there is no room left."""
        if key not in self._columns:
            name = int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little", signed=True) or 1
            self._columns[key] = None
            for probe in range(_KEYS):
                place = (name + probe) % _KEYS
                if self._counts[_FIRST_KEY + place] in (0, name):
                    self._counts[_FIRST_KEY + place] = name
                    self._columns[key] = _FIRST_KEY + place
                    break
        return self._columns[key]


def release_worker(path: Path, worker: int, workers: int) -> None:
    """Set the counts of a worker that has died to 0."""
    counts = OtherWorkers(path, worker, workers)
    with counts.locked():
        counts.forget()
    counts.close()
