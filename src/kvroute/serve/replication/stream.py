"""The stream of one cluster in Redis: appends entries and reads those of all gateways in one order."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from kvroute.serve.config.replication import ReplicationSection, password_of

ENTRY_MAX_BYTES = 16 << 20
"""Largest entry; reports are far smaller."""
READ_MAX = 256
"""Maximum number of entries that one read returns."""
_BLOCK_S = 1.0
"""Time for which the server waits for an entry before it returns none."""
_FIELD = b"r"
_ID = re.compile(rb"\d{1,20}-\d{1,20}")
_NO_STREAM = "the server's answer is not that of a Redis stream"


class StreamError(Exception):
    """The server cannot be reached or refuses a command."""


class RedisStream:
    """Two connections to the server: one waits for entries, one writes. Every method raises StreamError.

    It uses redis-py's connections without its client, whose commands take several times as long.
    """

    def __init__(self, section: ReplicationSection, cluster: str) -> None:
        """Args: `cluster`: name of the cluster in its file. Nothing is connected before `open`."""
        self._key = f"kvroute:{section.cluster or cluster}:gateways"
        self._entries, self._timeout_s = section.entries, float(section.lease_s) / 2
        try:
            from redis.asyncio import ConnectionPool
            from redis.backoff import NoBackoff
            from redis.exceptions import RedisError
            from redis.retry import Retry
        except ImportError:
            raise StreamError("redis-py is not installed; install kvroute with its extra `serve`") from None
        self._faults = (RedisError, OSError, TimeoutError)
        try:
            password = password_of(section)
        except OSError as error:
            raise StreamError(f"{section.password_file} cannot be read ({error.strerror})") from error
        # A repeated command would append an entry twice and hide how long the server was away.
        # Without a timeout of its own, redis-py does not use `asyncio.wait_for`, which loses a cancellation that comes
        # together with the result (Python before 3.12).
        options: dict[str, Any] = {"protocol": 2, "retry": Retry(NoBackoff(), 0)}
        options |= {name: value for name, value in (("username", section.username), ("password", password)) if value}
        pool: Any = ConnectionPool.from_url(section.redis, **options)
        self._reader, self._writer = pool.make_connection(), pool.make_connection()

    async def open(self) -> str:
        """Connect. Return the id of the last entry, from which reading begins."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._reader.connect()
                await self._writer.connect()
        except self._faults as error:
            raise StreamError(str(error) or "the server does not answer") from error
        last = await self._run(self._reader, "XREVRANGE", self._key, "+", "-", "COUNT", 1)
        entries = _entries(last) if last else []
        return entries[0][0] if entries else "0-0"

    async def append(self, entry: bytes) -> None:
        """Append an entry; the oldest are removed."""
        await self._run(self._writer, "XADD", self._key, "MAXLEN", "~", self._entries, "*", _FIELD, entry)

    async def read(self, after: str) -> list[tuple[str, bytes]]:
        """Wait for entries after this id; return some of them with their ids, or none after a while."""
        block_ms = int(1e3 * _BLOCK_S)
        found = await self._run(
            self._reader, "XREAD", "COUNT", READ_MAX, "BLOCK", block_ms, "STREAMS", self._key, after
        )
        match found:
            case None | []:
                return []
            case [[bytes(), entries]]:
                return _entries(entries)
        raise StreamError(_NO_STREAM)

    async def _run(self, connection: Any, *command: Any) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s + _BLOCK_S):
                await connection.send_command(*command)
                return await connection.read_response()
        except self._faults as error:
            raise StreamError(str(error) or "the server does not answer") from error

    async def close(self) -> None:
        """Close the connections."""
        for connection in (self._reader, self._writer):
            await connection.disconnect(nowait=True)


def _entries(found: object) -> list[tuple[str, bytes]]:
    """Return the ids and the contents of the items of a stream.

    Raises:
        StreamError: it is no list of items.
    """
    entries = []
    for item in found if isinstance(found, list) else [None]:
        match item:
            case [bytes(number), list(fields) | (None as fields)] if _ID.fullmatch(number):
                entries.append((number.decode(), _value(fields or [])))
            case _:
                raise StreamError(_NO_STREAM)
    return entries


def _value(fields: list[object]) -> bytes:
    """The entry in the fields of an item; empty if another program wrote it, or it was deleted."""
    pairs = zip(fields[::2], fields[1::2], strict=False)
    return next((value for name, value in pairs if name == _FIELD and isinstance(value, bytes)), b"")
