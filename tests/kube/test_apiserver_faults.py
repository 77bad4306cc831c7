"""Faults that tests inject into the API server, and the list of requests that it keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from tests.kube.apiserver.requests import User
from tests.kube.apiserver.server import Server, Settings
from tests.kube.client import MERGE, ApiClient
from tests.waiting import HANGS_S

CONFIG_MAPS = "/api/v1/namespaces/default/configmaps"
ROLES = "/apis/rbac.authorization.k8s.io/v1/namespaces/default/roles"
BINDINGS = "/apis/rbac.authorization.k8s.io/v1/namespaces/default/rolebindings"
OPERATOR = "system:serviceaccount:default:op"


def served(scenario: Callable[[ApiClient, Server], Awaitable[None]]) -> None:
    """Run a scenario against a server."""

    async def run() -> None:
        server = Server(Settings())
        url = await server.start()
        server.access.tokens["op"] = User(OPERATOR, groups=("system:serviceaccounts", "system:authenticated"))
        try:
            async with ApiClient(url) as client:
                await scenario(client, server)
        finally:
            await server.stop()

    asyncio.run(asyncio.wait_for(run(), HANGS_S))


def config_map(name: str) -> dict[str, Any]:
    """Return a ConfigMap."""
    return {"metadata": {"name": name}, "data": {"a": "1"}}


@pytest.mark.parametrize(("code", "reason"), [(500, "InternalError"), (503, "ServiceUnavailable"), (504, "Timeout")])
def test_a_request_fails_as_often_as_asked_for(code: int, reason: str) -> None:
    """Two matching requests fail and nothing is stored; the third passes, and other verbs are not concerned."""

    async def scenario(client: ApiClient, server: Server) -> None:
        await client.must("POST", "/_control/faults", {"verbs": ["create"], "code": code, "count": 2})
        for _ in range(2):
            status, found = await client.send("POST", CONFIG_MAPS, config_map("c"))
            assert (status, found["reason"], found["code"]) == (code, reason, code)
            assert (await client.must("GET", CONFIG_MAPS))["items"] == []
        await client.must("POST", CONFIG_MAPS, config_map("c"))

    served(scenario)


def test_429_comes_with_retry_after_as_object_or_text() -> None:
    """The text is what priority and fairness answers."""

    async def scenario(client: ApiClient, server: Server) -> None:
        await client.must("POST", "/_control/faults", {"verbs": ["list"], "code": 429, "retry_after_s": 7})
        await client.must("POST", "/_control/faults", {"verbs": ["list"], "code": 429, "text": True})
        status, found = await client.send("GET", CONFIG_MAPS)
        assert (status, found["reason"], found["details"]) == (429, "TooManyRequests", {"retryAfterSeconds": 7})
        assert await client.send("GET", CONFIG_MAPS) == (429, "Too many requests, please try again later.\n")

    served(scenario)


def test_a_lost_answer_leaves_the_write() -> None:
    """With `after` the object is stored although the client sees a failure or a closed connection."""

    async def scenario(client: ApiClient, server: Server) -> None:
        await client.must("POST", "/_control/faults", {"verbs": ["create"], "code": 504, "after": True})
        assert (await client.send("POST", CONFIG_MAPS, config_map("late")))[0] == 504
        await client.must("POST", "/_control/faults", {"verbs": ["create"], "drop": True, "after": True})
        with pytest.raises(aiohttp.ClientError):
            await client.send("POST", CONFIG_MAPS, config_map("cut"))
        listed = await client.must("GET", CONFIG_MAPS)
        assert [item["metadata"]["name"] for item in listed["items"]] == ["cut", "late"]

    served(scenario)


def test_a_delayed_request_waits_while_others_go_on() -> None:
    """The delayed read ends after a write that was sent later."""
    ended: list[str] = []

    async def scenario(client: ApiClient, server: Server) -> None:
        await client.must("POST", "/_control/faults", {"verbs": ["get"], "resource": "namespaces", "delay_s": 0.5})

        async def ask(name: str, method: str, path: str, body: Any = None) -> None:
            await client.must(method, path, body)
            ended.append(name)

        slow = asyncio.create_task(ask("slow", "GET", "/api/v1/namespaces/default"))
        while not server.audit or server.audit[-1]["resource"] != "namespaces":
            await asyncio.sleep(0.005)
        await ask("quick", "POST", CONFIG_MAPS, config_map("c"))
        await slow
        assert ended == ["quick", "slow"]

    served(scenario)


def test_frozen_storage_stops_writes_and_lets_watches_and_cached_reads_go_on() -> None:
    """A write gets 504 at the limit, or is carried out when the storage comes back in time."""

    async def scenario(client: ApiClient, server: Server) -> None:
        made = await client.must("POST", CONFIG_MAPS, config_map("c"))
        await client.must("POST", "/_control/freeze", {"timeout_s": 0.1})
        assert (await client.send("PATCH", f"{CONFIG_MAPS}/c", {"data": {"a": "2"}}, MERGE))[0] == 504
        assert (await client.must("GET", f"{CONFIG_MAPS}?resourceVersion=0"))["items"] != []
        assert (await client.send("GET", "/readyz"))[0] == 500
        await client.must("POST", "/_control/freeze", {"timeout_s": 60.0})
        events = client.events(CONFIG_MAPS, f"resourceVersion={made['metadata']['resourceVersion']}")
        waiting = asyncio.create_task(client.must("PATCH", f"{CONFIG_MAPS}/c", {"data": {"a": "3"}}, MERGE))
        seen = asyncio.ensure_future(anext(events))
        while not server.store.watchers:
            await asyncio.sleep(0.005)
        await client.must("POST", "/_control/thaw")
        assert (await waiting)["data"] == {"a": "3"}
        assert (await seen)["object"]["data"] == {"a": "3"}
        await events.aclose()

    served(scenario)


def test_a_fault_of_another_form_is_refused() -> None:
    """A misspelt field does not become a fault that never matches."""

    async def scenario(client: ApiClient, server: Server) -> None:
        status, text = await client.send("POST", "/_control/faults", {"verb": "create"})
        assert status == 400
        assert "verb" in text

    served(scenario)


def test_a_service_account_may_do_what_its_role_says_and_the_list_of_requests_shows_it() -> None:
    """Least privilege can be tested: 403 with the API server's sentence, and every verb that was used."""

    async def scenario(client: ApiClient, server: Server) -> None:
        rule = {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get", "watch"], "resourceNames": ["c"]}
        await client.must("POST", ROLES, {"metadata": {"name": "r"}, "rules": [rule]})
        subject = {"kind": "ServiceAccount", "name": "op", "namespace": "default"}
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "r"}
        await client.must("POST", BINDINGS, {"metadata": {"name": "b"}, "subjects": [subject], "roleRef": reference})
        await client.must("POST", CONFIG_MAPS, config_map("c"))
        await client.must("POST", "/_control/clear-audit")
        async with ApiClient(server.url, "op") as operator:
            await operator.must("GET", f"{CONFIG_MAPS}/c")
            for method, path in (("GET", f"{CONFIG_MAPS}/other"), ("DELETE", f"{CONFIG_MAPS}/c"), ("GET", CONFIG_MAPS)):
                status, found = await operator.send(method, path)
                assert status == 403
                assert f'User "{OPERATOR}" cannot' in found["message"]
        requests = (await client.must("GET", "/_control/audit"))["requests"]
        used = [(entry["user"], entry["verb"], entry["resource"], entry["namespace"]) for entry in requests]
        assert used == [
            (OPERATOR, verb, "configmaps", "default") for verb in ("get", "get", "delete", "list")
        ]  # fmt: skip

    served(scenario)


def test_an_unchanged_answer_has_no_content_type() -> None:
    """The cache of kubectl would take it for the type of the discovery document that it keeps."""

    async def run() -> None:
        server = Server(Settings())
        url = await server.start()
        accepted = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
        wanted = {"Accept": accepted, "Authorization": "Bearer admin"}
        try:
            async with aiohttp.ClientSession(url, headers=wanted) as session:
                async with session.get("/apis") as first:
                    assert first.status == 200
                async with session.get("/apis", headers={"If-None-Match": first.headers["ETag"]}) as second:
                    assert second.status == 304
                    assert "Content-Type" not in second.headers
        finally:
            await server.stop()

    asyncio.run(asyncio.wait_for(run(), HANGS_S))
