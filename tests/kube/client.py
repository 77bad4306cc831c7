"""A small client of the API, for tests and for what plays the kubelet: requests, and watches that go on for ever."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from types import TracebackType
from typing import Any

import aiohttp

MERGE = "application/merge-patch+json"
APPLY = "application/apply-patch+yaml"


class ApiClient:
    """Sends requests as one user. `send` returns failures as it returns answers: status and body."""

    def __init__(self, url: str, token: str = "admin", context: ssl.SSLContext | None = None) -> None:
        self.url = url
        self._context = context
        self._token = token
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> ApiClient:
        headers = {"Authorization": f"Bearer {self._token}", "User-Agent": "tests/1"}
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(headers=headers, timeout=timeout)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def send(self, method: str, path: str, body: Any = None, media: str = "application/json") -> tuple[int, Any]:
        """Return the status of an answer, and its JSON value or text."""
        assert self._session is not None
        data = None if body is None else json.dumps(body)
        ssl_context = self._context if self._context is not None else True
        headers: Mapping[str, str] = {"Content-Type": media}
        async with self._session.request(
            method, self.url + path, data=data, headers=headers, ssl=ssl_context
        ) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if answer.content_type == "application/json" else text

    async def must(self, method: str, path: str, body: Any = None, media: str = "application/json") -> Any:
        """Return the body of a successful answer; raise AssertionError for a failure."""
        status, found = await self.send(method, path, body, media)
        assert status < 300, f"{method} {path}: {status} {found}"
        return found

    async def events(self, path: str, query: str = "") -> AsyncGenerator[Any]:
        """Yield the events of one watch until it ends."""
        assert self._session is not None
        ssl_context = self._context if self._context is not None else True
        async with self._session.get(f"{self.url}{path}?watch=1&{query}", ssl=ssl_context) as answer:
            async for line in answer.content:
                yield json.loads(line)

    async def changes(self, path: str) -> AsyncIterator[tuple[str, Any]]:
        """Yield type and object of each change of a collection, for ever: dropped watches are resumed, 410 lists anew.

        After a list every object comes as ADDED, so a receiver must be idempotent.
        """
        version = ""
        while True:
            try:
                if not version:
                    listed = await self.must("GET", path)
                    version = listed["metadata"]["resourceVersion"]
                    for found in listed["items"]:
                        yield "ADDED", found
                async for event in self.events(path, f"resourceVersion={version}&timeoutSeconds=300"):
                    if event.get("type") == "ERROR" or event.get("kind") == "Status":
                        version = ""
                        break
                    version = event["object"]["metadata"]["resourceVersion"]
                    yield event["type"], event["object"]
            except aiohttp.ClientError:
                continue
