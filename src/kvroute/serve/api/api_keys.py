"""API keys: identify a client by the hash of its key. The key itself is never stored, logged or repeated.

A key has 256 random bits, so one round of SHA-256 is the right hash: salts and slow hashes protect passwords that can
be guessed, and 2^256 values cannot be guessed at any speed.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Annotated, TypeAlias

from msgspec import Meta, field

from kvroute.topology.reading.assembly import read_text
from kvroute.topology.schema import Count, Entry, Name
from kvroute.types import InputError
from kvroute_engine.files.document import read_mapping

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
    """API keys of the clients that are served. With neither `file` nor `known`, every request is served."""

    file: str | None = None
    """Path of a file with lines `name: sha256:...`."""
    known: dict[Name, KeyHash] = field(default_factory=dict)
    concurrency: dict[Name, Count] = field(default_factory=dict)
    """Concurrent requests of a key, by its name; replaces `limits.per_key`."""
    classes: dict[Name, Name] = field(default_factory=dict)
    """Name of a key's class in `gateway.classes`; a key that is not listed has the class `default`."""
    tenants: dict[Name, Name] = field(default_factory=dict)
    """Tenant of a key, for `cache_salt: per-tenant`; a key that is not listed is its own tenant."""


def new_key(random_bytes: bytes) -> tuple[str, str]:
    """Return a key of 32 random bytes as a client sends it, and its hash as a key file stores it."""
    assert len(random_bytes) == _KEY_BYTES, "draw 256 bits"
    key = PREFIX + base64.urlsafe_b64encode(random_bytes).rstrip(b"=").decode()
    return key, hash_text(key)


def hash_text(key: str) -> str:
    """Return `sha256:` and the hexadecimal hash of a key."""
    return f"sha256:{sha256(key.encode()).hexdigest()}"


class Keys:
    """Names by key. Compares the hash of the key in a request with every known hash, each in constant time."""

    __slots__ = ("_digests", "_seen")

    def __init__(self, hashes: Mapping[str, str]) -> None:
        """Args: `hashes` by name, as `sha256:<64 hexadecimal digits>`; of equal hashes the first name counts."""
        self._digests = [(name, bytes.fromhex(text.removeprefix("sha256:"))) for name, text in hashes.items()]
        self._seen: dict[bytes, str] = {}
        """Digests found before: at most one per known key. A digest does not reveal its key."""

    @classmethod
    def of(cls, settings: KeySettings) -> Keys:
        """Return the keys of the settings and of their file.

        Raises:
            InputError: the file cannot be read or is malformed, a name is in both, or there are no keys at all.
        """
        hashes = dict(settings.known)
        if settings.file is not None:
            for name, text in read_key_file(Path(settings.file)).items():
                if name in hashes:
                    hint = "remove one of them"
                    raise InputError(f"the key {name!r} is also in `known`", where=settings.file, hint=hint)
                hashes[name] = text
            if not hashes:
                hint = "add a line that `kvroute key new NAME` prints, or leave `keys` out"
                raise InputError("the file has no key, so no request can be accepted", where=settings.file, hint=hint)
        return cls(hashes)

    @property
    def required(self) -> bool:
        """Whether a request needs a key."""
        return bool(self._digests)

    @property
    def names(self) -> tuple[str, ...]:
        """All names, first those of `known`, then those of the file."""
        return tuple(name for name, _ in self._digests)

    def name_in(self, headers: Sequence[tuple[bytes, bytes]]) -> str | None:
        """Return the name of the key in the headers of a request, whose names are in lower case. None: respond 401.

        The key is in `Authorization: Bearer ...`, or in `X-Api-Key`, in which Anthropic's SDKs send it.
        """
        found = dict(reversed(headers))  # of several, the first counts
        name = self.name_of(found.get(b"authorization"))
        if name is None and (key := found.get(b"x-api-key")) is not None:
            name = self.name_of(b"Bearer " + key)
        return name

    def name_of(self, authorization: bytes | None) -> str | None:
        """Return the name of the key in an `Authorization: Bearer ...` header; None for an unknown key (respond
        401)."""
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
    """Return the hashes by name of a key file with lines `name: sha256:...`.

    Raises:
        InputErrors: every fault with its line; an invalid hash is not repeated in the message.
        InputError: the file cannot be read.
    """
    begin = "begin with a line that `kvroute key new NAME` prints"
    hashes, _ = read_mapping(read_text(path), str(path), dict[Name, KeyHash], begin)
    return hashes
