"""Keeps a store equal to the API server: list, watch, resume, relist, and wait while the server is away."""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

import httpx2
import msgspec
from lightkube.core.exceptions import ConfigError

from kvroute.kube.api.requests import (
    HEADERS,
    ApiRefused,
    Resource,
    Selection,
    Status,
    close_client,
    lines_of,
    refusal_of,
)
from kvroute.kube.api.store import Key, Object, ObjectStore, WatchEvent
from kvroute.types import InputError

FAILURES = (
    httpx2.HTTPError,
    httpx2.StreamError,
    httpx2.InvalidURL,
    OSError,
    ssl.SSLError,
    msgspec.MsgspecError,
    ConfigError,
    InputError,
)
"""How a request to an API server fails that gets no answer of it."""
_GONE = 410
ABSENT = 404
"""Status of a list whose kind the server does not have."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Limits and intervals, in seconds."""

    watch_s: float = 60.0
    """Mean length of a watch. A server that is gone without a word is noticed at its end."""
    silence_s: float = 10.0
    """How long after the end of a watch, and in any other answer, the server may be silent."""
    retry_first_s: float = 0.2
    retry_max_s: float = 5.0
    """Highest pause between two attempts: how long after its return an API server is used again."""
    absent_max_s: float | None = None
    """Highest pause between two attempts while the server has no such kind; None: `retry_max_s`."""
    short_watch_s: float = 1.0
    """A watch that ends earlier without an event counts as a failure."""
    page: int = 500
    """Objects in one answer to a list."""


DEFAULT_TIMING = Timing()


class Informer(Generic[Object]):
    """Follows the objects of one kind until it is cancelled."""

    def __init__(
        self,
        connect: Callable[[], httpx2.AsyncClient],
        resource: Resource[Object],
        selection: Selection,
        store: ObjectStore[Object],
        on_change: Callable[[frozenset[Key]], None],
        timing: Timing = DEFAULT_TIMING,
    ) -> None:
        """
        Args:
            connect: opens a connection; called again after each failure, so that new credentials are read.
            on_change: called after each list, and after each event that has changed the store, with the keys of what
                has changed.
        """
        self._connect, self._resource, self._selection = connect, resource, selection
        self._store, self._on_change, self._timing = store, on_change, timing
        self._random = random.Random()
        self._client: httpx2.AsyncClient | None = None
        self._pages = True
        self._failures = 0
        self.failure = ""
        """Why the last attempt failed, in one sentence; empty while the server answers."""
        self.refused = 0
        """HTTP status with which the server refused the last attempt; 0: it did not refuse."""

    async def run(self) -> None:
        """List, then watch, for ever. No failure of the server ends it; the store keeps its contents meanwhile."""
        try:
            while True:
                pause_s = await self._attempt()
                if pause_s:
                    await self._disconnect()
                    await asyncio.sleep(pause_s)
        finally:
            await self._disconnect()

    async def list_once(self) -> None:
        """List once, as for a command that ends.

        Raises:
            InputError: the server is not reachable or refuses, in one sentence.
        """
        attempt = self._store.attempt()
        client = self._connect()
        try:
            await self._list(client, attempt)
        except ApiRefused as refused:
            self.refused = refused.status
            what = f"the API server refuses to list {self._resource.plural}: {refused}"
            raise InputError(what, where=str(client.base_url), hint="check the namespace and the RBAC rules") from None
        except FAILURES as error:
            what = f"the API server cannot be reached ({_sentence(error)})"
            raise InputError(what, where=str(client.base_url), hint="check its address and the network") from None
        finally:
            await close_client(client)

    async def _attempt(self) -> float:
        """List or watch once, and return the pause before the next attempt, in seconds."""
        try:
            attempt = self._store.attempt()
            self._client = self._client or self._connect()
            if not self._store.version:
                await self._list(self._client, attempt)
                return 0.0
            if await self._watch(self._client, attempt):
                self._failures = 0
                return 0.0
            return self._failed("the server ends every watch at once", 0)
        except ApiRefused as refused:
            if refused.status == _GONE:
                self._pages = self._pages and bool(self._store.version)
            if refused.status == _GONE or self._failures >= 3:
                self._store.expired()
            pause_s = self._failed(str(refused), refused.status)
            return 0.0 if refused.status == _GONE and self._failures == 1 else max(pause_s, refused.retry_after_s)
        except FAILURES as error:
            return self._failed(_sentence(error), 0)

    def _failed(self, why: str, status: int) -> float:
        """Note a failure, and return the pause after it."""
        self.failure, self.refused = why, status
        self._failures += 1
        absent_max_s = self._timing.absent_max_s
        max_s = absent_max_s if status == ABSENT and absent_max_s is not None else self._timing.retry_max_s
        longest_s = min(self._timing.retry_first_s * 2.0 ** min(self._failures - 1, 20), max_s)
        return longest_s * self._random.uniform(0.5, 1.0)

    def _answered(self) -> None:
        self.failure, self.refused = "", 0

    async def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await close_client(client)

    async def _list(self, client: httpx2.AsyncClient, attempt: int) -> None:
        """Fetch all objects, page by page."""
        parameters = self._selection.parameters()
        if self._pages:
            parameters["limit"] = str(self._timing.page)
        timeout = httpx2.Timeout(self._timing.silence_s)
        found: list[Object] = []
        while True:
            response = await client.get(
                self._resource.url(self._selection.namespace), params=parameters, headers=HEADERS, timeout=timeout
            )
            if response.status_code != 200:
                raise refusal_of(response)
            page = self._resource.decode_list(response.content)
            found += page.items or ()
            if not page.metadata.continue_:
                break
            parameters["continue"] = page.metadata.continue_
        self._pages = True
        self._answered()
        self._on_change(self._store.listed(attempt, found, page.metadata.resource_version))

    async def _watch(self, client: httpx2.AsyncClient, attempt: int) -> bool:
        """Watch until the server ends it; return whether that was no failure."""
        wanted_s = max(1, round(self._timing.watch_s * self._random.uniform(0.75, 1.25)))
        parameters = self._selection.parameters() | {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._store.version,
            "timeoutSeconds": str(wanted_s),
        }
        timeout = httpx2.Timeout(self._timing.silence_s, read=wanted_s + self._timing.silence_s)
        url = self._resource.url(self._selection.namespace)
        began_s = time.monotonic()
        events = 0
        async with client.stream("GET", url, params=parameters, headers=HEADERS, timeout=timeout) as response:
            if response.status_code != 200:
                await response.aread()
                raise refusal_of(response)
            self._answered()
            try:
                async for line in lines_of(response.aiter_bytes()):
                    events += 1
                    self._apply(attempt, msgspec.json.decode(line, type=WatchEvent))
            finally:
                if time.monotonic() - began_s >= self._timing.short_watch_s:
                    self._failures = 0  # however it has ended: the next attempt is the first after a good one
        return events > 0 or time.monotonic() - began_s >= self._timing.short_watch_s

    def _apply(self, attempt: int, event: WatchEvent) -> None:
        if event.type == "ERROR":
            status = msgspec.json.decode(event.object, type=Status)
            raise ApiRefused(status.code, status.message)
        found = msgspec.json.decode(event.object, type=self._resource.kind)
        changed = self._store.watched(attempt, event.type, found)
        self._failures = 0
        if changed:
            self._on_change(changed)


def _sentence(error: BaseException) -> str:
    return " ".join((str(error) or type(error).__name__).split())
