"""A cluster in processes for live tests: an API server, emulated engines as pods, and what serves them, by default
`kvroute serve --kubernetes`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import aiohttp
from aiohttp import web
from tests.kube.client import ApiClient
from tests.kube.kubeconfigs import kubeconfig
from tests.kube.kubelet import Kubelets
from tests.live.services import free_port
from tests.waiting import until

from kvroute import topology
from kvroute.emulator import EmulatedCluster, EmulatedClusterSpec
from kvroute.emulator.api.server import InstanceServer

ROOT = Path(__file__).resolve().parents[2]
PODS, NODES = "/api/v1/namespaces/llm/pods", "/api/v1/nodes"
GATEWAY_USER = "gateway"
MODEL = "llama-3-70b"
SLOTS = 8
"""Addresses of each role: how many pods of it can exist at a time."""
_PORT, _EVENTS, _REPLAY = 8000, 5557, 5558
_QUIET_S = 0.5
"""A pod that ends has had no request for this long, as an engine that drains."""
_KV_S = 20.0
"""Longest time after its last request for which a pod that ends waits until its KV has arrived elsewhere."""
_PATIENCE_S = 120.0
"""Time without progress after which an engine gives up a KV transfer: this machine may be busy with something else."""
_NETWORK = f"127.{9 + int(os.environ.get('PYTEST_XDIST_WORKER', 'gw0').removeprefix('gw'))}.0"
"""Network of the engines, another one in each process of a parallel test run."""
_TIMES = (
    "{default: {prefill: {kind: linear, per_token: 10 us, base: 5 ms}, decode: {base: 10 ms, per_request: 100 us}}}"
)
CLUSTER = f"""
name: live
timing: {_TIMES}
defaults: {{kv_capacity: 20 GB}}
discovery:
  node: {{gpus: 16, nics: {{compute: {{count: 8, capacity: 100 Gbps}}}}}}
  drain: 60 s
gateway:
  health: {{interval: 500 ms, timeout: 60 s}}
  log: {{level: info}}
"""
"""What the gateway reads; the source of its engines is on its command line. A busy machine may be slow to answer a
health check, which is no failure; an engine that has ended refuses the connection at once."""
RULES = [{"apiGroups": [""], "resources": ["pods", "nodes", "namespaces"], "verbs": ["get", "list", "watch"]}]


class ApiServer:
    """The API server as a process that can be killed and started again with its objects."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        """Start, and wait until it listens."""
        ready = self._folder / "api-ready.json"
        ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", "tests.kube.apiserver", "--port", str(self._port), "--ready", str(ready)]
        command += ["--journal", str(self._folder / "journal"), "--token", f"secret={GATEWAY_USER}"]
        self._process = subprocess.Popen(command, cwd=ROOT)
        await until(ready.exists)

    def kill(self) -> None:
        """End it with SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@dataclass(slots=True)
class Slot:
    """One address with an emulated engine, which one pod after the other uses."""

    server: InstanceServer
    role: str
    owner: str = ""
    """Uid of the pod that has the address, or had it last."""
    in_flight: int = 0
    last_s: float = 0.0
    """Time of the end of its last request."""
    arrivals: list[tuple[float, str]] = field(default_factory=list)
    """Time and owner at the arrival of each request for a completion."""

    @property
    def address(self) -> str:
        """The pod's IP."""
        return self.server.host

    def record(self) -> None:
        """Record all requests for completions from now on."""
        answer = self.server.answer

        async def recorded(server: InstanceServer, request: web.BaseRequest) -> web.StreamResponse:
            if not request.path.startswith("/v1/") or request.method != "POST":
                return await answer(server, request)
            self.arrivals.append((time.time(), self.owner))
            self.in_flight += 1
            try:
                return await answer(server, request)
            finally:
                self.in_flight -= 1
                self.last_s = time.time()

        self.server.answer = recorded


def pool_text() -> str:
    """Return the cluster file of all slots, each with an address of its own."""
    instances = []
    for number in range(2 * SLOTS):
        role, host = ("prefill", "decode")[number % 2], f"{_NETWORK}.{number + 1}"
        endpoint = f"url: http://{host}:{_PORT}, kv_events: tcp://{host}:{_EVENTS}, kv_replay: tcp://{host}:{_REPLAY}"
        instances.append(f'  - {{name: slot{number}, role: {role}, gpus: "n:{number}", endpoint: {{{endpoint}}}}}')
    node = f"{{name: n, gpus: {2 * SLOTS}, nics: {{compute: {{count: 8, capacity: 100 Gbps}}}}}}"
    head = f"name: pool\ntiming: {_TIMES}\ndefaults: {{model: {MODEL}, kv_capacity: 20 GB}}\n"
    return f"{head}nodes: [{node}]\ninstances:\n" + "\n".join(instances) + "\n"


@dataclass(slots=True)
class Rig:
    """Everything that runs, and when pods were deleted."""

    api: ApiServer
    client: ApiClient
    session: aiohttp.ClientSession
    slots: list[Slot]
    url: str = ""
    admin: str = ""
    pods: dict[str, Slot] = field(default_factory=dict)
    """Pods that exist and are not being deleted, by name."""
    deleted_s: dict[str, float] = field(default_factory=dict)
    """Time at which the server had begun to delete a pod, by uid."""
    ending: set[str] = field(default_factory=set)
    """Names of the pods that the server still has although they are being deleted."""
    slot_of: dict[str, Slot] = field(default_factory=dict)
    """Address of each pod that has been deleted."""
    count: int = 0

    async def join(self, role: str, **more: str) -> str:
        """Start the engine of the address that was freed last, and create a pod that gets this address.

        Args:
            more: further labels.
        """
        free = [slot for slot in self.slots if slot.role == role and slot not in self.pods.values()]
        slot = max((slot for slot in free if not self._held(slot)), key=lambda slot: slot.last_s)
        await slot.server.come_back()
        name, self.count = f"{role}-{self.count}", self.count + 1
        labels = {"kvroute.io/role": role, "kvroute.io/port": str(_PORT), "kvroute.io/model": MODEL, "app": "engine"}
        labels |= {"kvroute.io/kv-events-port": str(_EVENTS), "kvroute.io/kv-replay-port": str(_REPLAY)} | more
        metadata = {"name": name, "labels": labels, "annotations": {"test/address": slot.address}}
        spec = {"containers": [{"name": "engine", "image": "engine:1"}]}
        self.pods[name] = slot
        made = await self.client.must("POST", PODS, {"metadata": metadata, "spec": spec})
        slot.owner = made["metadata"]["uid"]
        return name

    def _held(self, slot: Slot) -> bool:
        """Whether a pod that is being deleted still has the address."""
        return any(name in self.ending and self.slot_of[name] is slot for name in self.slot_of)

    async def leave(self, name: str) -> None:
        """Begin to delete a pod; its kubelet ends it when it is idle."""
        slot = self.pods.pop(name)
        self.slot_of[name] = slot
        self.ending.add(name)
        uid = slot.owner
        await self.client.must("DELETE", f"{PODS}/{name}", {"gracePeriodSeconds": 60})
        self.deleted_s[uid] = time.time()

    def may_end(self, pod: Mapping[str, Any]) -> bool:
        """Whether the engine of a pod is idle, and its KV has arrived where it was fetched to; it then stops, before
        its pod disappears."""
        name = pod["metadata"]["name"]
        slot = self.slot_of.get(name)
        began_s = self.deleted_s.get(pod["metadata"]["uid"])
        if slot is None or began_s is None or slot.in_flight:
            return False
        idle_s, server = time.time() - max(slot.last_s, began_s), slot.server
        if idle_s < (_KV_S if server.engine.held or server.kv_server.deliveries else _QUIET_S):
            return False
        server.restart(3600.0)
        return True

    async def follow_ends(self) -> None:
        """Note which pods have disappeared, for ever."""
        while True:
            with suppress(aiohttp.ClientError):
                status, listed = await self.client.send("GET", PODS)
                if status == 200:
                    self.ending &= {item["metadata"]["name"] for item in listed["items"]}
            await asyncio.sleep(0.1)

    async def expected(self) -> dict[str, str]:
        """Return URL by name of each engine that the server's pods are."""
        listed = await self.client.must("GET", PODS)
        return {
            f"llm.{item['metadata']['name']}": f"http://{item['status']['podIP']}:{_PORT}"
            for item in listed["items"]
            if not item["metadata"].get("deletionTimestamp") and item["status"].get("podIP")
        }

    async def seen(self) -> dict[str, str]:
        """Return URL by name of each engine that the gateway has."""
        async with self.session.get(f"{self.admin}/state") as response:
            state = await response.json()
        return {instance["name"]: instance["url"] for instance in state["layout"]["instances"]}


async def _kubelets(rig: Rig) -> None:
    """Play the kubelets, also after an outage of the server."""

    def address(pod: Mapping[str, Any]) -> str:
        return str(pod["metadata"]["annotations"]["test/address"])

    while True:
        with suppress(aiohttp.ClientError):
            await Kubelets(rig.client, address, rig.may_end).run()
        await asyncio.sleep(0.05)


class Front(Protocol):
    """What clients talk to."""

    @property
    def rules(self) -> Sequence[Mapping[str, Any]]:
        """Rights of its user."""

    async def prepare(self, client: ApiClient) -> None:
        """Create what it needs beside pods and nodes."""

    def run(self, folder: Path, config: Path) -> AbstractAsyncContextManager[tuple[str, str]]:
        """Run it with a kubeconfig; yield its URL, and that of the admin port of kvroute."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """`kvroute serve --kubernetes`."""

    with_file: bool = True
    """Whether the command is started with a cluster file."""
    rules: Sequence[Mapping[str, Any]] = tuple(RULES)

    async def prepare(self, client: ApiClient) -> None:
        """See `Front`."""

    def run(self, folder: Path, config: Path) -> AbstractAsyncContextManager[tuple[str, str]]:
        """See `Front`."""
        return _gateway(folder, config, with_file=self.with_file)


async def _prepare(client: ApiClient, rules: Sequence[Mapping[str, Any]]) -> None:
    """Create the namespace, the rights of the gateway, and four nodes in two racks."""
    await client.must("POST", "/api/v1/namespaces", {"metadata": {"name": "llm"}})
    await client.must("POST", "/api/v1/namespaces/llm/serviceaccounts", {"metadata": {"name": "default"}})
    rbac = "/apis/rbac.authorization.k8s.io/v1"
    await client.must("POST", f"{rbac}/clusterroles", {"metadata": {"name": "gateway"}, "rules": list(rules)})
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "gateway"}
    subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": GATEWAY_USER}
    binding = {"metadata": {"name": "gateway"}, "roleRef": role, "subjects": [subject]}
    await client.must("POST", f"{rbac}/clusterrolebindings", binding)
    for number in range(4):
        labels = {"topology.kubernetes.io/rack": f"r{number % 2}", "topology.kubernetes.io/zone": "z"}
        await client.must("POST", NODES, {"metadata": {"name": f"n{number}", "labels": labels}})


@asynccontextmanager
async def serving(folder: Path, front: Front | None = None) -> AsyncIterator[Rig]:
    """Run everything with no pods yet; the standard error of kvroute goes to `gateway.log`.

    Args:
        front: None: `kvroute serve --kubernetes` with a cluster file.
    """
    front = front if front is not None else Gateway()
    api = ApiServer(folder)
    await api.start()
    tasks: list[asyncio.Task[None]] = []
    try:
        config = kubeconfig(folder, api.url, {"token": "secret"})
        (folder / "cluster.yaml").write_text(CLUSTER)
        settings = EmulatedClusterSpec(endpoints_from_file=True, kv_patience_s=_PATIENCE_S)
        async with (
            ApiClient(api.url) as client,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
            EmulatedCluster(topology.parse(pool_text()), settings) as fleet,
        ):
            await _prepare(client, front.rules)
            await front.prepare(client)
            slots = [Slot(server, server.role) for server in fleet.servers.values()]
            for slot in slots:
                slot.record()
                slot.server.restart(3600.0)  # down until a pod has its address
            rig = Rig(api, client, session, slots)
            tasks += [asyncio.create_task(_kubelets(rig)), asyncio.create_task(rig.follow_ends())]
            async with front.run(folder, config) as (rig.url, rig.admin):
                yield rig
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        api.kill()


@asynccontextmanager
async def _gateway(folder: Path, config: Path, *, with_file: bool) -> AsyncIterator[tuple[str, str]]:
    """Run `kvroute serve --kubernetes` and yield its URL and that of its admin port; check that it ends well."""
    file = [str(folder / "cluster.yaml")] if with_file else ["--namespace", "llm", "--selector", "app=engine"]
    async with kvroute(folder, ["serve", *file, "--kubernetes", "--kubeconfig", str(config)]) as found:
        yield found["url"], found["admin"]


@asynccontextmanager
async def kvroute(folder: Path, arguments: Sequence[str]) -> AsyncIterator[dict[str, str]]:
    """Run a command that serves on free ports, and yield what its ready file has; check that it ends well."""
    ready = folder / "gateway-ready.json"
    command = [sys.executable, "-m", "kvroute.cli.app", *arguments, "--ready-file", str(ready)]
    command += ["--port", "0", "--admin-port", "0", "--until-eof", "--log-format", "json"]
    with (folder / "gateway.log").open("wb") as log:
        environment = {**os.environ, "KUBECONFIG": "/nonexistent"}
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment)
        assert process.stdin is not None
        try:
            await until(lambda: ready.exists() or process.poll() is not None)
            assert process.poll() is None, (folder / "gateway.log").read_text()
            yield json.loads(ready.read_text())
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.to_thread(process.wait, 60)
            finally:
                process.stdin.close()
                process.kill()
                process.wait()
    assert process.returncode == 0, (folder / "gateway.log").read_text()
