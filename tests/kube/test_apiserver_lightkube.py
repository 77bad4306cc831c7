"""lightkube against the API server of the tests, with the synchronous and the asynchronous client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from lightkube import ApiError, AsyncClient, Client
from lightkube.models.core_v1 import Container, PodSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import ConfigMap, Node, Pod
from lightkube.types import PatchType
from tests.kube.apiserver.server import Server, Settings
from tests.kube.scenarios.lightkube import configuration
from tests.waiting import HANGS_S


@asynccontextmanager
async def served() -> AsyncIterator[Server]:
    """Yield a running server."""
    server = Server(Settings())
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def synchronous(calls: Callable[[Client, Server], None]) -> None:
    """Run calls of the synchronous client in a thread of their own."""

    async def scenario() -> None:
        async with served() as server:

            def make() -> None:
                with Client(configuration(server.url, "admin"), field_manager="test", trust_env=False) as client:
                    calls(client, server)

            await asyncio.to_thread(make)

    asyncio.run(asyncio.wait_for(scenario(), HANGS_S))


def asynchronous(calls: Callable[[AsyncClient, Server], Awaitable[None]]) -> None:
    """Run calls of the asynchronous client."""

    async def scenario() -> None:
        async with served() as server:
            client = AsyncClient(configuration(server.url, "admin"), field_manager="test", trust_env=False)
            try:
                await calls(client, server)
            finally:
                await client.aclose()

    asyncio.run(asyncio.wait_for(scenario(), HANGS_S))


def config_map(name: str, **data: str) -> ConfigMap:
    """Return a ConfigMap."""
    return ConfigMap(apiVersion="v1", kind="ConfigMap", metadata=ObjectMeta(name=name, labels={"a": "b"}), data=data)


def pod(name: str) -> Pod:
    """Return a pod."""
    return Pod(metadata=ObjectMeta(name=name), spec=PodSpec(containers=[Container(name="w", image="x:1")]))


def test_create_get_list_patch_and_delete() -> None:
    """Objects come back with what the server adds, lists select by label, and patches of three types apply."""

    def calls(client: Client, server: Server) -> None:
        created = client.create(pod("p"))
        assert created.metadata is not None
        assert created.metadata.uid
        assert created.spec is not None
        assert created.spec.restartPolicy == "Always"
        for number in range(3):
            client.create(config_map(f"c{number}", n=str(number)))
        listed = client.list(ConfigMap, labels={"a": "b"}, chunk_size=2)
        assert [found.metadata.name for found in listed if found.metadata] == ["c0", "c1", "c2"]
        client.patch(ConfigMap, "c0", {"data": {"m": "1"}}, patch_type=PatchType.MERGE)
        client.patch(ConfigMap, "c0", {"data": {"s": "1"}}, patch_type=PatchType.STRATEGIC)
        operation = [{"op": "remove", "path": "/data/n"}]
        patched = client.patch(ConfigMap, "c0", operation, patch_type=PatchType.JSON)
        assert patched.data == {"m": "1", "s": "1"}
        client.delete(ConfigMap, "c0")
        with pytest.raises(ApiError) as missing:
            client.get(ConfigMap, "c0")
        assert (missing.value.status.code, missing.value.status.reason) == (404, "NotFound")

    synchronous(calls)


def test_a_stale_replace_and_a_foreign_apply_are_conflicts() -> None:
    """Optimistic locking gives 409; so does the field of another manager, until the apply forces it."""

    def calls(client: Client, server: Server) -> None:
        old = client.create(config_map("c", n="1"))
        client.patch(ConfigMap, "c", {"data": {"n": "2"}}, patch_type=PatchType.MERGE)
        with pytest.raises(ApiError) as stale:
            client.replace(old)
        assert (stale.value.status.code, stale.value.status.reason) == (409, "Conflict")
        with pytest.raises(ApiError) as foreign:
            client.apply(config_map("c", n="3"), field_manager="other")
        assert foreign.value.status.code == 409
        found = client.apply(config_map("c", n="3"), field_manager="other", force=True)
        assert found.data == {"n": "3"}
        assert client.apply(config_map("c", n="3"), field_manager="other").data == {"n": "3"}

    synchronous(calls)


def test_a_watch_sees_every_change_across_an_ended_stream() -> None:
    """lightkube resumes from the last version, so that nothing is lost and nothing comes twice."""

    async def calls(client: AsyncClient, server: Server) -> None:
        first = await client.create(config_map("c", n="0"))
        assert first.metadata is not None
        await client.patch(ConfigMap, "c", {"data": {"n": "1"}}, patch_type=PatchType.MERGE)
        seen: list[tuple[str, str]] = []
        async for kind, found in client.watch(ConfigMap, resource_version=first.metadata.resourceVersion):
            number = (found.data or {})["n"]
            seen.append((kind, number))
            if kind == "DELETED":
                break
            if number == "2":
                server.store.end_watches()
            if number == "4":
                await client.delete(ConfigMap, "c")
            else:
                await client.patch(ConfigMap, "c", {"data": {"n": str(int(number) + 1)}}, patch_type=PatchType.MERGE)
        assert seen == [("MODIFIED", str(number)) for number in range(1, 5)] + [("DELETED", "4")]

    asynchronous(calls)


def test_a_watch_from_a_lost_version_is_410() -> None:
    """lightkube raises the ERROR event; a list gives a version to go on from."""

    async def calls(client: AsyncClient, server: Server) -> None:
        first = await client.create(config_map("c", n="0"))
        assert first.metadata is not None
        server.store.compact()
        with pytest.raises(ApiError) as lost:
            async for _ in client.watch(ConfigMap, resource_version=first.metadata.resourceVersion):
                pass
        assert (lost.value.status.code, lost.value.status.reason) == (410, "Expired")
        names = [found.metadata.name async for found in client.list(ConfigMap) if found.metadata]
        assert names == ["c"]

    asynchronous(calls)


def test_apply_creates_and_removes_what_is_left_out() -> None:
    """A label that a manager applied goes when it is no longer in the configuration; labels of others stay."""

    async def calls(client: AsyncClient, server: Server) -> None:
        await client.create(Node(metadata=ObjectMeta(name="n", labels={"kept": "1"})))
        wanted = Node(apiVersion="v1", kind="Node", metadata=ObjectMeta(name="n", labels={"mine": "1", "too": "1"}))
        await client.apply(wanted)
        wanted = Node(apiVersion="v1", kind="Node", metadata=ObjectMeta(name="n", labels={"mine": "1"}))
        found = await client.apply(wanted)
        assert found.metadata is not None
        assert found.metadata.labels == {"kept": "1", "mine": "1"}

    asynchronous(calls)
