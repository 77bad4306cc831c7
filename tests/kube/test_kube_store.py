"""Laws of the cache: whatever is lost, repeated or late, it ends with what the server has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from tests.kube.manifests import pod_document

from kvroute.kube.api.objects import KubePod
from kvroute.kube.api.store import EventKind, Key, ObjectStore

NAMES = st.sampled_from(["a", "b", "c"])


def version(count: int) -> str:
    """Return a version whose order is neither that of numbers nor that of texts."""
    return str((count * 7919) % 10007)


@dataclass
class Server:
    """Objects, and the events of all changes."""

    objects: dict[str, KubePod] = field(default_factory=dict)
    events: list[tuple[EventKind, KubePod]] = field(default_factory=list)
    floor: int = 0

    def change(self, name: str, kind: EventKind, ready: bool) -> None:
        if kind == "DELETED" and name not in self.objects:
            return
        number = len(self.events) + 1
        old = self.objects.get(name)
        uid = old.metadata.uid if old else f"uid-{number}"
        found = document(name, version(number), uid=uid, ready=ready)
        if kind == "DELETED":
            self.events.append(("DELETED", found))
            del self.objects[name]
        else:
            self.events.append(("MODIFIED" if old else "ADDED", found))
            self.objects[name] = found

    def index(self, at: str) -> int:
        return next(number for number in range(len(self.events) + 1) if version(number) == at)


def document(name: str, at: str, **changes: Any) -> KubePod:
    made = pod_document(name, **changes)
    made["metadata"]["resourceVersion"] = at
    return msgspec.convert(made, KubePod)


def listed(server: Server, store: ObjectStore[KubePod]) -> frozenset[Key]:
    return store.listed(store.attempt(), list(server.objects.values()), version(len(server.events)))


def watched(server: Server, store: ObjectStore[KubePod], limit: int) -> set[Key]:
    """Deliver up to `limit` events of a new watch, as a server does."""
    attempt, changed = store.attempt(), set[Key]()
    at = server.index(store.version)
    if at < server.floor:
        store.expired()
        return changed
    for kind, found in server.events[at : at + limit]:
        changed |= store.watched(attempt, kind, found)
    if at + limit > len(server.events):
        store.watched(
            attempt,
            "BOOKMARK",
            msgspec.convert({"metadata": {"resourceVersion": version(len(server.events))}}, KubePod),
        )
    return changed


STEPS = st.one_of(
    st.tuples(st.just("change"), NAMES, st.sampled_from(["MODIFIED", "DELETED"]), st.booleans()),
    st.tuples(st.just("watch"), st.integers(0, 3)),
    st.tuples(st.just("list")),
    st.tuples(st.just("compact")),
    st.tuples(st.just("late"), st.integers(0, 5)),
)


@given(st.lists(STEPS, max_size=30))
def test_any_history_ends_with_the_servers_objects(steps: list[tuple[Any, ...]]) -> None:
    """Watches that end in the middle, relists, compactions, and events of earlier watches; and each change of the
    contents is reported."""
    server, store = Server(), ObjectStore[KubePod]()
    seen: dict[Key, KubePod] = {}
    for step in [*steps, ("watch", 1000), ("watch", 1000)]:
        changed: set[Key] | frozenset[Key] = set()
        match step:
            case ("change", name, kind, ready):
                server.change(name, kind, ready)
            case ("list",):
                changed = listed(server, store)
            case ("watch", limit):
                changed = watched(server, store, limit) if store.version else listed(server, store)
            case ("compact",):
                server.floor = len(server.events)
            case ("late", back):
                stale = store.attempt()
                store.attempt()
                for kind, found in server.events[-back:]:
                    assert store.watched(stale, kind, found) == frozenset()
        now = dict(store.objects)
        differing = {key for key in now.keys() | seen.keys() if _state(now.get(key)) != _state(seen.get(key))}
        assert differing <= set(changed)
        seen = now
    assert dict(store.objects) == {("llm", name): found for name, found in server.objects.items()}


def _state(found: KubePod | None) -> object:
    return None if found is None else (found.metadata.uid, found.status, found.spec, found.metadata.labels)


@given(st.lists(st.tuples(NAMES, st.sampled_from(["MODIFIED", "DELETED"]), st.booleans()), max_size=12))
def test_repeated_events_change_nothing(changes: list[tuple[str, EventKind, bool]]) -> None:
    """The last events again, and a second identical list."""
    server, store = Server(), ObjectStore[KubePod]()
    listed(server, store)
    for change in changes:
        server.change(*change)
    watched(server, store, 1000)
    attempt = store.attempt()
    last = {found.metadata.name: (kind, found) for kind, found in server.events}
    assert [store.watched(attempt, kind, found) for kind, found in last.values() if kind != "DELETED"] == [
        frozenset() for kind, _ in last.values() if kind != "DELETED"
    ]
    assert listed(server, store) == frozenset()


def test_an_outage_keeps_the_contents() -> None:
    """A version that the server no longer knows needs a list, and until then nothing changes."""
    store = ObjectStore[KubePod]()
    assert not store.synced
    store.listed(store.attempt(), [document("a", "5")], "9")
    store.expired()
    assert store.synced
    assert store.version == ""
    assert list(store.objects) == [("llm", "a")]
    assert store.watched(store.attempt(), "DELETED", document("a", "6")) == frozenset()
    assert list(store.objects) == [("llm", "a")]


def test_only_what_is_kept_counts_as_a_change() -> None:
    """A heartbeat gives a new version of the same state; the watch continues from it."""
    store = ObjectStore[KubePod]()
    attempt = store.attempt()
    assert store.listed(attempt, [document("a", "5")], "9") == {("llm", "a")}
    assert store.watched(attempt, "MODIFIED", document("a", "10")) == frozenset()
    assert store.version == "10"
    assert store.watched(attempt, "MODIFIED", document("a", "11", ready=False)) == {("llm", "a")}


def test_the_name_of_a_new_object() -> None:
    """The deletion of an earlier object of the name does not remove it."""
    store = ObjectStore[KubePod]()
    attempt = store.attempt()
    store.listed(attempt, [document("a", "5", uid="new")], "9")
    assert store.watched(attempt, "DELETED", document("a", "10", uid="old")) == frozenset()
    assert store.watched(attempt, "DELETED", document("a", "11", uid="new")) == {("llm", "a")}
