"""The block store in Redis, by redis-py. Eviction follows the server's `maxmemory-policy`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvroute_engine.block_store.format import BlockFormat
from kvroute_engine.block_store.interface import StoreError
from kvroute_engine.block_store.values import ValueStore
from kvroute_engine.origins import without_url_secrets

try:
    import redis
except ImportError as missing:
    raise StoreError(
        "a block store in Redis needs redis-py", hint="install kvroute with its extra `store`"
    ) from missing


def redis_store(url: str, prefix: str, form: BlockFormat, *, verify: bool = True) -> ValueStore:
    """Open the store whose keys begin with that prefix, for example at `redis://host:6379/0` or `unix:///socket`.

    Raises:
        StoreError: the server fails, or the prefix has blocks of another format.
    """
    return ValueStore(RedisValues(url, prefix), form, f"{without_url_secrets(url)} {prefix}", verify=verify)


class RedisValues:
    """Values as strings of Redis. redis-py is thread-safe."""

    def __init__(self, url: str, prefix: str) -> None:
        self._client: Any = redis.Redis.from_url(url)
        self._url, self._prefix = without_url_secrets(url), prefix

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Return the size of each value in bytes; None where there is none. See `Values`."""
        return [size or None for size in self._all(lambda pipe: [pipe.strlen(self._prefix + name) for name in names])]

    def parts(self, names: Sequence[str], ranges: Sequence[tuple[int, int]]) -> list[list[memoryview]]:
        """Return parts of each value. See `Values`."""
        wanted = [(self._prefix + name, at, at + size - 1) for name in names for at, size in ranges]
        found = self._all(lambda pipe: [pipe.getrange(*part) for part in wanted])
        views = [memoryview(part) for part in found]
        return [views[at : at + len(ranges)] for at in range(0, len(views), len(ranges))]

    def create(self, name: str, value: Sequence[memoryview]) -> None:
        """Store a value unless it exists. See `Values`."""
        self._all(lambda pipe: pipe.set(self._prefix + name, b"".join(value), nx=True))

    def _all(self, fill: Callable[[Any], object]) -> list[Any]:
        """Send the commands that `fill` adds in one batch; return their results."""
        try:
            with self._client.pipeline(transaction=False) as pipe:
                fill(pipe)
                return list(pipe.execute())
        except redis.RedisError as error:
            raise StoreError(f"Redis failed ({error})", where=self._url, hint="check the server") from error
