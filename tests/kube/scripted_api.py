"""A small API server for transport cases: lists, watches and any raw answer, byte by byte as the test wants it."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

Document = dict[str, Any]


def status(code: int, reason: str, message: str = "") -> Document:
    """Return the body of an error."""
    return {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message or reason}


def answer(code: int, body: bytes, kind: str = "application/json", *more: str) -> bytes:
    """Return a whole HTTP response; `more`: further header lines."""
    lines = [f"HTTP/1.1 {code} Any", f"Content-Type: {kind}", f"Content-Length: {len(body)}", *more]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@dataclass
class ScriptedApi:
    """Pods and nodes with list, paging, watch, bookmarks and 410.

    Resource versions are those of a counter, written so that neither their text nor their length is in order.
    """

    objects: dict[str, dict[str, Document]] = field(default_factory=lambda: {"pods": {}, "nodes": {}})
    history: list[tuple[str, str, Document]] = field(default_factory=list)
    floor: int = 0
    """Watches from before this number are answered with 410."""
    token: str = ""
    """Bearer token that requests need; empty: none."""
    answers: deque[bytes] = field(default_factory=deque)
    """Raw answers to the next requests, after each of which the connection is closed."""
    refusals: dict[str, bytes] = field(default_factory=dict)
    """Raw answer to every request for objects of a kind."""
    requests: list[str] = field(default_factory=list)
    mute: bool = False
    """Whether requests get no answer, and open watches send nothing."""
    port: int = 0
    _server: asyncio.Server | None = None
    _connections: set[asyncio.StreamWriter] = field(default_factory=set)
    _watches: set[asyncio.StreamWriter] = field(default_factory=set)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen; on the same port again after `stop`."""
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    @property
    def listening(self) -> bool:
        """Whether it takes connections."""
        return self._server is not None

    async def stop(self) -> None:
        """Close all connections, and refuse new ones."""
        assert self._server is not None
        self._server.close()
        self._server = None
        for writer in list(self._connections):
            writer.close()
        await self.drop_watches()

    async def drop_watches(self) -> None:
        """Close all watches without a last chunk."""
        for writer in list(self._watches):
            writer.close()
        await self._notify()

    async def put(self, plural: str, document: Document) -> None:
        """Create or replace an object."""
        name = document["metadata"]["name"]
        kind = "MODIFIED" if name in self.objects[plural] else "ADDED"
        self.objects[plural][name] = document
        await self._record(plural, kind, document)

    async def delete(self, plural: str, name: str) -> None:
        """Delete an object."""
        await self._record(plural, "DELETED", self.objects[plural].pop(name))

    async def expire(self) -> None:
        """Forget all history, and end all watches."""
        self.history.append(("leases", "MODIFIED", {}))
        self.floor = len(self.history)
        await self.drop_watches()

    def watching(self, plural: str) -> int:
        """Return the number of requests for watches so far."""
        return sum(f"/{plural}?" in request and "watch=1" in request for request in self.requests)

    def listing(self, plural: str) -> int:
        """Return the number of requests for lists so far."""
        return sum(f"/{plural}" in request and "watch=1" not in request for request in self.requests)

    async def _record(self, plural: str, kind: str, document: Document) -> None:
        stamped = {**document, "metadata": {**document["metadata"], "resourceVersion": version(len(self.history) + 1)}}
        self.history.append((plural, kind, stamped))
        if kind != "DELETED":
            self.objects[plural][document["metadata"]["name"]] = stamped
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.listening:  # it was accepted just before `stop`
            writer.close()
            return
        self._connections.add(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                text = head.decode()
                self.requests.append(text.split(" ")[1])
                if self.mute:
                    await reader.read()
                    break
                if self.answers:
                    writer.write(self.answers.popleft())
                    break
                if self.token and f"authorization: bearer {self.token}" not in text.lower():
                    writer.write(answer(401, json.dumps(status(401, "Unauthorized")).encode()))
                    continue
                await self._answer(self.requests[-1], writer)
                if writer.is_closing():
                    break
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._connections.discard(writer)
            self._watches.discard(writer)
            writer.close()

    async def _answer(self, target: str, writer: asyncio.StreamWriter) -> None:
        path, query = urlsplit(target).path, {key: value[0] for key, value in parse_qs(urlsplit(target).query).items()}
        plural = path.rpartition("/")[2]
        if plural in self.refusals:
            writer.write(self.refusals[plural])
            return
        if query.get("watch") == "1":
            await self._watch(plural, number(query["resourceVersion"]), float(query["timeoutSeconds"]), writer)
            return
        items = sorted(self.objects[plural].items())
        start, limit = int(query.get("continue", 0)), int(query.get("limit", len(items) + 1))
        metadata = {"resourceVersion": version(len(self.history))}
        if start + limit < len(items):
            metadata["continue"] = str(start + limit)
        page = {"metadata": metadata, "items": [document for _, document in items[start : start + limit]]}
        writer.write(answer(200, json.dumps(page).encode()))

    async def _watch(self, plural: str, at: int, timeout_s: float, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
        if at < self.floor:
            self._chunk(writer, {"type": "ERROR", "object": status(410, "Expired", "too old resource version")})
            writer.write(b"0\r\n\r\n")
            return
        self._watches.add(writer)
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not writer.is_closing() and (left_s := deadline - asyncio.get_running_loop().time()) > 0:
            for kind_of, kind, document in [] if self.mute else self.history[at:]:
                at += 1
                if kind_of == plural:
                    self._chunk(writer, {"type": kind, "object": document})
            try:
                async with asyncio.timeout(left_s), self._changed:
                    if len(self.history) == at and not writer.is_closing():
                        await self._changed.wait()
            except TimeoutError:
                break
        if not writer.is_closing() and not self.mute:
            bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": version(at)}}}
            self._chunk(writer, bookmark)
            writer.write(b"0\r\n\r\n")
        self._watches.discard(writer)

    def _chunk(self, writer: asyncio.StreamWriter, event: Document) -> None:
        """Write one event as two chunks, the first of which ends inside a character."""
        text = json.dumps(event, ensure_ascii=False).encode() + b"\n"
        middle = max(1, text.find(b"\xc2") + 1)
        for part in (text[:middle], text[middle:]):
            writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")


def version(count: int) -> str:
    """Return the resource version of a count of changes; its order is not that of numbers or texts."""
    return f"{(count * 7919) % 10007}x{count}"


def number(text: str) -> int:
    """Return the count of changes of a resource version."""
    return int(text.partition("x")[2])
