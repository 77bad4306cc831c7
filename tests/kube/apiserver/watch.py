"""Watches: initial events, live events by selector, bookmarks, and the ends that the API server gives them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec
from tests.kube.apiserver.golang import GoError, parse_uint
from tests.kube.apiserver.reads import UNCACHED, check_list_options, selection
from tests.kube.apiserver.requests import Request
from tests.kube.apiserver.selectors import Selection
from tests.kube.apiserver.status import ApiError, Object, expired, internal, quoted, timed_out
from tests.kube.apiserver.store import Change, Feed, Store
from tests.kube.apiserver.tables import partial, table
from tests.kube.apiserver.views import Form, to_version

BOOKMARK_PERIOD_S = 60.0
BOOKMARK_BEFORE_END_S = 2.0
FUTURE_WAIT_S = 3.0
"""How long a watch with initial events waits for a resourceVersion from the future."""
DEFAULT_TIMEOUT_S = 1_800.0


@dataclass(frozen=True, slots=True)
class Begin:
    """How a watch begins: at a version, with or without initial events."""

    version: int
    initial: bool
    bookmark_after: bool
    bookmarks: bool
    timeout_s: float


def event_type(change: Change, selected: Selection, namespace: str) -> tuple[str, Object] | None:
    """Return the type and object of the event that a change is for a selection, or None."""
    if namespace and change.key[2] != namespace:
        return None
    before = change.before if change.before is not None and selected.matches(change.before) else None
    after = change.after if change.after is not None and selected.matches(change.after) else None
    if after is not None:
        return ("ADDED" if before is None else "MODIFIED"), after
    if before is None:
        return None
    metadata = {**before["metadata"], "resourceVersion": str(change.version)}
    return "DELETED", {**before, "metadata": metadata}


class Watch:
    """One watch: `open` checks the options, `lines` yields what is sent."""

    def __init__(self, store: Store, request: Request, form: Form) -> None:
        self._store = store
        self._request = request
        self._form = form
        self._selected = selection(request)
        self._columns_sent = False
        self._at = 0
        self._begin = self._options()

    def _options(self) -> Begin:
        request = self._request
        check_list_options(request, watching=True)
        timeout_s = request.number("timeoutSeconds")
        text = request.option("resourceVersion")
        try:
            version = parse_uint(text) if text else 0
        except GoError as error:
            raise internal(f"resourceVersion: Invalid value: {quoted(text)}: {error}") from None
        sending = request.flag("sendInitialEvents")
        listed = "sendInitialEvents" in request.query
        bookmarks = request.flag("allowWatchBookmarks")
        initial = sending if listed else version == 0
        return Begin(version, initial, sending and bookmarks, bookmarks, timeout_s or DEFAULT_TIMEOUT_S)

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield chunks of whole lines, one event a line, until the watch ends."""
        feed = self._store.subscribe(self._request.resource.stored_in)
        try:
            async for chunk in self._events(feed):
                yield chunk
        finally:
            self._store.unsubscribe(feed)

    async def _events(self, feed: Feed) -> AsyncIterator[bytes]:
        end = asyncio.get_running_loop().time() + self._begin.timeout_s
        try:
            first = await self._first(feed)
        except ApiError as error:
            yield self._line("ERROR", error.body())
            return
        if first:
            yield b"".join(first)
        async for chunk in self._live(feed, end):
            yield chunk

    async def _first(self, feed: Feed) -> list[bytes]:
        """Return the events before live ones: the present state, or the changes since a version."""
        begin, store = self._begin, self._store
        kind = self._request.resource.stored_in
        if begin.initial:
            if begin.version > store.version:
                await self._await_version(begin.version)
            self._at = store.version
            lines = [
                self._line("ADDED", found)
                for _, found in store.select(kind, self._request.where_namespace())
                if self._selected.matches(found)
            ]
            if begin.bookmark_after:
                lines.append(self._bookmark({"k8s.io/initial-events-end": "true"}))
            return lines
        self._at = begin.version
        if kind in UNCACHED and begin.version < store.compacted:
            raise expired("The resourceVersion for the provided watch is too old.")
        if begin.version < store.watch_floor:
            raise expired(f"too old resource version: {begin.version} ({store.watch_floor})")
        return [line for change in store.since(kind, begin.version) if (line := self._change(change))]

    async def _await_version(self, version: int) -> None:
        limit = asyncio.get_running_loop().time() + FUTURE_WAIT_S
        while self._store.version < version:
            if asyncio.get_running_loop().time() > limit:
                current = self._store.version
                raise timed_out(f"Too large resource version: {version}, current: {current}")
            await asyncio.sleep(0.05)

    async def _live(self, feed: Feed, end: float) -> AsyncIterator[bytes]:
        """Yield live events; several that are ready go into one chunk."""
        loop = asyncio.get_running_loop()
        marked = self._at
        short = self._begin.timeout_s < BOOKMARK_PERIOD_S
        bookmark_at = end - BOOKMARK_BEFORE_END_S if short else loop.time() + BOOKMARK_PERIOD_S
        while True:
            due = min(end, bookmark_at) if self._begin.bookmarks else end
            try:
                async with asyncio.timeout_at(due):
                    change = await feed.changes.get()
            except TimeoutError:
                if loop.time() >= end:
                    return
                if self._at > marked:
                    marked = self._at
                    yield self._bookmark(None)
                bookmark_at = loop.time() + BOOKMARK_PERIOD_S
                continue
            lines = []
            while change is not None:
                if line := self._change(change):
                    lines.append(line)
                if feed.changes.empty():
                    break
                change = feed.changes.get_nowait()
            if lines:
                marked = self._at
                yield b"".join(lines)
            if change is None:
                return

    def _change(self, change: Change) -> bytes:
        """Return the line of a change, empty if it is not for this watch."""
        if change.version <= self._at:
            return b""
        self._at = change.version
        found = event_type(change, self._selected, self._request.where_namespace())
        return self._line(*found) if found else b""

    def _bookmark(self, annotations: Object | None) -> bytes:
        resource = self._request.resource
        metadata: Object = {"resourceVersion": str(self._at)}
        if annotations:
            metadata["annotations"] = annotations
        found = {"kind": resource.kind, "apiVersion": resource.api_version, "metadata": metadata}
        return _encoded("BOOKMARK", found)

    def _line(self, kind: str, found: Object) -> bytes:
        if kind == "ERROR":
            return _encoded(kind, found)
        shown = to_version(self._request.resource, found)
        if self._form.wanted == "Table":
            metadata = {"resourceVersion": shown["metadata"]["resourceVersion"]}
            include = self._request.option("includeObject")
            shown = table(self._request.resource, [shown], metadata, include, columns=not self._columns_sent)
            self._columns_sent = True
        elif self._form.wanted == "PartialObjectMetadata":
            shown = partial(shown)
        return _encoded(kind, shown)


def _encoded(kind: str, found: Object) -> bytes:
    return msgspec.json.encode({"type": kind, "object": found}) + b"\n"
