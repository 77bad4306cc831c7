"""The whole chain from a node's label to a decision: API server, operator, webhook, kubelets, engines and a gateway."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web
from tests.commands import kvroute_command
from tests.kube.kubeconfigs import kubeconfig
from tests.kube.kubelet import running
from tests.kube.label_volume import Volume
from tests.kube.operator.cluster_examples import node
from tests.kube.operator.operator_rig import GATEWAY_TOKEN, Rig, add_webhooks, installed, plain
from tests.kube.resources.router_examples import Manifest, topology
from tests.serve.rig import RunningGateway
from tests.serve.stub_engines import Engine, serving

from kvroute.kube.admission.injection import MOUNTED_AT, VOLUME
from kvroute.serve.lifecycle.deployment import Deployment
from kvroute_engine.topology_labels.worker import WAIT_S

NIXL = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
NETWORK = f"127.{64 + os.getpid() % 64}.{os.getpid() // 64 % 256}"
"""Loopback addresses of engines: engines listen on port 8000, and another process may run the same tests."""
_POLL_S = 0.05


def engine_pod(name: str, role: str, **metadata: Any) -> Manifest:
    """Return a pod with vLLM, as a user writes it."""
    container = {
        "name": "engine",
        "image": "vllm/vllm-openai:v0.11.0",
        "args": ["--model=llama-3-70b", "--port=8000", f"--kv-transfer-config={NIXL}"],
    }
    labels = {"app": "engine", "kvroute.io/role": role}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "serving", "labels": labels} | metadata,
        "spec": {"containers": [container]},
    }


@dataclass(slots=True)
class Machine:
    """What the kubelet does for one pod: its label volume, its init containers, and an engine behind its address."""

    rig: Rig
    folder: Path
    name: str
    address: str
    wait_s: float
    stderr: list[str] = field(default_factory=list)
    """What init containers that failed have written, one entry for each start."""
    engine: Engine | None = None
    """The engine, once its containers run."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment of the engine's container."""

    async def run(self) -> None:
        """Play the kubelet for this pod until cancelled."""
        pod = await self.rig.get("Pod", self.name) or {}
        async with asyncio.TaskGroup() as group:
            if any(entry["name"] == VOLUME for entry in pod["spec"].get("volumes") or ()):
                volume = Volume(self.folder)
                volume.write(**_files(pod))
                group.create_task(self._follow(volume))
            for container in pod["spec"].get("initContainers") or ():
                while not await self._ends_well(container):
                    await asyncio.sleep(_POLL_S)
            [container] = pod["spec"]["containers"]
            self.environment = self._variables(container)
            async with self._engine(pod):
                status = {"status": running(pod, self.address, ready=True)}
                await self.rig.patch("Pod", self.name, status, "status")
                await asyncio.Event().wait()

    async def _follow(self, volume: Volume) -> None:
        """Write a new version of the volume after each change of the pod's labels."""
        written: Mapping[str, str] | None = None
        while True:
            pod = await self.rig.get("Pod", self.name)
            files = _files(pod) if pod else None
            if files is not None and files != written:
                volume.write(**files)
                written = files
            await asyncio.sleep(_POLL_S)

    async def _ends_well(self, container: Manifest) -> bool:
        """Run an init container as a process of its own; return whether its exit code is 0."""
        program, *arguments = container["command"]
        assert program == "kvroute"
        environment = os.environ | self._variables(container)
        process = await asyncio.create_subprocess_exec(
            *kvroute_command(*arguments), env=environment, stderr=asyncio.subprocess.PIPE
        )
        try:
            _, stderr = await process.communicate()
        except asyncio.CancelledError:
            process.kill()
            await process.wait()
            raise
        if process.returncode:
            self.stderr.append(stderr.decode())
        return process.returncode == 0

    def _variables(self, container: Manifest) -> dict[str, str]:
        """Return a container's environment, with the folder of this machine and a shorter wait."""
        values = {variable["name"]: variable.get("value", "") for variable in container.get("env") or ()}
        here = {name: str(self.folder) for name, value in values.items() if value == MOUNTED_AT}
        return values | here | {name: str(self.wait_s) for name in WAIT_S if name in values}

    @contextlib.asynccontextmanager
    async def _engine(self, pod: Manifest) -> AsyncIterator[None]:
        role = pod["metadata"]["labels"]["kvroute.io/role"]
        engine = Engine(self.name, role)
        runner = web.ServerRunner(web.Server(engine.handle, handler_cancellation=True), shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, self.address, 8000).start()
            self.engine = engine
            yield
        finally:
            await runner.cleanup()


def _files(pod: Manifest) -> dict[str, str]:
    """Return the files of the Downward API volume: one for each item, empty if the pod lacks the label."""
    labels = pod["metadata"].get("labels") or {}
    [volume] = [entry for entry in pod["spec"].get("volumes") or () if entry["name"] == VOLUME]
    return {
        item["path"]: labels.get(item["fieldRef"]["fieldPath"].partition("['")[2].removesuffix("']"), "")
        for item in volume["downwardAPI"]["items"]
    }


@dataclass
class Chain:
    """A cluster with the operator and its webhook, and machines for the pods of engines."""

    rig: Rig
    folder: Path
    stack: contextlib.AsyncExitStack
    wait_s: float
    machines: dict[str, Machine] = field(default_factory=dict)

    async def nodes(self, **racks: str) -> None:
        """Create one node for each keyword, in zone z1 and in this rack; an empty name: without a label of a rack."""
        for name, rack in racks.items():
            given = {"zone": "z1"} | ({"rack": rack} if rack else {})
            await self.rig.make(node(name, **given))

    async def user_creates(self, obj: Manifest) -> None:
        """Create an object as a user does, without the fields that the server chooses."""
        await self.rig.make(plain(obj))

    async def route(self, obj: Manifest) -> None:
        """Create a KvRouter, and wait until the operator and its webhook know it."""
        await self.user_creates(obj)
        await self.rig.until(partial(self.rig.get, "ConfigMap", "chat-cluster"))

    async def start(self, name: str, role: str, on: str) -> Machine:
        """Create the pod of an engine, bind it to a node, and play its kubelet."""
        await self.rig.make(engine_pod(name, role))
        await self.rig.bind(name, on)
        address = f"{NETWORK}.{len(self.machines) + 1}"
        machine = Machine(self.rig, self.folder / name, name, address, self.wait_s)
        self.machines[name] = machine
        task = asyncio.create_task(machine.run())
        self.stack.push_async_callback(_stopped, task)
        return machine

    async def engines(self, *names: str) -> None:
        """Wait until these engines run."""
        await self.rig.until(partial(self._run, names))

    async def _run(self, names: tuple[str, ...]) -> bool:
        return all(self.machines[name].engine is not None for name in names)

    async def gateway(self) -> RunningGateway:
        """Run a gateway on the cluster file that the operator has written, with the rights that it has given."""
        config = await self.rig.get("ConfigMap", "chat-cluster") or {}
        document = yaml.safe_load(config["data"]["cluster.yaml"])
        access = kubeconfig(self.folder, self.rig.server.url, {"token": GATEWAY_TOKEN})
        document["discovery"]["kubernetes"]["kubeconfig"] = str(access)
        document["gateway"] |= {
            "listen": {"port": 0},
            "admin": {"port": 0},
            "health": {"interval": "200 ms"},
            "scrape": {"interval": "200 ms"},
        }
        made = Deployment.of(yaml.safe_dump(document), str(self.folder / "cluster.yaml"))
        return await self.stack.enter_async_context(serving(made))


async def _stopped(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()


@contextlib.asynccontextmanager
async def chain(folder: Path, wait_s: float = 60.0, levels: Manifest | None = None) -> AsyncIterator[Chain]:
    """Run everything but nodes, KvRouters and engines.

    Args:
        folder: for label volumes and the gateway's files.
        wait_s: how long an init container waits for a label.
        levels: the ClusterTopology; default: zone and rack.
    """
    settings: dict[str, Any] = {"port": 0, "host": "127.0.0.1", "names": ("localhost",), "certificates_s": 0.1}
    async with installed() as rig, rig.operator(**settings) as operator, contextlib.AsyncExitStack() as stack:
        await rig.until(partial(_listens, operator))
        await add_webhooks(rig, operator.webhook_port)
        made = Chain(rig, folder, stack, wait_s)
        await rig.until(partial(_answers, rig, levels or topology()))
        yield made


async def _listens(operator: Any) -> bool:
    return bool(operator.webhook_port)


async def _answers(rig: Rig, obj: Manifest) -> bool:
    """Create the ClusterTopology, which the webhook admits once its certificate is trusted and its caches are full."""
    response = await rig.create(obj | {"metadata": {"name": obj["metadata"]["name"]}})
    return response.status_code == 201


def refused(response: Any) -> str:
    """Return the message of a refusal."""
    assert response.status_code in (400, 422), response.text
    return str(response.json()["message"])
