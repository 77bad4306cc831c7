"""The informer against a server that breaks connections, expires versions, refuses and goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from tests.kube.kubeconfigs import kubeconfig
from tests.kube.manifests import node_document, pod_document
from tests.kube.scripted_api import ScriptedApi, answer, status
from tests.waiting import HANGS_S, until

from kvroute.kube.api.client import Access
from kvroute.kube.api.informer import Informer, Timing
from kvroute.kube.api.objects import KubePod
from kvroute.kube.api.requests import PODS, Selection
from kvroute.kube.api.store import Key, ObjectStore
from kvroute.types import InputError

FAST = Timing(watch_s=2.0, silence_s=1.0, retry_first_s=0.01, retry_max_s=0.05, short_watch_s=0.0, page=2)


@dataclass
class Rig:
    """A server and an informer of its pods."""

    api: ScriptedApi
    informer: Informer[KubePod]
    store: ObjectStore[KubePod]
    changes: list[frozenset[Key]] = field(default_factory=list)

    async def equal(self) -> None:
        """Wait until the cache has the server's objects."""
        await until(lambda: self._state() == self._truth())

    def _state(self) -> dict[str, str]:
        return {found.metadata.name: found.metadata.resource_version for found in self.store.objects.values()}

    def _truth(self) -> dict[str, str]:
        return {name: pod["metadata"]["resourceVersion"] for name, pod in self.api.objects["pods"].items()}


@asynccontextmanager
async def running(folder: Path, timing: Timing = FAST, user: dict[str, str] | None = None) -> AsyncIterator[Rig]:
    """Run an informer against a server that has pods a, b and c."""
    api = ScriptedApi()
    await api.start()
    for name in "abc":
        await api.put("pods", pod_document(name))
    store = ObjectStore[KubePod]()
    changes: list[frozenset[Key]] = []
    access = Access(kubeconfig(folder, api.url, user))
    informer = Informer(access.connect, PODS, Selection("llm"), store, changes.append, timing)
    rig = Rig(api, informer, store, changes)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(informer.run())
        try:
            yield rig
        finally:
            task.cancel()
    if api.listening:
        await api.stop()


Scenario = Callable[[Rig], Awaitable[None]]


def play(scenario: Scenario, folder: Path, timing: Timing = FAST, user: dict[str, str] | None = None) -> None:
    """Run a scenario, within a limit."""

    async def bounded() -> None:
        async with asyncio.timeout(HANGS_S), running(folder, timing, user) as rig:
            await scenario(rig)

    asyncio.run(bounded())


def test_list_in_pages_then_watch(tmp_path: Path) -> None:
    """All pages are one change, each event is another one, and a second watch continues the first."""

    async def scenario(rig: Rig) -> None:
        await rig.equal()
        assert rig.changes == [{("llm", "a"), ("llm", "b"), ("llm", "c")}]
        assert rig.api.listing("pods") == 2
        await rig.api.put("pods", pod_document("d"))
        await rig.api.put("pods", pod_document("a", ready=False))
        await rig.api.delete("pods", "b")
        await rig.equal()
        watches = rig.api.watching("pods")
        await until(lambda: rig.api.watching("pods") > watches)
        await rig.api.put("pods", pod_document("e"))
        await rig.equal()
        assert rig.api.listing("pods") == 2
        assert rig.informer.failure == ""

    play(scenario, tmp_path)


def test_dropped_watches_resume_and_expired_versions_relist(tmp_path: Path) -> None:
    """Changes during the gap are seen; the cache is never empty in between."""

    async def scenario(rig: Rig) -> None:
        await rig.equal()
        for number in range(20):
            await (rig.api.expire() if number % 3 == 0 else rig.api.drop_watches())
            await rig.api.put("pods", pod_document("abcd"[number % 4], restarts=number))
            if number % 5 == 4:
                await rig.api.delete("pods", "c" if "c" in rig.api.objects["pods"] else "a")
                await rig.api.put("pods", pod_document("a", uid=f"new-{number}"))
            assert rig.store.objects
        await rig.equal()

    play(scenario, tmp_path)


def test_cuts_of_quiet_watches_do_not_add_up(tmp_path: Path) -> None:
    """Each is resumed after the first pause, and not after one that doubles each time."""

    async def scenario(rig: Rig) -> None:
        await rig.equal()
        for _ in range(25):
            watches = rig.api.watching("pods")
            await rig.api.drop_watches()
            await until(lambda watches=watches: rig.api.watching("pods") > watches)  # type: ignore[misc]

    play(scenario, tmp_path, replace(FAST, watch_s=600.0, retry_first_s=0.001, retry_max_s=1e6))


def test_an_outage_changes_nothing(tmp_path: Path) -> None:
    """The last contents stay, and the first change after it is seen."""

    async def scenario(rig: Rig) -> None:
        await rig.equal()
        before = dict(rig.store.objects)
        await rig.api.stop()
        await until(lambda: rig.informer.failure != "")
        assert dict(rig.store.objects) == before
        assert rig.store.synced
        await rig.api.delete("pods", "a")
        await rig.api.start()
        await rig.equal()
        await until(lambda: rig.informer.failure == "")

    play(scenario, tmp_path)


REFUSALS = [
    answer(404, b"404 page not found\n", "text/plain; charset=utf-8"),
    answer(429, b"Too many requests", "text/plain", "Retry-After: 0"),
    answer(500, json.dumps(status(500, "InternalError", "etcd")).encode()),
    answer(504, b"{}"),
    answer(410, json.dumps(status(410, "Expired", "too old")).encode()),
    answer(200, b"{broken"),
    answer(200, b""),
    answer(200, b'{"metadata": {"resourceVersion": 3}}'),
    b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}",
    b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{"typ\r\n0\r\n\r\n',
    b"no HTTP\r\n\r\n",
    b"",
]


@pytest.mark.parametrize("number", range(len(REFUSALS)))
def test_any_answer_is_survived(number: int, tmp_path: Path) -> None:
    """To the list or to the watch, as text or cut off in the middle."""

    async def scenario(rig: Rig) -> None:
        await rig.equal()
        rig.api.answers.extend([REFUSALS[number]] * 3)
        await rig.api.expire()
        await rig.api.put("pods", pod_document("z"))
        await until(lambda: not rig.api.answers)
        await rig.equal()

    play(scenario, tmp_path)


def test_events_are_split_at_newlines_only(tmp_path: Path) -> None:
    """Line separators of Unicode may stand in a value, and a chunk may end inside a character."""

    async def scenario(rig: Rig) -> None:
        await rig.equal()
        strange = "a\u0085b\u2028c\u00e4"
        await rig.api.put("pods", pod_document("d", annotations={"kvroute.io/model": strange}))
        await rig.equal()
        assert rig.store.objects["llm", "d"].value("kvroute.io/model") == strange
        assert rig.informer.failure == ""
        assert rig.api.listing("pods") == 2

    play(scenario, tmp_path)


def test_a_rotated_token_is_read_again(tmp_path: Path) -> None:
    """From the file that the kubelet writes, and from a kubeconfig that has been replaced."""
    token = tmp_path / "token"
    token.write_text("one")

    async def scenario(rig: Rig) -> None:
        rig.api.token = "one"
        await rig.equal()
        rig.api.token = "two"
        await rig.api.expire()
        await rig.api.put("pods", pod_document("d"))
        await until(lambda: rig.informer.refused == 401)
        token.write_text("two")
        await rig.equal()
        rig.api.token = "three"
        await rig.api.expire()
        await until(lambda: rig.informer.refused == 401)
        kubeconfig(tmp_path, rig.api.url, {"token": "three"})
        await until(lambda: rig.informer.refused == 0)
        await rig.api.put("pods", pod_document("e"))
        await rig.equal()

    play(scenario, tmp_path, user={"tokenFile": str(token)})


def test_a_silent_server_is_left(tmp_path: Path) -> None:
    """A connection that stays open without a byte, as after the loss of a machine, ends with the watch."""

    async def scenario(rig: Rig) -> None:
        await rig.equal()
        rig.api.mute = True
        await rig.api.put("pods", pod_document("d"))
        await until(lambda: rig.informer.failure != "")
        rig.api.mute = False
        await rig.equal()

    play(scenario, tmp_path, replace(FAST, watch_s=1.0, silence_s=0.5))


def test_watches_that_end_at_once_are_failures(tmp_path: Path) -> None:
    """Otherwise the informer would ask without a pause."""

    async def scenario(rig: Rig) -> None:
        await rig.equal()
        rig.api.answers.extend([b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"] * 3)
        await rig.api.drop_watches()
        await until(lambda: rig.informer.failure == "the server ends every watch at once")
        await until(lambda: rig.informer.failure == "")

    play(scenario, tmp_path, replace(FAST, short_watch_s=1.0, retry_first_s=0.2))


def test_one_list_for_a_command(tmp_path: Path) -> None:
    """Returns the objects, or says in one sentence why not."""

    async def scenario() -> None:
        api = ScriptedApi()
        await api.start()
        await api.put("pods", pod_document("a"))
        await api.put("nodes", node_document("n"))
        store = ObjectStore[KubePod]()
        access = Access(kubeconfig(tmp_path, api.url))
        assert access.namespace() == "llm"
        informer = Informer(access.connect, PODS, Selection(labels="app=vllm"), store, lambda _: None, FAST)
        await informer.list_once()
        assert list(store.objects) == [("llm", "a")]
        assert api.requests == ["/api/v1/pods?labelSelector=app%3Dvllm&limit=2"]
        api.answers.append(answer(403, json.dumps(status(403, "Forbidden", "pods is forbidden")).encode()))
        with pytest.raises(InputError, match="refuses to list pods: 403: pods is forbidden"):
            await informer.list_once()
        await api.stop()
        with pytest.raises(InputError, match="cannot be reached"):
            await informer.list_once()

    asyncio.run(scenario())


@pytest.mark.parametrize("text", ["", "a: [", "{}", "[]", '{"current-context": "x", "contexts": [], "clusters": []}'])
def test_unusable_kubeconfigs(text: str, tmp_path: Path) -> None:
    """One sentence with the file."""
    path = tmp_path / "config"
    with pytest.raises(InputError, match=str(path)):
        Access(path).connect()
    path.write_text(text)
    with pytest.raises(InputError, match=str(path)):
        Access(path).connect()
