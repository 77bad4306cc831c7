"""Objects, their history and those who watch it, in memory, with an optional journal on disk."""

from __future__ import annotations

import asyncio
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.kube.apiserver.resources import Key
from tests.kube.apiserver.status import Object

FIRST_VERSION = 100
HISTORY_MAX = 100_000
"""Changes that are kept; when there are twice as many, the older half is forgotten."""
RESTART_WRITES = 10
"""A starting API server writes leases and roles of its own, so the history that it can replay begins later."""


@dataclass(frozen=True, slots=True)
class Change:
    """One write: the object before and after it; None stands for absence. Objects are never changed in place."""

    version: int
    key: Key
    before: Object | None
    after: Object | None


@dataclass(slots=True)
class Feed:
    """The changes of one watch that it has not sent yet; None ends the watch."""

    changes: asyncio.Queue[Change | None] = field(default_factory=asyncio.Queue)


class Store:
    """All objects at the newest version, and every change since the oldest version that a list or watch may name."""

    def __init__(self, journal: Path | None = None, history_max: int = HISTORY_MAX) -> None:
        self._history_max = history_max
        self.version = FIRST_VERSION
        self.watch_floor = FIRST_VERSION
        """Watches of cached kinds start here or later."""
        self.compacted = FIRST_VERSION
        """Lists at an exact version, and all reads of uncached kinds, start here or later."""
        self.objects: dict[tuple[str, str], dict[Key, Object]] = defaultdict(dict)
        self._changes: list[Change] = []
        self._feeds: dict[int, tuple[tuple[str, str], Feed]] = {}
        self._listeners: list[Callable[[Change], None]] = []
        self._journal = -1
        if journal is not None:
            self._open(journal)

    def _open(self, journal: Path) -> None:
        """Replay the journal of an earlier process, and append to it from now on."""
        if journal.exists():
            for line in journal.read_text(encoding="utf-8").splitlines():
                version, key, after = json.loads(line)
                group, plural, namespace, name = key
                self._apply(version, (group, plural, namespace, name), after)
            self.version += RESTART_WRITES
            self.watch_floor = self.version
        self._journal = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def close(self) -> None:
        """End all watches and close the journal."""
        self.end_watches()
        if self._journal >= 0:
            os.close(self._journal)
            self._journal = -1

    def get(self, key: Key) -> Object | None:
        """Return an object, or None."""
        return self.objects[key[:2]].get(key)

    def write(self, key: Key, made: Object | None) -> Object:
        """Store an object with the next version, or delete it with None; return what watchers get."""
        version = self.version + 1
        before = self.get(key)
        shown = made if made is not None else before
        assert shown is not None, f"nothing to delete at {key}"
        stamped = {**shown, "metadata": {**shown["metadata"], "resourceVersion": str(version)}}
        after = None if made is None else stamped
        if self._journal >= 0:
            os.write(self._journal, json.dumps([version, key, after], separators=(",", ":")).encode() + b"\n")
        change = self._apply(version, key, after)
        for kind, feed in list(self._feeds.values()):
            if kind == key[:2]:
                feed.changes.put_nowait(change)
        for listener in self._listeners:
            listener(change)
        return stamped

    def _apply(self, version: int, key: Key, after: Object | None) -> Change:
        held = self.objects[key[:2]]
        change = Change(version, key, held.get(key), after)
        if after is None:
            held.pop(key, None)
        else:
            held[key] = after
        self.version = version
        self._changes.append(change)
        if len(self._changes) >= 2 * self._history_max:
            forgotten = self._changes[-self._history_max - 1].version
            del self._changes[: -self._history_max]
            self.watch_floor = max(self.watch_floor, forgotten)
            self.compacted = max(self.compacted, forgotten)
        return change

    def listen(self, listener: Callable[[Change], None]) -> None:
        """Call the listener at each change of any object."""
        self._listeners.append(listener)

    def select(self, kind: tuple[str, str], namespace: str = "") -> Iterator[tuple[Key, Object]]:
        """Yield the objects of a kind in the order of their keys."""
        yield from self.at(kind, namespace, self.version)

    def at(self, kind: tuple[str, str], namespace: str, version: int) -> Iterator[tuple[Key, Object]]:
        """Yield the objects of a kind as they were at a version."""
        held = dict(self.objects[kind])
        for change in reversed(self._changes):
            if change.version <= version:
                break
            if change.key[:2] == kind:
                if change.before is None:
                    held.pop(change.key, None)
                else:
                    held[change.key] = change.before
        for key in sorted(held):
            if not namespace or key[2] == namespace:
                yield key, held[key]

    def since(self, kind: tuple[str, str], version: int) -> list[Change]:
        """Return the changes of a kind after a version, oldest first."""
        found: list[Change] = []
        for change in reversed(self._changes):
            if change.version <= version:
                break
            if change.key[:2] == kind:
                found.append(change)
        return found[::-1]

    def subscribe(self, kind: tuple[str, str]) -> Feed:
        """Return a feed of the changes of a kind from now on."""
        feed = Feed()
        self._feeds[id(feed)] = (kind, feed)
        return feed

    def unsubscribe(self, feed: Feed) -> None:
        """End a feed."""
        self._feeds.pop(id(feed), None)

    def end_watches(self, kind: tuple[str, str] | None = None) -> int:
        """End the watches of a kind, or all; return their number."""
        ended = [feed for watched, feed in self._feeds.values() if kind in (None, watched)]
        for feed in ended:
            feed.changes.put_nowait(None)
        return len(ended)

    @property
    def watchers(self) -> int:
        """Return the number of open watches."""
        return len(self._feeds)

    def compact(self, cached: bool = True) -> None:
        """Forget the history: with `cached`, watches of all kinds too, and not only what is read from the storage."""
        self.compacted = self.version
        if cached:
            self.version += 1
            self.watch_floor = self.version
