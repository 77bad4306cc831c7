"""The cache of one kind of object: listed and watched objects in, contents and changes out. It does no I/O.

A resource version is opaque: two of them are only ever compared for equality. The order of the events of one watch is
the server's order, so the store takes each event as it comes, and ignores events of a watch that has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, Literal, Protocol, TypeVar, cast

import msgspec
from msgspec.structs import replace

from kvroute.kube.api.objects import ObjectMeta


class StoredObject(Protocol):
    """A Struct of an object of the API server."""

    @property
    def metadata(self) -> ObjectMeta:
        """Its name and version."""


Object = TypeVar("Object", bound=StoredObject)
Key = tuple[str, str]
"""Namespace and name; the namespace is empty for nodes."""


EventKind = Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]


class WatchEvent(msgspec.Struct, frozen=True):
    """One line of a watch; `object` is an object, or a `Status` if the type is ERROR."""

    type: EventKind
    object: msgspec.Raw = msgspec.Raw(b"{}")


class ObjectStore(Generic[Object]):
    """Objects by key, and the point from which a watch can continue.

    The caller lists if `version` is empty, and else watches from `version`. Each attempt begins with `attempt`, whose
    result accompanies everything that the attempt brings; what an earlier attempt brings late is ignored.
    """

    def __init__(self, keep: Callable[[Object], Object] = lambda found: found) -> None:
        """Args: `keep` reduces an object to what the cache holds."""
        self._keep = keep
        self._objects: dict[Key, Object] = {}
        self._attempt = 0
        self.version = ""
        """Resource version to watch from; empty: a list is needed."""
        self.synced = False
        """Whether a list has succeeded. It stays true in an outage: the contents are then those of its beginning."""

    @property
    def objects(self) -> Mapping[Key, Object]:
        """The objects; the mapping changes with later calls."""
        return self._objects

    def attempt(self) -> int:
        """Begin a list or a watch, and return its number."""
        self._attempt += 1
        return self._attempt

    def listed(self, attempt: int, found: Iterable[Object], version: str) -> frozenset[Key]:
        """Replace the contents by those of a complete list, and return the keys of what has changed."""
        if attempt != self._attempt:
            return frozenset()
        new = {_key(obj): obj for obj in found}
        gone = self._objects.keys() - new.keys()
        changed = {key for key, obj in new.items() if self._put(key, obj)}
        self._objects = {key: self._objects[key] for key in new}
        self.version, self.synced = version, True
        return frozenset(changed | gone)

    def watched(self, attempt: int, kind: EventKind, found: Object) -> frozenset[Key]:
        """Apply an event of a watch, and return the key of the object if it has changed."""
        if attempt != self._attempt or not self.version:
            return frozenset()
        self.version = found.metadata.resource_version or self.version
        key = _key(found)
        if kind == "BOOKMARK":
            return frozenset()
        if kind != "DELETED":
            return frozenset((key,)) if self._put(key, found) else frozenset()
        known = self._objects.get(key)
        if known is None or known.metadata.uid != found.metadata.uid:
            return frozenset()
        del self._objects[key]
        return frozenset((key,))

    def expired(self) -> None:
        """Note that the server no longer knows `version`; the contents stay until the next list."""
        self.version = ""

    def _put(self, key: Key, found: Object) -> bool:
        """Store an object; return whether what is kept of it differs from before, apart from its resource version."""
        known = self._objects.get(key)
        version = found.metadata.resource_version
        if known is not None and (known.metadata.uid, known.metadata.resource_version) == (found.metadata.uid, version):
            return False
        kept = self._objects[key] = self._keep(found)
        return (
            known is None
            or replace(cast(Any, known), metadata=replace(known.metadata, resource_version=version)) != kept
        )


def _key(found: StoredObject) -> Key:
    return found.metadata.namespace, found.metadata.name
