"""The block store in S3-compatible object storage, by obstore. Eviction follows the bucket's lifecycle rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from kvroute_engine.block_store.format import BlockFormat
from kvroute_engine.block_store.interface import StoreError
from kvroute_engine.block_store.values import ValueStore

try:
    import obstore
    from obstore.exceptions import AlreadyExistsError, BaseError
    from obstore.store import S3Store
except ImportError as missing:
    raise StoreError("a block store in S3 needs obstore", hint="install kvroute with its extra `store`") from missing

REQUESTS = 16
"""Requests of one store in flight."""
T = TypeVar("T")


def s3_store(
    bucket: str, prefix: str, form: BlockFormat, *, verify: bool = True, endpoint: str | None = None
) -> ValueStore:
    """Open the store below that prefix of a bucket. Credentials and region come from the usual variables (AWS_*).

    Raises:
        StoreError: the service fails, or the prefix has blocks of another format.
    """
    return ValueStore(S3Values(bucket, prefix, endpoint), form, f"s3://{bucket}/{prefix}", verify=verify)


class S3Values:
    """Values as objects. obstore is thread-safe and releases the GIL."""

    def __init__(self, bucket: str, prefix: str, endpoint: str | None) -> None:
        options: Any = {"endpoint": endpoint} if endpoint else {}
        client: Any = {"allow_http": (endpoint or "").startswith("http://")}
        self._client: Any = S3Store(bucket, prefix=prefix, client_options=client, **options)
        self._where = f"s3://{bucket}/{prefix}"
        self._pool = ThreadPoolExecutor(REQUESTS, "block-s3")

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Return the size of each value in bytes; None where there is none. See `Values`."""
        return self._each(self._size, names)

    def parts(self, names: Sequence[str], ranges: Sequence[tuple[int, int]]) -> list[list[memoryview]]:
        """Return parts of each value. See `Values`."""
        starts, lengths = [at for at, _ in ranges], [size for _, size in ranges]

        def fetched(name: str) -> list[memoryview]:
            try:
                found = obstore.get_ranges(self._client, name, starts=starts, lengths=lengths)
            except FileNotFoundError:
                return [memoryview(b"")] * len(ranges)
            return [memoryview(part) for part in found]

        return self._each(fetched, names)

    def create(self, name: str, value: Sequence[memoryview]) -> None:
        """Store a value unless it exists. See `Values`."""

        def put(name: str) -> None:
            try:
                obstore.put(self._client, name, b"".join(value), mode="create", use_multipart=False)
            except AlreadyExistsError:
                return

        self._each(put, [name])

    def _size(self, name: str) -> int | None:
        try:
            return int(obstore.head(self._client, name)["size"])
        except FileNotFoundError:
            return None

    def _each(self, action: Callable[[str], T], names: Iterable[str]) -> list[T]:
        try:
            return list(self._pool.map(action, names))
        except (BaseError, OSError) as error:
            why = str(error).strip().splitlines()[0]
            raise StoreError(f"the service failed ({why})", where=self._where, hint="check the service") from error
