"""API keys: who a client is, by the hash of its key; it never keeps, logs or repeats a key itself.

A key is drawn with 256 random bits, so one round of SHA-256 is the right hash: salts and slow hashes protect passwords
that can be guessed, and 2^256 values cannot, whatever the speed of guessing.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Annotated, TypeAlias

from msgspec import Meta, field

from kvroute.topology.assembly import read_text
from kvroute.topology.document import read_mapping
from kvroute.topology.schema import Count, Entry, Name
from kvroute.types import InputError

KeyHash: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^sha256:[0-9a-f]{64}\Z",
        examples=["the line that `kvroute key new` prints: sha256:..."],
        extra={"secret": True},
    ),
]
PREFIX = "kvr_"
_KEY_BYTES = 32
_LONGEST_KEY = 4096


class KeySettings(Entry, frozen=True, kw_only=True):
    """Whose requests are served; neither `file` nor `known`: everybody's."""

    file: str | None = None
    """Lines `name: sha256:...`."""
    known: dict[Name, KeyHash] = field(default_factory=dict)
    concurrency: dict[Name, Count] = field(default_factory=dict)
    """Requests at once of a key, in place of `limits.per_key`."""
    tenants: dict[Name, Name] = field(default_factory=dict)
    """The tenant of a key, for `cache_salt: per-tenant`; a key that is not listed is a tenant of its own."""


def new_key(random_bytes: bytes) -> tuple[str, str]:
    """A key of 32 random bytes, as a client sends it, and its hash, as a file keeps it."""
    assert len(random_bytes) == _KEY_BYTES, "draw 256 bits"
    key = PREFIX + base64.urlsafe_b64encode(random_bytes).rstrip(b"=").decode()
    return key, hash_text(key)


def hash_text(key: str) -> str:
    """`sha256:` and the hexadecimal hash of a key."""
    return f"sha256:{sha256(key.encode()).hexdigest()}"


class Keys:
    """Names by key. Compares the hash of what a client shows with every hash known, each in constant time."""

    __slots__ = ("_digests", "_seen")

    def __init__(self, hashes: Mapping[str, str]) -> None:
        """`hashes` by name, as `sha256:<64 hexadecimal digits>`; of equal ones the first name counts."""
        self._digests = [(name, bytes.fromhex(text.removeprefix("sha256:"))) for name, text in hashes.items()]
        self._seen: dict[bytes, str] = {}
        """Digests found before: at most as many as are known, and of use to nobody who lacks the key."""

    @classmethod
    def of(cls, settings: KeySettings) -> Keys:
        """The keys of the settings and of their file.

        Raises:
            InputError: the file cannot be read or has no such form, a name stands in both, or there are no keys at all.
        """
        hashes = dict(settings.known)
        if settings.file is not None:
            for name, text in read_key_file(Path(settings.file)).items():
                if name in hashes:
                    mend = "keep it in one place"
                    raise InputError(f"the key {name!r} is in `known` as well", where=settings.file, mend=mend)
                hashes[name] = text
            if not hashes:
                mend = "add a line that `kvroute key new NAME` prints, or leave `keys` out"
                raise InputError("the file holds no key, and nobody could be served", where=settings.file, mend=mend)
        return cls(hashes)

    @property
    def required(self) -> bool:
        """Whether a request needs a key."""
        return bool(self._digests)

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in the order of the file."""
        return tuple(name for name, _ in self._digests)

    def name_of(self, authorization: bytes | None) -> str | None:
        """Whose key an `Authorization: Bearer ...` header shows; None: nobody's, answer 401."""
        if authorization is None or len(authorization) > _LONGEST_KEY:
            return None
        scheme, _, key = authorization.strip().partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        digest = sha256(key.strip()).digest()
        return self._seen.get(digest) or self._search(digest)

    def _search(self, digest: bytes) -> str | None:
        found = None
        for name, known in self._digests:
            if hmac.compare_digest(known, digest) and found is None:
                found = name
        if found is not None:
            self._seen[digest] = found
        return found


def read_key_file(path: Path) -> dict[str, str]:
    """Hashes by name of a key file: lines `name: sha256:...`.

    Raises:
        InputErrors: every fault with its line; what stands in place of a hash is not repeated.
        InputError: the file cannot be read.
    """
    begin = "begin with a line that `kvroute key new NAME` prints"
    hashes, _ = read_mapping(read_text(path), str(path), dict[Name, KeyHash], begin)
    return hashes
