"""Opens a store by its location: a folder, or the URL of Redis or of an S3 bucket."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from kvroute_engine.block_store.format import BlockFormat
from kvroute_engine.block_store.interface import BlockStore, StoreError
from kvroute_engine.block_store.posix import PosixStore, PosixStoreSpec

_SCHEMES = ("redis", "rediss", "unix", "s3")
_REDIS = "kvroute_engine.block_store.redis_backend"
_BACKENDS = {"s3": "kvroute_engine.block_store.s3_backend"}
"""Modules that need a library; of all other URLs it is Redis's."""


@dataclass(frozen=True, slots=True)
class StoreLocation:
    """Where blocks are stored: `/folder`, `redis://host:6379/0`, `s3://bucket/prefix?endpoint=http://host:9000`."""

    text: str
    capacity_bytes: int
    """Capacity of a folder; Redis and S3 evict by their own rules."""
    verify: bool = True
    """Whether reads compare checksums."""
    fsync: bool = False

    def check(self) -> None:
        """Check what can be checked before the format of the blocks is known.

        Raises:
            StoreError: an empty text, an unknown scheme, a missing name, a library that is not installed, or a folder
                in which no file can be created.
        """
        scheme = self._scheme()
        if not self.text:
            raise StoreError("the location of the store is empty", hint="write a folder, or the URL of Redis or S3")
        if scheme == "s3" and not urlsplit(self.text).netloc:
            raise StoreError("the bucket is missing", where=self.text, hint="write s3://bucket/prefix")
        if scheme:
            import_module(_BACKENDS.get(scheme, _REDIS))
            return
        folder = Path(self.text)
        trial = folder / ".kvroute-write-test"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            trial.touch()
            trial.unlink()
        except OSError as error:
            hint = "choose a folder in which this user may create files"
            raise StoreError(f"the store cannot be written ({error.strerror})", where=self.text, hint=hint) from error

    def open(self, form: BlockFormat, name: str, share: int = 1) -> BlockStore:
        """Open the part `name` of the store, or create it.

        Args:
            form: format of its blocks.
            name: one word.
            share: number of parts, which divide the capacity.

        Raises:
            StoreError: the store fails, cannot be written, or has blocks of another format.
        """
        scheme, url = self._scheme(), urlsplit(self.text)
        if not scheme:
            settings = PosixStoreSpec(capacity_bytes=self.capacity_bytes // share, fsync=self.fsync, verify=self.verify)
            return PosixStore(Path(self.text) / name, form, settings)
        if scheme == "s3":
            from kvroute_engine.block_store.s3_backend import s3_store

            endpoint = next(iter(parse_qs(url.query).get("endpoint", [])), None)
            prefix = "/".join(part for part in (url.path.strip("/"), name) if part)
            return s3_store(url.netloc, prefix, form, verify=self.verify, endpoint=endpoint)
        from kvroute_engine.block_store.redis_backend import redis_store

        return redis_store(self.text, f"kvroute:{name}:", form, verify=self.verify)

    def _scheme(self) -> str:
        """Return the scheme of a URL; empty: a folder."""
        scheme, separator, _ = self.text.partition("://")
        if not separator:
            return ""
        if scheme not in _SCHEMES:
            raise StoreError(
                f"{scheme}:// is not a known kind of store",
                where=self.text,
                hint=f"write a folder, or a URL that begins with {', '.join(f'{known}://' for known in _SCHEMES)}",
            )
        return scheme
