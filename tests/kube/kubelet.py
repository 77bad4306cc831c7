"""What plays scheduler and kubelets: pods get a node and an address, become ready, and end."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from tests.kube.client import MERGE, ApiClient

FIRST_ADDRESS = ipaddress.IPv4Address("10.200.0.1")


def free_addresses() -> Callable[[Mapping[str, Any]], str]:
    """Return an allocator that gives each pod an address that no pod had before."""
    given = iter(range(1 << 16))

    def address(pod: Mapping[str, Any]) -> str:
        return str(FIRST_ADDRESS + next(given))

    return address


def running(pod: Mapping[str, Any], address: str, ready: bool) -> dict[str, Any]:
    """Return the status of a pod whose containers run."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    text = "True" if ready else "False"
    kinds = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")
    conditions = [
        {"type": kind, "status": text if kind in ("Ready", "ContainersReady") else "True", "lastTransitionTime": now}
        for kind in kinds
    ]
    states = [
        {
            "name": container["name"], "image": container["image"], "imageID": "", "ready": ready, "restartCount": 0,
            "started": True, "state": {"running": {"startedAt": now}}, "lastState": {},
        }
        for container in pod["spec"]["containers"]
    ]  # fmt: skip
    return {
        "phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "hostIP": "127.0.0.1", "startTime": now,
        "conditions": conditions, "containerStatuses": states,
    }  # fmt: skip


class Kubelets:
    """Schedules pods on nodes by nodeSelector, in turn, and plays the kubelets of all nodes.

    `address` gives a pod its address. A pod that is deleted ends when `may_end` says so; its endpoint goes on until
    then, as a real engine does that drains.
    """

    def __init__(
        self,
        client: ApiClient,
        address: Callable[[Mapping[str, Any]], str] | None = None,
        may_end: Callable[[Mapping[str, Any]], bool] = lambda pod: True,
        poll_s: float = 0.02,
    ) -> None:
        self._client = client
        self._address = address or free_addresses()
        self._may_end = may_end
        self._poll_s = poll_s
        self._turn = 0
        self._ending: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Act on every change of a pod, until cancelled."""
        try:
            async for kind, pod in self._client.changes("/api/v1/pods"):
                if kind != "DELETED":
                    await self._act(pod)
        finally:
            for task in self._ending:
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*self._ending, return_exceptions=True)

    async def _act(self, pod: Mapping[str, Any]) -> None:
        metadata = pod["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        if metadata.get("deletionTimestamp"):
            task = asyncio.create_task(self._end(path, pod))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        elif not pod["spec"].get("nodeName"):
            await self._bind(path, pod)
        elif pod["status"].get("phase") == "Pending":
            status = running(pod, self._address(pod), ready=True)
            body = {"metadata": {"uid": metadata["uid"]}, "status": status}
            await self._client.send("PATCH", f"{path}/status", body, MERGE)

    async def _bind(self, path: str, pod: Mapping[str, Any]) -> None:
        if pod["spec"].get("schedulingGates"):
            return
        nodes = await self._client.must("GET", "/api/v1/nodes")
        fitting = fits(nodes["items"], pod["spec"].get("nodeSelector") or {})
        if fitting:
            name = fitting[self._turn % len(fitting)]
            self._turn += 1
            metadata = {"name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
            body = {"metadata": metadata, "target": {"kind": "Node", "name": name}}
            await self._client.send("POST", f"{path}/binding", body)

    async def _end(self, path: str, pod: Mapping[str, Any]) -> None:
        """Delete a pod for good once it may end; a pod of the same name that follows it is left alone."""
        while not self._may_end(pod):
            await asyncio.sleep(self._poll_s)
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod["metadata"]["uid"]}}
        await self._client.send("DELETE", path, options)


def fits(nodes: Sequence[Mapping[str, Any]], selector: Mapping[str, str]) -> list[str]:
    """Return the names of the nodes that a nodeSelector allows."""
    return [
        str(node["metadata"]["name"])
        for node in nodes
        if not node["spec"].get("unschedulable")
        and all((node["metadata"].get("labels") or {}).get(key) == value for key, value in selector.items())
    ]
