"""What plays the kubelet: pods are placed, become ready, end when they may, and gates hold them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from tests.kube.apiserver.server import Server, Settings
from tests.kube.client import MERGE, ApiClient
from tests.kube.kubelet import Kubelets
from tests.waiting import HANGS_S

PODS = "/api/v1/namespaces/default/pods"
NODES = "/api/v1/nodes"


@asynccontextmanager
async def cluster(may_end: Callable[[Mapping[str, Any]], bool] = lambda pod: True) -> AsyncIterator[ApiClient]:
    """Yield a client of a cluster with two nodes in two zones, and kubelets."""
    server = Server(Settings())
    url = await server.start()
    try:
        async with ApiClient(url) as client:
            for zone in ("a", "b"):
                await client.must("POST", NODES, {"metadata": {"name": f"n-{zone}", "labels": {"zone": zone}}})
            running = asyncio.create_task(Kubelets(client, may_end=may_end).run())
            try:
                yield client
            finally:
                running.cancel()
                with suppress(asyncio.CancelledError):
                    await running
    finally:
        await server.stop()


def pod(name: str, **spec: Any) -> dict[str, Any]:
    """Return a pod."""
    return {"metadata": {"name": name}, "spec": {"containers": [{"name": "w", "image": "x:1"}], **spec}}


async def until(client: ApiClient, path: str, condition: Callable[[int, Any], bool]) -> Any:
    """Return an object once it meets a condition."""
    while True:
        status, found = await client.send("GET", path)
        if condition(status, found):
            return found
        await asyncio.sleep(0.01)


def is_ready(status: int, found: Any) -> bool:
    """Return whether a pod is ready."""
    conditions = found.get("status", {}).get("conditions") or []
    return status == 200 and any(part["type"] == "Ready" and part["status"] == "True" for part in conditions)


def run(scenario: Callable[[], Any]) -> None:
    """Run a scenario within the limit."""
    asyncio.run(asyncio.wait_for(scenario(), HANGS_S))


def test_a_pod_gets_a_fitting_node_and_an_address_and_becomes_ready() -> None:
    """nodeSelector decides, and two pods have two addresses."""

    async def scenario() -> None:
        async with cluster() as client:
            for name in ("p", "q"):
                await client.must("POST", PODS, pod(name, nodeSelector={"zone": "b"}))
            found = [await until(client, f"{PODS}/{name}", is_ready) for name in ("p", "q")]
            assert [bound["spec"]["nodeName"] for bound in found] == ["n-b", "n-b"]
            assert len({bound["status"]["podIP"] for bound in found}) == 2

    run(scenario)


def test_a_gated_pod_waits() -> None:
    """It is bound when its gate is removed, and no earlier."""

    async def scenario() -> None:
        async with cluster() as client:
            await client.must("POST", PODS, pod("gated", schedulingGates=[{"name": "x.example/y"}]))
            await client.must("POST", PODS, pod("free"))
            await until(client, f"{PODS}/free", is_ready)
            assert "nodeName" not in (await client.must("GET", f"{PODS}/gated"))["spec"]
            await client.must("PATCH", f"{PODS}/gated", {"spec": {"schedulingGates": None}}, MERGE)
            await until(client, f"{PODS}/gated", is_ready)

    run(scenario)


def test_a_deleted_pod_stays_terminating_until_it_may_end() -> None:
    """It has a deletionTimestamp and its address while it drains, and is gone afterwards."""
    drained: list[str] = []

    async def scenario() -> None:
        async with cluster(lambda candidate: candidate["metadata"]["name"] in drained) as client:
            await client.must("POST", PODS, pod("p"))
            await until(client, f"{PODS}/p", is_ready)
            await client.must("DELETE", f"{PODS}/p")
            found = await client.must("GET", f"{PODS}/p")
            assert found["metadata"]["deletionGracePeriodSeconds"] == 30
            assert found["status"]["podIP"]
            drained.append("p")
            await until(client, f"{PODS}/p", lambda status, _: status == 404)

    run(scenario)


def test_kubelets_go_on_after_dropped_watches_and_lost_history() -> None:
    """Pods that are created around a cut connection and a 410 become ready all the same."""

    async def scenario() -> None:
        async with cluster() as client:
            for number, fault in enumerate(("drop-watches", "compact", "end-watches")):
                await client.must("POST", PODS, pod(f"before-{number}"))
                await client.must("POST", f"/_control/{fault}")
                await client.must("POST", PODS, pod(f"after-{number}"))
                for name in ("before", "after"):
                    await until(client, f"{PODS}/{name}-{number}", is_ready)

    run(scenario)
